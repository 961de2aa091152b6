"""One byte changed anywhere in the data of a run, or of its evaluation, refuses to continue it."""

import json
import shutil
from unittest import mock

import pytest

from tests import tiny
from jaxrl_tis import train

pytestmark = pytest.mark.faults

ROWS = 300


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of one step on two files of 300 lines each."""
    folder = tmp_path_factory.mktemp("begun")
    for name in ("train", "held_out"):
        rows = [{"prompt": f"{i % 10}+1=", "answer": f"{i % 10 + 1}", "id": f"{i:03}"}
                for i in range(ROWS)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.run(folder / "run", **settings(folder), steps=1)
    return folder


def settings(folder):
    task = {"path": str(folder / "train.jsonl")}
    held_out = {"path": str(folder / "held_out.jsonl")}
    return dict(task__name="jsonl", task__params=task, warmup__params=task, eval__params=held_out,
                eval__prompts=4)


class Reached(Exception):
    """The run was about to take its second step."""


@pytest.fixture
def go_on(begun, tmp_path):
    """Starts the begun run again; the files are as they were afterwards."""
    def start():
        shutil.copytree(begun / "run", tmp_path / "run", dirs_exist_ok=True)
        with mock.patch.object(train, "profiled", side_effect=Reached):
            tiny.run(tmp_path / "run", **settings(begun), steps=2)

    texts = {path: path.read_bytes() for path in begun.glob("*.jsonl")}
    yield start
    for path, text in texts.items():
        path.write_bytes(text)


@pytest.mark.all
@pytest.mark.parametrize("name, message", [
    ("train", r"examples differ"), ("held_out", "the held-out examples differ"),
])
@pytest.mark.parametrize("line", [
    151, *(pytest.param(i, marks=pytest.mark.all) for i in (0, 1, 77, 150, 233, ROWS - 2, ROWS - 1)),
])
def test_a_changed_answer_is_noticed_in_any_line(begun, go_on, name, message, line):
    path = begun / f"{name}.jsonl"
    lines = path.read_text().splitlines()
    changed = json.loads(lines[line])
    lines[line] = json.dumps(changed | {"answer": changed["answer"] + "0"})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        go_on()


@pytest.mark.all
def test_two_lines_that_changed_places_are_noticed(begun, go_on):
    path = begun / "train.jsonl"
    lines = path.read_text().splitlines()
    lines[40], lines[41] = lines[41], lines[40]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="examples differ"):
        go_on()


@pytest.mark.all
def test_the_same_files_elsewhere_in_time_continue(begun, go_on):
    for path in begun.glob("*.jsonl"):
        path.touch()
    with pytest.raises(Reached):
        go_on()
