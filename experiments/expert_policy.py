"""Exact gradients of a small policy with experts whose sampler routes tokens differently.

The policy is a causal decoder with the routers of `models.moe`. Every response is enumerated in
float64, so expectations are sums and nothing is sampled. A sampler has the policy's weights and
noise z on its routers. Its routes are m_z and its distribution is mu_z. pi_m is the policy with
routes m: the experts are those of m, and the gates are those of the live scores.

With a sequence weight the expectation of the step is

    E_z sum_y mu_z(y) [pi_m(y) / mu_z(y)] (R(y) - b_z) grad log pi_m(y) = grad E_z sum_y pi_m(y) R(y)

because sum_y grad pi_m(y) = 0. The gradient on the right is at fixed routes m. The routing says
which:

* none: m are the policy's own routes. The result is the gradient of the policy itself.
* r2: m are the routes of the weights that sampled, without noise.
* r3: m = m_z. The result is the gradient of the mixture over the sampler's routes, with one z for a
  whole response.

Without a weight, r3 has the same result if z changes the choice alone ("exact gates") and the
weights have not moved: then mu_z = pi_m, and the ratio of every token is 1. Routes are piecewise
constant in the weights, so this is also the gradient of the sampler's own expected reward.
`routing_bias` computes what each routing leaves as bias against the gradient of the policy itself.

Shapes: p prefix (the rows of `exact.Problem`), v vocab, n response, t token, l layer, k expert of a
token, e expert, d embed, f width of an expert.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.engine import injection
from jaxrl_tis.estimators.weights import WEIGHTS
from experiments import exact
from experiments.sequence_bias import repeats
from jaxrl_tis.models import moe
from jaxrl_tis.models.config import MoeConfig

Params = dict[str, jax.Array]
NOISES = {"router": 1.0, "choice": 0.0}  # share of the gates: as an engine has it, and exact gates
ROUTINGS = ("none", "r2", "r3")
LAYER = ("mix", "router", "expert_gate", "expert_up", "expert_down")  # stacked parameters


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a policy: MoE layers with uniform causal attention between them."""

    moe: MoeConfig
    vocab: int = 3
    horizon: int = 4
    embed_dim: int = 16
    num_layers: int = 2

    @functools.cached_property
    def tree(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the last token [P] of each prefix (`vocab` for the empty one), its length [P], and
        the attention [P,P]: a prefix attends to itself and its beginnings alike."""
        prefixes = exact.num_prefixes(self.vocab, self.horizon)
        last_p, depth_p = np.full(prefixes, self.vocab), np.zeros(prefixes, int)
        sees_pp = np.eye(prefixes)
        for p in range(1, prefixes):
            parent, last_p[p] = divmod(p - 1, self.vocab)
            depth_p[p] = depth_p[parent] + 1
            sees_pp[p] += sees_pp[parent]
        return last_p, depth_p, sees_pp / (depth_p[:, None] + 1)

    @functools.cached_property
    def responses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns prefixes [N,T] and tokens [N,T] of all responses, and rewards [N]: the share of
        tokens that repeat the previous one."""
        table = np.zeros((len(self.tree[0]), self.vocab))
        data = exact.Problem(table, table, repeats, self.horizon).responses
        return data["row"], data["tokens"], data["rewards"]


def random_params(size: Size, seed: int) -> dict[str, np.ndarray]:
    """Returns random weights [float64]. Router logits, as all projections of normed inputs, have a
    standard deviation of 1. The routers are float32 numbers, as in every checkpoint."""
    rng = np.random.default_rng(seed)
    d, e, f = size.embed_dim, size.moe.num_experts, size.moe.expert_dim
    normal = lambda *shape, fan_in=1: rng.normal(size=shape) / np.sqrt(fan_in)
    layers = size.num_layers
    return {
        "embed": normal(size.vocab + 1, d),
        "position": normal(size.horizon, d),
        "mix": normal(layers, d, d, fan_in=d),
        "router": normal(layers, d, e, fan_in=d).astype(np.float32).astype(np.float64),
        "expert_gate": normal(layers, e, d, f, fan_in=d),
        "expert_up": normal(layers, e, d, f, fan_in=d),
        "expert_down": 2 * normal(layers, e, f, d, fan_in=f),
        "head": normal(d, size.vocab, fan_in=d),
    }


def noise_pattern(size: Size, seed: int) -> np.ndarray:
    """Returns what `engine.injected = "router(scale=1.0)"` adds to the routers, [L,D,E]."""
    shape = (size.num_layers, size.embed_dim, size.moe.num_experts)
    router = {"router": jnp.zeros(shape, jnp.float32)}
    changed = injection.router(scale=1.0, seed=seed).weights({"layers": router})
    return np.asarray(changed["layers"]["router"], np.float64)


def moved(params: dict[str, np.ndarray], drift: float, seed: int) -> dict[str, np.ndarray]:
    """Returns the weights after updates: plus normal noise of `drift` times the deviation of each
    array, independent of `random_params` of the same seed."""
    rng = np.random.default_rng((seed, 1))
    return {name: w + drift * w.std() * rng.normal(size=w.shape) for name, w in params.items()}


def forward(
    params: Params, size: Size, ids_lpk: jax.Array | None = None,
    selector_lde: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits [P,V] and the routes [L,P,k] of all prefixes.

    Args:
      ids_lpk: routes to replay; None leaves the choice to the routers.
      selector_lde: routers that choose in place of the policy's, whose scores remain the gates.
    """
    last_p, depth_p, attention_pp = size.tree
    experts_e = jnp.arange(size.moe.num_experts).reshape(1, 1, -1)

    def layer(x_pd, inputs):
        w, replayed_pk, selector_de = inputs
        x_pd = x_pd + attention_pp @ normed(x_pd) @ w["mix"]
        h_pd = normed(x_pd)
        if selector_de is not None:
            replayed_pk = moe.choose(moe.scores(h_pd @ selector_de, size.moe), None, size.moe)
        ids_pk, gates_pk = route(h_pd @ w["router"], size, replayed_pk)
        gates_pe = jnp.sum(gates_pk[..., None] * (ids_pk[..., None] == experts_e), axis=1)
        into = lambda name: jnp.einsum("pd,edf->pef", h_pd, w[f"expert_{name}"])
        inner_pef = jax.nn.silu(into("gate")) * into("up") * gates_pe[..., None]
        return x_pd + jnp.einsum("pef,efd->pd", inner_pef, w["expert_down"]), ids_pk

    x_pd = params["embed"][last_p] + params["position"][depth_p]
    layers = {name: params[name] for name in LAYER}
    x_pd, routes_lpk = jax.lax.scan(layer, x_pd, (layers, ids_lpk, selector_lde))
    return normed(x_pd) @ params["head"], routes_lpk


def route(logits_pe, size: Size, replayed_pk):
    """Returns (ids [P,k], gates [P,k]) of `moe.route`, of one row whose tokens are the prefixes."""
    replay = None
    if replayed_pk is not None:
        replay = moe.Replay(replayed_pk[None], jnp.ones((1, len(replayed_pk)), bool))
    ids, gates, _ = moe.route(logits_pe[None], None, size.moe, replay, moe.Asked(), None)
    return ids[0], gates[0]


def normed(x_pd):
    return x_pd / jnp.sqrt(jnp.mean(x_pd**2, axis=-1, keepdims=True) + 1e-6)


def log_probs(logits_pv: jax.Array, size: Size) -> jax.Array:
    """Returns the log-prob [N,T] of each token of all responses."""
    row_nt, tokens_nt, _ = size.responses
    return jax.nn.log_softmax(logits_pv)[row_nt, tokens_nt]


class Scored(NamedTuple):
    """The log-probs of all responses under one choice of routes.

    Attributes:
      logp_nt: [N,T].
      ids_lpk: the routes in use.
      weighted: function from coefficients c [N,T] to sum_nt c grad log pi, a vector.
    """

    logp_nt: jax.Array
    ids_lpk: jax.Array
    weighted: Callable[[jax.Array], jax.Array]


def scored(params: Params, size: Size, ids_lpk: jax.Array | None = None) -> Scored:
    """Scores all responses with the policy's own or given routes."""

    def of_params(params):
        logits_pv, used_lpk = forward(params, size, ids_lpk)
        return log_probs(logits_pv, size), used_lpk

    logp_nt, pull, used_lpk = jax.vjp(of_params, params, has_aux=True)

    def weighted(coefficients_nt):
        [gradient] = pull(coefficients_nt)
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(gradient)])

    return Scored(logp_nt, used_lpk, weighted)


def true_gradient(policy: Scored, size: Size) -> jax.Array:
    """Returns the gradient of the expected reward of a policy, as one vector."""
    p_n = jnp.exp(policy.logp_nt.sum(axis=1))
    coefficients_n1 = (p_n * size.responses[2])[:, None]
    return policy.weighted(jnp.broadcast_to(coefficients_n1, policy.logp_nt.shape))


def sampler(
    params: Params, size: Size, change_lde: jax.Array, share: chex.Numeric
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probs [N,T] and routes [L,P,k] of a sampler with noise on its routers.

    Args:
      change_lde: what is added to the routers for the choice of experts.
      share: how much of it the gates have too, a value of `NOISES`.
    """
    router_lde = params["router"]
    with_noise = params | {"router": router_lde + share * change_lde}
    logits_pv, ids_lpk = forward(with_noise, size, selector_lde=router_lde + change_lde)
    return log_probs(logits_pv, size), ids_lpk


def expected_steps(
    policy: Scored, size: Size, behav_nt: jax.Array, weights: Sequence[str]
) -> dict[str, jax.Array]:
    """Returns E[sum_t w_t (R - b) grad log pi(y_t)] over the sampler's responses, for each weight.

    Args:
      policy: the learner, with the routes that it replays.
      behav_nt: the sampler's log-probs of all responses. b is its mean reward.
      weights: names in `estimators.weights`, of the whole ratio of the learner to the sampler.
    """
    p_n, rewards_n = jnp.exp(behav_nt.sum(axis=1)), jnp.asarray(size.responses[2])
    adv_n = rewards_n - p_n @ rewards_n
    log_ratio_nt = policy.logp_nt - behav_nt
    mask_nt = jnp.ones(behav_nt.shape, bool)
    w_wnt = jnp.stack([WEIGHTS[name](log_ratio_nt, mask_nt) for name in weights])
    steps_wq = jax.vmap(policy.weighted)((p_n * adv_n).reshape(1, -1, 1) * w_wnt)
    return dict(zip(weights, steps_wq, strict=True))


@functools.partial(jax.jit, static_argnames=("size", "weights"))
def routing_bias(
    old: Params, params: Params, size: Size, changes_zlde: jax.Array, share: chex.Numeric,
    weights: tuple[str, ...],
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """Returns the true gradient and, by routing and weight, the bias of the expected step: vectors.

    Args:
      old: the weights that sampled. params: those that are trained.
      changes_zlde: the sampler's noises. It has one of them in each response, all alike.
      share: see `sampler`.
    """
    native = scored(params, size)
    truth, old_lpk = true_gradient(native, size), forward(old, size)[1]

    def steps(change_lde):
        behav_nt, ids_lpk = sampler(old, size, change_lde, share)
        routed = {"none": native, "r2": scored(params, size, old_lpk),
                  "r3": scored(params, size, ids_lpk)}
        return {
            name: expected_steps(policy, size, behav_nt, weights) for name, policy in routed.items()
        }

    by_noise = jax.vmap(steps)(changes_zlde)
    return truth, jax.tree.map(lambda step: jnp.mean(step, axis=0) - truth, by_noise)
