"""Selection of tokens by their rank in the whole rollout batch, and the clip bounds of M2PO.

The entries are part of `masks.MASKS`, whose module states the shared arguments. Two functions serve
an objective instead: `kl_cov` is True at the tokens to penalise, and `m2po_bounds` returns the band of
a clipped ratio.

The number of selected tokens is known only at run time. Instead of sorting, the value at the edge of a
selection is found bit by bit, with one count of the batch per bit of a float. Of equal values the
first in the array is selected, so packed rows may select another one. Nothing here carries a gradient,
and packed rows need no `seg`: the batch is one set of tokens.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric, PRNGKey

from jaxrl_tis.estimators import ratios
from jaxrl_tis.estimators.traits import Traits


def _unsigned(x):
    """The unsigned integer type as wide as x."""
    return jnp.dtype(f"uint{8 * x.dtype.itemsize}")


def _sign_bit(bits):
    return jnp.array(1, bits.dtype) << (8 * bits.dtype.itemsize - 1)


def sortable(x: Array) -> Array:
    """Unsigned integers as wide as the floats x, in the same order."""
    x = jnp.where(x == 0.0, 0.0, x)  # -0 is 0
    bits = jax.lax.bitcast_convert_type(x, _unsigned(x))
    return jnp.where(bits >= _sign_bit(bits), ~bits, bits | _sign_bit(bits))


def from_sortable(key: Array, dtype: jnp.dtype) -> Array:
    """The floats whose `sortable` is key."""
    bits = jnp.where(key >= _sign_bit(key), key ^ _sign_bit(key), ~key)
    return jax.lax.bitcast_convert_type(bits, dtype)


def _largest(is_low: Callable[[Array], Array], dtype: jnp.dtype) -> Array:
    """The largest unsigned integer for which the monotone is_low holds."""
    num_bits = 8 * jnp.dtype(dtype).itemsize

    def try_bit(i, low):
        trial = low | (jnp.array(1, dtype) << (num_bits - 1 - i).astype(dtype))
        return jnp.where(is_low(trial), trial, low)

    return jax.lax.fori_loop(0, num_bits, try_bit, jnp.zeros((), dtype))


def _first(is_candidate_bt, num_selected):
    """True at the first num_selected candidates, row by row."""
    count_bt = jnp.cumsum(is_candidate_bt, axis=1, dtype=jnp.int32)
    rows_bt = jnp.cumsum(count_bt[:, -1:], axis=0) - count_bt[:, -1:]  # candidates in rows above
    return is_candidate_bt & (rows_bt + count_bt <= num_selected)


def _smallest(key_bt, is_candidate_bt, num_selected):
    """True at the num_selected candidates of smallest key, or at all if there are fewer."""

    def is_low(edge):
        return jnp.sum(is_candidate_bt & (key_bt < edge)) <= num_selected

    edge = _largest(is_low, key_bt.dtype)
    is_below_bt = is_candidate_bt & (key_bt < edge)
    is_edge_bt = is_candidate_bt & (key_bt == edge)
    return is_below_bt | _first(is_edge_bt, num_selected - jnp.sum(is_below_bt))


def _share(fraction, x, mask):
    """max(1, floor(fraction * number of valid tokens)).

    A millionth is added before flooring: float32 must not turn a whole number into the one below.
    """
    count = fraction * ratios.masked_count(x, mask)
    return jnp.maximum(jnp.floor(count * (1.0 + 1e-6)), 1.0).astype(jnp.int32)


@Traits(at_update=True, ranks=True)
def m2po(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, m2po_threshold: Numeric = 0.04
) -> Array:
    """M2PO that drops tokens (arXiv:2510.01161 as AReaL has it): mean(log_ratio^2) < threshold.

    Tokens are dropped from the largest |log_ratio| down until the mean square of the rest is below
    the threshold; at least one is kept. By the paper's bound chi^2 <= R^2 mean(log_ratio^2), R a
    bound on |log_ratio|, this limits how far the kept tokens are off-policy.

    Unit: batch. Trust region: mean of log_ratio^2 over the kept tokens < m2po_threshold. Use: stale
    batches whose gap sits in a few tokens, which the objective `m2po` would clip instead.

    Args:
      log_ratio, mask: see `masks`. AReaL takes the proximal policy against the sampler.
      seg: not used.
      m2po_threshold: bound on the mean square, nats^2, exclusive; 0.04 in the paper.
    """
    del seg
    square_bt = jnp.square(ratios.detached_log_ratio(log_ratio, mask))
    is_valid_bt, key_bt = ratios.as_bool(mask), sortable(square_bt)

    def is_low(edge):
        return ratios.masked_mean(square_bt, is_valid_bt & (key_bt < edge)) < m2po_threshold

    is_below_bt = is_valid_bt & (key_bt < _largest(is_low, key_bt.dtype))
    count = ratios.masked_count(square_bt, is_below_bt)
    rest_bt = is_valid_bt & ~is_below_bt
    edge = ratios.masked_min(square_bt, rest_bt)  # of its ties, num_edge still fit
    slack = m2po_threshold * count - ratios.masked_sum(square_bt, is_below_bt)
    num_edge = jnp.ceil(ratios.safe_divide(slack, edge - m2po_threshold)) - 1.0
    num_edge = jnp.maximum(num_edge, jnp.where(count > 0, 0.0, 1.0))
    return is_below_bt | _first(rest_bt & (square_bt == edge), num_edge)


def m2po_bounds(
    log_ratio: Array, adv: Array, mask: Array, *,
    m2po_threshold: Numeric = 0.04, m2po_low: Numeric = 0.3, m2po_high: Numeric = 0.5,
) -> tuple[Array, Array]:
    """M2PO that clips (arXiv:2510.01161, the authors' code): clip_low and clip_high for a batch.

    Only tokens that PPO's clip can reach count: A > 0 with a ratio above 1, or A < 0 below 1. If
    the mean of their log_ratio^2 is at most the threshold nothing is clipped: bounds [0, inf].
    Otherwise tau solves mean(min(log_ratio^2, tau^2)) = threshold and the ratio is clipped to
    [exp(-tau), exp(tau)], but never more tightly than [1 - m2po_low, 1 + m2po_high].

    Args:
      log_ratio: [B, T] nats, logp - logp_old of the objective that clips.
      adv: [B, T] advantages.
      mask: [B, T] valid tokens.
      m2po_threshold: bound on the mean square, nats^2; 0.04 in the paper.
      m2po_low: smallest clip_low returned; 0.3 in the authors' code.
      m2po_high: smallest clip_high returned; 0.5 in the authors' code.

    Returns (clip_low, clip_high), scalars for `objectives.ppo_clip`, without gradient.
    """
    log_ratio_bt = ratios.detached_log_ratio(log_ratio, mask)
    adv_bt = jax.lax.stop_gradient(ratios.zero_padding(adv, mask))
    is_harmful_bt = log_ratio_bt * jnp.sign(adv_bt) > 0.0
    square_bt = ratios.zero_padding(jnp.square(log_ratio_bt), is_harmful_bt)
    target = m2po_threshold * ratios.masked_count(square_bt, is_harmful_bt)

    def as_float(bits):
        return jax.lax.bitcast_convert_type(bits, square_bt.dtype)

    limit = jax.lax.bitcast_convert_type(jnp.full_like(target, jnp.inf), _unsigned(target))

    def is_low(bits):  # from 0 to infinity, floats are in the order of their bits
        clipped_sum = jnp.sum(jnp.minimum(square_bt, as_float(bits)))
        return (bits <= limit) & (clipped_sum <= target)

    tau = jnp.sqrt(as_float(_largest(is_low, limit.dtype)))
    return jnp.maximum(-jnp.expm1(-tau), m2po_low), jnp.maximum(jnp.expm1(tau), m2po_high)


def covariance(logp: Array, adv: Array, mask: Array) -> Array:
    """(A - mean A) (log pi - mean log pi) of each token, [B, T]; means over the valid tokens.

    arXiv:2505.22617: the larger its mean over the batch, the faster the entropy falls.

    Args:
      logp: [B, T] log-probs of the policy that is trained, nats.
      adv: [B, T] advantages.
      mask: [B, T] valid tokens.

    Returns cov [B, T], 0 at padding, without gradient.
    """
    chex.assert_rank([logp, adv, mask], 2)
    chex.assert_equal_shape([logp, adv, mask])
    adv_bt, logp_bt = (ratios.zero_padding(x, mask) for x in (adv, logp))
    cov_bt = (adv_bt - ratios.masked_mean(adv_bt, mask)) * (
        logp_bt - ratios.masked_mean(logp_bt, mask)
    )
    return jax.lax.stop_gradient(ratios.zero_padding(cov_bt, mask))


@Traits(needs=("logp", "logp_old", "adv", "key"), at_update=True, ranks=True)
def clip_cov(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, logp: Array, logp_old: Array,
    adv: Array, key: PRNGKey, clip_low: Numeric = 0.2, clip_high: Numeric = 0.2,
    clip_cov_ratio: Numeric = 2e-4, clip_cov_lower: Numeric = 1.0, clip_cov_upper: Numeric = 5.0,
) -> Array:
    """Clip-cov (arXiv:2505.22617): all tokens but a few of high covariance, chosen at random.

    Candidates have lower < cov < upper (see `covariance`) and are not clipped by PPO already. Of
    them max(1, floor(ratio * number of valid tokens)) are chosen uniformly without replacement, or
    all if there are fewer. In the paper the loss of a chosen token is multiplied by 0 and stays in
    the denominator; the others have PPO's loss without a dual clip. The choice depends on the key and
    on the places of tokens in the arrays, so packed rows choose others than unpacked ones.

    Unit: batch. Trust region: none. Use: against entropy collapse, beside another objective than
    PPO (see the objective `clip_cov`); it corrects no gap.

    Args:
      log_ratio: not used.
      mask: [B, T] valid tokens.
      seg: not used.
      logp, logp_old: [B, T] log-probs of the trained policy and of the centre of PPO's band, nats.
      adv: [B, T] advantages.
      key: key of the choice, a new one for every step.
      clip_low, clip_high: widths of PPO's band; 0.2 each in verl, 1.0 each in the paper's recipe.
      clip_cov_ratio: share of the valid tokens that is chosen; 2e-4 in the paper and in verl.
      clip_cov_lower, clip_cov_upper: band of the covariance, exclusive; (1, 5) in the paper and in
        verl.
    """
    del log_ratio, seg
    cov_bt = covariance(logp, adv, mask)
    adv_bt = ratios.zero_padding(adv, mask)
    ratio_bt = ratios.bounded_exp(ratios.safe_log_ratio(logp, logp_old, mask))
    is_clipped_bt = ((adv_bt > 0.0) & (ratio_bt > 1.0 + clip_high)) | (
        (adv_bt < 0.0) & (ratio_bt < 1.0 - clip_low)
    )
    is_valid_bt = ratios.as_bool(mask)
    is_candidate_bt = is_valid_bt & ~is_clipped_bt
    is_candidate_bt &= (cov_bt > clip_cov_lower) & (cov_bt < clip_cov_upper)
    draw_bt = jax.random.bits(key, mask.shape, jnp.uint32)
    return is_valid_bt & ~_smallest(draw_bt, is_candidate_bt, _share(clip_cov_ratio, cov_bt, mask))


def kl_cov(logp: Array, adv: Array, mask: Array, *, kl_cov_ratio: Numeric = 2e-3) -> Array:
    """KL-cov (arXiv:2505.22617): True at the tokens of highest covariance, which get the penalty.

    Their loss is -r A + coeff |logp - logp_old| (with subgradient 0 at r = 1), that of the others
    -r A without a clip. They are not rejected, so this is no entry of `masks.MASKS`.

    Args:
      logp: [B, T] log-probs of the policy that is trained, nats.
      adv: [B, T] advantages.
      mask: [B, T] valid tokens.
      kl_cov_ratio: share of the valid tokens that is selected, at least one token; 2e-3 for the
        paper's 7B model, 2e-4 for its 32B model and in verl.

    Returns is_penalised [B, T], never outside the mask.
    """
    cov_bt = covariance(logp, adv, mask)
    count = _share(kl_cov_ratio, cov_bt, mask)
    return _smallest(sortable(-cov_bt), ratios.as_bool(mask), count)


@Traits(needs=("entropy",), ranks=True)
def top_entropy(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    entropy: Array, top_entropy_fraction: Numeric = 0.2,
) -> Array:
    """Tokens of highest entropy in the batch: the forks of a reasoning path (arXiv:2506.01939).

    The paper takes policy gradients of these tokens only. Known from its abstract alone: whether
    its denominator counts the other tokens is open.

    Unit: batch. Trust region: none. Use: training on the forks of a reasoning path alone; it
    corrects no gap.

    Args:
      log_ratio: not used.
      mask: [B, T] valid tokens.
      seg: not used.
      entropy: [B, T] nats, of the old policy at the token's position.
      top_entropy_fraction: share of the valid tokens that is kept, at least one token; 0.2 as in
        the paper.
    """
    del log_ratio, seg
    chex.assert_equal_shape([entropy, mask])
    entropy_bt = jax.lax.stop_gradient(ratios.zero_padding(entropy, mask))
    count = _share(top_entropy_fraction, entropy_bt, mask)
    return _smallest(sortable(-entropy_bt), ratios.as_bool(mask), count)


MASKS = {"m2po": m2po, "clip_cov": clip_cov, "top_entropy": top_entropy}
