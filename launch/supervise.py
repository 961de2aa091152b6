"""Runs a command and restarts it after interruptions.

A command is restarted after exit code 42 or a signal (out of memory, a lost process of another
host), at most --max_restarts times. Any other exit is final: 0 is the end, 2 an error in config or
data, 1 a run that cannot continue. SIGTERM and SIGINT are passed on to the command, which saves,
and no restart follows. FILE always holds {"attempt", "code", "pid"} as JSON; code is null while the
command runs. A closed terminal counts as SIGTERM, except under nohup.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

EXAMPLES = """examples:
  python launch/supervise.py -- python -m jaxrl_tis.main --config=configs/quickstart.py --workdir=runs/a
  python launch/supervise.py --max_restarts=5 --state=run.json -- ./launch/quickstart.sh"""
RESTART = 42
UNKNOWN_COMMAND = 127  # as shells have it
WAIT_SECONDS = 10.0  # between an exit and the next start


@dataclasses.dataclass
class Supervisor:
    """Decides what follows an exit, without a clock or a process.

    Attributes:
      max_restarts: limit on restarts.
      attempt: number of the current start, from 1.
      is_stopping: whether the supervisor received a signal to end.
    """

    max_restarts: int
    attempt: int = 1
    is_stopping: bool = False

    def after(self, code: int) -> str:
        """Returns "restart" or "end" for an exit code; a negative code is a signal."""
        interrupted = code == RESTART or code < 0 or code >= 128
        if self.is_stopping or not interrupted or self.attempt > self.max_restarts:
            return "end"
        self.attempt += 1
        return "restart"


def supervise(command: list[str], supervisor: Supervisor, state: pathlib.Path | None) -> int:
    """Runs the command to its final exit and returns the exit code."""
    process, missed = None, []  # signals that came while there was no process to send them to
    passed_on = lambda number: signal.SIGTERM if number == signal.SIGHUP else number

    def stop(number: int, _) -> None:
        supervisor.is_stopping = True
        if process is None:
            missed.append(number)
        else:
            process.send_signal(passed_on(number))  # type: ignore[unreachable]

    stopping = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        stopping.append(signal.SIGHUP)
    for number in stopping:
        signal.signal(number, stop)
    while True:
        try:
            process = subprocess.Popen(command, start_new_session=True)
        except OSError as error:
            print(f"supervise: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
            return UNKNOWN_COMMAND
        for asked in missed:
            process.send_signal(passed_on(asked))
        _write(state, supervisor.attempt, None, process.pid)
        code, pid, attempt = process.wait(), process.pid, supervisor.attempt
        process = None
        if supervisor.after(code) == "restart":
            print(f"supervise: start {attempt} ended with {code}, the next one follows", flush=True)
            _sleep(supervisor)
            if not supervisor.is_stopping:
                continue
        code = 128 - code if code < 0 else code
        _write(state, attempt, code, pid)
        print(f"supervise: ended with {code} after {attempt} starts", flush=True)
        return code


def _sleep(supervisor: Supervisor) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until and not supervisor.is_stopping:
        time.sleep(0.1)


def _write(state: pathlib.Path | None, attempt: int, code: int | None, pid: int) -> None:
    if state is None:
        return
    new = state.with_name(state.name + ".new")
    try:
        new.write_text(json.dumps({"attempt": attempt, "code": code, "pid": pid}) + "\n")
        os.replace(new, state)
    except OSError as error:  # the command goes on
        print(f"supervise: cannot write {state}: {error.strerror}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--max_restarts", type=int, default=20, help="limit on restarts")
    parser.add_argument("--state", type=pathlib.Path, help="file for attempt, code and pid")
    parser.add_argument("--after", help="another command to run when the first one has ended for good")
    parser.add_argument("command", nargs="+", help="command to run, after --")
    given = parser.parse_args()
    code = supervise(given.command, Supervisor(given.max_restarts), given.state)
    if given.after is not None:
        subprocess.run(shlex.split(given.after))
    return code


if __name__ == "__main__":
    sys.exit(main())
