"""What the sampler is given: the head's dtype, what is moved between meshes, and whose it is."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.aot import hlo
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models import lora, placement, transformer, transforms
from jaxrl_tis.models.config import ModelConfig, RopeConfig

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("the partitioner places the arrays and XLA compiles the programs"),
]

CONFIG = ModelConfig(
    family="llama", vocab_size=50, embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, mlp_dim=48, rope=RopeConfig(kind="default", theta=10000.0), max_position=16,
    norm_eps=1e-5, qkv_bias=False, qk_norm=False, tie_embeddings=True,
)


@pytest.mark.all
@pytest.mark.cases("True-False-none", "False-True-w8a8")
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_float32_head_has_the_learners_weights(is_tied, unroll, quantization):
    config = dataclasses.replace(CONFIG, tie_embeddings=is_tied)
    params = transformer.init(config, jax.random.key(0))
    head = "embed" if is_tied else "head"
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (4, 32)), jnp.bfloat16)
    program = transformer.Program(dtype="bfloat16", fp32_head=True)
    expected = transformer.head_logits(params, program, x)
    for highest in (True, False):
        engine = Engine(config, EngineConfig(
            slots=2, max_length=16, dtype="bfloat16", fp32_head=highest, unroll=unroll,
            quantization=quantization,
        ))
        loaded = engine.load(params)
        dtypes = {name: w.dtype for name, w in loaded.items() if name != "layers"}
        rest = dict.fromkeys(dtypes, jnp.bfloat16)
        assert dtypes == (rest | {head: jnp.float32} if highest else rest)
        gap = np.abs(transformer.head_logits(loaded, engine.program, x) - expected).max()
        assert gap == 0 if highest else gap > 1e-4


@pytest.mark.parametrize("is_tied", [True, False])
def test_with_float16_a_head_has_the_learners_weights_in_any_case(is_tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=is_tied)
    params = transformer.init(config, jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (4, 32)), jnp.float16)
    engine = Engine(config, EngineConfig(slots=2, max_length=16, dtype="float16"))
    expected = transformer.head_logits(params, transformer.Program(dtype="float16"), x)
    loaded = engine.load(params)
    np.testing.assert_array_equal(transformer.head_logits(loaded, engine.program, x), expected)
    assert loaded["layers"][0]["mlp_norm"].dtype == jnp.float16


def test_noise_is_added_before_weights_are_cast():
    engine = Engine(CONFIG, EngineConfig(slots=2, max_length=16, dtype="bfloat16"))
    params = transformer.init(CONFIG, jax.random.key(0))
    noise = transforms.noise(0, 9, 10, 0.1, 0.1, 1)
    noisy, expected = engine.load(params, noise), engine.load(transforms.add_noise(params, noise))
    jax.tree.map(np.testing.assert_array_equal, noisy, expected)
    norm = lambda served: np.float32(served["layers"][0]["mlp_norm"])
    assert np.abs(norm(noisy) - norm(engine.load(params))).max() > 0.1


MESHED = dataclasses.replace(
    CONFIG, vocab_size=72, embed_dim=128, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8,
    mlp_dim=64,
)


def learner_params(shape):
    layout = sharding.layout(shape, sharding.TRAIN_RULES)
    return placement.put(transformer.init(MESHED, jax.random.key(0)), layout, MESHED)


def engine(shape, **fields):
    layout = sharding.layout(shape, sharding.SERVE_RULES)
    return Engine(MESHED, EngineConfig(slots=8, max_length=16, **fields), layout)


def equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.cases("shape1-True")
@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 8), (4, 1, 2)])
def test_eight_bit_values_are_moved(shape, unroll):
    served = engine(shape, quantization="w8a8", unroll=unroll, dtype="bfloat16")
    load, args = served.programs(learner_params((1, 8, 1)))["load"]
    elements = collections.Counter()
    for c in hlo.Module(load.lower(*args).compile().as_text()).collectives():
        for array in c.shapes:
            is_table = MESHED.vocab_size // shape[2] in array.dims
            elements["table" if is_table else array.dtype] += c.runs * math.prod(array.dims)
    weights = 2 * 7 * MESHED.embed_dim * 64
    assert elements["s8"] >= weights / 8
    assert elements["f32"] < weights / 16  # scales and norms
    assert 0 < elements.pop("table") <= 2 * MESHED.vocab_size * MESHED.embed_dim / shape[2]
    assert elements.pop("u32") <= 2 * 2 * len(jax.tree.leaves(served.abstract_params()))  # fingerprints
    assert set(elements) == {"s8", "f32"}


@pytest.mark.all
@pytest.mark.cases("shape1-w8a8")
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2), (4, 1, 2)])
def test_served_parameters_outlive_the_learners_on_the_same_and_on_fewer_devices(
    shape, quantization
):
    served = engine(shape, quantization=quantization, dtype="float32")
    expected = jax.tree.map(np.array, served.load(transformer.init(MESHED, jax.random.key(0))))
    params = learner_params((1, 8, 1))
    with jax.transfer_guard_host_to_device("disallow_explicit"):  # not by way of the host
        found = served.load(params)
    jax.block_until_ready(found)
    jax.tree.map(lambda x: x.delete(), params)
    equal(found, expected)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(found)} == {math.prod(shape)}


@pytest.mark.all
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_queries_keys_and_values_are_joined_where_they_are_served(quantization):
    """A device has the columns of its own heads: those that the parts have there."""
    fields = dict(quantization=quantization, dtype="bfloat16", unroll=False)
    params = learner_params((1, 8, 1))
    parts = engine((4, 1, 2), **fields).load(params)
    found = engine((4, 1, 2), joins_qkv=True, **fields).load(params)

    def own(x):
        shards = {s.device: np.asarray(s.data) for s in x.addressable_shards}
        return {d: data.reshape(*data.shape[:-1], 4, -1) for d, data in shards.items()}

    for whole, *three in zip(*map(jax.tree.leaves, (
        found["layers"]["qkv"], *map(parts["layers"].get, "qkv")
    )), strict=True):
        for device, data in own(whole).items():
            expected = np.concatenate([own(x)[device] for x in three], axis=-1)
            np.testing.assert_array_equal(data, expected)
    rest = lambda p: {n: x for n, x in p.items() if n != "layers"}
    equal(rest(found), rest(parts))


def test_formats_that_differ_and_factors_are_not_joined():
    differs = EngineConfig(slots=2, max_length=16, joins_qkv=True, quantization="w8a8", unquantized=("v",))
    assert not differs.is_joined and dataclasses.replace(differs, unquantized=("o",)).is_joined
    assert not dataclasses.replace(differs, quantization="none", numerics="invariant").is_joined
    adapter = lora.Adapter.of(lora.lora(rank=2), CONFIG, transformer.abstract_params(CONFIG))
    shapes = transformer.abstract_params(CONFIG)
    adapted = adapter.join(shapes, adapter.abstract(shapes))
    with pytest.raises(ValueError, match="joins_qkv is set"):
        Engine(CONFIG, EngineConfig(slots=2, max_length=16, joins_qkv=True)).load(adapted)


@pytest.mark.all
def test_weights_that_change_on_the_way_are_not_served(monkeypatch):
    served, params = engine((4, 1, 2), quantization="w8a8"), learner_params((1, 4, 1))
    moved = sharding.moved

    def damaged(x, place):
        bad = moved(x, place)
        return bad.at[3].multiply(-1) if x.ndim == 1 else bad

    served.load(params)
    monkeypatch.setattr(sharding, "moved", damaged)
    with pytest.raises(RuntimeError, match="the weight sync damaged them"):
        served.load(params)
