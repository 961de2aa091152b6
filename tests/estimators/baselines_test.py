"""Each baseline: by hand, against what it minimises, and as a loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import baselines
from tests import jitted

baselines = jitted.Module(baselines)

NAN = float("nan")
batch_mean = baselines.batch_mean
TOKEN_BASELINES = {
    name: jax.jit(function, static_argnames=("otb_zero_tail", "form"))
    for name, function in (("otb", baselines.otb), ("tir_otb", baselines.tir_otb))
}


def test_remax_subtracts_the_greedy_reward():
    # Row 0: 1 + 2 - 0.5 at both tokens after the 1 is still to come, then 2 - 0.5.
    adv = baselines.remax(
        np.array([[0.0, 1.0, 2.0], [0.0, 3.0, NAN]]),
        np.array([[1, 1, 1], [1, 1, 0]]),
        np.array([0, 0]),
        greedy_rewards=np.array([0.5, 3.0]),
    )
    np.testing.assert_array_equal(adv, [[2.5, 2.5, 1.5], [0, 0, 0]])


def test_the_mean_of_the_batch_knows_no_groups():
    # (3 + 0 + 1 + 2) / 4 = 1.5, each sequence once, whatever its length; the last has no token.
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    rewards = np.array([3.0, 0.0, 1.0, 2.0])
    for group in ([0, 1, 2, 3], [0, 0, 5, 5]):
        adv = batch_mean(rewards, mask, np.array(group))
        np.testing.assert_array_equal(adv, [[1.5] * 3, [-1.5, 0, 0], [-0.5, -0.5, 0], [0] * 3])
    per_token = np.array([[1.0, 0.0, 2.0], [0.0, NAN, NAN], [-1.0, 2.0, NAN], [NAN] * 3])
    adv = batch_mean(per_token, mask, np.arange(4))  # 3, 0, 1 and 0: the mean is 1
    np.testing.assert_array_equal(adv[:, 0], [2.0, -1.0, 0.0, 0.0])
    constant = batch_mean(np.full(4, 0.1), mask, np.arange(4))
    np.testing.assert_array_equal(constant, np.zeros((4, 3)))  # and not a rounding


def test_the_mean_of_the_batch_shortens_the_step_by_its_own_reward():
    """One token of two, p = 0.3 for the one with reward 1, over all batches of three: the mean of
    A d log p / d logit is 2/3 of p (1 - p), the derivative of the expected reward."""
    p, size, total = 0.3, 3, 0.0
    for drawn in itertools.product((0, 1), repeat=size):
        rewards = np.array(drawn, np.float32)
        adv = batch_mean(rewards, np.ones((size, 1)), np.arange(size))[:, 0]
        chance = np.prod(np.where(rewards == 1, p, 1 - p))
        total += chance * np.mean(np.asarray(adv) * (rewards - p))
    np.testing.assert_allclose(total, (size - 1) / size * p * (1 - p), rtol=1e-6)


def test_opo_by_hand_and_by_what_it_minimises():
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    rewards, group = np.array([1.0, 0.0, 0.3, 0.8]), np.array([0, 0, 1, 1])
    adv = baselines.opo(rewards, mask, group)[:, 0]
    # Baselines 4 / 6 and (0.3 + 3 * 0.8) / 4 = 0.675.
    np.testing.assert_allclose(adv, [1 / 3, -2 / 3, -0.375, 0.125], rtol=1e-5)
    length = np.sum(mask, axis=1)
    for members in ([0, 1], [2, 3]):  # derivative of sum_j n_j (R_j - b)^2 at the baseline
        np.testing.assert_allclose(np.sum((length * adv)[np.array(members)]), 0.0, atol=1e-6)


jitted_opob = baselines.opob


def opob(rewards, log_w, grad_norms, mask=None, group=None):
    """The advantage at the first token; each sequence has two tokens that share its log-weight."""
    size = len(rewards)
    logp_prox = jnp.stack([0.25 * np.asarray(log_w), 0.75 * np.asarray(log_w)], axis=1)
    mask = np.ones((size, 2)) if mask is None else mask
    adv = jitted_opob(
        np.asarray(rewards, np.float32),
        mask,
        np.zeros(size, int) if group is None else group,
        grad_norms=np.asarray(grad_norms, np.float32),
        logp_prox=logp_prox - 1.0,
        logp_behav=np.full((size, 2), -1.0),
    )
    return np.asarray(adv[:, 0])


R = np.array([1.0, 0.0, 0.0, 1.0])
LOG_W = np.log([0.5, 1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("log_w", "grad_norms", "baseline"),
    [
        (LOG_W, np.ones(4), 0.764706),  # (0.25 + 16) / (0.25 + 1 + 4 + 16)
        (np.zeros(4), np.full(4, 3.0), 0.5),  # the mean
        (LOG_W, [4.0, 1.0, 0.25, 0.0], 1 / 3),  # 1 / (1 + 1 + 1)
        (LOG_W + 200.0, np.ones(4), 0.764706),  # a common factor changes nothing
        (LOG_W - 200.0, np.ones(4), 0.764706),
        ([-300.0, 300.0, 0.0, 0.0], np.ones(4), 0.0),  # one weight decides
        ([-300.0, 300.0, -80.0, -80.0], [1.0, 0.0, 1.0, 1.0], 0.5),  # a norm of 0 has no say
        (LOG_W, np.zeros(4), 0.0),
    ],
)
def test_opob_baseline(log_w, grad_norms, baseline):
    np.testing.assert_allclose(opob(R, log_w, grad_norms), R - baseline, rtol=1e-4, atol=1e-6)


def test_opob_minimises_the_weighted_square():
    rng = np.random.default_rng(0)
    rewards, log_w, norms = rng.normal(size=5), rng.normal(size=5), rng.exponential(size=5)
    adv = opob(rewards, log_w, norms)
    np.testing.assert_allclose(np.sum(np.exp(2 * log_w) * norms * adv), 0.0, atol=1e-5)


def test_opob_without_tokens_in_a_row_or_in_a_group():
    mask = np.array([[1, 1], [1, 1], [0, 0], [0, 0]])
    adv = opob(R, LOG_W, [1.0, 1.0, NAN, NAN], mask, np.array([0, 0, 0, 1]))
    # Baseline 0.25 / (0.25 + 1) of the two rows that have tokens.
    np.testing.assert_allclose(adv, [0.8, -0.2, 0, 0], rtol=1e-5)


def token_fields(score_norm):
    """logp_prox and sum_pi_squared whose 1 - 2 pi + sum pi^2 is score_norm: pi is 0.5."""
    score_norm = np.asarray(score_norm)
    return {
        "logp_prox": jnp.where(jnp.isnan(score_norm), NAN, jnp.log(0.5)),
        "sum_pi_squared": score_norm,
    }


PUBLISHED = {
    "rewards": np.array([1.0, 0.0]),
    "mask": np.array([[1, 1, 1], [1, 1, 0]]),
    "group": np.zeros(2, int),
    **token_fields([[0.5, 0.4, 0.4], [0.02, 0.5, NAN]]),
}


@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_weights_outside_of_the_sum(name):
    w = np.array([[2.0, 1.0, 1.0], [1.0, 3.0, NAN]])
    # The sums of the scores are 0.5, 0.9, 1.3 and 0.02, 0.52. Times w_t^2: 2, 0.9 and 0.02, 4.68,
    # so B is 2 / 2.02 and 0.9 / 5.58. Times the mean of w^2 so far, (4, 5/2) and (1, 5): 2, 2.25
    # and 0.02, 2.6, so B is 2 / 2.02 and 2.25 / 4.85. The third position has one response.
    entry = TOKEN_BASELINES[name]
    for form, second in (("survey", 0.9 / 5.58), ("survey_mean", 2.25 / 4.85)):
        adv = entry(**PUBLISHED, weights=w, form=form)
        expected = [[1 - 2 / 2.02, 1 - second, 1.0], [-2 / 2.02, -second, 0.0]]
        np.testing.assert_allclose(adv, expected, rtol=1e-4)
    with pytest.raises(ValueError, match="Unknown form 'code'; choose paper or survey"):
        entry(**PUBLISHED, form="code")


def test_weights_of_sequences_enter_alike_in_every_form():
    w = np.array([[2.0, 2.0, 2.0], [1.0, 1.0, NAN]])
    forms = ("paper", "survey", "survey_mean")
    adv = [TOKEN_BASELINES["otb"](**PUBLISHED, weights=w, form=form) for form in forms]
    np.testing.assert_allclose(adv[1:], [adv[0]] * 2, rtol=1e-6)
    plain = TOKEN_BASELINES["otb"](**PUBLISHED, form="survey_mean")
    np.testing.assert_array_equal(plain, TOKEN_BASELINES["otb"](**PUBLISHED))


def test_tokens_that_were_certain_do_not_divide_by_zero():
    # pi = 1: the score is 0, so W is 0 and the baseline 0 / 1e-8.
    certain = {"logp_prox": np.zeros((2, 2)), "sum_pi_squared": np.ones((2, 2))}
    arguments = (np.ones((2, 2)), np.zeros(2, int))
    adv = TOKEN_BASELINES["otb"](np.array([1.0, 0.0]), *arguments, **certain)
    np.testing.assert_array_equal(adv, [[1, 1], [0, 0]])
    # Rounding can leave a sum of squares just below 2 pi - 1; the term is cut at 0.
    certain["sum_pi_squared"] = np.full((2, 2), 1.0 - 1e-6)
    adv = TOKEN_BASELINES["otb"](np.array([1.0, 0.0]), *arguments, **certain)
    np.testing.assert_array_equal(adv, [[1, 1], [0, 0]])


def random_case(seed, has_holes):
    """A ragged batch of 7 rows, the last one without tokens, in groups of 3, 2 and 2."""
    rng = np.random.default_rng(seed)
    length = np.array([6, 3, 5, 4, 4, 6, 0])
    mask = np.arange(8)[None, :] < length[:, None]
    if has_holes:
        mask &= rng.random(mask.shape) < 0.7
    p = rng.random(mask.shape)
    return {
        "rewards": np.where(mask, rng.normal(size=mask.shape), NAN),
        "mask": mask,
        "group": np.array([4, 0, 4, 0, 4, 2, 2]),
        "logp_prox": np.where(mask, np.log(p), NAN),
        "sum_pi_squared": np.where(mask, p**2 + (1 - p) ** 2 * rng.random(mask.shape), NAN),
        "weights": np.where(mask, np.exp(rng.normal(size=mask.shape)), NAN),
    }


def loop_otb(case, is_compacted, otb_zero_tail=True):
    """Token baselines by loops over rows and positions, in float64."""
    mask, group = case["mask"], case["group"]
    rows = range(len(mask))
    kept = [np.flatnonzero(row) for row in mask]
    positions = [list(range(len(k))) if is_compacted else list(k) for k in kept]
    returns, power = [], []
    for b in rows:
        r, logp, square, w = (
            case[field][b, kept[b]]
            for field in ("rewards", "logp_prox", "sum_pi_squared", "weights")
        )
        returns.append(np.cumsum(r[::-1])[::-1])
        power.append(np.cumsum((1 - 2 * np.exp(logp) + square) * w**2))
    adv = np.zeros(mask.shape)
    for b in rows:
        for i, position in enumerate(positions[b]):
            live = [
                (returns[j][positions[j].index(position)], power[j][positions[j].index(position)])
                for j in rows
                if group[j] == group[b] and position in positions[j]
            ]
            size = sum(len(kept[j]) > 0 for j in rows if group[j] == group[b])
            is_alone = len(live) == 1 if otb_zero_tail else size == 1
            total = sum(weight for _, weight in live) + 1e-8
            baseline = sum(g * weight for g, weight in live) / total
            if is_alone:
                baseline = 0.0
            elif len({g for g, _ in live}) == 1:
                baseline = live[0][0]
            adv[b, kept[b][i]] = returns[b][i] - baseline
    return adv


@pytest.mark.parametrize("otb_zero_tail", [True, False])
@pytest.mark.parametrize(
    ("name", "has_holes"), [("otb", False), ("otb", True), ("tir_otb", False), ("tir_otb", True)]
)
def test_token_baselines_equal_a_loop(name, has_holes, otb_zero_tail):
    case = random_case(1, has_holes)
    with jax.enable_x64(True):
        adv = TOKEN_BASELINES[name](**case, otb_zero_tail=otb_zero_tail)
    expected = loop_otb(case, name == "tir_otb", otb_zero_tail)
    np.testing.assert_allclose(adv, expected, rtol=1e-9, atol=1e-12)
