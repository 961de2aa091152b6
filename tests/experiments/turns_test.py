"""The gap by turn and by place: measures, means and ratios by hand, and one small batch."""

import math

import numpy as np
import pytest

from experiments import turns
from jaxrl_tis.learner.state import initial_params

RATIO = np.array([[1, 4, 0.25, 1, 1, 1.5, 1.6, 1], [1, 1, 3, 1, 1, 1, 1, 1]])
ROWS = {
    "logp_old": np.log(RATIO).astype(np.float32) - 1,
    "logp_behav": np.full((2, 8), -1, np.float32),
    "mask": np.array([[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0]], bool),
    "turn": np.array([[0, 0, 0, 1, 1, 1, 1, 0], [0] * 8], np.int32),
}


def test_measures_by_hand():
    """Token TIS caps ratios above 2. Turn TIS caps products above 2: 4 x 0.25 = 1, 1.5 x 1.6 = 2.4, 3."""
    found = turns.measured(ROWS)
    assert found["turn"].tolist() == [0, 0, 1, 1, 0]
    assert found["place"].tolist() == [1, 2, 1, 2, 1]
    assert found["token TIS"].tolist() == [True, False, False, False, True]
    assert found["turn TIS"].tolist() == [False, False, True, True, True]
    np.testing.assert_allclose(found["k1"], [-1.38629, 1.38629, -0.40547, -0.47, -1.09861], atol=1e-5)
    np.testing.assert_allclose(found["k3"], [1.61371, 0.63629, 0.09453, 0.13, 0.90139], atol=1e-5)
    np.testing.assert_allclose(found["|log ratio|"], np.abs(found["k1"]))


def test_means_of_cells_and_ratios_by_hand(monkeypatch):
    """The last turn and the last place take all later ones. A cell of too few tokens has no mean."""
    monkeypatch.setattr(turns, "FEWEST", 2)
    tokens = {name: np.zeros(7) for name in turns.MEASURES} | {
        "turn": np.array([0, 0, 0, 1, 1, 2, 3]), "place": np.array([1, 1, 9, 1, 1, 8, 6]),
        "|log ratio|": np.array([1.0, 3.0, 2.0, 3.0, 5.0, 4.0, 8.0]),
        "token TIS": np.array([0, 0, 1, 0, 0, 0, 1]),
    }
    found = turns.summary(tokens)
    gap = lambda *cell: found[cell]["|log ratio|"]
    assert [gap("turn", k) for k in range(3)] == [2, 4, 6] and found["turn", 2]["tokens"] == 2
    assert gap("the prompt", 1) == 2 and math.isnan(gap("the prompt", 6))
    assert gap("the tool's answer", 1) == 4 and gap("the tool's answer", 6) == 6
    assert found["all tokens"] == 5 / 2 and found["first token"] == 2
    assert found["equal entropy"] == 5 / 2  # all entropies are 0
    assert found["token TIS"] == pytest.approx(1 / 4 - 1 / 3) and found["turn TIS"] == 0


def test_the_gap_at_equal_entropy_by_hand(monkeypatch):
    """Entropy 0: later 1, others 2. Entropy 1: later 4, others 4, of which there are more. The later
    tokens are half and half, so the ratio is (1 + 4) / (2 + 4). A third entropy has no others."""
    monkeypatch.setattr(turns, "BINS", 3)
    gap = np.array([1, 1, 4, 4, 50, 50, 2, 4, 4, 4])
    entropy = np.array([0, 0, 1, 1, 2, 2, 0, 1, 1, 1])
    is_later = np.arange(10) < 6
    assert turns.at_equal_entropy(gap, entropy, is_later) == pytest.approx(5 / 6)


def made(ratio):
    """A result of one seed: gaps of 1 after the prompt and of `ratio` after the tool's answer."""
    cells = {("turn", k): ratio if k else 1.0 for k in range(turns.TURNS)} | {
        (part, p): (1.0, ratio)[i] for i, part in enumerate(turns.PARTS)
        for p in range(1, turns.PLACES + 1)
    }
    summary = {c: {"tokens": 100} | dict.fromkeys(turns.MEASURES, x) for c, x in cells.items()}
    summary |= dict.fromkeys(turns.RATIOS, ratio) | dict.fromkeys(turns.BOUNDS, ratio - 1)
    return dict.fromkeys(turns.ARMS, summary)


def test_table_and_picture_of_made_results():
    lines = turns.FIGURE.text([made(1.9), made(2.1)]).splitlines()
    assert lines[4].startswith("| W8A8 | 2.00 [0.73, 3.27], not different |")
    assert lines[11].startswith("| W8A8 | +1.000 [-0.271, +2.271], not different |")
    assert "| 2.00 [1.87, 2.13], larger |" in turns.FIGURE.text([made(1.99), made(2.01)])
    assert "| 0.50 [0.37, 0.63], smaller |" in turns.FIGURE.text([made(0.49), made(0.51)])
    few = made(2.0)
    few["noise"]["turn", 2]["k1"] = math.nan
    [row] = [x for x in turns.FIGURE.text([few, few]).splitlines() if x.startswith("| noise | 2 and")]
    assert row.split(" | ")[2:6] == ["100", "2 [2, 2]", "–", "2 [2, 2]"]
    page = turns.FIGURE.pictures["turns"].page([made(1.9), few])
    assert [len(axes.containers) for axes in page.axes] == [2, 4, 2, 4]


@pytest.mark.all
def test_a_small_batch(monkeypatch):
    """The control differs by roundings alone, W8A8 by more, and noise by much more."""
    monkeypatch.setattr(turns, "PROMPTS", 32)
    monkeypatch.setattr(turns, "FEWEST", 1)
    setups = [turns.setup_of(arm, 0) for arm in turns.ARMS]
    params = initial_params(setups[0].training)
    tokens = [turns.tokens_of(setup, params) for setup in setups]
    gaps = [x["|log ratio|"].mean() for x in tokens]
    assert gaps[0] < 1e-5 < gaps[1] < gaps[2] / 5
    assert tokens[0]["place"].min() == 1 and tokens[0]["place"].max() <= 8
    assert len({len(values) for values in tokens[0].values()}) == 1
