"""Computes the rotary frequencies of every supported RoPE variant from the config, in numpy."""

import math

import numpy as np

from jaxrl_tis.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns the angular frequency of each rotated pair, and the scale of cos and sin.

    Position p turns the pair (i, i + head_dim/2) of queries and keys by p * inv_freq[i] radians;
    cos and sin are multiplied by `attention_scale`, so scores grow with its square.

    Args:
      rope: variant and its numbers.
      head_dim: size of one head, even.

    Returns:
      (inv_freq [head_dim/2] float32 in radians per token, attention_scale); computed in float64
      and rounded once.
    """
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        inv_freq, scale = base, 1.0
    elif rope.kind == "linear":
        inv_freq, scale = base / rope.factor, 1.0
    elif rope.kind == "llama3":
        inv_freq, scale = _llama3(base, rope), 1.0
    elif rope.kind == "yarn":
        inv_freq, scale = _yarn(base, rope, head_dim), _yarn_attention_scale(rope)
    else:
        raise ValueError(f"rope type {rope.kind!r} is not implemented.")
    return inv_freq.astype(np.float32), scale


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Returns Llama 3.1 frequencies: slow ones divided by `factor`, fast ones kept, linear between.

    The blend variable is the number of turns a pair makes over the trained context.
    """
    turns = rope.original_max_position * base / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * base + (1 - keep) * base / rope.factor


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns YaRN "by parts" (arXiv:2309.00071, section 3.2): as llama3, linear in the pair
    index."""
    low, high = (_yarn_pair_index(turns, rope, head_dim)
                 for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The published code widens an empty band by this much instead of dividing by zero.
    width = high - low if high != low else 0.001
    keep = 1 - np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return keep * base + (1 - keep) * base / rope.factor


def _yarn_pair_index(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """Returns the fractional index of the pair that makes `turns` turns over the trained
    context."""
    inv_freq = 2 * math.pi * turns / rope.original_max_position
    return -head_dim * math.log(inv_freq) / (2 * math.log(rope.theta))


def _yarn_attention_scale(rope: RopeConfig) -> float:
    """Returns the softmax temperature of YaRN, folded into cos and sin (arXiv:2309.00071, section
    3.4)."""
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
