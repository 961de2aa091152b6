"""The budget of the default choice: rows of every file, sums that only fall, and how both are judged."""

import itertools
import re

import pytest

from tests import budget, imports, runs

LIMIT = re.compile(r"^\| (?P<date>\S+) \| " + r" \| ".join(
    rf"(?P<{kind}>[\d,]+)" for kind in budget.KINDS) + r" \| (?P<why>.*) \| (?P<back>.*) \|$", re.M)


def limits():
    """Returns the lines of tests/raises.md, the first one first."""
    number = lambda text: int(text.replace(",", ""))
    return [
        {kind: number(line[kind]) for kind in budget.KINDS} | {"why": line["why"], "back": line["back"]}
        for line in LIMIT.finditer(budget.RAISES.read_text())
    ]


def test_every_file_has_a_row_and_every_row_a_file():
    files = {path for path in imports.files().values() if path.endswith("_test.py")}
    assert budget.rows().keys() <= files


def test_the_sums_are_those_of_the_last_line():
    """So every change of a sum is a line of tests/raises.md."""
    last = limits()[-1] if limits() else dict.fromkeys(budget.KINDS, 0)
    assert budget.sums(budget.rows()) == {kind: last[kind] for kind in budget.KINDS}


def test_a_sum_rises_only_with_a_reason_and_what_was_given_back():
    for before, after in itertools.pairwise(limits()):
        if any(after[kind] > before[kind] for kind in budget.KINDS):
            assert after["why"] and after["back"]


def test_a_file_over_its_row_or_without_one_is_named():
    row = lambda *counts: dict(zip(budget.KINDS, counts, strict=True))
    rows = {"a_test.py": row(3, 10, 0, 1), "b_test.py": row(1, 0, 0, 0)}
    counts = {"a_test.py": row(4, 9, 0, 2), "b_test.py": row(1, 0, 0, 0), "c_test.py": row(1, 0, 0, 0)}
    assert budget.over(counts, rows) == [
        "a_test.py: 4 items, and its budget is 3", "a_test.py: 2 runs, and its budget is 1",
        "c_test.py: no row in tests/budget.json; add one by --write-budget",
    ]
    assert budget.over(counts, rows, ("programs",)) == [
        "c_test.py: no row in tests/budget.json; add one by --write-budget"
    ]
    assert budget.sums(rows) == row(4, 10, 0, 1)
    written = budget.written(rows | {"gone_test.py": row(5, 5, 5, 5)}, counts, rows.__contains__)
    assert written == {"a_test.py": row(3, 9, 0, 1)} | {
        x: row(1, 0, 0, 0) for x in ("b_test.py", "c_test.py")
    }


@pytest.mark.parametrize("changed, there, away", [
    ("jaxrl_tis/estimators/weights.py", "estimators/weights_test", "engine/scheduler_test"),
    ("jaxrl_tis/estimators/weights.py", "estimators/loss_test", "rollouts/threads_test"),
    ("jaxrl_tis/engine/scheduler.py", "rollouts/episodes_test", "estimators/weights_test"),
    ("jaxrl_tis/models/moe.py", "models/moe_test", "doctor/trees_test"),
    ("docs/methods.md", "methods_page_test", "engine/scheduler_test"),
    ("launch/tpu_vm.py", "launch/tpu_vm_test", "engine/scheduler_test"),
    ("tests/tiny.py", "resume_test", "kernels/segment_test"),
])
def test_a_change_reaches_the_tests_that_import_or_name_it(changed, there, away):
    found = imports.tests({changed})
    assert f"tests/{there}.py" in found and f"tests/{away}.py" not in found
    assert set(imports.ALWAYS) <= found


def test_a_changed_source_or_test_has_a_mirror():
    changed = {"jaxrl_tis/engine/scheduler.py", "tests/links_test.py", "README.md"}
    assert imports.mirrors(changed) == changed | {"tests/engine/scheduler_test.py"}


def test_what_all_tests_share_reaches_all_of_them():
    assert "tests/kernels/segment_test.py" in imports.tests({"tests/conftest.py"})


def test_a_relative_of_a_relative_is_reached_and_no_further():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert imports.reached({"a"}, graph) == {"a", "b", "c"}


def test_imports_of_modules_and_of_their_names():
    source = "from jaxrl_tis.estimators import weights\nfrom jaxrl_tis.engine.scheduler import Scheduler\n"
    found = imports.imported(source + "import jaxrl_tis.score\nimport numpy\n")
    assert found == {
        "jaxrl_tis/estimators/weights.py", "jaxrl_tis/engine/scheduler.py", "jaxrl_tis/score.py"
    }


def test_a_shared_run_is_made_once_and_costs_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv(runs.FOLDER, str(tmp_path))
    before, made = budget.spent["runs"], []

    def make(folder):
        budget._add("runs")
        folder.mkdir()
        made.append(folder)
        if len(made) == 1:
            raise OSError("the disk is full")

    with pytest.raises(OSError):
        runs.shared("a", make)
    assert runs.shared("a", make) == runs.shared("a", make) == made[1]
    assert runs.shared("b", make) != made[1]
    assert len(made) == 3 and budget.spent["runs"] == before
