"""The table of metrics: its rows, its page, and that all names of the sources are in it."""

import pathlib
import re
import subprocess
import sys

import pytest

from docs import make_metrics
from jaxrl_tis.doctor import frameworks
from jaxrl_tis.record import names
from jaxrl_tis.report import plots

PACKAGE = pathlib.Path(names.__file__).parents[1]
GROUPS = "|".join(sorted({name.split("/")[0] for m in names.METRICS for name in m.names}))
# Beginnings of names that the gate alone writes, and a column of experiments/records.py.
OTHERS = "mismatch/kept_", "eval/steps"
FOREIGN = "frameworks.py", "console.py"  # hold the names of other frameworks


def test_the_page_is_current():
    assert make_metrics.PAGE.read_text(encoding="utf-8") == make_metrics.page()


@pytest.mark.all
def test_it_is_imported_without_jax():
    code = "import sys; from jaxrl_tis.record import names; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_expanding_braces():
    assert names.Metric("a/{b,c}/{d,e}", "", "").names == ["a/b/d", "a/b/e", "a/c/d", "a/c/e"]


def test_a_placeholder_of_a_number_is_digits():
    assert re.fullmatch(names.regex("a/<n>_b"), "a/17_b")
    assert not re.fullmatch(names.regex("a/<n>_b"), "a/_b")
    assert re.fullmatch(names.regex("a/<mask>_b"), "a/no such mask_b")
    assert not re.fullmatch(names.regex("a/<mask>_b", {"<mask>": "veto"}), "a/no such mask_b")


def test_a_name_is_not_found_by_a_part_of_it():
    assert names.find("actor/lr").pattern == "actor/lr" and names.find("critic/lr").source == "verl"
    assert names.find("actor/lr_scale") is None and names.find("xactor/lr") is None
    assert names.find("mismatch/turn_1/dp_mean") and names.find("mismatch/turn_1/dp_mean_x") is None


def test_a_row_of_the_very_name_comes_before_a_family():
    masked = names.find("rollout_corr/rollout_rs_seq_masked_fraction")
    assert masked.pattern == "rollout_corr/rollout_rs_seq_masked_fraction"
    family = names.find("rollout_corr/rollout_rs_veto_mean")
    assert family.pattern == "rollout_corr/rollout_rs_<mask>_<statistic>"


def test_no_name_has_two_rows():
    every = [name for metric in names.METRICS for name in metric.names]
    assert len(every) == len(set(every)) > 250


def test_every_row_is_whole():
    whole = lambda m: m.unit and m.meaning.endswith(".") and not m.meaning[0].islower()
    assert [metric.pattern for metric in names.METRICS if not whole(metric)] == []


def test_the_compact_record():
    """Counts of corrections and all of an evaluation; of the gap the sizes, not the profiles."""
    assert all(map(names.is_compact, (
        "correction/mask/veto_2/dropped", "eval/n", "reward/component/format", "time/step_s",
        "rollout_corr/kl",
    )))
    assert not any(map(names.is_compact, (
        "mismatch/position_16/dp_mean", "rollout_corr/rollout_is_std", "time/update_s", "unknown",
    )))


def test_every_name_in_the_sources_has_a_row():
    """Or is the beginning of one."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name not in FOREIGN]
    found = {name for text in texts for name in re.findall(rf'"((?:{GROUPS})/[a-z0-9_/]+)"', text)}
    every = [name for metric in names.METRICS for name in metric.names]
    begins = lambda name: any(other.startswith(name) for other in every)
    left = [name for name in sorted(found) if names.find(name) is None and not begins(name)]
    assert len(found) > 100 and [name for name in left if not name.startswith(OTHERS)] == []


def test_plots_are_of_metrics_in_the_table():
    assert all(names.find(metric) for plot in plots.PLOTS for metric in plot.series)


def test_what_verl_calls_the_same_is_marked_so():
    same = [row.ours for row in frameworks.VERL.names if row.theirs == (row.ours,)]
    assert len(same) > 20 and [name for name in same if names.find(name).source != "verl"] == []
