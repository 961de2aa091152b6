"""How many tokens a weight and a mask saw, and what became of them: a correction that does nothing,
or far too much, is to be seen in the record.

Counts are integers named correction/<...>; those of micro-batches add up to those of their batch.
Nothing here looks at a sequence: what does, in packed rows, has been computed for the weights and
masks themselves.
"""

import jax.numpy as jnp
from chex import Array

from jaxrl_tis.estimators import ratios

PREFIX = "correction/"
ROUNDING = 1e-5  # relative; two computations of one weight differ by less


def is_count(name: str) -> bool:
    """Whether a metric is one of these, so that parts add up."""
    return name.startswith(PREFIX)


def _count(is_so_bt: Array, mask: Array) -> Array:
    return jnp.sum(ratios.as_bool(mask) & is_so_bt)


def of_weight(w: Array, raw: Array, mask: Array) -> dict[str, Array]:
    """Counts of a weight.

    Args:
      w: [B,T] the weights as they are used, before any division by their mean.
      raw: [B,T] what they were before any cap, band or floor.
      mask: [B,T] valid tokens.

    Returns correction/weight/<count>: `num_tokens` valid tokens, of which `changed_raw` have a raw
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
    return {f"{PREFIX}weight/{name}": _count(is_so, mask) for name, is_so in indicators.items()}


def labels(names: list[str]) -> list[str]:
    """What masks of these names are called: from the second on, those of one name <name>_2, and so
    on."""
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
