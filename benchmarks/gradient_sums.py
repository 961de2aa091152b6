"""What summing gradients over devices in bfloat16 costs, `config.train.grad_reduce_dtype`.

    python -m benchmarks.gradient_sums [--shards=16,64] [--length=256]

Each shard has its own row and the gradient of a policy-gradient loss (advantages of either sign) or
of cross-entropy, for the matrices of a small decoder with random weights. The gradients are summed
in float64, in float32 rings as in a run, and in bfloat16 rings, rounded at every hop. Rings follow
the stages of `sharding.Layout.scatter`. Printed is |sum - exact| / |exact| over all matrices. The
last column has the error of rows computed in bfloat16 with an exact sum, which a run on TPU accepts
anyway. This emulates the order of a ring on CPU; a TPU's order may differ.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import arguments
from jaxrl_tis import sharding
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.runtime import cli

CONFIG = ModelConfig(
    family="llama", vocab_size=512, embed_dim=128, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=32, mlp_dim=384, rope=RopeConfig("default", 10_000.0), max_position=4096,
    norm_eps=1e-6, qkv_bias=False, qk_norm=False, tie_embeddings=False,
)


@functools.partial(jax.jit, static_argnums=3)
def gradient(params, tokens_t, weight, dtype):
    """Returns the gradient of weight * mean log-prob of a row, flattened to [numbers]."""

    def loss(params):
        program = transformer.Program(dtype)
        logits = transformer.logits(params, CONFIG, tokens_t[None], program=program)[0, :-1]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens_t[1:, None], axis=1)
        return -weight * jnp.mean(logp)

    grads = jax.tree_util.tree_leaves_with_path(jax.grad(loss)(params))
    return jnp.concatenate([g.ravel() for path, g in grads if "norm" not in str(path)])


def ring(parts: np.ndarray, dtype) -> np.ndarray:
    """Reduce-scatters parts [devices, numbers]: chunk c starts at device c + 1 and ends at c; each
    hop adds in float32 and rounds. Returns the chunks joined, [numbers]."""
    count = len(parts)
    chunks = parts.reshape(count, count, -1)
    found = []
    for c in range(count):
        total = chunks[(c + 1) % count, c].astype(dtype)
        for hop in range(2, count + 1):
            own = chunks[(c + hop) % count, c].astype(dtype).astype(np.float32)
            total = (total.astype(np.float32) + own).astype(dtype)
        found.append(total.astype(np.float32))
    return np.concatenate(found)


def staged(parts: np.ndarray, dtype) -> np.ndarray:
    """Sums parts [devices, numbers] in the stages of a layout with this number of devices."""
    sizes = [len(g[0]) if g else len(parts) for g in sharding.stages(len(parts))]
    parts = parts.reshape(*sizes, -1)
    for _ in sizes:  # every group of the first stage that is left sums alike
        rest = parts.shape[1:-1]
        groups = parts.reshape(len(parts), -1, parts.shape[-1])
        sums = [ring(groups[:, i], dtype) for i in range(groups.shape[1])]
        parts = np.stack(sums).reshape(*rest, -1)
    return parts


def main() -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gradient_sums",
        description="Measures the error of gradient sums in bfloat16.",
    )
    parser.add_argument("--shards", default="16,64")
    parser.add_argument("--length", type=int, default=256)
    args = arguments.parse(parser, shards="4", length=16)
    params = transformer.init(CONFIG, jax.random.key(0))
    print(f"{'loss':16} {'shards':>6} {'float32':>9} {'bfloat16':>9} {'bf16 rows':>9}")
    for name in ("policy gradient", "cross-entropy"):
        for count in map(int, args.shards.split(",")):
            arguments.say(f"{name}, gradients of {count} rows")
            rng = np.random.default_rng(count)
            tokens = rng.integers(0, CONFIG.vocab_size, (count, args.length)).astype(np.int32)
            weights = rng.normal(size=count) if name == "policy gradient" else np.ones(count)
            rows = lambda dtype, tokens=tokens, weights=weights: np.stack([
                np.asarray(gradient(params, t, np.float32(w), dtype))
                for t, w in zip(tokens, weights, strict=True)
            ])
            parts = rows("float32")
            parts = parts[:, : parts.shape[1] // count**2 * count**2]
            exact = parts.sum(axis=0, dtype=np.float64)
            error = lambda x, exact=exact: np.linalg.norm(x - exact) / np.linalg.norm(exact)
            coarse = rows("bfloat16")[:, : len(exact)].sum(axis=0, dtype=np.float64)
            found = [error(staged(parts, np.float32)), error(staged(parts, jnp.bfloat16))]
            line = " ".join(f"{x:9.1e}" for x in (*found, error(coarse)))
            print(f"{name:16} {count:6} {line}", flush=True)


if __name__ == "__main__":
    cli.run(main)
