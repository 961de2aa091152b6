"""Trajectory records -> rows [B,T] of fixed shape for the learner, one sequence each or packed."""

import dataclasses
import functools

import numpy as np

from jaxrl_tis.engine.records import Trajectory


def rows(
    trajectories: list[Trajectory], length: int, has_evictions: bool = False
) -> dict[str, np.ndarray]:
    """One sequence per row: prompt, response, padding.

    Args:
      trajectories: N records of sampled sequences.
      length: T; ValueError when a sequence is longer.
      has_evictions: the sampler drops keys, so that the learner has to.

    Returns: arrays [N,T], aligned with the token index: `tokens`, `positions`, `segment_ids`
      (1 on the sequence, 0 on padding), `mask` (True on tokens that the policy chose),
      `logp_behav`, `entropy_behav`, `turn`, `version` (-1 outside the response),
      `temperature`, and, where the sampler recorded them, `logits_behav` [N,T,V] and `kept`
      [N,T,K] (see Trajectory; -1 where the learner's distribution is the whole one); with
      has_evictions `evict_step`, the position from which on no query saw the token, T if all did.
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
        "temperature": np.ones(shape, np.float32),
    }
    num_logits = max(t.logits.shape[-1] for t in trajectories)
    if num_logits:
        out["logits_behav"] = np.zeros((*shape, num_logits), np.float32)
    num_kept = max(t.kept.shape[-1] for t in trajectories)
    if num_kept:
        out["kept"] = np.full((*shape, num_kept), -1, np.int32)
    if has_evictions:
        out["evict_step"] = np.full(shape, length, np.int32)
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
        out["temperature"][row] = trajectory.temperature
        if num_logits and n:
            out["logits_behav"][row, response] = trajectory.logits
        if num_kept and n:
            out["kept"][row, response] = trajectory.kept
        if len(trajectory.evict_step):
            out["evict_step"][row, : p + n] = np.minimum(trajectory.evict_step, length)
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
        "temperature": np.ones(shape, np.float32),
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


def num_sequences(rows: dict) -> int:
    """Sequences with a valid token in rows [..., T], of one sequence each or packed."""
    mask, segment = (rows[n].reshape(-1, rows[n].shape[-1]) for n in ("mask", "segment_ids"))
    row, token = np.nonzero(mask)
    return len(np.unique(np.stack((row, segment[row, token])), axis=1).T)


# Packed rows

BLOCK = 128  # tokens; the attention kernel of a TPU takes rows of whole blocks
MAX_SEGMENTS = 64  # sequences of a row; what is measured of each is an array [B, MAX_SEGMENTS]
OF_SEQUENCES = ("rewards", "greedy_rewards", "reward_components", "grad_norms")  # not of tokens
FORWARD = ("tokens", "positions", "segment_ids", "mask", "temperature")  # what a log-prob takes


def forward_fields(rows: dict) -> dict:
    """The fields that a log-prob takes; kept sets and evictions where they are recorded."""
    return {name: rows[name] for name in (*FORWARD, "kept", "evict_step") if name in rows}


@dataclasses.dataclass(frozen=True)
class Packer:
    """The fixed shape of packed rows, and how sequences are laid into them.

    There are always micro-batches enough for the longest sequences that may come, so no sequence is
    ever left out or cut; those that stay empty hold padding alone and are skipped by the programs.

    Attributes:
      max_length: most tokens of a sequence.
      length: T, tokens of a row, at least max_length.
      microbatch_rows: rows of a micro-batch, a multiple of shards.
      shards: data shards of the mesh; each holds the same number of consecutive rows.
      max_segments: most sequences of a row.
    """

    max_length: int
    length: int
    microbatch_rows: int
    shards: int
    max_segments: int

    def num_microbatches(self, count: int) -> int:
        """Micro-batches that hold `count` sequences of any length: a row that first-fit closes
        holds at least length // max_length of them, or max_segments."""
        per_row = min(self.length // self.max_length, self.max_segments)
        return -(-count // (per_row * self.microbatch_rows))

    @classmethod
    def of(
        cls, length: int, max_length: int, microbatch_rows: int, shards: int, context: int = 1
    ) -> "Packer":
        """Rows of `length` tokens or what is missing to a whole block for each context shard."""
        whole = BLOCK * context
        length = -(-length // whole) * whole
        return cls(max_length, length, microbatch_rows, shards, MAX_SEGMENTS)

    def plan(self, lengths: np.ndarray) -> "Packing":
        """As few micro-batches as first-fit decreasing needs, their rows filled evenly.

        The longest sequence first, each goes to the emptiest row of those micro-batches; where that
        leaves one without a place, all stay where first-fit has them. Then the rows are dealt out
        to the shards, the fullest first.

        Args:
          lengths: [N] tokens of each sequence; ValueError for one that exceeds max_length.
        """
        if lengths.max(initial=0) > self.max_length:
            raise ValueError(
                f"a sequence has {lengths.max()} tokens, packed rows are planned for at most "
                f"{self.max_length}"
            )
        order = np.argsort(-lengths, kind="stable")
        first = lambda fits, free: np.argmax(fits)
        emptiest = lambda fits, free: np.argmax(np.where(fits, free, -1))
        row_of = self._place(lengths[order], len(lengths), first)
        num_rows = row_of.max(initial=-1) + 1
        whole = -(-num_rows // self.microbatch_rows) * self.microbatch_rows
        even = self._place(lengths[order], whole, emptiest)
        if (even >= 0).all():
            row_of, num_rows = even, whole
        filled = np.bincount(row_of, weights=lengths[order], minlength=num_rows)
        place = np.empty(num_rows, np.int64)
        place[np.argsort(-filled, kind="stable")] = self._deal(num_rows)
        row, offset = np.zeros((2, len(lengths)), np.int64)
        segment = np.zeros(len(lengths), np.int32)
        used, count = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int32)
        for sequence, r in zip(order, row_of):
            row[sequence], offset[sequence] = place[r], used[r]
            used[r] += lengths[sequence]
            count[r] += 1
            segment[sequence] = count[r]
        shape = (self.num_microbatches(len(lengths)), self.microbatch_rows, self.length)
        return Packing(lengths, row, offset, segment, shape)

    def _place(self, lengths, num_rows, choose):
        """[N] the row chosen for each sequence in turn; -1 from the first without one on."""
        free = np.full(num_rows, self.length)
        room = np.full(num_rows, self.max_segments)
        row_of = np.full(len(lengths), -1)
        for i, length in enumerate(lengths):
            fits = (free >= length) & (room > 0)
            if not fits.any():
                break
            row_of[i] = choose(fits, free)
            free[row_of[i]] -= length
            room[row_of[i]] -= 1
        return row_of

    def _deal(self, num_rows):
        """Places of rows from the fullest down: one to each shard, to and fro."""
        per_shard = self.microbatch_rows // self.shards
        turn, shard = np.divmod(np.arange(num_rows), self.shards)
        shard = np.where(turn % 2 == 0, shard, self.shards - 1 - shard)
        micro, slot = np.divmod(turn, per_shard)
        return micro * self.microbatch_rows + shard * per_shard + slot


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where N sequences stand in rows [M,R,T].

    Attributes:
      lengths: [N] tokens of each sequence.
      row, offset: [N] its row, counted through the micro-batches, and its first token there.
      segment: [N] its number in the row, from 1.
      shape: (M, R, T).
    """

    lengths: np.ndarray
    row: np.ndarray
    offset: np.ndarray
    segment: np.ndarray
    shape: tuple[int, int, int]

    @functools.cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(sequence, token in it, cell of the flat packed rows) of every token."""
        sequence = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first = np.cumsum(self.lengths) - self.lengths
        token = np.arange(len(sequence)) - first[sequence]
        return sequence, token, (self.row * self.shape[2] + self.offset)[sequence] + token

    def pack(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Fields [N,L,...] of one sequence a row -> [M,R,T,...], 0 at padding.

        Fields that belong to the step, not to a token, [N] or [N,1], go to the rows as they come.
        """
        sequence, token, cell = self._cells
        packed = {}
        for name, x in rows.items():
            if x.ndim == 1 or x.shape[1] == 1:
                packed[name] = np.resize(x, (*self.shape[:2], *x.shape[1:]))
            else:
                flat = np.zeros((np.prod(self.shape), *x.shape[2:]), x.dtype)
                flat[cell] = x[sequence, token]
                packed[name] = flat.reshape(*self.shape, *x.shape[2:])
        segments = np.zeros(np.prod(self.shape), np.int32)
        segments[cell] = self.segment[sequence]
        return packed | {"segment_ids": segments.reshape(self.shape)}

    def unpack(self, x: np.ndarray, length: int) -> np.ndarray:
        """[M,R,T,...] -> [N,length,...], one sequence a row, 0 at padding."""
        sequence, token, cell = self._cells
        rows = np.zeros((len(self.lengths), length, *x.shape[3:]), x.dtype)
        rows[sequence, token] = x.reshape(-1, *x.shape[3:])[cell]
        return rows

    def metrics(self, shards: int) -> dict[str, float]:
        """Rows of the micro-batches in use, how full they are, and the tokens of the fullest shard
        over the mean."""
        shard = self.row % self.shape[1] // (self.shape[1] // shards)
        tokens = np.bincount(shard, weights=self.lengths, minlength=shards)
        num_rows = (self.row.max() // self.shape[1] + 1) * self.shape[1]
        return {
            "packing/rows": num_rows,
            "packing/fill_ratio": self.lengths.sum() / (num_rows * self.shape[2]),
            "packing/shard_imbalance": tokens.max() / tokens.mean(),
        }


def split_by_length(lengths: np.ndarray, count: int, seed: tuple[int, ...]) -> np.ndarray:
    """Indices [count, N / count]: a random split into minibatches of about equally many tokens.

    Sequences are taken in the order of their lengths, `count` at a time, and each of them goes to
    another minibatch.
    """
    generator = np.random.default_rng(seed)
    order = np.argsort(lengths, kind="stable").reshape(-1, count)
    return generator.permuted(order, axis=1).T


def packed_minibatches(rows: dict, packer: Packer, count: int, seed: tuple[int, ...]):
    """Yields `count` minibatches (fields [M,R,T,...], their Packing) of rows of one sequence."""
    lengths = sequence_lengths(rows)
    for index in split_by_length(lengths, count, seed):
        packing = packer.plan(lengths[index])
        yield packing.pack({name: x[index] for name, x in rows.items()}), packing


def sequence_lengths(rows: dict) -> np.ndarray:
    """[N] prompt and response tokens of rows that hold one sequence each."""
    return np.sum(rows["segment_ids"] > 0, axis=1)
