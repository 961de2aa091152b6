"""The update of a batch that arrives in parts: the gradient of each part is added on arrival."""

import collections
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_tis.diagnostics import attribution
from jaxrl_tis.estimators import methods
from jaxrl_tis.fields import field
from jaxrl_tis.learner.batch_layout import Rows, num_sequences, update_fields
from jaxrl_tis.learner.correction import OF_UPDATE
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.state import base
from jaxrl_tis.learner.probe import Probe
from jaxrl_tis.learner.trainer import WITHOUT_ROUTES, Trainer
from jaxrl_tis.rollouts.groups import Sample

MADE = ("adv", "returns", *OF_UPDATE)  # of each part, before and by its pass


def accumulation_blocker(setup: LearnerSetup) -> str | None:
    """Returns the reason why the update needs the whole batch; None if gradients can be accumulated
    from parts."""
    chosen = setup.correction
    if setup.fork_rows:
        return "rows for forks of sessions are those of a whole batch"
    if setup.recompute_reason:
        return setup.recompute_reason
    if ranking := [name for name, _ in chosen.masks if methods.traits("mask", name).ranks]:
        return f"the mask {ranking[0]} ranks the tokens of the batch"
    if methods.traits("objective", chosen.objective[0]).ranks:
        return f"the objective {chosen.objective[0]} ranks the tokens of the batch"
    if chosen.is_batch_normalized:
        return "weights are divided by their mean over the batch"
    if methods.traits("advantage", chosen.advantage[0]).of_batch:
        return f"the advantage {chosen.advantage[0]} looks at all groups of the batch"
    if chosen.aggregation == "prompt-mean":
        return "the aggregation prompt-mean counts the tokens of each prompt in the batch"
    if chosen.environment_ce_coeff:
        return "the cross-entropy of environment tokens is a mean over those of the batch"
    if "key" in chosen.needs:
        return f"{chosen.needs['key']} samples at random from the whole batch"
    if chosen.counts_experts:
        return "the losses of the routers and the steps of their biases are of a whole update"
    if setup.has_critic:
        return "the critic is updated after the policy"
    if setup.learner.program.dtype == "float16":
        return "gradients in float16 are scaled for a whole update"
    names = [name for name, _ in chosen.controllers]
    if others := [name for name in names if name != "gradient_alignment"]:
        return f"{others[0]} looks at the batch before its update"
    return None


def update_arriving(
    trainer: Trainer, state: dict[str, Any], parts: Iterable[list[Sample]],
    sampled_by: Mapping[int, Any], step: int, version: int,
    phase: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> tuple[dict[str, Any], list[Sample], Rows, dict[str, Any]]:
    """Scores and updates like `Trainer.score` and `Trainer.update`, part by part.

    Args:
      trainer: its setup has no `accumulation_blocker`.
      state: the trained state; donated.
      parts: whole groups each. Their order changes the update only by rounding.
      sampled_by, step, version: see `Trainer`.
      phase: entered with "score" and "update" around each such part of the work.

    Returns (new state, samples in the order of their groups, their rows, metrics).
    """
    setup, waiting, sums, samples, scored, probes = trainer.setup, [], None, [], [], []
    counts = collections.Counter()
    for part in parts:
        waiting += part
        # Whole groups, which advantages compare, and whole micro-batches.
        of_micro = 1 if setup.packer else setup.config.train.microbatch_rows
        size = math.lcm(of_micro, setup.config.rollout.group_size)
        count = len(waiting) - len(waiting) % size
        ready, waiting = waiting[:count], waiting[count:]
        if not ready:
            continue
        with phase("score"):
            rows = trainer.score(state, ready, sampled_by)
        counts.update({name: x for name, x in trainer.score_metrics.items() if _is_count(name)})
        rows |= update_fields(len(ready), version, step, setup.config.seed)
        with phase("update"):
            probes.append(trainer.diagnostics.probe(state, rows, step))
            sums, outputs = _added(trainer, state, sums, rows, step)
        rows |= outputs
        samples += ready
        scored.append(rows)
    order = np.argsort([s.group for s in samples], kind="stable")
    rows = _joined(scored, order)
    num_tokens, count, values = rows["mask"].sum(), num_sequences(rows), {}
    probe = Probe.joined(probes, order)
    with phase("update"):
        if num_tokens:
            _, finish = trainer.arriving_step
            policy, values = finish(
                state["policy"], sums, np.float32(num_tokens), np.float32(count)
            )
            state = state | {"policy": policy}
        made = {name: rows.pop(name) for name in MADE if name in rows}
        _, of_rewards = trainer.credit(rows)
        rows, prepared, measured = trainer.after_update(rows, made)
        measured |= of_rewards | trainer.diagnostics.metrics(state, rows, probe)
        rows, values = trainer.with_prepared(rows, prepared), jax.device_get(values)
    if values:
        values |= attribution.shares(values)
        values |= trainer.diagnostics.variances(rows, probe, values["actor/grad_norm"], count)
    measured = jax.device_get(measured) | trainer.score_metrics | values | counts
    return state, [samples[i] for i in order], rows, measured


def _is_count(name: str) -> bool:
    """Whether a metric of a score counts, so that a batch has the sum over its parts."""
    return name == WITHOUT_ROUTES or name.startswith("harness/")


def _joined(parts: Sequence[Rows], order: np.ndarray) -> Rows:
    """Returns the rows of all parts. Samples without a token lack fields of records, which are padding
    then."""
    like = {name: x for part in parts for name, x in part.items()}

    def of(part, name):
        if name in part:
            return part[name]
        shape = len(part["mask"]), *like[name].shape[1:]
        return np.full(shape, field(name).padding, like[name].dtype)

    return {name: np.concatenate([of(part, name) for part in parts])[order] for name in like}


def _added(
    trainer: Trainer, state: dict[str, Any], sums: Any, rows: Rows, step: int
) -> tuple[Any, Rows]:
    """Returns `sums` with the gradient of these rows, None before the first, and the fields `MADE`
    of each token [N,T]."""
    setup, outputs, (add, _) = trainer.setup, [], trainer.arriving_step
    credited, _ = jax.device_get(trainer.credit(rows))
    updated = trainer.update_fields(rows, credited)
    [(minibatch, _, flat)] = trainer.minibatches(updated, (setup.config.seed, step, 0))
    for m in range(len(minibatch["mask"])):
        micro = setup.layout.put_batch({name: x[m : m + 1] for name, x in minibatch.items()})
        sums, found = add(state["policy"].params, sums, micro, base(state))
        outputs.append(jax.tree.map(setup.layout.fetch, found))
    of_pass = {name: flat(np.concatenate([x[name] for x in outputs])) for name in outputs[0]}
    return sums, credited | of_pass
