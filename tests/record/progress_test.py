"""Progress on a terminal and elsewhere."""

import io
import os
import pty
import termios

import pytest

from jaxrl_tis.record import progress
from jaxrl_tis.record.progress import Progress, clock


def set_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_lines_without_a_terminal(monkeypatch):
    now, stream = set_clock(monkeypatch), io.StringIO()
    with Progress(10, "rollout", stream) as shown:
        for _ in range(10):
            now[0] += 2.0
            shown.update(1, reward=0.123456)
    # Lines at 6 s and 12 s (the first updates at least 5 s after the last line), 18 s, and the end.
    assert stream.getvalue().splitlines() == [
        "rollout: 3/10, 6s gone, 14s left, reward=0.1235",
        "rollout: 6/10, 12s gone, 8s left, reward=0.1235",
        "rollout: 9/10, 18s gone, 2s left, reward=0.1235",
        "rollout: 10/10, 20s gone, 0s left, reward=0.1235"]


def test_progress_prints_the_last_state_of_a_phase_cut_short(monkeypatch):
    now, stream = set_clock(monkeypatch), io.StringIO()
    shown = Progress(4, "eval", stream)
    shown.update(1)
    now[0] += 1.0
    shown.close()
    assert stream.getvalue() == "eval: 1/4, 1s gone, 3s left\n"


def test_progress_bar_on_a_terminal():
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    with open(slave, "w") as stream:
        with Progress(2, "train", stream) as shown:
            shown.update(1, reward=0.25)
            shown.update(1, reward=0.5)
        stream.write("END")
        stream.flush()
        output = ""
        while not output.endswith("END"):  # a terminal hands its text over in pieces
            output += os.read(master, 10_000).decode()
    os.close(master)
    assert "train: 100%" in output and "2/2" in output and "reward=0.5" in output
    # One bar drawn over itself, a line only at its end.
    assert output.count("\rtrain") >= 2 and output.count("\n") == 1


@pytest.mark.parametrize("seconds, text", [(0.4, "0s"), (59.4, "59s"), (192, "3m12s"),
                                           (3599.7, "1h00m"), (7500, "2h05m")])
def test_clock(seconds, text):
    assert clock(seconds) == text
