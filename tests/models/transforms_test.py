"""Folding and noise: what they leave as it was, and what they change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_tis.models import quant, transformer, transforms
from jaxrl_tis.models.config import ModelConfig, RopeConfig

pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")

CONFIG = ModelConfig(
    family="qwen3", vocab_size=50, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, mlp_dim=96, rope=RopeConfig(kind="default", theta=10000.0), max_position=16,
    norm_eps=1e-5, qkv_bias=True, qk_norm=True, tie_embeddings=True,
)
FED, REST = ("q", "k", "v", "gate", "up"), ("o", "down")
NORMS = ("attn_norm", "mlp_norm")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (4, 12)), jnp.int32)


@functools.cache
def params():
    """With norms and biases that are not all equal."""
    rng, drawn = np.random.default_rng(1), transformer.init(CONFIG, jax.random.key(0))
    vary = lambda x: x + 0.2 * rng.normal(0, 1, x.shape).astype(np.float32) if x.ndim < 3 else x
    return drawn | {"layers": jax.tree.map(vary, drawn["layers"])}


@jax.jit
def logits(params):
    return transformer.logits(params, CONFIG, TOKENS)


@pytest.mark.cases("1.5")
@pytest.mark.parametrize("scale", [1.5, 2.0, 4.0])
def test_a_fold_computes_the_same(scale):
    folded = transforms.fold(params(), scale)
    np.testing.assert_allclose(logits(folded), logits(params()), atol=2e-5)
    for name in FED:
        np.testing.assert_allclose(
            folded["layers"][name], params()["layers"][name] / scale, rtol=1e-6
        )
    for name in (*REST, "q_bias", "q_norm"):
        np.testing.assert_array_equal(folded["layers"][name], params()["layers"][name])
    # One without the norms is another function.
    half = folded | {"layers": folded["layers"] | {n: params()["layers"][n] for n in NORMS}}
    assert np.abs(logits(half) - logits(params())).max() > 0.1


@pytest.mark.all
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_w8a16"])
def test_a_fold_of_the_samplers_copy_alone_changes_no_8_bit_value(scheme):
    recipe = quant.Recipe(scheme)
    before = quant.quantize_params(params(), recipe)["layers"]
    after = quant.quantize_params(transforms.fold(params(), 2.0), recipe)["layers"]
    for name in FED:
        np.testing.assert_array_equal(
            *(np.asarray(w[name].q).view(np.uint8) for w in (before, after))
        )
        np.testing.assert_array_equal(before[name].scale, 2 * after[name].scale)


def codes_changed(start, lr):
    """Share of int8 values of the norm-fed projections that one Adam step changes."""
    tx = optax.adam(lr)
    loss = lambda p: jnp.sum(jax.nn.logsumexp(transformer.logits(p, CONFIG, TOKENS), axis=-1))
    updates = jax.jit(lambda p: tx.update(jax.grad(loss)(p), tx.init(p))[0])(start)
    recipe = quant.Recipe("w8a8")
    quantized = [
        quant.quantize_params(p, recipe)["layers"]
        for p in (start, optax.apply_updates(start, updates))
    ]
    changed = lambda name: np.asarray(quantized[0][name].q) != np.asarray(quantized[1][name].q)
    return {name: changed(name).mean() for name in (*FED, *REST)}


@pytest.mark.all
def test_an_update_of_folded_parameters_reaches_more_8_bit_values():
    # Adam moves every weight by lr. Weights / s have steps / s: s times more values move.
    plain = codes_changed(params(), 1e-4)
    folded = codes_changed(transforms.fold(params(), 3.0), 1e-4)
    for name in FED:
        assert folded[name] / plain[name] == pytest.approx(3.0, rel=0.35), name
    for name in REST:
        assert folded[name] / plain[name] == pytest.approx(1.0, rel=0.35), name


def test_the_stages_of_the_noise_by_hand():
    # 2 stages of noise: thirds of the run, without, with 0.01 and with 0.0001.
    sigma = [transforms.noise_sigma(version, 9, 1e-2, 1e-4, 2) for version in range(9)]
    np.testing.assert_allclose(sigma, [0] * 3 + [1e-2] * 3 + [1e-4] * 3, rtol=1e-12)
    # Three: the middle one is the geometric mean. Past the end the last one stays.
    sigma = [transforms.noise_sigma(version, 4, 1e-2, 1e-4, 3) for version in range(6)]
    np.testing.assert_allclose(sigma, [0, 1e-2, 1e-3, 1e-4, 1e-4, 1e-4], rtol=1e-12)
    assert transforms.noise_sigma(5, 10, 1e-2, 1e-4, 1) == 1e-2
    assert transforms.noise_sigma(9, 10, 0.0, 1e-4, 10) == 0.0


def noisy(sigma, seed=0, dtype="float32"):
    noise = transforms.Noise(jax.random.key(seed), jnp.float32(sigma))
    cast = jax.tree.map(lambda x: x.astype(dtype), params())
    return jax.jit(transforms.add_noise)(cast, noise)


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_of_size_zero_changes_no_bit(dtype):
    expected = jax.tree.map(lambda x: x.astype(dtype), params())
    for found, leaf in zip(jax.tree.leaves(noisy(0.0, dtype=dtype)), jax.tree.leaves(expected), strict=True):
        assert found.dtype == leaf.dtype and found.tobytes() == leaf.tobytes()


@pytest.mark.all
def test_noise_is_on_the_two_norms_that_feed_projections_alone():
    found, sigma = noisy(0.01)["layers"], 0.01
    draws = []
    for name, w in params()["layers"].items():
        added = np.asarray(found[name] - w)
        assert added.any() == (name in NORMS), name
        if name in NORMS:
            draws += list(added / sigma)
    # 4 vectors of 64 draws: of variance 1, and without correlation between norms and layers.
    assert np.std(draws) == pytest.approx(1.0, abs=0.15) and abs(np.mean(draws)) < 0.2
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.5


def test_noise_is_drawn_anew_for_every_version_and_is_the_same_again():
    of = lambda version: transforms.add_noise(
        params(), transforms.noise(7, version, 100, 0.1, 0.01, 1)
    )["layers"]["attn_norm"]
    np.testing.assert_array_equal(of(80), of(80))
    assert np.abs(of(80) - of(81)).min() > 0
    np.testing.assert_array_equal(of(3), params()["layers"]["attn_norm"])  # the part without


@pytest.mark.all
def test_noise_raises_the_entropy_of_a_peaked_policy():
    """Norms three times as large make the logits of the tiny model peaked."""
    peaked = params() | {"final_norm": 3 * params()["final_norm"]}

    def entropy(sigma, seed):
        noise = transforms.Noise(jax.random.key(seed), jnp.float32(sigma))
        logp = jax.nn.log_softmax(logits(transforms.add_noise(peaked, noise)))
        return -jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1))

    means = [np.mean([entropy(sigma, seed) for seed in range(8)]) for sigma in (0.0, 0.3, 1.0)]
    assert means[0] < means[1] < means[2]
