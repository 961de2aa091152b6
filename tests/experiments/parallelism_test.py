"""Differences by degree and by length: tables by hand, and a small model on eight devices."""

import numpy as np
import pytest

from experiments import parallelism
from jaxrl_tis.gate import report
from jaxrl_tis.learner.state import initial_params


SMALL = """
from configs import fig_base
def get_config():
    c = fig_base.get_config()
    c.model.num_layers, c.model.num_heads, c.model.num_kv_heads, c.model.mlp_dim = 1, 6, 3, 96
    c.rollout.group_size, c.train.minibatches = 2, 1
    return c
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Six heads, of which three shards can have two each, and answers of eight and sixteen tokens."""
    (tmp_path / "small.py").write_text(SMALL)
    monkeypatch.setattr(parallelism, "CONFIG", str(tmp_path / "small.py"))
    monkeypatch.setattr(parallelism, "LENGTHS", (8, 16))
    monkeypatch.setattr(parallelism, "PROMPT", 16)


@pytest.mark.all
def test_learners_of_all_degrees_score_what_was_drawn(small):
    setup = parallelism.setup_of(3, 2)
    params = initial_params(setup.training)
    rows = setup.training.rows(report.sample(setup, params, 2, stop_ids=()))
    assert set(rows["mask"].sum(axis=1)) == {16}  # nothing stops an answer
    found = parallelism.differences(setup, params, rows)
    assert set(found) == set(parallelism.LEARNERS)
    for dp in found.values():
        assert dp.shape == (4, 16) and 0 < dp.max() < 0.05  # bfloat16, and no other program


def test_the_tables_by_hand(monkeypatch):
    monkeypatch.setattr(parallelism, "PROMPTS", 2)
    dp = np.zeros((4, 512))
    dp[:, 100] = 0.4  # in the second 64 tokens
    dp[1, 3] = 0.2  # of the beginning of the second answer of the first group
    dp = np.tile(dp, (4, 1))  # two groups of eight
    found = {"TP1": {"TP1": dp}}
    text = parallelism.lengths_table(found).splitlines()
    assert text[2].startswith("| 64 | 0.0500 [") and "| 128 | 0.4000 [0.4000, 0.4000] | 0.2000 [" in text[3]
    assert "| 0.00625 [0.00625, 0.00625] |" in text[3]  # 0.4 / 64 of the last 64 of 128
    with pytest.raises(ValueError, match="groups of 4 answers of 64 tokens are shorter than 512"):
        parallelism.lengths_table({"TP1": {"TP1": dp[:8]}})
    table = parallelism.degrees_table({"TP1": {"TP1": dp / 2, "SP2": dp}})
    assert "| TP1 | SP2 | 0.4000 [0.4000, 0.4000] | +0.2000 [+0.2000, +0.2000] | 0.400 |" in table
    assert len(parallelism.FIGURE.pictures["parallelism"].page(found).axes) == 2


def test_too_few_devices_are_refused(monkeypatch):
    monkeypatch.setattr(parallelism.jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="eight devices are needed, and there are 1"):
        parallelism.read(None)
