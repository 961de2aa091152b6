"""What each test file costs, in counts that are equal on every machine.

A pytest plugin, see tests/conftest.py. It counts the default choice of tests, by file: items,
programs compiled, processes started, and whole runs (`train.run` that began). `RECORD` has the most
that each file may cost. A file with more items or runs, or without a row, fails the session. More programs or
processes are printed: threads and waits may add some. Rows only fall: `tests/raises.md` has the sums,
and a reason for each time that one rose.

`--write-budget` lowers the rows of the files that ran, adds those of new files, and removes those of
files that are gone. `--files-under=PROGRAMS` leaves out the files that compile as many programs or
more, or make a run. `--changed=REVISION` takes the default choice of the files that a change since
then can reach, and all tests of the files that it touches or that mirror what it touches.
`--slice=K/N` takes every N-th file, from the K-th on. `--one-a-file` takes the first test of each file.
"""

import collections
import contextlib
import functools
import json
import multiprocessing.process
import pathlib
import sys
import time

import pytest

from tests import imports

RECORD = pathlib.Path(__file__).with_name("budget.json")
RAISES = pathlib.Path(__file__).with_name("raises.md")
KINDS = ("items", "programs", "processes", "runs")
EXACT = ("items", "runs")
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}  # audit events
COMPILED = "/jax/core/compile/backend_compile_duration"
VERSION = "0.10."  # of jax whose programs are counted: each lowers another number
YARDSTICK = 1024  # rows of the product that measures a machine

spent: collections.Counter = collections.Counter()  # of this process, so far
_shared = 0  # depth of `uncounted`


def rows() -> dict[str, dict[str, int]]:
    """Returns {file: {kind: most}}."""
    table = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {file: dict(zip(KINDS, counts, strict=True)) for file, counts in table.items()}


def over(counts: dict, limits: dict, kinds=KINDS) -> list[str]:
    """Returns a line for each file that costs more than its row, or has none."""
    lines = []
    for file, found in sorted(counts.items()):
        if file not in limits:
            lines.append(f"{file}: no row in tests/budget.json; add one by --write-budget")
            continue
        lines += [
            f"{file}: {found[kind]} {kind}, and its budget is {limits[file][kind]}"
            for kind in kinds if found[kind] > limits[file][kind]
        ]
    return lines


def sums(limits: dict) -> dict[str, int]:
    """Returns {kind: sum over all files}."""
    return {kind: sum(row[kind] for row in limits.values()) for kind in KINDS}


def written(limits: dict, counts: dict, exists) -> dict:
    """Returns the rows after a session that counted `counts`: none rises but those of new files."""
    merged = {file: row for file, row in limits.items() if exists(file)}
    for file, found in counts.items():
        row = merged.get(file, found)
        merged[file] = {kind: min(row[kind], found[kind]) for kind in KINDS}
    return dict(sorted(merged.items()))


@contextlib.contextmanager
def uncounted():
    """Costs that belong to no file."""
    global _shared
    _shared += 1
    try:
        yield
    finally:
        _shared -= 1


def _add(kind: str) -> None:
    if not _shared:
        spent[kind] += 1


def _count(event: str, *_, **__) -> None:
    if event == COMPILED:
        _add("programs")


def _audit(event: str, _) -> None:
    if event in STARTS:
        _add("processes")


def _counting(function, kind: str):
    def counted(*args, **kwargs):
        _add(kind)
        return function(*args, **kwargs)

    return counted


def _watch_runs() -> None:
    """Counts the runs that begin, once `train` is imported: a run that is refused costs little."""
    train = sys.modules.get("jaxrl_tis.train")
    if train is not None and train.Run.begin.__name__ != "counted":
        train.Run.begin = _counting(train.Run.begin, "runs")


def pytest_addoption(parser):
    parser.addoption("--write-budget", action="store_true", help="lower tests/budget.json")
    parser.addoption("--changed", metavar="REVISION", help="files that a change since then can reach")
    parser.addoption("--files-under", metavar="PROGRAMS", type=int, help="leave out other files")
    parser.addoption("--slice", metavar="K/N", help="every N-th file, from the K-th on")
    parser.addoption("--one-a-file", action="store_true", help="the first test of each file")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Judge(config))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        import jax

        jax.monitoring.register_event_duration_secs_listener(_count)
        sys.addaudithook(_audit)
        process = multiprocessing.process.BaseProcess
        process.start = _counting(process.start, "processes")


def pytest_ignore_collect(collection_path, config):
    """Files that a change cannot reach, or of another slice, are not even imported."""
    if not collection_path.name.endswith("_test.py"):
        return None
    file = collection_path.relative_to(imports.ROOT).as_posix()
    revision, part = config.getoption("--changed"), config.getoption("--slice")
    is_chosen = (not revision or file in _reached(revision)) and (not part or file in _of_slice(part))
    return None if is_chosen else True


@functools.cache
def _reached(revision: str) -> set[str]:
    return imports.tests(imports.changed_since(revision))


def _is_of_default(item) -> bool:
    return item.get_closest_marker("all") is None


@functools.cache
def _of_slice(part: str) -> set[str]:
    index, count = map(int, part.split("/"))
    files = (imports.ROOT / "tests").rglob("*_test.py")
    return set(sorted(file.relative_to(imports.ROOT).as_posix() for file in files)[index::count])


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config, items):
    """Costly files come first, so that no process has a long one left at the end."""
    limits = rows()
    row = lambda item: limits.get(_file(item.nodeid), dict.fromkeys(KINDS, 0))
    limit = config.getoption("--files-under")
    if limit is not None:
        cheap = lambda item: row(item)["programs"] < limit and not row(item)["runs"]
        _keep(config, items, cheap)
    if revision := config.getoption("--changed"):
        whole = imports.mirrors(imports.changed_since(revision))
        _keep(config, items, lambda item: _is_of_default(item) or _file(item.nodeid) in whole)
    if config.getoption("--one-a-file"):
        first = {_file(item.nodeid): item for item in reversed(items)}
        _keep(config, items, lambda item: first[_file(item.nodeid)] is item)
    items.sort(key=lambda item: -row(item)["programs"])


def _keep(config, items, is_chosen) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = filter(is_chosen, items)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    _watch_runs()
    item.before = collections.Counter(spent)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown" and _is_of_default(item):
        report.spent = {"items": 1, **(spent - item.before)}
    return report


class Judge:
    """Sums the counts in the process that reports, and compares them with the budget."""

    def __init__(self, config):
        self._config, self._start = config, time.monotonic()
        self._counts = collections.defaultdict(lambda: dict.fromkeys(KINDS, 0))
        self._over = []

    def pytest_runtest_logreport(self, report):
        for kind, count in getattr(report, "spent", {}).items():
            self._counts[_file(report.nodeid)][kind] += count

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        import jax

        limits = rows()
        if self._config.getoption("--write-budget"):
            limits = written(limits, self._counts, lambda file: (imports.ROOT / file).is_file())
            lines = (f'"{file}": {json.dumps(list(row.values()))}' for file, row in limits.items())
            RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        if not limits:
            return
        known = KINDS if jax.__version__.startswith(VERSION) else ("items", "processes", "runs")
        self._over = over(self._counts, limits, known)
        if session.exitstatus == pytest.ExitCode.OK and over(self._counts, limits, EXACT):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        total = sums(self._counts)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in total.items())
        seconds = time.monotonic() - self._start
        terminalreporter.write_line(f"{counts} in {seconds:.0f} s on a machine of {yardstick():.0f} GF/s")
        for line in self._over:
            terminalreporter.write_line(f"over budget: {line}", red=True)


def yardstick() -> float:
    """Returns the speed of a float32 product on this machine, in 1e9 operations a second."""
    import numpy as np

    a, seconds = np.ones((YARDSTICK, YARDSTICK), np.float32), []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * YARDSTICK**3 / min(seconds) / 1e9
