"""Nodes of a Ray cluster as processes of this machine, and the processes of a run on Ray."""

import os
import pathlib
import subprocess
import sys
import time

from tests import hosts

SECONDS = 60  # far more than a node takes to start
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ADDRESS": "", "RAY_worker_niceness": "0",
}


class Node:
    """`ray start` until the end of the block, or until `kill`. The first node is the head."""

    def __init__(self, folder: pathlib.Path, *options: str, head: str = "", **environment: str):
        port = hosts.free_port()
        self.address = head or f"127.0.0.1:{port}"
        where = [f"--address={head}"] if head else [
            "--head", f"--port={port}", "--include-dashboard=false", "--node-ip-address=127.0.0.1"
        ]
        self._log = pathlib.Path(folder, f"node{port}.log")
        command = [pathlib.Path(sys.executable).with_name("ray"), "start", *where, "--block",
                   "--disable-usage-stats", *options]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT | environment, stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid
        wait_for(lambda: "--block" in self.text() or self._process.poll() is not None)
        assert self._process.poll() is None, self.text()

    def text(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        """Kills the node with its workers, as a machine that is lost."""
        self._process.kill()  # Linux then kills what it started
        self._process.wait()

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_) -> None:
        self.kill()


def wait_for(is_so, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def descendants(pid: int) -> dict[int, str]:
    """The command lines of a process's descendants."""
    parents, lines = {}, {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
    found, new = {}, {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= {child: lines[child] for child in new if child in lines}
    return found


def named(pid: int, name: str) -> list[int]:
    """The descendants of a process whose command line holds this name."""
    return sorted(child for child, line in descendants(pid).items() if name in line)


def is_alive(pid: int) -> bool:
    """Whether a process runs: an orphan that has ended may be without anybody to ask for its code."""
    try:
        return pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
