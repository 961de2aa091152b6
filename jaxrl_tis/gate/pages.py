"""Log-probs of whole sequences by the sampler's prefill: through its pages, in chunks of a length."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.build import Setup
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.protocol import Chunk
from jaxrl_tis.engine.records import Trajectory


def log_probs(
    setup: Setup, served: Any, trajectories: Sequence[Trajectory], chunk: int, rows: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """Scores the tokens after the prompt at the run's temperature, without filters.

    Args:
      served: serving parameters of `setup.engine`, without a teacher's.
      chunk: most tokens of a sequence in one call; rounded up to whole pages.
      rows: sequences of a call, a multiple of the engine's data shards.
      heartbeat: called after each call.

    Returns: [n] float32 in nats for each trajectory.
    """
    config = dataclasses.replace(
        setup.engine.config, slots=rows, num_pages=None, prefill_batch=rows, prefill_chunk=chunk
    )
    engine = Engine(setup.model, config, setup.engine.layout)
    length = engine.bucket(max(len(t.prompt) + len(t.tokens) for t in trajectories))
    state, scored = engine.init_state(), []
    for first in range(0, len(trajectories), rows):
        batch = trajectories[first : first + rows]
        state, found = _rows(engine, served, state, batch, length, setup.config.rollout.temperature)
        scored += found
        heartbeat()
    return scored


def _rows(
    engine: Engine, served: Any, state: Any, batch: Sequence[Trajectory], length: int, temperature: float
) -> tuple[Any, list[np.ndarray]]:
    """Prefills one sequence a row in chunks of `length`, and returns (state, their log-probs)."""
    size, count = engine.page_size, engine.pages_per_slot
    whole = [np.concatenate([t.prompt, t.tokens]) for t in batch]
    end = min(-(-max(map(len, whole)) // length) * length, count * size)
    tokens, targets = np.zeros((2, len(batch), end), np.int32)
    for row, ids in enumerate(whole):  # nothing attends to the padding
        tokens[row, : len(ids)], targets[row, : len(ids) - 1] = ids, ids[1:]
    parts: list[Any] = []
    for start in range(0, end, length):
        chunks = []
        for row in range(len(batch)):
            index, shard = divmod(row, engine.shards)
            pages = list(range(1 + index * count, 1 + (index + 1) * count))
            columns = slice(start, start + length)
            chunks.append(Chunk(shard, tokens[row, columns], start, pages, targets[row, columns]))
        state, result = engine.prefill(served, state, chunks, temperature)
        parts.append(result.logps)
    logps = np.concatenate(parts, axis=1)
    places = [slice(len(t.prompt) - 1, len(ids) - 1) for t, ids in zip(batch, whole, strict=True)]
    return state, [of_row[place] for of_row, place in zip(logps, places, strict=True)]
