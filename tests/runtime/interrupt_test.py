"""Signals and notices ask a run to stop; it stops between steps, or within a step after a while."""

import contextlib
import http.server
import io
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_tis.runtime import cli, interrupt
from jaxrl_tis.runtime.interrupt import Interrupt

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_does_not_kill(number, capsys):
    before = signal.getsignal(number)
    with Interrupt(grace=10) as asked:
        asked.check()
        assert not asked.is_set and not asked.is_agreed()
        os.kill(os.getpid(), number)
        assert asked.is_set and asked.is_agreed()
        asked.check()  # the step may go on
    assert signal.getsignal(number) is before
    assert f"{number.name}: stopping after this step, or in the middle of it after 10 s" in (
        capsys.readouterr().out)


def test_after_its_grace_a_step_is_given_up(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    with Interrupt(grace=10) as asked:
        asked.ask("SIGTERM")
        now[0] += 5
        asked.ask("maintenance")  # does not start the grace again
        now[0] += 4.9
        asked.check()
        now[0] += 0.2
        with pytest.raises(cli.Interrupted, match="abandoned"):
            asked.check()
        asked.acknowledge()
        asked.check()  # within the save


def test_a_second_sigterm_changes_nothing():
    with Interrupt(grace=10) as asked:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked.is_set


def test_a_second_ctrl_c_stops_at_once():
    with Interrupt(grace=10) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_with_other_processes_it_looks_at_them_every_eighth_time(monkeypatch):
    looked = []
    monkeypatch.setattr(interrupt.processes, "is_alone", lambda: False)
    monkeypatch.setattr(interrupt.processes, "any_of", lambda late: looked.append(late) or True)
    with Interrupt(grace=0) as asked:
        for _ in range(7):
            asked.check()
        assert not looked
        with pytest.raises(cli.Interrupted):  # another one was asked
            asked.check()
    assert looked == [False]


class Printing(io.TextIOWrapper):
    """A standard output within a call of it."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")


def test_a_signal_within_a_print_stops_the_run_all_the_same(monkeypatch, tmp_path):
    path = tmp_path / "stdout"
    with Printing(open(path, "wb")) as stdout, Interrupt(grace=0) as asked:
        monkeypatch.setattr(sys, "stdout", stdout)
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.undo()
    assert asked.is_set and "SIGTERM: stopping after this step" in path.read_text()


FORCED = """
import contextlib, sys, threading
from jaxrl_tis.runtime import interrupt

interrupt.FORCED_SECONDS = 0.3

with interrupt.Interrupt(grace=0.1) as asked:
    if sys.argv[1] == "stops":
        asked.acknowledge()
    saves = asked.saving() if sys.argv[1] == "saves" else contextlib.nullcontext()
    with saves:
        print("ready", flush=True)
        threading.Event().wait(60 if sys.argv[1] == "hangs" else 1.5)
        print("saved", flush=True)
"""


@pytest.mark.cases("saves-0")
@pytest.mark.parametrize("case, code", [("hangs", 42), ("stops", 0), ("saves", 0)])
def test_a_process_that_reaches_no_place_to_stop_ends_all_the_same(case, code):
    """But for one that is saving."""
    process = subprocess.Popen([sys.executable, "-c", FORCED, case], stdout=subprocess.PIPE, text=True,
                               cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == code and ("ends without a save" in out) == (case == "hangs"), out
    assert ("saved" in out) == (case != "hangs")


@contextlib.contextmanager
def metadata_server(answers, monkeypatch):
    """A server on this machine that answers as Google Cloud's does: {name: text}."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/")
            is_known = name in answers and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(answers[name].encode() if is_known else b"")

        def log_message(self, *_): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("change, notice", [
    ({}, ""),
    ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"},
     "maintenance-event is TERMINATE_ON_HOST_MAINTENANCE"),
    ({"preempted": "TRUE"}, "preempted is TRUE"),
])
def test_notices_of_the_machine(change, notice, monkeypatch):
    answers = {"maintenance-event": "NONE", "preempted": "FALSE"} | change
    with metadata_server(answers, monkeypatch):
        assert interrupt.read_notice() == notice


def test_a_notice_asks_the_run_to_stop_as_a_signal_does(monkeypatch):
    answers = {"maintenance-event": "NONE", "preempted": "FALSE"}
    came = threading.Event()
    monkeypatch.setattr(cli, "has_tpu", lambda: True)
    monkeypatch.setattr(interrupt, "POLL_SECONDS", 0.05)
    with metadata_server(answers, monkeypatch), Interrupt(grace=10) as asked:
        asked.ask = lambda reason: came.set()
        assert not came.wait(0.3)
        answers["preempted"] = "TRUE"
        assert came.wait(60)


def test_a_notice_that_is_there_from_the_beginning_does_not_stop_each_start(monkeypatch):
    answers = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "FALSE"}
    told, came = [], threading.Event()
    monkeypatch.setattr(cli, "has_tpu", lambda: True)
    monkeypatch.setattr(interrupt, "POLL_SECONDS", 0.05)
    with metadata_server(answers, monkeypatch), Interrupt(grace=10) as asked:
        asked.ask = lambda reason: told.append(reason) or came.set()
        assert not came.wait(0.5)
        answers["preempted"] = "TRUE"
        answers["maintenance-event"] = "NONE"
        assert came.wait(60) and told == ["preempted is TRUE"]


def test_a_notice_that_comes_again_is_another_event(monkeypatch):
    answers, came = iter(["x", "x", "", "x"]), threading.Event()
    monkeypatch.setattr(cli, "has_tpu", lambda: True)
    monkeypatch.setattr(interrupt, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(interrupt, "read_notice", lambda: next(answers))
    with Interrupt(grace=10) as asked:
        asked.ask = lambda reason: came.set()
        assert came.wait(60)
    assert next(answers, None) is None


def test_a_server_that_does_not_answer_for_a_while_is_asked_again(monkeypatch):
    answers = iter(["", *[OSError] * 5, "preempted is TRUE"])
    came = threading.Event()

    def read():
        answer = next(answers)
        if answer is OSError:
            raise OSError
        return answer

    monkeypatch.setattr(cli, "has_tpu", lambda: True)
    monkeypatch.setattr(interrupt, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(interrupt, "read_notice", read)
    with Interrupt(grace=10) as asked:
        asked.ask = lambda reason: came.set()
        assert came.wait(60)


def test_a_machine_of_another_kind_is_not_asked_for_ever(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "has_tpu", lambda: True)
    monkeypatch.setattr(interrupt, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(interrupt, "read_notice", lambda: asked.append(1) or os.stat("/none"))
    with Interrupt(grace=10):
        time.sleep(0.3)
    assert len(asked) == interrupt.MAX_FAILURES


def test_without_a_metadata_server_nobody_asks(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    with pytest.raises(OSError):
        interrupt.read_notice()
