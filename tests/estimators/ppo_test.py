"""Clipped surrogates of token ratios: a loop over tokens, published coefficients, limits, ties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import methods, ppo
from jaxrl_tis.estimators import reduce
from tests import jitted

ppo, reduce = map(jitted.Module, (ppo, reduce))

# Coefficient on the gradient of log pi at (log-ratio, advantage), clip 0.2: the ratio times A
# inside the band, 0 where the pessimistic branch is flat.
POINTS = [
    (0.0, 1),
    (0.0, -1),
    (0.3, 1),
    (0.3, -1),
    (-0.3, 1),
    (-0.3, -1),
    (1.5, 1),
    (1.5, -1),
    (-1.5, 1),
    (-1.5, -1),
]
UNCLIPPED = [1, -1, 1.350, -1.350, 0.741, -0.741, 4.482, -4.482, 0.223, -0.223]
BOUNDED = [1, -1, 0, -1.350, 0.741, 0, 0, 0, 0.223, 0]
COEFFICIENTS = [
    ("ppo", {}, [1, -1, 0, -1.350, 0.741, 0, 0, -4.482, 0.223, 0]),
    ("dual_clip", {}, BOUNDED),
    ("ppo", {"clip_low": 1.0, "clip_high": np.inf}, UNCLIPPED),
    ("m2po", {"m2po_threshold": np.inf}, UNCLIPPED),
    ("kl_cov", {"kl_cov_coeff": 0.0}, UNCLIPPED),
]
KEY = np.array([3, 4], np.uint32)
MASK = np.arange(16)[None, :] < np.array([16, 9, 0, 1])[:, None]
MASK[0, 2] = False  # a tool token
FLOATS = ("logp", "logp_old", "adv", "logp_prox", "logp_behav")


def make_batch(spread=0.4):
    rng = np.random.default_rng(7)
    logp = -rng.exponential(1.0, MASK.shape) - 1e-3
    fields = {name: logp + spread * rng.normal(size=MASK.shape) for name in FLOATS[1:]}
    fields |= {"logp": logp, "adv": 2.0 * rng.normal(size=MASK.shape)}
    batch = {name: np.array(x, np.float32) for name, x in fields.items()}
    batch["version"] = np.array(rng.integers(3, 9, MASK.shape), np.int32)
    return batch | {"mask": np.array(MASK), "current_version": 7, "key": KEY}


@functools.partial(
    jax.jit,
    static_argnames=(
        "name", "clip_low", "clip_high", "dual_clip", "a3po_linear", "upper", "form",
    ),
)
def evaluate(name, batch, seg=None, **parameters):
    """(loss_bt, metrics, gradient of the summed loss with respect to logp)."""
    needed = methods.needs("objective", name)

    def total(logp):
        loss_bt, metrics = ppo.OBJECTIVES[name](
            logp,
            batch["logp_old"],
            batch["adv"],
            batch["mask"],
            seg,
            **{field: batch[field] for field in needed},
            **parameters,
        )
        return jnp.sum(loss_bt), (loss_bt, metrics)

    (_, (loss_bt, metrics)), gradient = jitted.value_and_grad(total, has_aux=True)(batch["logp"])
    return loss_bt, metrics, gradient


def row(name, log_ratio, adv, **fields):
    """The entry on one row with logp_old = log 0.2 and everything valid."""
    log_ratio, adv = (np.array([x], np.float32) for x in (log_ratio, adv))
    old = np.full(log_ratio.shape, np.log(0.2), np.float32)
    batch = {"logp": old + log_ratio, "logp_old": old, "adv": adv}
    parameters = {k: fields.pop(k) for k in list(fields) if k not in (*FLOATS, "version", "key")}
    if "current_version" in parameters:
        batch["current_version"] = parameters.pop("current_version")
    return evaluate(name, batch | {"mask": np.ones(old.shape)} | fields, **parameters)


# The formulas once more, token by token in float64, by cases where the source has min and max.


def ppo_token(ratio, adv, low=0.8, high=1.2):
    """(loss, gradient with respect to log pi, whether clipped)."""
    if adv > 0 and ratio > high:
        return -high * adv, 0.0, True
    if adv < 0 and ratio < low:
        return -low * adv, 0.0, True
    return -ratio * adv, -ratio * adv, False


def dual_token(x):
    loss, gradient, is_clipped = ppo_token(np.exp(x["logp"] - x["logp_old"]), x["adv"])
    is_bounded = x["adv"] < 0 and loss > -3.0 * x["adv"]
    return (-3.0 * x["adv"], 0.0, is_clipped) if is_bounded else (loss, gradient, is_clipped)


def decoupled_token(x, logp_prox):
    w = np.exp(logp_prox - x["logp_behav"])
    loss, gradient, is_clipped = ppo_token(np.exp(x["logp"] - logp_prox), x["adv"])
    return (w * loss, w * gradient, is_clipped) if w <= 1.3 else (0.0, 0.0, is_clipped)


def a3po_token(x, is_linear):
    lag = 7 - x["version"]
    alpha = (lag - 1) / lag if lag > 1 else 0.0
    mixed = (1 - alpha) * x["logp_behav"] + alpha * x["logp"]
    if is_linear:
        pi, mu = np.exp(x["logp"]), np.exp(x["logp_behav"])
        mixed = np.log(alpha * pi + (1 - alpha) * mu + 1e-10)
    return decoupled_token(x, mixed)


def qurl_token(x):
    w = min(np.exp(x["logp_old"] - x["logp_behav"]), 2.0)
    high = 1.2 / w
    ratio = np.exp(x["logp"] - x["logp_old"])
    loss, gradient, is_clipped = ppo_token(ratio, x["adv"], min(0.8, high), high)
    return w * loss, w * gradient, is_clipped


LOOPS = [
    ("ppo", {}, lambda x: ppo_token(np.exp(x["logp"] - x["logp_old"]), x["adv"])),
    ("dual_clip", {}, dual_token),
    ("a3po", {"upper": 1.3}, lambda x: a3po_token(x, False)),
    ("a3po", {"upper": 1.3, "a3po_linear": True}, lambda x: a3po_token(x, True)),
    ("qurl_acr", {}, qurl_token),
]


@pytest.mark.parametrize(("name", "parameters", "token"), LOOPS)
def test_entry_equals_a_loop_over_tokens(name, parameters, token):
    batch = make_batch(spread=0.9)
    loss, metrics, gradient = evaluate(name, batch, **parameters)
    expected = np.zeros((3, *MASK.shape))
    for position in zip(*np.nonzero(MASK), strict=True):
        x = {k: np.float64(batch[k][position]) for k in (*FLOATS, "version")}
        expected[(slice(None), *position)] = token(x)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-6)
    assert 0 < np.sum(expected[2]) < np.sum(MASK)  # the batch has tokens on both branches
    np.testing.assert_allclose(
        metrics["actor/pg_clipfrac"], np.sum(expected[2]) / np.sum(MASK), rtol=1e-6
    )


@pytest.mark.parametrize(("name", "parameters", "coefficients"), COEFFICIENTS)
def test_published_coefficients(name, parameters, coefficients):
    log_ratio, adv = zip(*POINTS, strict=True)
    _, _, gradient = row(name, log_ratio, adv, **parameters)
    np.testing.assert_allclose(-gradient, [coefficients], atol=6e-4)


def test_a_ratio_on_the_edge_of_the_band_keeps_its_gradient():
    for name in ("ppo", "dual_clip"):  # r = 1 and a band of width 0
        _, _, gradient = row(name, [0.0, 0.0], [2.0, -2.0], clip_low=0.0, clip_high=0.0)
        np.testing.assert_array_equal(gradient, [[-2.0, 2.0]])


def test_a_ratio_at_its_bound_counts_as_inside():
    # r = 1 in a band of width 0, and a cap on exactly the loss that is there: max(-r A, -2 A) = 2.
    for name in ("ppo", "dual_clip"):
        _, metrics, _ = row(name, [0.0, 0.0], [2.0, -2.0], clip_low=0.0, clip_high=0.0)
        assert metrics["actor/pg_clipfrac"] == 0.0
    at_the_bound = {"clip_low": -1.0, "clip_high": 2.0, "dual_clip": 2.0}
    loss, metrics, _ = row("dual_clip", [0.0], [-1.0], **at_the_bound)
    assert loss == 2.0 and metrics["actor/pg_clipfrac_lower"] == 0.0
    _, metrics, _ = row("dual_clip", [0.0], [-1.0], **at_the_bound | {"dual_clip": 1.99})
    assert metrics["actor/pg_clipfrac_lower"] == 1.0


def test_bounds_that_are_none_are_refused():
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        row("dual_clip", [0.0], [1.0], dual_clip=1.0)


def test_log_ratios_beyond_the_bound_are_flat():
    old = np.zeros((1, 4))
    logp, adv = np.array([[20.0, 21.0, 500.0, -500.0]]), np.full((1, 4), -1.0)
    batch = {"logp": logp, "logp_old": old, "adv": adv, "mask": np.ones((1, 4))}
    loss, _, gradient = evaluate("ppo", batch)
    np.testing.assert_allclose(loss, [[np.exp(20.0)] * 3 + [0.8]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[np.exp(20.0), 0, 0, 0]], rtol=1e-5)  # the bound passes


def test_a3po_interpolates_by_the_age_of_each_token():
    # pi / mu = 16 and d = 1, 2, 4: u = 16, 4, 2 in value and w = 1, 4, 8, so that w u = 16.
    # A = -1 is never clipped from above: loss w u = 16. A = 1 is clipped at u = 1.2: -w 1.2.
    old = np.full((1, 6), jnp.log(0.2))
    fields = {"logp_behav": old, "version": np.array([[9, 8, 6] * 2]), "current_version": 10}
    adv = [-1.0] * 3 + [1.0] * 3
    loss, metrics, gradient = row("a3po", [np.log(16.0)] * 6, adv, **fields)
    np.testing.assert_allclose(loss, [[16.0, 16.0, 16.0, -1.2, -4.8, -9.6]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[16.0, 16.0, 16.0, 0.0, 0.0, 0.0]], rtol=1e-5)
    # ppo_kl is the mean of -log u: -(log 16 + log 4 + log 2) / 3 = -7 log 2 / 3.
    np.testing.assert_allclose(metrics["actor/ppo_kl"], -7 * np.log(2.0) / 3, rtol=1e-5)


def test_a3po_mixes_probabilities():
    # mu = 0.1, pi = 0.5, d = 2: pi_prox = 0.3, w = 3, u = 5/3. A = 1: -3 * 1.2; A = -1: 3 * 5/3.
    behav = np.full((1, 2), jnp.log(0.1))
    fields = {"logp_behav": behav, "version": np.full((1, 2), 5), "current_version": 7}
    loss, _, gradient = row("a3po", [np.log(2.5)] * 2, [1.0, -1.0], a3po_linear=True, **fields)
    np.testing.assert_allclose(loss, [[-3.6, 5.0]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0.0, 5.0]], rtol=1e-5, atol=1e-6)
    # mu = 0 to float32 and d = 1: the floor 1e-10 is what is left of pi_prox.
    fields = {"logp_behav": behav - 300.0, "version": np.full((1, 2), 6), "current_version": 7}
    _, metrics, _ = row("a3po", [np.log(2.5)] * 2, [1.0, 1.0], a3po_linear=True, **fields)
    np.testing.assert_allclose(metrics["actor/ppo_kl"], -20.0, rtol=1e-5)  # log(0.5 / 1e-10) = 22


def test_qurl_moves_the_upper_end():
    # w = 1 is PPO. w = 0.5: band [0.8, 2.4], r = 2 is inside, loss -0.5 * 2. w = 4 is capped at 2:
    # the upper end 0.6 is below the lower one and wins: A = 1 -> -2 * 0.6, flat; A = -1 -> 2 * 1.
    old = jnp.log(0.2)
    behav = np.array([[old, old, old - jnp.log(0.5), old - jnp.log(4.0), old - jnp.log(4.0)]])
    log_ratio, adv = [0.3, -0.3, np.log(2.0), 0.0, 0.0], [1.0, -1.0, 1.0, 1.0, -1.0]
    loss, metrics, gradient = row("qurl_acr", log_ratio, adv, logp_behav=behav)
    np.testing.assert_allclose(loss, [[-1.2, 0.8, -1.0, -1.2, 2.0]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0.0, 0.0, -1.0, 0.0, 2.0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 3 / 5, rtol=1e-6)
    loss, _, _ = row("qurl_acr", [0.0], [-1.0], logp_behav=behav[:, 3:4], cap=8.0)
    np.testing.assert_allclose(loss, [[4.0]], rtol=1e-5)


def test_m2po_clips_at_the_budget():
    # Harmful: l = 0.5 and 0.1 at A = 1; -0.1 at A = 1 and 3 at A = -1 are not. Mean of the squares
    # 0.13 > 0.04, so (tau^2 + 0.01) / 2 = 0.04, tau = 0.2645751, exp(tau) = 1.302877.
    log_ratio, adv = [0.5, 0.1, -0.1, 3.0], [1.0, 1.0, 1.0, -1.0]
    loss, metrics, gradient = row("m2po", log_ratio, adv, m2po_low=0.0, m2po_high=0.0)
    inside = np.exp([0.1, -0.1, 3.0])
    np.testing.assert_allclose(loss, [[-1.302877, -inside[0], -inside[1], inside[2]]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0.0, -inside[0], -inside[1], inside[2]]], rtol=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.25
    loss, _, _ = row("m2po", log_ratio, adv)  # never tighter than [0.7, 1.5]
    np.testing.assert_allclose(loss[0, 0], -1.5, rtol=1e-6)
    # The mirror image: A = -1 and l = -0.5, -0.1 give the lower end exp(-tau), or 0.7.
    low, _, _ = row("m2po", [-0.5, -0.1], [-1.0, -1.0], m2po_low=0.0)
    np.testing.assert_allclose(low, [[np.exp(-np.sqrt(0.07)), np.exp(-0.1)]], rtol=1e-5)
    low, _, _ = row("m2po", [-0.5, -0.1], [-1.0, -1.0])
    np.testing.assert_allclose(low, [[0.7, np.exp(-0.1)]], rtol=1e-5)


def test_m2po_within_the_budget_clips_nothing():
    # One of 40 harmful tokens is far away: 1.2^2 / 40 = 0.036 <= 0.04, though r = 3.3.
    log_ratio = [1.2] + [0.0] * 39
    harmful = [1.2] + [1e-3] * 39
    loss, metrics, _ = row("m2po", harmful, [1.0] * 40)
    np.testing.assert_allclose(loss[0, 0], -np.exp(1.2), rtol=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0
    # With r = 1 on the others they are not harmful, and the mean is 1.44.
    loss, _, _ = row("m2po", log_ratio, [1.0] * 40)
    np.testing.assert_allclose(loss[0, 0], -1.5, rtol=1e-6)


# Means -3 and 0: cov = (A - mean A)(logp - mean logp) = (2 * 2, 0 * 2, -2 * -2, 0 * -2).
COV_LOGP = np.array([[-1.0, -1.0, -5.0, -5.0, np.nan]])
COV_ADV = np.array([[2.0, 0.0, -2.0, 0.0, np.nan]])


def covariance_batch(log_ratio, adv=COV_ADV, seed=0):
    return {
        "logp": COV_LOGP,
        "logp_old": COV_LOGP - np.array([[*log_ratio, 0.0]]),
        "adv": adv,
        "mask": np.array([[1, 1, 1, 1, 0]]),
        "key": jax.random.key(seed),
    }


def test_clip_cov_drops_the_candidates():
    batch = covariance_batch([0.0] * 4)
    loss, metrics, gradient = evaluate("clip_cov", batch, clip_cov_ratio=0.5)  # 2 of 4 tokens
    np.testing.assert_array_equal(loss, np.zeros((1, 5)))
    np.testing.assert_array_equal(gradient, np.zeros((1, 5)))
    assert metrics["actor/pg_clipfrac"] == 0.5
    # The band is open: cov = 4 is not below 4, nor above 4.
    for band in ({"clip_cov_upper": 4.0}, {"clip_cov_lower": 4.0}):
        loss, _, _ = evaluate("clip_cov", batch, clip_cov_ratio=0.5, **band)
        np.testing.assert_array_equal(loss, [[-2.0, 0.0, 2.0, 0.0, 0.0]])
    loss, _, _ = evaluate("clip_cov", batch, clip_cov_ratio=0.5, clip_low=0.0, clip_high=0.0)
    np.testing.assert_array_equal(loss, np.zeros((1, 5)))  # r = 1 is the end of that band, not out
    # A token that PPO has clipped is no candidate: r = e^0.5 at A = 2 stays at -1.2 A.
    batch = covariance_batch([0.5, 0.0, 0.0, 0.0])
    loss, _, _ = evaluate("clip_cov", batch, clip_cov_ratio=0.5)
    np.testing.assert_allclose(loss, [[-2.4, 0.0, 0.0, 0.0, 0.0]], rtol=1e-6)


def test_clip_cov_draws_by_its_key():
    # max(1, floor(2e-4 * 4)) = 1 of the two candidates, each in about half of the draws.
    losses = [evaluate("clip_cov", covariance_batch([0.0] * 4, seed=s))[0] for s in range(24)]
    is_first = [bool(x[0, 0] == 0.0) for x in losses]
    assert all((x[0, 2] == 0.0) != first for x, first in zip(losses, is_first, strict=True))
    assert 4 <= sum(is_first) <= 20
    again = evaluate("clip_cov", covariance_batch([0.0] * 4, seed=0))[0]
    np.testing.assert_array_equal(again, losses[0])


def test_kl_cov_penalises_the_highest_covariances():
    # A = (3, 0, -2, -1): cov = (6, 0, 4, 2). Half of the tokens: the first and the third.
    adv = np.array([[3.0, 0.0, -2.0, -1.0, np.nan]])
    log_ratio = np.array([0.5, -0.5, -0.25, 1.0])
    batch = covariance_batch(log_ratio, adv)
    base = -np.exp(log_ratio) * np.array([3.0, 0.0, -2.0, -1.0])
    loss, metrics, gradient = evaluate("kl_cov", batch, kl_cov_ratio=0.5, kl_cov_coeff=0.1)
    np.testing.assert_allclose(loss[0, :4], base + 0.1 * np.array([0.5, 0, 0.25, 0]), rtol=1e-5)
    np.testing.assert_allclose(gradient[0, :4], base + 0.1 * np.array([1, 0, -1, 0]), rtol=1e-5)
    assert loss[0, 4] == 0.0 and gradient[0, 4] == 0.0
    np.testing.assert_allclose(metrics["actor/ppo_kl"], 2.25 / 4, rtol=1e-5)
    loss, _, _ = evaluate("kl_cov", batch, kl_cov_ratio=1e-9)  # never less than one, coefficient 1
    np.testing.assert_allclose(loss[0, :4], base + np.array([0.5, 0, 0, 0]), rtol=1e-5)


def test_kl_cov_by_the_sampled_divergence():
    # The same tokens with k3 = r - 1 - log r: e^0.5 - 1.5 = 0.148721 with slope e^0.5 - 1, and
    # e^-0.25 - 0.75 = 0.028801 with slope e^-0.25 - 1 = -0.221199.
    adv = np.array([[3.0, 0.0, -2.0, -1.0, np.nan]])
    log_ratio = np.array([0.5, -0.5, -0.25, 1.0])
    base = -np.exp(log_ratio) * np.array([3.0, 0.0, -2.0, -1.0])
    parameters = {"kl_cov_ratio": 0.5, "kl_cov_coeff": 0.1, "form": "survey"}
    loss, metrics, gradient = evaluate("kl_cov", covariance_batch(log_ratio, adv), **parameters)
    penalty = 0.1 * np.array([0.148721, 0, 0.028801, 0])
    np.testing.assert_allclose(loss[0, :4], base + penalty, rtol=1e-5)
    slope = 0.1 * np.array([0.648721, 0, -0.221199, 0])
    np.testing.assert_allclose(gradient[0, :4], base + slope, rtol=1e-5)
    assert loss[0, 4] == 0.0 and gradient[0, 4] == 0.0
    # Of all four tokens: 0.148721 + (e^-0.5 - 0.5) + 0.028801 + (e - 2) = 1.002335.
    np.testing.assert_allclose(metrics["actor/ppo_kl"], 1.002335 / 4, rtol=1e-5)


@pytest.mark.parametrize("form", ["paper", "survey"])
def test_kl_cov_on_policy_is_reinforce(form):
    adv = np.array([[3.0, 0.0, -2.0, -1.0, np.nan]])  # either penalty has gradient 0 at r = 1
    batch = covariance_batch([0.0] * 4, adv)
    _, _, gradient = evaluate("kl_cov", batch, kl_cov_ratio=1.0, form=form)
    np.testing.assert_array_equal(gradient, [[-3.0, 0.0, 2.0, 1.0, 0.0]])


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="Unknown form 'code'; choose paper or survey"):
        evaluate("kl_cov", covariance_batch([0.0] * 4), form="code")
