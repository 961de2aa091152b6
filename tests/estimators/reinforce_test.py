"""Detached weights: published coefficients, verl's numbers, limits of each method, packing."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import aspo, fusion, methods, reduce, reinforce
from tests import jitted

aspo, fusion, reduce, reinforce = map(jitted.Module, (aspo, fusion, reduce, reinforce))

POINTS = [(0.0, 1), (0.0, -1), (0.3, 1), (0.3, -1), (-0.3, 1), (-0.3, -1)]
POINTS += [(1.5, 1), (1.5, -1), (-1.5, 1), (-1.5, -1)]
UNCLIPPED = [1, -1, 1.350, -1.350, 0.741, -0.741, 4.482, -4.482, 0.223, -0.223]
# Everything whose gradient is a weight times that of log pi.
OBJECTIVES = reinforce.OBJECTIVES | aspo.OBJECTIVES | fusion.OBJECTIVES
TOPR = [1, -1, 1, -1, 1, -0.741, 1, -1, 1, -0.223]
DPPO = [1, -1, 1.350, -1.350, 0.741, -0.741, 0, -4.482, 0.223, 0]
# Coefficient on the gradient of log pi at each point, one token, p_old = 0.2.
COEFFICIENTS = {
    "gpg": [1, -1] * 5,
    "reinforce": [1, -1] * 5,
    "cispo": [1, -1, 1.2, -1.2, 0.741, -0.741, 1.2, -1.2, 0.223, -0.223],
    # e^1.5 = 4.482 is inside [0, 5] for A > 0 and cut to 1.28 for A < 0.
    "dispo": [1, -1, 1.350, -1.280, 0.741, -0.741, 4.482, -1.280, 0.223, -0.223],
    # Within (0.7, 6) for both signs: e^-1.5 = 0.223 is outside.
    "dis": [1, -1, 1.350, -1.350, 0.741, -0.741, 4.482, -4.482, 0, 0],
    "topr": TOPR,
    "topr_token": TOPR,
    "topr_geo": TOPR,
    "aspo": [1, -1, 0, -1.350, 1.350, 0, 0, -3, 3, 0],
    "minpro": UNCLIPPED,
    "dppo_tv": DPPO,
    "dppo_kl": DPPO,
    "vespo": [1, -1, 0.638, -1.222, 1.194, -0.683, 0.001, -0.085, 0.512, -0.053],
    "fusion_cap": [1, -1, 1.350, -1.350, 0.741, -0.741, 0, 0, 0.223, -0.223],
    "fusion_shaped": [0.083, -0.083, 0.064, -0.064, 0.105, -0.105, 0.021, -0.021, 0.214, -0.214],
}


@jitted.function
def run(name, logp, batch, **parameters):
    """(loss [B, T], metrics, gradient of its sum) with the entry's needs taken from the batch."""
    needs = {field: batch.get(field) for field in methods.needs("objective", name)}
    arguments = methods.traits("objective", name).example

    def total(logp):
        loss_bt, metrics = OBJECTIVES[name](
            logp,
            batch["logp_old"],
            batch["adv"],
            batch["mask"],
            batch.get("seg"),
            **(arguments | needs | parameters),
        )
        return jnp.sum(loss_bt), (loss_bt, metrics)

    gradient, (loss_bt, metrics) = jitted.grad(total, has_aux=True)(logp)
    return loss_bt, metrics, gradient


def tokens(log_ratio, adv, p_old=0.2):
    """(logp, batch) of one-token rows with these log-ratios, on or off the sampler alike."""
    log_ratio = np.array(log_ratio, np.float32)[:, None]
    logp_old = np.full_like(log_ratio, np.log(p_old))
    batch = {
        "logp_old": logp_old,
        "logp_behav": logp_old,
        "adv": np.array(adv, np.float32)[:, None],
        "mask": np.ones_like(log_ratio, bool),
        "entropy": np.ones_like(log_ratio),
    }
    return logp_old + log_ratio, batch


def row(log_ratio, adv, **fields):
    """(logp, batch) of one sequence, logp_old = -3 everywhere."""
    log_ratio = np.array([log_ratio], np.float32)
    batch = {
        "logp_old": np.full_like(log_ratio, -3.0),
        "logp_behav": np.full_like(log_ratio, -3.0),
        "adv": np.broadcast_to(np.float32(adv), log_ratio.shape),
        "mask": np.ones_like(log_ratio, bool),
        "entropy": np.ones_like(log_ratio),
    }
    return log_ratio - 3.0, batch | fields


LENGTHS = (5, 2, 1, 4, 3, 3)


def make_batch(spread=0.5):
    """Six sequences of different lengths; one tool token inside the first."""
    rng = np.random.default_rng(5)
    mask = np.arange(5)[None, :] < np.array(LENGTHS)[:, None]
    mask[0, 2] = False
    logp_old = -rng.exponential(1.0, mask.shape) - 0.05
    drift, gap = spread * rng.normal(size=(2, *mask.shape))
    fields = {
        "logp_old": logp_old,
        "logp_behav": logp_old + gap,
        "adv": rng.normal(size=mask.shape),
        "entropy": rng.exponential(1.0, mask.shape),
    }
    batch = {name: x.astype(np.float32) for name, x in fields.items()} | {"mask": mask}
    return np.minimum(logp_old + drift, -0.01).astype(np.float32), batch


@pytest.mark.parametrize("name", OBJECTIVES)
def test_published_coefficients(name):
    logp, batch = tokens(*zip(*POINTS, strict=True))
    _, _, gradient = run(name, logp, batch)
    np.testing.assert_allclose(-gradient[:, 0], COEFFICIENTS[name], atol=6e-4)


def test_gpg_and_reinforce_differ_in_metrics_alone():
    logp, batch = make_batch()
    loss_bt, metrics, _ = run("gpg", logp, batch)
    np.testing.assert_allclose(loss_bt[2, 0], -batch["adv"][2, 0] * logp[2, 0], rtol=1e-6)
    assert metrics == {}
    other, metrics, _ = run("reinforce", logp, batch)
    np.testing.assert_array_equal(other, loss_bt)
    drift = (batch["logp_old"] - logp)[batch["mask"]].mean()
    np.testing.assert_allclose(metrics["actor/ppo_kl"], drift, rtol=1e-5)
    moved = run("gpg", logp, batch | {"logp_old": np.full_like(logp, np.nan)})
    np.testing.assert_array_equal(moved[0], loss_bt)


def test_unified_mask_without_bounds_is_ppo():
    # Coefficients of PPO-clip 0.2 at the ten points.
    logp, batch = tokens(*zip(*POINTS, strict=True))
    open_bounds = {"clip_low": np.inf, "clip_high": np.inf}
    widths = {"cispo_mask_low": 0.2, "cispo_mask_high": 0.2}
    _, metrics, gradient = run("cispo", logp, batch, **open_bounds, **widths)
    ppo = [1, -1, 0, -1.350, 0.741, 0, 0, -4.482, 0.223, 0]
    np.testing.assert_allclose(-gradient[:, 0], ppo, atol=6e-4)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 0.4, rtol=1e-6)
    _, _, gradient = run("cispo", logp, batch, **open_bounds)
    np.testing.assert_allclose(-gradient[:, 0], UNCLIPPED, atol=6e-4)


def test_each_dispo_bound_acts_in_its_own_quadrant():
    # Rows: (r = 0.5, +), (2, +), (0.5, -), (2, -); with wide bands the weight is r.
    logp, batch = tokens(np.log([0.5, 2.0, 0.5, 2.0]), [1, 1, -1, -1])
    names = ("dispo_low_pos", "dispo_high_pos", "dispo_low_neg", "dispo_high_neg")
    for i, tight in enumerate(names):
        widths = {name: 0.25 if name == tight else 1.0 for name in names}
        weights = [0.5, 2.0, 0.5, 2.0]
        weights[i] = 0.75 if "low" in tight else 1.25
        _, metrics, gradient = run("dispo", logp, batch, **widths)
        np.testing.assert_allclose(np.abs(gradient[:, 0]), weights, rtol=1e-5)
        np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 0.25, rtol=1e-6)


def test_dispo_of_the_survey_bounds_each_label_where_the_advantage_pushes():
    # Rows: A > 0, A > 0, A < 0, A < 0, each with r = 0.5 and 2; correct ones first of each pair.
    r, adv = np.tile([0.5, 2.0], 4), np.repeat([1, 1, -1, -1], 2)
    logp, batch = tokens(np.log(r), adv)
    rewards = jnp.asarray(np.repeat([1.0, 0.0, 1.0, 0.0], 2)[:, None] * np.ones(logp.shape[1]))
    widths = dict(dispo_low_pos=0.4, dispo_high_pos=0.9, dispo_low_neg=0.2, dispo_high_neg=0.3)
    _, _, gradient = run("dispo", logp, batch | {"rewards": rewards}, form="survey", **widths)
    expected = [0.5, 1.9, 0.5, 1.3, 0.6, 2.0, 0.8, 2.0]
    np.testing.assert_allclose(np.abs(gradient[:, 0]), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="tells responses apart by their rewards"):
        methods.function("objective", "dispo")(
            logp, logp, logp, batch["mask"], form="survey", rewards=None, **widths)


def test_dispo_with_equal_bounds_is_cispo():
    logp, batch = make_batch()
    widths = {f"dispo_{end}_{sign}": 0.3 for end in ("low", "high") for sign in ("pos", "neg")}
    actual = run("dispo", logp, batch, **widths)
    expected = run("cispo", logp, batch, clip_low=0.3, clip_high=0.3)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_dis_masks_both_sides_for_both_signs():
    # Ratios 0.5, 0.7, 1.3, 2, 5.9 and 6.1: outside the band (0.7, 6) are the first and the last.
    logp, batch = tokens(np.log([0.5, 0.71, 1.3, 2.0, 5.9, 6.1] * 2), [1] * 6 + [-2] * 6)
    _, metrics, gradient = run("dis", logp, batch)
    w = np.array([0, 0.71, 1.3, 2.0, 5.9, 0])
    np.testing.assert_allclose(gradient[:, 0], [*-w, *2 * w], rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 4 / 12, rtol=1e-6)
    # The ends are outside: 1 - 0.5 and 1 + 1, exact in binary. PPO would keep the way back.
    logp, batch = tokens([0.0, 0.0, 0.0], [1, 1, 1], p_old=1.0)
    logp = np.log(np.array([[0.5], [1.0], [2.0]])).astype(np.float32)
    ratio = np.exp(logp)
    assert ratio.ravel().tolist() == [0.5, 1.0, 2.0]
    gradient = run("dis", logp, batch, clip_low=0.5, clip_high=1.0)[2]
    np.testing.assert_array_equal(gradient[:, 0], [0, -1, 0])


def test_dis_over_all_tokens_is_the_gradient_of_what_is_inside():
    """One position of four tokens: the mean under mu of the step is that of sum_v pi_v A_v grad log
    pi_v over the tokens inside the band, exactly, and with an infinite band the policy gradient."""
    mu, pi = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.3, 0.25, 0.35])
    adv = np.array([1.0, -0.5, 2.0, -1.0])  # ratios 0.25, 1, 1.25 and 3.5
    logits = np.log(np.array(pi, np.float32))
    for widths, inside in (({}, [0, 1, 1, 1]), ({"clip_high": 2.0}, [0, 1, 1, 0]),
                           ({"clip_low": 1.0, "clip_high": np.inf}, [1, 1, 1, 1])):

        def mean_loss(logits, widths=widths):
            logp = jax.nn.log_softmax(logits)[:, None]
            fields = (jnp.log(mu)[:, None], np.array(adv)[:, None], np.ones((4, 1)))
            return jnp.sum(mu * reinforce.dis(logp, *fields, **widths)[0][:, 0])

        coefficients = pi * adv * np.array(inside)  # of grad log pi_v = e_v - pi
        wanted = coefficients - coefficients.sum() * pi
        np.testing.assert_allclose(-jitted.grad(mean_loss)(logits), wanted, atol=1e-6)


# Ratios of (-0.2, 0.1, -0.5): sum -0.6, mean -0.2.
@pytest.mark.parametrize(
    ("name", "log_w"),
    [("topr", [-0.6] * 3), ("topr_token", [-0.2, 0.0, -0.5]), ("topr_geo", [-0.2] * 3)],
)
def test_topr_tapers_bad_responses_only(name, log_w):
    logp, batch = row([-0.2, 0.1, -0.5], -2.0)
    _, metrics, gradient = run(name, logp, batch)
    np.testing.assert_allclose(gradient[0], 2.0 * np.exp(log_w), rtol=1e-5)
    truncated = 1 / 3 if name == "topr_token" else 0.0
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], truncated, rtol=1e-6)
    _, _, gradient = run(name, logp, batch | {"adv": -batch["adv"]})
    np.testing.assert_array_equal(gradient[0], [-2.0] * 3)
    logp, batch = row([-5.0], -1.0)  # PPO has no gradient here
    np.testing.assert_allclose(run(name, logp, batch)[2], [[np.exp(-5.0)]], rtol=1e-5)


def test_topr_at_a_higher_cap():
    logp, batch = row([0.3, 0.3], -1.0)  # product e^0.6 = 1.82
    np.testing.assert_allclose(run("topr", logp, batch, cap=1.5)[2], [[1.5, 1.5]], rtol=1e-6)


def test_minpro_takes_the_smallest_ratio_before():
    # log-ratios 0.3, -0.1, 0.2: weights e^0.3, e^(0.3 - 0.1), e^(-0.1 + 0.2).
    logp, batch = row([0.3, -0.1, 0.2], 1.0)
    _, _, gradient = run("minpro", logp, batch)
    np.testing.assert_allclose(-gradient, [[1.3499, 1.2214, 1.1052]], atol=5e-5)
    _, metrics, gradient = run("minpro", logp, batch, cap=1.2)
    np.testing.assert_allclose(-gradient, [[1.2, 1.2, 1.1052]], atol=5e-5)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 2 / 3, rtol=1e-6)


def test_minpro_matches_a_loop():
    logp, batch = make_batch()
    _, _, gradient = run("minpro", logp, batch)
    for i in range(len(LENGTHS)):
        lowest = 0.0
        for j in np.flatnonzero(batch["mask"][i]):
            log_ratio = float(logp[i, j]) - float(batch["logp_old"][i, j])
            before = lowest if j > 0 else 0.0
            expected = -batch["adv"][i, j] * np.exp(before + log_ratio)
            np.testing.assert_allclose(gradient[i, j], expected, rtol=1e-5)
            lowest = log_ratio if j == 0 else min(lowest, log_ratio)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_with_an_open_trust_region_is_truncated_importance_sampling(name):
    logp, batch = make_batch()
    _, _, gradient = run(
        name, logp, batch, cap=1.3, **{f"{name}_low": np.inf, f"{name}_high": np.inf}
    )
    w = np.minimum(np.exp(logp - batch["logp_old"]), 1.3)
    expected = np.where(batch["mask"], -w * batch["adv"], 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_dppo_keeps_a_token_at_the_end_of_its_region():
    # exp(-200) is 0 in float32: the probability moves by exactly 1, up and down.
    old, logp = np.array([[-200.0], [0.0]], np.float32), np.array([[0.0], [-200.0]], np.float32)
    _, batch = tokens([0.0, 0.0], [1.0, -1.0])
    batch |= {"logp_old": old}
    for width, share in ((1.0, 0.0), (0.999, 1.0)):
        widths = {"dppo_tv_low": width, "dppo_tv_high": width}
        assert run("dppo_tv", logp, batch, **widths)[1]["actor/pg_clipfrac"] == share
    # D is 1 log(1 / e^-2) = 2 from p_o = 1 for A < 0, and log(1 / 1) = 0 from 0 to 1e-30 for A > 0.
    batch |= {"logp_old": np.array([[-200.0], [0.0]], np.float32)}
    logp = np.array([[-69.0], [-2.0]], np.float32)
    for low, high, share in ((2.0, 0.0, 0.0), (1.999, 0.0, 0.5), (2.0, -1e-9, 0.5)):
        widths = {"dppo_kl_low": low, "dppo_kl_high": high}
        assert run("dppo_kl", logp, batch, **widths)[1]["actor/pg_clipfrac"] == share


def test_a_weight_at_its_bound_is_not_counted_as_bounded():
    logp, batch = tokens([0.0, 0.0], [1.0, -1.0])  # r = 1
    zero = dict.fromkeys(("cispo_mask_low", "cispo_mask_high", "clip_low", "clip_high"), 0.0)
    widths = {f"dispo_{end}_{sign}": 0.0 for end in ("low", "high") for sign in ("pos", "neg")}
    cases = {"cispo": zero, "dispo": widths, "minpro": {"cap": 1.0}, "topr": {"cap": 1.0},
             "topr_token": {}, "topr_geo": {}, "fusion_cap": {"cap": 1.0}}
    for name, parameters in cases.items():
        _, metrics, gradient = run(name, logp, batch, **parameters)
        assert metrics["actor/pg_clipfrac"] == 0.0, name
        np.testing.assert_allclose(gradient[:, 0], [-1.0, 1.0], rtol=1e-6, err_msg=name)
    for name in ("dppo_tv", "dppo_kl"):
        assert run(name, logp, batch, cap=1.0)[1]["actor/pg_clipfrac_lower"] == 0.0


def test_dppo_kl_at_a_certain_token():
    # p_o = 0.5, p = 1: 0.5 log 0.5 + 0.5 log(0.5 / 1e-8) = -0.347 + 8.864 = 8.52.
    # A log-prob that rounding has put above 0 counts as p = 1.
    _, batch = tokens([0.0], [1.0], p_old=0.5)
    for logp in (0.0, 1e-6):
        logp = np.full((1, 1), logp, np.float32)
        kept = run("dppo_kl", logp, batch, dppo_kl_high=8.6)[2]
        np.testing.assert_allclose(kept, [[-2.0]], rtol=1e-5)
        assert run("dppo_kl", logp, batch, dppo_kl_high=8.4)[2] == 0.0


def test_vespo_kernel():
    # W = e^0.4 = 1.4918: W^2 e^(3 (1 - W)) = 0.5089 and W^3 e^(2 (1 - W)) = 1.2415, on all tokens.
    logp, batch = row([0.3, -0.1, 0.2], 1.0)
    np.testing.assert_allclose(-run("vespo", logp, batch)[2], [[0.5089] * 3], atol=5e-5)
    logp, batch = row([0.3, -0.1, 0.2], -1.0)
    np.testing.assert_allclose(run("vespo", logp, batch)[2], [[1.2415] * 3], atol=5e-5)
    # The maximum is at k / lambda: 1.208 at W = 2/3 for A > 0 and 1.242 at W = 3/2 for A < 0.
    for adv, peak, height in ((1.0, 2 / 3, 1.208), (-1.0, 3 / 2, 1.242)):
        near = [
            float(np.abs(run("vespo", *row([np.log(peak) + shift], adv))[2][0, 0]))
            for shift in (-0.1, 0.0, 0.1)
        ]
        np.testing.assert_allclose(near[1], height, atol=5e-4)
        assert near[1] > near[0] and near[1] > near[2]


def test_vespo_limits():
    logp, batch = row([0.3, -0.1, 0.2], 1.0)
    flat = {f"vespo_{x}_{sign}": 0.0 for x in ("k", "lambda") for sign in ("pos", "neg")}
    np.testing.assert_allclose(-run("vespo", logp, batch, **flat)[2], [[1.0] * 3], rtol=1e-6)
    sequence = flat | {"vespo_k_pos": 1.0}
    np.testing.assert_allclose(
        -run("vespo", logp, batch, **sequence)[2], [[np.exp(0.4)] * 3], rtol=1e-5
    )
    for far in (12.0, -12.0):
        assert np.all(np.abs(run("vespo", *row([far], 1.0))[2]) < 1e-8)
    # 30 counts as 20 before the sum: log W = 20 - 20 + 0 = 0.
    logp, batch = row([30.0, -20.0, 0.0], 1.0)
    np.testing.assert_allclose(-run("vespo", logp, batch)[2], [[1.0] * 3], rtol=1e-5)
