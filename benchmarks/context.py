"""Compares the memory of gathered attention and ring attention over a context axis on TPU v5p.

    python -m benchmarks.context [--model=32b] [--shards=2,4,8,16] [--length=32768] [--layers=3]

First the results and gradients of the ring are compared with `row_attention` on CPU. Then each form
is compiled in a scan over layers of projections and attention that keeps only the layers' inputs.
The compiler's figures for one device are printed. The steps of a ring are either unrolled or a
loop: an unrolled ring can send the next keys while a kernel runs, and a loop holds fewer arrays.
Nothing runs on a TPU. The ring calls private functions of JAX's splash attention. The last columns
are the tiles of scores that the first and the last shard compute forward, over the mean: rows of
the gathered form are in `sharding.balanced_order`, those of the ring are not.

All forms sum the gradients of the weights by `all-reduce`, the gathered form also those of its
keys. Collectives count whole arrays: the result of a gather, the operand of a sum.
"""

import argparse
import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from benchmarks import arguments
from jaxrl_tis import sharding
from jaxrl_tis.aot.chips import Topology
from jaxrl_tis.aot.hlo import Module
from jaxrl_tis.models.attention import SPLASH_TILE, row_attention, splash_blocks
from jaxrl_tis.runtime import cli

# Embedding, query heads, key/value heads, head size.
MODELS = {"32b": (5120, 40, 8, 128), "0.5b": (896, 14, 2, 64)}
TENSOR = 2
# Context shards -> a slice of TENSOR times as many chips.
TOPOLOGIES = {2: "v5p:2x2x1", 4: "v5p:2x2x2", 8: "v5p:2x2x4", 16: "v5p:2x4x4"}
MIB = 2**20


@functools.cache
def splash_kernel(length: int, is_causal: bool, interpret: bool):
    """Returns splash attention of one shard of queries and keys: (output, (log-sum-exp,))."""
    mask = splash_attention.CausalMask if is_causal else splash_attention.FullMask
    with jax.ensure_compile_time_eval():
        return splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([mask((length, length))]),
            block_sizes=splash_blocks(length, length), head_shards=1, q_seq_shards=1,
            save_residuals=True, interpret=interpret,
        )


def ring(axis: str, shards: int, causal, full, unroll: bool) -> Callable:
    """Returns ring attention of a device's queries to its own keys and those of earlier shards.

    Arrays have heads first, and gradients are summed in float32. In step s device i holds the keys
    of shard i - s; a negative number means a later shard. Each query sees itself in step 0, and the
    log-sum-exp is finite from then on. A shard without keys of the query's segment gets weight
    zero, forward and backward.
    """
    pairs = [(i, (i + 1) % shards) for i in range(shards)]
    turned = lambda tree: jax.tree.map(lambda x: jax.lax.ppermute(x, axis, pairs), tree)
    float32 = lambda x: x.astype(jnp.float32)
    repeat = functools.partial(jax.lax.fori_loop, 1, shards, unroll=unroll)

    def merged(so_far, q, keys, segments):
        (out, lse), (k, v, segments_k) = so_far, keys
        ids = splash_attention.SegmentIds(segments, segments_k)
        new_out, (new_lse,) = jax.vmap(full)(q, k, v, ids)
        total = jnp.logaddexp(lse, new_lse)
        share, new_share = (jnp.exp(x - total)[..., None] for x in (lse, new_lse))
        return out * share + float32(new_out) * new_share, total

    def forward(q, k, v, segments):
        place, keys = jax.lax.axis_index(axis), (k, v, segments)
        ids = splash_attention.SegmentIds(segments, segments)
        out, (lse,) = jax.vmap(causal)(q, k, v, ids)

        def one(step, carry):
            so_far, keys = carry[0], turned(carry[1])
            skip = lambda so_far, *_: so_far
            return jax.lax.cond(place >= step, merged, skip, so_far, q, keys, segments), keys

        (out, lse), _ = repeat(one, ((float32(out), lse), keys))
        out = out.astype(q.dtype)
        return out, (q, k, v, segments, out, lse)

    def gradients(kernel, kept, keys, dout):
        """Returns the gradients of q, k and v in one step, from the whole output and
        log-sum-exp."""

        def of_row(q, segments, out, lse, dout, k, v, segments_k):
            ids = splash_attention.SegmentIds(segments, segments_k)
            kept = q, k, v, ids, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info
            return splash_attention_kernel._splash_attention_bwd(
                **kernel.kwargs, res=kept, do=dout
            )[3:6]

        q, _, _, segments, out, lse = kept
        return jax.vmap(of_row)(q, segments, out, lse, dout, *keys)

    def backward(kept, dout):
        q, k, v, segments = kept[:4]
        place, keys = jax.lax.axis_index(axis), (k, v, segments)
        dq, dk, dv = gradients(causal, kept, keys, dout)
        total = tuple(map(float32, (dq, dk, dv)))

        def added(total, keys):
            more = gradients(full, kept, keys, dout)
            return tuple(a + float32(b) for a, b in zip(total, more, strict=True))

        def one(step, carry):
            (dq, *dkv), keys = carry
            total, keys = (dq, *turned(dkv)), turned(keys)
            return jax.lax.cond(place >= step, added, lambda total, _: total, total, keys), keys

        total, _ = repeat(one, (total, keys))
        total = total[0], *turned(total[1:])
        return *(t.astype(x.dtype) for t, x in zip(total, (q, k, v), strict=True)), None

    attend = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    attend.defvjp(forward, backward)
    return attend


def ring_attention(q_bthk, k_btnk, v_btnk, segments_bt, layout, unroll: bool) -> jax.Array:
    """`row_attention` as a ring: no device holds all keys and values of a row."""
    shards = layout.mesh.shape["context"]
    interpret = layout.platform == "cpu"
    length = q_bthk.shape[1] // shards
    causal, full = (splash_kernel(length, x, interpret) for x in (True, False))
    attend = ring("context", shards, causal, full, unroll)

    def attend_locally(q_bthk, k_btnk, v_btnk, segments_bt):
        heads_first = lambda x: jnp.swapaxes(x, 1, 2)
        scaled = (q_bthk.astype(jnp.float32) * q_bthk.shape[-1] ** -0.5).astype(q_bthk.dtype)
        return heads_first(attend(*map(heads_first, (scaled, k_btnk, v_btnk)), segments_bt))

    spec = lambda *axes: layout.sharding(axes).spec
    queries = spec("batch", "length", "heads", None)
    keys = spec("batch", "length", "kv_heads", None)
    return jax.shard_map(
        attend_locally, mesh=layout.mesh, in_specs=(queries, keys, keys, spec("batch", "length")),
        out_specs=queries, check_vma=False,
    )(q_bthk, k_btnk, v_btnk, segments_bt)


def largest_differences(shards: int, unroll: bool, length: int = 1024) -> dict[str, float]:
    """Returns the ring's largest differences from `row_attention`, in float32 on CPU devices.

    AssertionError above 2e-5.
    """
    rng = np.random.default_rng(0)
    draw = lambda heads: rng.normal(0, 1, (2, length, heads, 128)).astype(np.float32)
    q, k, v, weights = draw(4), draw(2), draw(2), draw(4)
    ends = np.array([[0.1, 0.3, 0.62, 0.9], [0.2, 0.26, 0.85, 1.0]]) * length
    segments = 1 + np.sum(np.arange(length)[None, :, None] >= ends[:, None], axis=2)
    segments = np.where(segments == 5, 0, segments).astype(np.int32)  # what is left is padding
    layout = sharding.layout((1, 1, 1, shards), sharding.TRAIN_RULES)

    @functools.partial(jax.jit, static_argnums=0)
    def values(attend, *arrays):
        out, pull = jax.vjp(lambda *x: attend(*x, segments), *arrays)
        return out, *pull(jnp.asarray(weights))

    found = values(lambda q, k, v, seg: ring_attention(q, k, v, seg, layout, unroll), q, k, v)
    expected = values(row_attention, q, k, v)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    names = ("output", "dq", "dk", "dv")
    return {n: float(np.max(np.abs(a - b))) for n, a, b in zip(names, found, expected, strict=True)}


def lowered(attend: Callable, layout, model: str, length: int, layers: int) -> jax.stages.Lowered:
    """Lowers the loss and gradients of layers of attention for one row in bfloat16."""
    embed, heads, kv_heads, size = MODELS[model]

    def struct(shape, *axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes))

    project = lambda n, axis: struct((layers, embed, n, size), "layers", "embed", axis, None)
    weights = {
        "q": project(heads, "heads"), "k": project(kv_heads, "kv_heads"),
        "v": project(kv_heads, "kv_heads"),
        "o": struct((layers, heads, size, embed), "layers", "heads", None, "embed"),
    }

    def loss(weights, x_btd, segments_bt):
        @jax.checkpoint
        def layer(x_btd, w):
            q, k, v = (jnp.einsum("btd,dhk->bthk", x_btd, w[name]) for name in "qkv")
            out_bthk = attend(q, k, v, segments_bt, layout)
            out_btd = x_btd + jnp.einsum("bthk,hkd->btd", out_bthk, w["o"])
            return layout.constrain(out_btd, ("batch", "length", None)), None

        x_btd, _ = jax.lax.scan(layer, x_btd, weights)
        return jnp.mean(jnp.square(x_btd.astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss)).lower(
        weights, struct((1, length, embed), "batch", "length", None),
        struct((1, length), "batch", "length", dtype=jnp.int32),
    )


def work(name: str, shards: int, length: int) -> tuple[float, float]:
    """Returns the tiles of scores that the first and the last shard compute, over the mean."""
    counts = np.arange(shards) + 0.5  # squares of a ring: own keys are half a square
    if name == "gathered":
        last = sharding.balanced_order(length, shards).reshape(shards, -1, SPLASH_TILE)[..., -1]
        counts = (1 + last // SPLASH_TILE).sum(axis=1)
    return counts[0] / counts.mean(), counts[-1] / counts.mean()


def report(name: str, shards: int, length: int, program: jax.stages.Lowered, mesh: dict) -> None:
    start = time.perf_counter()
    compiled = program.compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    module = Module(compiled.as_text() or "")
    counts, moved = Counter(), Counter()
    for c in module.collectives(mesh):
        if "context" in c.axes:
            counts[c.kind] += c.runs
            moved[c.kind] += c.runs * c.bytes
    print(
        f"{shards:6d}  {name:13s}  {memory.temp_size_in_bytes / MIB:8.1f}  "
        f"{memory.peak_memory_in_bytes / MIB:8.1f}  {memory.argument_size_in_bytes / MIB:8.1f}  "
        f"{seconds:7.1f}  " + "{:5.2f}  {:4.2f}  ".format(*work(name, shards, length))
        + ", ".join(f"{counts[k]} {k} {moved[k] / MIB:.0f}" for k in sorted(counts)), flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="32b")
    parser.add_argument("--shards", default="2,4,8,16", help="sizes of the context axis")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the row")
    parser.add_argument("--layers", type=int, default=3)
    args = arguments.parse(parser, model="0.5b", shards="2", length=1024, layers=1)
    counts = args.shards.split(",")
    if not set(counts) <= set(map(str, TOPOLOGIES)):
        parser.error(f"--shards={args.shards}: choose of {', '.join(map(str, TOPOLOGIES))}")
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler needs no TPU
    jax.config.update("jax_num_cpu_devices", 4)
    forms = {"gathered": row_attention}
    arguments.say("comparing the rings with row_attention on CPU")
    for name, unroll in (("unrolled ring", True), ("looped ring", False)):
        forms[name] = functools.partial(ring_attention, unroll=unroll)
        found = ", ".join(f"{k} {v:.1e}" for k, v in largest_differences(4, unroll).items())
        print(f"{name}, largest differences: {found}")
    print(f"{args.model}, a row of {args.length} tokens, {args.layers} layers; MiB on a device")
    print(f"shards  {'form':13s}      temp      peak  argument  seconds  first  last  over context: count, MiB")
    for shards in map(int, counts):
        devices = Topology.parse(TOPOLOGIES[shards]).devices()
        layout = sharding.layout((1, 1, TENSOR, shards), sharding.TRAIN_RULES, devices)
        for name, attend in forms.items():
            arguments.say(f"compiling the {name} form for {shards} shards")
            program = lowered(attend, layout, args.model, args.length, args.layers)
            report(name, shards, args.length, program, dict(layout.mesh.shape))


if __name__ == "__main__":
    cli.run(main)
