"""LoRA beside full training: sizes by hand, the tables, the picture, and recorded runs."""

import json
import types

import numpy as np
import pytest

from configs import fig_lora
from experiments import lora, records
from tests.experiments import made

SIZES = {"full": (1000, 12, 0), "rank-32": (40, 5, 3)}
CONFIG = types.SimpleNamespace(get_config=fig_lora.get_config, sweep=lambda: {"rank-32": {}, "absent": {}})


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(lora, "config_of", lambda module, arm: arm)
    monkeypatch.setattr(lora, "sizes", SIZES.get)


def runs():
    """Full training ends 0.1 higher, and 0.12 with seed 1. Its steps take 2 s instead of 3 s, and the first
    ones 9 s."""
    return [
        made.run(
            arm, seed, accuracy=(0.3, 0.9, *[end + 0.02 * seed * (arm == "full")] * 3),
            time__step_s=[9.0] + [2.0 if arm == "full" else 3.0] * 11, rollout_corr__k3_kl=1e-4,
        )
        for arm, end in (("full", 0.6), ("rank-32", 0.5)) for seed in range(2)
    ]


def parts_of(runs, recorded=None):
    figure = lora.figure("x", CONFIG, recorded)
    return [part.splitlines() for part in figure.text(records.by_arm(runs)).split("\n\n")]


def test_the_tables(counted):
    accuracies, costs, sizes = parts_of(runs())
    full, low_rank = accuracies[2:]
    assert full.startswith("| full | 2 | 0.300 [0.300, 0.300] | 0.610 [") and full.endswith("| – |")
    # The mean of -0.1 and -0.12, +- 12.7062 * 0.01
    assert low_rank.startswith("| rank-32 | 2 | 0.300 [0.300, 0.300] | 0.500 [0.500, 0.500] | -0.110 [-0.237, +0.017]")
    assert costs[2] == (
        "| full | 1.0e-04 [1.0e-04, 1.0e-04] | 1.000 [1.000, 1.000] | 2.00 [2.00, 2.00] | – |")
    assert costs[3].endswith("| 3.00 [3.00, 3.00] | 1.50 [1.50, 1.50] |")
    assert sizes[2:] == ["| full | 1,000 | 12 | 0 |", "| rank-32 | 40 | 5 | 3 |"]


def test_a_run_without_a_measure_has_no_value_for_it(counted):
    found = runs()
    found[2].series["time/host_peak_gib"][:] = np.nan
    full, low_rank = parts_of(found)[1][2:]
    assert " | – | 3.00 [" in low_rank and " | 1.000 [1.000, 1.000] | 2.00 [" in full


def test_runs_of_another_day_are_not_timed(counted):
    header, _, full, low_rank = parts_of(runs(), recorded=list)[1]
    assert header == "| arm | k3 | peak memory of the process, GiB |"
    assert full == "| full | 1.0e-04 [1.0e-04, 1.0e-04] | 1.000 [1.000, 1.000] |"
    assert low_rank.count("|") == 4


def test_bytes_of_numbers():
    assert lora.num_bytes({"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, np.int8)}) == 29


@pytest.mark.all
def test_the_sizes_of_the_quickstart():
    """4 layers of width 128: q 128x128, k and v 128x64, o 128x128, gate and up 128x384, down 384x128, two norms;
    a final norm, and an embedding for each character."""
    widths = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 384), (128, 384), (384, 128)]
    configs = {arm: lora.config_of(fig_lora, arm) for arm in ("full", "rank-32")}
    vocab = lora.build(configs["full"]).model.vocab_size
    matrices = 4 * sum(i * o for i, o in widths)
    others = (vocab + 1 + 4 * 2) * 128
    scales = 4 * sum(o for _, o in widths)
    counts = 2 * 4  # steps of Adam and of its schedule, int32
    synced, trained, base = lora.sizes(configs["full"])
    assert (synced, base) == (matrices + 4 * (others + scales), 0)
    assert abs(trained - 12 * (matrices + others)) <= 2 * counts
    factors = 4 * sum(32 * (i + o) for i, o in widths)
    synced, trained, base = lora.sizes(configs["rank-32"])
    assert (synced, base) == (4 * factors, 4 * (matrices + others))
    assert abs(trained - 12 * factors) <= 2 * counts


def test_the_picture():
    page = lora.figure("x", CONFIG).pictures["x"].page(records.by_arm(runs()))
    assert [[x.get_text() for x in axes.get_legend().texts] for axes in page.axes] == [["full", "rank-32"]] * 2


def write_recorded(folder):
    """Writes 8 steps with k3 = 1, 2, ..., and two evaluations, as the record of seed 3."""
    values = lambda step: {"rollout_corr/k3_kl": float(step), "time/step_s": 2.0}
    lines = [{"step": s, "phase": "train", **values(s)} for s in range(1, 9)]
    lines += [{"step": s, "phase": "eval", **dict.fromkeys(records.ACCURACIES, s / 16)} for s in (0, 8)]
    (folder / "seed3").mkdir()
    (folder / "seed3" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_recorded_runs_are_those_of_full_training(tmp_path):
    write_recorded(tmp_path)
    [run] = lora.recorded_runs(tmp_path)
    assert (run.arm, run.seed, lora.start(run), lora.end(run)) == ("full", 3, 0.0, 0.5)
    assert list(run.series["rollout_corr/k3_kl"]) == [4.5]
    assert np.isnan(records.at_end(run, "time/host_peak_gib"))


def test_the_figure_joins_recorded_runs(counted, tmp_path, capsys):
    write_recorded(tmp_path)
    made.write(tmp_path / "x.jsonl", [made.run("rank-32", 3, accuracy=(0.0, 0.25))])
    lora.figure("x", CONFIG, lambda: lora.recorded_runs(tmp_path)).write(tmp_path, "x")
    assert "| rank-32 | 1 | 0.000 [-inf, inf] | 0.250 [-inf, inf] | -0.250 [-inf, +inf] |" in capsys.readouterr().out
    assert (tmp_path / "x.png").exists()
