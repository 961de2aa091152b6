"""Compares logits and kernels with float64 on the host, for benchmarks/accelerator.py."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float64_decoder, kernels
from jaxrl_tis import sharding
from jaxrl_tis.engine import cache
from jaxrl_tis.models import attention, grouped, quant, transformer
from jaxrl_tis.models.config import ModelConfig

# Program of the logits -> (precision of its products, largest relative error).
PROGRAMS = {"float32": ("highest", 1e-3), "bfloat16": (None, 5e-2)}
FLOAT32, BFLOAT16 = 1e-3, 3e-2  # largest relative error of a kernel, by its inputs


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its inputs.

    Attributes:
      run: the public function, which chooses the kernel by the platform.
      inputs: its arguments.
      expected: the same result in float64, a function of float64 arguments, run on the host.
      bound: the largest relative error.
    """

    run: Callable
    inputs: tuple
    expected: Callable
    bound: float = BFLOAT16


def logits(model: ModelConfig, tokens: int) -> dict[str, dict[str, Any]]:
    """Returns {dtype: {error, bound, is_ok}} of random parameters. The error is the root mean square
    of the difference over that of the float64 logits."""
    params = transformer.init(model, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, model.vocab_size, tokens).astype(np.int32)
    expected = float64_decoder.logits(jax.device_get(params), model, ids)
    found = {}
    run = jax.jit(transformer.logits, static_argnames=("config", "program"))
    for dtype, (precision, bound) in PROGRAMS.items():
        program = transformer.Program(dtype=dtype)
        with jax.default_matmul_precision(precision):
            found_tv = run(params, model, ids[None], program=program)[0]
        difference = np.asarray(found_tv, np.float64) - expected
        error = np.sqrt(np.mean(difference**2) / np.mean(expected**2))
        found[dtype] = judged(float(error), bound)
    return found


def judged(error: float, bound: float) -> dict[str, Any]:
    return {"error": error, "bound": bound, "is_ok": bool(error <= bound)}  # False for NaN


def check(case: Case) -> dict[str, Any]:
    """Returns {kernel, error, bound, is_ok}. `kernel` is "Pallas" if the compiled program calls a
    TPU kernel, else "XLA"."""
    compiled = jax.jit(case.run).lower(*case.inputs).compile()
    kernel = "Pallas" if "tpu_custom_call" in (compiled.as_text() or "") else "XLA"
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), compiled(*case.inputs))
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = jax.tree.map(np.asarray, case.expected(*jax.tree.map(on_host, case.inputs)))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return {"kernel": kernel} | judged(max(relative_error(*pair) for pair in pairs), case.bound)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference over the largest expected number. An infinity has to be the
    same infinity."""
    is_finite = np.isfinite(expected)
    if not np.array_equal(found[~is_finite], expected[~is_finite]):
        return np.nan
    found, expected = found[is_finite], expected[is_finite]
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def on_host(x: jax.Array) -> jax.Array:
    """Returns an array on the host, floats as float64."""
    values = np.asarray(x)
    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    return jnp.asarray(values, jnp.float64 if is_float else values.dtype)


def cases(width: int, vocab: int) -> dict[str, Case]:
    """Returns the kernels by name.

    Args:
      width: of hidden states, a multiple of 128.
      vocab: columns of the output head.
    """
    segments = {
        name: Case(function, inputs, function, FLOAT32)
        for name, (function, inputs) in kernels.segment_cases(8, 2048, 16).items()
    }
    scores = kernels.logprob_cases(64, width, vocab)
    score, inputs = scores["token_logprob"]
    targets = np.asarray(jax.random.randint(jax.random.key(2), inputs[1].shape[:2], 0, vocab))

    def log_probs(weight_vd, x_bnd):
        logp = jax.nn.log_softmax(x_bnd @ weight_vd.T)
        return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]

    of_heads = {
        "token_logprob": Case(lambda *x: score(*x).logp, inputs, log_probs, FLOAT32),
        "token_logprob gradient": Case(
            scores["token_logprob gradient"][0], inputs,
            jax.grad(lambda *x: jnp.sum(log_probs(*x)), (0, 1)),
        ),
    }
    return segments | of_heads | attention_cases() | cache_cases() | product_cases(width)


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def softmax_attention(q_bthk, k_bsnk, v_bsnk, is_seen_bts) -> jax.Array:
    """Returns attention [B,T,H,K] from all scores, in the dtype of the inputs."""
    n = k_bsnk.shape[2]
    q_btngk = q_bthk.reshape(*q_bthk.shape[:2], n, -1, q_bthk.shape[-1])
    scores = jnp.einsum("btngk,bsnk->bngts", q_btngk, k_bsnk) * q_bthk.shape[-1] ** -0.5
    probs = jax.nn.softmax(jnp.where(is_seen_bts[:, None, None], scores, -jnp.inf))
    return jnp.einsum("bngts,bsnk->btngk", probs, v_bsnk).reshape(q_bthk.shape)


def attention_cases() -> dict[str, Case]:
    """Returns attention of packed rows of 256 tokens, with 8 query heads and 2 key/value heads."""
    inputs = normal(0, 2, 256, 8, 64), normal(1, 2, 256, 2, 64), normal(2, 2, 256, 2, 64)
    segments = jnp.asarray(1 + (np.arange(256) >= [[100], [200]]), jnp.int32)

    def run(q, k, v):
        return attention.row_attention(q, k, v, segments)

    def expected(q, k, v):
        ids = np.asarray(segments)
        is_causal = np.tril(np.ones((256, 256), bool))
        return softmax_attention(q, k, v, is_causal & (ids[:, :, None] == ids[:, None]))

    gradient = lambda f: jax.grad(lambda *x: jnp.sum(f(*x).astype(jnp.float32) ** 2), (0, 1, 2))
    wide = jax.grad(lambda *x: jnp.sum(expected(*x) ** 2), (0, 1, 2))
    return {
        "row_attention": Case(run, inputs, expected),
        "row_attention gradient": Case(gradient(run), inputs, wide),
    }


def cache_cases() -> dict[str, Case]:
    """Returns decode attention over pages of a bfloat16 and an int8 cache, with the content of the
    pages after it."""
    return {f"decode_attention {dtype}": _cache_case(dtype) for dtype in ("bfloat16", "int8")}


def _cache_case(dtype: str) -> Case:
    layer, size, heads, width, index = 1, 128, 2, 64, np.array([0, 127, 128, 300], np.int32)
    table = 1 + np.arange(len(index) * 3, dtype=np.int32).reshape(len(index), 3)
    pages = table.size + 1
    empty = cache.StackedKV(jnp.zeros(0, dtype), None)
    pool = empty.beside(*(normal(s, 2 * pages, heads, size, width) for s in (0, 1)))
    pool = jax.tree.map(lambda x: x.reshape(2, pages, *x.shape[1:]), pool)
    new = tuple(normal(s, len(index), 1, heads, width) for s in (2, 3))
    inputs = normal(4, len(index), 1, 8, width), *new, pool

    def run(q, k, v, pool):
        attend = cache.append(
            jnp.asarray(index[:, None]), jnp.ones((len(index), 1), bool), jnp.asarray(table),
            sharding.single_device(),
        )
        out, after = attend(q, k, v, (pool, jnp.int32(layer)))
        return out, after.kv[layer].astype(jnp.float32)

    def expected(q, k, v, pool):
        # The codes of the new token: `empty.beside` on the narrow values, as the cache stores them.
        added = empty.beside(*(x[:, 0] for x in new))
        kv, scale = np.array(pool.kv[layer], np.float64), None
        page, at = table[np.arange(len(index)), index // size], index % size
        kv[page, :, at] = np.asarray(added.kv, np.float64)
        after = kv.copy()
        if pool.scale is not None:
            scale = np.array(pool.scale[layer])
            scale[page, :, :, at] = np.asarray(added.scale)
            kv *= np.repeat(np.swapaxes(scale, 2, 3), width, axis=-1)
        rows = np.swapaxes(kv[table], 2, 3).reshape(len(index), -1, heads, 2 * width)
        is_seen = np.arange(rows.shape[1]) <= index[:, None, None]
        return softmax_attention(q, rows[..., :width], rows[..., width:], is_seen), after

    return Case(run, inputs, expected)


def product_cases(width: int) -> dict[str, Case]:
    """Returns products of experts, one of them without rows, and an int8 product of the layers."""
    sizes = np.array([40, 0, 100, 60], np.int32)
    x, w = normal(0, 256, width), normal(1, len(sizes), width, 128) * width**-0.5
    group = np.repeat(np.arange(len(sizes)), sizes)
    coded = quant.quantize_weight(w, "w8a16")

    def by_expert(x, w):
        y = jnp.einsum("mi,mio->mo", x[: len(group)], w[group])
        return jnp.pad(y, ((0, len(x) - len(group)), (0, 0)))

    gradient = lambda f: jax.grad(lambda *z: jnp.sum(f(*z).astype(x.dtype) ** 2), (0, 1))
    run = lambda x, w: grouped.grouped_matmul(x, w, jnp.asarray(sizes))
    wide = jax.grad(lambda *z: jnp.sum(by_expert(*z) ** 2), (0, 1))

    def rounded(x, axis):
        scale = jnp.abs(x).max(axis=axis, keepdims=True) / 127
        return jnp.round(x / scale) * scale

    return {
        "grouped_matmul": Case(run, (x, w), by_expert),
        "grouped_matmul gradient": Case(gradient(run), (x, w), wide),
        "grouped_matmul int8": Case(
            run, (x, coded), lambda x, w: by_expert(x, w.q.astype(x.dtype) * w.scale)
        ),
        "dot W8A8": Case(
            quant.dot, (x, quant.quantize_weight(w[0], "w8a8")),
            lambda x, w: rounded(x, -1) @ (w.q.astype(x.dtype) * w.scale),
        ),
    }
