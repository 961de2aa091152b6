"""Advantage estimators: published numbers, singleton and constant groups, and GAE against its
sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import advantages

NAN = float("nan")
OUTCOME = [name for name in advantages.ADVANTAGES if name not in advantages.NEEDS]
ADVANTAGES = {name: jax.jit(function) for name, function in advantages.ADVANTAGES.items()}

# A ragged batch whose advantages verl 0.9.1 computed: groups of 2, 3 and 1; row 1 has two tokens,
# row 4 none.
REWARDS = jnp.array([1.0, 0.0, 1.0, 0.5, 0.25, 0.7])
GROUP = jnp.array([0, 0, 1, 1, 1, 2])
MASK = jnp.array([[1] * 4, [1, 1, 0, 0], [1] * 4, [1] * 4, [0] * 4, [1] * 4])
FIRST_TOKEN = {
    "grpo": [0.707106, -0.707106, 1.091087, -0.218217, 0, 0.699999],
    # Group means 0.5 and 1.75 / 3; the singleton keeps its reward.
    "dr_grpo": [0.5, -0.5, 0.416667, -0.083333, 0, 0.7],
    "rloo": [1, -1, 0.625, -0.125, 0, 0],
}


@pytest.mark.parametrize("name", OUTCOME)
def test_a_ragged_batch(name):
    adv = ADVANTAGES[name](REWARDS, MASK, GROUP)
    np.testing.assert_allclose(adv, np.array(FIRST_TOKEN[name])[:, None] * MASK, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    # Rewards 1, 0, 0, 1: mean 0.5, std with ddof 1 0.57735; the others' means are 1/3 and 2/3.
    [("grpo", 0.866024), ("dr_grpo", 0.5), ("rloo", 2 / 3)],
)
def test_two_of_four_correct(name, expected):
    adv = ADVANTAGES[name](jnp.array([1, 0, 0, 1]), jnp.ones((4, 1)), jnp.zeros(4, int))
    np.testing.assert_allclose(adv[:, 0], expected * np.array([1, -1, -1, 1]), rtol=1e-5)


@pytest.mark.parametrize("name", OUTCOME)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -0.7])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_constant_group_gives_exactly_zero(name, reward, size):
    adv = ADVANTAGES[name](jnp.full(size, reward), jnp.ones((size, 2)), jnp.full(size, 5))
    np.testing.assert_array_equal(adv, np.zeros((size, 2)))


@pytest.mark.parametrize(
    ("name", "expected"), [("grpo", 0.7 / (1 + 1e-6)), ("dr_grpo", 0.7), ("rloo", 0.0)]
)
def test_a_group_of_one(name, expected):
    adv = ADVANTAGES[name](jnp.array([0.7]), jnp.ones((1, 2)), jnp.array([3]))
    np.testing.assert_allclose(adv, [[expected] * 2], rtol=1e-6)


@pytest.mark.parametrize("name", OUTCOME)
def test_any_integers_name_the_groups_in_any_order(name):
    expected = ADVANTAGES[name](REWARDS, MASK, GROUP)
    names = jnp.array([-7, 2**30, 11])[GROUP]
    np.testing.assert_array_equal(ADVANTAGES[name](REWARDS, MASK, names), expected)
    order = jnp.array([5, 2, 0, 4, 1, 3])
    permuted = ADVANTAGES[name](REWARDS[order], MASK[order], names[order])
    np.testing.assert_allclose(permuted, expected[order], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OUTCOME)
def test_groups_do_not_see_each_other(name):
    other = REWARDS.at[2:5].set(jnp.array([9.0, -4.0, 3.0]))
    before, after = (ADVANTAGES[name](r, MASK, GROUP) for r in (REWARDS, other))
    keep = jnp.array([0, 1, 5])
    np.testing.assert_array_equal(before[keep], after[keep])
    assert np.abs(before[2] - after[2]).max() > 0.01


@pytest.mark.parametrize("name", OUTCOME)
def test_rewards_per_token_are_summed_over_valid_tokens(name):
    mask = MASK.at[4, 3].set(1)
    rewards_bt = (
        jnp.where(mask == 1, 0.25, NAN).at[:, 0].add(jnp.where(mask[:, 0] == 1, REWARDS, 0.0))
    )
    expected = ADVANTAGES[name](jnp.nansum(rewards_bt, axis=1), mask, GROUP)
    np.testing.assert_allclose(ADVANTAGES[name](rewards_bt, mask, GROUP), expected, rtol=1e-5)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_rejecting_the_last_token_does_not_lose_a_sequence_reward(name):
    rejected = jnp.array([[1, 1, 0], [1, 1, 1]])
    needs = {"values": jnp.zeros((2, 3))} if name in advantages.NEEDS else {}
    adv = ADVANTAGES[name](jnp.array([1.0, 0.0]), rejected, jnp.array([0, 0]), **needs)
    assert adv[0, 0] > 0.1 and adv[0, 1] > 0.1 and adv[0, 2] == 0.0


@pytest.mark.parametrize("name", OUTCOME)
def test_bool_masks_and_integer_rewards(name):
    expected = ADVANTAGES[name](jnp.array([1.0, 0.0, 3.0]), jnp.ones((3, 2)), jnp.zeros(3, int))
    actual = ADVANTAGES[name](jnp.array([1, 0, 3]), jnp.ones((3, 2), bool), jnp.zeros(3, int))
    np.testing.assert_array_equal(actual, expected)


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
        adv = advantages.gae(rewards, mask, None, is_whitened=False, **parameters)
        whitened = advantages.gae(rewards, mask, None, **parameters)
        returns = advantages.gae_returns(rewards, mask, **parameters)
    np.testing.assert_allclose(adv, expected_adv, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-12, atol=1e-14)
    valid = expected_adv[mask]
    centred = (expected_adv - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8) * mask
    np.testing.assert_allclose(whitened, centred, rtol=1e-10, atol=1e-12)


def test_gae_steps_over_a_hole():
    # From the end: 1 - 0.6 = 0.4; the hole carries it; 0 + 0.6 - 0.5 + 0.4 = 0.5.
    adv = advantages.gae(
        jnp.array([[0.0, 0.0, 1.0]]),
        jnp.array([[1, 0, 1]]),
        None,
        values=jnp.array([[0.5, 0.9, 0.6]]),
        is_whitened=False,
    )
    np.testing.assert_allclose(adv, [[0.5, 0.0, 0.4]], rtol=1e-6)


def test_gae_puts_a_sequence_reward_on_the_last_valid_token():
    mask = jnp.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    per_token = advantages.token_rewards(jnp.array([2.0, 3.0, 4.0]), mask)
    np.testing.assert_array_equal(per_token, [[0, 2, 0], [0, 0, 3], [0, 0, 0]])
    returns = advantages.gae_returns(
        jnp.array([2.0, 3.0, 4.0]), mask, values=jnp.ones((3, 3)), gamma=0.5
    )
    np.testing.assert_allclose(returns, [[1, 2, 0], [0, 1.5, 3], [0, 0, 0]], rtol=1e-6)


def test_whitening_of_one_token_or_none_is_zero():
    x = jnp.array([[3.0, NAN]])
    np.testing.assert_array_equal(advantages.whiten(x, jnp.array([[1, 0]])), [[0, 0]])
    np.testing.assert_array_equal(advantages.whiten(x, jnp.array([[0, 0]])), [[0, 0]])
    # 1 and 3: mean 2, unbiased variance 2.
    white = advantages.whiten(jnp.array([[1.0, NAN, 3.0]]), jnp.array([[1, 0, 1]]))
    np.testing.assert_allclose(white, [[-(2**-0.5), 0, 2**-0.5]], rtol=1e-6)
    assert advantages.gae(x, jnp.zeros((1, 2)), None, values=x).sum() == 0.0
