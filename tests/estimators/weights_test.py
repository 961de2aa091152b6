"""Importance weights: verl's numbers, boundary cases, and a loop over tokens in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import weights

NAN = float("nan")
# log_ratio = old - behaviour of a two-row example whose weights verl 0.9.1 computed.
OLD = jnp.array([[-1, -0.5, -2, -0.1], [-0.7, -1.2, -0.3, -9]])
BEHAV = jnp.array([[-1.2, -0.4, -3, -0.1], [-0.9, -0.6, -0.35, -1]])
MASK = jnp.array([[1, 1, 1, 1], [1, 1, 1, 0]])


def oracle(name, log_ratio, mask, seg, parameters):
    """Weights token by token from their definition, in Python floats."""
    w = np.zeros(log_ratio.shape)
    rows, columns = log_ratio.shape
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            if name == "none":
                w[b, t] = 1.0
                continue
            level, kind = name.split("_")
            peers = (
                [t]
                if level == "token"
                else [
                    u
                    for u in range(columns)
                    if mask[b, u] and (seg is None or seg[b, u] == seg[b, t])
                ]
            )
            ratio = math.exp(max(-20.0, min(20.0, math.fsum(log_ratio[b, u] for u in peers))))
            if kind == "tis":
                w[b, t] = min(ratio, parameters["cap"])
            else:
                w[b, t] = ratio if parameters["lower"] <= ratio <= parameters["upper"] else 0.0
    return w


PARAMETERS = {
    "none": {},
    "token_tis": {"cap": 1.4},
    "seq_tis": {"cap": 1.7},
    "token_mis": {"lower": 0.7, "upper": 1.6},
    "seq_mis": {"lower": 0.3, "upper": 2.5},
    "token_icepop": {"lower": 0.6, "upper": 3.0},
    "seq_icepop": {"lower": 0.4, "upper": 4.0},
}


def test_every_entry_has_parameters_in_these_tests():
    assert PARAMETERS.keys() == weights.WEIGHTS.keys()


@pytest.mark.parametrize("name", weights.WEIGHTS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_weights_equal_a_loop_over_tokens(name, is_packed):
    rng = np.random.default_rng(len(name))
    seg = np.sort(rng.integers(1, 4, (6, 9)), axis=1) if is_packed else None
    mask = rng.random((6, 9)) < 0.7
    mask[2] = False
    log_ratio = rng.normal(size=(6, 9)) * rng.choice([0.3, 1.0, 30.0], (6, 9), p=[0.6, 0.3, 0.1])
    expected = oracle(name, log_ratio, mask, seg, PARAMETERS[name])
    with jax.enable_x64(True):
        compute = jax.jit(lambda *a: weights.WEIGHTS[name](*a, **PARAMETERS[name]))
        actual = compute(np.where(mask, log_ratio, NAN), mask, seg)
        assert actual.dtype == jnp.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=0)


def test_verl_token_truncation_with_normalisation():
    w, factor = weights.batch_normalize(
        weights.token_tis(OLD - BEHAV, MASK, cap=2.0), MASK, "token"
    )
    np.testing.assert_allclose(factor, 1.135389, rtol=1e-5)
    expected = [[1.075757, 0.79694, 1.76151, 0.880755], [1.075757, 0.483369, 0.925912, 0]]
    np.testing.assert_allclose(w, expected, rtol=1e-5)


def test_verl_sequence_truncation_with_normalisation():
    w, factor = weights.batch_normalize(weights.seq_tis(OLD - BEHAV, MASK, cap=2.0), MASK, "seq")
    np.testing.assert_allclose(factor, 1.352344, rtol=1e-5)
    np.testing.assert_allclose(w, [[1.478914] * 4, [0.521086] * 3 + [0]], rtol=1e-5)


def test_verl_icepop_with_normalisation():
    w, factor = weights.batch_normalize(
        weights.token_icepop(OLD - BEHAV, MASK, lower=0.6, upper=2.0), MASK, "token"
    )
    np.testing.assert_allclose(factor, 0.771273, rtol=1e-5)
    expected = [[1.583618, 1.173173, 0, 1.296557], [1.583618, 0, 1.363033, 0]]
    np.testing.assert_allclose(w, expected, rtol=1e-5)


def test_five_ratios_by_hand():
    log_ratio = jnp.log(jnp.array([[0.3, 0.6, 1.0, 2.5, 6.0]]))
    mask = jnp.ones((1, 5))
    expected = {
        "token_tis": [0.3, 0.6, 1, 2, 2],
        "token_mis": [0, 0.6, 1, 0, 0],
        "token_icepop": [0, 0.6, 1, 2.5, 0],
    }
    for name, row in expected.items():  # all three with their default parameters
        np.testing.assert_allclose(weights.WEIGHTS[name](log_ratio, mask), [row], rtol=1e-6)


def test_defaults_of_the_sequence_weights():
    # Rows with products 4, 2.5, 0.25 and 6.
    log_ratio = jnp.log(jnp.array([[2.0, 2.0], [5.0, 0.5], [0.5, 0.5], [2.0, 3.0]]))
    mask = jnp.ones((4, 2))
    expected = {
        "seq_tis": [2, 2, 0.25, 2],
        "seq_mis": [0, 2.5, 0.25, 0],
        "seq_icepop": [4, 2.5, 0, 0],
    }
    for name, column in expected.items():
        w = weights.WEIGHTS[name](log_ratio, mask)
        np.testing.assert_allclose(w, np.tile(np.array(column)[:, None], (1, 2)), rtol=1e-6)


def test_both_ends_of_a_band_are_kept():
    log_ratio, mask = jnp.zeros((1, 2)), jnp.ones((1, 2))  # ratios of exactly 1
    for name in ("token_mis", "seq_mis", "token_icepop", "seq_icepop"):
        for lower, upper in ((1.0, 3.0), (0.2, 1.0), (1.0, 1.0)):
            np.testing.assert_array_equal(
                weights.WEIGHTS[name](log_ratio, mask, lower=lower, upper=upper), mask
            )


def test_the_bound_is_on_the_token_or_on_the_sum():
    log_ratio, mask = jnp.array([[30.0, -25.0]]), jnp.ones((1, 2))
    w = weights.token_tis(log_ratio, mask, cap=jnp.inf)
    np.testing.assert_allclose(w, [[np.exp(20.0), np.exp(-20.0)]], rtol=1e-5)
    # The sequence bound acts after summing: exp(30 - 25), not exp(20 - 20).
    np.testing.assert_allclose(
        weights.seq_tis(log_ratio, mask, cap=jnp.inf), [[np.exp(5.0)] * 2], rtol=1e-5
    )
    w = weights.seq_tis(jnp.full((1, 2), 15.0), mask, cap=jnp.inf)
    np.testing.assert_allclose(w, [[np.exp(20.0)] * 2], rtol=1e-5)


def test_sequence_weight_of_one_token_is_the_token_weight():
    log_ratio = jnp.array([[0.4, NAN], [-0.3, NAN], [1.5, NAN]])
    mask = jnp.array([[1, 0]] * 3)
    for kind in ("tis", "mis", "icepop"):
        parameters = {"cap": 1.6} if kind == "tis" else {"lower": 0.5, "upper": 1.6}
        token, seq = (
            weights.WEIGHTS[f"{level}_{kind}"](log_ratio, mask, **parameters)
            for level in ("token", "seq")
        )
        np.testing.assert_array_equal(token, seq)


def test_sequence_normalisation_counts_each_sequence_once():
    # Sequence weights 4 (one token) and 1 (three tokens), one empty row: (4 + 1) / 2, not 7 / 4.
    w = jnp.array([[4.0, NAN, NAN], [1.0, 1.0, 1.0], [NAN, NAN, NAN]])
    mask = jnp.array([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    normalized, factor = weights.batch_normalize(w, mask, "seq")
    assert factor == 2.5
    np.testing.assert_allclose(normalized, [[1.6, 0, 0], [0.4] * 3, [0] * 3], rtol=1e-6)
    _, factor = weights.batch_normalize(w, mask, "token")
    assert factor == 1.75
    packed, seg = jnp.array([[4.0, 1.0, 1.0, 1.0, NAN]]), jnp.array([[1, 2, 2, 2, 0]])
    _, factor = weights.batch_normalize(packed, seg > 0, "seq", seg)
    assert factor == 2.5


def test_vanishing_weights_are_not_normalised():
    w, factor = weights.batch_normalize(jnp.zeros((2, 3)), jnp.ones((2, 3)), "token")
    assert factor == 1.0
    np.testing.assert_array_equal(w, np.zeros((2, 3)))


def test_unknown_level_is_an_error():
    with pytest.raises(ValueError, match="geometric.*seq.*token"):
        weights.batch_normalize(OLD, MASK, "geometric")


def test_a_misspelt_parameter_is_an_error():
    with pytest.raises(TypeError, match="threshold"):
        weights.WEIGHTS["token_tis"](OLD - BEHAV, MASK, threshold=2.0)
