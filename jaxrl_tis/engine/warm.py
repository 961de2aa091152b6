"""Compilation of every program of an engine before the first request."""

from typing import Any

import jax
import numpy as np

from jaxrl_tis.engine import drafts
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.protocol import Chunk


def prefill_lengths(engine: Engine) -> list[int]:
    """Returns the padded lengths of the chunks of a prefill call. Preempted sequences are prefilled
    too, so a chunk may have any length that leaves a token to sample."""
    longest = min(engine.prefill_chunk, engine.max_length - 1)
    return sorted({engine.bucket(length) for length in range(1, longest + 1)})


def warm_up(engine: Engine, params: Any) -> None:
    """Runs every program of the engine in every shape, on a temporary state with free slots. No
    token is sampled, and prefilled keys go to page 0, which is never read.

    Args:
      params: serving parameters; later weights have the same shapes.
    """
    state = engine.init_state()
    table = np.zeros((engine.slots, engine.pages_per_slot), np.int32)
    nothing = np.zeros(engine.slots, np.int32)
    for length in prefill_lengths(engine):
        tokens = np.zeros(length, np.int32)
        for targets in (None, tokens):
            state, _ = engine.prefill(params, state, [Chunk(0, tokens, 0, [], targets)])
    state = engine.insert(state, {})
    state = engine.release(state, [])
    state, _ = engine.generate(params, state, table, nothing)
    for length in drafts.lengths(engine.config.max_draft):
        guesses = np.zeros((engine.slots, length), np.int32)
        state, _ = engine.verify(params, state, guesses, nothing, table, nothing)
    jax.block_until_ready(state)
