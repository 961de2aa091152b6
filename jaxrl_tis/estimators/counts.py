"""Counts of the tokens that weights and masks judged, changed and dropped. They show in the record
whether a correction does nothing or far too much.

Counts are integers named correction/<...>. The counts of micro-batches add up to the batch's. No count
needs sequences, so packed rows need no special treatment.
"""

import jax.numpy as jnp
from chex import Array

from jaxrl_tis.estimators import ratios

PREFIX = "correction/"
ROUNDING = 1e-5  # relative; two computations of one weight differ by less


def is_count(name: str) -> bool:
    """Whether a metric is a count, which is summed over parts of a batch."""
    return name.startswith(PREFIX)


def _count(is_so_bt: Array, mask: Array) -> Array:
    return jnp.sum(ratios.as_bool(mask) & is_so_bt)


def is_bounded(w: Array, raw: Array) -> Array:
    """Whether a bound changed a weight, from the weights [B,T] with and without their bounds."""
    return jnp.abs(w - raw) > ROUNDING * raw


def of_weight(w: Array, raw: Array, mask: Array, of: str = "weight") -> dict[str, Array]:
    """Counts of a weight.

    Args:
      w: [B,T] the weights as they are used, before any division by their mean.
      raw: [B,T] what they were before any cap, band or floor.
      mask: [B,T] valid tokens.
      of: "weight" or "staleness_weight".

    Returns correction/<of>/<count>: `num_tokens` valid tokens, of which `changed_raw` have a raw
    weight other than 1, `changed` a weight other than 1; `dropped` have weight 0, and `truncated`
    another weight than the raw one, but not 0. Other is what differs by more than ROUNDING.
    """
    is_dropped_bt = w == 0
    is_other = lambda x, than: jnp.abs(x - than) > ROUNDING * than
    indicators = {
        "num_tokens": jnp.ones_like(is_dropped_bt), "changed_raw": is_other(raw, 1.0),
        "changed": is_other(w, 1.0), "truncated": is_other(w, raw) & ~is_dropped_bt,
        "dropped": is_dropped_bt,
    }
    return {f"{PREFIX}{of}/{name}": _count(is_so, mask) for name, is_so in indicators.items()}


def labels(names: list[str]) -> list[str]:
    """Returns a label per mask: its name, or <name>_2, <name>_3, ... for repeated names."""
    numbers = [names[:i].count(name) + 1 for i, name in enumerate(names)]
    return [f"{n}_{k}" if k > 1 else n for n, k in zip(names, numbers, strict=True)]


def of_masks(names: list[str], kept: list[Array], mask: Array) -> dict[str, Array]:
    """correction/mask/<label>/{num_tokens,dropped}: the valid tokens that each mask saw and,
    whatever the others do, dropped.

    Args:
      names: of the masks.
      kept: [B,T] bool each, what it keeps.
      mask: [B,T] valid tokens, as the masks saw them.
    """
    counts = {}
    for label, is_kept_bt in zip(labels(names), kept, strict=True):
        counts[f"{PREFIX}mask/{label}/num_tokens"] = _count(jnp.ones_like(is_kept_bt), mask)
        counts[f"{PREFIX}mask/{label}/dropped"] = _count(~is_kept_bt, mask)
    return counts
