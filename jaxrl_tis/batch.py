"""Trajectory records -> rows [B,T] of fixed shape for the learner."""

import numpy as np

from jaxrl_tis.engine.engine import Trajectory


def rows(trajectories: list[Trajectory], length: int) -> dict[str, np.ndarray]:
    """One sequence per row: prompt, response, padding.

    Args:
      trajectories: N records of sampled sequences.
      length: T; ValueError when a sequence is longer.

    Returns: arrays [N,T], aligned with the token index: `tokens`, `positions`, `segment_ids`
      (1 on the sequence, 0 on padding), `mask` (True on tokens that the policy chose),
      `logp_behav`, `entropy_behav`, `turn`, `version` (-1 outside the response),
      `logits_behav` [N,T,V] where the sampler recorded them, and `temperature` [N].
    """
    shape = (len(trajectories), length)
    out = {
        "tokens": np.zeros(shape, np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (shape[0], 1)),
        "segment_ids": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool),
        "logp_behav": np.zeros(shape, np.float32),
        "entropy_behav": np.zeros(shape, np.float32),
        "version": np.full(shape, -1, np.int32),
        "turn": np.zeros(shape, np.int32),
        "temperature": np.array([t.temperature for t in trajectories], np.float32),
    }
    num_logits = max(t.logits.shape[-1] for t in trajectories)
    if num_logits:
        out["logits_behav"] = np.zeros((*shape, num_logits), np.float32)
    for row, trajectory in enumerate(trajectories):
        p, n = len(trajectory.prompt), len(trajectory.tokens)
        if p + n > length:
            raise ValueError(
                f"trajectory {trajectory.id} has {p} prompt + {n} response tokens, a row {length}"
            )
        response = slice(p, p + n)
        out["tokens"][row, :p] = trajectory.prompt
        out["tokens"][row, response] = trajectory.tokens
        out["segment_ids"][row, : p + n] = 1
        out["mask"][row, response] = trajectory.mask
        out["logp_behav"][row, response] = trajectory.logp_behav
        out["entropy_behav"][row, response] = trajectory.entropy
        out["version"][row, response] = trajectory.version
        out["turn"][row, response] = trajectory.turn
        if num_logits and n:
            out["logits_behav"][row, response] = trajectory.logits
    return out


def update_fields(count: int, step: int, seed: int) -> dict[str, np.ndarray]:
    """What the update of a step adds to `count` rows, whatever was sampled.

    Returns: `current_version` [N,1], the weights that the update starts from, and `draw` [N], a
      random uint32 per row for methods that choose tokens at random.
    """
    return {
        "current_version": np.full((count, 1), step - 1, np.int32),
        "draw": np.random.default_rng((seed, step)).integers(2**32, size=count, dtype=np.uint32),
    }


def supervised_rows(pairs: list[tuple[list[int], list[int]]], length: int) -> dict[str, np.ndarray]:
    """The same rows from (prompt ids, target ids) pairs, with every target token in the mask."""
    shape = (len(pairs), length)
    out = {
        "tokens": np.zeros(shape, np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (shape[0], 1)),
        "segment_ids": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool),
        "temperature": np.ones(shape[0], np.float32),
    }
    for row, (prompt, target) in enumerate(pairs):
        ids = [*prompt, *target]
        if len(ids) > length:
            raise ValueError(f"a training pair has {len(ids)} tokens, a row {length}")
        out["tokens"][row, : len(ids)] = ids
        out["segment_ids"][row, : len(ids)] = 1
        out["mask"][row, len(prompt) : len(ids)] = True
    return out


def minibatches(batch: dict, count: int, microbatch_rows: int, seed: tuple[int, ...]):
    """Yields `count` minibatches [accumulation, microbatch_rows, ...] in a shuffled order.

    Args:
      batch: arrays with leading axis N, a multiple of count * microbatch_rows.
      seed: of the permutation; the same seed gives the same order.
    """
    n = len(batch["mask"])
    order = np.random.default_rng(seed).permutation(n).reshape(count, -1, microbatch_rows)
    for index in order:
        yield {name: value[index] for name, value in batch.items()}
