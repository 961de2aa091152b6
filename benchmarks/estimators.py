"""Measures the time of the estimators on a long rollout batch, in reads of their inputs.

    python -m benchmarks.estimators [--rows=512] [--length=8192] [--rounds=5] [--only=weights,m2po]

The rows pack responses with lengths spread evenly over the octaves from 64 tokens. Each printed
line is one jitted call that returns scalars. This is the cost that a method adds to a training
step, which reads the same arrays.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import arguments
from jaxrl_tis.diagnostics import divergences, mismatch
from jaxrl_tis.estimators import methods, rank_masks, ratios
from jaxrl_tis.runtime import cli

SCANNED = ("prefix_minpro", "prefix_ctpo", "turn_tis", "turn_geo")
SELECTIONS = ("m2po", "clip_cov", "top_entropy")
OF_LOGITS = ("trm",)  # needs both policies' whole vocabulary


def make_batch(rows: int, length: int) -> dict[str, jax.Array]:
    """Returns the inputs [rows, length] of all weights and masks; rows end in padding."""
    rng = np.random.default_rng(0)
    seg = np.zeros((rows, length), np.int32)
    for row in seg:
        start, number = 0, 1
        while start < length - 64:
            end = start + int(2 ** rng.uniform(6, np.log2(length)))
            row[start : min(end, length)] = number
            start, number = end, number + 1
    old = -rng.exponential(0.5, seg.shape).astype(np.float32)
    gap = 0.05 * rng.standard_normal(seg.shape, np.float32)
    batch = {
        "logp": old + 0.05 * rng.standard_normal(seg.shape, np.float32),
        "logp_prox": old,
        "logp_old": old,
        "logp_behav": old - gap,
        "mask": seg > 0,
        "seg": seg,
        "adv": rng.standard_normal(seg.shape, np.float32),
        "entropy": rng.exponential(0.5, seg.shape).astype(np.float32),
        "turn": np.arange(length, dtype=np.int32)[None, :] // 256 + np.zeros_like(seg),
        "version": np.full(seg.shape, 3, np.int32),
    }
    return {name: jnp.array(x) for name, x in batch.items()} | {
        "current_version": jnp.int32(4), "key": jax.random.key(0),
    }


def call(kind: str, name: str, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the sum of a weight or the number of kept tokens, at the method's defaults."""
    log_ratio = ratios.safe_log_ratio(batch["logp_old"], batch["logp_behav"], batch["mask"])
    parameters = methods.example(kind, name)
    needed = {field: batch[field] for field in methods.needs(kind, name)}
    function = methods.function(kind, name)
    return jnp.sum(function(log_ratio, batch["mask"], batch["seg"], **needed, **parameters))


def entries(kind: str) -> list[str]:
    return [n for n in methods.TABLES[kind] if n not in (*SCANNED, *SELECTIONS, *OF_LOGITS)]


def weights(batch):
    return {name: call("weight", name, batch) for name in entries("weight")}


def masks(batch):
    return {name: call("mask", name, batch) for name in entries("mask")}


def metrics(batch):
    """The measured gap, as `correction_metrics.gap_metrics` records it, and verl's rejection
    metrics."""
    old, behav, mask, seg = (batch[f] for f in ("logp_old", "logp_behav", "mask", "seg"))
    log_ratio = ratios.safe_log_ratio(old, behav, mask)
    w = methods.function("weight", "token_tis")(log_ratio, mask, seg)
    return (
        mismatch.offpolicy_metrics(old, behav, mask, seg)
        | mismatch.probability_metrics(old, behav, mask)
        | mismatch.importance_weight_metrics(
            w, log_ratio, mask, level="token", upper=2.0, seg=seg
        )
        | divergences.divergence_metrics(log_ratio, mask, seg)
        | divergences.response_metrics(old, behav, mask, seg)
        | mismatch.rejection_metrics(log_ratio, mask, seg, option="seq_mean_k3", upper=0.01)
    )


def percentiles(batch):
    fields = ("logp_old", "logp_behav", "mask", "seg")
    return divergences.percentile_metrics(*(batch[f] for f in fields))


def m2po(batch):
    drift = ratios.safe_log_ratio(batch["logp"], batch["logp_old"], batch["mask"])
    bounds = rank_masks.m2po_bounds(drift, batch["adv"], batch["mask"])
    return call("mask", "m2po", batch), bounds


def covariance(batch):
    kl_cov = rank_masks.kl_cov(batch["logp"], batch["adv"], batch["mask"])
    return call("mask", "clip_cov", batch), jnp.sum(kl_cov)


def programs():
    """Returns name -> function of a batch: reads and sums for scale, then the estimators."""
    read = ("logp_old", "logp_behav", "mask", "seg")
    chosen = {
        "read": lambda b: [jnp.sum(b[f]) for f in read],
        "segment sum": lambda b: jnp.max(ratios.sequence_sum(b["logp_old"], b["mask"], b["seg"])),
        "weights": weights,
        "masks": masks,
        "metrics": metrics,
        "weights + masks + metrics": lambda b: (weights(b), masks(b), metrics(b)),
    }
    for name in SCANNED:
        chosen[name] = functools.partial(call, "weight", name)
    return chosen | {
        "percentiles": percentiles, "m2po": m2po, "covariance": covariance,
        "top_entropy": lambda b: call("mask", "top_entropy", b),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="lines, separated by commas")
    args = arguments.parse(parser, rows=2, length=512, rounds=1)
    batch = make_batch(args.rows, args.length)
    chosen = programs()
    names = args.only.split(",") if args.only else list(chosen)
    if unknown := set(names) - set(chosen):
        parser.error(f"--only: {', '.join(sorted(unknown))} are none of {', '.join(chosen)}")
    print(f"{int(batch['mask'].sum()):,} tokens in {int(batch['seg'].max(1).sum()):,} responses")
    read = None
    for name in dict.fromkeys(["read", *names]):
        arguments.say(f"compiling {name}")
        start = time.perf_counter()
        compiled = jax.jit(chosen[name]).lower(batch).compile()
        compile_seconds = time.perf_counter() - start
        seconds = []
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            jax.block_until_ready(compiled(batch))
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[1:])
        read = median if read is None else read
        print(
            f"{name:26s} {median * 1e3:8.1f} ms {median / read:6.1f} reads, "
            f"compiled in {compile_seconds:.1f} s", flush=True,
        )


if __name__ == "__main__":
    cli.run(main)
