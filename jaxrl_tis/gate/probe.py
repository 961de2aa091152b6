"""The gap of a rollout batch, split into what the engine and what staleness adds, and its budget.

Tokens of a batch that is trained on were drawn by the engine, with weights that may be older: pi / mu
is pi_old / mu, the engine at the same weights, times pi / pi_old, the learner since then. Both are
known before the update has changed anything, so that a probe costs no forward pass. Where another
policy stands in for pi_old (rollout.old_logp_source is "ewma" or "none"), the engine's part is
measured on a fresh batch, drawn with the weights of now.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_tis.build import Setup
from jaxrl_tis.gate import ladder, report
from jaxrl_tis.runtime import processes


def split(setup: Setup, rows: dict[str, np.ndarray], params: Any) -> dict[str, dict[str, float]]:
    """Returns the measures of docs/gate.md of each part, {"total", "engine", "staleness"}; without
    "staleness" where another policy stands in.

    Args:
      rows: a batch with logp_behav, logp_old and logp_prox [N,T].
      params: of the policy that the next batch is drawn with, which alone a fresh batch asks for.
    """
    gap = lambda after, before: ladder.gap(rows[after], rows[before], rows["mask"])
    parts = {"total": gap("logp_prox", "logp_behav")}
    if setup.training.approximates_old_logp:
        fresh = report.measure(setup, params, setup.config.rollout.prompts)
        return parts | {"engine": fresh["total"]}
    return parts | {
        "engine": gap("logp_old", "logp_behav"), "staleness": gap("logp_prox", "logp_old")
    }


def exceeded(setup: Setup, parts: dict[str, dict[str, float]]) -> dict[str, list[str]]:
    """Returns for each part the measures that are above their bound, see `report.above`."""
    return {part: report.above(setup, measured) for part, measured in parts.items()}


def verdict(parts: dict[str, dict[str, float]], above: dict[str, list[str]]) -> str | None:
    """Returns a sentence on the measures above their bounds and the largest part; None if there is
    none."""
    if not above["total"]:
        return None
    named = ", ".join(f"{name} {parts['total'][name]:.3g}" for name in above["total"])
    if above["engine"]:
        return f"{named} above the budget of config.gate, and the engine's part is by itself"
    return f"{named} above the budget of config.gate, by staleness: the engine's part is within it"


def metrics(parts: dict[str, dict[str, float]]) -> dict[str, float]:
    """Names the measures for the record."""
    return {
        f"gate/{part}/{name}": measured[name]
        for part, measured in parts.items() for name in report.MEASURES
    }


def of_step(
    setup: Setup, step: int, rows: dict[str, np.ndarray], params: Any,
    reduce_staleness: Callable[[], str],
) -> tuple[dict[str, float], str | None]:
    """Measures the parts of a batch's gap where rollout.gap_probe_every says so. Acts on a gap
    above the budget as rollout.on_gap_exceeded says.

    Args:
      rows, params: see `split`; rows have the log-probs of before the update.
      reduce_staleness: see `RolloutSource.reduce_staleness`.

    Returns: (metrics, why the run has to stop; None where it goes on).
    """
    every, action = setup.config.rollout.gap_probe_every, setup.config.rollout.on_gap_exceeded
    if not every or step % every:
        return {}, None
    parts = split(setup, rows, params)
    breach, too_far = verdict(parts, exceeded(setup, parts)), None
    if breach:
        done = f"; {reduce_staleness()}" if action == "sync" else ""
        processes.report(f"step {step}: {breach}{done}", sys.stderr)
        if action == "stop":
            too_far = f"step {step}: {breach}; the run stops, as rollout.on_gap_exceeded says"
    return metrics(parts), too_far
