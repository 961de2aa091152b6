"""Every family and RoPE variant against logits computed by transformers (make_golden.py).

A model that agrees must also disagree once any of its features is taken away: otherwise the
golden file would not notice the feature missing.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import models
from jaxrl_tis.models import transformer

pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@functools.cache
def golden(name):
    folder = GOLDEN / name
    config, params = models.load(folder)
    return config, params, np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")


def miss(name, config, params):
    """Largest distance from the golden logits, in standard deviations of these."""
    _, _, tokens, expected = golden(name)
    logits = transformer.logits(params, config, jnp.asarray(tokens))
    assert logits.shape == expected.shape and logits.dtype == jnp.float32
    return np.abs(np.asarray(logits) - expected).max() / expected.std()


def with_layers(params, **layers):
    return {**params, "layers": {**params["layers"], **layers}}


def with_rope(config, **changes):
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, **changes))


def interleave(params, head_dim):
    """Reorders queries and keys so that rotating halves rotates neighbours instead."""

    def reorder(x):
        halves = x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim // 2, 2)
        return halves.swapaxes(-1, -2).reshape(x.shape)

    names = {"q", "k", "q_bias", "k_bias", "q_norm", "k_norm"} & params["layers"].keys()
    return with_layers(params, **{name: reorder(params["layers"][name]) for name in names})


def test_the_cases_are_the_published_families_and_rope_types():
    assert CASES == ["llama_default", "llama_linear", "llama_llama3", "llama_yarn", "qwen2_tied",
                     "qwen2_untied", "qwen3"]
    kinds = [golden(name)[0].rope.kind for name in CASES]
    assert kinds == ["default", "linear", "llama3", "yarn", "default", "default", "default"]
    qwen3 = golden("qwen3")[0]
    assert qwen3.head_dim * qwen3.num_heads != qwen3.embed_dim
    assert golden("llama_yarn")[2].shape[1] > golden("llama_yarn")[0].rope.original_max_position
    assert all(golden(name)[3].std() > 1 for name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(name):
    config, params, _, _ = golden(name)
    assert miss(name, config, params) <= 2e-4


@pytest.mark.parametrize("name", CASES)
def test_control_wrong_theta(name):
    config, params, _, _ = golden(name)
    assert miss(name, with_rope(config, theta=config.rope.theta * 10), params) > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_control_wrong_norm_epsilon(name):
    config, params, _, _ = golden(name)
    assert miss(name, dataclasses.replace(config, norm_eps=1e-6), params) > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_control_interleaved_rotation(name):
    config, params, _, _ = golden(name)
    assert miss(name, config, interleave(params, config.head_dim)) > 1e-2


@pytest.mark.parametrize("name", ["llama_linear", "llama_llama3", "llama_yarn"])
def test_control_no_rope_scaling(name):
    config, params, _, _ = golden(name)
    assert miss(name, with_rope(config, kind="default"), params) > 1e-2


def test_control_no_yarn_attention_factor():
    config, params, _, _ = golden("llama_yarn")
    assert miss("llama_yarn", with_rope(config, attention_factor=1.0), params) > 1e-2


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied"])
@pytest.mark.parametrize("bias", ["q_bias", "k_bias", "v_bias"])
def test_control_no_bias(name, bias):
    config, params, _, _ = golden(name)
    zeroed = with_layers(params, **{bias: jnp.zeros_like(params["layers"][bias])})
    assert miss(name, config, zeroed) > 1e-2


def test_control_no_qk_norm():
    config, params, _, _ = golden("qwen3")
    layers = {k: v for k, v in params["layers"].items() if k not in ("q_norm", "k_norm")}
    assert miss("qwen3", dataclasses.replace(config, qk_norm=False),
                {**params, "layers": layers}) > 1e-2


@pytest.mark.parametrize("scale", ["attn_norm", "mlp_norm", "q_norm", "k_norm"])
def test_control_unit_norm_scale(scale):
    config, params, _, _ = golden("qwen3")
    unit = with_layers(params, **{scale: jnp.ones_like(params["layers"][scale])})
    assert miss("qwen3", config, unit) > 1e-2


def test_control_tied_head():
    config, params, _, _ = golden("qwen2_untied")
    tied = {**params, "head": params["embed"].T}
    assert miss("qwen2_untied", config, tied) > 1e-2


def test_sharded_load_gives_the_same_logits():
    config, params, _, _ = golden("llama_llama3")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    shardings = jax.tree.map(
        lambda leaf: jax.sharding.NamedSharding(
            mesh, spec(None, "data", "model") if leaf.ndim == 3 else spec()), params)
    _, sharded = models.load(GOLDEN / "llama_llama3", sharding=shardings)
    assert sharded["layers"]["q"].addressable_shards[0].data.shape == (2, 16, 16)
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    assert miss("llama_llama3", config, sharded) <= 2e-4
