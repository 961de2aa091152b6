"""Runs whose sampler or learner multiplies in 8 bits, and what is done to parameters for them."""

import jax
import numpy as np
import pytest

from jaxrl_tis.learner.state import initial_params, initial_state
from tests import tiny

pytestmark = pytest.mark.compiles
BY_JAX = pytest.mark.by_jax("a run: flax, optax, orbax and XLA together")

W8A8 = dict(engine__quantization="w8a8", model__quantization="w8a8")
SHORT = dict(steps=4, train__epochs=1, train__minibatches=1, eval__every=4)


def gaps(**overrides):
    """Mean |p_learner - p_sampler| of the steps of a run."""
    lines = tiny.lines(tiny.finished(**SHORT, **overrides))
    return [x["training/rollout_probs_diff_mean"] for x in lines if x["phase"] == "train"]


@pytest.mark.all
@BY_JAX
def test_a_learner_with_the_samplers_products_agrees_with_it():
    """To the noise of float32, but for an activation that by chance lies so near to the middle of
    two codes that the noise moves it."""
    apart, alike = gaps(engine__quantization="w8a8"), gaps(**W8A8)
    assert min(apart) > 5e-4
    assert np.median(alike) < 2e-6 and np.mean(alike) < 0.02 * np.mean(apart)


@pytest.mark.all
def test_a_quantised_learner_learns():
    lines = tiny.lines(tiny.finished(**SHORT, **W8A8))
    norms = [x["actor/grad_norm"] for x in lines if x["phase"] == "train"]
    assert len(norms) == 4 and min(norms) > 0
    warm = [x["warmup/loss"] for x in lines if x["phase"] == "warmup"]
    assert warm[-1] < 0.8 * warm[0]


def test_the_engines_of_a_setup_have_the_recipes_of_their_policies():
    setup = tiny.setup(
        engine__quantization="fp8_w8a16", engine__unquantized=("down", "q"),
        model__quantization="w8a8", model__unquantized=("o",),
    )
    assert setup.engine.quant_id == "fp8_w8a16 except q,down"
    learner = setup.training.learner
    assert setup.learner_engine.quant_id == learner.program.quantization.id == "w8a8 except o"


@pytest.mark.all
def test_the_sampler_alone_has_the_noise_and_only_after_the_first_part_of_the_run():
    # One stage in 4 steps: two without noise, two with it.
    found = gaps(engine__quantization="none", engine__noise_start=0.3, engine__noise_stages=1)
    assert max(found[:2]) < 1e-5 and min(found[2:]) > 1e-3


@pytest.mark.parametrize("kl_coeff", [0.0, 0.1])
def test_every_network_starts_from_the_folded_policy(kl_coeff):
    setup = tiny.setup(model__uaq_scale=2.0, correction__kl_coeff=kl_coeff)
    params = initial_params(setup.training)
    state = jax.device_get(initial_state(setup.training, params))
    layers = state["policy"].params["layers"]
    np.testing.assert_array_equal(layers["q"], params["layers"]["q"] / 2)
    np.testing.assert_array_equal(layers["mlp_norm"], params["layers"]["mlp_norm"] * 2)
    np.testing.assert_array_equal(layers["o"], params["layers"]["o"])
    if kl_coeff:
        reference = np.asarray(state["reference"]["layers"]["up"], np.float32)
        np.testing.assert_allclose(reference, params["layers"]["up"] / 2, rtol=2**-8)
