"""Processes in the place of hosts: a command on several of them at once, on simulated devices."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import time

from tests import forked

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 8
SECONDS = 240  # far more than any of these takes
HEARTBEAT = 10  # seconds, where a process is killed
PATIENCE = 60  # of others: this machine may have something else to do


MAIN = ["-m", "jaxrl_tis.main"]
# Started in the place of jaxrl_tis.main.
CHANGED = """
import sys, time
from jaxrl_tis import cli_flags, main
from jaxrl_tis.record import checkpoint
from jaxrl_tis.runtime import processes
from jaxrl_tis.learner.trainer import Trainer
{}
cli_flags.run(main.main, required=["config", "workdir"])
"""


def changed(folder: pathlib.Path, change: str) -> list[str]:
    """The command of jaxrl_tis.main after a change, lines of Python."""
    path = folder / "changed.py"
    path.write_text(CHANGED.replace("{}", change))
    return [str(path)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Hosts:
    """`count` processes of a Python command (what follows `python`), each with its part of eight
    devices. Output goes to FOLDER/host<i>.log; all are killed at the end of the block."""

    def __init__(
        self, folder, command, count=2, devices=DEVICES, per_host=None, heartbeat=PATIENCE,
        **environment,
    ):
        self.logs = [pathlib.Path(folder) / f"host{i}.log" for i in range(count)]
        folder.mkdir(parents=True, exist_ok=True)
        connection = [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}",
                      f"--heartbeat_timeout={heartbeat}"]
        flag = "--xla_force_host_platform_device_count"
        flags = re.sub(rf"{flag}=\d+", f"{flag}={devices // count}", os.environ["XLA_FLAGS"])
        environment = {"XLA_FLAGS": flags} | environment
        self.processes = []
        for i, log in enumerate(self.logs):
            own = [*connection, f"--process_id={i}"] if count > 1 else []
            words = [*command, *own, *(per_host or {}).get(i, ())]
            self.processes.append(forked.Command(words, log, environment))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, i: int) -> str:
        lines = self.logs[i].read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "[Gloo]" not in line)

    def wait_for(self, text: str, i: int = 0) -> None:
        """Returns once a host has printed this."""
        end = time.monotonic() + SECONDS
        while text not in self.text(i):
            assert self.processes[i].poll() is None and time.monotonic() < end, self.text(i)[-3000:]
            time.sleep(0.02)

    def send(self, i: int, number: signal.Signals) -> None:
        self.processes[i].send_signal(number)

    def codes(self) -> list[int]:
        """Waits for all and returns their exit codes."""
        end = time.monotonic() + SECONDS
        for i, process in enumerate(self.processes):
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"host {i} goes on and on: {self.text(i)[-3000:]}") from None
        return [process.returncode for process in self.processes]
