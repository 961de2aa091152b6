"""Rewards that failed: what is printed, counted and kept."""

import pytest

from jaxrl_tis.record import failures
from jaxrl_tis.record.failures import Failures
from jaxrl_tis.runtime.cli import Unwritable


def test_the_first_of_a_kind_is_printed_and_all_are_counted(tmp_path):
    path, said = tmp_path / failures.FILE_NAME, []
    found = Failures(path, said.append)
    for i in range(5):
        found.add("KeyError at f.py:3", f"KeyError: {i}", "Traceback 1" if i == 0 else "", f"id{i}", "a" * i)
    found.add("the reward returned None", "the reward returned None", "", "id9", "b" * 5000)
    assert said == [
        "no reward, example id0: KeyError: 0 (further ones like it are counted)", "Traceback 1",
        "no reward, example id9: the reward returned None (further ones like it are counted)",
    ]
    assert failures.read(path) == []  # nothing is written until it is asked for
    found.write()
    error, none = failures.read(path)
    assert (error.kind, error.count, error.error) == ("KeyError at f.py:3", 5, "KeyError: 0")
    assert error.traceback == "Traceback 1"
    assert error.last == [
        {"id": f"id{i}", "text": "a" * i, "error": f"KeyError: {i}"} for i in (2, 3, 4)
    ]
    assert len(none.last[0]["text"]) == failures.TEXT_CHARACTERS
    assert error.last_at <= none.last_at and error.last_at.endswith("Z")
    lines = failures.described([none, error])
    assert lines[0].startswith("5 x KeyError at f.py:3, the last at 2")
    assert lines[0].endswith(", example id4: KeyError: 4")


def test_a_run_that_is_continued_adds_to_the_file(tmp_path):
    path, said = tmp_path / failures.FILE_NAME, []
    for _ in range(2):
        found = Failures(path, said.append)
        found.add("kind", "error", "", "x", "text")
        found.write()
    assert [f.count for f in failures.read(path)] == [2]
    assert len(said) == 2  # each process says it once


def test_the_file_is_bounded(tmp_path):
    path = tmp_path / failures.FILE_NAME
    found = Failures(path, lambda text: None)
    for i in range(200):
        found.add(f"kind {i}", "error", "trace", "x", "text")
    found.write()
    kinds = failures.read(path)
    assert len(kinds) == failures.KINDS + 1 and sum(f.count for f in kinds) == 200
    assert kinds[-1].kind == failures.OTHERS


@pytest.mark.parametrize("line", ["no JSON", '{"kind": "x"}', "3"])
def test_a_file_of_another_kind_is_named(tmp_path, line):
    path = tmp_path / failures.FILE_NAME
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="reward_errors.jsonl, line 1: not a record of failed rewards"):
        failures.read(path)


def test_a_file_that_cannot_be_written_can_be_mended(tmp_path):
    found = Failures(tmp_path / "none" / failures.FILE_NAME, lambda text: None)
    found.add("kind", "error", "", "x", "text")
    with pytest.raises(Unwritable, match="No such file.*start the same command again"):
        found.write()
