"""Smooth objectives: published coefficients, verl's numbers, the multiplier of a prompt, limits."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import controllers, methods, ppo, reduce, soft_trust_region
from tests import jitted

controllers, ppo, reduce = map(jitted.Module, (controllers, ppo, reduce))
soft_trust_region = jitted.Module(soft_trust_region)

# A pair of rewards 1 and -1 is tilted by lambda = 0.5 to p = 1 / (1 + e^-4) = 0.98201, whose KL
# from uniform is log 2 + p log p + (1 - p) log(1 - p) = 0.69315 - 0.01782 - 0.07227 = 0.60305.
TILTED = 1.0 / (1.0 + np.exp(-4.0))
DELTA = float(np.log(2.0) + TILTED * np.log(TILTED) + (1.0 - TILTED) * np.log1p(-TILTED))
ARGUMENTS = {
    "sapo": {},
    "r2vpo": {"r2vpo_lambda": 0.04},
    "quatro": {"quatro_delta": DELTA, "quatro_floor": 1e-3},
    "oapl": {"oapl_beta": 0.1},
    "dro": {"dro_beta": 0.1},
}
POINTS = [(0.0, 1), (0.0, -1), (0.3, 1), (0.3, -1), (-0.3, 1), (-0.3, -1)]
POINTS += [(1.5, 1), (1.5, -1), (-1.5, 1), (-1.5, -1)]
COEFFICIENTS = {
    "sapo": [1, -1, 1.309, -1.305, 0.729, -0.727, 0.519, -0.440, 0.193, -0.190],
    "r2vpo": [1, -1, 1.312, -1.388, 0.756, -0.725, 3.233, -5.730, 0.237, -0.209],
    "quatro": [1, -1, 1.147, -1.552, 0.852, -0.630, 1.120, -7.843, 0.390, -0.056],
    "oapl": [0.2, -0.2, 0.194, -0.206, 0.206, -0.194, 0.170, -0.230, 0.230, -0.170],
    "dro": [1, -1, 0.970, -1.030, 1.030, -0.970, 0.850, -1.150, 1.150, -0.850],
}
LENGTHS = (5, 2, 1, 4, 3, 3)
STATIC = ("form", "name", "aggregation", "quatro_delta", "quatro_floor", "oapl_beta", "dro_beta")


@jitted.function
def run(name, logp, batch, aggregation="token-sum", **parameters):
    """(loss [B, T], metrics, gradient of the aggregate), needs taken from the batch."""
    needs = {field: batch[field] for field in methods.needs("objective", name)}
    seg = batch.get("seg")

    def total(logp):
        loss_bt, metrics = soft_trust_region.OBJECTIVES[name](
            logp,
            batch["logp_old"],
            batch["adv"],
            batch["mask"],
            seg,
            **(ARGUMENTS[name] | needs | parameters),
        )
        loss = reduce.aggregate(loss_bt, batch["mask"], aggregation, seg=seg)
        return loss, (loss_bt, metrics)

    gradient, (loss_bt, metrics) = jitted.grad(total, has_aux=True)(logp)
    return loss_bt, metrics, gradient


def tokens(log_ratio, adv):
    """(logp, batch) of one-token rows with p_old = 0.2, two rows to a group."""
    log_ratio = np.array(log_ratio, np.float32)[:, None]
    logp_old = np.full_like(log_ratio, np.log(0.2))
    batch = {
        "logp_old": logp_old,
        "logp_behav": logp_old,
        "adv": np.array(adv, np.float32)[:, None],
        "mask": np.ones_like(log_ratio, bool),
        "group": np.arange(len(log_ratio), dtype=np.int32)[:, None] // 2,
    }
    return logp_old + log_ratio, batch


def make_batch(spread=0.5):
    """Six sequences in two groups, one advantage per sequence; a tool token inside the first."""
    rng = np.random.default_rng(5)
    mask = np.arange(5)[None, :] < np.array(LENGTHS)[:, None]
    mask[0, 2] = False
    logp_old = -rng.exponential(1.0, mask.shape) - 0.05
    drift, gap = spread * rng.normal(size=(2, *mask.shape))
    adv = np.array([1.0, -0.5, -0.5, 0.75, -0.25, -0.5])[:, None]
    fields = {
        "logp_old": logp_old,
        "logp_behav": logp_old + gap,
        "adv": np.broadcast_to(adv, mask.shape),
    }
    batch = {name: x.astype(np.float32) for name, x in fields.items()} | {"mask": mask}
    group = np.broadcast_to(np.array([7, 7, 7, -3, -3, -3], np.int32)[:, None], mask.shape)
    return (logp_old + drift).astype(np.float32), batch | {"group": group}


@pytest.mark.parametrize("name", soft_trust_region.OBJECTIVES)
def test_published_coefficients(name):
    logp, batch = tokens(*zip(*POINTS, strict=True))
    _, _, gradient = run(name, logp, batch)
    np.testing.assert_allclose(-gradient[:, 0], COEFFICIENTS[name], atol=6e-4)


def test_sapo_value_and_limits():
    # sigmoid(0) = 1/2, so the loss at r = 1 is -2 A / tau.
    logp, batch = tokens([0.0, 0.0], [1.0, -1.0])
    loss_bt, _, _ = run("sapo", logp, batch)
    np.testing.assert_allclose(loss_bt[:, 0], [-2.0, 2 / 1.05], rtol=1e-6)
    logp, batch = tokens([0.5, 0.5], [1.0, -1.0])
    _, _, gradient = run("sapo", logp, batch, temperature_pos=1e-3, temperature_neg=1e-3)
    np.testing.assert_allclose(gradient[:, 0], [-np.exp(0.5), np.exp(0.5)], rtol=1e-4)
    _, _, gradient = run("sapo", logp, batch, temperature_pos=100.0, temperature_neg=1.0)
    assert abs(gradient[0, 0]) < 1e-10 and gradient[1, 0] > 1.0


def test_r2vpo_rests_where_gain_and_penalty_balance():
    # r* = 1 + A / (2 lambda) = 1 + 0.5 / 1 = 1.5; the variance there is 0.25.
    logp, batch = tokens([np.log(1.5)], [0.5])
    _, metrics, gradient = run("r2vpo", logp, batch, r2vpo_lambda=0.5)
    np.testing.assert_allclose(gradient, [[0.0]], atol=1e-6)
    np.testing.assert_allclose(metrics["actor/ratio_variance"], 0.25, rtol=1e-5)
    loss_bt, _, _ = run("r2vpo", logp, batch, r2vpo_lambda=0.5)
    np.testing.assert_allclose(loss_bt, [[0.5 * 0.25 - 1.5 * 0.5]], rtol=1e-5)
    _, _, gradient = run("r2vpo", logp, batch, r2vpo_lambda=0.0)
    np.testing.assert_allclose(gradient, [[-0.75]], rtol=1e-5)


def test_r2vpo_of_the_survey_clips_each_group_by_its_variance():
    # Group 0: r = 1.45 and 1.05, mean 1.25, V = 0.04: width 0.2 / (1 + 25 * 0.04) = 0.1.
    # Group 1: r = 1.15 twice, V = 0: width 0.2. Group 2: r = 0.55 and 0.95, V = 0.04, A = -1.
    ratio, adv = [1.45, 1.05, 1.15, 1.15, 0.55, 0.95], [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    logp, batch = tokens(np.log(ratio), adv)
    parameters = {"r2vpo_lambda": 25.0, "form": "survey"}
    loss_bt, metrics, gradient = run("r2vpo", logp, batch, **parameters)
    expected = [-1.1, -1.05, -1.15, -1.15, 0.9, 0.95]
    np.testing.assert_allclose(loss_bt[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(gradient[:, 0], [0, -1.05, -1.15, -1.15, 0, 0.95], rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 2 / 6, rtol=1e-6)
    variance = (0.45**2 + 0.05**2 + 2 * 0.15**2 + 0.45**2 + 0.05**2) / 6
    np.testing.assert_allclose(metrics["actor/ratio_variance"], variance, rtol=1e-5)
    # The same samples as two packed rows with a padding token: a group may span rows.
    place = lambda x, fill: np.stack([[x[0], fill, x[2], x[1]], [x[3], x[5], fill, x[4]]])
    packed = {name: place(x[:, 0], np.nan if x.dtype == np.float32 else 9)
              for name, x in batch.items() if name != "mask"}
    packed |= {"mask": place(np.ones(6, bool), False)}
    packed |= {"seg": np.array([[1, 0, 2, 3], [1, 2, 0, 3]])}
    dense = run("r2vpo", place(logp[:, 0], np.float32(np.nan)), packed, **parameters)
    for actual, column in ((dense[0], loss_bt), (dense[2], gradient)):
        np.testing.assert_allclose(actual, place(column[:, 0], 0.0), rtol=1e-5)


def test_r2vpo_of_the_survey_without_a_price_is_ppo():
    logp, batch = make_batch()
    actual, _, gradient = run("r2vpo", logp, batch, r2vpo_lambda=0.0, form="survey")
    fields = [batch[name] for name in ("logp_old", "adv", "mask")]
    np.testing.assert_allclose(actual, ppo.ppo_clip(logp, *fields)[0], rtol=1e-5)
    tight = run("r2vpo", logp, batch, r2vpo_lambda=0.0, form="survey", r2vpo_clip=0.01)[2]
    assert np.sum(tight == 0.0) > np.sum(gradient == 0.0)
    with pytest.raises(ValueError, match="Unknown form 'code'; choose paper or survey"):
        run("r2vpo", logp, batch, r2vpo_lambda=0.0, form="code")
    with pytest.raises(ValueError, match="pass group"):
        soft_trust_region.r2vpo(logp, *fields, r2vpo_lambda=0.0, form="survey")


def test_r2vpo_takes_the_dual_and_gives_it_its_measurement():
    logp, batch = tokens([np.log(1.5), 0.0], [1.0, 1.0])  # variance (0.25 + 0) / 2
    dual = controllers.r2vpo_dual_init(0.04)
    _, metrics, _ = run("r2vpo", logp, batch, r2vpo_lambda=dual.r2vpo_lambda)
    dual = controllers.r2vpo_dual(
        dual, metrics["actor/ratio_variance"], r2vpo_bound=0.025, r2vpo_step=0.5
    )
    np.testing.assert_allclose(dual.r2vpo_lambda, 0.04 + 0.5 * 0.1, rtol=1e-5)

    def total(multiplier):
        return jnp.sum(run("r2vpo", logp, batch, r2vpo_lambda=multiplier)[0])

    assert jitted.grad(total)(0.3) == 0.0


def divergence(rewards, multiplier):
    """KL from uniform of the weights exp(R / multiplier), in float64."""
    p = np.exp((rewards - rewards.max()) / multiplier)
    p = p / p.sum()
    is_positive = p > 0
    return np.sum(p[is_positive] * np.log(len(p) * p[is_positive]))


@jitted.function
def multiplier(rewards, group, is_valid, delta, floor=1e-3):
    return soft_trust_region.quatro_multiplier(
        rewards, group, is_valid, quatro_delta=delta, quatro_floor=floor
    )


@pytest.mark.parametrize("delta", [1e-5, 0.01, 0.1, 0.5])
def test_the_multiplier_of_quatro_meets_the_constraint(delta):
    rewards = np.array([1.0, 0.0, 3.0, 0.0, -1.0, 0.5, 0.25, 1.0], np.float32)
    group = np.array([5, 5, 2, 5, 2, 2, 2, 5])
    lambda_b = np.asarray(multiplier(rewards, group, np.ones(8, bool), delta))
    for number in (2, 5):
        of_group = lambda_b[group == number]
        np.testing.assert_array_equal(of_group, of_group[0])
        found = divergence(rewards[group == number].astype(np.float64), float(of_group[0]))
        np.testing.assert_allclose(found, delta, rtol=2e-3)
    if delta <= 0.01:  # std / sqrt(2 delta), std of 1, 0, 0, 1 is 0.5
        np.testing.assert_allclose(lambda_b[0], 0.5 / np.sqrt(2 * delta), rtol=0.02)


def test_the_multiplier_of_quatro_scales_with_rewards_and_ignores_their_origin():
    rewards, group = np.array([1.0, 0.0, 0.0, 0.5], np.float32), np.zeros(4, np.int32)
    is_valid = np.ones(4, bool)
    once = multiplier(rewards, group, is_valid, 0.1)
    np.testing.assert_allclose(multiplier(3 * rewards, group, is_valid, 0.1), 3 * once, rtol=1e-4)
    np.testing.assert_allclose(multiplier(rewards + 5, group, is_valid, 0.1), once, rtol=1e-4)
    longer = np.append(rewards, np.float32(50.0)), np.zeros(5, np.int32), np.arange(5) < 4
    np.testing.assert_allclose(multiplier(*longer, 0.1)[:4], once, rtol=1e-5)


def test_the_floor_of_quatro():
    # Group 0 is constant. In group 1 half have the best reward: no tilt has KL above log 2 = 0.693.
    # Group 2 is alone. Group 3 can reach log 3 = 1.099.
    rewards = np.array([2.0, 2.0, 1.0, 0.0, 4.0, 1.0, 0.0, 0.0], np.float32)
    group = np.array([0, 0, 1, 1, 2, 3, 3, 3])
    lambda_b = multiplier(rewards, group, np.ones(8, bool), 0.8, floor=0.01)
    np.testing.assert_allclose(lambda_b[:5], 0.01, rtol=1e-5)
    assert np.all(lambda_b[5:] > 0.1)


def test_quatro_solves_each_prompt_with_the_scores_of_its_sequences():
    logp, batch = make_batch()
    delta = 0.05
    loss_bt, metrics, gradient = run("quatro", logp, batch, quatro_delta=delta)
    mask = batch["mask"]
    adv = batch["adv"][:, 0]
    lambda_b = np.asarray(
        multiplier(adv, batch["group"][:, 0], np.ones(6, bool), delta), np.float64
    )[:, None]
    log_ratio = (logp - batch["logp_old"]).astype(np.float64)
    ratio = np.exp(log_ratio)
    loss = -(ratio * adv[:, None] - lambda_b * (ratio * log_ratio - ratio))
    slope = -ratio * (adv[:, None] - lambda_b * log_ratio)
    np.testing.assert_allclose(loss_bt, np.where(mask, loss, 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, np.where(mask, slope, 0), rtol=1e-4, atol=1e-5)
    mean = np.broadcast_to(lambda_b, mask.shape)[mask].mean()
    np.testing.assert_allclose(metrics["actor/quatro_lambda"], mean, rtol=1e-5)


def test_quatro_without_a_multiplier_is_importance_sampling():
    logp, batch = tokens([0.3, -0.3], [1.0, 1.0])  # equal scores: the floor
    _, _, gradient = run("quatro", logp, batch, quatro_floor=1e-6)
    np.testing.assert_allclose(-gradient[:, 0], np.exp([0.3, -0.3]), rtol=1e-5)


def test_a_rejected_row_does_not_enter_its_group():
    logp, batch = make_batch()
    batch = batch | {"mask": batch["mask"] & (np.arange(6) != 0)[:, None]}
    other = batch | {"adv": np.where(np.arange(6)[:, None] == 0, np.float32(9.0), batch["adv"])}
    actual, expected = run("quatro", logp, other), run("quatro", logp, batch)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_oapl_regresses_the_sequence_log_ratio():
    # log-ratio 0.3 - 0.1 + 0.2 = 0.4, A = 1: (0.1 * 0.4 - 1)^2 = 0.9216 on each token; gradient
    # under seq-mean-token-mean 2 * 0.1 * (0.04 - 1) = -0.192 on each token. logp_old is not used.
    logp = np.array([[-2.7, -3.1, -2.8, 0.0]], np.float32)
    batch = {
        "logp_old": np.full_like(logp, np.nan),
        "logp_behav": np.full_like(logp, -3.0),
        "adv": np.ones_like(logp),
        "mask": np.array([[1, 1, 1, 0]]),
    }
    loss_bt, metrics, gradient = run("oapl", logp, batch, aggregation="seq-mean-token-mean")
    np.testing.assert_allclose(loss_bt, [[0.9216] * 3 + [0.0]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-0.192] * 3 + [0.0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/ppo_kl"], -0.4 / 3, rtol=1e-5)
    loss_bt, _, gradient = run("oapl", logp, batch, oapl_beta=2.5)  # beta * 0.4 = A
    np.testing.assert_allclose(loss_bt, np.zeros((1, 4)), atol=1e-10)
    np.testing.assert_allclose(gradient, np.zeros((1, 4)), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("oapl", {"oapl_beta": 0.0}, "oapl_beta is 0.0"),
        ("dro", {"dro_beta": -1.0}, "dro_beta is -1.0"),
        ("quatro", {"quatro_delta": 0.0}, "quatro_delta is 0.0"),
        ("quatro", {"quatro_floor": 0.0}, "quatro_floor 0.0"),
    ],
)
def test_constants_must_be_positive(name, parameters, message):
    logp, batch = make_batch()
    with pytest.raises(ValueError, match=message):
        run(name, logp, batch, **parameters)
