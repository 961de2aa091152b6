"""Clipped surrogates of turns: loops over them, limits, numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import ppo, turn_clipped
from tests import jitted
from tests.estimators.sequence_losses import (
    check_a_loop, check_an_empty_batch, check_one_token, check_the_bound, gspo_loop, row,
)

ppo, turn_clipped = map(jitted.Module, (ppo, turn_clipped))

pytestmark = pytest.mark.compiles


def turn_loop(x):
    n, start = len(x["l"]), 0
    loss, jacobian, is_clipped = np.zeros(n), np.zeros((n, n)), np.zeros(n, bool)
    for _, run in itertools.groupby(x["turn"]):
        part = slice(start, start + len(list(run)))
        start = part.stop
        inside = {k: v[part] for k, v in x.items()}
        loss[part], jacobian[part, part], is_clipped[part] = gspo_loop(inside, 0.8, 1.2)
    return loss, jacobian, is_clipped


def st_ppo_loop(x):
    loss, jacobian, is_clipped = turn_loop(x)
    return loss / 2.5, jacobian / 2.5, is_clipped


LOOPS = {"turn_ppo": turn_loop, "st_ppo": st_ppo_loop}


@pytest.mark.parametrize("name", turn_clipped.OBJECTIVES)
@pytest.mark.parametrize("spread", [0.7, 0.003])
def test_entry_equals_a_loop_over_turns(name, spread):
    check_a_loop(name, spread, LOOPS[name])


@pytest.mark.parametrize("name", turn_clipped.OBJECTIVES)
def test_a_batch_without_tokens_is_zero(name):
    check_an_empty_batch(name)


def test_one_token_is_ppo():
    check_one_token("turn_ppo")


def test_ratios_are_bounded_by_exp_10():
    check_the_bound("turn_ppo")


def test_clipping_bias_by_hand():
    # Turns (0.4, 0.2) and (0.1,): w = e^0.3 = 1.35 is clipped at A = 2, e^0.1 = 1.105 is not.
    # What is lost is -sg(w) A log pi of the clipped tokens: gradient -2 e^0.3 each.
    fields = {"turn": [[0, 0, 1]]}
    _, _, gradient = row("turn_ppo", [0.4, 0.2, 0.1], 2.0, **fields)
    np.testing.assert_allclose(gradient, [[0.0, 0.0, -2 * np.exp(0.1)]], rtol=1e-5)
    old, mask = np.full((1, 3), -2.0), np.ones((1, 3))

    def lost(logp):
        bias = turn_clipped.turn_clipping_bias(
            logp, old, 2.0 * mask, mask, turn=np.array([[0, 0, 1]])
        )
        return jnp.sum(bias)

    value, gradient = jitted.value_and_grad(lost)(old + np.array([[0.4, 0.2, 0.1]]))
    np.testing.assert_allclose(gradient, [[-2 * np.exp(0.3)] * 2 + [0.0]], rtol=1e-5)
    np.testing.assert_allclose(value, -2 * np.exp(0.3) * (-1.6 - 1.8), rtol=1e-5)


def test_st_ppo_only_scales():
    turn = [[0, 0, 1]]
    expected = row("turn_ppo", [0.4, 0.2, 0.1], [[1.0, -1.0, 2.0]], turn=turn)
    for norm, divisor in ((0.0, 1.0), (0.9, 1.0), (4.0, 4.0)):
        actual = row("st_ppo", [0.4, 0.2, 0.1], [[1.0, -1.0, 2.0]], turn=turn, st_ppo_norm=norm)
        np.testing.assert_allclose(actual[0], expected[0] / divisor, rtol=1e-6)
        np.testing.assert_allclose(actual[2], expected[2] / divisor, rtol=1e-6)
    _, gradient = jitted.value_and_grad(
        lambda norm: row("st_ppo", [0.4], 1.0, turn=[[0]], st_ppo_norm=norm)[0].sum()
    )(2.0)
    assert gradient == 0.0


def test_st_ppo_of_the_survey_renormalises_clipped_turns():
    # Turns (0.4, 0.2) and (0.1,), A = 2: w = e^0.3 > 1.2 is clipped, e^0.1 is not. The clipped
    # turn has r = (1.491825, 1.221403), mean 1.356614: weights 1.2 r / mean, which average 1.2.
    up = np.array([1.2 * 1.491825 / 1.356614, 1.2 * 1.221403 / 1.356614, np.exp(0.1)])
    fields = {"turn": [[0, 0, 1]], "st_ppo_norm": 7.0, "form": "survey"}
    loss, metrics, gradient = row("st_ppo", [0.4, 0.2, 0.1], 2.0, **fields)
    np.testing.assert_allclose(loss, [-2 * up], rtol=1e-5)
    np.testing.assert_allclose(gradient, [-2 * up], rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 2 / 3, rtol=1e-6)
    # A = -1, l = (-0.5, -0.1): w = e^-0.3 < 0.8; r = (0.606531, 0.904837), mean 0.755684.
    down = np.array([0.8 * 0.606531 / 0.755684, 0.8 * 0.904837 / 0.755684, np.exp(-0.1)])
    loss, _, gradient = row("st_ppo", [-0.5, -0.1, -0.1], -1.0, **fields)
    np.testing.assert_allclose(loss, [down], rtol=1e-5)
    np.testing.assert_allclose(gradient, [down], rtol=1e-5)
    # Where nothing is clipped, at the end of the band too, it is Turn-PPO.
    for log_ratio, width in (([0.1, 0.05, -0.1], 0.2), ([0.0, 0.0, 0.0], 0.0)):
        bands = {"clip_low": width, "clip_high": width}
        actual = row("st_ppo", log_ratio, [[1.0, -1.0, 2.0]], **fields, **bands)
        expected = row("turn_ppo", log_ratio, [[1.0, -1.0, 2.0]], turn=[[0, 0, 1]], **bands)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
    with pytest.raises(ValueError, match="Unknown form 'code'; choose paper or survey"):
        row("st_ppo", [0.0], 1.0, turn=[[0]], st_ppo_norm=1.0, form="code")
