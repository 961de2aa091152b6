"""Advantage estimators: verl's numbers, loops in float64, groups of one and constant groups, and
GAE against its sum."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_tis.estimators import advantages, methods, returns
from tests import jitted

advantages, returns = map(jitted.Module, (advantages, returns))

pytestmark = pytest.mark.compiles

NAN = float("nan")
PARAMETERS = dict.fromkeys(advantages.ADVANTAGES, {}) | {"oapl": {"oapl_beta_value": 0.5}}
NEEDS = {name: methods.needs("advantage", name) for name in advantages.ADVANTAGES}
ADVANTAGES = {
    name: jax.jit(functools.partial(function, **PARAMETERS[name]))
    for name, function in advantages.ADVANTAGES.items()
}
gae = advantages.gae
gae_returns = advantages.gae_returns
gdpo = advantages.gdpo
grpo_passk = advantages.grpo_passk
whiten = advantages.whiten
# One advantage per sequence, from its own group or from the whole batch.
OWN_GROUP = ["grpo", "dr_grpo", "maxrl", "grpo_passk", "rloo", "oapl", "opo", "opob"]
OUTCOME = [*OWN_GROUP, "batch_mean", "gpg", "gdpo", "reinforce_plus_plus_baseline"]
BY_GROUP = [*OWN_GROUP, "otb", "tir_otb"]
NOT_RELATIVE = ("gae", "remax", "rl_zvp")  # to the other samples: equal rewards do not give 0

# A ragged batch whose advantages verl 0.9.1 computed: groups of 2, 3 and 1; row 1 has two tokens,
# row 4 none.
REWARDS = np.array([1.0, 0.0, 1.0, 0.5, 0.25, 0.7])
GROUP = np.array([0, 0, 1, 1, 1, 2])
MASK = np.array([[1] * 4, [1, 1, 0, 0], [1] * 4, [1] * 4, [0] * 4, [1] * 4])
FIRST_TOKEN = {
    "grpo": [0.707106, -0.707106, 1.091087, -0.218217, 0, 0.699999],
    # Group means 0.5 and 1.75 / 3; the singleton keeps its reward.
    "dr_grpo": [0.5, -0.5, 0.416667, -0.083333, 0, 0.7],
    "maxrl": [1, -1, 5 / 7, -1 / 7, 0, 0],
    "rloo": [1, -1, 0.625, -0.125, 0, 0],
    "batch_mean": [0.425, -0.575, 0.425, -0.075, 0, 0.125],  # 3.45 / 6 = 0.575
    "opo": [1 / 3, -2 / 3, 0.25, -0.25, 0, 0.7],
    "gpg": [0.6, -0.6, 0.5, -0.1, 0, 0.84],
    "reinforce_plus_plus": [0.873893, -2.151122, 0.873893, -0.638614, 0, -0.033611],
    "reinforce_plus_plus_baseline": [0.537208, -1.963587, 0.328808, -0.921589, 0, 1.037367],
    "gdpo": [0.447331, -1.820028, 1.062955, -1.036209, 0, 0.435937],
    # Ours, as verl refuses the group of one: (1 - 0) / 0.707108 and (1 - 0.5) / 0.381882.
    "grpo_passk": [1.414212, 0, 1.309304, 0, 0, 0],
}


def test_rl_zvp_by_hand():
    """A group that differs, one all right, and one all wrong."""
    entropy = np.array([
        [9.0, 9, 9, 9], [9, 9, 9, 9], [1, 3, 0, 2], [0.5, 1, 1, 1], [9, 9, 9, 9], [2, 5, 0, 1],
    ])
    group, rewards = np.array([0, 0, 1, 1, 2, 2]), np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    fields, differs = make_fields(rewards, MASK != 0) | {"entropy": entropy}, 0.5 / (0.5**0.5 + 1e-6)
    adv = compute("rl_zvp", rewards, MASK, group, fields)
    np.testing.assert_allclose(adv, [
        [differs] * 4, [-differs, -differs, 0, 0], [0.1, 0.3, 0, 0.2], [0.05, 0.1, 0.1, 0.1],
        [0, 0, 0, 0], [-0.3, 0, -0.5, -0.4],
    ], atol=1e-6)


def make_fields(rewards, mask, seed=3):
    """Every field that an entry may need, NaN outside the mask; one component is the reward."""
    rng = np.random.default_rng(seed)
    shape = mask.shape
    logp_old = -rng.exponential(1.0, shape)
    p = np.exp(logp_old)
    per_token = {
        "values": rng.normal(size=shape),
        "entropy": rng.exponential(1.0, shape),
        "logp_old": logp_old,
        "logp_prox": logp_old,
        "logp_behav": logp_old + 0.3 * rng.normal(size=shape),
        "sum_pi_squared": p**2 + (1 - p) ** 2 * rng.random(shape),
        "weights": np.exp(0.3 * rng.normal(size=shape)),
    }
    scores = np.where(mask, rewards, 0.0).sum(axis=1) if np.ndim(rewards) == 2 else rewards
    per_row = {
        "greedy_rewards": rng.normal(size=shape[0]),
        "grad_norms": rng.exponential(1.0, shape[0]),
        "reward_components": np.asarray(scores)[:, None],
    }
    return {name: np.where(mask, x, NAN) for name, x in per_token.items()} | per_row


@jitted.function
def results(rewards, mask, group, fields):
    """{name: advantages} of the entries whose fields are there, one program for all of them."""
    return {
        name: function(rewards, mask, group, **{x: fields[x] for x in NEEDS[name]})
        for name, function in ADVANTAGES.items() if set(NEEDS[name]) <= set(fields)
    }


def compute(name, rewards, mask, group, fields=None):
    """The advantages of an entry on fields in float32."""
    fields = make_fields(rewards, np.asarray(mask) != 0) if fields is None else fields
    fields = {field: np.asarray(x, np.float32) for field, x in fields.items()}
    return np.asarray(results(*map(np.asarray, (rewards, mask, group)), fields)[name])


@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_a_ragged_batch(name):
    adv = compute(name, REWARDS, MASK, GROUP)
    np.testing.assert_allclose(adv, np.array(FIRST_TOKEN[name])[:, None] * MASK, atol=2e-6)


def test_pass_at_k_raw_and_normalised():
    # Rewards 0.9, 0.5, 0.1, 0.2: 0.9 - 0.5 = 0.4; squared deviations from 0.425 sum to 0.3875, std
    # sqrt(0.3875 / 3) = 0.359398.
    arguments = (np.array([0.9, 0.5, 0.1, 0.2]), np.ones((4, 1)), np.zeros(4, int))
    raw = grpo_passk(*arguments, passk_is_normalized=False)
    np.testing.assert_allclose(raw[:, 0], [0.4, 0, 0, 0], rtol=1e-6)
    normalised = grpo_passk(*arguments)
    np.testing.assert_allclose(normalised[:, 0], [1.11297, 0, 0, 0], rtol=1e-5)


def test_gpg_counts_rewards_that_are_not_zero():
    # 1, 0 | 2, 2 | 0, 0: three of six are not 0, those of the constant group among them.
    mask, group = np.ones((6, 4), int), np.array([0, 0, 1, 1, 2, 2])
    adv = compute("gpg", np.array([1.0, 0, 2, 2, 0, 0]), mask, group)
    np.testing.assert_allclose(adv[:, 0], [1, -1, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(compute("gpg", np.zeros(6), mask, group), np.zeros((6, 4)))


@pytest.mark.parametrize(
    ("beta", "value"), [(0.05, 0.9653), (0.5, 0.7169), (5.0, 0.5250), (1e-4, 1.0), (1e4, 0.5)]
)
def test_oapl_value_is_between_the_mean_and_the_best(beta, value):
    oapl = functools.partial(advantages.oapl, oapl_beta_value=beta)
    adv = oapl(np.array([1.0, 0, 0, 1]), np.ones((4, 1)), np.zeros(4, int))
    np.testing.assert_allclose(adv[:, 0], np.array([1, 0, 0, 1]) - value, atol=1e-4)


def test_oapl_refuses_a_temperature_of_zero():
    with pytest.raises(ValueError, match="oapl_beta_value is 0.0"):
        advantages.oapl(REWARDS, MASK, GROUP, oapl_beta_value=0.0)


def test_gdpo_normalises_each_component_before_it_adds_them():
    components = np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)
    # No group of one here: it would not be normalised, and so feel the scale.
    threes = np.array([0, 0, 1, 1, 1, 0])

    def advantage(components):
        return np.asarray(gdpo(REWARDS, MASK, threes, reward_components=components))

    scaled = components * np.array([100.0, 1.0], np.float32)
    np.testing.assert_allclose(advantage(scaled), advantage(components), atol=1e-4)
    constant = np.stack([components[:, 0], np.full(6, 0.3)], axis=1)
    np.testing.assert_allclose(advantage(constant), advantage(components[:, :1]), atol=1e-6)
    assert np.abs(advantage(components) - advantage(constant)).max() > 0.1


def test_gdpo_weights_its_components():
    components = np.array([[1.0, 5.0], [0.0, -3.0], [0.5, 2.0]])
    arguments = (np.zeros(3), np.ones((3, 2)), np.zeros(3, int))
    first = gdpo(*arguments, reward_components=components[:, :1])
    weighted = functools.partial(gdpo, *arguments, reward_components=components)
    np.testing.assert_allclose(weighted(gdpo_weights=(1.0, 0.0)), first, rtol=1e-6)
    assert np.abs(weighted() - first).max() > 0.01
    with pytest.raises(ValueError, match="3 weights for 2 reward components"):
        weighted(gdpo_weights=(1.0, 1.0, 1.0))


@pytest.mark.parametrize("name", [n for n in advantages.ADVANTAGES if n not in NOT_RELATIVE])
@pytest.mark.parametrize("reward", [
    0.1, pytest.param(0.0, marks=pytest.mark.all), pytest.param(-0.7, marks=pytest.mark.all),
])
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.all) for n in (2, 6))])
def test_a_constant_group_gives_exactly_zero(name, reward, size):
    mask = np.ones((6, 4), int) * (np.arange(6) < size)[:, None]
    adv = compute(name, np.full(6, reward), mask, np.minimum(np.arange(6) // size, 1))
    np.testing.assert_array_equal(adv, np.zeros((6, 4)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 0.7 / (1 + 1e-6)),
        ("dr_grpo", 0.7),
        ("maxrl", 0.0),
        ("grpo_passk", 0.0),
        ("rloo", 0.0),
        ("batch_mean", 0.0),
        ("gpg", 0.7),
        ("gdpo", 0.0),
        ("oapl", 0.0),
        ("opo", 0.7),
        ("opob", 0.0),
        ("otb", 0.7),
        ("tir_otb", 0.7),
        ("reinforce_plus_plus", 0.0),
        ("reinforce_plus_plus_baseline", 0.0),
    ],
)
def test_a_group_of_one(name, expected):
    # The other rows have no tokens.
    mask = np.repeat(np.arange(6)[:, None] == 2, 4, axis=1).astype(int)
    group = np.array([1, 1, 3, 1, 1, 1])
    adv = compute(name, np.full(6, 0.7), mask, group)
    np.testing.assert_allclose(adv, expected * mask, rtol=1e-6)
    if name in BY_GROUP:  # the others change nothing
        rewards = np.array([0.1, 0.2, 0.7, 0.4, 0.5, 0.6])
        adv = compute(name, rewards, np.ones((6, 4), int), group)
        np.testing.assert_allclose(adv[2], [expected] * 4, rtol=1e-6)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_any_integers_name_the_groups_in_any_order(name):
    fields = make_fields(REWARDS, np.asarray(MASK) != 0)
    expected = compute(name, REWARDS, MASK, GROUP, fields)
    names = np.array([-7, 2**30, 11])[GROUP]
    np.testing.assert_array_equal(compute(name, REWARDS, MASK, names, fields), expected)
    order = np.array([5, 2, 0, 4, 1, 3])
    permuted = {field: x[order] for field, x in fields.items()}
    adv = compute(name, REWARDS[order], MASK[order], names[order], permuted)
    np.testing.assert_allclose(adv, expected[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BY_GROUP)
def test_groups_do_not_see_each_other(name):
    fields = make_fields(REWARDS, np.asarray(MASK) != 0)
    other = REWARDS.copy()
    other[2:5] = 9.0, -4.0, 3.0
    before, after = (compute(name, r, MASK, GROUP, fields) for r in (REWARDS, other))
    keep = np.array([0, 1, 5])
    np.testing.assert_array_equal(before[keep], after[keep])
    assert np.abs(before[2] - after[2]).max() > 0.01


@pytest.mark.parametrize("name", [name for name in OUTCOME if name != "gdpo"])
def test_rewards_per_token_are_summed_over_valid_tokens(name):
    mask = MASK.copy()
    mask[4, 3] = 1
    rewards_bt = np.where(mask == 1, 0.25, NAN)
    rewards_bt[:, 0] += np.where(mask[:, 0] == 1, REWARDS, 0.0)
    fields = make_fields(REWARDS, np.asarray(mask) != 0)
    expected = compute(name, np.nansum(rewards_bt, axis=1), mask, GROUP, fields)
    adv = compute(name, rewards_bt, mask, GROUP, fields)
    np.testing.assert_allclose(adv, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_rejecting_the_last_token_does_not_lose_a_sequence_reward(name):
    rejected = np.repeat([[1, 1, 0, 0], [1] * 4, [0] * 4], (1, 1, 4), axis=0)
    rewards = np.array([1.0, 0, 0, 0, 0, 0])
    half = np.full((6, 4), 0.5)
    fields = {
        "values": np.zeros((6, 4)),
        "greedy_rewards": np.zeros(6),
        "grad_norms": np.ones(6),
        "reward_components": rewards[:, None],
        "logp_old": np.log(half),
        "logp_prox": np.log(half),
        "logp_behav": np.log(half),
        "sum_pi_squared": half, "entropy": half,
        "weights": np.ones((6, 4)),
    }
    adv = compute(name, rewards, rejected, np.array([0, 0, 1, 1, 1, 1]), fields)
    assert adv[0, 0] > 0.1 and adv[0, 1] > 0.1 and adv[0, 2] == 0.0


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_integer_rewards(name):
    rewards = np.array([1, 0, 3, 2, 0, 1])
    fields = make_fields(rewards, np.asarray(MASK) != 0)
    expected = compute(name, rewards.astype(np.float32), MASK, GROUP, fields)
    np.testing.assert_array_equal(compute(name, rewards, MASK, GROUP, fields), expected)


def loop_outcome(name, rewards, length, members):
    """The advantages of one group by the formulas, rows in `members`."""
    r, n = rewards[members], len(members)
    others = [np.delete(r, i).mean() if n > 1 else r[i] for i in range(n)]
    std = r.std(ddof=1) if n > 1 else 0.0
    top = np.sort(r)[::-1]
    formulas = {
        "grpo": (r - r.mean()) / (std + 1e-6) if n > 1 else r / (1 + 1e-6),
        "dr_grpo": r - r.mean() if n > 1 else r,
        "maxrl": (r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r,
        "rloo": r - np.array(others),
        "opo": r - (length[members] @ r) / length[members].sum() if n > 1 else r,
        "oapl": r - 0.5 * np.log(np.mean(np.exp(r / 0.5))),
        "grpo_passk": np.where(r == top[0], top[0] - top[1], 0) / (std + 1e-6) if n > 1 else 0 * r,
    }
    return formulas[name]


def test_outcome_advantages_equal_a_loop_in_float64():
    rng = np.random.default_rng(4)
    group = np.array([3, 1, 1, 2, 3, 3, 2, 3, 9, 3])  # sizes 5, 2, 2 and 1, interleaved
    mask = np.arange(6)[None, :] < rng.integers(1, 7, size=10)[:, None]
    rewards, length = rng.normal(size=10), mask.sum(axis=1)

    def whitened(adv_b):
        tokens = np.repeat(adv_b, length)
        return (adv_b - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)

    expected = {}
    for name in ("grpo", "dr_grpo", "maxrl", "rloo", "opo", "oapl", "grpo_passk"):
        expected[name] = np.zeros(10)
        for g in np.unique(group):
            members = np.flatnonzero(group == g)
            expected[name][members] = loop_outcome(name, rewards, length, members)
    expected["batch_mean"] = rewards - sum(rewards) / 10
    expected["gpg"] = expected["dr_grpo"]  # no reward is 0, so alpha is 1
    expected["gdpo"] = whitened(expected["grpo"])
    expected["reinforce_plus_plus"] = whitened(rewards)
    expected["reinforce_plus_plus_baseline"] = whitened(expected["dr_grpo"])
    with jax.enable_x64(True):
        found = results(rewards, mask, group, {"reward_components": rewards[:, None]})
        for name, adv_b in expected.items():
            adv = found[name]
            assert adv.dtype == np.float64
            np.testing.assert_allclose(
                adv, adv_b[:, None] * mask, rtol=1e-10, atol=1e-13, err_msg=name
            )


def compact_gae(rewards, values, mask, gamma, lam):
    """GAE as the double sum over the valid tokens of one row, and the returns."""
    valid = np.flatnonzero(mask)
    r, v = rewards[valid], np.append(values[valid], 0.0)
    delta = r + gamma * v[1:] - v[:-1]
    steps = range(len(valid))
    raw = [sum((gamma * lam) ** (k - t) * delta[k] for k in steps if k >= t) for t in steps]
    adv, returns = np.zeros(len(mask)), np.zeros(len(mask))
    adv[valid], returns[valid] = raw, raw + v[:-1]
    return adv, returns


def test_gae_equals_its_sum_over_valid_tokens():
    rng = np.random.default_rng(0)
    mask = rng.random((5, 7)) < 0.6
    mask[3] = False
    rewards, values = np.where(mask, rng.normal(size=(2, 5, 7)), NAN)
    rows = [compact_gae(rewards[b], values[b], mask[b], 0.9, 0.8) for b in range(5)]
    expected_adv, expected_returns = (np.stack(x) for x in zip(*rows, strict=True))
    parameters = {"values": values, "gamma": 0.9, "lam": 0.8}
    with jax.enable_x64(True):
        adv = gae(rewards, mask, None, is_whitened=False, **parameters)
        whitened = gae(rewards, mask, None, **parameters)
        returns = gae_returns(rewards, mask, **parameters)
    np.testing.assert_allclose(adv, expected_adv, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-12, atol=1e-14)
    valid = expected_adv[mask]
    centred = (expected_adv - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8) * mask
    np.testing.assert_allclose(whitened, centred, rtol=1e-10, atol=1e-12)


def test_gae_at_its_ends():
    rewards, values = np.array([[1.0, -2.0, 4.0]]), np.array([[0.5, 0.25, -1.0]])
    of_lam = functools.partial(
        gae, rewards, np.ones((1, 3)), None, values=values, is_whitened=False
    )
    # lam 1: 1 - 2 + 4 - 0.5, -2 + 4 - 0.25, 4 + 1. lam 0: 1 + 0.25 - 0.5, -2 - 1 - 0.25, 4 + 1.
    np.testing.assert_allclose(of_lam(), [[2.5, 1.75, 5.0]], rtol=1e-6)
    np.testing.assert_allclose(of_lam(lam=0.0), [[0.75, -3.25, 5.0]], rtol=1e-6)


def test_gae_puts_a_sequence_reward_on_the_last_valid_token():
    mask = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    returns = gae_returns(
        np.array([2.0, 3.0, 4.0]), mask, values=np.ones((3, 3)), gamma=0.5
    )
    np.testing.assert_allclose(returns, [[1, 2, 0], [0, 1.5, 3], [0, 0, 0]], rtol=1e-6)


def test_reinforce_plus_plus_does_not_discount_a_hole():
    # Returns 0.25, 0.5, 1: mean 0.583333, unbiased variance (0.111111 + 0.006944 + 0.173611) / 2.
    half = functools.partial(advantages.reinforce_plus_plus, gamma=0.5)
    adv = half(np.array([1.0]), np.array([[1, 0, 1, 1]]), None)
    np.testing.assert_allclose(adv, [[-0.872872, 0, -0.218218, 1.091089]], rtol=1e-5)


def test_whitening_of_one_token_or_none_is_zero():
    x = np.array([[3.0, NAN]])
    np.testing.assert_array_equal(whiten(x, np.array([[1, 0]])), [[0, 0]])
    np.testing.assert_array_equal(whiten(x, np.array([[0, 0]])), [[0, 0]])
    # 1 and 3: mean 2, unbiased variance 2.
    white = whiten(np.array([[1.0, NAN, 3.0]]), np.array([[1, 0, 1]]))
    np.testing.assert_allclose(white, [[-(2**-0.5), 0, 2**-0.5]], rtol=1e-6)
    assert not np.any(gae(x, np.zeros((1, 2)), None, values=x))


# Rewards that are not known


def _dropped_batch():
    """Groups 0 and 1 of three with one unknown reward each, 2 of two with one, 3 of one, and 4 of two
    with none; `kept` are the rows of known rewards."""
    rng = np.random.default_rng(0)
    group = np.array([0, 1, 0, 1, 0, 1, 2, 2, 3, 4, 4])
    rewards = rng.uniform(1, 3, 11).astype(np.float32)
    rewards[0], rewards[[2, 5, 6, 9, 10]] = 0, np.nan
    mask = np.arange(5) < rng.integers(2, 6, 11)[:, None]
    normal = lambda: rng.normal(size=(11, 5)).astype(np.float32)
    fields = {
        "values": normal(), "logp_old": -np.abs(normal()), "logp_prox": -np.abs(normal()),
        "logp_behav": -np.abs(normal()), "weights": np.exp(normal()),
        "sum_pi_squared": rng.uniform(0.1, 0.9, (11, 5)).astype(np.float32), "entropy": np.abs(normal()),
        "greedy_rewards": normal()[:, 0], "grad_norms": np.exp(normal()[:, 0]),
        "reward_components": np.stack([rewards, normal()[:, 0]], axis=1),
    }
    return rewards, mask, group, fields, ~np.isnan(rewards)


@pytest.mark.cases(
    *(f"{name}-False" for name in advantages.ADVANTAGES), "grpo-True", "gae-True", "rloo-True"
)
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_an_unknown_reward_is_a_row_that_was_not_sampled(name, by_token):
    """The row that is left alone in group 2 has nothing to be compared with; to entries that compare
    within no group, it is like any other."""
    rewards, mask, group, fields, is_kept = _dropped_batch()
    advantage, needed = ADVANTAGES[name], {n: fields[n] for n in NEEDS[name]}
    if by_token:
        rewards = np.array(returns.token_rewards(rewards, mask)) - 0.1 * mask
    found = np.array(advantage(rewards, mask, group, **needed))
    is_by_group = name not in ("gae", "remax", "batch_mean", "reinforce_plus_plus")
    if is_by_group:
        is_kept = is_kept & (group != 2)
    alone = lambda x: x[is_kept]
    expected = advantage(
        alone(rewards), alone(mask), alone(group), **{n: alone(x) for n, x in needed.items()}
    )
    if name == "gpg" and not by_token:  # it counts the lone row, too, and row 0 as without reward
        expected = expected * (6 / 5) / (5 / 4)
    np.testing.assert_allclose(found[is_kept], expected, rtol=2e-5, atol=1e-6)
    assert not found[~is_kept].any() and np.abs(found[is_kept]).max() > 0.1


def test_statistics_of_a_group_are_of_the_known_rewards_by_hand():
    """-1 and -0.5: mean -0.75, deviations 0.25 each, std sqrt(2 * 0.0625 / 1) = 0.353553."""
    rewards = np.array([-1, -0.5, np.nan, np.nan], np.float32)
    grpo = ADVANTAGES["grpo"]
    found = grpo(rewards, np.ones((4, 2)), np.zeros(4, int))[:, 0]
    np.testing.assert_allclose(found, [-0.25 / 0.353554, 0.25 / 0.353554, 0, 0], rtol=1e-5)
    for rest in ([1, np.nan], [np.nan, np.nan]):
        lone = grpo(np.array(rest, np.float32), np.ones((2, 2)), np.zeros(2, int))
        assert not np.any(lone)


def test_a_void_component_voids_itself_alone():
    """Component 0 is void in row 3: the other three have its mean and std; component 1 has all."""
    parts = np.array([[1, 0], [2, 1], [3, 0], [np.nan, 3]], np.float32)
    rewards, mask, group = np.array([1, 3, 3, 3.0]), np.ones((4, 1), bool), np.zeros(4, int)
    found = gdpo(rewards, mask, group, reward_components=parts)[:, 0]
    first = np.array([-1, 0, 1, 0.0])  # std 1
    second = (parts[:, 1] - 1) / np.sqrt(6 / 3)  # deviations -1, 0, -1, 2
    total = first + second
    white = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose(found, white, rtol=1e-4, atol=1e-6)


def test_a_failed_greedy_answer_leaves_its_prompt_without_an_advantage():
    greedy = np.array([np.nan, np.nan, 0.25], np.float32)
    found = ADVANTAGES["remax"](
        np.ones(3, np.float32), np.ones((3, 1)), np.array([0, 0, 1]), greedy_rewards=greedy
    )
    np.testing.assert_array_equal(found[:, 0], [0, 0, 0.75])
