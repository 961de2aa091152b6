"""Rejection masks: the kept tokens of a rollout batch, from log_ratio = logp_old - logp_behav.

Each entry of `MASKS` maps (log_ratio, mask, seg=None, **parameters), and the keyword arguments of
its traits, to booleans [B, T]: True where a token is kept, never outside the mask. Multiplied with the
mask, the result removes rejected tokens from the denominators too; multiplied with the loss, it keeps
them there. Every criterion gets the mask as sampled. The entries of `rank_masks` need the whole batch.

Gradient: none; masks are detached.

Eleven entries are verl's rejection sampling (its `rollout_rs`; no paper): a level and an estimator.
With l = log_ratio clamped to +-20 token by token,

  k1 = -l                keep if log(lower) <= statistic <= log(upper)
  k2 = l^2 / 2           keep if statistic <= upper
  k3 = exp(l) - 1 - l    keep if statistic <= upper

The statistic is the token's, or the sum, mean or maximum over the valid tokens of the sequence. A
sequence is then kept or dropped as a whole. All bounds are inclusive. k1 is minus the log-ratio, so
its band is on the INVERSE ratio mu / pi_old; lower = 1 / upper hides that. The entries `*_ratio` have
the band on the ratio itself. They keep the tokens that the weights with the same band (`token_mis`,
`seq_mis`, `geo_mis`) do not set to zero.

Args of every entry:
  log_ratio: [B, T] nats, logp_old - logp_behav; values at padding are ignored.
  mask: [B, T] valid tokens.
  seg: [B, T] sequence ids of packed rows, or None; not used where tokens are independent.
  upper, lower: ends of the band, upper without default, as in verl. In a k1 entry lower=None is
    1 / upper, as a single number is in verl.
"""

import math
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import binary_masks, entries, rank_masks, ratios, traits, weights
from jaxrl_tis.estimators.traits import Traits


def statistic(name: str, log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """The statistic of one of the eleven entries, [B, T]; a sequence's is on all its tokens.

    Args:
      name: level and estimator, e.g. "seq_mean_k2"; see the module.
      log_ratio, mask, seg: see the module.
    """
    level, _, estimator = name.rpartition("_")
    l_bt = ratios.detached_log_ratio(log_ratio, mask)
    estimates = {"k1": -l_bt, "k2": 0.5 * jnp.square(l_bt), "k3": jnp.expm1(l_bt) - l_bt}
    x_bt = estimates[estimator]
    if level != "token":
        x_bs = sequence_statistic(name, log_ratio, mask, seg)
        x_bt = ratios.to_tokens(x_bs, seg, mask.shape[1])
    return ratios.zero_padding(x_bt, mask)


def sequence_statistic(name: str, log_ratio: Array, mask: Array, seg: Array | None = None) -> Array:
    """`statistic` of each sequence, [B, S]; the name begins with "seq_"."""
    _, reduction, estimator = name.split("_")
    stats = ratios.log_ratio_stats(log_ratio, mask, seg)
    if reduction == "mean":
        return ratios.safe_divide(getattr(stats, f"{estimator}_sum"), stats.count)
    return getattr(stats, f"{estimator}_{reduction}")


def _at_most(
    name: str, log_ratio: Array, mask: Array, seg: Array | None = None, *, upper: Numeric
) -> Array:
    return ratios.as_bool(mask) & (statistic(name, log_ratio, mask, seg) <= upper)


def _inside_k1(
    name: str, log_ratio: Array, mask: Array, seg: Array | None = None, *,
    upper: Numeric, lower: Numeric | None = None,
) -> Array:
    k1_bt = statistic(name, log_ratio, mask, seg)
    log_upper = ratios.log_bound(upper)
    log_lower = -log_upper if lower is None else ratios.log_bound(lower)
    return ratios.as_bool(mask) & (k1_bt >= log_lower) & (k1_bt <= log_upper)


def _inside_ratio(
    name: str, log_ratio: Array, mask: Array, seg: Array | None = None, *,
    upper: Numeric, lower: Numeric = 0.0,
) -> Array:
    level = {"token_ratio": "token", "seq_sum_ratio": "seq", "seq_mean_ratio": "geo"}[name]
    log_w_bt = weights.log_raw(level, log_ratio, mask, seg)
    return ratios.as_bool(mask) & ratios.is_inside(log_w_bt, lower, upper)


# The last part of a name: which tokens it keeps.
ESTIMATORS = {"k1": _inside_k1, "k2": _at_most, "k3": _at_most, "ratio": _inside_ratio}


def _mask(name: str, what: str, region: str, use: str):
    """The entry of a level and an estimator, see `entries.entry`."""
    function = ESTIMATORS[name.rpartition("_")[2]]
    own = Traits(example={"upper": 2.0}, centering="ratio" if name.startswith("token") else "")
    return entries.entry(function, name, name, what, region, use, own)


def _whole_sequences(is_good, mask, seg):
    """Valid tokens [B, T] of the sequences in which every valid token is good."""
    is_bad_bt = (~is_good).astype(jnp.float32)
    num_bad_bs = ratios.sequence_sum(is_bad_bt, mask, seg)
    return ratios.as_bool(mask) & (ratios.to_tokens(num_bad_bs, seg, mask.shape[1]) == 0.0)


token_k1 = _mask(
    "token_k1", "Tokens by verl's band on the inverse ratio.", "lower <= mu / pi_old <= upper",
    "bounds copied from a verl config; `token_ratio` needs no inversion",
)
seq_sum_k1 = _mask(
    "seq_sum_k1", "Sequences by verl's band on the inverse ratio.",
    "lower <= prod_t mu / pi_old <= upper",
    "short responses in verl's terms; long responses are lost first",
)
seq_mean_k1 = _mask(
    "seq_mean_k1", "Sequences by verl's band on the geometric mean of the inverse ratio.",
    "lower <= geometric mean of mu / pi_old <= upper",
    "outliers of any length (verl's geo_rs presets); one bad token hides in a long mean: add "
    "`veto`",
)
token_k2 = _mask(
    "token_k2", "Tokens by k2 (verl).", "k2 <= upper",
    "against outlying tokens, both ways",
)
seq_sum_k2 = _mask(
    "seq_sum_k2", "Sequences by the sum of k2 (verl).", "sum_t k2 <= upper",
    "a budget per response; long responses are lost first",
)
seq_mean_k2 = _mask(
    "seq_mean_k2", "Sequences by the mean of k2 (verl).", "mean_t k2 <= upper",
    "`seq_mean_k1` without cancelling of signs",
)
seq_max_k2 = _mask(
    "seq_max_k2", "Sequences by their worst token's k2 (verl).", "max_t k2 <= upper",
    "against responses that one bad token would spoil; long ones are likelier to have one",
)
token_k3 = _mask(
    "token_k3", "Tokens by k3 (verl).", "k3 <= upper",
    "`token_k2`, stricter where rho > 1",
)
seq_sum_k3 = _mask(
    "seq_sum_k3",
    "Sequences by the sum of k3 (verl), whose mean under mu is their KL(mu || pi_old).",
    "sum_t k3 <= upper",
    "a KL budget per response; long responses are lost first",
)
seq_mean_k3 = _mask(
    "seq_mean_k3", "Sequences by the mean of k3 (verl; 0.01 in its presets).", "mean_t k3 <= upper",
    "KL per token at any length (verl's k3_rs presets); as `seq_mean_k1`",
)
seq_max_k3 = _mask(
    "seq_max_k3", "Sequences by their worst token's k3 (verl).", "max_t k3 <= upper",
    "`seq_max_k2`, stricter where rho > 1",
)
token_ratio = _mask(
    "token_ratio", "`token_k1` with the band on the ratio itself. Source as `token_k1`.",
    "lower <= pi_old / mu <= upper",
    "what `token_mis` keeps, beside any weight",
)
seq_sum_ratio = _mask(
    "seq_sum_ratio",
    "`seq_sum_k1` on the ratio, the sum of logs clamped, not each. Source as `seq_sum_k1`.",
    "lower <= prod_t pi_old / mu <= upper",
    "what `seq_mis` keeps, for short responses; long ones are lost first",
)
seq_mean_ratio = _mask(
    "seq_mean_ratio", "`seq_mean_k1` with the band on the ratio itself. Source as `seq_mean_k1`.",
    "lower <= geometric mean of pi_old / mu <= upper",
    "what `geo_mis` keeps, at any length; as `seq_mean_k1`",
)


@Traits(needs=("logp_behav",), centering="ratio", example={"upper": 0.5})
def token_dp(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, logp_behav: Array, upper: Numeric
) -> Array:
    """Tokens by the difference of their probabilities, prime-rl's band; no paper.

    Unit: token. Trust region: |pi_old - mu| <= upper, at most 1. Use: the centre behav beside
    `token_vanilla`, as in prime-rl; rare tokens pass at any ratio, and likely ones are dropped at a
    ratio near 1.

    Args:
      log_ratio, mask, seg: see the module.
      logp_behav: [B, T] log-probs of the sampler, nats.
      upper: largest difference kept, inclusive; required. prime-rl's default is 0.3, before 0.1.
    """
    del seg
    behav_bt = jax.lax.stop_gradient(ratios.zero_padding(logp_behav, mask))
    dp_bt = jnp.exp(ratios.learner_logp(log_ratio, logp_behav, mask)) - jnp.exp(behav_bt)
    return ratios.as_bool(mask) & (jnp.abs(dp_bt) <= upper)


def veto(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    veto_ratio: Numeric = 1e-4, veto_upper: Numeric = math.inf,
) -> Array:
    """Sequences without a catastrophic token (slime; no paper).

    Unit: sequence. Trust region: veto_ratio <= rho_t <= veto_upper at every token. Use: against
    responses with a token that the learner (with veto_upper the sampler) all but excludes, beside
    another mask; smaller gaps pass.

    Args:
      log_ratio, mask, seg: see the module.
      veto_ratio: smallest ratio that is tolerated, inclusive; 1e-4 is slime's example.
      veto_upper: largest one; without a bound, as in slime. SkyRL's outlier mask has 100.
    """
    l_bt = ratios.detached_log_ratio(log_ratio, mask)
    return _whole_sequences(ratios.is_inside(l_bt, veto_ratio, veto_upper), mask, seg)


def seq_logprob_error(
    log_ratio: Array, mask: Array, seg: Array | None = None, *, upper: Numeric = 2.0
) -> Array:
    """Sequences by the mean factor between both probabilities (NeMo-RL's
    seq_logprob_error_threshold; no paper).

    Unit: sequence. Trust region: mean_t exp(|log rho_t|) <= upper, at least 1; all rho_t finite.
    Use: against responses whose record is broken, at any length; as `seq_mean_k1`, without
    cancelling of signs.

    Args:
      log_ratio, mask, seg: see the module.
      upper: largest mean kept, inclusive; 2.0 as in NeMo-RL's recipes.
    """
    factor_bt = jnp.exp(jnp.abs(ratios.detached_log_ratio(log_ratio, mask)))
    mean_bs = ratios.sequence_mean(factor_bt, mask, seg)
    return ratios.as_bool(mask) & (ratios.to_tokens(mean_bs, seg, mask.shape[1]) <= upper)


@Traits(needs=("logits_behav", "logits"), at_update=True, example={"trm_delta": 0.5})
def trm(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    logits_behav: Array, logits: Array, trm_delta: Numeric,
) -> Array:
    """Trust-region masking (arXiv:2512.23075), over the whole vocabulary.

    The paper divides by the number of all sequences, dropped ones too. Taken from secondary notes.

    Unit: sequence. Trust region: max_t KL(mu || pi) <= trm_delta. Use: long responses that one bad
    token would spoil; it costs both sides' logits.

    Args:
      log_ratio, mask, seg: see the module; log_ratio is not used.
      logits_behav: [B, T, V] the sampler's logits for the token's position, at the temperature (and
        filters) it sampled with; -inf where it could not sample.
      logits: [B, T, V] the learner's logits, at the same temperature.
      trm_delta: largest divergence of a token, nats, inclusive; 1e-4 is the notes' example.
    """
    del log_ratio
    chex.assert_equal_shape([logits_behav, logits])
    chex.assert_equal_shape_prefix([logits, mask], 2)
    behav_btv = jax.nn.log_softmax(jax.lax.stop_gradient(ratios.as_float(logits_behav)))
    learner_btv = jax.nn.log_softmax(jax.lax.stop_gradient(ratios.as_float(logits)))
    is_possible_btv = behav_btv > -jnp.inf
    gap_btv = jnp.where(is_possible_btv, behav_btv - learner_btv, 0.0)
    kl_bt = jnp.sum(jnp.exp(behav_btv) * gap_btv, axis=-1)
    return _whole_sequences(kl_bt <= trm_delta, mask, seg)


@Traits(at_update=True, example={"trm_delta": 0.5})
def trm_k3(log_ratio: Array, mask: Array, seg: Array | None = None, *, trm_delta: Numeric) -> Array:
    """`trm` from sampled tokens alone (arXiv:2512.23075): k3 has the mean KL(mu || pi) under mu.

    Unit: sequence. Trust region: max_t k3 <= trm_delta. Use: `trm` without logits; one sample per
    token is a noisy KL.
    """
    return seq_max_k3(log_ratio, mask, seg, upper=trm_delta)


@Traits(needs=("logp", "logp_behav", "adv"), at_update=True, example={"opsm_delta": 0.1})
def opsm(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    logp: Array, logp_behav: Array, adv: Array, opsm_delta: Numeric,
) -> Array:
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556 eqs 8-9).

    A run judges it at every update, so that staleness counts too. The paper keeps dropped tokens in
    the denominator.

    Unit: sequence (gap), token (sign of A). Trust region: mean_t log(mu / pi) <= opsm_delta where A
    < 0. Use: against bad responses unlike the learner's, beside a clipped loss; good ones always
    pass.

    Args:
      log_ratio, mask, seg: see the module; log_ratio is not used.
      logp: [B, T] log-probs of the policy that is trained, nats.
      logp_behav: [B, T] log-probs of the sampler, nats.
      adv: [B, T] advantages; the sign is read token by token.
      opsm_delta: largest mean, nats, inclusive; required. The paper gives none, and examples differ
        by a factor of 5000 (0.5 in TRL, 1e-4 in slime).
    """
    del log_ratio
    gap_bt = ratios.safe_log_ratio(logp_behav, logp, mask)
    gap_bt = ratios.to_tokens(ratios.sequence_mean(gap_bt, mask, seg), seg, mask.shape[1])
    is_negative_bt = ratios.zero_padding(adv, mask) < 0.0
    return ratios.as_bool(mask) & (~is_negative_bt | (gap_bt <= opsm_delta))


@Traits(needs=("version", "current_version"), of_versions=True, example={"staleness_max": 1})
def staleness(
    log_ratio: Array, mask: Array, seg: Array | None = None, *,
    version: Array, current_version: Numeric, staleness_max: Numeric,
) -> Array:
    """Sequences by the age of their oldest token, the filter of asynchronous trainers; no paper.

    Unit: sequence. Trust region: current_version - version <= staleness_max at every token. Use:
    asynchronous training, beside a correction of the remaining lag; dropped samples are wasted.

    Args:
      log_ratio, mask, seg: see the module; log_ratio is not used.
      version: [B, T] int, weight version that sampled each token.
      current_version: int, the learner's version.
      staleness_max: largest difference kept, inclusive; required. AReaL takes 4 for code and 8 for
        mathematics, prime-rl 8, TRL 4.
    """
    del log_ratio
    return _whole_sequences(current_version - version <= staleness_max, mask, seg)


def all_of(
    criteria: Sequence[tuple[str, dict]], log_ratio: Array, mask: Array, seg: Array | None = None,
    **fields: Array,
) -> tuple[Array, list[Array]]:
    """Returns (tokens that all criteria keep, list of the tokens that each keeps), [B, T] each. Every
    criterion gets the mask as sampled.

    Args:
      criteria: (name in `MASKS`, its parameters) each; none of them keeps the whole mask.
      log_ratio, mask, seg: see the module.
      fields: the fields that the criteria need by their traits; more may be given.
    """
    is_accepted_bt, kept = ratios.as_bool(mask), []
    for name, parameters in criteria:
        if name not in MASKS:
            raise ValueError(f"Unknown mask {name!r}; choose one of {', '.join(MASKS)}.")
        needed = {}
        for field in traits.of(MASKS[name]).needs:
            if field not in fields:
                raise KeyError(f"{name} needs the field {field!r}; given are {sorted(fields)}.")
            needed[field] = fields[field]
        kept.append(MASKS[name](log_ratio, mask, seg, **needed, **parameters))
        is_accepted_bt &= kept[-1]
    return is_accepted_bt, kept


MASKS = {
    "token_k1": token_k1,
    "token_k2": token_k2,
    "token_k3": token_k3,
    "seq_sum_k1": seq_sum_k1,
    "seq_sum_k2": seq_sum_k2,
    "seq_sum_k3": seq_sum_k3,
    "seq_mean_k1": seq_mean_k1,
    "seq_mean_k2": seq_mean_k2,
    "seq_mean_k3": seq_mean_k3,
    "seq_max_k2": seq_max_k2,
    "seq_max_k3": seq_max_k3,
    "token_ratio": token_ratio,
    "token_dp": token_dp,
    "seq_sum_ratio": seq_sum_ratio,
    "seq_mean_ratio": seq_mean_ratio,
    "veto": veto,
    "seq_logprob_error": seq_logprob_error,
    "trm": trm,
    "trm_k3": trm_k3,
    "opsm": opsm,
    "staleness": staleness,
    **binary_masks.MASKS,
    **rank_masks.MASKS,
}
