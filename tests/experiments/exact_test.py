"""Estimators against gradients that come from enumeration, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import advantages, masks, methods, reduce, weights
from experiments import exact, group_bias
from experiments.group_bias import Step

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("float64 and enumeration under jit")]

EXACT = {"rtol": 1e-9, "atol": 1e-12}
POLICY = exact.random_logits(3, 3, np.random.default_rng(0))
SHORT = exact.random_logits(3, 2, np.random.default_rng(5))  # for groups of three
NOISY = exact.with_engine_noise(POLICY, 0.5, np.random.default_rng(1))


def reward(response):
    """Differs between all responses."""
    return float(np.sin(response @ 2.0 ** np.arange(len(response)) + len(response)))


def off_policy(**kwargs):
    return exact.Problem(POLICY, NOISY, reward, 3, **kwargs)


def on_policy(**kwargs):
    return exact.Problem(POLICY, POLICY, reward, 3, **kwargs)


def policy_gradient(w, adv, logp, batch):
    """Mean over responses of the sum over tokens of -w A log pi."""
    return reduce.aggregate(-w * adv * logp, batch["mask"], "seq-mean-token-sum")


def weighted(name, adv="adv", **parameters):
    """REINFORCE with a weight of the library and the batch's field `adv` as the advantage."""

    def loss_fn(logp, batch):
        needs = methods.needs("weight", name)
        given = {**batch, "logp": logp}
        fields = {field: given[field] for field in needs}
        log_ratio = batch["logp_old"] - batch["logp_behav"]
        w = weights.WEIGHTS[name](log_ratio, batch["mask"], **fields, **parameters)
        return policy_gradient(w, batch[adv], logp, batch)

    return loss_fn


def gradient_from(problem, visits, action_values):
    """sum_v visits(p) pi(v | p) Q(p, v) grad log pi(v | p), the policy gradient theorem, [P, V]."""
    pi = problem.transition(problem.policy)
    is_own = np.zeros(len(pi), bool)
    is_own[problem.responses["row"][problem.responses["mask"]]] = True
    excess = action_values - (pi * action_values).sum(axis=1, keepdims=True)
    return is_own[:, None] * visits[:, None] * pi * excess


# The oracle itself.


@pytest.mark.all
@pytest.mark.parametrize("kwargs", [{}, {"stop": 1}, {"tool": (1,)}, {"stop": 1, "tool": (1, 2)}])
def test_true_gradient_against_complex_steps(kwargs):
    problem = off_policy(**kwargs)
    data = problem.responses

    def expected_reward(table):
        p = np.exp(table)
        p = p / p.sum(axis=1, keepdims=True)
        mu = np.exp(NOISY) / np.exp(NOISY).sum(axis=1, keepdims=True)
        total = 0.0
        for row, tokens, live, mask, value in zip(*(data[name] for name in (
                "row", "tokens", "is_live", "mask", "rewards")), strict=True):
            probability = 1.0
            for t in np.flatnonzero(live):
                probability *= (p if mask[t] else mu)[row[t], tokens[t]]
            total += probability * value
        return total

    expected = np.zeros(POLICY.shape)
    for p, v in np.ndindex(*POLICY.shape):
        step = POLICY.astype(complex)
        step[p, v] += 1e-30j
        expected[p, v] = expected_reward(step).imag / 1e-30
    np.testing.assert_allclose(problem.true_gradient(), expected, **EXACT)
    on_visits = gradient_from(problem, problem.visits(POLICY), problem.action_values(POLICY))
    np.testing.assert_allclose(on_visits, expected, **EXACT)


def test_responses_with_a_stop_token():
    # Tokens 0 and 1, at most two of them, 1 ends: the responses are 1, 00 and 01.
    table = np.zeros((3, 2))
    problem = exact.Problem(table, table, len, 2, stop=1)
    np.testing.assert_array_equal(problem.responses["tokens"], [[0, 0], [0, 1], [1, 1]])
    np.testing.assert_array_equal(problem.responses["row"], [[0, 1], [0, 1], [0, 2]])
    np.testing.assert_array_equal(problem.responses["mask"], [[1, 1], [1, 1], [1, 0]])
    np.testing.assert_array_equal(problem.responses["rewards"], [2.0, 2.0, 1.0])
    np.testing.assert_allclose(problem.probabilities(table), [0.25, 0.25, 0.5])
    np.testing.assert_allclose(problem.visits(table), [1.0, 0.5, 0.0])
    np.testing.assert_allclose(problem.action_values(table)[:2], [[2.0, 1.0], [2.0, 2.0]])


def test_turns_are_numbered_by_tool_runs():
    problem = exact.Problem(*[np.zeros((15, 2))] * 2, len, 4, tool=(1, 2))
    np.testing.assert_array_equal(problem.fields["turn"][0], [0, 1, 1, 1])


@pytest.mark.parametrize("group", [(0,), (0, 0)])
def test_moments_against_the_covariance_of_dense_gradients(group):
    rng = np.random.default_rng(3)
    policy, behaviour = (exact.random_logits(2, 3, rng) for _ in range(2))
    problem = exact.Problem(policy, behaviour, reward, 3, group=group)
    row, tokens = problem.responses["row"], problem.responses["tokens"]

    def loss(logp, rewards):
        return -jnp.sum(jnp.exp(logp) * (rewards - jnp.sum(rewards) / 3.0)[:, None])

    index, _, probability = problem.batches
    with jax.enable_x64(True):

        def of_table(table, i):
            logp = jax.nn.log_softmax(table)[jnp.asarray(row)[i], jnp.asarray(tokens)[i]]
            return loss(logp, jnp.asarray(problem.responses["rewards"])[i])

        gradient = jax.jit(jax.vmap(jax.grad(of_table), (None, 0)))
        g = -np.asarray(gradient(jnp.asarray(policy), index)).reshape(len(index), -1)
    mean = probability @ g
    variance = probability @ np.sum((g - mean) ** 2, axis=1)
    actual = problem.moments(lambda logp, batch: loss(logp, batch["rewards"]))
    np.testing.assert_allclose(actual[0].ravel(), mean, **EXACT)
    np.testing.assert_allclose(actual[1], variance, **EXACT)


def test_behaviours():
    logits = np.log([[0.5, 0.3, 0.2]])
    np.testing.assert_array_equal(np.isinf(exact.top_p(logits, 0.5)), [[False, True, True]])
    np.testing.assert_array_equal(np.isinf(exact.top_p(logits, 0.51)), [[False, False, True]])
    # Two bits have the levels -1, 0, 1 times the largest magnitude: 0.6 / 1 rounds to 1, 0.4 to 0.
    np.testing.assert_allclose(exact.quantised(np.array([[1.0, 0.6, -0.4]]), 2), [[1.0, 1.0, 0.0]])


def test_a_table_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"behaviour is \(4, 3\).*\(13, 3\)"):
        exact.Problem(POLICY, NOISY[:4], reward, 3)


# Importance weights.


def stale():
    """A learner three exact gradient steps ahead of the policy that sampled."""
    logits = POLICY
    for _ in range(3):
        logits = logits + 2.0 * exact.Problem(logits, logits, reward, 3).true_gradient()
    return logits


BEHAVIOURS = {
    "engine noise": (POLICY, NOISY, {}),
    "int4 weights": (POLICY, exact.quantised(POLICY, 4), {}),
    "stale weights": (stale(), POLICY, {}),
    "tool tokens": (POLICY, NOISY, {"tool": (1,)}),
    "lengths": (POLICY, NOISY, {"stop": 2}),
    "top-p, replayed": (exact.top_p(POLICY, 0.7), exact.top_p(POLICY, 0.7), {}),
    "top-p, both noisy": (
        np.where(np.isinf(exact.top_p(NOISY, 0.8)), -np.inf, POLICY), exact.top_p(NOISY, 0.8), {},
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("name", BEHAVIOURS)
def test_sequence_weights_are_unbiased(name):
    policy, behaviour, kwargs = BEHAVIOURS[name]
    problem = exact.Problem(policy, behaviour, reward, 3, **kwargs)
    truth = problem.true_gradient()
    mean = problem.expectation(weighted("seq_vanilla"))
    np.testing.assert_allclose(mean, truth, **EXACT)
    if name != "top-p, replayed":
        assert np.linalg.norm(problem.expectation(weighted("none")) - truth) > 1e-3


@pytest.mark.all
@pytest.mark.cases("5-5")
@pytest.mark.parametrize(("vocab", "horizon"), [(3, 7), (5, 5)])
def test_sequence_weights_are_unbiased_for_longer_responses(vocab, horizon):
    rng = np.random.default_rng(4)
    policy = exact.random_logits(vocab, horizon, rng)
    behaviour = exact.with_engine_noise(policy, 0.3, rng)
    problem = exact.Problem(policy, behaviour, reward, horizon)
    mean = problem.expectation(weighted("seq_vanilla"))
    np.testing.assert_allclose(mean, problem.true_gradient(), **EXACT)


@pytest.mark.all
@pytest.mark.parametrize("kwargs", [{}, {"stop": 1}, {"tool": (1,)}])
def test_token_weights_leave_out_the_prefix_and_what_follows(kwargs):
    problem = off_policy(**kwargs)
    visits, values = (
        {name: function(table) for name, table in (("pi", POLICY), ("mu", NOISY))}
        for function in (problem.visits, problem.action_values)
    )
    token = problem.expectation(weighted("token_vanilla"))
    expected = gradient_from(problem, visits["mu"], values["mu"])
    np.testing.assert_allclose(token, expected, **EXACT)
    prefix = problem.expectation(weighted("prefix_ctpo", ctpo_low=np.inf, ctpo_high=np.inf))
    expected = gradient_from(problem, visits["pi"], values["mu"])
    np.testing.assert_allclose(prefix, expected, **EXACT)
    assert np.linalg.norm(prefix - problem.true_gradient()) > 1e-3


@pytest.mark.all
def test_token_weights_are_biased_even_where_every_prefix_is_as_likely():
    # Two tokens, 0 or 1; the reward is 1 for the response 11. Policy: always 1/2. Behaviour: the
    # same, but 1 follows 1 with 3/4. So all prefixes are visited alike, and no prefix term is left.
    behaviour = np.log([[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]])
    problem = exact.Problem(np.zeros((3, 2)), behaviour, lambda y: float(y.all()), 2)
    # First token, logit of 1: E mu [ 1 R (1 - 1/2) ] = 1/2 3/4 1/2; truly it is 1/2 1/2 1/2. The
    # second token after a 1: E mu [ (1/2 / 3/4) R (1 - 1/2) ] = 1/2 3/4 2/3 1/2, as it should be.
    token = problem.expectation(weighted("token_vanilla"))
    np.testing.assert_allclose(token[:, 1], [3 / 16, 0.0, 1 / 8], **EXACT)
    np.testing.assert_allclose(problem.true_gradient()[:, 1], [1 / 8, 0.0, 1 / 8], **EXACT)


@pytest.mark.all
def test_with_exact_action_values_the_bias_of_token_weights_is_the_prefix_term():
    problem = off_policy()
    token = problem.expectation(weighted("token_vanilla", "action_values"))
    shift = problem.visits(NOISY) - problem.visits(POLICY)
    prefix_term = gradient_from(problem, shift, problem.action_values(POLICY))
    np.testing.assert_allclose(token - problem.true_gradient(), prefix_term, **EXACT)
    assert np.linalg.norm(prefix_term) > 1e-2
    prefix = weighted("prefix_ctpo", "action_values", ctpo_low=np.inf, ctpo_high=np.inf)
    np.testing.assert_allclose(problem.expectation(prefix), problem.true_gradient(), **EXACT)


@pytest.mark.all
@pytest.mark.parametrize("level", ["token", "seq"])
def test_the_second_moment_of_tis_rises_with_the_cap_and_its_bias_vanishes(level):
    problem = off_policy()
    limit = problem.expectation(weighted(f"{level}_vanilla"))
    seconds, gaps = [], []
    for cap in (0.5, 1.0, 2.0, 4.0, 1e3):
        mean, variance = problem.moments(weighted(f"{level}_tis", cap=cap))
        seconds.append(variance + np.sum(mean**2))
        gaps.append(np.linalg.norm(mean - limit))
    assert np.all(np.diff(seconds) >= 0) and seconds[0] < 0.5 * seconds[-1]
    assert gaps[1] > 1e-2 and gaps[-1] < 1e-12 and np.all(np.diff(gaps) <= 0)
    truth = problem.true_gradient()
    is_unbiased = np.allclose(limit, truth, **EXACT)
    assert is_unbiased == (level == "seq")


@pytest.mark.all
@pytest.mark.parametrize("name", weights.WEIGHTS)
def test_no_weight_biases_on_policy(name):
    problem = on_policy(tool=(1,))
    np.testing.assert_allclose(
        problem.expectation(weighted(name)), problem.true_gradient(), **EXACT
    )


# The kept set of top-p.


@pytest.mark.all
def test_replaying_the_kept_set_is_exact_for_the_truncated_policy_only():
    kept = exact.top_p(POLICY, 0.7)
    truncated = exact.Problem(kept, kept, reward, 3)
    full = exact.Problem(POLICY, kept, reward, 3)
    replayed = truncated.expectation(weighted("none"))
    np.testing.assert_allclose(replayed, truncated.true_gradient(), **EXACT)
    # What a sequence weight of the full policy still misses are the responses that were cut off.
    data, pi = full.responses, np.exp(full.pick(POLICY))
    is_cut = full.probabilities(kept) == 0.0
    missing = np.zeros(POLICY.shape)
    for n in np.flatnonzero(is_cut):
        for row, token in zip(data["row"][n], data["tokens"][n], strict=True):
            score = np.eye(3)[token] - full.transition(POLICY)[row]
            missing[row] += pi[n].prod() * data["rewards"][n] * score
    gap = full.true_gradient() - full.expectation(weighted("seq_vanilla"))
    np.testing.assert_allclose(gap, missing, **EXACT)
    assert np.linalg.norm(missing) > 0.1 * np.linalg.norm(full.true_gradient())


# Baselines and groups.


@pytest.mark.all
@pytest.mark.cases("rloo-3", "remax-2", "gae(is_whitened=False)-2")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["rloo", "remax", "gae(is_whitened=False)"])
def test_baselines_that_do_not_see_the_response_do_not_bias(name, size):
    step = Step(name, weight="seq_vanilla")
    problem = group_bias.problem(step, size, drift=0.5)
    mean, variance = problem.moments(group_bias.loss(step))
    np.testing.assert_allclose(mean, problem.true_gradient(), **EXACT)
    assert variance > 0.0


@pytest.mark.all
@pytest.mark.cases("2-0.0", "3-0.5")
@pytest.mark.parametrize(("size", "drift"), [(2, 0.0), (3, 0.0), (3, 0.5)])
def test_the_group_mean_scales_the_gradient(size, drift):
    step = Step("dr_grpo", weight="seq_vanilla")
    problem = group_bias.problem(step, size, drift)
    mean = problem.expectation(group_bias.loss(step))
    np.testing.assert_allclose(mean, (size - 1) / size * problem.true_gradient(), **EXACT)


@pytest.mark.all
def test_equal_lengths_make_opo_the_group_mean():
    problem = exact.Problem(SHORT, SHORT, reward, 2, group=(0, 0, 0))
    mean = problem.expectation(group_bias.loss(Step("opo")))
    np.testing.assert_allclose(mean, 2 / 3 * problem.true_gradient(), **EXACT)


@pytest.mark.all
def test_two_groups_are_two_independent_estimates():
    single, pair = (
        exact.Problem(SHORT, SHORT, reward, 2, group=group) for group in ((7, 7), (7, 7, 3))
    )
    # A lone response has no others: RLOO gives 0, and a third of the batch is lost.
    mean = pair.expectation(group_bias.loss(Step("rloo")))
    np.testing.assert_allclose(
        mean, 2 / 3 * single.expectation(group_bias.loss(Step("rloo"))), **EXACT
    )


def weighted_residual(power, name):
    """max_t |sum_j power_jt A_jt| of each group; 0 where sum_j power_jt (G_jt - b)^2 is minimal."""

    def residual(logp, batch):
        energy = 1.0 - 2.0 * jnp.exp(batch["logp_old"]) + batch["sum_pi_squared"]
        log_w = jnp.sum(batch["logp_old"] - batch["logp_behav"], axis=1, keepdims=True)
        energy = jnp.exp(2.0 * log_w) * energy
        power_bt = {
            "otb": jnp.cumsum(energy, axis=1),
            "opob": jnp.sum(energy, axis=1, keepdims=True),
        }[power]
        batch = batch | {"weights": jnp.broadcast_to(jnp.exp(log_w), energy.shape)}
        needs = methods.needs("advantage", name)
        fields = {field: batch[field] for field in needs}
        adv = advantages.ADVANTAGES[name](
            batch["rewards"], batch["mask"], batch["group"], **fields
        )
        return jnp.max(jnp.abs(jnp.sum(power_bt * adv, axis=0)))

    return residual


@pytest.mark.all
@pytest.mark.cases("2-otb", "2-opob")
@pytest.mark.parametrize("name", ["otb", "opob"])
@pytest.mark.parametrize("size", [2, 3])
def test_otb_and_opob_minimise_their_weighted_squares(name, size):
    problem = off_policy(group=(0,) * size)
    assert problem.average(weighted_residual(name, name)) < 1e-6
    assert problem.average(weighted_residual(name, "dr_grpo")) > 0.05


def with_constant(b_t):
    """Sequence-weighted REINFORCE with a constant baseline, one number or one per position."""

    def loss_fn(logp, batch):
        log_ratio = batch["logp_old"] - batch["logp_behav"]
        w = weights.WEIGHTS["seq_vanilla"](log_ratio, batch["mask"])
        baseline = jnp.broadcast_to(jnp.asarray(b_t), (3,))[None, :]
        return policy_gradient(w, batch["adv"] - baseline, logp, batch)

    return loss_fn


def population_baselines(problem):
    """b* of OPOB, B_t of OTB with path powers, and B_t with the token's own power."""

    def sums(logp, batch):
        log_w = jnp.sum(batch["logp_old"] - batch["logp_behav"])
        w2 = jnp.exp(2.0 * log_w)
        energy = (1.0 - 2.0 * jnp.exp(batch["logp_old"]) + batch["sum_pi_squared"])[0]
        total = jnp.broadcast_to(jnp.sum(energy), energy.shape)
        powers = w2 * jnp.stack([total, jnp.cumsum(energy), energy])
        return jnp.stack([powers * batch["rewards"][0], powers])

    weighted_rewards, powers = problem.average(sums)
    return weighted_rewards / powers


@pytest.mark.all
@pytest.mark.parametrize("behaviour", [POLICY, NOISY], ids=["on-policy", "engine noise"])
def test_the_population_baseline_of_opob_minimises_the_variance(behaviour):
    problem = exact.Problem(POLICY, behaviour, reward, 3)
    opob, _, _ = population_baselines(problem)
    variance = problem.variance(with_constant(opob))
    for shift in (-0.1, 0.1):
        # tr Var is a parabola in b with its minimum at b*, and E[g] does not depend on b.
        assert problem.variance(with_constant(opob + shift)) > variance


@pytest.mark.all
def test_one_baseline_per_position_is_best_with_the_power_of_the_token_and_not_of_the_path():
    problem = off_policy()
    opob, otb, token = population_baselines(problem)
    best = problem.variance(with_constant(token))
    for t, shift in itertools.product(range(3), (-0.1, 0.1)):
        assert problem.variance(with_constant(token + shift * np.eye(3)[t])) > best
    for other in (opob, otb):
        assert problem.variance(with_constant(other)) > best


# Masks.


@pytest.mark.all
@pytest.mark.parametrize("name", ["token_k1", "seq_mean_k1", "seq_max_k3", "token_ratio", "veto"])
def test_on_policy_every_token_is_kept(name):
    bound = {"upper": 1.01} if name != "veto" else {}

    def kept(logp, batch):
        log_ratio = batch["logp_old"] - batch["logp_behav"]
        return jnp.mean(masks.MASKS[name](log_ratio, batch["mask"], **bound) == batch["mask"])

    assert on_policy(tool=(1,)).average(kept) == pytest.approx(1.0, abs=1e-12)
