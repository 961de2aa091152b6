"""Importance weights: verl's numbers, boundary cases, and a loop over tokens in plain Python."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import methods, weights
from tests import jitted

weights = jitted.Module(weights)

NAN = float("nan")
PARAMETERS = {
    "none": {},
    "token_vanilla": {},
    "seq_vanilla": {},
    "token_tis": {"cap": 1.4},
    "seq_tis": {"cap": 1.7},
    "geo_tis": {"cap": 1.3},
    "token_clip": {"lower": 0.8, "upper": 1.4},
    "seq_clip": {"lower": 0.6, "upper": 1.7},
    "token_mis": {"lower": 0.7, "upper": 1.6},
    "seq_mis": {"lower": 0.3, "upper": 2.5},
    "geo_mis": {"lower": 0.6, "upper": 1.4},
    "token_icepop": {"lower": 0.6, "upper": 3.0},
    "seq_icepop": {"lower": 0.4, "upper": 4.0},
    "seq_mask_tis": {"lower": 0.6, "upper": 1.5},
}
OF_PREFIXES = {"turn_tis", "turn_geo", "prefix_minpro", "prefix_ctpo"}  # in prefix_weights_test


def oracle(name, log_ratio, mask, seg):
    """Weights token by token from their definition, in Python floats."""
    level, _, kind = name.partition("_")
    parameters = PARAMETERS[name]
    w = np.zeros(log_ratio.shape)
    for b, t in np.argwhere(mask):
        is_peer = mask[b] if seg is None else mask[b] & (seg[b] == seg[b, t])
        peers = list(log_ratio[b, is_peer])
        log = {"token": log_ratio[b, t], "seq": math.fsum(peers)}
        log["geo"] = log["seq"] / len(peers)
        ratio = {key: math.exp(max(-20.0, min(20.0, x))) for key, x in log.items()}
        if kind == "":
            w[b, t] = 1.0
        elif kind == "vanilla":
            w[b, t] = ratio[level]
        elif kind == "tis":
            w[b, t] = min(ratio[level], parameters["cap"])
        elif kind == "clip":
            w[b, t] = min(max(ratio[level], parameters["lower"]), parameters["upper"])
        elif kind in ("mis", "icepop"):
            is_inside = parameters["lower"] <= ratio[level] <= parameters["upper"]
            w[b, t] = ratio[level] if is_inside else 0.0
        elif kind == "mask_tis":
            is_inside = parameters["lower"] <= ratio["geo"] <= parameters["upper"]
            w[b, t] = ratio["token"] if is_inside else 0.0
        else:
            raise AssertionError(name)
    return w


@jitted.function
def all_weights(log_ratio, mask, seg):
    return {
        name: weights.WEIGHTS[name](log_ratio, mask, seg, **parameters)
        for name, parameters in PARAMETERS.items()
    }


@functools.cache
def example(is_packed):
    """Random rows with large outliers, an empty row and a row of one token; all weights of them."""
    rng = np.random.default_rng(3)
    seg = np.sort(rng.integers(1, 5, (24, 9)), axis=1) if is_packed else None
    mask = rng.random((24, 9)) < 0.6
    mask[2] = False
    mask[3] = np.arange(9) == 4
    scale = rng.choice([0.3, 1.0, 30.0], mask.shape, p=(0.8, 0.15, 0.05))
    log_ratio = scale * rng.normal(size=mask.shape)
    with jax.enable_x64(True):
        actual = all_weights(np.where(mask, log_ratio, NAN), mask, seg)
    return log_ratio, mask, seg, actual


def test_every_entry_has_parameters_in_these_tests():
    assert PARAMETERS.keys() | OF_PREFIXES == weights.WEIGHTS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_weights_equal_a_loop_over_tokens(name, is_packed):
    log_ratio, mask, seg, actual = example(is_packed)
    assert actual[name].dtype == np.float64
    expected = oracle(name, log_ratio, mask, seg)
    np.testing.assert_allclose(actual[name], expected, rtol=1e-12, atol=0)
    if "lower" in PARAMETERS[name]:  # the example reaches the bounds and stays within them
        edge = PARAMETERS[name]["lower"] if name.endswith("clip") else 0.0
        assert 0 < np.mean(expected[mask] == edge) < 1


def test_five_ratios_by_hand():
    log_ratio = np.log(np.array([[0.3, 0.6, 1.0, 2.5, 6.0]]))
    mask = np.ones((1, 5))
    expected = {
        "token_vanilla": [0.3, 0.6, 1, 2.5, 6],
        "token_tis": [0.3, 0.6, 1, 2, 2],
        "token_clip": [0.5, 0.6, 1, 2, 2],
        "token_mis": [0.3, 0.6, 1, 0, 0],
        "token_icepop": [0, 0.6, 1, 2.5, 0],
    }
    for name, row in expected.items():  # all with their default parameters
        np.testing.assert_allclose(weights.WEIGHTS[name](log_ratio, mask), [row], rtol=1e-6)
    w = weights.token_mis(log_ratio, mask, lower=0.5)  # slime's example
    np.testing.assert_allclose(w, [[0, 0.6, 1, 0, 0]], rtol=1e-6)


def test_defaults_of_the_sequence_weights():
    # Rows of two tokens with products 4, 2.5, 0.25 and 9, so means 2, 1.58, 0.5 and 3.
    log_ratio = np.log(np.array([[2.0, 2.0], [5.0, 0.5], [0.5, 0.5], [3.0, 3.0]]))
    mask = np.ones((4, 2))
    root = math.sqrt(2.5)
    expected = {
        "seq_vanilla": [4, 2.5, 0.25, 9],
        "seq_tis": [2, 2, 0.25, 2],
        "seq_clip": [2, 2, 0.5, 2],
        "seq_mis": [0, 2.5, 0.25, 0],
        "seq_icepop": [4, 2.5, 0, 0],
        "geo_tis": [2, root, 0.5, 2],
        "geo_mis": [0, 0, 0, 0],
    }
    for name, column in expected.items():
        w = weights.WEIGHTS[name](log_ratio, mask)
        np.testing.assert_allclose(w, np.tile(np.array(column)[:, None], (1, 2)), rtol=1e-5)


def test_seq_mask_tis_keeps_raw_token_ratios():
    # Means of the logs 0.0005, 0.0015, -0.0015; the default band is -0.0010005 to 0.001998.
    log_ratio = np.array([[1.001, -1.0], [3.003, -3.0], [0.997, -1.0]])
    w = weights.seq_mask_tis(log_ratio, np.ones((3, 2)))
    expected = [[math.exp(1.001), math.exp(-1)], [math.exp(3.003), math.exp(-3)], [0, 0]]
    np.testing.assert_allclose(w, expected, rtol=1e-6)


@pytest.mark.parametrize("level", weights.RAW)
def test_limits_of_the_bounds(level):
    log_ratio, mask, seg, _ = example(True)
    log_ratio = np.array(np.where(mask, log_ratio, NAN), np.float32)
    raw = weights.RAW[level](log_ratio, mask, seg)
    loose = [weights.WEIGHTS[f"{level}_tis"](log_ratio, mask, seg, cap=np.inf)]
    loose += [
        weights.WEIGHTS[f"{level}_{kind}"](log_ratio, mask, seg, lower=0.0, upper=np.inf)
        for kind in ("clip", "mis", "icepop") if f"{level}_{kind}" in weights.WEIGHTS
    ]
    for w in loose:
        np.testing.assert_array_equal(w, raw)
    if level != "geo":
        vanilla = weights.WEIGHTS[f"{level}_vanilla"](log_ratio, mask, seg)
        np.testing.assert_array_equal(vanilla, raw)
        same = weights.WEIGHTS[f"{level}_mis"](log_ratio, mask, seg, lower=0.5, upper=3.0)
        icepop = weights.WEIGHTS[f"{level}_icepop"](log_ratio, mask, seg, lower=0.5, upper=3.0)
        np.testing.assert_array_equal(icepop, same)


def test_both_ends_of_a_band_are_kept():
    log_ratio, mask = np.zeros((1, 2)), np.ones((1, 2))  # ratios of exactly 1
    for name in ("token_mis", "seq_mis", "geo_mis", "token_icepop", "seq_icepop"):
        for lower, upper in ((1.0, 3.0), (0.2, 1.0), (1.0, 1.0)):
            w = weights.WEIGHTS[name](log_ratio, mask, lower=lower, upper=upper)
            np.testing.assert_array_equal(w, mask)
    for lower, upper in ((1.0, 3.0), (0.2, 1.0)):
        w = weights.seq_mask_tis(log_ratio, mask, lower=lower, upper=upper)
        np.testing.assert_array_equal(w, mask)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_ratio_that_is_its_bound_is_kept(dtype):
    """exp would put log(1.3) below 1.3 in float64, and log(0.1) below 0.1 in float32."""
    step = 2e-6 if dtype == np.float32 else 1e-14
    names = ("token_mis", "seq_mis", "geo_mis", "seq_mask_tis")
    cases = [(n, x, end) for n in names for x in (0.1, 1.3, 2.0) for end in ("lower", "upper")]

    def log_ratios(bound):  # below, at and above it: one token each
        return np.log(bound) + np.array([[-step], [0.0], [step]])

    @jitted.function
    def kept(log_ratio):
        bands = [{"lower": 0.0, "upper": 9.0} | {end: x} for _, x, end in cases]
        return [
            weights.WEIGHTS[n](log_ratio[x], np.ones((3, 1)), **band)[:, 0] > 0
            for (n, x, _), band in zip(cases, bands, strict=True)
        ]

    with jax.enable_x64(dtype == np.float64):
        found = kept({x: np.array(log_ratios(x), dtype) for _, x, _ in cases})
    for case, is_accepted in zip(cases, found, strict=True):
        expected = [False, True, True] if case[2] == "lower" else [True, True, False]
        np.testing.assert_array_equal(is_accepted, expected, err_msg=str(case))


def test_the_bound_is_on_the_token_or_on_the_sum():
    log_ratio, mask = np.array([[30.0, -25.0]]), np.ones((1, 2))
    w = weights.token_vanilla(log_ratio, mask)
    np.testing.assert_allclose(w, [[np.exp(20.0), np.exp(-20.0)]], rtol=1e-5)
    # The sequence bound acts after summing: exp(30 - 25), not exp(20 - 20); mean 2.5.
    np.testing.assert_allclose(weights.seq_vanilla(log_ratio, mask), [[np.exp(5.0)] * 2], rtol=1e-5)
    w = weights.geo_tis(log_ratio, mask, cap=np.inf)
    np.testing.assert_allclose(w, [[np.exp(2.5)] * 2], rtol=1e-5)
    w = weights.seq_vanilla(np.full((1, 2), 15.0), mask)
    np.testing.assert_allclose(w, [[np.exp(20.0)] * 2], rtol=1e-5)


def test_sequence_normalisation_counts_each_sequence_once():
    # Sequence weights 4 (one token) and 1 (three tokens), one empty row: (4 + 1) / 2, not 7 / 4.
    w = np.array([[4.0, NAN, NAN], [1.0, 1.0, 1.0], [NAN, NAN, NAN]])
    mask = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    for level in ("seq", "geo"):
        normalized, factor = weights.batch_normalize(w, mask, level)
        assert factor == 2.5
        np.testing.assert_allclose(normalized, [[1.6, 0, 0], [0.4] * 3, [0] * 3], rtol=1e-6)
    _, factor = weights.batch_normalize(w, mask, "token")
    assert factor == 1.75
    packed, seg = np.array([[4.0, 1.0, 1.0, 1.0, NAN]]), np.array([[1, 2, 2, 2, 0]])
    _, factor = weights.batch_normalize(packed, seg > 0, "seq", seg)
    assert factor == 2.5


def test_normalised_weights_average_one_and_carry_no_gradient():
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])

    def normalized(w):
        return weights.batch_normalize(w, mask, "token")[0]

    w = np.array([[0.2, 1.9, 0.7, NAN], [1.1, NAN, NAN, NAN]])
    np.testing.assert_allclose(jnp.sum(normalized(w)) / 4, 1.0, rtol=1e-6)
    gradient = jitted.grad(lambda w: jnp.sum(normalized(w)))(w)
    np.testing.assert_array_equal(gradient, np.zeros((2, 4)))


def test_vanishing_weights_are_not_normalised():
    w, factor = weights.batch_normalize(np.zeros((2, 3)), np.ones((2, 3)), "token")
    assert factor == 1.0
    np.testing.assert_array_equal(w, np.zeros((2, 3)))
    # A mean of at most 1e-8 is left alone, a larger one is not.
    tiny = np.full((2, 3), 9e-9, np.float32)
    np.testing.assert_array_equal(weights.batch_normalize(tiny, np.ones((2, 3)), "seq")[0], tiny)
    w, _ = weights.batch_normalize(2.0 * tiny, np.ones((2, 3)), "seq")
    np.testing.assert_allclose(w, np.ones((2, 3)), rtol=1e-5)


def test_unknown_level_is_an_error():
    with pytest.raises(ValueError, match="geometric.*geo.*seq.*token"):
        weights.batch_normalize(jnp.ones((1, 2)), jnp.ones((1, 2)), "geometric")


def test_needs_are_the_required_keywords():
    for name, function in weights.WEIGHTS.items():
        required = tuple(
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind == parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        )
        assert required == methods.needs("weight", name), name
