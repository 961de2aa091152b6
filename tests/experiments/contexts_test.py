"""The gap of evicted keys by context: texts, the table of made lines, and one small measurement."""

import numpy as np
import pytest

from experiments import contexts


def test_a_text_repeats_its_own_words():
    rng = np.random.default_rng(0)
    tokens = contexts.text(rng, 2 * contexts.LETTERS * 50)
    words = {tuple(word) for word in tokens.reshape(-1, contexts.LETTERS)}
    assert len(words) == contexts.IN_TEXT
    other = {tuple(word) for word in contexts.text(rng, 500).reshape(-1, contexts.LETTERS)}
    assert other != words and contexts.text(rng, 7).shape == (7,)


def test_the_table_has_means_over_seeds():
    """Two seeds: the mean of 1 and 3 with t(0.975, 1) = 12.706 standard errors of 1."""
    lines = [
        {"arm": arm, "seed": seed} | {m: [float(x)] * len(contexts.CONTEXTS) for m in contexts.MEASURES}
        for arm in contexts.ARMS for seed, x in enumerate((1, 3))
    ]
    header, _, *rows = contexts.table(lines).splitlines()
    assert "1 to 512" in header and "2,049 to 4,096" in header
    assert len(rows) == len(contexts.ARMS) * len(contexts.MEASURES)
    assert rows[4].startswith("| last pages | with all keys | 2.00e+00 [-1.07e+01, 1.47e+01] |")


@pytest.mark.all
def test_only_the_learner_with_all_keys_sees_a_gap():
    for line in contexts.measure(0, length=400, steps=3):
        (replayed,), (dense,), (kl,) = (line[name] for name in contexts.MEASURES)
        assert 0 < replayed < 1e-5
        if line["arm"] == "all keys":
            assert dense == replayed and kl < 1e-6
        else:
            assert dense > 100 * replayed and kl > 1e-7
