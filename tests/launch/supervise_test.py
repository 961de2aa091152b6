import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "supervise.py"


# Decisions


@pytest.mark.parametrize("code, decision", [
    (0, "end"), (1, "end"), (2, "end"), (3, "end"), (42, "restart"),
    (-9, "restart"),  # out of memory
    (-6, "restart"), (134, "restart"),  # JAX aborts when a peer is gone
    (127, "end"),  # no such command
])
def test_what_follows_an_exit(scripts, code, decision):
    supervisor = scripts("supervise").Supervisor(max_restarts=1)
    assert supervisor.after(code) == decision
    assert supervisor.attempt == (2 if decision == "restart" else 1)


def test_restarts_are_bounded(scripts):
    supervisor = scripts("supervise").Supervisor(max_restarts=3)
    assert [supervisor.after(42) for _ in range(4)] == ["restart"] * 3 + ["end"]


def test_no_restart_once_it_was_asked_to_end(scripts):
    supervisor = scripts("supervise").Supervisor(max_restarts=3, is_stopping=True)
    assert supervisor.after(42) == "end"


def test_the_code_is_that_of_the_runs(scripts):
    from jaxrl_tis.runtime import cli

    assert scripts("supervise").RESTART == cli.RESTART


# Processes


@pytest.fixture
def supervised(tmp_path):
    """Starts the script on a Python program that sees FOLDER and counts its starts there; `before`
    is run by the script."""
    def start(body, *flags, wait=0.1, before=""):
        program = (
            "import pathlib, signal, sys, time\n"
            f"folder = pathlib.Path({str(tmp_path)!r})\n"
            "starts = len(list(folder.glob('start*'))) + 1\n"
            "(folder / f'start{starts}').touch()\n" + body
        )
        quick = (
            f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import supervise\n"
            f"supervise.WAIT_SECONDS = {wait}\n{before}\nsys.exit(supervise.main())"
        )
        return subprocess.Popen(
            [sys.executable, "-c", quick, f"--state={tmp_path / 'state.json'}", *flags, "--",
             sys.executable, "-c", program],
            stdout=subprocess.PIPE, text=True,
        )
    yield start


HEARD = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
IGNORED = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"


def starts(folder):
    return len(list(folder.glob("start*")))


@pytest.mark.all
def test_an_interrupted_command_is_started_until_it_ends(supervised, tmp_path):
    process = supervised("sys.exit({1: 42, 2: 42}.get(starts, 0))")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and starts(tmp_path) == 3
    assert "start 1 ended with 42" in out and "ended with 0 after 3 starts" in out
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["attempt"], state["code"]) == (3, 0)


def test_what_is_to_follow_runs_once_at_the_end(supervised, tmp_path):
    path = tmp_path / "after all"
    after = shlex.join([sys.executable, "-c", f"open({str(path)!r}, 'a').write('x')"])
    process = supervised("sys.exit({1: 42}.get(starts, 3))", f"--after={after}")
    process.communicate(timeout=120)
    assert process.returncode == 3 and starts(tmp_path) == 2 and path.read_text() == "x"


@pytest.mark.all
@pytest.mark.parametrize("code", [1, 2])
def test_a_mistake_is_not_repeated(supervised, tmp_path, code):
    process = supervised(f"sys.exit({code})")
    process.communicate(timeout=120)
    assert process.returncode == code and starts(tmp_path) == 1


@pytest.mark.all
def test_after_the_last_restart_the_code_is_passed_on(supervised, tmp_path):
    process = supervised("sys.exit(42)", "--max_restarts=1")
    process.communicate(timeout=120)
    assert process.returncode == 42 and starts(tmp_path) == 2


@pytest.mark.all
def test_a_killed_command_is_started_again(supervised, tmp_path):
    process = supervised("import os\nif starts == 1: os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=120)
    assert process.returncode == 0 and starts(tmp_path) == 2


@pytest.mark.all
def test_the_exit_of_a_killed_command_is_as_a_shell_has_it(supervised, tmp_path):
    process = supervised("import os; os.kill(os.getpid(), signal.SIGKILL)", "--max_restarts=0")
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.all
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_the_command_and_ends_it_all(supervised, tmp_path, number):
    process = supervised(
        f"signal.signal({int(number)}, lambda *_: sys.exit(42))\n"
        "(folder / 'ready').touch()\ntime.sleep(30)"
    )
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 42 and starts(tmp_path) == 1


@pytest.mark.all
@pytest.mark.parametrize("before, ends", [(HEARD, True), (IGNORED, False)])
def test_a_closed_terminal_ends_it_except_under_nohup(supervised, tmp_path, before, ends):
    process = supervised(
        "(folder / 'ready').touch()\ntime.sleep(60 if not (folder / 'go').exists() else 0)\n"
        "sys.exit(0)", before=before)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    if ends:
        assert process.wait(30) == 128 + signal.SIGTERM
        return
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM


@pytest.mark.all
def test_a_file_that_cannot_be_written_ends_nothing(tmp_path, capfd):
    code = subprocess.run(
        [sys.executable, SCRIPT, f"--state={tmp_path / 'missing' / 'a.json'}", "--", "true"]).returncode
    assert code == 0 and "supervise: cannot write" in capfd.readouterr().err


@pytest.mark.all
def test_a_command_that_is_none(capfd):
    assert subprocess.run([sys.executable, SCRIPT, "--", "no_such_command"]).returncode == 127
    assert "supervise: cannot run no_such_command: No such file" in capfd.readouterr().err


@pytest.mark.all
def test_a_signal_between_two_starts_is_followed_by_none(supervised, tmp_path):
    process = supervised("sys.exit(42)", wait=600)
    assert "the next one follows" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 42 and starts(tmp_path) == 1
    assert "ended with 42 after 1 starts" in out
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["attempt"], state["code"]) == (1, 42)


@pytest.mark.all
def test_a_signal_while_the_command_is_being_started_reaches_it(supervised, tmp_path):
    process = supervised(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "(folder / 'ready').touch()\ntime.sleep(30)",
        before=f"""
import os, pathlib, signal, time
start = supervise.subprocess.Popen
def slow(*words, **options):
    process = start(*words, **options)
    while not (pathlib.Path({str(tmp_path)!r}) / "ready").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
supervise.subprocess.Popen = slow
""")
    process.communicate(timeout=120)
    assert process.returncode == 42 and starts(tmp_path) == 1
