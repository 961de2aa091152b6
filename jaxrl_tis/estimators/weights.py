"""Importance weights between the learner and the sampler, from log_ratio = logp_old - logp_behav.

Each entry of `WEIGHTS` maps (log_ratio, mask, seg=None, **parameters) to w [B, T], the factor of a
per-token loss, 0 at padding. Weights belong to a rollout batch: compute them once, and keep them
during the learner's steps.

Gradient: none; weights are detached.

With rho_t = pi_old(y_t) / mu(y_t), the first part of a name is the level of the ratio,

  token   rho_t; the log-ratio is clamped to +-20
  seq     prod_t rho_t, on every token of the sequence; the sum of log-ratios is clamped
  geo     exp(mean_t log rho_t), on every token of the sequence; the mean is clamped
  turn    the product (turn_tis) or the geometric mean (turn_geo) within a turn of a conversation
  prefix  the tokens up to t, see `prefix_weights`

and the second is the bound: vanilla has none, tis truncates from above, clip bounds on both sides,
mis and icepop set the ratio to 0 outside a closed band. A rejected token has weight 0 and stays in the
denominator of the loss; rejection that changes the mask is in `masks`. The same entries weigh the
factor staleness, from logp_prox - logp_old, and the policy's drift, see `loss`.

Args of every entry:
  log_ratio: [B, T] nats, logp_old - logp_behav; values at padding are ignored.
  mask: [B, T] valid tokens.
  seg: [B, T] sequence ids of packed rows, or None; not used where tokens are independent.

Every entry returns w [B, T]. The further keyword arguments of an entry are in its traits.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import entries, prefix_weights, ratios
from jaxrl_tis.estimators.traits import Traits


def raw_token(log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """Untruncated token ratios exp(clamp(log_ratio, +-20)), 0 at padding, without gradient."""
    del seg
    return ratios.zero_padding(jnp.exp(ratios.detached_log_ratio(log_ratio, mask)), mask)


def raw_seq(log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """Untruncated sequence ratios exp(clamp(sum_t log_ratio, +-20)) on every valid token."""
    return _on_tokens(sequence_log_ratio("seq", log_ratio, mask, seg), mask, seg)


def raw_geo(log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """Untruncated geometric means exp(clamp(mean_t log_ratio, +-20)) on every valid token."""
    return _on_tokens(sequence_log_ratio("geo", log_ratio, mask, seg), mask, seg)


def sequence_log_ratio(
    level: str, log_ratio: Array, mask: Array, seg: Array | None = None
) -> Array:
    """Logarithm of the raw weight of each sequence at level "seq" or "geo", not clamped, [B, S]."""
    stats = ratios.log_ratio_stats(log_ratio, mask, seg)
    if level == "seq":
        return stats.log_ratio_sum
    return ratios.safe_divide(stats.log_ratio_sum, stats.count)


def _on_tokens(log_w_bs, mask, seg):
    """exp(clamp(log_w, +-20)) of each sequence on its valid tokens, 0 elsewhere, no gradient."""
    chex.assert_rank(mask, 2)
    w_bt = ratios.to_tokens(ratios.bounded_exp(log_w_bs), seg, mask.shape[1])
    return jax.lax.stop_gradient(ratios.zero_padding(w_bt, mask))


RAW = {"token": raw_token, "seq": raw_seq, "geo": raw_geo}


def log_raw(level: str, log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """Logarithm of the raw weight of each token, clamped to +-20, without gradient, [B, T]; values at
    padding have no meaning.

    Args:
      level: a key of `RAW`.
      log_ratio, mask, seg: see the module.
    """
    if level == "token":
        return ratios.detached_log_ratio(log_ratio, mask)
    log_w_bs = ratios.clamp(
        sequence_log_ratio(level, log_ratio, mask, seg), -ratios.LOG_BOUND, ratios.LOG_BOUND
    )
    return jax.lax.stop_gradient(ratios.to_tokens(log_w_bs, seg, mask.shape[1]))


@Traits(centering="ratio")
def none(log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """No correction: weight 1 on every valid token; no paper.

    Unit: token. Trust region: w = 1. Use: engines that agree, the centre behav, and objectives with a
    weight of their own; a gap stays as bias.
    """
    del seg
    chex.assert_equal_shape([log_ratio, mask])
    return ratios.as_bool(mask).astype(ratios.as_float(log_ratio).dtype)


@Traits(centering="ratio")
def token_vanilla(log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """Vanilla importance sampling, w_t = rho_t; the limit of `token_tis` for an infinite cap.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    Unit: token. Trust region: none but |log rho| <= 20. Use: a comparison with truncation; one
    large ratio dominates, and the authors report near 0 accuracy with INT8 rollouts.
    """
    return raw_token(log_ratio, mask, seg)


@Traits(level="seq")
def seq_vanilla(log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """Vanilla importance sampling of sequences, w = prod_t rho_t. Liu et al. 2025, "When Speed Kills
    Stability".

    Unit: sequence. Trust region: none but |log w| <= 20. Use: short responses, as the unbiased
    reference; variance grows exponentially with the length.
    """
    return raw_seq(log_ratio, mask, seg)


def _tis(
    level: str, log_ratio: Array, mask: Array, seg: Array | None = None, *, cap: Numeric
) -> Array:
    return jnp.minimum(RAW[level](log_ratio, mask, seg), cap)


def _clip(
    level: str, log_ratio: Array, mask: Array, seg: Array | None = None, *,
    lower: Numeric, upper: Numeric,
) -> Array:
    raw_bt = RAW[level](log_ratio, mask, seg)
    return ratios.zero_padding(ratios.clamp(raw_bt, lower, upper), mask)


def _inside(
    level: str, log_ratio: Array, mask: Array, seg: Array | None = None, *,
    lower: Numeric, upper: Numeric,
) -> Array:
    raw_bt = RAW[level](log_ratio, mask, seg)
    is_inside_bt = ratios.is_inside(log_raw(level, log_ratio, mask, seg), lower, upper)
    return jnp.where(is_inside_bt, raw_bt, 0.0)


# The second part of a name: what becomes of the raw weight, and the trust region.
SHAPES: dict[str, tuple[Callable, str]] = {
    "tis": (_tis, "w <= cap"),
    "clip": (_clip, "lower <= w <= upper"),
    "mis": (_inside, "w = 0 outside [lower, upper]"),
    "icepop": (_inside, "w = 0 outside [lower, upper]"),
}


def _weight(name: str, defaults: dict[str, float], what: str, use: str, bounds: str = ""):
    """The entry of a level and a shape, see `entries.entry`."""
    level, _, shape = name.partition("_")
    function, region = SHAPES[shape]
    own = Traits(level=level, centering="ratio" if level == "token" else "")
    return entries.entry(function, level, name, what, region, use, own, bounds, **defaults)


token_tis = _weight(
    "token_tis", {"cap": 2.0},
    "Token truncated importance sampling, w_t = min(rho_t, cap). Truncated weights are from "
    'Ionides 2008, for the sampler-learner gap from Yao et al. 2025, "Your Efficient RL Framework '
    'Secretly Brings You Off-Policy RL Training". A cap below 1 would truncate on-policy tokens.',
    "first choice for an engine gap, ahead in small batches at 256 and 1,024 tokens "
    "(docs/oracle.md); biased at every cap",
    "cap: upper bound of a weight; 2.0 is verl's default.",
)
seq_tis = _weight(
    "seq_tis", {"cap": 2.0},
    "Sequence truncated importance sampling, w = min(prod_t rho_t, cap). Liu et al. 2025, "
    '"When Speed Kills Stability"; truncation as `token_tis`.',
    "short responses, where the bias vanishes as the cap grows (docs/oracle.md); over hundreds of "
    "tokens products sit at the cap or near 0, and the ESS collapses",
    "cap: upper bound of a weight; 2.0 is verl's default.",
)
geo_tis = _weight(
    "geo_tis", {"cap": 2.0},
    "Truncated geometric mean, w = min(exp(mean_t log rho_t), cap), as ms-swift offers it; no paper.",
    "a weight of any length; over hundreds of tokens it is near 1 and corrects next to nothing "
    "(docs/oracle.md)",
    "cap: upper bound of a weight; 2.0 is ms-swift's default (its \"sequence_truncate\").",
)
token_clip = _weight(
    "token_clip", {"lower": 0.5, "upper": 2.0},
    "Token ratio clipped on both sides, w_t = clip(rho_t, lower, upper), as AReaL, slime, OpenRLHF "
    "and NeMo-RL offer it; no paper.",
    "`token_tis` with a floor, so that every token teaches; the floor biases, by Yao et al. "
    "towards entropy collapse",
    "lower: smallest weight; 0.5 is slime's example, no floor (0.0) its core's default. upper: "
    "largest weight; 2.0 is slime's example, 5.0 OpenRLHF's default.",
)
seq_clip = _weight(
    "seq_clip", {"lower": 0.5, "upper": 2.0},
    "Sequence ratio clipped on both sides, w = clip(prod_t rho_t, lower, upper). Source as "
    "`token_clip`, and so are the defaults.",
    "`seq_tis` with a floor; over hundreds of tokens most weights sit at an end",
)
token_mis = _weight(
    "token_mis", {"lower": 0.0, "upper": 2.0},
    "Token masked importance sampling, w_t = rho_t 1[lower <= rho_t <= upper]. Liu et al. 2025, "
    '"When Speed Kills Stability", whose band has an upper end only.',
    "a severe gap, whose largest ratios are artefacts; what it drops is bias",
    "lower: smallest ratio kept, inclusive; none as in the source, 0.5 in slime's example. upper: "
    "largest ratio kept, inclusive; 2.0 is slime's example.",
)
seq_mis = _weight(
    "seq_mis", {"lower": 0.0, "upper": 3.0},
    "Sequence masked importance sampling, w = p 1[lower <= p <= upper] with p = prod_t rho_t. "
    "Source as `token_mis`.",
    "whole responses that went astray (TRL's default correction); long responses are lost first",
    "lower: smallest ratio kept, inclusive; none as in the source and in TRL. upper: largest ratio "
    "kept, inclusive; 3.0 is TRL's default.",
)
geo_mis = _weight(
    "geo_mis", {"lower": 0.9999, "upper": 1.0001},
    "Geometric masked importance sampling, w = g 1[lower <= g <= upper], g = exp(mean log rho). "
    "Source as `token_mis`; this level is slime's, whose band has both ends: a mean over hundreds "
    "of tokens is close to 1, and so are its bounds.",
    "`seq_mis` for any length; the default band is tight, so watch how much it drops",
    "lower, upper: smallest and largest mean kept, inclusive; about 0.9999 and 1.0001 in slime's "
    "example.",
)
token_icepop = _weight(
    "token_icepop", {"lower": 0.5, "upper": 5.0},
    "IcePop, w_t = rho_t if lower <= rho_t <= upper, else 0 (arXiv:2510.18855).",
    "models with experts, where other routes give extreme ratios; where it masks over 10-25 %, a "
    "survey advises to repair the engine",
    "lower, upper: alpha and beta of the paper, inclusive, 0.5 and 5.0 there.",
)
seq_icepop = _weight(
    "seq_icepop", {"lower": 0.5, "upper": 5.0},
    "IcePop's band on the sequence ratio, as verl's sequence level offers it. Bounds as "
    "`token_icepop` (arXiv:2510.18855, which is token level).",
    "short responses; over hundreds of tokens products leave the band",
)


@Traits(is_bounded_ratio=False)
def seq_mask_tis(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    lower: Numeric = 0.999, upper: Numeric = 1.002,
) -> Array:
    """Sequences chosen by their geometric mean, each kept token with its own rho_t, not truncated.

    "seq-mask-tis" of NeMo-RL and OpenRLHF; no paper.

    Unit: sequence (choice), token (weight). Trust region: w = 0 where the geometric mean is outside
    [lower, upper]. Use: to drop responses whose mean drifts and weigh the rest by token; kept
    ratios have no cap.

    Args:
      log_ratio, mask, seg: see the module.
      lower: smallest geometric mean kept, inclusive; 0.999 is the default of both.
      upper: largest geometric mean kept, inclusive; 1.002 is the default of both.
    """
    is_accepted_bt = ratios.is_inside(log_raw("geo", log_ratio, mask, seg), lower, upper)
    return jnp.where(is_accepted_bt, raw_token(log_ratio, mask, seg), 0.0)


def batch_normalize(
    w: Array, mask: Array, level: str, seg: Array | None = None
) -> tuple[Array, Array]:
    """Divides the weights by their batch mean, as verl does after truncation.

    The whole rollout batch must be in the call: a mean over a micro-batch is another estimator.

    Args:
      w: [B, T] weights.
      mask: [B, T] valid tokens.
      level: "token" averages over valid tokens, "seq" and "geo" over sequences, each counted once
        whatever its length.
      seg: [B, T] sequence ids of packed rows, or None.

    Returns (w / factor [B, T], factor), without gradient; where the mean is at most 1e-8 the
    weights stay as they are and the factor is 1.
    """
    if level not in RAW:
        raise ValueError(f"Unknown weight level {level!r}; choose one of {sorted(RAW)}.")
    w = ratios.zero_padding(w, mask)
    if level == "token":
        mean = ratios.masked_mean(w, mask)
    else:
        is_sequence_bs = ratios.sequence_count(w, mask, seg) > 0
        mean = ratios.masked_mean(ratios.sequence_mean(w, mask, seg), is_sequence_bs)
    factor = jax.lax.stop_gradient(jnp.where(mean > 1e-8, mean, 1.0))
    return jax.lax.stop_gradient(w) / factor, factor


WEIGHTS = {
    "none": none,
    "token_vanilla": token_vanilla,
    "seq_vanilla": seq_vanilla,
    "token_tis": token_tis,
    "seq_tis": seq_tis,
    "geo_tis": geo_tis,
    "token_clip": token_clip,
    "seq_clip": seq_clip,
    "token_mis": token_mis,
    "seq_mis": seq_mis,
    "geo_mis": geo_mis,
    "token_icepop": token_icepop,
    "seq_icepop": seq_icepop,
    "seq_mask_tis": seq_mask_tis,
    **prefix_weights.WEIGHTS,
}

# The usual bounds of a weight, at the values where they do nothing. Others are in its traits.
UNBOUNDED = {"cap": jnp.inf, "lower": 0.0, "upper": jnp.inf}
