"""What is known of every token: the two tables that the rest of the package reads.

`DRAWN` is what the sampler says of each token that it draws; `protocol.Draw`,
`protocol.ResultTokens`, `sequences.Drawn` and `records.Trajectory` hold exactly these.

`FIELDS` is what the rows of a batch may hold. A method that needs a new field costs a line there.
The tables decide how fields are laid into rows (`learner/batch_layout.py`) and placed on a mesh (`sharding.py`),
which shapes a program is compiled for (`aot/batches.py`), which needs of a method a run can meet
(`learner/check.py`), and what a batch leaves out before its updates (`learner/correction.py`).
"""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class DrawnField:
    """What is recorded of each drawn token under one name: one number, or several.

    Attributes:
      dtype: numpy's name of it.
      width: the attribute of an engine that says how many numbers there are, none of them unless
        they are recorded; "" for one number, which is always recorded.
    """

    dtype: str
    width: str = ""


DRAWN = {
    "tokens": DrawnField("int32"),
    "logp_behav": DrawnField("float32"),
    "logp_raw": DrawnField("float32"),
    "entropy": DrawnField("float32"),
    "logits": DrawnField("float32", "num_logits"),
    "top_ids": DrawnField("int32", "top_n"),
    "top_logps": DrawnField("float32", "top_n"),
    "kept": DrawnField("int32", "num_kept"),
    "logp_student": DrawnField("float32", "num_teachers"),
}


@dataclasses.dataclass(frozen=True)
class Field:
    """The properties of one batch field.

    Attributes:
      unit: what has a value of its own. "token": [N,T]. "sequence": [N]; in rows that hold several
        sequences, and in every update, the value stands on each token of its sequence. "step": [N],
        the same value or one random draw in every row, whatever the row holds.
      dtype: numpy's name of it.
      source: who computes it. "record": the sampler, when it drew the token. "rows": the layout.
        "reward": the rollouts. "learner", "critic", "reference": a forward pass over the rollout
        batch; that of the learner may be the update itself, see `Correction.recompute_reason`.
        "step": the run, at the start of an update. "controller": `learner/control.py`. "prepare":
        `correction.make_prepare`. "update": the update itself.
      use: who reads it. "forward": every program that computes log-probs. "update": every update.
        "method": the methods whose traits name it. "batch": what is computed once of a
        rollout batch, and no update.
      padding: its value where a row holds no token.
      axes: axes after those of the unit: numbers, or names of widths that a run decides.
      is_optional: computed only where a chosen method needs it.
      is_large: costs so much memory or time that it is for small models and short responses.
      record: the attribute of a Trajectory that it is copied from, token by token.
    """

    unit: str
    dtype: str
    source: str
    use: str
    padding: float = 0
    axes: tuple[str | int, ...] = ()
    is_optional: bool = False
    is_large: bool = False
    record: str = ""


FIELDS = {
    # What a log-prob takes.
    "tokens": Field("token", "int32", "record", "forward"),
    "mask": Field("token", "bool", "record", "forward", record="mask"),
    "temperature": Field("token", "float32", "record", "forward", padding=1),
    # The mask holds the tokens that are trained on, `sampled` all that the sampler drew.
    "sampled": Field("token", "bool", "record", "batch", record="mask"),
    "positions": Field("token", "int32", "rows", "forward"),
    "segment_ids": Field("token", "int32", "rows", "forward"),
    "kept": Field(
        "token", "int32", "record", "forward", padding=-1, axes=("kept",), record="kept"
    ),
    "evict_step": Field("token", "int32", "record", "forward"),
    # Experts to replay, and the tokens that have some; the router chooses for the others. Routing r2
    # takes them from the learner's pass. Above 256 experts they are uint16.
    "routes": Field(
        "token", "uint8", "record", "forward", axes=("routers", "experts"), is_optional=True
    ),
    "routed": Field("token", "bool", "record", "forward", is_optional=True),
    # What else the sampler records.
    "logp_behav": Field("token", "float32", "record", "update", record="logp_behav"),
    # Where a teacher is mixed in: the sampler's program, and the policy alone.
    "logp_student": Field(
        "token", "float32", "record", "update", axes=(1,), is_optional=True, record="logp_student"
    ),
    "logits_behav": Field(
        "token", "float32", "record", "method", axes=("vocabulary",), is_optional=True,
        is_large=True, record="logits",
    ),
    "top_ids": Field(
        "token", "int32", "record", "method", padding=-1, axes=("top",), is_optional=True,
        record="top_ids",
    ),
    "top_logps": Field(
        "token", "float32", "record", "method", axes=("top",), is_optional=True, record="top_logps"
    ),
    "routes_behav": Field("token", "uint8", "record", "batch", axes=("routers", "experts")),
    "routed_behav": Field("token", "bool", "record", "batch"),
    "version": Field("token", "int32", "record", "method", padding=-1, record="version"),
    "turn": Field("token", "int32", "record", "method", record="turn"),
    # Tokens between two answers, which the policy did not sample, in rows that are trained on.
    "environment": Field("token", "bool", "rows", "method", is_optional=True),
    # Rewards.
    "rewards": Field("sequence", "float32", "reward", "method"),
    # Of each turn, on its last sampled token; NaN where the environment gave none.
    "turn_rewards": Field("token", "float32", "reward", "batch", is_optional=True),
    "greedy_rewards": Field("sequence", "float32", "reward", "method", is_optional=True),
    "reward_components": Field(
        "sequence", "float32", "reward", "method", axes=("components",), is_optional=True
    ),
    "group": Field("sequence", "int32", "reward", "method"),
    # The row that has the reward of this row's session; only in batches with forks.
    "owner": Field("sequence", "int32", "reward", "batch", is_optional=True),
    # Forward passes over the rollout batch.
    "logp_old": Field("token", "float32", "learner", "update"),
    "logp_prox": Field("token", "float32", "learner", "update"),
    "entropy": Field("token", "float32", "learner", "method"),
    "sum_pi_squared": Field("token", "float32", "learner", "method", is_optional=True),
    "logits": Field(  # an update computes its own
        "token", "float32", "learner", "batch", axes=("vocabulary",), is_optional=True,
        is_large=True,
    ),
    "grad_norms": Field(
        "sequence", "float32", "learner", "method", is_optional=True, is_large=True
    ),
    "values": Field("token", "float32", "critic", "update", is_optional=True),
    "logp_ref": Field("token", "float32", "reference", "update", is_optional=True),
    "logits_ref": Field(
        "token", "float32", "reference", "method", axes=("vocabulary",), is_optional=True,
        is_large=True,
    ),
    # One value for the whole step.
    "current_version": Field("step", "int32", "step", "method", axes=(1,)),
    "draw": Field("step", "uint32", "step", "update"),
    "lr_scale": Field("step", "float32", "controller", "update", is_optional=True),
    "kl_coeff": Field("step", "float32", "controller", "update", is_optional=True),
    "r2vpo_lambda": Field("step", "float32", "controller", "update", is_optional=True),
    # What the methods make of the rollout batch.
    "adv": Field("token", "float32", "prepare", "update"),
    "weights": Field("token", "float32", "prepare", "update"),
    "returns": Field("token", "float32", "prepare", "update", is_optional=True),
    # The tokens that the masks kept, of a batch whose update scored it.
    "accepted": Field("token", "bool", "update", "batch"),
    # The mask before the methods rejected tokens, in the rows that an update returns.
    "scored": Field("token", "bool", "prepare", "batch"),
    # What an update computes.
    "logp": Field("token", "float32", "update", "method"),
    "key": Field("step", "uint32", "update", "method"),
    "num_environment_tokens": Field("step", "float32", "update", "method", is_optional=True),
    "prompt_divisor": Field("token", "float32", "update", "method", is_optional=True),
    "st_ppo_norm": Field("step", "float32", "update", "method", is_optional=True),
    "noise_seed": Field("step", "uint32", "update", "method", is_optional=True),
}

SAMPLED = ("record", "rows")  # sources of what the sampler leaves
SCORED = (*SAMPLED, "reward", "learner", "critic", "reference", "step")  # and of what is prepared


def field(name: str) -> Field:
    """Returns the entry of a name; KeyError says where a new one belongs."""
    if name not in FIELDS:
        raise KeyError(f"no field of a batch is called {name!r}: give it a line of fields.FIELDS")
    return FIELDS[name]


def shape(name: str, count: int, length: int, widths: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of a field of a rollout batch: `count` sequences, rows of `length`
    tokens."""
    entry = field(name)
    axes = tuple(widths[axis] if isinstance(axis, str) else axis for axis in entry.axes)
    return (count, length, *axes) if entry.unit == "token" else (count, *axes)


def is_recorded(name: str, widths: Mapping[str, int]) -> bool:
    """Whether a field has any numbers, of those whose widths a run decides."""
    return math.prod(widths[axis] for axis in field(name).axes if isinstance(axis, str)) > 0


def logical_axes(name: str, ndim: int) -> tuple[str | None, ...]:
    """Returns the logical axes of a field [accumulation, rows, ...] of micro-batches."""
    length = () if field(name).unit == "step" else ("length",)
    return (None, "batch", *length, *(None,) * (ndim - 2 - len(length)))


def route_dtype(num_experts: int) -> str:
    """Returns the dtype of recorded routes: the smallest that holds the ids of the experts."""
    return "uint8" if num_experts <= 256 else "uint16"
