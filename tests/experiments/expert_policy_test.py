"""Expected steps of a policy with experts, against a float64 decoder with complex steps."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import expert_policy
from experiments.expert_policy import Size
from jaxrl_tis.models import moe
from jaxrl_tis.models.config import MoeConfig

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("float64 and enumeration under jit")]

EXACT = {"rtol": 1e-9, "atol": 1e-12}
SIZE = Size(MoeConfig(num_experts=5, top_k=2, expert_dim=2), vocab=2, horizon=3, embed_dim=4)
CHANGES = 0.6 * np.stack([expert_policy.noise_pattern(SIZE, seed) for seed in (0, 1)])
OLD = expert_policy.random_params(SIZE, 1)
NEW = expert_policy.moved(OLD, 0.2, 2)
STEP = 1e-30


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


# The oracle: prefixes one by one, derivatives by complex steps in all weights at once.

def silu(x):
    return x / (1.0 + np.exp(-x))


def normed(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def chosen(scores_e, k):
    """The ids of the k largest scores, the lower id first among equals."""
    return sorted(range(len(scores_e)), key=lambda e: (-scores_e[e], e))[:k]


def perturbed(params):
    """Weights with a leading axis: a copy for each weight, which has an imaginary step there."""
    sizes = [w.size for _, w in sorted(params.items())]
    starts = np.cumsum([0, *sizes])
    found = {}
    for (name, w), start in zip(sorted(params.items()), starts, strict=False):
        flat_qw = np.zeros((starts[-1], w.size), complex) + w.reshape(-1)
        flat_qw[start + np.arange(w.size), np.arange(w.size)] += 1j * STEP
        found[name] = flat_qw.reshape(-1, *w.shape)
    return found


def alone(params):
    return {name: w[None] for name, w in params.items()}


def decode(params_q, size, routes=None, selector=None):
    """{prefix: log-probs [Q,V]} and {prefix: ids [L][k]}. `routes`, as the second, are replayed."""
    seen, logp, found = {}, {}, {}
    for depth in range(size.horizon):
        for prefix in np.ndindex(*[size.vocab] * depth):
            last = prefix[-1] if prefix else size.vocab
            x = params_q["embed"][:, last] + params_q["position"][:, depth]
            seen[prefix], found[prefix] = [], []
            for l in range(size.num_layers):
                seen[prefix].append(normed(x))
                values = [seen[prefix[:t]][l] for t in range(depth + 1)]
                x = x + np.einsum("qd,qdc->qc", sum(values) / len(values), params_q["mix"][:, l])
                h = normed(x)
                logits = np.einsum("qd,qde->qe", h, params_q["router"][:, l])
                by = logits[0].real if selector is None else h[0].real @ selector[l]
                ids = chosen(by, size.moe.top_k) if routes is None else routes[prefix][l]
                found[prefix].append(ids)
                total, y = sum(np.exp(logits[:, e]) for e in ids), 0.0
                for e in ids:
                    gate, up, down = (
                        params_q[f"expert_{name}"][:, l, e] for name in ("gate", "up", "down")
                    )
                    inner = silu(np.einsum("qd,qdf->qf", h, gate)) * np.einsum("qd,qdf->qf", h, up)
                    share = np.exp(logits[:, e]) / total
                    y = y + share[:, None] * np.einsum("qf,qfd->qd", inner, down)
                x = x + y
            logits = np.einsum("qd,qdv->qv", normed(x), params_q["head"])
            logp[prefix] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logp, found


RESPONSES = list(np.ndindex(*[SIZE.vocab] * SIZE.horizon))
REWARDS = np.array([np.mean([a == b for a, b in itertools.pairwise(y)]) for y in RESPONSES])


def of_responses(logp):
    """Log-probs [Q,N,T] of all responses."""
    rows = [[logp[y[:t]][:, y[t]] for t in range(SIZE.horizon)] for y in RESPONSES]
    return np.moveaxis(np.array(rows), -1, 0)


@functools.cache
def _scored(size, is_moved, routes):
    params = NEW if is_moved else OLD
    given = None if routes is None else dict(zip(decode(alone(OLD), size)[1], routes, strict=True))
    logp_qnt = of_responses(decode(perturbed(params), size, given)[0])
    return logp_qnt[0].real, logp_qnt.imag / STEP


def scored(params, size, routes=None):
    """Log-probs [N,T] of all responses and their derivatives [Q,N,T]."""
    key = None if routes is None else tuple(tuple(map(tuple, x)) for x in routes.values())
    return _scored(size, params is NEW, key)


def gradient(params, size, routes=None):
    """The derivative [Q] of the expected reward: sum_y (grad pi(y)) R(y)."""
    logp_nt, score_qnt = scored(params, size, routes)
    return score_qnt.sum(axis=2) @ (np.exp(logp_nt.sum(axis=1)) * REWARDS)


def own_routes():
    return decode(alone(OLD), SIZE)[1]


@functools.cache
def _sampled(index, noise):
    router = OLD["router"] + CHANGES[index]
    if noise == "choice":
        logp, routes = decode(alone(OLD), SIZE, selector=router)
    else:
        logp, routes = decode(alone(OLD | {"router": router}), SIZE)
    return of_responses(logp)[0].real, routes


def sampled(change, noise):
    """Log-probs [N,T] and routes of a sampler with noise on its routers."""
    return _sampled([np.array_equal(change, known) for known in CHANGES].index(True), noise)


WEIGH = {
    "none": lambda ratio_nt: np.ones_like(ratio_nt),
    "token_tis": lambda ratio_nt: np.minimum(ratio_nt, 2.0),
    "seq_vanilla": lambda ratio_nt: np.broadcast_to(
        ratio_nt.prod(axis=1, keepdims=True), ratio_nt.shape
    ),
}
WEIGHTS = tuple(WEIGH)


def expected(routes, behav_nt, weight):
    """E[sum_t w_t (R - E R) grad log pi] [Q] of the moved policy, over the sampler's responses."""
    p_n = np.exp(behav_nt.sum(axis=1))
    logp_nt, score_qnt = scored(NEW, SIZE, routes)
    w_nt = WEIGH[weight](np.exp(logp_nt - behav_nt))
    return score_qnt.reshape(len(score_qnt), -1) @ (
        (p_n * (REWARDS - p_n @ REWARDS))[:, None] * w_nt
    ).ravel()


def oracle_bias(routing, noise, weight):
    """The bias [Q] of the moved policy, over both noises."""
    steps = []
    for change in CHANGES:
        behav_nt, routes = sampled(change, noise)
        given = {"none": None, "r2": own_routes(), "r3": routes}[routing]
        steps.append(expected(given, behav_nt, weight))
    return np.mean(steps, axis=0) - gradient(NEW, SIZE)


@jax.jit
def sampler(params, change_lde, share):
    """Log-probs [N,T] and routes of the sampler."""
    return expert_policy.sampler(params, SIZE, change_lde, share)


def bias_of(noise, params, changes=CHANGES):
    share = expert_policy.NOISES[noise]
    return expert_policy.routing_bias(OLD, params, SIZE, changes, share, WEIGHTS)


# The policy.

MOES = {
    "top-1": MoeConfig(num_experts=5, top_k=1, expert_dim=2),
    "top-2": SIZE.moe,
    "all": MoeConfig(num_experts=5, top_k=5, expert_dim=2),
}


@functools.partial(jax.jit, static_argnums=1)
def scored_by_jax(params, size, routes=None):
    """Log-probs of responses [N,T], routes [L,P,k] and the gradient."""
    policy = expert_policy.scored(params, size, routes)
    return policy.logp_nt, policy.ids_lpk, expert_policy.true_gradient(policy, size)


@pytest.mark.all
@pytest.mark.parametrize("name", MOES)
def test_the_policy_and_its_gradient_against_the_oracle(name):
    size = dataclasses.replace(SIZE, moe=MOES[name])
    logp_nt, ids_lpk, actual = scored_by_jax(OLD, size)
    logp, routes = decode(alone(OLD), size)
    np.testing.assert_allclose(logp_nt, of_responses(logp)[0].real, **EXACT)
    np.testing.assert_array_equal(np.moveaxis(ids_lpk, 0, 1), list(routes.values()))
    np.testing.assert_allclose(actual, gradient(OLD, size), **EXACT)


@pytest.mark.all
def test_its_experts_are_those_of_the_models():
    rng = np.random.default_rng(0)
    h_pd, e, k = rng.normal(size=(7, 4)), SIZE.moe.num_experts, SIZE.moe.top_k
    ids_pk = np.array([rng.permutation(e)[:k] for _ in h_pd])
    gates_pk = rng.uniform(size=ids_pk.shape)
    weights = tuple(OLD[f"expert_{name}"][0].astype(np.float32) for name in ("gate", "up", "down"))
    into = lambda x: x.astype(np.float32)
    y_pd = moe.experts(into(h_pd), jnp.asarray(ids_pk, jnp.int32), into(gates_pk), weights, e, *moe.FAST)
    for p, (h, ids, gates) in enumerate(zip(h_pd, ids_pk, gates_pk, strict=True)):
        wanted = sum(
            g * (silu(h @ OLD["expert_gate"][0, i]) * (h @ OLD["expert_up"][0, i]))
            @ OLD["expert_down"][0, i] for i, g in zip(ids, gates, strict=True)
        )
        np.testing.assert_allclose(y_pd[p], wanted, rtol=1e-4, atol=1e-5)


def test_prefixes_see_themselves_and_their_beginnings_alike():
    """Of two tokens: the empty prefix, 0, 1, 00, 01, 10, 11; 2 stands for the token before the first."""
    last_p, depth_p, sees_pp = Size(MoeConfig(4, 2, 2), vocab=2, horizon=3).tree
    assert last_p.tolist() == [2, 0, 1, 0, 1, 0, 1] and depth_p.tolist() == [0, 1, 1, 2, 2, 2, 2]
    np.testing.assert_allclose(sees_pp[2], [1 / 2, 0, 1 / 2, 0, 0, 0, 0])
    np.testing.assert_allclose(sees_pp[5], [1 / 3, 0, 1 / 3, 0, 0, 1 / 3, 0])


def test_a_step_on_a_uniform_sampler_by_hand():
    """Responses 00, 01, 10, 11 with the rewards 1, 0, 0, 1 and the baseline 1/2."""
    size = Size(MoeConfig(4, 2, 2), vocab=2, horizon=2)
    behav_nt = jnp.full((4, 2), np.log(0.5))
    policy = expert_policy.Scored(behav_nt + jnp.array([[0.0, np.log(4.0)]]), None, lambda c_nt: c_nt)
    found = expert_policy.expected_steps(policy, size, behav_nt, ("none", "token_tis"))
    own = np.array([[1.0], [-1.0], [-1.0], [1.0]]) / 8
    np.testing.assert_allclose(found["none"], own * [1, 1], rtol=1e-6)
    np.testing.assert_allclose(found["token_tis"], own * [1, 2], rtol=1e-6)


def test_updates_are_independent_of_the_weights():
    size = Size(MoeConfig(16, 2, 8))
    before = expert_policy.random_params(size, 3)
    after = expert_policy.moved(before, 0.1, 3)
    for name in ("expert_up", "expert_down"):  # 4,096 numbers
        change = after[name] - before[name]
        assert change.std() == pytest.approx(0.1 * before[name].std(), rel=0.05)
        assert abs(np.corrcoef(change.ravel(), before[name].ravel())[0, 1]) < 0.07


@pytest.mark.all
def test_the_noise_of_a_router_is_that_of_the_engine():
    pattern_lde = expert_policy.noise_pattern(Size(MoeConfig(16, 2, 8)), 3)
    # 512 numbers of deviation 1 / sqrt(16).
    assert pattern_lde.shape == (2, 16, 16) and pattern_lde.std() == pytest.approx(0.25, rel=0.1)


# With exact gates.

@pytest.mark.all
@pytest.mark.parametrize("noise", expert_policy.NOISES)
def test_a_sampler_that_differs_by_its_routes_alone_has_ratio_1_under_r3(noise):
    for change in CHANGES:
        behav_nt, ids_lpk = sampler(OLD, change, expert_policy.NOISES[noise])
        own_nt, own_lpk, _ = scored_by_jax(OLD, SIZE)
        replayed_nt, _, _ = scored_by_jax(OLD, SIZE, ids_lpk)
        assert np.sum(ids_lpk != own_lpk) > 2
        assert np.abs(np.exp(own_nt - behav_nt) - 1).max() > 0.05
        if noise == "choice":
            np.testing.assert_allclose(np.exp(replayed_nt - behav_nt), 1.0, rtol=1e-13)
        else:  # the gates differ, too
            assert np.abs(np.exp(replayed_nt - behav_nt) - 1).max() > 0.01


@pytest.mark.all
def test_r3_without_a_weight_is_the_gradient_of_the_mixture_over_the_samplers_routes():
    truth, bias = bias_of("choice", OLD)
    step = bias["r3"]["none"] + truth
    mixture = [gradient(OLD, SIZE, sampled(change, "choice")[1]) for change in CHANGES]
    np.testing.assert_allclose(step, np.mean(mixture, axis=0), **EXACT)
    # And of the sampler's own reward, whose routes follow the weights.
    direction, ends = expert_policy.random_params(SIZE, 5), []
    for sign in (1, -1):
        near = {name: w + sign * 1e-6 * direction[name] for name, w in OLD.items()}
        behav = [decode(alone(near), SIZE, selector=near["router"] + c)[0] for c in CHANGES]
        p_zn = [np.exp(of_responses(logp)[0].real.sum(axis=1)) for logp in behav]
        ends.append(np.mean(p_zn, axis=0) @ REWARDS)
    along = float(step @ np.concatenate([w.ravel() for _, w in sorted(direction.items())]))
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(along, rel=1e-5)


# With weights that have moved and gates that differ.

LEFT = {  # |bias| over |true gradient| of none, R2 and R3
    "router": {
        "none": (0.19763789, 0.20043515, 0.46704959),
        "token_tis": (0.26082964, 0.26537054, 0.43158275),
        "seq_vanilla": (0.0, 0.040384793, 0.40074361),
    },
    "choice": {
        "none": (0.22406707, 0.22484785, 0.4638161),
        "token_tis": (0.33236863, 0.33530212, 0.46935298),
        "seq_vanilla": (0.0, 0.040384793, 0.40074361),
    },
}


@pytest.mark.parametrize("noise", expert_policy.NOISES)
def test_the_bias_that_each_routing_leaves(noise):
    truth, actual = bias_of(noise, NEW)
    np.testing.assert_allclose(truth, gradient(NEW, SIZE), **EXACT)
    for weight, lefts in LEFT[noise].items():
        for routing, left in zip(expert_policy.ROUTINGS, lefts, strict=True):
            wanted = oracle_bias(routing, noise, weight)
            np.testing.assert_allclose(actual[routing][weight], wanted, **EXACT)
            share = np.linalg.norm(wanted) / np.linalg.norm(truth)
            assert share == pytest.approx(left, rel=1e-6, abs=1e-12), (weight, routing)


def test_a_sequence_weight_leaves_the_gradient_of_the_replayed_policy():
    truth = gradient(NEW, SIZE)
    assert np.linalg.norm(oracle_bias("none", "router", "seq_vanilla")) < 1e-12
    left = gradient(NEW, SIZE, own_routes()) - truth
    np.testing.assert_allclose(oracle_bias("r2", "router", "seq_vanilla"), left, **EXACT)
    mixture = [gradient(NEW, SIZE, sampled(change, "router")[1]) for change in CHANGES]
    np.testing.assert_allclose(
        oracle_bias("r3", "router", "seq_vanilla"), np.mean(mixture, axis=0) - truth, **EXACT
    )
    assert np.linalg.norm(left) > 0.01 * np.linalg.norm(truth)


def test_weights_that_have_not_moved_have_the_bias_of_none_under_r2():
    _, bias = bias_of("choice", OLD)
    for weight in WEIGHTS:
        np.testing.assert_allclose(bias["r2"][weight], bias["none"][weight], **EXACT)
        assert np.linalg.norm(bias["r3"][weight] - bias["none"][weight]) > 1e-3


def test_without_noise_and_updates_every_step_is_the_true_gradient():
    _, bias = bias_of("router", OLD, 0 * CHANGES)
    for vector in jax.tree.leaves(bias):
        np.testing.assert_allclose(vector, 0.0, atol=1e-12)
