"""Weights of prefixes and turns: published numbers, limits, and loops over tokens."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxrl_tis.estimators import methods, prefix_weights
from jaxrl_tis.estimators import weights
from tests import jitted

prefix_weights, weights = map(jitted.Module, (prefix_weights, weights))

NAN = float("nan")
prefix_minpro = prefix_weights.prefix_minpro
prefix_ctpo = prefix_weights.prefix_ctpo
PARAMETERS = {
    "prefix_minpro": {"cap": 3.0},
    "prefix_ctpo": {"ctpo_low": 0.4, "ctpo_high": 0.7, "ctpo_power": 0.6},
    "turn_tis": {"cap": 1.7},
    "turn_geo": {"cap": 1.3},
}


def bounded(x):
    return max(-20.0, min(20.0, x))


def oracle(name, log_ratio, mask, seg, turn):
    """Weights token by token from their definition, in Python floats."""
    parameters = PARAMETERS[name]
    w = np.zeros(log_ratio.shape)
    for b, t in np.argwhere(mask):
        is_peer = mask[b] if seg is None else mask[b] & (seg[b] == seg[b, t])
        before = [bounded(log_ratio[b, u]) for u in range(t) if is_peer[u]]
        own = bounded(log_ratio[b, t])
        if name == "prefix_minpro":
            log_w = bounded(own + min(before, default=0.0))
            w[b, t] = min(math.exp(log_w), parameters["cap"])
        elif name == "prefix_ctpo":
            width = (len(before) + 1) ** parameters["ctpo_power"]
            low, high = -parameters["ctpo_low"] * width, parameters["ctpo_high"] * width
            w[b, t] = math.exp(bounded(max(low, min(high, math.fsum(before) + own))))
        else:
            same = log_ratio[b, is_peer & (turn[b] == turn[b, t])]
            log_w = math.fsum(same) / (len(same) if name == "turn_geo" else 1)
            w[b, t] = min(math.exp(bounded(log_w)), parameters["cap"])
    return w


@jitted.function
def all_weights(log_ratio, mask, seg, turn):
    fields = {"turn": turn}
    return {
        name: weights.WEIGHTS[name](
            log_ratio,
            mask,
            seg,
            **{field: fields[field] for field in methods.needs("weight", name)},
            **parameters,
        )
        for name, parameters in PARAMETERS.items()
    }


@functools.cache
def example(is_packed):
    """Random rows with large outliers, gaps in the mask, an empty row; all weights of them."""
    rng = np.random.default_rng(4)
    shape = (24, 11)
    seg = np.sort(rng.integers(1, 4, shape), axis=1) if is_packed else None
    turn = np.sort(rng.integers(0, 4, shape), axis=1)
    mask = rng.random(shape) < 0.6
    mask[2] = False
    scale = rng.choice([0.3, 1.0, 30.0], shape, p=(0.8, 0.15, 0.05))
    log_ratio = scale * rng.normal(size=shape)
    poisoned = np.where(mask, log_ratio, NAN), np.where(mask, turn, rng.integers(-9, 9, shape))
    with jax.enable_x64(True):
        actual = all_weights(poisoned[0], mask, seg, poisoned[1])
    return log_ratio, mask, seg, turn, actual


def test_every_entry_is_tested_here():
    assert PARAMETERS.keys() == {n for n in weights.WEIGHTS if n.startswith(("prefix", "turn"))}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_weights_equal_a_loop_over_tokens(name, is_packed):
    *inputs, actual = example(is_packed)
    assert actual[name].dtype == np.float64
    np.testing.assert_allclose(actual[name], oracle(name, *inputs), rtol=1e-11, atol=0)


def test_band_of_the_prefix_product():
    # exp(-0.025 sqrt(t)) and exp(0.05 sqrt(t)) at t = 1, 4, 16, 100.
    mask, at = np.ones((1, 100)), np.array([0, 3, 15, 99])
    high = prefix_ctpo(np.ones((1, 100)), mask)
    np.testing.assert_allclose(high[0, at], [1.0513, 1.105, 1.221, 1.649], atol=6e-4)
    low = prefix_ctpo(-np.ones((1, 100)), mask)
    np.testing.assert_allclose(low[0, at], [0.9753, 0.951, 0.905, 0.779], atol=6e-4)
    constant = prefix_ctpo(np.ones((1, 100)), mask, ctpo_power=0.0)
    np.testing.assert_allclose(constant, np.full((1, 100), math.exp(0.05)), rtol=1e-6)


def test_turns_are_numbered_where_turn_or_sequence_changes():
    # The first token and the two of value 9 are not valid: what stands there opens no turn.
    mask = np.array([[0, 1, 1, 0, 1, 1, 0, 1]])
    turn = np.array([[5, 0, 0, 9, 0, 1, 9, 1]])
    np.testing.assert_array_equal(prefix_weights.turn_ids(turn, mask), [[0, 1, 1, 0, 1, 2, 0, 2]])
    # A new sequence opens a turn though it goes on with number 1.
    seg = np.array([[1, 1, 1, 1, 1, 1, 2, 2]])
    ids = prefix_weights.turn_ids(turn, mask, seg)
    np.testing.assert_array_equal(ids, [[0, 1, 1, 0, 1, 2, 0, 3]])
    assert ids.dtype == np.int32


def test_turns_by_hand():
    # Turn 0 has the product 2 * 1.5 = 3 and the mean sqrt(3), turn 1 the ratios 0.5 and 0.5.
    log_ratio = np.log(np.array([[2.0, 1.5, NAN, 0.5, 0.5]]))
    mask, turn = np.array([[1, 1, 0, 1, 1]]), np.array([[0, 0, 0, 1, 1]])
    w = prefix_weights.turn_tis(log_ratio, mask, turn=turn)
    np.testing.assert_allclose(w, [[2, 2, 0, 0.25, 0.25]], rtol=1e-6)
    w = prefix_weights.turn_geo(log_ratio, mask, turn=turn)
    root = math.sqrt(3)
    np.testing.assert_allclose(w, [[root, root, 0, 0.5, 0.5]], rtol=1e-6)
