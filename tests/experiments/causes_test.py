"""The confusion table of the doctor, by hand."""

import numpy as np

from configs import fig_causes
from jaxrl_tis.doctor.trees import CAUSES as FINDINGS
from experiments import causes, records
from tests.experiments import made


def run(arm, seed, findings=(), verdict=("A",)):
    return made.run(arm, seed, verdict=verdict, findings=findings)


RUNS = [
    run("injected", 2, ["A", "A.injected"]), run("injected", 3, ["A", "A.injected", "B.reuse"]),
    run("none", 2, ["healthy"], ["healthy"]), run("none", 3, ["C"], ["C"]),
    run("float8", 2, ["watch"], ["watch"]),
    run("none", 0, ["C"], ["C"]),  # a seed that was seen
]


def test_right_is_the_own_cause_alone():
    assert [causes.is_right(r) for r in RUNS] == [True, False, True, False, True, False]
    assert causes.found(RUNS[3]) == ["unclear"]
    both = run("filter", 2, ["A", "A.record", "A.filter"])
    assert causes.found(both) == ["record", "filter"] and not causes.is_right(both)


def test_the_confusion_of_held_out_seeds():
    arms, named, counts = causes.confusion(RUNS[:5])
    assert (arms, named) == (["injected", "none", "float8"], ["injected", "none", "float8", "unclear"])
    np.testing.assert_array_equal(counts, [[2, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 0]])
    text = causes.table(records.by_arm(RUNS))
    assert "| injected | 2 |  |  |  | 1 |" in text
    assert "Right: 0.600 [0.231, 0.882] of 5 runs" in text  # Wilson's interval of 3 of 5


def test_causes_and_arms_are_those_that_there_are():
    assert set(causes.CAUSES) <= {finding.name for finding in FINDINGS}
    assert set(fig_causes.sweep()) - {"none", *causes.TOO_SMALL} <= set(causes.CAUSES.values())
    page = causes.FIGURE.pictures["causes"].page(records.by_arm(RUNS))
    assert [x.get_text() for x in page.axes[0].texts] == ["2", "1", "1", "1"]
