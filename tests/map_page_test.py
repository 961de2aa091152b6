"""Every file and every name on docs/map.md exists, the name in the file that stands beside it."""

import ast
import functools
import pathlib
import re

from tests.layout_test import MAY_IMPORT

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jaxrl_tis"
TEXT = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
FILES = sorted(f for f in set(re.findall(r"`([\w/]+\.(?:py|sh|md))`", TEXT)) if "NAME" not in f)
# "`file.py`: `name`" in a sentence, "`name` in `file.py`", and "| n `name` | `file.py` |" in a table.
PLACES = sorted({
    *re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", TEXT),
    *((file, name) for name, file in re.findall(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`", TEXT)),
    *((file, name) for name, file in re.findall(r"`([\w.]+)` \| `([\w/]+\.py)`", TEXT)),
})


def path_of(file: str) -> pathlib.Path:
    folders = (PACKAGE, ROOT)
    return next((folder / file for folder in folders if (folder / file).exists()), PACKAGE / file)


def defined(tree: ast.AST) -> set[str]:
    """The functions, classes, methods and constants of a source."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {x.id for x in targets if isinstance(x, ast.Name)}
    return names


def test_every_file_exists():
    assert [file for file in FILES if "/" in file and not path_of(file).exists()] == []


def test_every_name_is_defined_where_the_page_says():
    names = functools.cache(lambda file: defined(ast.parse(path_of(file).read_text())))
    assert [(file, name) for file, name in PLACES if name not in names(file)] == []


def test_the_page_is_read():
    assert len(FILES) > 40 and ("train.py", "run") in PLACES and len(PLACES) > 20


def test_the_imports_of_a_room():
    """But for the tables at the root, and the learner, which may import the other rooms above it."""
    rows = dict(re.findall(r"^\| `(\w+)/` \| [^|]* \| ([^|]*) \|$", TEXT, re.MULTILINE))
    assert len(rows) == 14 and rows.pop("learner").startswith("all above")
    tables, unused = {"fields", "sharding", "choices"}, {"cli_flags", "endpoint", "harness"}
    allowed = {room: set(MAY_IMPORT[room]) - tables for room in rows}
    assert {room: set(re.findall(r"`(\w+)`", cell)) for room, cell in rows.items()} == allowed
    above = list(MAY_IMPORT)[: list(MAY_IMPORT).index("learner")]
    assert set(MAY_IMPORT["learner"]) - tables == set(above) - tables - unused


def test_every_room_is_on_the_page():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    cells = " ".join(re.findall(r"\| `([\w/ ]+)` \|", TEXT)).replace("/", " ").split()
    assert rooms == set(cells) & rooms
