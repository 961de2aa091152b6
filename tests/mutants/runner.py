"""Copies of the repository in which mutants are applied and tested, one at a time."""

import contextlib
import dataclasses
import functools
import io
import itertools
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests import forked
from tests.mutants import Mutant, plugin

ROOT = pathlib.Path(__file__).resolve().parents[2]
PASSED, FAILED, NOTHING = 0, 1, 5  # exit statuses of pytest
DEFAULT_CHOICE = ("-m", "not all")  # as in launch/test.sh
# Variables that jax reads when it is imported, as in tests/conftest.py.
LIBRARIES = {
    "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
LIMIT_S = 900.0  # of a run on the sources as they are


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of pytest. `status` is None where it ran out of time, negative for a signal."""

    status: int | None
    failed: dict[str, str]  # the tests and how they failed, the first of them first
    last: str  # the test that was started last
    seconds: float
    output: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`killer` is the test that found the mutant, empty if none did; `how` it failed, or why there
    is no verdict."""

    mutant: Mutant
    killer: str
    how: str
    seconds: float


@functools.cache
def server(cache: pathlib.Path) -> Any:
    """Starts the server whose forks are runs, and returns its context of multiprocessing. It has the
    libraries imported, and none of the package."""
    os.environ |= LIBRARIES | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.mutants.libraries"])
    return context


def _tested(words: list[str], root: pathlib.Path, environment: dict[str, str], log: pathlib.Path):
    """Runs pytest in the folder `root`; the target of a forked process."""
    os.setsid()
    forked.settle(root, environment, log)
    sys.path[:] = [str(root), *(x for x in sys.path if pathlib.Path(x).resolve() != ROOT)]
    sys.pycache_prefix, sys.dont_write_bytecode = environment["PYTHONPYCACHEPREFIX"], False
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "jaxrl_tis")]:
        del sys.modules[name]
    sys.exit(int(pytest.main(words)))


class Copy:
    """The tracked and the new files of the repository in a folder of their own."""

    def __init__(self, folder: pathlib.Path, cache: pathlib.Path):
        self.root, self._cache = folder / "repository", cache
        self._record = folder / "record"
        # Whole seconds that no file of the copy has yet: byte code is taken for that of a source
        # with the same size and second.
        self._times = itertools.count(int(time.time()) + 10)
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"],
            check=True, capture_output=True, text=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)

    def pytest(self, tests: list[str], limit_s: float, *options: str, in_all: bool = False) -> Run:
        """A run of the tests, given as files or node ids; of the default choice, or of all."""
        options += () if in_all else DEFAULT_CHOICE
        self._record.write_text("")
        context, log = server(self._cache), self.root.parent / "log"
        log.unlink(missing_ok=True)
        environment = os.environ | {
            "PYTHONPATH": str(self.root), plugin.RECORD: str(self._record),
            "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self._cache / "python"),
        }
        start, words = time.monotonic(), ["-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin"]
        process: Any = context.Process(
            target=_tested, args=([*words, *options, *tests], self.root, environment, log)
        )
        process.start()
        process.join(limit_s)
        status = process.exitcode
        with contextlib.suppress(ProcessLookupError):  # what it left behind, too
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        output = log.read_text(errors="replace") if log.exists() else ""
        notes = [line.split("\t") for line in self._record.read_text().splitlines()]
        failed = {test: how for what, test, *message in notes for how in message}
        started = [test for what, test, *_ in notes if what == "started"]
        seconds = time.monotonic() - start
        return Run(status, failed, started[-1] if started else "", seconds, output)

    def write(self, path: str, text: str) -> None:
        """A source's text, at a time of its own."""
        file, stamp = self.root / path, next(self._times)
        file.write_text(text, encoding="utf-8")
        os.utime(file, (stamp, stamp))

    def run(self, mutant: Mutant, tests: list[str], limit_s: float, *options: str) -> Run:
        """A run of the tests with the mutant."""
        original = (self.root / mutant.path).read_text(encoding="utf-8")
        self.write(mutant.path, original.replace(mutant.old, mutant.new))
        try:
            return self.pytest(tests, limit_s, *options, in_all=mutant.in_all)
        finally:
            self.write(mutant.path, original)

    def judge(self, mutant: Mutant, limit_s, is_sound) -> Verdict:
        """Applies the mutant, runs its killer and, if that does not fail, all tests of its files.

        `limit_s(tests)` gives the seconds of a run, `is_sound(copy, mutant)` whether its files pass
        without it; that is asked where the killer alone did not find it.
        """
        start = time.monotonic()
        attempts = [[mutant.first_try]] if mutant.first_try else []
        attempts.append(list(mutant.files))
        killer = how = ""
        for tests in attempts:
            is_alone = tests == [mutant.first_try]
            if not is_alone and not is_sound(self, mutant):
                how = "its test files fail without it"
                break
            killer, how = _reading(self.run(mutant, tests, limit_s(tests), "-x"))
            if killer or how:
                break
        if killer and mutant.first_try and not is_alone:
            how = f"{how}; not by {mutant.first_try}"
        return Verdict(mutant, killer, how, time.monotonic() - start)

    def killers(self, mutant: Mutant, limit_s) -> list[str]:
        """Node ids of the tests of its files that find the mutant, one case of each function."""
        run = self.run(mutant, list(mutant.files), limit_s(mutant.files))
        first = {test.partition("[")[0]: test for test in reversed(run.failed)}
        if run.status not in (PASSED, FAILED) and run.last:
            first.setdefault(run.last.partition("[")[0], run.last)
        return sorted(first.values())


class _Collected:
    """A plugin of pytest: the tests by name, and whether the default choice has one of that name."""

    def __init__(self):
        self.is_default: dict[str, bool] = {}

    def pytest_collection_finish(self, session):
        for item in session.items:
            is_default = item.get_closest_marker("all") is None
            for name in (item.nodeid, item.nodeid.partition("[")[0]):
                self.is_default[name] = self.is_default.get(name, False) or is_default


def misplaced(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the killers: one is no test, or not of the choice that it is said to be of."""
    named = [mutant for mutant in mutants if mutant.first_try]
    files = sorted({mutant.first_try.partition("::")[0] for mutant in named})
    found = _Collected()
    if files:
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["--collect-only", "-p", "no:cacheprovider", *files], [found])
    wrong = []
    for mutant in named:
        place = f"{mutant.source}: the killer of {mutant.name!r}, {mutant.first_try},"
        if mutant.first_try not in found.is_default:
            wrong.append(f"{place} is no test")
        elif found.is_default[mutant.first_try] == mutant.in_all:
            wrong.append(f"{place} is {'a' if mutant.in_all else 'no'} test of the default choice")
    return wrong


def _reading(run: Run) -> tuple[str, str]:
    """(the test that found the mutant, how); ("", "") where none did."""
    if run.status is None:
        return run.last or "the import", f"hung, stopped after {run.seconds:.0f} s"
    if run.status < 0 and run.last:
        return run.last, f"ended by signal {-run.status}"
    if run.status == FAILED and run.failed:
        return next(iter(run.failed.items()))
    if run.status == PASSED:
        return "", ""
    return "", f"no tests ran (pytest's status {run.status}): {_last_lines(run.output)}"


def _last_lines(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-3:])
