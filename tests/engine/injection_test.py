"""Gaps that are put into the sampler: what is recorded is the learner's distribution, changed by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.engine import injection
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.scheduler import Scheduler
from tests.engine.engine_test import (
    CONFIG, LENGTH, assert_bitwise_equal, drain, log_softmax, params_of, request, teacher_forced,
)

V = CONFIG.vocab_size


@functools.cache
def drawn(injected, params=None):
    sizes = dict(slots=4, max_length=LENGTH, steps=3, prefill_batch=2, page_size=8)
    engine = Engine(CONFIG, EngineConfig(**sizes, injected=injection.parse(injected)))
    scheduler = Scheduler(engine, engine.load(params_of(0) if params is None else params()))
    for n in (1, 4, 7):
        scheduler.add(request(f"q{n}", n, max_tokens=12))
    return drain(scheduler)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        assert_bitwise_equal(actual[name], t)


@pytest.mark.all
@pytest.mark.cases("sharpness(scale=0)")
@pytest.mark.parametrize("injected", [
    "logits(scale=0.0, growth=3.0)", "sharpness(scale=0)", "weights(scale=0.0)",
    "router(scale=0.3)",  # of a dense model
])
def test_a_scale_of_zero_changes_no_bit(injected):
    assert_same(drawn(injected), drawn(""))


def z(*path):
    key = jax.random.key(7)
    for i in path[:-1]:
        key = jax.random.fold_in(key, i)
    return np.asarray(jax.random.normal(key, path[-1]))


@pytest.mark.cases("logits(scale=0.3, growth=0.1, seed=7)-<lambda>", "sharpness(scale=0.2)-<lambda>")
@pytest.mark.parametrize("injected, change", [
    ("logits(scale=-0.5, seed=7)", lambda x, t: x - 0.5 * z((V,))),
    ("logits(scale=0.3, growth=0.1, seed=7)", lambda x, t: x + 0.3 * (1 + 0.1 * t) * z((V,))),
    ("sharpness(scale=0.2)", lambda x, t: x * np.exp(0.2)),
    ("sharpness(scale=-0.2, growth=0.05)", lambda x, t: x * np.exp(-0.2 * (1 + 0.05 * t))),
])
def test_what_is_recorded_is_the_changed_distribution(injected, change):
    """t is the place of the drawn token in its sequence, from 0."""
    for t in drawn(injected).values():
        places = len(t.prompt) + np.arange(len(t.tokens))
        changed = change(teacher_forced(t, params_of(0)), places[:, None])
        logp = log_softmax(changed)[np.arange(len(t.tokens)), t.tokens]
        np.testing.assert_allclose(t.logp_behav, logp, atol=3e-5)
        gap = log_softmax(teacher_forced(t, params_of(0)))[np.arange(len(t.tokens)), t.tokens] - logp
        assert np.abs(gap).max() > 0.05


def changed_params():
    names = ("q", "k", "v", "o", "gate", "up", "down")
    layers = dict(params_of(0)["layers"])
    for i, name in enumerate(names):
        layers[name] = layers[name] * (1 + 0.05 * z(i, layers[name].shape))
    return params_of(0) | {"layers": layers}


def test_changed_weights_are_served():
    """What one engine changes is what another is given, but for the last bit of a product."""
    actual, expected = drawn("weights(scale=0.05, seed=7)"), drawn("", changed_params)
    for name, t in expected.items():
        np.testing.assert_array_equal(actual[name].tokens, t.tokens)
        np.testing.assert_allclose(actual[name].logp_behav, t.logp_behav, atol=2e-5)
    logp = lambda found: np.concatenate([found[name].logp_behav for name in sorted(found)])
    assert np.abs(logp(actual) - logp(drawn(""))).max() > 0.01


def test_noise_of_a_router_is_that_of_its_logits():
    """An input of mean square 1 gets logits whose noise has the deviation `scale`, at any width."""
    for width in (64, 1024):
        rng = np.random.default_rng(0)
        layers = {"router": jnp.zeros((2, width, 40)), "router_bias": jnp.zeros((2, 40)),
                  "up": jnp.ones((2, width, 3))}
        change = injection.parse("router(scale=0.3, seed=7)").weights
        found = change({"layers": layers, "embed": jnp.ones(3)})
        x = rng.normal(size=(50, width)).astype(np.float32)
        x /= np.sqrt((x**2).mean(axis=1, keepdims=True))
        noise = x @ np.asarray(found["layers"]["router"])
        assert noise.std() == pytest.approx(0.3, rel=0.05)
        assert not np.allclose(noise[0], noise[1])
        for name in ("router_bias", "up"):
            np.testing.assert_array_equal(found["layers"][name], layers[name])
        again = change({"layers": layers, "embed": jnp.ones(3)})
        np.testing.assert_array_equal(again["layers"]["router"], found["layers"]["router"])


@pytest.mark.parametrize("text, why", [
    ("router(scale=0.1, growth=1.0)", "growth"),
    ("logit(scale=1.0)", "did you mean 'logits'"),
    ("logits", "scale"),
    ("logits(scale=1.0, sign=1)", "sign"),
    ("sharpness(scale=inf)", "scale is inf, not a number"),
    ("weights(scale=0.1, seed=0.5)", "seed is 0.5, not a number"),
    ("logits(scale=True)", "scale is True, not a number"),
])
def test_what_cannot_be_injected_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        injection.parse(text)
