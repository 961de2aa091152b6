"""Supervised steps before the first step of reinforcement learning."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.environments.continuity import Suffixes, end_of_answer
from jaxrl_tis.learner.batch_layout import supervised_rows
from jaxrl_tis.learner.optimizer import make_optimizer, optimizer_shardings, scaled_for
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.step import TrainState, make_supervised_step
from jaxrl_tis.models import overflow, placement
from jaxrl_tis.record.metrics import MetricsWriter, NoRecord
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.runtime import processes


def examples(
    setup: LearnerSetup, prompter: Prompter, heartbeat: Callable[[], None] = lambda: None
) -> Batches | None:
    """Returns the checked examples of the warm-up; None for a config without a warm-up.

    Raises ValueError, with task.on_bad_example "error", if an example has no answer, if its answer
    with the end token exceeds rollout.max_new_tokens, or if a turn of it has no token ids.
    """
    config = setup.config
    if config.warmup.steps == 0:
        return None
    pairs = Pairs(prompter, config.task.chat)
    reject = lambda example: _why_bad(pairs, example, config.rollout.max_new_tokens)
    return Batches(
        config.task.name, {**config.task.params, **config.warmup.params},
        batch_size=config.warmup.rows, seed=config.seed, **processes.shard(),
        check=lambda source: prompter.checked(source, "warm-up data", reject, heartbeat=heartbeat),
    )


def warm_up(
    setup: LearnerSetup, params: Any, writer: MetricsWriter | NoRecord,
    heartbeat: Callable[[], None],
    prompter: Prompter, batches: Batches | None,
) -> Any:
    """Takes supervised steps on the answers of `examples` and returns the taught parameters; calls
    `heartbeat` after each. An example may have "turns" before its answer, which are not taught."""
    config = setup.config
    if batches is None:
        return params
    # optimizer.warmup is of the updates that follow.
    own = {"lr": config.warmup.lr, "warmup": 0, "offload": False}
    fields = ml_collections.ConfigDict({**config.optimizer, **own})
    tx = scaled_for(config.model.dtype, make_optimizer(fields, config.warmup.steps))
    # It trains all weights: LoRA begins at the taught base.
    train_step = make_supervised_step(dataclasses.replace(setup.learner, adapter=None), tx)
    layout = setup.layout
    moments = optimizer_shardings(
        tx, params, placement.shardings(layout, setup.model), layout.replicated()
    )
    state = TrainState(params, jax.jit(tx.init, out_shardings=moments)(params))
    length = layout.whole_row(setup.row_length)
    pairs = Pairs(prompter, config.task.chat)
    with Progress(config.warmup.steps, "warm-up", is_shown=processes.is_first()) as progress:
        for index in range(1, config.warmup.steps + 1):
            batch = batches.next_whole()
            rows = supervised_rows([(pairs.before(e), pairs.target(e)) for e in batch], length)
            minibatch = {name: value[None] for name, value in rows.items()}
            state, values = train_step(state, layout.put_batch(minibatch))
            loss, norm = (float(values[f"supervised/{name}"]) for name in ("ce_loss", "grad_norm"))
            if not math.isfinite(loss):
                tokens = rows["tokens"][0][rows["segment_ids"][0] > 0]
                why = overflow.cause(state.params, setup.model, setup.learner.program, tokens)
                raise FloatingPointError(
                    f"warm-up step {index}: the cross-entropy is {loss}. After the step, {why}; lower "
                    "warmup.lr if earlier steps were finite"
                )
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"warm-up step {index}: the gradient norm is {norm}; lower warmup.lr"
                )
            writer.write(index, "warmup", {"warmup/loss": loss})
            progress.update(1, loss=loss)
            heartbeat()
    return state.params


class Pairs:
    """Makes the (prompt, target) ids of examples. Each answer ends with the end token that the chat
    template writes after it, and without a template with the tokenizer's first end token."""

    def __init__(self, prompter: Prompter, chat: bool):
        self._prompter, self._tokenizer, self._is_chat = prompter, prompter.tokenizer, chat
        self._end = functools.cache(functools.partial(end_of_answer, self._tokenizer))

    @functools.cached_property
    def _suffixes(self) -> Suffixes:  # only examples with turns need a template that can be extended
        return Suffixes(self._tokenizer, self._is_chat)

    def before(self, example: dict[str, Any]) -> list[int]:
        """Returns the ids before the answer: the prompt, and the (answer, observation) pairs in the
        example's "turns"."""
        ids = list(self._prompter.ids(example))
        for answer, observation in example.get("turns", ()):
            first = observation[0] if isinstance(observation, list) and observation else {}
            role = first["role"] if isinstance(first, dict) and "role" in first else "user"
            role = self._suffixes.tool_role if role == "tool" else role
            ids += self._ended(answer, role, self._is_chat)
            ids += self._suffixes.after(observation, ids[-1], self._tokenizer.eos_ids)
        return ids

    def target(self, example: dict[str, Any]) -> list[int]:
        """Returns the ids of the answer, with its end."""
        is_messages = self._prompter.opening is None and isinstance(example["prompt"], list)
        return self._ended(example["answer"], "user", self._is_chat or is_messages)

    def _ended(self, answer: str, next_role: str, is_chat: bool) -> list[int]:
        end = self._end(next_role) if is_chat else self._tokenizer.eos_ids[0]
        return [*self._tokenizer.encode(answer), end]


def _are_turns(turns: Any) -> bool:
    is_pair = lambda x: isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[0], str)
    return isinstance(turns, (list, tuple)) and all(
        is_pair(x) and isinstance(x[1], (str, list)) for x in turns
    )


def _why_bad(pairs: Pairs, example: dict[str, Any], limit: int) -> str:
    """Returns the reason why an example cannot be trained on; "" if it can."""
    if "answer" not in example:
        return (
            "it has no answer for the warm-up; name the field with task.params.answer_field, or "
            "set warmup.steps to 0"
        )
    try:
        count = len(pairs.target(example))
    except ValueError as error:
        return f"its answer: {error}"
    if "turns" in example and not _are_turns(example["turns"]):
        return 'its "turns" are not pairs of texts, an answer and an observation each'
    try:
        pairs.before(example)
    except ValueError as error:
        return f'its "turns": {error}'
    return "" if count <= limit else (
        f"the answer and its end are {count} tokens, config.rollout.max_new_tokens is {limit}; raise it"
    )
