"""Times each kernel against a memory copy and against XLA's reference, on one device.

    python -m benchmarks.kernels [--rows=64] [--length=8192] [--segments=16] [--rounds=10]
        [--head_tokens=512] [--vocab=151936] [--only=segment_reduce,ratio_stats]

Bytes count arguments and results once, the least that a kernel must move. On platforms without a
kernel the public function is the reference, and there is nothing to compare.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import arguments
from jaxrl_tis.kernels import segment
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob import token_logprob
from jaxrl_tis.runtime import cli


def packed_rows(rows: int, length: int, num_segments: int) -> dict[str, jax.Array]:
    """Returns rows full of segments with random lengths, and values for each token."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(1, length, (rows, num_segments - 1)), axis=1)
    seg = 1 + np.sum(np.arange(length)[None, :, None] >= cuts[:, None, :], axis=2)
    old = -rng.exponential(0.5, seg.shape)
    behav = old + 0.05 * rng.standard_normal(seg.shape)
    arrays = {"seg": seg.astype(np.int32), "old": old, "behav": behav, "mask": seg > 0}
    arrays["decay"] = np.full(seg.shape, 0.95)
    return {
        name: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)
        for name, x in arrays.items()
    }


def segment_cases(rows: int, length: int, num_segments: int) -> dict[str, tuple[Callable, tuple]]:
    """Returns name -> (function, its arguments)."""
    x = packed_rows(rows, length, num_segments)
    seg, old, behav, mask, decay = (x[k] for k in ("seg", "old", "behav", "mask", "decay"))
    reduce: Callable = lambda op: lambda x, seg: segment.segment_reduce(x, seg, num_segments, op)
    scan = lambda op, **more: lambda x, seg: segment.segment_scan(x, seg, op, **more)
    gae = lambda x, seg, decay: segment.segment_scan(x, seg, decay=decay, reverse=True)
    stats = lambda old, behav, mask, seg: segment.ratio_stats(old, behav, mask, seg, num_segments)
    gradient = jax.grad(lambda x, seg: jnp.sum(reduce("mean")(x, seg) ** 2))
    return {
        "segment_reduce sum": (reduce("sum"), (old, seg)),
        "segment_reduce sum of 2": (reduce("sum"), ((old, behav), seg)),
        "segment_reduce max": (reduce("max"), (old, seg)),
        "segment_reduce logsumexp": (reduce("logsumexp"), (old, seg)),
        "segment_reduce gradient": (gradient, (old, seg)),
        "segment_broadcast": (segment.segment_broadcast, (old[:, :num_segments], seg)),
        "segment_scan sum": (scan("sum"), (old, seg)),
        "segment_scan min reverse": (scan("min", reverse=True), (old, seg)),
        "segment_scan decay reverse": (gae, (old, seg, decay)),
        "ratio_stats": (stats, (old, behav, mask, seg)),
    }


def logprob_cases(tokens: int, width: int, vocab: int) -> dict[str, tuple[Callable, tuple]]:
    """Returns scores of a tied bfloat16 head and their gradients, by tokens, width, vocabulary."""
    draw = lambda key, *shape: jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)
    inputs = draw(0, vocab, width) * width**-0.5, draw(1, 8, tokens // 8, width)
    targets = jax.random.randint(jax.random.key(2), (8, tokens // 8), 0, vocab)

    def score(weight, x):
        ones = jnp.ones(targets.shape)
        return token_logprob(Head(weight, 0), x, targets, ones, 1024, with_entropy=True)

    gradient = jax.grad(lambda weight, x: jnp.sum(score(weight, x).logp), (0, 1))
    return {"token_logprob": (score, inputs), "token_logprob gradient": (gradient, inputs)}


def reference(function: Callable) -> Callable:
    """Returns the function as platforms without kernels run it."""

    def call(*arguments):
        default = lambda *x, default, **_: default(*x)
        with mock.patch.object(jax.lax, "platform_dependent", default):
            return function(*arguments)

    return call


def seconds(function: Callable, arguments: tuple, rounds: int) -> tuple[float, int]:
    """Returns the median time of a call and the bytes of its arguments and results."""
    compiled = jax.jit(function).lower(*arguments).compile()
    results = jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times), sum(x.nbytes for x in jax.tree.leaves((arguments, results)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--head_tokens", type=int, default=512, help="tokens of token_logprob")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary of token_logprob")
    parser.add_argument("--only", default="", help="starts of names, separated by commas")
    args = arguments.parse(
        parser, rows=1, length=256, segments=4, rounds=1, head_tokens=8, vocab=256
    )
    if args.head_tokens < 8 or args.head_tokens % 8:
        parser.error("--head_tokens is a multiple of 8")
    device = jax.devices()[0]
    has_kernels = device.platform == "tpu"
    print(f"{device.device_kind}, jax {jax.__version__}, {args.rows} rows of {args.length} tokens "
          f"in {args.segments} segments; head of {args.vocab} x 896, {args.head_tokens} tokens")
    if not has_kernels:
        print("no kernel runs here: times are those of the references")
    cases = segment_cases(args.rows, args.length, args.segments)
    cases |= logprob_cases(args.head_tokens, 896, args.vocab)
    names = [name for name in cases if name.startswith(tuple(args.only.split(",")))]
    if not names:
        parser.error(f"--only={args.only} begins none of {', '.join(cases)}")
    copied = jnp.ones((args.rows, args.length))
    took, moved = seconds(lambda x: x + 1.0, (copied,), args.rounds)
    copy_rate = moved / took
    print(f"{'copy':28s} {took * 1e3:9.3f} ms {copy_rate / 1e9:8.1f} GB/s")
    for name in names:
        function, inputs = cases[name]
        took, moved = seconds(function, inputs, args.rounds)
        line = f"{name:28s} {took * 1e3:9.3f} ms {moved / took / 1e9:8.1f} GB/s"
        line += f" {moved / took / copy_rate:6.2f} of a copy"
        if has_kernels:
            other, _ = seconds(reference(function), inputs, args.rounds)
            line += f" {other / took:6.1f} times XLA's speed"
        print(line, flush=True)


if __name__ == "__main__":
    cli.run(main)
