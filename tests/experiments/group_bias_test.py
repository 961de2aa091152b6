"""Steps that look at a whole group, against hand computations and loops over all groups."""

import dataclasses
import functools
import itertools
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import exact, group_bias
from experiments.group_bias import ADVANTAGES, STEPS, Step

pytestmark = [pytest.mark.compiles, pytest.mark.all]

EXACT = {"rtol": 1e-9, "atol": 1e-12}
UP = np.array([[-1.0, 1.0]])  # the direction that makes token 1 likelier


def coin(p, step=None, mu=None, size=2):
    """One token, 0 or 1, with pi(1) = p and mu(1) = mu; the reward is the token."""
    policy, behaviour = (np.log([[1.0 - x, x]]) for x in (p, p if mu is None else mu))
    return exact.Problem(
        policy, behaviour, lambda y: float(y[0]), 1, group=(0,) * size, draw=group_bias.draw(step or Step())
    )


@functools.cache
def moments(step, size=2, drift=0.0):
    return group_bias.problem(step, size, drift).moments(group_bias.loss(step))


def assert_same(actual, wanted):
    np.testing.assert_allclose(actual[0], wanted[0], **EXACT)
    np.testing.assert_allclose(actual[1], wanted[1], **EXACT)


# Advantages.

def test_maxrl_climbs_the_first_terms_of_the_log_of_the_chance():
    # d/dp -((1 - p) + (1 - p)^2 / 2) = 1 + (1 - p) with three in a group.
    step = Step(advantage="maxrl")
    case = coin(0.3, step, size=3)
    mean, _ = case.moments(group_bias.loss(step))
    np.testing.assert_allclose(mean, 1.7 * case.true_gradient(), **EXACT)


# One token, p = pi(1) = 0.7, groups of two. Only the groups (0, 1) and (1, 0) have a step, with
# probability 2 p q together, q = 1 - p. The scores are q UP for token 1 and -p UP for token 0, so
# the mean step is 2 p q (A_1 q - A_0 p) / 2 UP, and the gradient is p q UP: scale = q A_1 - p A_0.
SCALES = {
    "rloo": 1.0,  # A = 1, -1
    "dr_grpo": 0.5,  # A = 1/2, -1/2
    "batch_mean": 0.5,  # the batch is one group
    "maxrl": 1.0,  # over the mean of 1/2: A = 1, -1
    "grpo": math.sqrt(0.5),  # the same over a deviation of sqrt(1/2)
    "gdpo": math.sqrt(0.5),
    "reinforce_plus_plus": math.sqrt(0.5),  # whitened over two tokens: the same
    "reinforce_plus_plus_baseline": math.sqrt(0.5),
    "grpo_passk": 0.3 * math.sqrt(2.0),  # A = 1 / sqrt(1/2), 0
    "gpg": 1.0,  # alpha = 2 / 1 times A = 1/2, -1/2
    "opo": 0.5,  # equal lengths
    "opob": 0.21 / 0.58,  # b = q^2 / (p^2 + q^2), A = p^2 / 0.58, -q^2 / 0.58
    "otb": 0.21 / 0.58,
    "tir_otb": 0.21 / 0.58,
    "remax": 1.0,  # the greedy token is 1, whatever is drawn
    "gae": 1.0,
    # V = log((e + 1) / 2), A = 1 - V, -V.
    "oapl": 0.3 * (1.0 - math.log((math.e + 1) / 2)) + 0.7 * math.log((math.e + 1) / 2),
    # A = 1 - p, -p in a mixed group, whitened: 1/2, -1/2 over sqrt(1/2).
    "gae, whitened": math.sqrt(0.5),
}


def test_the_scale_of_every_advantage_on_a_coin():
    def scales(logp, batch):
        score = batch["tokens"] - 0.7
        advantages = (group_bias.with_advantage(Step(x), logp, batch)["adv"] for x in
                      ADVANTAGES.values())  # fmt: skip
        return jnp.stack([jnp.mean(adv * score) / 0.21 for adv in advantages])

    actual = dict(zip(ADVANTAGES, coin(0.7).average(scales), strict=True))
    assert {name: actual[name] for name in SCALES} == pytest.approx(SCALES, rel=1e-5)


RECIPES = {
    "ppo": (Step("gae(is_whitened=False)", objective="dual_clip", aggregation="token-mean"),
            lambda r, v: r - v, lambda n: 1 / n.sum()),
    "dapo": (Step("grpo", objective="ppo(clip_high=0.28)", aggregation="token-mean"),
             lambda r, v: (r - r.mean()) / (r.std(ddof=1) + 1e-6), lambda n: 1 / n.sum()),
    "dr_grpo": (Step("dr_grpo", objective="ppo", aggregation="seq-mean-token-sum-norm"),
                lambda r, v: r - r.mean(), lambda n: 1 / (2 * 3)),
    "gspo": (Step("grpo", objective="gspo", aggregation="seq-mean-token-mean"),
             lambda r, v: (r - r.mean()) / (r.std(ddof=1) + 1e-6), lambda n: 1 / (2 * n)),
    "scale_rl": (Step("grpo", objective="cispo", aggregation="prompt-mean"),
                 lambda r, v: (r - r.mean()) / (r.std(ddof=1) + 1e-6), lambda n: 1 / n.sum()),
    "gpg": (Step("gpg", objective="gpg", aggregation="token-mean"),
            lambda r, v: 2 / max(1, np.sum(r != 0)) * (r - r.mean()), lambda n: 1 / n.sum()),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_on_policy_are_minus_a_grad_log_pi_under_their_own_aggregation(name):
    step, advantage, share = RECIPES[name]
    case = group_bias.problem(step, 2)
    data, p_n = case.responses, case.probabilities(case.behaviour)
    pi = np.exp(case.policy) / np.exp(case.policy).sum(axis=1, keepdims=True)
    wanted = np.zeros(case.policy.shape)
    for pair in itertools.product(range(len(p_n)), repeat=2):
        pair = np.array(pair)
        mask = data["mask"][pair]
        adv = advantage(data["rewards"][pair][:, None], case.fields["values"][pair])
        factor = np.broadcast_to(share(mask.sum(axis=1, keepdims=True)), (2, 1))
        coefficient = p_n[pair].prod() * adv * factor * mask
        score = np.eye(3)[data["tokens"][pair]] - pi[data["row"][pair]]
        np.add.at(wanted, data["row"][pair], coefficient[..., None] * score)
    np.testing.assert_allclose(case.expectation(group_bias.loss(step)), wanted, rtol=1e-6)


def test_whitening_does_not_see_the_mean_of_the_group_nor_its_deviation():
    def spread(logp, batch):
        names = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "grpo")
        adv = [group_bias.with_advantage(Step(name), logp, batch)["adv"] for name in names]
        return jnp.stack([jnp.max(jnp.abs(x - adv[0])) for x in adv[1:]])

    baseline, gdpo, grpo = group_bias.problem(Step(), 2).average(spread)
    # GRPO's eps of 1e-6 is what is left of its division; lengths tell whitening and GRPO apart.
    assert baseline < 1e-9 and gdpo < 1e-5 and grpo > 0.05


# Without a gap.

INERT = ("sequence, normalised", "sequence, ESS-scaled", "m2po, drops", "m2po, clips", "kl_cov", "luspo")


@pytest.mark.parametrize("name", INERT)
def test_without_a_gap_the_step_is_that_of_no_correction(name):
    assert_same(moments(STEPS[name]), moments(STEPS["no weight"]))


# Weights of a batch.


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_bias_of_batch_normalised_weights_falls_with_the_group(level):
    raw = dataclasses.replace(STEPS[level], advantage="remax")  # at home in a group of one, too
    normalised = dataclasses.replace(raw, is_batch_normalized=True)
    limit = moments(raw, 1, 0.5)[0]
    means = [moments(normalised, size, 0.5)[0] for size in (1, 2, 3)]
    gaps = [np.linalg.norm(mean - limit) for mean in means]
    assert gaps[0] > gaps[1] > gaps[2] > 0.1 * np.linalg.norm(limit)
    if level == "sequence":  # one response's weight over itself is 1
        unweighted = dataclasses.replace(raw, weight="none")
        np.testing.assert_allclose(means[0], moments(unweighted, 1, 0.5)[0], **EXACT)


@pytest.mark.parametrize("rule", ["vcpo", "sequence, ESS-scaled"])
def test_vcpo_against_a_loop_over_all_groups(rule):
    step, p, mu = STEPS[rule], 0.7, 0.3
    draws, steps = [], []
    for pair in itertools.product((0, 1), repeat=2):
        token = np.array(pair)
        w = np.where(token, p / mu, (1 - p) / (1 - mu))
        energy = w**2 * np.where(token, 2 * (1 - p) ** 2, 2 * p**2)
        if rule == "vcpo":
            adv = token - (energy * token).sum() / energy.sum()
        else:
            adv = token - token[::-1]
        ess = w.sum() ** 2 / (2 * (w**2).sum())
        score = np.where(token, 1 - p, -p)
        draws.append(np.where(token, mu, 1 - mu).prod())
        steps.append(math.sqrt(ess) * np.mean(w * adv * score) * UP)
    draws, steps = np.array(draws), np.array(steps)
    mean = np.tensordot(draws, steps, axes=1)
    variance = draws @ ((steps - mean) ** 2).sum(axis=(1, 2))
    assert_same(coin(p, step, mu).moments(group_bias.loss(step)), (mean, variance))


def test_vcpo_does_not_slow_down_a_single_response():
    # The ESS of one response is 1: sequence weights, unbiased.
    step = dataclasses.replace(STEPS["sequence, ESS-scaled"], advantage="dr_grpo")
    case = group_bias.problem(step, 1, 0.5)
    np.testing.assert_allclose(
        case.expectation(group_bias.loss(step)), case.true_gradient(), **EXACT
    )


# M2PO.


def test_m2po_with_an_infinite_threshold_does_nothing():
    wanted = moments(STEPS["token"], drift=0.5)
    for step in (
        dataclasses.replace(STEPS["m2po, drops"], masks="m2po(m2po_threshold=inf)"),
        dataclasses.replace(STEPS["m2po, clips"], objective="m2po(m2po_threshold=inf)"),
    ):
        assert_same(moments(step, drift=0.5), wanted)


def test_m2po_without_a_budget_keeps_one_token_or_clips_at_its_floors():
    clips = dataclasses.replace(STEPS["m2po, clips"], objective="m2po(m2po_threshold=0.0)")
    ppo = dataclasses.replace(clips, objective="ppo(clip_low=0.3, clip_high=0.5)")
    assert_same(moments(clips, drift=0.5), moments(ppo, drift=0.5))
    # In a mixed group of coins w(1) = 1.4 has the smaller log-ratio and is kept; w(0) = 0.6 is not.
    # A = 1, -1: E g = 2 mu(0) mu(1) (1.4 * 1 * 0.3) / 2 UP = 0.105 UP.
    drops = dataclasses.replace(STEPS["m2po, drops"], masks="m2po(m2po_threshold=0.0)")
    mean = coin(0.7, drops, mu=0.5).expectation(group_bias.loss(drops))
    np.testing.assert_allclose(mean, 0.105 * UP, **EXACT)


# Selections by rank, against a loop over all groups.


def m2po_coefficients(adv, log_ratio, logp, entropy):
    order = np.argsort(np.square(log_ratio))
    mean = np.cumsum(np.square(log_ratio)[order]) / (1 + np.arange(len(order)))
    is_kept = np.zeros(len(order), bool)
    is_kept[order[: max(1, np.sum(mean < 0.04))]] = True  # the mean grows with every token
    return np.where(is_kept, np.exp(log_ratio) * adv, 0.0)


def kl_cov_coefficients(adv, log_ratio, logp, entropy):
    coefficients = np.exp(log_ratio) * adv
    largest = np.argmax((adv - adv.mean()) * (logp - logp.mean()))
    coefficients[largest] -= np.sign(log_ratio[largest])
    return coefficients


def top_entropy_coefficients(adv, log_ratio, logp, entropy):
    # A fifth of at most six tokens is one.
    is_kept = np.arange(len(adv)) == np.argmax(entropy)
    return np.where(is_kept, np.exp(log_ratio) * adv, 0.0)


@pytest.mark.parametrize(
    ("name", "coefficients"),
    [
        ("m2po, drops", m2po_coefficients),
        ("kl_cov", kl_cov_coefficients),
        ("top_entropy", top_entropy_coefficients),
    ],
)
def test_selections_against_a_loop_over_all_groups(name, coefficients):
    case = group_bias.problem(Step(), 2, 0.5)
    data, p_n = case.responses, case.probabilities(case.behaviour)
    log_pi = np.log(np.exp(case.policy) / np.exp(case.policy).sum(axis=1, keepdims=True))
    entropy_p = -np.sum(np.exp(log_pi) * log_pi, axis=1)
    logp_nt, behav_nt = case.pick(case.policy), case.pick(case.behaviour)
    wanted = np.zeros(case.policy.shape)
    for pair in itertools.product(range(len(p_n)), repeat=2):
        pair = np.array(pair)
        mask, row, token = (data[field][pair] for field in ("mask", "row", "tokens"))
        rewards = data["rewards"][pair]
        adv = np.repeat(rewards - rewards[::-1], mask.sum(axis=1))
        logp, behav = logp_nt[pair][mask], behav_nt[pair][mask]
        c = coefficients(adv, logp - behav, logp, entropy_p[row[mask]])
        score = np.eye(3)[token[mask]] - np.exp(log_pi)[row[mask]]
        np.add.at(wanted, row[mask], (p_n[pair].prod() * c / 2)[:, None] * score)
    np.testing.assert_allclose(moments(STEPS[name], drift=0.5)[0], wanted, **EXACT)


# Clip-cov.


@pytest.mark.parametrize("name", ["clip_cov, mask", "clip_cov, objective"])
def test_clip_cov_halves_the_step_of_a_coin(name):
    step = STEPS[name]
    # In a mixed group, A = 1, -1 and log pi(1) - log pi(0) = L: both covariances are L / 2. For
    # L > 0 one of the two tokens is dropped, each as often: half of E g = p q UP is left. The step
    # is q UP / 2 or p UP / 2 then, |UP|^2 = 2, so E |g|^2 = 2 p q (q^2 + p^2) / 2 * 2 / 4.
    mean, variance = coin(0.7, step).moments(group_bias.loss(step))
    np.testing.assert_allclose(mean, 0.5 * 0.21 * UP, **EXACT)
    np.testing.assert_allclose(variance, 0.21 * 0.58 / 2 - 2 * (0.21 / 2) ** 2, **EXACT)


def test_every_candidate_of_clip_cov_is_a_batch_of_its_own():
    # That a key draws each candidate as often as another is a test of `rank_masks.clip_cov`.
    case = group_bias.problem(STEPS["clip_cov, mask"], 2)
    index, _, probability = case.batches
    np.testing.assert_allclose(probability.sum(), 1.0, **EXACT)
    mask, logp, rewards = (case.fields[name][index] for name in ("mask", "logp", "rewards"))
    adv = np.broadcast_to((rewards - rewards[:, ::-1])[..., None], mask.shape)
    count = mask.sum(axis=(1, 2), keepdims=True)
    adv, logp = (x - (x * mask).sum(axis=(1, 2), keepdims=True) / count for x in (adv, logp))
    num_candidates = (mask & (adv * logp > 0.0)).sum(axis=(1, 2))
    _, place, counts = np.unique(index, axis=0, return_inverse=True, return_counts=True)
    np.testing.assert_array_equal(counts[place.ravel()], np.maximum(num_candidates, 1))
    assert set(num_candidates) >= {0, 1, 2, 3}
    p_n = case.probabilities(case.behaviour)
    wanted = p_n[index].prod(axis=1) / np.maximum(num_candidates, 1)
    np.testing.assert_allclose(probability, wanted, **EXACT)


def test_a_draw_of_two_tokens_is_refused():
    case = dataclasses.replace(coin(0.7), draw=lambda logp, batch: batch["mask"])
    with pytest.raises(ValueError, match="more than one token"):
        case.batches


# The table.


def test_the_documented_tables():
    folder = pathlib.Path(__file__).parents[2] / "docs" / "experiments"
    for name, drift in (("otb", 0.0), ("m2po, clips", 0.5)):
        lines = (folder / f"groups_{drift:g}.txt").read_text().splitlines()
        rows = group_bias.rows({name: STEPS[name]}, (2, 3), drift)
        (line,) = (line for line in lines if line[:28].strip() == name)
        for row, cell in zip(rows, line.split("|")[1:], strict=True):
            printed = [float(x) for x in cell.split()]
            actual = (row.scale, row.turn, row.bias, row.variance)
            np.testing.assert_allclose(actual, printed, atol=6e-4)
