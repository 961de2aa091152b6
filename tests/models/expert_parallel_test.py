"""Experts on several devices: the numbers, gradients and samples of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl_tis import sharding
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.kernels import tiles
from jaxrl_tis.models import expert_parallel, moe, placement, quant, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from tests import tiny, weights

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("collectives sum, and XLA compiles the programs"),
]

B, T, D, F, E, K = 8, 6, 16, 16, 8, 2
# (data, fsdp, tensor, context, expert)
MESHES = [
    (1, 1, 1, 1, 8), (1, 2, 2, 1, 2), (2, 2, 2, 1, 1), (1, 1, 2, 2, 2), (2, 1, 1, 1, 4),
    (1, 4, 1, 1, 2),
]
RNG = np.random.default_rng(0)


def close(found, expected):
    """Equal to 1e-5 of the largest number of each array."""
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(np.float32(rng.normal(size=shape)) for shape in shapes)


def float_weights():
    return drawn(1, (E, D, F), (E, D, F), (E, F, D))


def random_ids(seed=2):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(E)[:K] for _ in range(B * T)]).reshape(B, T, K).astype(np.int32)


def pulled(run, ids, rows, ws, y_bar):
    """(value, gradients for rows (x, gates) and the weights) of run(x, ids, gates, weights)."""
    value, pull = jax.vjp(lambda rows, ws: run(rows[0], ids, rows[1], ws), rows, ws)
    return value, pull(y_bar)


def on_one(x, ids, gates, ws):
    flat = lambda x: x.reshape(-1, x.shape[-1])
    return moe.experts(*map(flat, (x, ids, gates)), ws, E, *moe.FAST).reshape(x.shape)


def on_mesh(shape, rules=sharding.TRAIN_RULES):
    layout = sharding.layout(shape, rules)
    return layout, lambda x, ids, gates, ws: expert_parallel.experts(x, ids, gates, ws, E, layout)


def placed(layout, ws):
    """Weights as a device holds them."""
    _, specs = expert_parallel._specs(layout, ws)
    return jax.device_put(
        ws, jax.tree.map(lambda spec: jax.NamedSharding(layout.mesh, spec), specs)
    )


def check(shape, ids, ws=None):
    ws = float_weights() if ws is None else ws
    x, gates, y_bar = drawn(3, (B, T, D), (B, T, K), (B, T, D))
    layout, run = on_mesh(shape)
    found = jax.jit(functools.partial(pulled, run))(ids, (x, gates), placed(layout, ws), y_bar)
    expected = jax.jit(functools.partial(pulled, on_one))(ids, (x, gates), ws, y_bar)
    close(found, expected)
    for bar, w in zip(jax.tree.leaves(found[1][1]), jax.tree.leaves(placed(layout, ws)), strict=True):
        assert bar.sharding.is_equivalent_to(w.sharding, 3)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_values_and_gradients_are_those_of_one_device(shape):
    check(shape, random_ids())


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 1, 2, 1, 2)], ids=str)
def test_gradients_of_invariant_numerics_are_those_of_one_device(shape):
    """A device has the whole sum of a product over the width, and so the whole gradient of a gate."""
    width = 2 * tiles.K_TILE
    ws = drawn(1, (4, tiles.K_TILE, width), (4, tiles.K_TILE, width), (4, width, tiles.K_TILE))
    ids = random_ids() % 4
    ids[..., 1] = (ids[..., 0] + 1) % 4
    x, gates, y_bar = drawn(3, (B, T, tiles.K_TILE), (B, T, K), (B, T, tiles.K_TILE))
    layout = sharding.layout(shape, sharding.TRAIN_RULES)
    run = lambda x, ids, gates, ws: expert_parallel.experts(x, ids, gates, ws, 4, layout, True)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    alone = lambda x, ids, gates, ws: moe.experts(
        *map(flat, (x, ids, gates)), ws, 4, *moe.INVARIANT).reshape(x.shape)
    found = jax.jit(functools.partial(pulled, run))(ids, (x, gates), placed(layout, ws), y_bar)
    expected = jax.jit(functools.partial(pulled, alone))(ids, (x, gates), ws, y_bar)
    close(found, expected)


@pytest.mark.all
@pytest.mark.parametrize("shape", [MESHES[0], MESHES[3]], ids=str)
def test_tokens_that_travel_in_chunks(shape, monkeypatch):
    """A device has 6 tokens, or 12: three chunks of 2, or three of 4."""
    monkeypatch.setattr(expert_parallel, "CHUNK", 5 if shape[3] == 2 else 2)
    tokens = B * T // 8 * shape[2]
    chunks = expert_parallel._chunks(jnp.zeros((1, tokens, 1)))[0]
    assert chunks.shape == ((3, 4, 1) if shape[3] == 2 else (3, 2, 1))
    check(shape, random_ids())


def test_tokens_that_no_small_number_divides(monkeypatch):
    """A device has 7 tokens: three chunks of 3, two tokens of which are zeros."""
    monkeypatch.setattr(expert_parallel, "CHUNK", 3)
    monkeypatch.setitem(globals(), "T", 7)
    assert expert_parallel._chunks(jnp.zeros((1, T, 1)))[0].shape == (3, 3, 1)
    check(MESHES[0], random_ids())


@pytest.mark.cases("one device")
@pytest.mark.parametrize("experts", [(0, 1), (6, 3)], ids=["one device", "two devices"])
def test_experts_without_tokens(experts):
    """All tokens go to the two experts of the first of four devices, or to one of each of two."""
    ids = np.broadcast_to(np.int32(experts), (B, T, K))
    x, gates, y_bar = drawn(3, (B, T, D), (B, T, K), (B, T, D))
    layout, run = on_mesh((2, 1, 1, 1, 4))
    ws = float_weights()
    found = jax.jit(functools.partial(pulled, run))(ids, (x, gates), placed(layout, ws), y_bar)
    close(found, jax.jit(functools.partial(pulled, on_one))(ids, (x, gates), ws, y_bar))
    for bar in found[1][1]:
        is_used = np.abs(np.asarray(bar)).max(axis=(1, 2)) > 0
        assert set(np.flatnonzero(is_used)) == set(experts)


def masters():
    return tuple(quant.Master(w, "w8a8") for w in float_weights())


@pytest.mark.all
@pytest.mark.cases("(1, 2, 2, 1, 2)")
@pytest.mark.parametrize("shape", [MESHES[1], MESHES[5]], ids=str)
def test_masters_have_the_scales_of_whole_columns(shape):
    check(shape, random_ids(), masters())


def test_masters_are_quantized_from_their_own_dtype():
    """As a sampler does it. The products are in bfloat16."""
    x, gates = drawn(3, (B, T, D), (B, T, K))
    layout, run = on_mesh((1, 4, 1, 1, 2))
    args = jnp.asarray(x, jnp.bfloat16), random_ids(), gates
    found = jax.jit(run)(*args, placed(layout, masters()))
    one = jax.jit(lambda *x: on_one(*x).astype(jnp.bfloat16))
    np.testing.assert_array_equal(found, one(*args, masters()))
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), masters())
    assert (np.asarray(found) != one(*args, rounded)).any()


@pytest.mark.cases("w8a16-(1, 1, 2, 1, 4)", "w8a8-(1, 1, 2, 1, 4)")
@pytest.mark.parametrize("shape", [(1, 1, 2, 1, 4), (2, 1, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "fp8_w8a8"])
def test_weights_of_8_bits_are_served_as_on_one_device(scheme, shape):
    x, gates = drawn(3, (B, T, D), (B, T, K))
    layout, run = on_mesh(shape, sharding.SERVE_RULES)
    ws = tuple(quant.quantize_weight(w, scheme) for w in map(jnp.asarray, float_weights()))
    expected = jax.jit(on_one)(x, random_ids(), gates, ws)
    close(jax.jit(run)(x, random_ids(), gates, placed(layout, ws)), expected)
    if scheme == "w8a16":
        floats = tuple(w.q.astype(jnp.float32) * w.scale for w in ws)
        close(expected, jax.jit(on_one)(x, random_ids(), gates, floats))


# The exchange


def sent(rows, sizes, room):
    """The rows [d,room,D] that each device d receives, in the order of their sources."""
    out = np.zeros((len(sizes), room, rows.shape[-1]), np.float32)
    for d in range(len(sizes)):
        parts = [
            rows[s, sizes[s, :d].sum() : sizes[s, : d + 1].sum()] for s in range(len(sizes))
        ]
        parts = np.concatenate(parts)
        out[d, : len(parts)] = parts
    return out


def test_an_exchange_and_its_gradient():
    """Of 3 devices: row (s, d) of the sizes is what s sends d. The second sends the first nothing."""
    sizes = np.int32([[2, 1, 4], [0, 5, 1], [3, 0, 2]])
    count, room = 7, 9
    rows, bars = drawn(4, (3, count, 2), (3, room, 2))
    layout = sharding.layout((1, 1, 1, 1, 3), sharding.SERVE_RULES)

    def local(rows, bars):
        move = lambda x: expert_parallel.exchanged(x, jnp.asarray(sizes), room, "expert", True)
        value, pull = jax.vjp(move, rows[0])
        return value[None], pull(bars[0])[0][None]

    spec = PartitionSpec("expert")
    found, found_bars = jax.jit(layout.shard(local, (spec, spec), (spec, spec)))(rows, bars)
    np.testing.assert_array_equal(found, sent(rows, sizes, room))
    np.testing.assert_array_equal(found_bars, sent(bars, sizes.T, count))


# The decoder

CONFIG = ModelConfig(
    family="glm4_moe", vocab_size=32, embed_dim=16, num_layers=3, num_heads=4, num_kv_heads=4,
    head_dim=8, mlp_dim=16, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-5,
    qkv_bias=False, qk_norm=False, tie_embeddings=False,
    moe=MoeConfig(8, 2, 16, "sigmoid", dense_layers=(0,), shared_dim=16, scale=1.5),
)
# Rows of one sequence, of several, and with padding.
SEGMENTS = np.array([[1] * 12, [1] * 5 + [2] * 7, [1] * 3 + [2] * 6 + [3] * 3, [1] * 9 + [0] * 3] * 2)
TOKENS = RNG.integers(0, 32, SEGMENTS.shape).astype(np.int32)


@functools.cache
def params():
    return weights.drawn(CONFIG, seed=3, scale=1.0)


def positions():
    starts = np.diff(SEGMENTS, axis=1, prepend=0) != 0
    place = np.arange(SEGMENTS.shape[1])
    return (place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)).astype(np.int32)


def losses(layout, replay):
    """((loss, the routers' own choices), gradients of all parameters)."""
    program = transformer.Program(layout=layout)

    def loss(params):
        out = transformer.rows_routed(
            params, CONFIG, program, TOKENS, positions(), SEGMENTS.astype(np.int32), replay=replay,
            asked=moe.Asked(routes=True),
        )
        logits = transformer.head_logits(params, program, out.x)
        return jnp.sum(jax.nn.log_softmax(logits)[..., 0] * (SEGMENTS > 0)), out.routed.ids

    stored = placement.put(params(), layout, CONFIG) if layout else params()
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(stored)


@functools.cache
def on_one_device(is_replayed):
    replay = None
    if is_replayed:
        ids = (np.asarray(on_one_device(False)[0][1]) + 1 + np.arange(2)) % 8
        replay = moe.Replay(ids, SEGMENTS == 1)
    return *losses(None, replay), replay


def without_bias(params):
    """Without the parameter that has no gradient."""
    layers = {name: x for name, x in params["layers"].items() if name != "router_bias"}
    return params | {"layers": layers}


@pytest.mark.all
@pytest.mark.cases("(1, 1, 2, 2, 2)-replayed")
@pytest.mark.parametrize("is_replayed", [False, True], ids=["native", "replayed"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_decoder_gives_the_numbers_of_one_device(shape, is_replayed):
    (expected, own), gradients, replay = on_one_device(is_replayed)
    if is_replayed:
        assert abs(float(expected) - float(on_one_device(False)[0][0])) > 0.1
    layout = sharding.layout(shape, sharding.TRAIN_RULES)
    (found, ids), found_gradients = losses(layout, replay)
    np.testing.assert_array_equal(ids, own)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert not np.any(found_gradients["layers"]["router_bias"])
    close(*map(without_bias, (found_gradients, gradients)))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_device_holds_its_part_of_the_experts(shape):
    _, fsdp, tensor, _, expert = shape
    layers = placement.put(params(), sharding.layout(shape, sharding.TRAIN_RULES), CONFIG)["layers"]
    for name, (width, hidden) in {"expert_gate": (2, 3), "expert_down": (3, 2)}.items():
        whole = list(layers[name].shape)
        whole[1] //= expert
        whole[width] //= fsdp
        whole[hidden] //= tensor
        assert {s.data.shape for s in layers[name].addressable_shards} == {tuple(whole)}


def test_experts_that_do_not_divide_are_refused():
    six = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, num_experts=6))
    said = "6 experts cannot be cut into the 4 shards of the mesh axis 'expert'"
    for rules in (sharding.TRAIN_RULES, sharding.SERVE_RULES):
        layout = sharding.layout((1, 1, 1, 1, 4), rules)
        with pytest.raises(ValueError, match=said):
            placement.shardings(layout, six)
    experts = dict(
        model__num_experts=6, model__expert_dim=16, mesh__train=(1, 1, 1, 1, 4),
        mesh__serve=(1, 1, 1), train__microbatch_rows=4,
    )
    with pytest.raises(ValueError, match=said):
        tiny.setup(**experts)
    with pytest.raises(ValueError, match=said):
        sampler((1, 1, 1, 1, 4), "none", six)


# The sampler


def sampler(shape, scheme, config=CONFIG):
    return Engine(config, EngineConfig(
        slots=8, max_length=32, steps=3, prefill_batch=8, prefill_chunk=8, unroll=False,
        quantization=scheme, record_routes=True,
    ), sharding.layout(shape, sharding.SERVE_RULES))


@functools.cache
def sampled(shape, scheme):
    engine = sampler(shape, scheme)
    scheduler, out = Scheduler(engine, engine.load(params())), {}
    for i in range(10):
        prompt = (np.arange(3 + 2 * i, dtype=np.int32) * 5 + i) % 32
        kind = SamplingParams(temperature=(1.0, 0.0)[i % 2], max_tokens=3 + i % 5)
        scheduler.add(Request(f"r{i}", prompt, i, kind))
    while scheduler.pending:
        out |= {t.id: t for t in scheduler.step()}
    return out


@pytest.mark.all
@pytest.mark.parametrize("shape", [(1, 1, 2, 1, 2), (1, 1, 1, 1, 8), (2, 1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("scheme", ["none", "w8a16", "w8a8"])
def test_an_engine_samples_the_tokens_and_routes_of_one_device(scheme, shape):
    found, expected = sampled(shape, scheme), sampled((1, 1, 1), scheme)
    assert len(found) == len(expected) == 10
    for id, t in expected.items():
        np.testing.assert_array_equal(found[id].tokens, t.tokens)
        np.testing.assert_array_equal(found[id].routes, t.routes)
        np.testing.assert_allclose(found[id].logp_raw, t.logp_raw, atol=5e-5)
