"""What each test costs: CPU seconds of its process and of every process that it started.

A pytest plugin, see tests/conftest.py: `--record-durations=FILE` writes {"files": {file: CPU
seconds}, "tests": {test: [CPU seconds, seconds]}} of the tests that ran, the second for those
above MIN_SECONDS alone. RECORD has those of all tests; `--files-under=SECONDS` leaves out the files
that cost more there.
"""

import collections
import json
import os
import pathlib
import time

import pytest

RECORD = pathlib.Path(__file__).with_name("durations.json")
MIN_SECONDS = 0.5
TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser):
    parser.addoption("--record-durations", metavar="FILE", help="write what each test costs")
    parser.addoption("--files-under", metavar="SECONDS", type=float, help="leave out other files")


def pytest_collection_modifyitems(config, items):
    """Costly files come first, so that no process has a long one left at the end."""
    files = json.loads(RECORD.read_text())["files"]
    cost = lambda item: files.get(item.nodeid.partition("::")[0], 0.0)
    limit = config.getoption("--files-under")
    if limit is not None:
        config.hook.pytest_deselected(items=[item for item in items if cost(item) >= limit])
        items[:] = [item for item in items if cost(item) < limit]
    items.sort(key=lambda item: -cost(item))


def _children(pid: int | str) -> list[str]:
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    except OSError:  # it has ended
        pass
    return found


def _of_tree(pid: str) -> float:
    """CPU seconds of a process, of those that it has waited for, and of those it has now."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(map(_of_tree, _children(pid)))


def cpu_seconds() -> float:
    """CPU seconds of this process and all that it started, so far."""
    own = os.times()
    return sum(own[:4]) + sum(map(_of_tree, _children("self")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.began = cpu_seconds(), time.monotonic()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "teardown":
        cpu, start = item.began
        report.cost = [round(cpu_seconds() - cpu, 3), round(time.monotonic() - start, 3)]
    return report


class Recorder:
    """Collects the costs in the process that reports, and writes them at the end."""

    def __init__(self, path: pathlib.Path):
        self._path, self._tests = path, {}

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self._tests[report.nodeid] = report.cost

    def pytest_sessionfinish(self):
        files = collections.Counter()
        for test, (cpu, _) in self._tests.items():
            files[test.split("::")[0]] += cpu
        tests = {t: cost for t, cost in sorted(self._tests.items()) if max(cost) >= MIN_SECONDS}
        found = {"files": {f: round(x, 1) for f, x in sorted(files.items())}, "tests": tests}
        self._path.write_text(json.dumps(found, indent=1) + "\n")


def pytest_configure(config):
    path = config.getoption("--record-durations")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(pathlib.Path(path).resolve()))
