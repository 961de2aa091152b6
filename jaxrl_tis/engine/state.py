"""The decode state of an engine: its slots, and the pages of keys and values."""

import dataclasses
from typing import Any

import jax

from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.sampling import SamplingRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The decode state of the slots, arrays with leading axis B.

    Attributes:
      token: [B] int32, the last token, whose key is not in the cache yet.
      position: [B] int32, its absolute position.
      remaining: [B] int32, tokens that may still be sampled. A finished or free slot has 0.
      cached: [B] int32, positions whose keys were in the pages when the sequence was inserted.
      key: [B,2] uint32, see sampling.row_keys.
      stop_ids: [B,n] int32, padded with -1.
      rows: sampling parameters.
      penalties: penalties and the tokens they count; None in an engine without them.
    """

    token: Any
    position: Any
    remaining: Any
    cached: Any
    key: Any
    stop_ids: Any
    rows: SamplingRows
    penalties: Penalties | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The argument and the result of every program. `cache` holds the pages, see cache.py."""

    cache: Any
    slots: Slots
