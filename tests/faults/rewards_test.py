"""A reward that does harm scores `on_error` within its time, and leaves nothing running."""

import http.server
import os
import threading
import time

import pytest

from jaxrl_tis.data import confined
from jaxrl_tis.data.rewards import RewardWorker

pytestmark = pytest.mark.faults

HARM = '''
import os, signal, socket, subprocess, sys, time

def endless(argument):
    code = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code, argument], start_new_session=True)

def reward(text, record):
    if text == "loop":
        while True:
            pass
    if text == "fork":
        while True:
            if os.fork() == 0:
                time.sleep(0.001)
    if text == "flood":
        block = "x" * (1 << 20)
        while True:
            print(block)
            sys.stderr.write(block)
    if text == "allocate":
        return len(bytearray(8 << 30))
    if text == "ignore":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    if text == "connect":
        socket.create_connection(("127.0.0.1", int(record["answer"])), timeout=5).close()
    if text == "escape":
        endless(record["answer"])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                endless(record["answer"])
                time.sleep(600)
            os._exit(0)
        time.sleep(600)
    if text == "names":
        return {f"component {i}" * 100: 1.0 for i in range(10_000)}
    if text == "file":
        with open(record["answer"], "wb") as file:
            file.truncate(0)
            for _ in range(3000):
                file.seek(1 << 20, 1)
                file.write(b"x")
    return 1.0
'''
NEEDS = pytest.mark.skipif(
    not confined.namespaces(), reason="the system lets nobody have a namespace of their own"
)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "harmful.py").write_text(HARM)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardWorker("harmful:reward", timeout=1.0, on_error=-1.0) as worker:
        yield worker


def processes(argument):
    """Host numbers of the processes started with this argument, or in this group or session."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if argument.encode() in file.read():
                    found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def scored(worker, text, answer=""):
    """(score, seconds, whether the next text was scored as ever)"""
    start = time.monotonic()
    record = {"prompt": "", "answer": answer, "id": "x"}
    [score, other] = worker.score([text, "fine"], [record] * 2)
    return score, time.monotonic() - start, other == 1.0


@pytest.mark.parametrize("text, count", [
    ("loop", "timeouts"), ("fork", "timeouts"), ("flood", "timeouts"), ("allocate", "errors"),
    ("ignore", "timeouts"), ("names", "errors"),
])
def test_harm_costs_one_item_and_its_time(worker, text, count, capfd):
    score, seconds, goes_on = scored(worker, text)
    assert score == -1.0 and goes_on and seconds < 8
    assert worker.counts[count] == 1 and sum(worker.counts.values()) == 1
    shown = capfd.readouterr().err
    assert len(shown) < 2 * confined.SHOWN_BYTES
    assert ("no more of what the reward" in shown) == (text == "flood")
    worker.close()
    deadline = time.monotonic() + 10
    while processes("harmful:reward"):  # the forks, too
        assert time.monotonic() < deadline, "something is left running"
        time.sleep(0.02)


def test_a_file_ends_at_its_limit(worker, tmp_path, monkeypatch):
    score, _, goes_on = scored(worker, "file", str(tmp_path / "large"))
    assert score == -1.0 and goes_on and "File too large" in worker.last_error
    assert os.path.getsize(tmp_path / "large") <= confined.LIMITS[confined.resource.RLIMIT_FSIZE]


@NEEDS
def test_what_left_its_group_and_session_ends_too(worker, tmp_path):
    argument = str(tmp_path / "escaped")
    seen = []
    look = threading.Timer(0.8, lambda: seen.extend(processes(argument)))
    look.start()
    score, seconds, goes_on = scored(worker, "escape", argument)
    look.join()
    assert score == -1.0 and goes_on and seconds < 8 and len(seen) >= 2
    deadline = time.monotonic() + 10
    while processes(argument):
        assert time.monotonic() < deadline, "something is left running"
        time.sleep(0.02)


@NEEDS
def test_there_is_no_network(worker):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    try:
        score, _, goes_on = scored(worker, "connect", str(server.server_port))
    finally:
        server.server_close()
    assert score == -1.0 and goes_on
    assert "OSError" in worker.last_error or "ConnectionRefused" in worker.last_error
