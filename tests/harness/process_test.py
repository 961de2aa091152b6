import dataclasses
import json
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_tis.harness import process
from jaxrl_tis.harness.process import HarnessProcess, Reply
from jaxrl_tis.harness.protocol import Session

NAME = "tests.harness.agents:"


def session(**example):
    return Session("s", example, "http://127.0.0.1:1/v1", "k", "m", 0)


class Played:
    """A process, and its replies in a queue."""

    def __init__(self, name, python=""):
        self.replies = queue.SimpleQueue()
        self.process = HarnessProcess(NAME + name, self.replies.put, python)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.close()

    def next(self):
        return self.replies.get(timeout=10)


@pytest.mark.all
def test_sessions_in_a_process(capfd):
    with Played("plain") as played:
        for i in range(3):
            played.process.start(f"{i}", session(reward=i / 2))
        found = sorted([played.next() for _ in range(3)], key=lambda r: r.key)
    assert found == [Reply(f"{i}", i / 2, {}, None) for i in range(3)]
    shown, limit = "", time.monotonic() + 60
    while shown.count("a harness may print") < 3 and time.monotonic() < limit:
        shown += capfd.readouterr().err
        time.sleep(0.01)
    assert shown.count("a harness may print") == 3


@pytest.mark.all
def test_a_cancelled_session_has_no_reply():
    with Played("waiting") as played:
        played.process.start("0", session(seconds=0.1))
        played.process.start("1", session(seconds=0.2))
        played.process.cancel("0")
        reply = played.next()
        assert (reply.key, reply.calls) == ("1", [[[1, 2], None], [[3], [-0.5]]])


@pytest.mark.all
@pytest.mark.parametrize("name, words", [
    ("missing", "the harness 'tests.harness.agents:missing' cannot be loaded: AttributeError"),
    ("NUMBER", "TypeError: .* not a function of a session"),
])
def test_a_harness_that_cannot_be_used_is_one_sentence(name, words):
    with pytest.raises(ValueError, match=words):
        Played(name)


@pytest.mark.all
@pytest.mark.parametrize("python, words", [
    ("/missing/python", "cannot be started: rollout.harness_python is '/missing/python'; give the path"),
    (os.getcwd(), "cannot be started: rollout.harness_python is"),
    ("/bin/true", "cannot be loaded: EOFError: its process ended; its output is above"),
])
def test_a_python_that_is_none(python, words):
    with pytest.raises(ValueError, match=words):
        Played("plain", python=python)


@pytest.mark.faults
def test_a_process_that_ends_fails_its_sessions_and_another_starts():
    with Played("dying") as played:
        played.process.start("0", session(dies=False))
        played.process.start("1", session())
        ended = sorted([played.next(), played.next()], key=lambda r: r.key)
        assert [r.error for r in ended] == ["the harness's process ended"] * 2
        played.process.start("2", session(dies=False))
        assert played.next() == Reply("2", 2.0, {}, None)
        assert not played.process.error


@pytest.mark.all
@pytest.mark.faults
def test_nothing_else_waits_while_another_process_starts(monkeypatch):
    goes_on, loading = threading.Event(), process.Child.begin

    def late(*arguments):
        goes_on.wait(20)
        return loading(*arguments)

    with Played("dying") as played:
        played.process.start("0", session())
        assert played.next().error
        monkeypatch.setattr(process.Child, "begin", late)
        start = threading.Thread(target=played.process.start, args=("1", session(dies=False)))
        start.start()
        cancel = threading.Thread(target=played.process.cancel, args=("2",))
        cancel.start()
        cancel.join(10)
        assert not cancel.is_alive() and start.is_alive()
        goes_on.set()
        start.join(10)
        assert played.next() == Reply("1", 2.0, {}, None)


@pytest.mark.all
@pytest.mark.faults
def test_a_process_whose_event_loop_is_blocked_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "ANSWER_SECONDS", 1.0)
    note, limit = tmp_path / "note", time.monotonic() + 60
    with Played("blocking") as played:
        played.process.start("0", session(seconds=60, note=str(note)))
        while not note.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        played.process.check()
        assert played.next() == Reply("0", error="the harness's process ended", is_lost=True)
        played.process.start("1", session(seconds=0, note=str(note)))
        assert played.next() == Reply("1", 1.0, {}, None)


@pytest.mark.all
@pytest.mark.faults
def test_a_process_that_reads_nothing_holds_up_nobody(monkeypatch):
    """Messages of more bytes than a pipe holds."""
    monkeypatch.setattr(process, "ANSWER_SECONDS", 1.0)
    with Played("holding") as played:
        before = time.monotonic()
        for i in range(40):
            played.process.start(str(i), session(text="x" * 10_000))
        played.process.cancel("39")
        played.process.check()
        assert time.monotonic() - before < 60.0  # the start of the process is in it
        found = {played.next() for _ in range(39)}
        lost = Reply("", error="the harness's process ended", is_lost=True)
        assert found == {dataclasses.replace(lost, key=str(i)) for i in range(39)}


@pytest.mark.all
def test_a_session_that_ends_by_stop_iteration_has_failed():
    with Played("exhausted") as played:
        played.process.start("0", session())
        error = played.next().error
        assert "StopIteration" in error and "agents.py" in error


@pytest.mark.all
@pytest.mark.faults
def test_a_process_that_writes_among_its_replies_is_ended():
    with Played("chatty") as played:
        played.process.start("0", session())
        assert played.next() == Reply("0", error="the harness's process ended", is_lost=True)


@pytest.mark.all
def test_a_process_that_answers_stays(monkeypatch):
    monkeypatch.setattr(process, "ANSWER_SECONDS", 3.0)
    with Played("waiting") as played:
        before = played.process._process
        played.process.start("0", session(seconds=4.0))
        played.process.check()
        assert played.next().reward == 1.0 and played.process._process is before


@pytest.mark.all
@pytest.mark.faults
def test_a_process_that_ends_within_a_reply_fails_its_session():
    with Played("torn") as played:
        played.process.start("0", session())
        assert played.next() == Reply("0", error="the harness's process ended", is_lost=True)


@pytest.mark.all
@pytest.mark.faults
def test_a_message_that_an_ended_process_has_not_read():
    with Played("sleeping") as played:
        played.process.start("0", session(seconds=60))
        with played.process._lock:  # its end is not known yet
            ended = played.process._process
            os.killpg(ended.pid, signal.SIGKILL)
            ended._process.wait()
            poll = select.poll()
            poll.register(ended._stdin, 0)
            assert poll.poll(10_000)  # nothing can read it any more
            played.process._send({"cancel": "1"})
        assert played.next() == Reply("0", error="the harness's process ended", is_lost=True)


@pytest.mark.all
@pytest.mark.faults
def test_a_process_that_ends_again_and_again_is_an_error():
    with Played("dying") as played:
        for i in range(process.MOST_ENDS):
            assert not played.process.error
            played.process.start(f"{i}", session())
            played.next()
        assert "has ended 5 times without a reply" in played.process.error


@pytest.mark.all
@pytest.mark.faults
def test_the_process_ends_with_its_parent(tmp_path):
    """Also one whose harness waits, and what it started."""
    code = (
        "import time; from tests.harness.process_test import Played, session\n"
        "played = Played('sleeping'); played.process.start('0', session(seconds=60))\n"
        "print(played.process._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    limit = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}") and time.monotonic() < limit:
        if pathlib.Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{child}")


def test_another_python_gets_the_folders_outside_of_this_one(tmp_path, monkeypatch):
    shown = tmp_path / "shown"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho \"$3\" > {shown}\nexec {sys.executable} \"$@\"\n")
    fake.chmod(0o755)
    monkeypatch.setenv("no_proxy", "")
    with Played("plain", python=str(fake)) as played:
        played.process.start("0", session(reward=1))
        assert played.next().reward == 1
    path = json.loads(shown.read_text())
    assert os.getcwd() in path and not any(entry.startswith(sys.prefix) for entry in path)
