"""benchmarks/accelerator_checks.py: what is right passes, and what is wrong is found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accelerator_checks as checks, float64_decoder, kernels
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    family="qwen2", vocab_size=64, embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, mlp_dim=48, rope=RopeConfig("default", 1e4), max_position=64, norm_eps=1e-5,
    qkv_bias=True, qk_norm=False, tie_embeddings=True,
)


def test_a_relative_error_by_hand():
    expected = np.array([2.0, -4.0, -np.inf])
    assert checks.relative_error(np.array([2.0, -3.0, -np.inf]), expected) == 0.25
    for wrong in ([2.0, -4.0, 1.0], [np.nan, -4.0, -np.inf]):
        assert np.isnan(checks.relative_error(np.array(wrong), expected))
    assert [checks.judged(x, 0.1)["is_ok"] for x in (0.1, 0.2, np.nan)] == [True, False, False]


@pytest.mark.all
def test_a_check_says_which_kernel_ran_and_finds_a_wrong_one():
    function, inputs = kernels.segment_cases(2, 64, 4)["segment_reduce sum"]
    right = checks.Case(function, inputs, function, checks.FLOAT32)
    found = checks.check(right)
    assert found["kernel"] == "XLA" and found["is_ok"] and 0 < found["error"] < 1e-5
    wrong = dataclasses.replace(right, run=lambda x, seg: function(x.at[0, 0].add(1.0), seg))
    assert not checks.check(wrong)["is_ok"]


@pytest.mark.all
def test_wrong_logits_are_found(monkeypatch):
    found = checks.logits(MODEL, 8)
    assert found["float32"]["is_ok"] and found["float32"]["error"] < 1e-5
    assert found["bfloat16"]["is_ok"] and found["bfloat16"]["error"] > found["float32"]["error"]
    right = float64_decoder.logits
    monkeypatch.setattr(float64_decoder, "logits", lambda *x: right(*x)[::-1])
    assert not any(x["is_ok"] for x in checks.logits(MODEL, 8).values())


@pytest.mark.all
def test_the_biases_of_the_float64_decoder():
    params = transformer.init(MODEL, jax.random.key(0))
    for name in ("q_bias", "k_bias", "v_bias"):
        shape = params["layers"][name].shape
        params["layers"][name] = jax.random.normal(jax.random.key(len(name)), shape)
    tokens = jnp.arange(8)[None]
    computed = transformer.logits(params, MODEL, tokens)[0]
    np.testing.assert_allclose(computed, float64_decoder.logits(params, MODEL, tokens[0]), atol=1e-4)


@pytest.mark.all
@pytest.mark.compiles
def test_kernels_are_near_float64():
    found = {name: checks.check(case) for name, case in checks.cases(128, 256).items()}
    assert len(found) > 15 and {x["kernel"] for x in found.values()} == {"XLA"}
    assert {name: x for name, x in found.items() if not x["is_ok"]} == {}
