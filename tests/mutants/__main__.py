"""Whether the tests find mistakes: applies mutants to the sources, one at a time, and names the
test that fails for each.

    python -m tests.mutants [--only TEXT] [--processes N] [--out FILE] [--check | --record]

A mutant is a small change of a line that matters: a flipped clip side, a wrong denominator, a page
freed twice. Each is applied in a copy of the repository, and the tests of its file are run there.
One that no test finds survives: a test is missing. Before, the tests that are expected to find
them must pass on the sources as they are. Exit status: 0 if every mutant was killed, 1 if one
survived, does not apply any more or could not be judged.

The tests are those of the default choice of ./launch/test.sh; a mutant that one of --all alone
finds says so (`in_all`). --check also looks whether every killer is there, and where it belongs.
--record writes every killer of each mutant into killers.json; a test may leave the default choice
only where each of its mutants has another killer there.

It is no part of the suite: it takes an hour or more on two cores.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import queue
import sys
import tempfile
import threading
import time

from tests.mutants import KILLERS, Mutant, killers, runner
from tests.mutants import (
    adapters, algorithms, engine, environments, estimators, experiments, instruments, kernels, models,
    outside, rollouts, studies, surroundings, update, workers,
)

TABLES = (
    estimators, algorithms, update, engine, environments, rollouts, kernels, models, adapters,
    surroundings, outside, experiments, workers, instruments, studies,
)
MUTANTS: list[Mutant] = [mutant for table in TABLES for mutant in table.MUTANTS]


def chosen(texts: list[str]) -> list[Mutant]:
    """The mutants whose name, source or tests contain one of the texts; all without texts."""
    says = lambda m: f"{m.name} {m.path} {' '.join(m.files)}"
    return [m for m in MUTANTS if not texts or any(text in says(m) for text in texts)]


class Session:
    """Verdicts of many mutants, by several processes."""

    def __init__(self, folder: pathlib.Path, processes: int):
        cache = folder / "programs"
        self._copies = queue.SimpleQueue()
        for i in range(processes):
            self._copies.put(runner.Copy(folder / str(i), cache))
        self._pool = concurrent.futures.ThreadPoolExecutor(processes)
        self._seconds: dict[str, float] = {}  # of a test or file on the sources as they are
        self._files: dict[tuple, concurrent.futures.Future] = {}
        self._unknown: set[str] = set()  # killers that are no tests any more
        self._lock = threading.Lock()

    def _with_copy(self, call, item):
        copy = self._copies.get()
        try:
            return call(copy, item)
        finally:
            self._copies.put(copy)

    def failing_killers(self, mutants: list[Mutant]) -> list[str]:
        """The killers that do not pass on the sources as they are."""
        groups = {}
        for mutant in mutants:
            if mutant.first_try:
                file = mutant.first_try.partition("::")[0]
                groups.setdefault((file, mutant.in_all), {})[mutant.first_try] = None
        clean = lambda copy, group: self._clean(copy, list(group[1]), in_all=group[0][1])
        failing = []
        for found in self._pool.map(lambda g: self._with_copy(clean, g), groups.items()):
            failing += found
        return failing

    def _clean(self, copy: runner.Copy, tests: list[str], in_all: bool) -> list[str]:
        """Those of the killers, all of one file, that fail without a mutant."""
        found = copy.pytest(tests, runner.LIMIT_S, in_all=in_all)
        self._seconds |= dict.fromkeys(tests, found.seconds)
        file = tests[0].partition("::")[0]
        print(f"  {found.seconds:6.1f} s  {len(tests)} of {file}", flush=True)
        if found.status in (runner.PASSED, runner.FAILED):
            return list(found.failed)
        if len(tests) > 1:
            return [test for alone in tests for test in self._clean(copy, [alone], in_all)]
        self._unknown.update(tests)
        print(f"    {tests[0]} is not there: all of {file} is tried in its place", flush=True)
        return []

    def verdicts(self, mutants: list[Mutant]):
        """The verdicts, in the order in which they are reached."""
        known = lambda m: dataclasses.replace(m, killer="") if m.first_try in self._unknown else m
        judge = lambda copy, mutant: copy.judge(known(mutant), self._limit, self._is_sound)
        work = [self._pool.submit(self._with_copy, judge, m) for m in mutants]
        for future in concurrent.futures.as_completed(work):
            yield future.result()

    def killers(self, mutants: list[Mutant]):
        """(mutant, its killers), in the order in which they are found."""
        find = lambda copy, mutant: (mutant, copy.killers(mutant, self._limit))
        work = [self._pool.submit(self._with_copy, find, m) for m in mutants]
        for future in concurrent.futures.as_completed(work):
            yield future.result()

    def _limit(self, tests: list[str]) -> float:
        """Seconds for the tests with a mutant: much more than they take without."""
        return 60.0 + 5.0 * sum(self._seconds.get(test, runner.LIMIT_S / 5) for test in tests)

    def _is_sound(self, copy: runner.Copy, mutant: Mutant) -> bool:
        files, key = mutant.files, (mutant.files, mutant.in_all)
        with self._lock:
            is_first = key not in self._files
            sound = self._files.setdefault(key, concurrent.futures.Future())
        if is_first:
            found = copy.pytest(list(files), runner.LIMIT_S, in_all=mutant.in_all)
            self._seconds |= dict.fromkeys(files, found.seconds / len(files))
            print(f"  {found.seconds:6.1f} s  all of {' '.join(files)}"
                  + "".join(f"\n    fails: {test}" for test in found.failed), flush=True)
            sound.set_result(found.status == runner.PASSED)
        return sound.result()


def row(verdict: runner.Verdict) -> str:
    m, killer = verdict.mutant, verdict.killer.removeprefix("tests/")
    state = "killed" if killer else "UNJUDGED" if verdict.how else "SURVIVED"
    lines = [f"{state:<9}{verdict.seconds:6.1f} s  {m.source}: {m.name}"]
    lines += [f"{'':19}{line}" for line in (killer, verdict.how) if line]
    return "\n".join(lines)


def record(session: Session, mutants: list[Mutant]) -> int:
    """Writes the killers of the mutants; returns how many have none."""
    found = dict(killers())
    known, alive = {mutant.key for mutant in MUTANTS}, 0
    for count, (mutant, tests) in enumerate(session.killers(mutants), 1):
        print(f"{count:3}/{len(mutants)} {len(tests)} killers of {mutant.key}", flush=True)
        alive += not tests
        found[mutant.key] = tests
        table = {key: found[key] for key in sorted(found) if key in known and found[key]}
        KILLERS.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")
    return alive


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="mutants whose name, source or tests contain it; may be repeated")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--out", metavar="FILE", help="also write the table here")
    parser.add_argument("--check", action="store_true",
                        help="only check that every mutant applies and its killer is chosen")
    parser.add_argument("--record", action="store_true",
                        help="write all killers of the mutants that have none in killers.json")
    args = parser.parse_args()
    mutants = chosen(args.only)
    broken = [f"{m.source}: mutant {m.name!r} no longer applies: {problem}"
              for m in mutants if (problem := m.problem(runner.ROOT))]
    names = collections.Counter(f"{m.source}: mutant {m.name!r}" for m in mutants)
    broken += [f"{name} is there {count} times" for name, count in names.items() if count > 1]
    if args.check and not broken:
        broken += runner.misplaced(mutants)
    if broken or args.check or not mutants:
        print("\n".join([*broken, f"{len(mutants)} mutants, {len(broken)} do not apply"]))
        return int(bool(broken) or not mutants)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        session = Session(pathlib.Path(folder), args.processes)
        if args.record:
            return int(record(session, [m for m in mutants if not m.recorded]) > 0)
        print("the tests on the sources as they are", flush=True)
        if failing := session.failing_killers(mutants):
            print("these fail without any mutant:", *failing, sep="\n  ")
            return 1
        found = []
        for verdict in session.verdicts(mutants):
            found.append(verdict)
            print(f"{len(found):3}/{len(mutants)} {row(verdict)}", flush=True)
    order = {(m.source, m.name): place for place, m in enumerate(mutants)}
    place = lambda verdict: order[verdict.mutant.source, verdict.mutant.name]
    found.sort(key=lambda verdict: (bool(verdict.killer), place(verdict)))
    alive = [verdict for verdict in found if not verdict.killer]
    lines = [*map(row, found), "", f"{len(found)} mutants, {len(alive)} not killed, "
             f"{(time.monotonic() - start) / 60:.1f} minutes"]
    if args.out:
        pathlib.Path(args.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
