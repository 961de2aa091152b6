"""Deliberate mistakes, each of which a test has to find: see `__main__`."""

import dataclasses
import functools
import json
import pathlib

TOPS = ("benchmarks", "experiments", "launch")  # folders beside the package
KILLERS = pathlib.Path(__file__).with_name("killers.json")
IN_ALL = "in --all"  # of a row whose killer is no test of the default choice


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one source.

    `source` is relative to jaxrl_tis/, or begins with one of `TOPS`; `old` stands in it exactly once.
    `tests` are the files that have to find it, relative to tests/. `killer` is the test that is tried
    before all of them, as "name" in the first of the files or as "file::name"; where it is empty, the
    first that `--record` wrote down. The tests of the default choice have to find it, unless `in_all`:
    then it takes one that only `./launch/test.sh --all` runs, the killer.
    """

    name: str
    source: str
    old: str
    new: str
    tests: tuple[str, ...]
    killer: str = ""
    in_all: bool = False

    @property
    def path(self) -> str:
        return self.source if self.source.split("/")[0] in TOPS else f"jaxrl_tis/{self.source}"

    @property
    def files(self) -> tuple[str, ...]:
        """The test files from the repository's root."""
        return tuple(f"tests/{file}" for file in self.tests)

    @property
    def first_try(self) -> str:
        """Node id of the killer; empty without one."""
        if not self.killer:
            return next(iter(self.recorded), "")
        return f"tests/{self.killer}" if "::" in self.killer else f"{self.files[0]}::{self.killer}"

    @property
    def key(self) -> str:
        return f"{self.source}: {self.name}"

    @property
    def recorded(self) -> list[str]:
        """Node ids of all tests of its files that find it, one case of each function."""
        return killers().get(self.key, [])

    def problem(self, root: pathlib.Path) -> str:
        """Why the mutant cannot be applied to the sources under root; empty if it can."""
        path = root / self.path
        count = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else -1
        missing = [file for file in self.files if not (root / file).is_file()]
        if missing:
            return f"{', '.join(missing)} is missing"
        if self.in_all and not self.killer:
            return "the test of --all that kills it is not named"
        if self.old == self.new:
            return "the new text is the old one"
        found = {-1: f"{self.path} is missing", 0: "text not found", 1: ""}
        return found.get(count, f"text found {count} times")


@functools.cache
def killers() -> dict[str, list[str]]:
    """Returns what `--record` wrote: {key of a mutant: node ids of its killers}."""
    return json.loads(KILLERS.read_text(encoding="utf-8")) if KILLERS.exists() else {}


def of(source: str, *rows: tuple[str, ...], tests: str = "") -> list[Mutant]:
    """Mutants of one source from rows (name, old, new[, killer[, IN_ALL]]).

    `tests` are its test files, separated by blanks; by default the one that mirrors the source. The
    file of a killer is one of them.
    """
    files = tests.split() or [source.removesuffix(".py") + "_test.py"]
    found = []
    for name, old, new, *rest in rows:
        killer = rest[0] if rest else ""
        assert rest[1:] in ([], [IN_ALL]), name
        own = [killer.partition("::")[0]] if "::" in killer else []
        found.append(Mutant(name, source, old, new, tuple(dict.fromkeys(files + own)), killer,
                            in_all=rest[1:] == [IN_ALL]))
    return found
