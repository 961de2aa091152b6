"""Packs the sequences of a dump into rows, the layout that the estimators read.

All rows have one width, so that one program serves any mixture of lengths: sequences of very
different ones share rows. Sizes are rounded up, so that dumps of about one size share it too.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxrl_tis.kernels.segment import Segments

MOST_PADDED = 3  # times the tokens; a row of its own for each sequence makes smaller programs


class Rows(NamedTuple):
    """The place of each token and sequence in the rows.

    `token` [R,T] is the index of a token in `Dump.tokens`, `sequence` [R,S] that of a sequence in
    `Dump.sequences`; -1 is padding. S is 1, or T where rows are shared; `seg` has the sequences'
    numbers within the row.
    """

    token: np.ndarray
    sequence: np.ndarray
    seg: np.ndarray | Segments

    def of_tokens(self, x: np.ndarray) -> np.ndarray:
        """[N,...] -> [R,T,...], 0 at padding."""
        return _gather(x, self.token)

    def of_sequences(self, x: np.ndarray) -> np.ndarray:
        """[B] -> [R,S], 0 where a row holds fewer."""
        return _gather(x, self.sequence)


def _gather(x, index):
    gathered = x[np.maximum(index, 0)]
    gathered[index < 0] = 0
    return gathered


def rounded(count: int) -> int:
    """Rounds a count up to a multiple of a sixteenth of the next power of two."""
    step = 2 ** max(0, math.ceil(math.log2(count)) - 4)
    return -(-count // step) * step


def pack(lengths: np.ndarray) -> Rows:
    """Packs sequences of these lengths into rows. Without much padding every sequence has a row;
    otherwise the longest come first, and a row ends when the next sequence does not fit."""
    width = rounded(lengths.max())
    if len(lengths) * width <= MOST_PADDED * lengths.sum():
        return _lay([[i] for i in range(len(lengths))], lengths, width)
    left, rows = 0, []
    for i in np.argsort(-lengths, kind="stable"):
        if lengths[i] > left:
            rows.append([])
            left = width
        rows[-1].append(i)
        left -= lengths[i]
    return _lay(rows, lengths, width)


def _lay(rows, lengths, width):
    """Returns the indices of rows with these sequences."""
    num_rows, is_shared = rounded(len(rows)), any(len(members) > 1 for members in rows)
    most = width if is_shared else 1
    token = np.full((num_rows, width), -1, np.int32)
    seg = np.zeros((num_rows, width), np.int32)
    sequence = np.full((num_rows, most), -1, np.int32)
    starts = np.cumsum(lengths) - lengths
    for r, members in enumerate(rows):
        sequence[r, : len(members)] = members
        end = 0
        for s, i in enumerate(members):
            begin, end = end, end + lengths[i]
            token[r, begin:end] = np.arange(starts[i], starts[i] + lengths[i])
            seg[r, begin:end] = s + 1
    return Rows(token, sequence, seg if is_shared else Segments(seg, 1))
