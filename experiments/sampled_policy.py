"""Sampled responses of the policy of `expert_policy`, whose length enumeration does not allow.

Attention is uniform, so its state is a sum, and a response costs the same for each token. Shapes as in
`expert_policy`: n response, t token, v vocab, l layer, k expert of a token, d embed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import expert_policy
from experiments.expert_policy import LAYER, Size


def _token(params, size: Size, sums_lnd, last_n, place):
    """Returns the log-probs [N,V] of the next token, the routes [L,N,k] and the new sums of attention.

    Args:
      sums_lnd: per layer, sum of the normed inputs of all tokens before.
      last_n: last token of each response; place: number of tokens before.
    """
    experts_e = jnp.arange(size.moe.num_experts).reshape(1, 1, -1)

    def layer(x_nd, inputs):
        w, sums_nd = inputs
        sums_nd = sums_nd + expert_policy.normed(x_nd)
        x_nd = x_nd + sums_nd / (place + 1) @ w["mix"]
        h_nd = expert_policy.normed(x_nd)
        ids_nk, gates_nk = expert_policy.route(h_nd @ w["router"], size, None)
        gates_ne = jnp.sum(gates_nk[..., None] * (ids_nk[..., None] == experts_e), axis=1)
        into = lambda name: jnp.einsum("nd,edf->nef", h_nd, w[f"expert_{name}"])
        inner_nef = jax.nn.silu(into("gate")) * into("up") * gates_ne[..., None]
        return x_nd + jnp.einsum("nef,efd->nd", inner_nef, w["expert_down"]), (sums_nd, ids_nk)

    x_nd = params["embed"][last_n] + params["position"][place][None]
    layers = {name: params[name] for name in LAYER}
    x_nd, (sums_lnd, ids_lnk) = jax.lax.scan(layer, x_nd, (layers, sums_lnd))
    return jax.nn.log_softmax(expert_policy.normed(x_nd) @ params["head"]), ids_lnk, sums_lnd


def _start(size: Size, count: int):
    return jnp.zeros((size.num_layers, count, size.embed_dim)), jnp.full(count, size.vocab)


def sampled(params, size: Size, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns sampled responses [N,T], their log-probs [N,T] and routes [T,L,N,k]."""

    def step(carry, inputs):
        sums_lnd, last_n = carry
        place, key = inputs
        logp_nv, ids_lnk, sums_lnd = _token(params, size, sums_lnd, last_n, place)
        token_n = jax.random.categorical(key, logp_nv)
        logp_n = jnp.take_along_axis(logp_nv, token_n[:, None], axis=1)[:, 0]
        return (sums_lnd, token_n), (token_n, logp_n, ids_lnk)

    places = jnp.arange(size.horizon), jax.random.split(key, size.horizon)
    tokens_tn, logp_tn, ids_tlnk = jax.lax.scan(step, _start(size, count), places)[1]
    return tokens_tn.T, logp_tn.T, ids_tlnk


def scored(params, size: Size, tokens_nt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probs [N,T,V] of all tokens at all places of responses, and the routes [T,L,N,k]."""

    def step(carry, inputs):
        sums_lnd, last_n = carry
        place, token_n = inputs
        logp_nv, ids_lnk, sums_lnd = _token(params, size, sums_lnd, last_n, place)
        return (sums_lnd, token_n), (logp_nv, ids_lnk)

    inputs = jnp.arange(size.horizon), tokens_nt.T
    logp_tnv, ids_tlnk = jax.lax.scan(step, _start(size, len(tokens_nt)), inputs)[1]
    return jnp.moveaxis(logp_tnv, 0, 1), ids_tlnk


def of_tokens(logp_ntv: jax.Array, tokens_nt: jax.Array) -> jax.Array:
    """Returns the log-probs [N,T] of the responses' tokens."""
    return jnp.take_along_axis(logp_ntv, tokens_nt[..., None], axis=-1)[..., 0]


def square(found: np.ndarray) -> float:
    """Returns an unbiased estimate of the squared norm of a mean vector from independent estimates of it [N,D]: the
    mean inner product of two different ones."""
    total, count = found.sum(axis=0), len(found)
    return float((total @ total - np.sum(found**2)) / (count * (count - 1)))
