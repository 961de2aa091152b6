"""Measures how differently sampler and learner route tokens to experts, and how experts are loaded.

For models with a mixture of experts. Every function is pure, works under jit and has no gradient.
Metrics are scalars, 0 for an empty mask.

Two sides *flip* a router where their sets of chosen experts differ; the order does not count. All
comparisons read overlap counts [B, T, L]: how many of the k chosen experts of a router both sides
share. `overlap` counts them from ids. A pass that compares its own routes with recorded ones may
return the counts alone, which are k times smaller.

Row t of routes and counts has to be aligned with the log-probs: the route of the input token whose
output predicts the token of logp[:, t].
"""

import chex
import jax
import jax.numpy as jnp

from jaxrl_tis.diagnostics import attribution, mismatch
from jaxrl_tis.estimators import ratios

NUM_BUCKETS = 16  # of positions, at most; the last one has no end


def overlap(routes_a: chex.Array, routes_b: chex.Array) -> chex.Array:
    """Returns the number of experts that both sides chose, [B, T, L] uint8.

    Args:
      routes_a, routes_b: [B, T, L, k] int, the k different experts of each router.
    """
    chex.assert_rank(routes_a, 4)
    chex.assert_equal_shape([routes_a, routes_b])
    num_chosen = routes_a.shape[3]
    shared = (jnp.any(routes_a == routes_b[..., j : j + 1], axis=-1) for j in range(num_chosen))
    return sum(x.astype(jnp.uint8) for x in shared)


def flip_metrics(
    overlap_btl: chex.Array, mask: chex.Array, seg: chex.Array | None = None, *, num_chosen: int,
    num_experts: int, response: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Measures how often sampler and learner send a token to different experts.

    Args:
      overlap_btl: [B, T, L] int, see `overlap`.
      mask: [B, T] tokens with a route on both sides.
      seg: [B, T] sequence ids of packed rows, or None.
      num_chosen: k, experts that a router chooses.
      num_experts: experts of a router.
      response: [B, T] tokens of the responses, whose first one has position 0; None takes `mask`.

    Returns mismatch/route_flip_expert, the share of chosen experts that the other side did not
    choose; mismatch/route_flip_delta, the share of all experts whose choice differs;
    mismatch/route_flip_router, of routers with another set; mismatch/route_flip_token, of tokens
    with such a router; mismatch/route_flip_layer_<l>, of tokens whose router l has another set;
    mismatch/route_flip_position_<first position>, of routers of the tokens in a position bucket
    0, 1, 2-3, 4-7, ... of the response.
    """
    flipped_btl = _is_flipped(overlap_btl, mask, num_chosen)
    mask_btl = jnp.broadcast_to(ratios.as_bool(mask)[..., None], flipped_btl.shape)
    # 1 - overlap / num_chosen of equal sets is a little off 0: XLA multiplies by a rounded 1 / 3.
    missed_btl = num_chosen - overlap_btl.astype(jnp.float32)
    expert = ratios.masked_mean(missed_btl / num_chosen, mask_btl)
    metrics = {
        "expert": expert,
        "delta": expert * (2.0 * num_chosen / num_experts),
        "router": ratios.masked_mean(flipped_btl, mask_btl),
        "token": ratios.masked_mean(jnp.any(flipped_btl, axis=-1), mask),
    }
    for layer in range(flipped_btl.shape[2]):
        metrics[f"layer_{layer}"] = ratios.masked_mean(flipped_btl[..., layer], mask)
    labels, flips_nl, count_n = _by_position(flipped_btl, mask, seg, response)
    rates_n = ratios.safe_divide(jnp.mean(flips_nl, axis=1), count_n)
    metrics |= {f"position_{label}": rate for label, rate in zip(labels, rates_n, strict=True)}
    return mismatch.detached(metrics, "mismatch/route_flip_")


def flip_grid(
    overlap_btl: chex.Array, mask: chex.Array, seg: chex.Array | None = None, *, num_chosen: int,
    response: chex.Array | None = None,
) -> dict[str, chex.Array]:
    """Returns the flip rate of each layer and position bucket, for a picture.

    There are up to 16 L values, so a run records them every `metrics.diagnostics_every` steps.
    Arguments as in `flip_metrics`.

    Returns mismatch/route_flip_layer_<l>_position_<first position>, the share of the tokens in the
    bucket whose router l has another set.
    """
    flipped_btl = _is_flipped(overlap_btl, mask, num_chosen)
    labels, flips_nl, count_n = _by_position(flipped_btl, mask, seg, response)
    rates_nl = ratios.safe_divide(flips_nl, count_n[:, None])
    metrics = {
        f"layer_{layer}_position_{label}": rates_nl[n, layer]
        for layer in range(flipped_btl.shape[2])
        for n, label in enumerate(labels)
    }
    return mismatch.detached(metrics, "mismatch/route_flip_")


def gap_metrics(
    overlap_btl: chex.Array, logp_old: chex.Array, logp_behav: chex.Array, mask: chex.Array, *,
    num_chosen: int, lower: float = 0.5, upper: float = 5.0,
) -> dict[str, chex.Array]:
    """Splits the gap of sampler and learner by whether a router of the token flipped.

    An unflipped token may have a gap too: attention carries flips of earlier tokens.

    Args:
      overlap_btl: [B, T, L] int, see `overlap`.
      logp_old: [B, T] learner's log-probs at the weights that sampled, nats.
      logp_behav: [B, T] sampler's log-probs, nats.
      mask: [B, T] tokens with a route on both sides.
      num_chosen: k, experts that a router chooses.
      lower, upper: IcePop's band of the ratio (arXiv:2510.18855).

    Returns mismatch/route_flip_<flipped|unflipped>/<metric>: log_ratio_abs_mean in nats; k3_kl, the
    KL(sampler || learner) by k3 in nats; icepop_dropped, the share outside IcePop's band.
    """
    flipped_bt = jnp.any(_is_flipped(overlap_btl, mask, num_chosen), axis=-1)
    log_ratio_bt = ratios.safe_log_ratio(logp_old, logp_behav, mask)
    k3_bt = mismatch.token_k3(log_ratio_bt)
    metrics = {}
    for name, is_part_bt in {"flipped": flipped_bt, "unflipped": ~flipped_bt}.items():
        part = ratios.as_bool(mask) & is_part_bt
        is_dropped_bt = ~ratios.is_inside(log_ratio_bt, lower, upper)
        metrics[f"{name}/log_ratio_abs_mean"] = ratios.masked_mean(jnp.abs(log_ratio_bt), part)
        metrics[f"{name}/k3_kl"] = ratios.masked_mean(k3_bt, part)
        metrics[f"{name}/icepop_dropped"] = ratios.masked_mean(is_dropped_bt, part)
    return mismatch.detached(metrics, "mismatch/route_flip_")


def expert_load(routes: chex.Array, mask: chex.Array, *, num_experts: int) -> chex.Array:
    """Returns the number of tokens that each router sends to each expert, [L, E] float.

    Args:
      routes: [B, T, L, k] int, the k different experts of each router.
      mask: [B, T] tokens that count.
      num_experts: E, experts of a router.
    """
    chex.assert_rank(routes, 4)
    chex.assert_equal_shape_prefix([routes, mask], 2)
    num_layers = routes.shape[2]
    one = jnp.broadcast_to(ratios.as_bool(mask)[..., None, None], routes.shape)
    layer = jnp.arange(num_layers, dtype=jnp.int32).reshape(1, 1, num_layers, 1)
    layer = jnp.broadcast_to(layer, routes.shape)
    counts = jnp.zeros((num_layers, num_experts), jnp.float32)
    return counts.at[layer, routes.astype(jnp.int32)].add(one.astype(jnp.float32))


def router_entropy(probs: chex.Array, mask: chex.Array) -> chex.Array:
    """Returns the mean entropy of each router's distribution over its experts, [L], nats.

    Args:
      probs: [B, T, L, E] scores of a router, not negative; they are divided by their sum, so that
        sigmoid scores count as a distribution too.
      mask: [B, T] tokens that count.
    """
    chex.assert_rank(probs, 4)
    chex.assert_equal_shape_prefix([probs, mask], 2)
    entropy_btl = _entropy(ratios.as_float(probs))
    mask_btl = jnp.broadcast_to(ratios.as_bool(mask)[..., None], entropy_btl.shape)
    sum_l = jnp.sum(jnp.where(mask_btl, entropy_btl, 0.0), axis=(0, 1))
    return ratios.safe_divide(sum_l, jnp.sum(mask_btl, axis=(0, 1)))


def load_metrics(load_le: chex.Array, entropy_l: chex.Array) -> dict[str, chex.Array]:
    """Measures how evenly the routers use their experts.

    Args:
      load_le: [L, E] tokens of each expert, see `expert_load`.
      entropy_l: [L] nats, see `router_entropy`.

    Returns moe/load_max_over_mean/<mean|worst>, the tokens of the busiest expert over the mean of
    the layer's experts; moe/load_cv/<mean|worst>, the standard deviation of the load over its mean;
    moe/load_entropy/<mean|worst>, the entropy of the load over its largest value log E;
    moe/router_entropy/<mean|worst>, the entropy of a token's distribution over log E;
    moe/dead_experts, the number of experts of all layers without a token. Mean and worst are over
    the layers: the worst has the largest load, or the smallest entropy.
    """
    chex.assert_rank([load_le, entropy_l], [2, 1])
    most = jnp.log(jnp.asarray(load_le.shape[1], jnp.float32))
    mean_l = jnp.mean(load_le, axis=1)
    high = {
        "load_max_over_mean": ratios.safe_divide(jnp.max(load_le, axis=1), mean_l),
        "load_cv": ratios.safe_divide(jnp.std(load_le, axis=1), mean_l),
    }
    low = {
        "load_entropy": ratios.safe_divide(_entropy(load_le), most),
        "router_entropy": ratios.safe_divide(entropy_l, most),
    }
    is_used = jnp.sum(load_le) > 0
    metrics = {"dead_experts": jnp.where(is_used, jnp.sum(load_le == 0), 0)}
    for worst, values in ((jnp.max, high), (jnp.min, low)):
        metrics |= {f"{name}/mean": jnp.mean(x_l) for name, x_l in values.items()}
        metrics |= {f"{name}/worst": worst(x_l) for name, x_l in values.items()}
    return mismatch.detached(metrics, "moe/")


def _is_flipped(overlap_btl, mask, num_chosen):
    """Returns whether a router has another set, [B, T, L]."""
    chex.assert_rank(overlap_btl, 3)
    chex.assert_equal_shape_prefix([overlap_btl, mask], 2)
    return overlap_btl < num_chosen


def _by_position(flipped_btl, mask, seg, response):
    """Returns (first position of each bucket, flips [N, L], tokens [N]) by position."""
    num_buckets = min(NUM_BUCKETS, (mask.shape[1] - 1).bit_length() + 1)
    position_bt = attribution.response_positions(mask if response is None else response, seg)
    bucket_bt = attribution.power_of_two_bucket(jnp.maximum(position_bt, 0))
    bucket_bt = jnp.where(ratios.as_bool(mask), jnp.minimum(bucket_bt, num_buckets - 1), 0)
    one_bt = ratios.as_bool(mask).astype(jnp.float32)
    columns_btc = jnp.concatenate([flipped_btl * one_bt[..., None], one_bt[..., None]], axis=-1)
    sums = jax.vmap(lambda x, bucket: jax.ops.segment_sum(x, bucket, num_segments=num_buckets))
    sum_nc = jnp.sum(sums(columns_btc, bucket_bt), axis=0)
    return attribution.bucket_starts(num_buckets), sum_nc[:, :-1], sum_nc[:, -1]


def _entropy(x):
    """Returns the entropy of x / sum(x) over the last axis, nats; 0 where all is 0."""
    total = jnp.sum(x, axis=-1, keepdims=True)
    p = ratios.safe_divide(x, jnp.broadcast_to(total, x.shape))
    return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=-1)
