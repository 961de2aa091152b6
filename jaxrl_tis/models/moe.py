"""Mixture of experts: the router, its choice of experts, and the products of the chosen ones.

Shapes: b row, t token, m = b * t, k expert of a token, e expert, d embed, l layer with experts.

A route is the ids of a token's experts in one layer, in the order of falling score. A route can be
replayed (R3, arXiv:2510.11370): the choice is then an argument, and the gates are those of the live
scores, so the gradient reaches the router. No token is ever dropped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels import tiles
from jaxrl_tis.kernels.grouped_matmul import group_of_rows
from jaxrl_tis.models import invariant
from jaxrl_tis.models.config import MoeConfig
from jaxrl_tis.models.grouped import grouped_matmul, grouped_matmul_invariant

EPSILON = 1e-20  # of the sum of sigmoid gates, as in the published models


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """Routes for the routers of a forward pass.

    Attributes:
      ids: [L,B,T,k] integer; of one layer [B,T,k].
      is_given: [B,T] bool, tokens with a route; the router chooses for the others.
    """

    ids: jax.Array
    is_given: jax.Array


class Asked(NamedTuple):
    """What a forward pass returns of its routers, see `Routed`."""

    routes: bool = False
    statistics: bool = False


NOTHING = Asked()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """What the routers of a forward pass did on their own, replayed or not; None if not asked for.

    Attributes:
      ids: [L,B,T,k] int32, their own choices.
      load: [L,B,E] float32, choices of each expert among the tokens of a row that count.
      probs: [L,B,E] float32, the sum of these tokens' probabilities of each expert: scores over
        their sum.
      entropy: [L,B] float32, the sum of their entropies in nats.
      z: [L,B] float32, the sum of logsumexp(logits)^2.
    """

    ids: Any = None
    load: Any = None
    probs: Any = None
    entropy: Any = None
    z: Any = None


def router_logits(x_btd: jax.Array, router_de: jax.Array) -> jax.Array:
    """Returns the logits [B,T,E] in float32, at full precision."""
    return jnp.einsum(
        "btd,de->bte", x_btd.astype(jnp.float32), router_de.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def scores(logits_me: jax.Array, moe: MoeConfig) -> jax.Array:
    """Returns the scores of the experts, float32: a softmax or sigmoids."""
    if moe.score == "softmax":
        return jax.nn.softmax(logits_me, axis=-1)
    return jax.nn.sigmoid(logits_me)


def choose(scores_me: jax.Array, bias_e: jax.Array | None, moe: MoeConfig) -> jax.Array:
    """Returns the ids [...,k] of the experts with the highest scores (with the bias), int32. Among
    equal scores the lower id comes first."""
    choice_me = scores_me if bias_e is None else scores_me + _as_last(bias_e, scores_me.ndim)
    if moe.num_groups > 1:
        groups_mgn = choice_me.reshape(*choice_me.shape[:-1], moe.num_groups, -1)
        best_mg = jnp.sum(jax.lax.top_k(groups_mgn, 2)[0], axis=-1)
        _, top_mg = jax.lax.top_k(best_mg, moe.top_groups)
        groups_g = _as_last(jnp.arange(moe.num_groups), top_mg.ndim + 1)
        is_in_mg = jnp.any(top_mg[..., None] == groups_g, axis=-2)
        choice_me = jnp.where(is_in_mg[..., None], groups_mgn, -jnp.inf).reshape(choice_me.shape)
    return jax.lax.top_k(choice_me, moe.top_k)[1]


def _as_last(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape((1,) * (ndim - 1) + (-1,))


def gates(scores_me: jax.Array, ids_mk: jax.Array, moe: MoeConfig) -> jax.Array:
    """Returns the gates [...,k] of the chosen experts, float32, from the scores of all of them."""
    gates_mk = jnp.take_along_axis(scores_me, ids_mk, axis=-1)
    if moe.normalizes_top_k:
        total_m1 = jnp.sum(gates_mk, axis=-1, keepdims=True)
        gates_mk = gates_mk / (total_m1 if moe.score == "softmax" else total_m1 + EPSILON)
    return gates_mk * moe.scale


def route(
    logits_bte: jax.Array, bias_e: jax.Array | None, moe: MoeConfig, replay: Replay | None,
    asked: Asked, is_token_bt: jax.Array | None, by_row: Callable = lambda f, *xs: f(*xs),
) -> tuple[jax.Array, jax.Array, Routed | None]:
    """Returns (ids [B,T,k] of the experts in use, their gates [B,T,k], what was asked for).

    `by_row` applies a function of tokens to arrays [B,T,...], see `invariant.by_row`.
    """
    scores_bte = by_row(functools.partial(scores, moe=moe), logits_bte)
    own_btk = choose(jax.lax.stop_gradient(scores_bte), bias_e, moe)
    ids_btk, routed = own_btk, None
    if replay is not None:
        is_given_bt1 = replay.is_given[..., None]
        ids_btk = jnp.where(is_given_bt1, replay.ids.astype(jnp.int32), own_btk)
    if any(asked):
        routed = Routed()
        if asked.statistics:
            routed = statistics(logits_bte, scores_bte, own_btk, is_token_bt)
        if asked.routes:
            routed = dataclasses.replace(routed, ids=own_btk)
    return ids_btk, by_row(functools.partial(gates, moe=moe), scores_bte, ids_btk), routed


def statistics(
    logits_bte: jax.Array, scores_bte: jax.Array, ids_btk: jax.Array, is_token_bt: Any
) -> Routed:
    """Returns the fields of `Routed` but the ids, summed over the tokens of each row that count."""
    weight_bt1 = is_token_bt[..., None].astype(jnp.float32)
    probs_bte = scores_bte / jnp.sum(scores_bte, axis=-1, keepdims=True)
    chosen_bte = jnp.sum(jax.nn.one_hot(ids_btk, logits_bte.shape[-1]), axis=-2)
    entropy_bte = -jax.scipy.special.xlogy(probs_bte, probs_bte)
    z_bt = jax.nn.logsumexp(logits_bte, axis=-1) ** 2
    return Routed(
        load=jnp.sum(chosen_bte * weight_bt1, axis=1),
        probs=jnp.sum(probs_bte * weight_bt1, axis=1),
        entropy=jnp.sum(entropy_bte * weight_bt1, axis=(1, 2)),
        z=jnp.sum(z_bt * weight_bt1[..., 0], axis=1),
    )


def experts(
    x_md: jax.Array, ids_mk: jax.Array, gates_mk: jax.Array, weights: tuple, num_experts: int,
    multiply: Callable, combine: Callable,
) -> jax.Array:
    """Returns the sum [M,D] of each token's experts, weighted by its gates, in float32.

    Args:
      weights: gate and up [E,D,F], and down [E,F,D], each any kind of weight. Two biases [E,F], of
        gate and up, may follow.
      multiply: `multiplied`, or a function of the same arguments.
      combine: `combined` or `combined_by_row`.
    """
    m, k = ids_mk.shape
    expert_n = ids_mk.reshape(-1)
    order_n, place_n = sorted_by(expert_n, num_experts)
    sizes_e = jnp.zeros(num_experts, jnp.int32).at[expert_n].add(1, mode="drop")
    rows_nd = permuted(jnp.repeat(x_md, k, axis=0), order_n, place_n)
    out_nd = multiply(rows_nd, sizes_e, weights)
    out_mkd = permuted(out_nd, place_n, order_n).reshape(m, k, -1)
    return combine(out_mkd, gates_mk)


def sorted_by(group_n: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """Returns (the order [N] of the rows by group, the place [N] of each row in it), int32. Rows of a
    group keep their order. Groups from `num_groups` on count as one group, the last."""
    rows_n = jnp.arange(group_n.shape[0], dtype=jnp.int32)
    # Sorting one array of distinct numbers takes an eighth of the time of `argsort` on CPU.
    keys_n = jnp.minimum(group_n, num_groups) * len(rows_n) + rows_n
    order_n = jnp.sort(keys_n, stable=False) % len(rows_n)
    scatter = lambda order_n: jnp.zeros_like(order_n).at[order_n].set(rows_n, unique_indices=True)
    return order_n, jax.lax.platform_dependent(order_n, tpu=jnp.argsort, default=scatter)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up (arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """The unit of GPT-OSS (arXiv:2508.10925): g sigmoid(alpha g) (u + 1), where g is the gate of at
    most `limit` and u the other input within +-limit. Clamped inputs get no gradient."""

    limit: float
    alpha: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * self.alpha)


def unit(moe: MoeConfig) -> Callable:
    """Returns the function of gate and up of a model's experts."""
    if not moe.swiglu_limit:
        return swiglu
    return ClampedSwiglu(moe.swiglu_limit, moe.swiglu_alpha)


def multiplied(
    rows_nd: jax.Array, sizes_e: jax.Array, weights: tuple, matmul: Callable = grouped_matmul,
    matmul_down: Callable | None = None, unit: Callable = swiglu,
) -> jax.Array:
    """Returns the MLP [N,D] of each row with the weights of its expert; rows are sorted by expert,
    and sizes_e counts them. The products are `matmul`, and `matmul_down` for the last one. `weights`
    are as of `experts`."""
    gate, up, down, *biases = weights
    gate_nf, up_nf = matmul(rows_nd, gate, sizes_e), matmul(rows_nd, up, sizes_e)
    if biases:
        group_n = group_of_rows(sizes_e, len(rows_nd))
        gate_nf, up_nf = (
            with_biases(y, bias, group_n) for y, bias in zip((gate_nf, up_nf), biases, strict=True)
        )
    return (matmul_down or matmul)(unit(gate_nf, up_nf), down, sizes_e)


def with_biases(y_nf: jax.Array, bias_ef: jax.Array, group_n: jax.Array) -> jax.Array:
    """Returns rows with the bias of their group, added in float32, in y's dtype. The groups ascend;
    rows after the last one get no bias."""
    of_row = jnp.take(
        bias_ef.astype(jnp.float32), group_n, axis=0, mode="fill", fill_value=0,
        indices_are_sorted=True,
    )
    return (y_nf + of_row).astype(y_nf.dtype)


def output_biases(ids_btk: jax.Array, gates_btk: jax.Array, bias_ed: jax.Array) -> jax.Array:
    """Returns the sum [B,T,D] of the biases of each token's experts, weighted by its gates, in
    float32."""
    gates_btke = jax.nn.one_hot(ids_btk, bias_ed.shape[0]) * gates_btk[..., None]
    return jnp.einsum(
        "bte,ed->btd", jnp.sum(gates_btke, axis=2), bias_ed.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def combined(out_mkd: jax.Array, gates_mk: jax.Array) -> jax.Array:
    """Returns the weighted sum [M,D] of the experts' outputs, in float32."""
    return jnp.sum(out_mkd * gates_mk[..., None], axis=-2, dtype=jnp.float32)


def combined_by_row(out_mkd: jax.Array, gates_mk: jax.Array) -> jax.Array:
    """Returns `combined` with a fixed order of its sums, for `numerics="invariant"`."""

    def in_order(out_rkd, gates_rk):
        terms = [tiles.apart(out_rkd[:, j] * gates_rk[:, j, None]) for j in range(gates_rk.shape[1])]
        return functools.reduce(jnp.add, terms)

    return invariant.by_row(combined, None, out_mkd, gates_mk, lead=1, tile=in_order)


@jax.custom_vjp
def permuted(x_nd: jax.Array, order_n: jax.Array, place_n: jax.Array) -> jax.Array:
    """Returns x[order]. `place` is the inverse permutation, by which gradients are gathered and not
    scattered."""
    return jnp.take(x_nd, order_n, axis=0, unique_indices=True)


def _permuted_fwd(x_nd, order_n, place_n):
    return permuted(x_nd, order_n, place_n), place_n


def _permuted_bwd(place_n, gradient):
    return jnp.take(gradient, place_n, axis=0, unique_indices=True), None, None


permuted.defvjp(_permuted_fwd, _permuted_bwd)


# (multiply, combine) of `experts` on one device.
FAST = multiplied, combined
INVARIANT = functools.partial(multiplied, matmul=grouped_matmul_invariant), combined_by_row
