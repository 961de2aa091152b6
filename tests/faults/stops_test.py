"""A run that is stopped at every step, each time another way, is the uninterrupted run."""

import json
import signal

import pytest

from tests import resume_test, tiny
from tests.resume_test import Cut, assert_same_run, cut_at

pytestmark = [pytest.mark.faults, pytest.mark.all]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Epochs that end within batches, two minibatches of two epochs, several sequences a row."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": f"{i + 1}", "id": f"{i}"} for i in range(9)]
    rows.append({"prompt": "0+0=", "answer": "0", "id": "9"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(path)}
    return dict(
        task__name="jsonl", task__params=data, eval__params=data, warmup__params=data,
        train__pack_length=32, checkpoint__every=1,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, settings):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    tiny.run(workdir, **settings)
    return workdir


@pytest.mark.parametrize("how", [signal.SIGTERM, Cut, "after update"])
def test_a_run_stopped_at_every_step_is_the_uninterrupted_run(tmp_path, settings, finished, how):
    for step in range(1, tiny.STEPS + 1):
        with cut_at(step, how):
            tiny.run(tmp_path / "run", **settings)
    tiny.run(tmp_path / "run", **settings)
    assert_same_run(tmp_path / "run", finished, **settings)


def test_the_run_has_what_these_tests_need(settings, finished):
    records = [r for r in tiny.lines(finished) if r["phase"] == "train"]
    assert len(records) == tiny.STEPS and all(r["actor/grad_norm"] > 1e-4 for r in records)
    _, meta = resume_test.final_state(finished, **settings)
    # Five batches of four are two epochs of ten: the first ended within the third batch.
    assert meta["source"]["batches"]["fingerprint"]["length"] == 10
