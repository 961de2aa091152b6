"""Gaps of combinations: additivity by hand, and one measured batch."""

import pytest

from experiments import budget


def made(together):
    """Single causes have the gaps 1, 2, 3, 4; a combination `together` times their sum."""
    sizes = dict(zip(budget.CAUSES, (1.0, 2.0, 3.0, 4.0), strict=True))
    return {
        chosen: dict.fromkeys(
            ("d2", "d_mean", "k3"),
            sum(sizes[c] for c in chosen) * (1.0 if len(chosen) == 1 else together),
        )
        for chosen in budget.COMBINATIONS
    }


def test_every_combination_is_there_once():
    assert len(set(budget.COMBINATIONS)) == 2 ** len(budget.CAUSES) - 1


def test_additivity_by_hand():
    assert budget.additivity(made(0.5), ("W8A8", "noise"), "d2") == 0.5
    lines = budget.table([made(1.1), made(1.3)]).splitlines()
    assert lines[2].startswith("| bfloat16 | 1 [1, 1] | – |")
    assert "| bfloat16 + W8A8 | 3.6 [" in lines[6] and "| 1.20 [" in lines[6]
    page = budget.FIGURE.pictures["budget"].page([made(1.0)])
    assert len(page.axes[0].collections) == 3


TINY = """
from configs import fig_base
def get_config():
    c = fig_base.get_config()
    c.warmup.steps, c.train.minibatches, c.train.microbatch_rows = 2, 1, 16
    c.rollout.prompts, c.engine.slots = 2, 16
    return c
"""


@pytest.mark.all
def test_gaps_of_a_small_run(monkeypatch, tmp_path):
    """Each cause alone has a gap, and two together another than one."""
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.setattr(budget, "CONFIG", str(tmp_path / "tiny.py"))
    monkeypatch.setattr(budget, "COMBINATIONS", [("W8A8",), ("noise",), ("int8 cache",), ("W8A8", "noise")])
    found = budget.gaps(0)
    assert all(value > 0 for measures in found.values() for value in measures.values())
    # Noise of 2 % on every weight is the larger of the two, and both together are more than either.
    together = budget.additivity(found, ("W8A8", "noise"), "d2")
    assert 0.6 < together < 1.5 and found[("W8A8", "noise")]["d2"] > found[("W8A8",)]["d2"]
    for measures in found.values():  # E|x| is at most the root of E x^2, and here of its size
        assert 0.3 < measures["d_mean"] / measures["d2"] ** 0.5 <= 1.0
