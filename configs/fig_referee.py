"""The referee: which correction, for which gap, at which length of the answers.

    ./launch/figures.sh referee    # 126 arms and 2 controls of 8 seeds; docs/referee.md has the protocol
    ./launch/figures.sh referee_factors  # 53 arms of 8 seeds, of the factors of the ratio

An arm is "GAP/LENGTH/CORRECTION". Short answers are two-digit sums of at most 4 tokens, with the model of
configs/fig_base.py. Long answers are lists of eight one-digit sums, 24 tokens at most, rewarded by the share
of right sums. Thresholds are those of the cited defaults; the band of geometric means is slime's 0.8 to 1.2,
because the 0.1 to 0.2 % of others leaves nothing at these gaps.

Stale samples come from a sampler that makes as many tokens of each answer during an update as an answer
can have: it is 4 steps ahead. A sampler that makes 4 tokens of a long answer is "in-flight": its weights
change within the answer, which is half a step old.
"""

from collections.abc import Mapping

from configs import fig_base, fig_routing
from jaxrl_tis.estimators.presets import PRESETS
from jaxrl_tis.sweep import Arm

INT8 = {"engine.quantization": "w8a8"}
EXPERTS = ("num_experts", "experts_per_token", "expert_dim", "shared_expert_dim", "router")
MODEL = {f"model.{name}": fig_routing.get_config().model[name] for name in EXPERTS}
REINFORCE = {"correction.centre": "behav", "correction.objective": "reinforce"}
STALE = {"rollout.schedule": "areal(staleness=4)", "rollout.old_logp_source": "none"}
# Gap -> (fields of all arms, fields that make the gap)
GAPS: dict[str, tuple[Arm, Arm]] = {
    "int8": ({}, INT8),
    "noise": ({}, {"engine.injected": "weights(scale=0.3)"}),
    "routes": (MODEL, INT8 | {"engine.injected": "router(scale=0.3)"}),
    "stale": (REINFORCE, STALE),
    "in-flight": (REINFORCE, STALE),
    "int8+stale": (REINFORCE, INT8 | STALE),
}
UPDATE_TURNS = {
    "stale/short": 4, "stale/long": 24, "in-flight/long": 4, "int8+stale/short": 4, "int8+stale/long": 24,
}
LENGTHS = {
    "short": {},
    "long": {
        "task.params.digits": 1,
        "task.params.problems": 8,
        "task.max_prompt_tokens": 33,
        "rollout.max_new_tokens": 24,
        "reward.name": "parts",
        "train.microbatch_rows": 32,
    },
}


def _preset(name: str) -> Arm:
    return {f"correction.{part}": text for part, text in PRESETS[name].items()}


def _weight(text: str) -> Arm:
    return {"correction.weight": text}


CORRECTIONS = {
    "none": _weight("none"),
    "token TIS": _weight("token_tis(cap=2.0)"),
    "token MIS": _weight("token_mis(upper=2.0)"),
    "sequence TIS": _weight("seq_tis(cap=2.0)"),
    "geometric mask": {"correction.masks": "seq_mean_k1(lower=0.8, upper=1.2)"},
    "IcePop": _weight("token_icepop(lower=0.5, upper=5.0)"),
    "KPop": _preset("kpop"),
    "IPO": _preset("ipo"),
    "seq-mask-tis": _weight("seq_mask_tis(lower=0.8, upper=1.2)"),
    "centering": _preset("centered"),
    "centering + TIS": _preset("centered_tis_2"),
    "GSPO bypass": {"correction.centre": "behav", "correction.objective": "gspo"},
    # On tokens of one version; on others they are weighed as in `DECOUPLED`.
    "decoupled PPO": _weight("token_mis(upper=5.0)"),
}
PPO = "ppo(clip_high=0.28)"


def _at_prox(weight: str, staleness_weight: str, objective: str = PPO) -> Arm:
    arm = _weight(weight) | {
        "correction.centre": "prox", "correction.staleness_weight": staleness_weight,
        "correction.objective": objective,
    }
    # The factors apart need the learner's log-probs under the weights that sampled each token.
    return arm if staleness_weight == "folded" else arm | {"rollout.old_logp_source": "ring"}


DECOUPLED = _at_prox("token_mis(upper=5.0)", "folded")
# Two bounds of a weight, and what happens above: it is truncated, or its token is dropped.
BOUNDED = {
    f"{name} {bound}": f"token_{name.lower()}({field}={bound}.0)"
    for name, field in (("TIS", "cap"), ("MIS", "upper")) for bound in (2, 5)
}
# The factors of the ratio in runs with age. "folded": one weight of engine and staleness; "folded MIS 5" is
# decoupled PPO. "apart": each factor has this weight.
FACTORS = {
    "none": _weight("none"),
    "PPO bypass": {"correction.centre": "behav", "correction.objective": PPO},
    **{f"folded {name}": _at_prox(weight, "folded") for name, weight in BOUNDED.items()},
    "staleness uncapped": _at_prox("token_tis(cap=2.0)", "token_vanilla"),
    "GSPO at prox": DECOUPLED | {"correction.objective": "gspo"},
}
APART = {f"apart {name}": _at_prox(weight, weight) for name, weight in BOUNDED.items()}
EXACT = "exact engine"  # the arm without a gap
# `none` with the loss of KPop, IPO and centering, in the parts where it decides; no arm, in no comparison
CONTROL, CONTROLLED = "REINFORCE", ("int8/long", "noise/long")


def get_config():
    c = fig_base.get_config()
    c.steps = c.checkpoint.every = 80
    c.warmup.steps = 300
    c.task.params.problems = 1
    c.eval.prompts = 256
    c.metrics.diagnostics_every = c.steps
    return c


# GAP/LENGTH; the longest come first, so that no process has one left at the end. The tokens of a short
# answer are of one version.
_ALL = tuple(
    f"{gap}/{length}" for length in ("long", "short") for gap in GAPS
    if (gap, length) != ("in-flight", "short")
)
PARTS = tuple(part for part in _ALL if not part.startswith("int8+stale"))
FACTOR_PARTS = tuple(part for part in _ALL if part in UPDATE_TURNS)[::-1]


def _arms(gap: str, length: str, corrections: Mapping[str, Arm]) -> dict[str, Arm]:
    model, fields = GAPS[gap]
    if turns := UPDATE_TURNS.get(f"{gap}/{length}"):
        fields = fields | {"rollout.update_turns": turns}
    shared = LENGTHS[length] | model
    arms = {name: shared | fields | arm for name, arm in corrections.items()}
    return arms | {EXACT: shared | _weight("none")}


def arms_of(gap: str, length: str) -> dict[str, Arm]:
    """Returns the arms of a gap and a length, by correction."""
    age = {"decoupled PPO": DECOUPLED} if f"{gap}/{length}" in UPDATE_TURNS else {}
    return _arms(gap, length, CORRECTIONS | age)


def factors_of(gap: str, length: str) -> dict[str, Arm]:
    """Returns the arms of the factors. With a float32 sampler the factor of the engine is 1, and nothing
    is apart."""
    return _arms(gap, length, FACTORS | (APART if "int8" in gap else {}))


def control_of(gap: str, length: str) -> dict[str, Arm]:
    """Returns {CONTROL: its fields}, empty in parts without it."""
    if f"{gap}/{length}" not in CONTROLLED:
        return {}
    model, fields = GAPS[gap]
    return {CONTROL: LENGTHS[length] | model | fields | _weight("none") | REINFORCE}


def sweep():
    return {
        f"{part}/{name}": arm for part in PARTS for name, arm in arms_of(*part.split("/")).items()
    }
