"""Which file of the repository imports which, and the tests that a change can reach."""

import ast
import collections
import functools
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("jaxrl_tis", "tests", "benchmarks", "experiments", "configs", "colab", "docs", "launch")
REACH = 2  # imports between a changed file and the tests that run for it
SHARED = {"pytest.ini", "setup.py", "tests/conftest.py", "tests/budget.py"}
# Tests that read the repository as text, or run all of it once.
ALWAYS = ("tests/layout_test.py", "tests/links_test.py", "tests/train_test.py")


@functools.cache
def files() -> dict[str, str]:
    """Returns {module: path} of all Python files; a folder stands for its __init__.py."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT)
            parts = name.with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = name.as_posix()
    return found


def imported(source: str) -> set[str]:
    """Returns the files that a source imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & files().keys() or {node.module}
    return {files()[name] for name in names & files().keys()}


def text(path: str) -> str:
    """Returns the content of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def importers() -> dict[str, set[str]]:
    """Returns {path: paths of the files that import it}."""
    found = collections.defaultdict(set)
    for path in files().values():
        for other in imported(text(path)):
            found[other].add(path)
    return found


def reached(changed: set[str], graph: dict[str, set[str]] | None = None) -> set[str]:
    """Returns the changed files and all within REACH imports of one of them."""
    graph = importers() if graph is None else graph
    found = edge = set(changed)
    for _ in range(REACH):
        edge = {other for path in edge for other in graph.get(path, ())} - found
        found = found | edge
    return found


def tests(changed: set[str]) -> set[str]:
    """Returns the test files that a change can make fail.

    Those of a Python file import it, or a file that does. Others name the file, or the folder at the top
    of the repository where it is. A change of what all tests share reaches all of them.
    """
    texts = {path: text(path) for path in files().values() if path.endswith("_test.py")}
    if changed & SHARED:
        return set(texts)
    found = reached(changed) & texts.keys()
    for path in map(pathlib.PurePath, changed):
        names = [path.name]
        if path.parts[0] not in ("jaxrl_tis", "tests") and len(path.parts) > 1:
            names += [f'"{path.parts[0]}"', f"{path.parts[0]}/*"]
        found |= {test for test, content in texts.items() if any(name in content for name in names)}
    return found | set(ALWAYS)


def mirrors(changed: set[str]) -> set[str]:
    """Returns the changed test files, and those that mirror a changed source."""
    places = {"jaxrl_tis/": "tests/", "experiments/": "tests/experiments/"}
    return changed | {
        path.replace(folder, place, 1).removesuffix(".py") + "_test.py"
        for path in changed for folder, place in places.items() if path.startswith(folder)
    }


def changed_since(revision: str) -> set[str]:
    """Returns the files that differ from a revision of git, untracked ones included."""
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {*git("diff", "--name-only", revision), *git("ls-files", "--others", "--exclude-standard")}
