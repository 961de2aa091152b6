"""Rows hold every token once, in order, beside those of its sequence."""

import numpy as np
import pytest

from jaxrl_tis.audit import packing


@pytest.mark.parametrize("lengths, is_shared", [
    ([3, 5, 4], False), ([1], False), ([200, 3, 1, 7, 2, 5, 9, 40], True), ([64] * 3 + [1] * 90, True),
])
def test_every_token_is_in_one_place(lengths, is_shared):
    lengths = np.array(lengths)
    rows = packing.pack(lengths)
    of = np.repeat(np.arange(len(lengths)), lengths)
    assert sorted(rows.token[rows.token >= 0]) == list(range(lengths.sum()))
    assert sorted(rows.sequence[rows.sequence >= 0]) == list(range(len(lengths)))
    seg = rows.seg if is_shared else rows.seg.ids
    np.testing.assert_array_equal(seg > 0, rows.token >= 0)
    for r, t in zip(*np.nonzero(seg), strict=True):
        assert rows.sequence[r, seg[r, t] - 1] == of[rows.token[r, t]]
        if t and seg[r, t] == seg[r, t - 1]:
            assert rows.token[r, t] == rows.token[r, t - 1] + 1
    np.testing.assert_array_equal(rows.of_tokens(of + 1) > 0, seg > 0)
    assert rows.of_sequences(np.ones(len(lengths))).sum() == len(lengths)
    assert (rows.sequence.shape[1] == 1) != is_shared


def test_sizes_are_rounded_up_by_an_eighth_at_most():
    for n in (*range(1, 200), 1000, 4097):
        assert n <= packing.rounded(n) <= 1.125 * n
    assert packing.rounded(1000) == 1024 and packing.rounded(4097) == 4096 + 512
