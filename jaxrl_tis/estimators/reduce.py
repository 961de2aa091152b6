"""The reduction of a loss per token to one scalar; no other module does this.

The normaliser decides the relative weight of long and short responses, so every mode takes its
denominators as arguments. With the counts of the full batch, the sum over micro-batches equals the
value of the full batch. Without them the counts come from the given arrays.
"""

import chex
import jax.numpy as jnp
from chex import Array, Numeric

from jaxrl_tis.estimators import ratios, returns

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "prompt-mean",
)


def denominator(mode: str, num_tokens: Numeric, num_seqs: Numeric) -> Numeric:
    """Returns the count of the full batch that a mode divides the sum over all tokens by.
    ValueError for "prompt-mean", which divides the tokens of each prompt by another number."""
    if mode == "prompt-mean":
        raise ValueError("prompt-mean divides tokens by `prompt_divisor`, and not their sum.")
    if mode == "token-sum":
        return 1.0
    return num_tokens if mode == "token-mean" else num_seqs


def prompt_divisor(mask: Array, group: Array, seg: Array | None = None) -> Array:
    """The divisor of each token [B, T] in "prompt-mean": the valid tokens of its prompt times the
    number of prompts with a valid token. Padding has any number.

    Args:
      mask: [B, T] tokens that count.
      group: [B, T] int, equal for the samples of one prompt.
      seg: see `aggregate`.
    """
    ids = returns.group_ids(ratios.sequence_group(group, mask, seg).reshape(-1))
    count_bs = ratios.sequence_count(mask, mask, seg)
    count_n = returns.group_sum(count_bs.reshape(-1), ids)
    num_prompts = jnp.sum((ids == jnp.arange(len(ids))) & (count_n > 0))
    return num_prompts * ratios.to_tokens(count_n.reshape(count_bs.shape), seg, mask.shape[1])


def aggregate(
    loss_bt: Array, mask: Array, mode: str, *, num_tokens: Numeric | None = None,
    num_seqs: Numeric | None = None, seg: Array | None = None, scale: Numeric | None = None,
    group: Array | None = None, divisor: Array | None = None,
) -> Array:
    """Reduces a loss per token to a scalar under one of verl's five modes or "prompt-mean".

      token-mean               sum_bt l / num_tokens
      token-sum                sum_bt l
      seq-mean-token-sum       sum_s (sum_t l) / num_seqs
      seq-mean-token-sum-norm  the previous / scale, the form of Dr. GRPO (arXiv:2503.20783)
      seq-mean-token-mean      sum_s (mean_t l) / num_seqs, the form of GRPO (arXiv:2402.03300)
      prompt-mean              mean over prompts of the mean over all their tokens, that of ScaleRL
                               (arXiv:2510.13786) and SkyRL

    Args:
      loss_bt: [B, T] loss per token; its entries outside the mask are ignored, NaN included.
      mask: [B, T] tokens that count.
      mode: one of `MODES`.
      num_tokens: valid tokens of the full batch; None counts those in `mask`.
      num_seqs: sequences of the full batch; None counts those with a valid token.
      seg: [B, T] sequence ids of packed rows, or None for one sequence per row. A sequence must lie
        in one row.
      scale: divisor of "seq-mean-token-sum-norm"; None is the row width T, which packed rows do not
        know.
      group: [B, T] int, equal for the samples of one prompt; for "prompt-mean".
      divisor: [B, T] `prompt_divisor` of the full batch; None computes it from `mask` and `group`.

    Returns a scalar, 0 for an empty mask. The gradient reaches loss_bt at valid tokens only.
    """
    if mode not in MODES:
        raise ValueError(f"Unknown aggregation mode {mode!r}; choose one of {', '.join(MODES)}.")
    chex.assert_rank([loss_bt, mask], 2)
    chex.assert_equal_shape([loss_bt, mask])
    if mode == "token-sum":
        return ratios.masked_sum(loss_bt, mask)
    if mode == "token-mean":
        if num_tokens is None:
            num_tokens = ratios.masked_count(loss_bt, mask)
        return ratios.safe_divide(ratios.masked_sum(loss_bt, mask), num_tokens)
    if mode == "prompt-mean":
        if divisor is None and group is None:
            raise ValueError("prompt-mean needs group, the prompt of each token.")
        divisor = prompt_divisor(mask, group, seg) if divisor is None else divisor
        loss_bt = ratios.zero_padding(loss_bt, mask)
        return jnp.sum(ratios.safe_divide(loss_bt, divisor))

    if num_seqs is None:
        num_seqs = jnp.sum(ratios.sequence_count(loss_bt, mask, seg) > 0)
    if mode == "seq-mean-token-mean":
        return ratios.safe_divide(jnp.sum(ratios.sequence_mean(loss_bt, mask, seg)), num_seqs)
    seq_mean = ratios.safe_divide(ratios.masked_sum(loss_bt, mask), num_seqs)
    if mode == "seq-mean-token-sum":
        return seq_mean
    if scale is None:
        if seg is not None:
            raise ValueError(f"{mode} of packed rows needs scale, the width of an unpacked row.")
        scale = loss_bt.shape[1]
    return seq_mean / scale
