"""Centred scores: by hand, and against covariances of enumerated responses, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import centering, methods
from jaxrl_tis.estimators.loss import policy_loss
from experiments import exact
from experiments.horizon import log_softmax
from tests import jitted

centering = jitted.Module(centering)
policy_loss = jitted.function(policy_loss)

pytestmark = pytest.mark.compiles

VOCAB, HORIZON = 4, 2
POLICY = exact.random_logits(VOCAB, HORIZON, np.random.default_rng(0))
NOISY = exact.with_engine_noise(POLICY, 0.8, np.random.default_rng(1))
EXACT = {"rtol": 1e-8, "atol": 1e-11}
# Every rule of single tokens: a weight, masks, an objective.
RULES = [
    ("none", "", "reinforce"),
    ("token_vanilla", "", "reinforce"),
    ("token_tis(cap=1.2)", "", "gpg"),
    ("token_clip(lower=0.8, upper=1.2)", "", "reinforce"),
    ("token_mis(upper=1.5)", "", "reinforce"),
    ("token_icepop(lower=0.6, upper=1.5)", "", "reinforce"),
    ("none", "", "cispo(clip_low=0.3, clip_high=0.2)"),
    ("token_tis", "token_dp(upper=0.2)", "reinforce"),
    ("none", "token_k1(upper=1.5) & token_k3(upper=0.2)", "reinforce"),
    ("none", "token_k2(upper=0.1) & token_ratio(upper=1.5)", "reinforce"),
]


def reward(response):
    return float(np.sin(response @ 2.0 ** np.arange(len(response)) + len(response)))


def proportional_tail(policy, head):
    """A sampler with other odds among the `head` likeliest of its tokens, and the policy's below."""
    p = np.exp(log_softmax(policy))
    q = np.array(p)
    for row, order in enumerate(np.argsort(-p, axis=1)[:, :head]):
        q[row, order] *= np.linspace(1.6, 1.1, head)
    return np.log(q / q.sum(axis=1, keepdims=True))


def parsed(weight, masks, objective):
    return dict(
        weight=methods.parse("weight", weight), masks=methods.parse_all("mask", masks),
        objective=methods.parse("objective", objective),
    )


def loss(rule, head, shift=lambda batch: 0.0, is_centered=True, centre="behav"):
    """The policy loss of `rule` with centred scores over so many of the sampler's likeliest tokens."""

    def loss_fn(logp, batch):
        logq, ids = jax.lax.top_k(jax.nn.log_softmax(batch["logits_behav"]), head)
        p = jax.nn.log_softmax(batch["logits"])
        given = batch | {
            "top_ids": ids, "top_logps": logq, "adv": batch["adv"] + shift(batch),
            "logp_old": batch["logp_old"],
        }
        return policy_loss(
            logp, given, centre=centre, aggregation="seq-mean-token-sum", rejected_in_denominator=True,
            entropy=batch["entropy"],
            logp_top=jnp.take_along_axis(p, ids, axis=-1) if is_centered else None,
            **parsed(*rule),
        )

    return loss_fn


def weight_table(rule, policy, behaviour):
    """The weight of every token in every prefix, by the formulas of the methods, [P,V]."""
    p, q = np.exp(log_softmax(policy)), np.exp(log_softmax(behaviour))
    r = p / q
    w = {
        "none": np.ones_like(r), "token_vanilla": r, "token_tis(cap=1.2)": np.minimum(r, 1.2),
        "token_tis": np.minimum(r, 2.0), "token_clip(lower=0.8, upper=1.2)": np.clip(r, 0.8, 1.2),
        "token_mis(upper=1.5)": r * (r <= 1.5),
        "token_icepop(lower=0.6, upper=1.5)": r * ((r >= 0.6) & (r <= 1.5)),
    }[rule[0]]
    kept = {
        "": r > 0, "token_dp(upper=0.2)": np.abs(p - q) <= 0.2,
        "token_k1(upper=1.5) & token_k3(upper=0.2)":
            (1 / r <= 1.5) & (1 / r >= 1 / 1.5) & (r - 1 - np.log(r) <= 0.2),
        "token_k2(upper=0.1) & token_ratio(upper=1.5)":
            (np.log(r) ** 2 / 2 <= 0.1) & (r <= 1.5),
    }[rule[1]]
    scale = np.clip(r, 0.7, 1.2) if rule[2].startswith("cispo") else 1.0
    return w * kept * scale


def covariance(problem, rule):
    """visits(p) Cov_q(A, w grad log p) in every prefix p, [P,V]: A is the mean reward after it."""
    q, p = (np.exp(log_softmax(x)) for x in (problem.behaviour, problem.policy))
    values = problem.action_values(problem.behaviour)
    deviation = values - (q * values).sum(axis=1, keepdims=True)
    mass = q * weight_table(rule, problem.policy, problem.behaviour) * deviation
    step = mass - p * mass.sum(axis=1, keepdims=True)
    return problem.visits(problem.behaviour)[:, None] * step


@functools.cache
def expected(rule, head, behaviour="noisy"):
    problem = exact.Problem(POLICY, BEHAVIOUR[behaviour], reward, HORIZON)
    return problem, problem.expectation(loss(rule, head))


BEHAVIOUR = {"noisy": NOISY, "same": POLICY, "proportional": proportional_tail(POLICY, 2)}


@pytest.mark.cases("rule0", "rule5", "rule9")
@pytest.mark.parametrize("rule", RULES)
def test_the_expected_step_is_the_covariance(rule):
    problem, step = expected(rule, VOCAB)
    np.testing.assert_allclose(step, covariance(problem, rule), **EXACT)
    plain = problem.expectation(loss(rule, VOCAB, is_centered=False))
    is_same = rule == ("token_vanilla", "", "reinforce")
    assert np.allclose(plain, step, **EXACT) == is_same


@pytest.mark.parametrize("rule", RULES[:3])
def test_a_tail_in_proportion_costs_nothing(rule):
    problem, step = expected(rule, 2, "proportional")
    np.testing.assert_allclose(step, covariance(problem, rule), **EXACT)


@pytest.mark.cases("rule0", "rule8")
@pytest.mark.parametrize("rule", RULES)
def test_a_constant_advantage_of_a_prefix_moves_nothing(rule):
    problem, step = expected(rule, VOCAB)
    row = problem.responses["row"]  # the first token has prefix 0, the second 1 + it
    assert set(row[:, 0]) == {0} and set(row[:, 1]) == {1, 2, 3, 4}

    def shift(batch):
        first = batch["tokens"][:, :1]
        return jnp.concatenate([np.full(first.shape, 3.0), 2.0 + first**2], axis=1)

    np.testing.assert_allclose(problem.expectation(loss(rule, VOCAB, shift)), step, **EXACT)


@pytest.mark.parametrize("head", [1, VOCAB])
def test_on_policy_it_subtracts_nothing(head):
    problem, step = expected(RULES[0], head, "same")
    np.testing.assert_allclose(step, problem.true_gradient(), **EXACT)
    plain = loss(RULES[0], head, is_centered=False)
    np.testing.assert_allclose(problem.variance(loss(RULES[0], head)), problem.variance(plain))


@pytest.mark.parametrize("objective", ["ppo", "cispo(clip_low=0.3, clip_high=0.2)"])
def test_in_decoupled_mode_the_ratio_of_the_objective_is_one(objective):
    """With one update logp_old is the policy: the weight alone judges the gap."""
    rule = ("token_tis(cap=1.2)", "", objective)
    problem = exact.Problem(POLICY, NOISY, reward, HORIZON)
    found = problem.expectation(loss(rule, VOCAB, centre="old"))
    np.testing.assert_allclose(found, covariance(problem, (*rule[:2], "reinforce")), **EXACT)


@pytest.mark.all
def test_a_support_that_is_not_recorded_is_not_centred():
    p, q, _ = head([0.5, 0.3], [0.4, 0.2])
    ones = np.ones((1, 1))
    batch = {
        "mask": ones > 0, "adv": ones, "tokens": np.array([[9]]), "logp": jnp.log(0.1 * ones),
        "logp_behav": jnp.log(0.1 * ones), "top_ids": np.array([[[2, 5]]]), "top_logps": q,
    }
    f = centering.rule(("none", {}), (), ("reinforce", {}), "behav")
    for kept, is_same in (([2, 5, 9], False), ([-1, -1, -1], True)):
        value, _ = centering.centered(p, batch | {"kept": np.array([[kept]])}, ones, f)
        assert (value[0, 0] == 0) == is_same


def head(p, q):
    """Log-probs [1,1,K], and which entries are tokens."""
    cast = lambda x: jnp.log(np.array(x, np.float32))[None, None]
    return cast(p), cast(q), np.array(q)[None, None] > 0


# p = 0.5, 0.2 and q = 0.4, 0.4 of the head; 0.3 and 0.2 outside, so that rho = 2/3.
@pytest.mark.parametrize("weight, c", [
    ("none", [0.4 - 2 / 3 * 0.5, 0.4 - 2 / 3 * 0.2]),
    ("token_vanilla", [0.0, 0.0]),
    ("token_tis(cap=1.2)", [0.48 - 0.8 * 0.5, 0.2 - 0.8 * 0.2]),  # rho f(3/2) = 0.8
    ("token_tis(cap=1.6)", [0.0, 0.0]),  # nothing is truncated
    ("token_mis(lower=0.6, upper=1.4)", [0.5, 0.0]),  # 1/2 is out, and so is 3/2
])
def test_coefficients_by_hand(weight, c):
    f = centering.rule(methods.parse("weight", weight), (), ("reinforce", {}), "behav")
    found, p_head, q_head = centering.coefficients(*head([0.5, 0.2], [0.4, 0.4]), f)
    np.testing.assert_allclose(found[0, 0], c, rtol=1e-5, atol=2e-7)
    np.testing.assert_allclose([p_head[0, 0], q_head[0, 0]], [0.7, 0.8], rtol=1e-6)


def test_a_head_of_all_that_could_be_drawn_has_no_tail():
    # The second entry is no token: the sampler could draw one alone, whatever the learner says.
    f = centering.rule(("none", {}), (), ("reinforce", {}), "behav")
    found, _, _ = centering.coefficients(*head([0.6, 0.3], [1.0, 0.0]), f)
    np.testing.assert_allclose(found[0, 0], [1.0, 0.0], rtol=1e-6)


def test_loss_and_metrics_by_hand():
    """One token of two, p = 3/4, 1/4 and q = 1/2, 1/2 with A = 2; the second position is padding."""
    bad = np.nan
    p = np.log(np.array([[[0.75, 0.25], [bad, bad]]]))
    batch = {
        "mask": np.array([[True, False]]), "adv": np.array([[2.0, bad]]),
        "tokens": np.array([[7, 7]]), "logp": np.log(np.array([[0.75, bad]])),
        "logp_behav": np.log(np.array([[0.5, bad]])),
        "top_ids": np.array([[[7, 3], [7, 3]]]),
        "top_logps": np.log(np.array([[[0.5, 0.5], [bad, bad]]])),
    }
    entropy = np.array([[0.5, bad]])
    f = centering.rule(("none", {}), (), ("reinforce", {}), "behav")
    total = lambda p: (lambda found: (found[0].sum(), found))(
        centering.centered(p, batch, entropy, f)
    )
    gradient, (loss_bt, metrics) = jitted.grad(total, has_aux=True)(p)
    np.testing.assert_allclose(loss_bt, [[np.log(0.75) + np.log(0.25), 0.0]], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[[1.0, 1.0], [0.0, 0.0]]], rtol=1e-6)
    # One logit up, the other down: the step is A (1, 0) - A p = (1/2, -1/2) and what is subtracted
    # A (q - p) = (-1/2, 1/2).
    drift = np.log(0.75) + 0.5
    wanted = {
        "learner_mass": 1.0, "sampler_mass": 1.0, "base_norm": np.sqrt(0.5), "norm": np.sqrt(0.5),
        "drift": drift, "drift_left": drift - 0.5 * (np.log(0.75) + np.log(0.25) + 1.0),
    }
    assert {f"centering/{name}" for name in wanted} == set(metrics)
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[f"centering/{name}"], value, rtol=1e-5, err_msg=name)


def test_a_drawn_token_outside_the_head_belongs_to_the_rest():
    # The head is one token of p = 0.6, q = 0.5; another one was drawn: base (0, 1) - (0.6, 0.4).
    p, q, _ = head([0.6], [0.5])
    ones = np.ones((1, 1))
    batch = {
        "mask": ones > 0, "adv": ones, "tokens": np.array([[9]]), "logp": jnp.log(0.1 * ones),
        "logp_behav": jnp.log(0.1 * ones), "top_ids": np.array([[[2]]]), "top_logps": q,
    }
    f = centering.rule(("none", {}), (), ("reinforce", {}), "behav")
    _, metrics = centering.centered(p, batch, ones, f)
    np.testing.assert_allclose(metrics["centering/base_norm"], np.sqrt(2) * 0.6, rtol=1e-5)


@pytest.mark.parametrize("text, size", [("none", 0), ("top(32)", 32), ("kept", 5)])
def test_the_size_of_a_head(text, size):
    assert centering.head_size(text, 5) == size


@pytest.mark.parametrize("text", ["top", "top(0)", "top(-1)", "top(1.5)", "all", "top(n=3)", ""])
def test_other_heads_are_refused(text):
    with pytest.raises(ValueError, match="none of 'none', 'kept' and 'top\\(n\\)'"):
        centering.head_size(text, 5)


@pytest.mark.parametrize("change, centre, updates, words", [
    ({"weight": "seq_tis"}, "behav", 1, "the weight 'seq_tis'"),
    ({"weight": "prefix_minpro"}, "behav", 1, "the weight 'prefix_minpro'"),
    ({"masks": "token_k1(upper=2.0) & veto"}, "behav", 1, "the mask 'veto'"),
    ({"objective": "gspo"}, "behav", 1, "the objective 'gspo'"),
    ({"objective": "ppo"}, "behav", 1, "the objective 'ppo'"),
    ({"objective": "cispo(cispo_mask_high=1.0)"}, "behav", 1, "depend on the advantage"),
    ({}, "old", 2, "several updates"),
])
def test_what_has_no_weight_of_a_token_is_refused_by_name(change, centre, updates, words):
    chosen = {"weight": "token_tis", "masks": "", "objective": "reinforce"} | change
    given = parsed(**chosen)
    order = given["weight"], given["masks"], given["objective"], centre, updates == 1
    assert words in centering.why_not(*order)


@pytest.mark.parametrize("name", [*centering.known("objective"), *centering.known("objective", "one")])
def test_single_updates_take_objectives_of_a_ratio_of_one(name):
    given = parsed("token_tis", "", name)
    chosen = given["weight"], given["masks"], given["objective"]
    assert centering.why_not(*chosen, "old", True) is None
    assert (centering.why_not(*chosen, "behav", False) is None) == (name in centering.known("objective"))
