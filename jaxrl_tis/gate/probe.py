"""Splits the gap of a rollout batch into engine and staleness, and compares it with the bounds.

The engine may have sampled a batch with older weights. The ratio pi / mu has two factors: pi_old / mu,
the engine at the same weights, and pi / pi_old, the updates since then. Both are known before the
update, so a probe needs no forward pass. Where another policy approximates pi_old (rollout.old_logp_source
is "ewma" or "none"), the engine's part is measured on a fresh batch of the current weights.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_tis.build import Setup
from jaxrl_tis.diagnostics.correction_metrics import sampler_logp
from jaxrl_tis.gate import ladder, report
from jaxrl_tis.learner.trainer import scored_tokens
from jaxrl_tis.runtime import processes


def split(
    setup: Setup, rows: dict[str, np.ndarray], params: Any,
    release_cache: Callable[[], None] = lambda: None, heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Returns the measures of docs/gate.md for each part, {"total", "engine", "staleness"}; without
    "staleness" where another policy approximates pi_old.

    Args:
      rows: a batch with logp_behav, logp_old and logp_prox [N,T]; tokens that its update rejected count.
      params: of the policy that samples the next batch; only a fresh batch needs them.
      release_cache: frees the KV cache of the rollouts, before a fresh batch.
      heartbeat: called while a fresh batch is sampled and scored.
    """
    scored, sampler = scored_tokens(rows), sampler_logp(rows)
    gap = lambda after, before: ladder.gap(rows[after], before, scored)
    parts = {"total": gap("logp_prox", sampler)}
    if setup.training.approximates_old_logp:
        release_cache()  # there is room for one
        fresh = report.measure(setup, params, setup.config.rollout.prompts, heartbeat)
        return parts | {"engine": fresh["total"]}
    return parts | {
        "engine": gap("logp_old", sampler), "staleness": gap("logp_prox", rows["logp_old"])
    }


def exceeded(setup: Setup, parts: dict[str, dict[str, float]]) -> dict[str, list[str]]:
    """Returns the measures above their bound for each part, see `report.above`."""
    return {part: report.above(setup, measured) for part, measured in parts.items()}


def verdict(parts: dict[str, dict[str, float]], above: dict[str, list[str]]) -> str | None:
    """Returns a sentence about the measures above their bound and the cause, None without any."""
    if not above["total"]:
        return None
    named = ", ".join(f"{name} {parts['total'][name]:.3g}" for name in above["total"])
    if above["engine"]:
        return f"{named} above the bounds of config.gate, and the engine gap alone is above them"
    return (
        f"{named} above the bounds of config.gate by staleness; the engine gap alone is within them"
    )


def metrics(parts: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the measures by their names in the record, gate/<part>/<measure>."""
    return {
        f"gate/{part}/{name}": measured[name]
        for part, measured in parts.items() for name in report.MEASURES
    }


def of_step(
    setup: Setup, step: int, rows: dict[str, np.ndarray], params: Any,
    reduce_staleness: Callable[[], str], release_cache: Callable[[], None] = lambda: None,
    heartbeat: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], str | None]:
    """Probes the gap of a batch every rollout.gap_probe_every steps. Reacts to a gap above its bounds
    as rollout.on_gap_exceeded says.

    Args:
      rows, params, release_cache, heartbeat: see `split`; the log-probs are those before the update.
      reduce_staleness: see `RolloutSource.reduce_staleness`.

    Returns: (metrics, why the run has to stop; None where it goes on).
    """
    every, action = setup.config.rollout.gap_probe_every, setup.config.rollout.on_gap_exceeded
    if not every or step % every:
        return {}, None
    parts = split(setup, rows, params, release_cache, heartbeat)
    breach, too_far = verdict(parts, exceeded(setup, parts)), None
    if breach:
        done = f"; {reduce_staleness()}" if action == "sync" else ""
        processes.report(f"step {step}: {breach}{done}", sys.stderr)
        if action == "stop":
            too_far = f"step {step}: {breach}; the run stops, as rollout.on_gap_exceeded says"
    return metrics(parts), too_far
