"""Credit of turns, by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import advantages, methods, turn_credit
from tests import jitted

advantages, turn_credit = map(jitted.Module, (advantages, turn_credit))

# Two answers between the texts of a tool (0 in MASK) for each turn; rows 0 to 2 are one group, and
# row 3 is alone in its own. The reward of a turn stands on its last token.
MASK = np.array([
    [1, 1, 0, 1, 0, 1],
    [1, 0, 1, 1, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 0, 0, 1, 0, 0],
], bool)
TURN = np.array([
    [0, 0, 1, 1, 2, 2],
    [0, 1, 1, 1, 0, 0],
    [0, 1, 1, 5, 5, 5],
    [0, 1, 1, 1, 9, 0],
], np.int32)
REWARDS = np.array([
    [0, 1, 9, 2, 9, 4],
    [3, 9, 0, 0, 9, 9],
    [2, 9, 1, 9, 9, 9],
    [5, 9, 9, 7, 9, 9],
], np.float32)  # 9 where nothing counts
GROUP = np.array([6, 6, 6, 2], np.int32)


def by_turn(credit, rewards=REWARDS, advantage=advantages.dr_grpo):
    made = functools.partial(turn_credit.by_turn, advantage, is_rest=credit == "rest")
    return np.asarray(jax.jit(made)(rewards, MASK, GROUP, turn=TURN))


def on_turns(rows):
    """Values of each row's turns, on the turns' valid tokens."""
    out = np.zeros(MASK.shape)
    for b, values in enumerate(rows):
        for k, value in enumerate(values):
            out[b, MASK[b] & (TURN[b] == k)] = value
    return out


def test_the_reward_of_the_turn():
    # Turn 0: 1, 3, 2, mean 2. Turn 1: 2, 0, 1, mean 1. Turn 2: one sequence of three has it. A group
    # of one has no mean.
    expected = on_turns([[-1, 1, 0], [1, -1], [0, 0], [5, 7]])
    np.testing.assert_allclose(by_turn("turn"), expected, atol=1e-6)


def test_the_reward_of_the_rest():
    # Turn 0: 1 + 2 + 4, 3 + 0, 2 + 1, mean 13/3. Turn 1: 2 + 4, 0, 1, mean 7/3.
    expected = on_turns([[8 / 3, 11 / 3, 0], [-4 / 3, -7 / 3], [-4 / 3, -4 / 3], [12, 7]])
    np.testing.assert_allclose(by_turn("rest"), expected, atol=1e-6)


def test_the_standard_deviation_is_that_of_the_turn():
    # 1, 3, 2 and 2, 0, 1 have standard deviation 1; R / (1 + eps) in the group of one.
    expected = on_turns([[-1, 1, 0], [1, -1], [0, 0], [5, 7]])
    np.testing.assert_allclose(by_turn("turn", advantage=advantages.grpo), expected, rtol=1e-5)


def test_an_unknown_reward_leaves_its_turn_out_of_the_group():
    rewards = REWARDS.copy()
    rewards[2, 2] = np.nan
    # Turn 1: 2, 0, mean 1.
    expected = on_turns([[-1, 1, 0], [1, -1], [0, 0], [5, 7]])
    np.testing.assert_allclose(by_turn("turn", rewards), expected, atol=1e-6)
    # With the rest, turn 0 of row 2 holds it too: 7, 3, mean 5; turn 1: 6, 0, mean 3.
    expected = on_turns([[2, 3, 0], [-2, -3], [0, 0], [12, 7]])
    np.testing.assert_allclose(by_turn("rest", rewards), expected, atol=1e-6)


@pytest.mark.parametrize("name", [
    "grpo", "dr_grpo", "maxrl", "grpo_passk", "rloo", "gpg", "batch_mean", "opo",
    "reinforce_plus_plus_baseline",
])
@pytest.mark.parametrize("is_rest", [True, False])
def test_one_turn_is_the_episode(name, is_rest):
    function = advantages.ADVANTAGES[name]
    scores = np.array([1.0, 0.0, 3.0, np.nan], np.float32)
    rewards = np.where(np.arange(6) == 0, scores[:, None], 0).astype(np.float32)
    found = turn_credit.by_turn(
        function, rewards, MASK, GROUP, turn=np.zeros_like(TURN), is_rest=is_rest
    )
    np.testing.assert_array_equal(found, function(scores, MASK, GROUP))
    assert np.abs(found).sum() > 0


def test_there_is_no_gradient_and_no_turn_without_tokens():
    total = lambda rewards: jnp.sum(turn_credit.by_turn(
        advantages.dr_grpo, rewards, MASK, GROUP, turn=TURN, is_rest=False
    ))
    assert not jitted.grad(total)(REWARDS).any()
    none = turn_credit.by_turn(
        advantages.dr_grpo, REWARDS, MASK & False, GROUP, turn=TURN, is_rest=True
    )
    assert not none.any()


def test_every_advantage_is_credited_in_one_way():
    traits = {name: methods.traits("advantage", name) for name in advantages.ADVANTAGES}
    by_turn = {name for name, t in traits.items() if not t.per_token and not t.of_sequences}
    assert by_turn == {
        "grpo", "dr_grpo", "maxrl", "grpo_passk", "rloo", "gpg", "oapl", "batch_mean", "opo",
        "reinforce_plus_plus_baseline",
    }
