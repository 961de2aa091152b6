"""docs/environments.md: its example is played, its tables are those of the code."""

import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

from jaxrl_tis.environments import host
from jaxrl_tis.environments.protocol import Step

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "environments.md").read_text()
PLAYED = [
    "Step(observation='What is 4 * 21?', reward=None, is_done=False, metrics={})",
    "Step(observation='42', reward=None, is_done=False, metrics={'calls': 1.0})",
    "Step(observation='84', reward=None, is_done=False, metrics={'calls': 2.0})",
    "Step(observation='', reward=1.0, is_done=True, metrics={'calls': 2.0})",
]


def code(mark):
    return re.search(rf"<!-- {mark} -->\n```python\n(.*?)```", PAGE, re.DOTALL).group(1)


@pytest.mark.all
def test_the_example_is_played(tmp_path):
    (tmp_path / "my_env.py").write_text(code("file: my_env.py"))
    command = [sys.executable, "-c", f"import sys; sys.path += ['', {str(ROOT)!r}]\n{code('played')}"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == PLAYED


def test_the_tables_name_the_shipped_classes_and_their_parameters():
    rows = dict(re.findall(r"^\| `(\w+:\w+)` \| (.*?) \|", PAGE.partition("(default)")[2], re.MULTILINE))
    files = {path.stem for path in (ROOT / "jaxrl_tis" / "environments").glob("*.py")}
    machinery = {"__init__", "protocol", "host", "pool", "continuity"}
    assert {name.partition(":")[0] for name in rows} == files - machinery
    for name, cell in rows.items():
        module, _, class_name = name.partition(":")
        module = importlib.import_module(f"jaxrl_tis.environments.{module}")
        parameters = dict(inspect.signature(getattr(module, class_name)).parameters)
        del parameters["seed"]
        shown = dict(re.findall(r"`(\w+)` \((\w+)", cell))
        assert set(shown) == set(parameters)
        assert all(str(p.default) == shown[n] for n, p in parameters.items() if p.default != p.empty)


def test_the_numbers_of_the_page():
    assert f"{host.OBSERVATION_CHARACTERS:,} characters" in PAGE
    assert list(inspect.signature(Step).parameters) == ["observation", "reward", "is_done", "metrics"]
