"""Measures a dump and returns one object; docs/audit.md lists its keys."""

import concurrent.futures
import functools
import json
from typing import Any

import jax
import numpy as np

from jaxrl_tis.audit import gap, packing, routes, whatif
from jaxrl_tis.audit.dump import Dump
from jaxrl_tis.estimators import advantages

# Percentiles of |log-prob difference| over tokens.
PERCENTILES = (50, 95, 99, 99.9)
NUM_BINS = 40


def measure(
    dump: Dump, current_version: int | None = None, num_experts: int | None = None
) -> dict[str, Any]:
    """Returns all measurements that the columns allow.

    Args:
      dump: see `dump.read`.
      current_version: of the learner's weights; None takes the newest that drew a token.
      num_experts: experts of a router; None takes the largest id of the routes.

    Raises ValueError for a version that is newer than the current one.
    """
    if num_experts is not None and not dump.routes:
        raise ValueError("--num_experts needs the column routes_behav or routes_old")
    batch = make_batch(dump, current_version)
    unknown = {"entropy"} if np.isnan(dump.tokens.get("entropy", 0.0)).any() else set()
    rules = whatif.rules(frozenset(batch) - unknown)
    tasks = (
        lambda: jax.device_get(jax.jit(gap.metrics)(batch)),
        lambda: gap.profiles(batch),
        lambda: whatif.table(rules, batch),
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles them side by side
        metrics, profiles, rows = pool.map(lambda task: task(), tasks)
    of_routes = None
    if dump.routes:
        of_pairs, of_routes = routes.measure(dump, packing.pack(dump.lengths), batch, num_experts)
        metrics |= of_pairs
    mask = dump.tokens["mask"]
    is_answered = np.logical_or.reduceat(mask, np.cumsum(dump.lengths) - dump.lengths)
    return {
        "dump": dump.path,
        "columns": list(dump.columns),
        "sequences": len(dump.lengths),
        "without_tokens": int(np.sum(~is_answered)),
        "tokens": int(np.sum(mask)),
        "masked_tokens": int(np.sum(~mask)),
        "current_version": int(batch["current_version"]) if "version" in batch else None,
        "metrics": {name: float(x) for name, x in metrics.items()},
        "percentiles": _percentiles(dump),
        "profiles": profiles,
        "routes": of_routes,
        "rules": rows,
        "histogram": _histogram(dump),
    }


def make_batch(dump: Dump, current_version: int | None) -> dict[str, Any]:
    """Returns the fields that `gap` and `whatif` read, as far as the columns give them."""
    rows = packing.pack(dump.lengths)
    batch: dict[str, Any] = {name: rows.of_tokens(x) for name, x in dump.tokens.items()}
    batch |= {"seg": rows.seg, "key": jax.random.key(0), "sign": np.ones_like(batch["logp_old"])}
    batch["logp_now"] = batch["logp" if "logp" in batch else "logp_old"]
    if "logp" in batch:  # the learner now starts from here: nothing has moved within its step
        batch["logp_prox"] = batch["logp"]
    if current_version is not None and "version" not in batch:
        raise ValueError("--current_version needs the column version")
    if current_version is not None and current_version >= 2**31:
        raise ValueError(f"--current_version={current_version} is too large; the most is {2**31 - 1}")
    if "version" in batch:
        newest = int(dump.tokens["version"].max())
        if current_version is not None and newest > current_version:
            raise ValueError(
                f"{dump.path}, column version: {newest} is newer than --current_version="
                f"{current_version}"
            )
        batch["current_version"] = np.int32(newest if current_version is None else current_version)
    if "reward" in dump.sequences:
        batch["reward"] = rows.of_sequences(dump.sequences["reward"])
    if {"reward", "group"} <= dump.sequences.keys():
        adv = _advantages(dump.sequences["reward"], dump.sequences["group"])
        batch["adv"] = rows.of_tokens(np.repeat(adv, dump.lengths))
        batch["sign"] = np.where(batch["adv"] < 0, -1, 1).astype(np.float32)
    return jax.device_put(batch)


def _advantages(reward, group):
    """Returns GRPO's advantages [B]."""
    one = np.ones((len(reward), 1), bool)
    return np.asarray(jax.jit(advantages.grpo)(reward, one, group))[:, 0]


def _valid(dump: Dump, name: str) -> np.ndarray:
    return dump.tokens[name][dump.tokens["mask"]]


def _percentiles(dump):
    gaps = np.abs(_valid(dump, "logp_old") - _valid(dump, "logp_behav"))
    found = np.percentile(gaps, PERCENTILES)
    return {f"p{q:g}": float(x) for q, x in zip(PERCENTILES, found, strict=True)}


def _histogram(dump):
    """Returns counts of log-ratios without their outermost thousandths, and of both probabilities."""
    behav, old = _valid(dump, "logp_behav"), _valid(dump, "logp_old")
    low, high = np.percentile(old - behav, (0.1, 99.9))
    width = max(high - low, 1e-6)
    bins = functools.partial(np.histogram, bins=NUM_BINS, range=(low - width / 20, high + width / 20))
    counts, edges = bins(old - behav)
    p_behav, p_old = (np.exp(np.minimum(x, 0.0)) for x in (behav, old))  # rounding may be above 0
    grid, _, _ = np.histogram2d(p_behav, p_old, bins=NUM_BINS, range=((0, 1), (0, 1)))
    return {"log_ratio": counts.tolist(), "edges": edges.tolist(), "probabilities": grid.tolist()}


def to_json(report: dict[str, Any]) -> str:
    """Returns the report as JSON, with null for NaN and infinities."""
    strict = json.loads(json.dumps(report), parse_constant=lambda _: None)
    return json.dumps(strict, indent=1, allow_nan=False) + "\n"
