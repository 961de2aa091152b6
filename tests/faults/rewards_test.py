"""A reward that does harm scores `on_error` within its time, and leaves nothing running."""

import http.server
import os
import threading
import time

import pytest

from jaxrl_tis.data import child, confined
from jaxrl_tis.data.rewards import RewardWorker

pytestmark = pytest.mark.faults

HARM = '''
import os, signal, socket, subprocess, sys, time

def endless(argument):
    code = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code, argument], start_new_session=True)

def reward(text, example):
    if text == "loop":
        while True:
            pass
    if text == "fork":
        while True:
            if os.fork() == 0:
                time.sleep(0.001)
    if text.startswith("two of us"):
        os.fork()
        return float(text[-1])
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
        socket.create_connection(("127.0.0.1", int(example["answer"])), timeout=5).close()
    if text == "escape":
        endless(example["answer"])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                endless(example["answer"])
                time.sleep(600)
            os._exit(0)
        time.sleep(600)
    if text == "names":
        return {f"component {i}" * 100: 1.0 for i in range(10_000)}
    if text == "file":
        with open(example["answer"], "wb") as file:
            file.truncate(0)
            for _ in range(3000):
                file.seek(1 << 20, 1)
                file.write(b"x")
    return 1.0
'''
NEEDS = pytest.mark.skipif(
    not child.namespaces(), reason="the system lets nobody have a namespace of their own"
)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "harmful.py").write_text(HARM)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardWorker("harmful:reward", timeout=1.5, on_error=-1.0) as worker:
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
    example = {"prompt": "", "answer": answer, "id": "x"}
    [score, other] = worker.score([text, "fine"], [example] * 2)
    return score, time.monotonic() - start, other == 1.0


@pytest.mark.all
@pytest.mark.parametrize("text, count", [
    ("loop", "timeouts"), ("allocate", "errors"), ("names", "errors"),
    *(pytest.param(text, "timeouts", marks=pytest.mark.all) for text in ("fork", "flood", "ignore")),
])
def test_harm_costs_one_item_and_its_time(worker, text, count, capfd):
    score, seconds, goes_on = scored(worker, text)
    assert score == -1.0 and goes_on and seconds < 60
    assert worker.counts[count] == 1 and sum(worker.counts.values()) == 1
    shown = capfd.readouterr().err
    assert len(shown) < 2 * child.SHOWN_BYTES
    assert ("no more of what the reward" in shown) == (text == "flood")
    worker.close()
    deadline = time.monotonic() + 30
    while processes("harmful:reward"):  # the forks, too
        assert time.monotonic() < deadline, "something is left running"
        time.sleep(0.02)


@pytest.mark.all
def test_a_fork_that_comes_back_gives_no_second_result(worker):
    texts = ["two of us 2", "fine", "two of us 3", "fine", "two of us 4"]
    for _ in range(2):
        assert worker.score(texts, [{"answer": ""}] * 5) == [2.0, 1.0, 3.0, 1.0, 4.0]
    assert sum(worker.counts.values()) == 0


@pytest.mark.all
def test_a_process_that_cannot_be_started_again_costs_its_items(worker, monkeypatch):
    assert worker.score(["loop"], [{}]) == [-1.0]  # it is killed
    beats = []
    worker._heartbeat = lambda: beats.append(1)
    with monkeypatch.context() as m:
        m.setattr(confined, "START_SECONDS", 0.0)
        assert worker.score(["fine", "fine"], [{}] * 2) == [-1.0, -1.0]
    assert "cannot be loaded" in worker.last_error and len(beats) == 2
    assert worker.score(["fine"], [{}]) == [1.0]


def test_the_threads_of_the_user_are_counted():
    """The limit on processes counts those of the user that were there before."""
    over = threading.Event()
    many = [threading.Thread(target=over.wait) for _ in range(40)]
    before = confined._count_threads()
    for thread in many:
        thread.start()
    assert confined._count_threads() >= before + 30
    over.set()


@pytest.mark.all
def test_a_file_ends_at_its_limit(worker, tmp_path, monkeypatch):
    score, _, goes_on = scored(worker, "file", str(tmp_path / "large"))
    assert score == -1.0 and goes_on and "File too large" in worker.last_error
    assert os.path.getsize(tmp_path / "large") <= confined.LIMITS[confined.resource.RLIMIT_FSIZE]


@pytest.mark.all
@NEEDS
def test_what_left_its_group_and_session_ends_too(worker, tmp_path):
    argument = str(tmp_path / "escaped")
    seen, is_over = [0], threading.Event()

    def look():
        while not is_over.wait(0.02):
            seen.append(len(processes(argument)))

    looking = threading.Thread(target=look)
    looking.start()
    score, seconds, goes_on = scored(worker, "escape", argument)
    is_over.set()
    looking.join()
    assert score == -1.0 and goes_on and seconds < 60 and max(seen) >= 2
    deadline = time.monotonic() + 60
    while processes(argument):
        assert time.monotonic() < deadline, "something is left running"
        time.sleep(0.02)


@pytest.mark.all
@NEEDS
def test_there_is_no_network(worker):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    try:
        score, _, goes_on = scored(worker, "connect", str(server.server_port))
    finally:
        server.server_close()
    assert score == -1.0 and goes_on
    assert "reward.network=True" in worker.last_error
