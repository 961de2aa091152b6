"""Compilation of every program of an engine before the first request."""

from typing import Any

import jax
import numpy as np

from jaxrl_tis.engine import drafts
from jaxrl_tis.engine.drafter import Drafting
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.protocol import Chunk


def prefill_lengths(engine: Engine) -> list[int]:
    """Returns the padded lengths of the chunks of a prefill call. Preempted sequences are prefilled
    too, so a chunk may have any length that leaves a token to sample."""
    longest = min(engine.prefill_chunk, engine.max_length - 1)
    return sorted({engine.bucket(length) for length in range(1, longest + 1)})


def warm_up(engine: Engine, params: Any, drafting: Drafting | None = None) -> None:
    """Runs every program of the engine in every shape, on a temporary state with free slots. No
    token is sampled, and prefilled keys go to page 0, which is never read.

    Args:
      params: serving parameters; later weights have the same shapes.
      drafting: the model that drafts for it.
    """
    table = np.zeros(engine.config.table_shape, np.int32)
    nothing = np.zeros(engine.slots, np.int32)
    state = _filled(engine, params, has_targets=True)
    state = engine.release(state, [])
    state, _ = engine.generate(params, state, table, nothing)
    if drafting:
        drafter, (own, _) = drafting.engine, drafting.served
        filled = _filled(drafter, own, has_targets=False)
        _, proposed, counts = drafter.draft(own, filled, state.slots, table, nothing)
        state, _ = engine.verify(params, state, proposed, counts, table, nothing)
    for length in drafts.lengths(0 if drafting else engine.config.max_draft):
        guesses = np.zeros((engine.slots, length), np.int32)
        state, _ = engine.verify(params, state, guesses, nothing, table, nothing)
    jax.block_until_ready(state)


def _filled(engine: Engine, params: Any, has_targets: bool) -> Any:
    """Returns a state after prefills of every length and an insertion."""
    state = engine.init_state()
    for length in prefill_lengths(engine):
        tokens = np.zeros(length, np.int32)
        for targets in (None, tokens)[: 1 + has_targets]:
            state, _ = engine.prefill(params, state, [Chunk(0, tokens, 0, [], targets)])
    return engine.insert(state, {})
