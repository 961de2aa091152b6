"""Runs every command that a page or a docstring names once, with tiny sizes.

    python -m tests.published [--list] [--only PATTERN] [--slice K/N]

The commands are found, not listed: in the code of the pages, and in the docstrings and heads of
commands. `WAYS` in published_ways.py says how each runs tiny; published_test.py fails for a command
that it lacks. All run in a copy of the working tree, one at a time. What a command reads and no clone
has is made before it (`MADE`).

--list prints the commands and runs none. --only takes the commands in which a regular expression is
found. --slice=K/N takes every N-th, from the K-th modulo N.
"""

import argparse
import ast
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests import published_ways as ways

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
SOURCES = (
    "benchmarks/*.py", "colab/*.py", "configs/**/*.py", "experiments/*.py", "jaxrl_tis/**/*.py",
    "launch/**/*.py", "launch/*.sh", "tests/mutants/*.py", "tests/published.py",
)
LIMIT = 600  # seconds of a command
FENCED = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
# A file that a page shows, under its name.
SHOWN = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)
COMMAND = re.compile(
    r"(?<![\w./-])(?:[A-Z_]+=[^\s`]* )*(?:python (?:-m (?:(?:jaxrl_tis|benchmarks|experiments|tests)\.|jaxrl_tis )[a-z]"
    r"|(?:docs|colab|launch)/)|\./(?:launch|tests)/\w+\.sh|\.ci/\w)"
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line as it is published, without comments and brackets of what is optional.

    Attributes:
      variables: of its environment, NAME=VALUE.
      words: program and arguments.
    """

    variables: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join([*self.variables, *map(shlex.quote, self.words)]).replace("'", "")


def parse(text: str) -> Command:
    """Returns the command that begins a line."""
    text = re.sub(r"\[(--?[^\]\s|]+)\]", r"\1", text)
    text = re.sub(r"\[[^\]]*\]", "", text)
    words = shlex.split(text.rstrip(".,;"), comments=True)
    count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return Command(tuple(words[:count]), tuple(words[count:]))


def in_line(line: str) -> str | None:
    """Returns what follows in a line of code from the first command on; None without one."""
    if not (match := COMMAND.search(line)):
        return None
    before, found = line[: match.start()], line[match.start() :]
    return found.partition(")")[0] if before.endswith("$(") else found


def in_text(text: str, is_page: bool) -> list[str]:
    """Returns the commands of a page, or of a docstring, where code is indented."""
    blocks = [match[1] for match in FENCED.findall(text)] if is_page else [text]
    joined = "\n".join(re.sub(r"\s*\\\n\s*", " ", block) for block in blocks)
    joined = re.sub(r"\n +(?=\[-)", " ", joined)  # of a synopsis
    lines = joined.splitlines()
    if not is_page:
        lines = [line.strip() for line in lines if COMMAND.match(line.strip()) and line[:1] == " "]
    spans = [" ".join(span.split()) for span in INLINE.findall(FENCED.sub("", text))]
    found = [*map(in_line, lines), *(span for span in spans if COMMAND.match(span))]
    return [x for x in found if x]


def about(path: pathlib.Path) -> str:
    """Returns the docstring of a source and its comments, or the head of a script."""
    text = path.read_text(encoding="utf-8")
    comments = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#"))
    if path.suffix == ".sh":
        return comments
    docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
    return f"{docstring}\n{comments}"


def commands() -> dict[Command, list[str]]:
    """Returns every command and the files that name it."""
    found: dict[Command, list[str]] = {}
    for patterns, is_page in ((PAGES, True), (SOURCES, False)):
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            text = path.read_text(encoding="utf-8") if is_page else about(path)
            for line in in_text(text, is_page):
                names = found.setdefault(parse(line), [])
                if (name := path.relative_to(ROOT).as_posix()) not in names:
                    names.append(name)
    return found


# How a command runs


def tiny(command: Command, way: ways.Way) -> list[str]:
    """Returns the words of a command with the sizes of its way; `python` is this interpreter."""
    words = [re.sub(r"^python$", sys.executable, word) for word in command.words]
    count = next((i for i, word in enumerate(words) if re.search(r"\.(py|sh)$", word)), 0) + 1
    if words[1:2] == ["-m"]:
        count = 3
    program, arguments = words[:count], words[count:]
    if way.instead:
        return ["bash", way.instead, *program] if way.instead == "-n" else [*program, way.instead]
    for pattern, new in way.swap:
        changed = [re.sub(f"^(?:{pattern})$", new.replace("\\", "\\\\"), x) for x in arguments]
        arguments = [x for x, old in zip(changed, arguments, strict=True) if x or not old]
    if way.check:
        return [sys.executable, "-c", ways.CHECK, *(x for x in arguments if x.startswith("--config"))]
    added = shlex.split(way.add)
    names = {word.partition("=")[0] for word in added if word.startswith("--")}
    return [*program, *(x for x in arguments if x.partition("=")[0] not in names), *added]


def copied(folder: pathlib.Path) -> None:
    """Makes a clone of this repository with the files as they are here, the files that pages show, and
    an environment whose interpreter is this one."""
    git = lambda *words: subprocess.run(
        ["git", "-C", ROOT, *words], check=True, capture_output=True, text=True
    ).stdout
    git("clone", "--quiet", "--shared", ROOT, folder)
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]:
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        else:
            target.unlink(missing_ok=True)
    for page in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        for name, text in SHOWN.findall(page.read_text(encoding="utf-8")):
            (folder / name).write_text(text)
    made = folder / ".venv-{}.{}".format(*sys.version_info)
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (made / "bin" / "python").chmod(0o755)
    stamp = subprocess.run(["cksum", "setup.py"], cwd=folder, check=True, capture_output=True).stdout
    for extra in ("core", "test", "tasks", "ray", "tpu"):
        (made / f".installed-{extra}").write_bytes(stamp)


def environment(folder: pathlib.Path, command: Command) -> dict[str, str]:
    own = {
        "PYTHONPATH": f"{folder}", "PYTHON": sys.executable, "TEST_PROCESSES": "1",
        "JAX_COMPILATION_CACHE_DIR": f"{ROOT / '.cache' / 'jax'}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**os.environ, **own, **dict(x.split("=", 1) for x in command.variables)}


def make(folder: pathlib.Path, words: list[str]) -> None:
    """Makes the files and folders of `MADE` that a command reads and that are not there."""
    for name in [part for word in words for part in (word, word.partition("=")[2])]:
        source = ways.SAME.get(name, name)
        for wanted in (source, name) if source in ways.MADE else ():
            path, maker = folder / wanted, ways.MADE.get(wanted)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if maker is None:
                shutil.copytree(folder / source, path)
            elif callable(maker):
                maker(path)
            else:
                run(folder, parse(maker), ways.Way(), made=wanted)


def run(folder: pathlib.Path, command: Command, way: ways.Way, made: str = "") -> None:
    """Runs a command in the copy; it makes the folder `made`. RuntimeError with the end of its output
    if it fails."""
    swapped = tuple((p, n) for p, n in way.swap if "=" in p and p.partition("=")[0].isupper())
    variables = tuple(
        next((new for pattern, new in swapped if re.match(pattern, x)), x) for x in command.variables
    )
    words = tiny(command, way)
    make(folder, [word for word in [*words, way.feed] if not made or made not in word])
    shutil.rmtree(folder / "new", ignore_errors=True)
    (folder / "new").mkdir()
    fed = folder / way.feed if way.feed else os.devnull
    with open(fed) as feed, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words, cwd=folder, env=environment(folder, Command(variables, command.words)), stdin=feed,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            code, text = waited(process, log, way.until)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if way.until and way.until in text:
        return
    if code not in way.codes:
        raise RuntimeError(f"{shlex.join(words)}\nended with {code}:\n{text[-3000:]}")


def waited(process: subprocess.Popen, log, until: str) -> tuple[int | str, str]:
    """Returns the exit code and the output of a process that has ended, has printed `until`, or took
    LIMIT seconds."""
    end, code = time.monotonic() + LIMIT, None
    while code is None:
        try:
            code = process.wait(1 if until else LIMIT)
        except subprocess.TimeoutExpired:
            code = f"no end after {LIMIT} s" if time.monotonic() > end else None
        log.seek(0)
        text = log.read()
        if until and until in text:
            return 0, text
    return code, text


def chosen(only: str, slice_: str) -> dict[Command, ways.Way]:
    """Returns the commands to run, in order. Of commands that are the same with tiny sizes one runs.

    Raises:
      ValueError: the table lacks a command.
    """
    found = {}
    for command in commands():
        if (way := ways.way(command.text)) is None:
            raise ValueError(f"tests/published_ways.py has no way to run {command.text}")
        if re.search(only, command.text):
            found.setdefault((command.variables, *tiny(command, way)), (command, way))
    index, count = map(int, slice_.split("/"))
    return dict(list(found.values())[index % count :: count])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.published", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    parser.add_argument("--only", default="", help="the commands in which this pattern is found")
    parser.add_argument("--slice", default="0/1", help="K/N: every N-th command, from the K-th")
    args = parser.parse_args()
    found, failed = chosen(args.only, args.slice), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the command, too
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if not args.list:
            copied(pathlib.Path(folder))
        for number, (command, way) in enumerate(found.items(), 1):
            instead = way.instead or "parsed" if way.why else ""
            note = f"  [{instead}: {way.why}]" if way.why else ""
            print(f"{number}/{len(found)} {command.text}{note}", flush=True)
            if args.list:
                continue
            start = time.monotonic()
            try:
                run(pathlib.Path(folder), command, way)
            except RuntimeError as error:
                failed.append(command.text)
                print(error, flush=True)
            print(f"  {time.monotonic() - start:.0f} s", flush=True)
    if not args.list:
        print(f"{len(found) - len(failed)} of {len(found)} commands ran", *failed, sep="\n  ")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
