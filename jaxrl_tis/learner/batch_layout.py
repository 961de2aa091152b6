"""Lays sampled sequences into rows [B,T] of fixed shape for the learner, one per row or packed.

`fields.py` lists the fields of a batch and the unit of each (token, sequence, ...).
"""

import dataclasses
import functools

import numpy as np

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.fields import FIELDS, field
from jaxrl_tis.sharding import row_unit

Rows = dict[str, np.ndarray]


def trajectory_rows(
    trajectories: list[Trajectory], length: int, evict_axes: tuple[int, ...] | None = None
) -> Rows:
    """Lays each sequence into a row of its own: prompt, response, padding.

    Args:
      trajectories: N records of sampled sequences.
      length: T; ValueError when a sequence is longer.
      evict_axes: of the records' evict_step after its tokens; None: the sampler evicts no keys. Else the
        learner has to mask the same ones.

    Returns: arrays [N,T], aligned with the token index: `tokens`, `positions`, `segment_ids` (1 on
      the sequence, 0 on padding), `temperature`, and every field of `FIELDS` that is copied from a
      record; response fields are on the response's tokens. Fields with several numbers per token
      are included if the sampler recorded them. With evict_axes also `evict_step`, the first
      position whose query did not see the token; T if every query did. With recorded routes also
      `routes_behav` [N,T,L,k], and `routed_behav`, the tokens that have one.
    """
    out = _empty_rows(len(trajectories), length)
    recorded = {name: f.record for name, f in FIELDS.items() if f.record}
    for name, attribute in recorded.items():
        widths = max(getattr(t, attribute).shape[1:] for t in trajectories)
        if 0 not in widths:
            out[name] = _padded(name, (len(trajectories), length, *widths))
    if evict_axes is not None:
        out["evict_step"] = np.full((len(trajectories), length, *evict_axes), length, np.int32)
    if routed := [t.routes for t in trajectories if len(t.routes)]:
        shape = (len(trajectories), length, *routed[0].shape[1:])
        out["routes_behav"] = np.zeros(shape, routed[0].dtype)
        out["routed_behav"] = np.zeros(shape[:2], bool)
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
        out["temperature"][row] = trajectory.temperature
        for name in recorded.keys() & out.keys() if n else ():
            out[name][row, response] = getattr(trajectory, recorded[name])
        if len(trajectory.routes):
            out["routes_behav"][row, : len(trajectory.routes)] = trajectory.routes
            out["routed_behav"][row, : len(trajectory.routes)] = True
        if len(trajectory.evict_step):
            out["evict_step"][row, : p + n] = np.minimum(trajectory.evict_step, length)
    return out


def environment_tokens(rows: Rows) -> np.ndarray:
    """Returns which tokens [N,T] an environment or an agent wrote between two answers or after the
    last one, in rows with a token in the mask. Those tokens begin a turn after the first. The
    prompt is in the first turn."""
    is_given = (rows["turn"] > 0) & ~rows["sampled"]
    return is_given & rows["mask"].any(axis=1, keepdims=True)


def _padded(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array full of the field's padding."""
    return np.full(shape, field(name).padding, field(name).dtype)


def _empty_rows(count: int, length: int) -> Rows:
    """Returns the fields of a forward pass, [count, length], for rows without tokens."""
    names = ("tokens", "segment_ids", "mask", "temperature")
    positions = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    return {name: _padded(name, (count, length)) for name in names} | {"positions": positions}


def update_fields(count: int, version: int, step: int, seed: int) -> Rows:
    """Returns the fields that the update of a step adds to `count` rows, independent of the samples.

    Args:
      version: version of the weights at the start of the update.

    Returns: `current_version` [N,1], and `draw` [N], a random uint32 per row for methods that
      choose tokens at random.
    """
    return {
        "current_version": np.full((count, 1), version, np.int32),
        "draw": np.random.default_rng((seed, step)).integers(2**32, size=count, dtype=np.uint32),
    }


def supervised_rows(pairs: list[tuple[list[int], list[int]]], length: int) -> Rows:
    """Lays (prompt ids, target ids) pairs into rows of their own; the mask has all target tokens."""
    out = _empty_rows(len(pairs), length)
    for row, (prompt, target) in enumerate(pairs):
        ids = [*prompt, *target]
        if len(ids) > length:
            raise ValueError(f"a training pair has {len(ids)} tokens, a row {length}")
        out["tokens"][row, : len(ids)] = ids
        out["segment_ids"][row, : len(ids)] = 1
        out["mask"][row, len(prompt) : len(ids)] = True
    return out


def minibatches(batch: Rows, count: int, microbatch_rows: int, seed: tuple[int, ...]):
    """Yields `count` minibatches [accumulation, microbatch_rows, ...] in a shuffled order, each with
    the indices of its sequences. Rows that hold no token are the last of their minibatch, and are
    divided so that all minibatches have about as many sequences.

    Args:
      batch: fields of a rollout batch of N sequences, a multiple of count * microbatch_rows.
      seed: seed of the permutation.
    """
    n, length = batch["mask"].shape
    order = np.random.default_rng(seed).permutation(n)
    is_empty = np.logical_not(batch["segment_ids"].any(axis=1))[order]
    parts = np.array_split(order[~is_empty], count)
    cuts = np.cumsum([n // count - len(part) for part in parts])[:-1]
    fillers = np.split(order[is_empty], cuts)
    order = np.stack([np.concatenate(pair) for pair in zip(parts, fillers, strict=True)])
    order = order.reshape(count, -1, microbatch_rows)
    batch = {name: _on_tokens(name, x, length) for name, x in batch.items()}
    for index in order:
        yield {name: x[index] for name, x in batch.items()}, index.reshape(-1)


def _on_tokens(name: str, x: np.ndarray, length: int) -> np.ndarray:
    """Broadcasts a per-sequence field [N,...] to the tokens [N,length,...]; returns other fields
    unchanged."""
    if field(name).unit != "sequence":
        return x
    return np.broadcast_to(x[:, None], (len(x), length, *x.shape[1:]))


def forward_fields(rows: dict) -> dict:
    """Returns the fields of a forward pass, with supports and evictions if they are recorded."""
    return {name: x for name, x in rows.items() if field(name).use == "forward"}


def without_replay(rows: dict) -> dict:
    """Returns the rows without the routes that a forward pass would replay."""
    return {name: x for name, x in rows.items() if name not in ("routes", "routed")}


def num_sequences(rows: dict) -> int:
    """Counts the sequences with a valid token in rows [..., T], one sequence per row or packed."""
    mask, segment = (rows[n].reshape(-1, rows[n].shape[-1]) for n in ("mask", "segment_ids"))
    row, token = np.nonzero(mask)
    return len(np.unique(np.stack((row, segment[row, token])), axis=1).T)


# Packed rows

BLOCK = 128  # tokens; the attention kernel of a TPU takes rows of whole blocks
MAX_SEGMENTS = 64  # sequences of a row; what is measured of each is an array [B, MAX_SEGMENTS]


@dataclasses.dataclass(frozen=True)
class Packer:
    """The fixed shape of packed rows, and the plan that lays sequences into them.

    There are always enough micro-batches for the longest possible sequences, so no sequence is ever
    omitted or cut. Empty micro-batches hold only padding, and the programs skip them.

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
        """Returns the number of micro-batches that hold `count` sequences of any length. A row that
        first-fit closes holds at least length // max_length sequences, or max_segments."""
        per_row = min(self.length // self.max_length, self.max_segments)
        return -(-count // (per_row * self.microbatch_rows))

    @classmethod
    def of(
        cls, length: int, max_length: int, microbatch_rows: int, shards: int, context: int = 1
    ) -> "Packer":
        """Makes the packer of rows of `length` tokens, rounded up to whole blocks in each of the two
        chunks of a context shard."""
        whole = BLOCK * row_unit(context)
        length = -(-length // whole) * whole
        return cls(max_length, length, microbatch_rows, shards, MAX_SEGMENTS)

    def plan(self, lengths: np.ndarray) -> "Packing":
        """Plans the rows: as few micro-batches as first-fit decreasing needs, with evenly filled rows.

        The longest sequence first, each goes to the emptiest row of these micro-batches. If a
        sequence then has no place, all stay in their first-fit rows. Then the rows are dealt to the
        shards, the fullest first.

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
        for sequence, r in zip(order, row_of, strict=True):
            row[sequence], offset[sequence] = place[r], used[r]
            used[r] += lengths[sequence]
            count[r] += 1
            segment[sequence] = count[r]
        shape = (self.num_microbatches(len(lengths)), self.microbatch_rows, self.length)
        return Packing(lengths, row, offset, segment, shape)

    def _place(self, lengths, num_rows, choose):
        """Returns the row of each sequence, [N]; -1 from the first sequence without a place on."""
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
        """Returns the places of rows from the fullest down: one to each shard, to and fro."""
        per_shard = self.microbatch_rows // self.shards
        turn, shard = np.divmod(np.arange(num_rows), self.shards)
        shard = np.where(turn % 2 == 0, shard, self.shards - 1 - shard)
        micro, slot = np.divmod(turn, per_shard)
        return micro * self.microbatch_rows + shard * per_shard + slot


@dataclasses.dataclass(frozen=True)
class Packing:
    """The places of N sequences in packed rows [M,R,T].

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
        """Returns (sequence, token in it, cell of the flat packed rows) of every token."""
        sequence = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first = np.cumsum(self.lengths) - self.lengths
        token = np.arange(len(sequence)) - first[sequence]
        return sequence, token, (self.row * self.shape[2] + self.offset)[sequence] + token

    def pack(self, rows: Rows) -> Rows:
        """Lays fields of one sequence a row into packed rows [M,R,T,...], each with its own
        padding.

        Args:
          rows: fields of tokens [N,L,...]; of sequences [N,...], which come to stand on each of
            their tokens; of the step [N,...], which come to be [M,R,...], one value a row.
        """
        sequence, token, cell = self._cells
        packed = {}
        for name, x in rows.items():
            if field(name).unit == "step":
                packed[name] = np.resize(x, (*self.shape[:2], *x.shape[1:]))
                continue
            of_token = x[sequence] if field(name).unit == "sequence" else x[sequence, token]
            flat = np.full((np.prod(self.shape), *of_token.shape[1:]), field(name).padding, x.dtype)
            flat[cell] = of_token
            packed[name] = flat.reshape(*self.shape, *of_token.shape[1:])
        segments = np.zeros(np.prod(self.shape), np.int32)
        segments[cell] = self.segment[sequence]
        return packed | {"segment_ids": segments.reshape(self.shape)}

    def unpack(self, x: np.ndarray, length: int) -> np.ndarray:
        """Lays [M,R,T,...] back into rows [N,length,...] of one sequence each, 0 at padding."""
        sequence, token, cell = self._cells
        rows = np.zeros((len(self.lengths), length, *x.shape[3:]), x.dtype)
        rows[sequence, token] = x.reshape(-1, *x.shape[3:])[cell]
        return rows

    def metrics(self, shards: int) -> dict[str, float]:
        """Measures the rows of the micro-batches in use, how full they are, and the tokens of the
        fullest shard over the mean."""
        shard = self.row % self.shape[1] // (self.shape[1] // shards)
        tokens = np.bincount(shard, weights=self.lengths, minlength=shards)
        num_rows = (self.row.max() // self.shape[1] + 1) * self.shape[1]
        return {
            "packing/rows": num_rows,
            "packing/fill_ratio": self.lengths.sum() / (num_rows * self.shape[2]),
            "packing/shard_imbalance": tokens.max() / tokens.mean(),
        }


def split_by_length(lengths: np.ndarray, count: int, seed: tuple[int, ...]) -> np.ndarray:
    """Splits sequences at random into minibatches of nearly equal tokens: indices [count, N / count].

    Sequences are taken in the order of their lengths, `count` at a time, and each of them goes to
    another minibatch.
    """
    generator = np.random.default_rng(seed)
    order = np.argsort(lengths, kind="stable").reshape(-1, count)
    return generator.permuted(order, axis=1).T


def packed_minibatches(rows: dict, packer: Packer, count: int, seed: tuple[int, ...]):
    """Yields `count` packed minibatches from rows of one sequence: (fields [M,R,T,...], indices of the
    sequences, their Packing)."""
    lengths = sequence_lengths(rows)
    for index in split_by_length(lengths, count, seed):
        packing = packer.plan(lengths[index])
        yield packing.pack({name: x[index] for name, x in rows.items()}), index, packing


def sequence_lengths(rows: dict) -> np.ndarray:
    """Counts the prompt and response tokens of rows that hold one sequence each, [N]."""
    return np.sum(rows["segment_ids"] > 0, axis=1)
