"""GPT-OSS: sinks, biases, clamped units and experts in MXFP4. golden_test.py compares its logits with
transformers; here each of these is taken away, and the sampler is beside the learner."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import models, sharding
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models import invariant, lora, moe, placement, quant, transformer
from jaxrl_tis.models.config import ModelConfig
from tests.models import golden_test, samplers

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

FOLDER = pathlib.Path(__file__).parent / "golden" / "gpt_oss_mxfp4"
SHAPE = pathlib.Path(__file__).parents[2] / "configs" / "shapes" / "gpt-oss-20b.json"
GPT_OSS_20B = json.loads(SHAPE.read_text())  # as published


@functools.cache
def gpt_oss():
    return models.load(FOLDER)


def test_a_published_config():
    config = ModelConfig.from_hf(GPT_OSS_20B)
    assert (config.sliding.window, config.sliding.layers) == (128, tuple(range(0, 24, 2)))
    assert config.sliding.rope == config.rope and not config.rope.truncate
    assert (config.moe.num_experts, config.moe.top_k, config.moe.swiglu_limit) == (32, 4, 7.0)
    assert config.has_sinks and config.o_bias and config.qkv_bias and config.moe.has_biases
    leaves = jax.tree.leaves(transformer.abstract_params(config))
    assert sum(x.size for x in leaves) == 20_914_757_184  # as its card says: 21 B
    assert ModelConfig.from_hf(config.to_hf()) == config
    absent = {k: v for k, v in GPT_OSS_20B.items() if k not in ("layer_types", "swiglu_limit", "rope_theta")}
    assert ModelConfig.from_hf(absent) == config


REFUSED = [
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq' .* only 'mxfp4' is"),
    ({"rope_scaling": None}, "neither rope_scaling nor rope_parameters"),
    ({"attention_bias": False}, "attention_bias=False"),
    ({"experts_per_token": 2}, "num_experts_per_tok=4 and experts_per_token=2"),
    ({"swiglu_limit": -1.0}, "swiglu_limit=-1.0 must be at least 0"),
    ({"swiglu_alpha": math.inf}, "swiglu_alpha=inf in config.json must be a finite number"),
]


def test_settings_that_are_refused():
    for changes, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf(GPT_OSS_20B | changes)


def test_what_is_not_computed_is_refused():
    config, params = gpt_oss()
    program = transformer.Program(numerics="invariant")
    with pytest.raises(ValueError, match="no layers with a sliding window and no attention sinks"):
        jax.eval_shape(lambda x: transformer.logits(params, config, x, program=program), np.zeros((1, 4), int))
    alone = dict.fromkeys(sharding.MESH_AXES, 1)
    with pytest.raises(ValueError, match="no attention sinks; set numerics to 'fast'"):
        invariant.check(dataclasses.replace(config, sliding=None), alone, "none")
    shapes = transformer.abstract_params(config)
    with pytest.raises(ValueError, match="targets expert_down, expert_gate, expert_up.*'attention'"):
        lora.Adapter.of(lora.parse("lora(rank=2)"), config, shapes)
    adapter = lora.Adapter.of(lora.parse("lora(rank=2, targets='attention,head')"), config, shapes)
    assert [name for name, _ in adapter.ranks] == ["head", "k", "o", "q", "v"]
    recipe, dense = quant.Recipe("mxfp4"), dataclasses.replace(config, moe=None)
    recipe.check(config, 1)
    with pytest.raises(ValueError, match="is of experts, and the model has none; use none, w8a16"):
        recipe.check(dense, 1)
    with pytest.raises(ValueError, match="experts' width 32 in 2 tensor shards is no multiple"):
        recipe.check(config, 2)


def without(params, *names):
    """The parameters with zeros in place of these; a sink of -1e9 takes no probability."""
    zeros = lambda name: jnp.full_like(params["layers"][name], -1e9 if name == "sinks" else 0)
    return golden_test.with_layers(params, **{name: zeros(name) for name in names})


def other(config, params):
    """{what is taken away: (config, parameters)}."""
    layers = params["layers"]
    unit = lambda **changes: dataclasses.replace(config, moe=dataclasses.replace(config.moe, **changes))
    window = dataclasses.replace(config.sliding, window=10)
    return {
        "sinks": (config, without(params, "sinks")),
        "the clamp": (unit(swiglu_limit=1e9), params),
        "alpha": (unit(swiglu_alpha=1.0), params),
        "the unit": (unit(swiglu_limit=0.0), params),
        "the bias of o": (config, without(params, "o_bias")),
        "the bias of the router": (config, without(params, "router_logits_bias")),
        "the biases of gate": (config, without(params, "expert_gate_bias")),
        "the biases of up": (config, without(params, "expert_up_bias")),
        "the biases of down": (config, without(params, "expert_down_bias")),
        "gate from up": (config, golden_test.with_layers(
            params, expert_gate=layers["expert_up"], expert_up=layers["expert_gate"])),
        "the window": (dataclasses.replace(config, sliding=window), params),
        "exact band limits": (golden_test.with_rope(dataclasses.replace(
            config, sliding=dataclasses.replace(config.sliding, rope=dataclasses.replace(
                config.rope, truncate=True))), truncate=True), params),
    }


@pytest.mark.all
@pytest.mark.parametrize("name", [
    "sinks", "the clamp", "alpha", "the unit", "the bias of o", "the bias of the router",
    "the biases of gate", "the biases of up", "the biases of down", "gate from up", "the window",
    "exact band limits",
])
def test_controls(name):
    assert golden_test.miss("gpt_oss", *other(*golden_test.golden("gpt_oss")[:2])[name]) > 1e-2


def test_the_clamped_unit():
    """By hand: (u + 1) g / (1 + exp(-alpha g)) of clamped u and g."""
    unit = moe.ClampedSwiglu(limit=2.0, alpha=1.5)
    gate, up = np.float32([1, 5, -5, 1]), np.float32([0.5, 7, -7, -9])
    expected = [1.5 / (1 + math.exp(-1.5)), 3 * 2 / (1 + math.exp(-3)), -1 * -5 / (1 + math.exp(7.5)),
                -1 / (1 + math.exp(-1.5))]
    value = jax.jit(lambda *x: unit(*x))
    np.testing.assert_allclose(value(gate, up), expected, rtol=1e-6)
    by_gate, by_up = jax.jit(jax.grad(lambda *x: jnp.sum(unit(*x)), (0, 1)))(gate, up)
    assert (np.asarray(by_gate) != 0).tolist() == [True, False, True, True]
    assert (np.asarray(by_up) != 0).tolist() == [True, False, False, False]


# The sampler: pages of eight positions, a window of nine. Experts in 4 bits are those of the file.

ENGINES = {
    "unrolled": {}, "scanned": dict(unroll=False), "chunks": dict(prefill_chunk=8),
    "4 bits": dict(quantization="mxfp4"), "4 bits, scanned": dict(quantization="mxfp4", unroll=False),
    "int8 keys": dict(cache_dtype="int8"), "shared positions": dict(mesh=(2, 1, 1, 4)),
}


@pytest.mark.all
@pytest.mark.parametrize("name", ENGINES)
def test_the_sampler_has_the_log_probs_of_the_learner(name):
    config, params = gpt_oss()
    sizes = dict(slots=4, max_length=48, steps=3, prefill_batch=2, page_size=8, record_routes=True)
    options = dict(ENGINES[name])
    mesh = options.pop("mesh", None)
    layout = mesh and sharding.layout(mesh, sharding.SERVE_RULES, vocab_size=97)
    engine = Engine(config, EngineConfig(**sizes | options), layout)
    served = engine.load(jax.tree.map(jnp.asarray, params))
    is_kept = {x.dtype == jnp.uint8 for path, x in jax.tree.leaves_with_path(served) if any(
        getattr(key, "key", "") in ("expert_gate", "expert_up", "expert_down") for key in path)}
    assert is_kept == {name.startswith("4 bits")}
    for t, row in samplers.sampled(engine, served):
        logits, ids = golden_logits(row)
        atol = 0.5 if name == "int8 keys" else 3e-4
        np.testing.assert_allclose(t.logp_behav, samplers.logps(t, logits), atol=atol)
        if name != "int8 keys":
            own = np.moveaxis(np.asarray(ids)[:, 0], 0, 1)[: len(t.prompt) + len(t.tokens) - 1]
            np.testing.assert_array_equal(t.routes[: len(own)], own)


@jax.jit
def golden_logits(tokens):
    """Logits of rows and the routes [L,B,T,k]."""
    config, params = gpt_oss()
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    out = transformer.rows_routed(
        params, config, transformer.Program(), tokens, positions, jnp.ones_like(tokens),
        asked=moe.Asked(routes=True),
    )
    return transformer.head_logits(params, transformer.Program(), out.x), out.routed.ids


@pytest.mark.all
@pytest.mark.parametrize("shape", [(2, 1, 2, 2), (1, 2, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("scheme", ["none", "mxfp4"])
def test_a_mesh_gives_the_numbers_of_one_device(shape, scheme):
    """Log-probs and all gradients, with rows cut over "context" and experts over "expert". The second
    mesh cuts an expert's width, 32, which blocks of MXFP4 do not allow."""
    if scheme == "mxfp4" and shape[2] > 1:
        shape = (shape[0] * shape[2], shape[1], 1, *shape[3:])
    config, params = gpt_oss()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (8, 24)), jnp.int32)

    def loss(params, tokens, layout):
        program = transformer.Program(layout=layout, quantization=quant.Recipe(scheme))
        logits = transformer.logits(params, config, tokens, program=program)
        return jnp.mean(jax.nn.log_softmax(logits)[..., 0]), logits

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    (_, expected), bars = run(params, tokens, None)
    layout = sharding.layout(shape, sharding.TRAIN_RULES, vocab_size=97)
    (_, found), placed = run(placement.put(params, layout, config), tokens, layout)
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert all(np.abs(x).max() > 1e-6 for x in jax.tree.leaves(bars))
    for (path, a), b in zip(jax.tree.leaves_with_path(placed), jax.tree.leaves(bars), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-8, err_msg=str(path))
