"""published.py finds the commands of pages and docstrings, and its table has a way to run each."""

import pathlib
import sys

import pytest

from tests import published, published_ways as ways

ROOT = pathlib.Path(__file__).parents[1]
PAGE = """\
# A page with `python -m jaxrl_tis.doctor WORKDIR` and `python -m jaxrl_tis.NAME`, `./launch/on
ly.sh`, and `./launch/quickstart.sh
--compare`.

```
export A=1
X_B=2 python -m jaxrl_tis.main --config=a.py \\
  --config.c='d(e=1)'   # a comment
kubectl logs POD | python -m jaxrl_tis.doctor -
export FLAGS="$(python -m jaxrl_tis.libtpu_flags v5e)"
print("no command")
```
"""
DOCSTRING = """About `python -m benchmarks.kernels`.

    ./launch/figures.sh [NAME ...]    # some
    python -m benchmarks.host [--steps=3] [--only=a,b]
        [--json=out.json] [--all | --none]

python -m benchmarks.moe in a sentence
"""


def texts(text, is_page):
    return [published.parse(line).text for line in published.in_text(text, is_page)]


def test_the_commands_of_a_page():
    assert texts(PAGE, is_page=True) == [
        "X_B=2 python -m jaxrl_tis.main --config=a.py --config.c=d(e=1)",
        "python -m jaxrl_tis.doctor -", "python -m jaxrl_tis.libtpu_flags v5e",
        "python -m jaxrl_tis.doctor WORKDIR", "./launch/quickstart.sh --compare",
    ]


def test_the_commands_of_a_docstring():
    assert texts(DOCSTRING, is_page=False) == [
        "./launch/figures.sh", "python -m benchmarks.host --steps=3 --only=a,b --json=out.json",
        "python -m benchmarks.kernels",
    ]


def test_every_published_command_has_a_way_to_run():
    """A command on a page that no lane runs rots. Give it a line of WAYS in tests/published_ways.py."""
    without = {c.text: where for c, where in published.commands().items() if not ways.way(c.text)}
    assert without == {}
    assert len(published.chosen("", "0/1")) > 200


def test_a_command_without_a_way_is_refused(monkeypatch):
    monkeypatch.setattr(ways, "WAYS", {".*(?<!--quick)$": ways.Way()})
    with pytest.raises(ValueError, match="published_ways.py has no way to run ./launch/test.sh --quick"):
        published.chosen("", "0/1")


def test_every_way_runs_a_command():
    used = {id(ways.way(command.text)) for command in published.commands()}
    idle = [pattern for pattern, way in ways.WAYS.items() if id(way) not in used]
    assert idle == []
    assert all(way.why for way in ways.WAYS.values() if way.instead or way.check)


def test_every_benchmark_with_a_command_is_published():
    programs = {word for command in published.commands() for word in command.words[2:3]}
    scripts = {"audit_trl", "grpo_trl", "grpo_tunix"}  # for the environments of other libraries
    named = {
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
    }
    assert {f"benchmarks.{name}" for name in named - scripts} <= programs


@pytest.mark.parametrize("text, way, words", [
    ("python -m a.b --x=1 --y=2", ways.Way("--z=3", (("--x=.*", "--x=4"), ("--y=.*", ""))),
     [sys.executable, "-m", "a.b", "--x=4", "--z=3"]),
    ("python -m a.b c --x=1 --y=2", ways.Way("--x=3"), [sys.executable, "-m", "a.b", "c", "--y=2", "--x=3"]),
    ("./launch/a.sh b", ways.Way(instead="--help", why="c"), ["./launch/a.sh", "--help"]),
    (".ci/run all", ways.Way(instead="-n", why="c"), ["bash", "-n", ".ci/run"]),
    ("python -m a.b --config=c --workdir=d --config.e=1", ways.Way(check=True, why="f"),
     [sys.executable, "-c", ways.CHECK, "--config=c", "--config.e=1"]),
    ("python launch/a.py -- python -m b", ways.Way("c"),
     [sys.executable, "launch/a.py", "--", sys.executable, "-m", "b", "c"]),
])
def test_the_tiny_form_of_a_command(text, way, words):
    assert published.tiny(published.parse(text), way) == words


def test_the_slices_have_every_command_once():
    whole = list(published.chosen("benchmarks", "0/1"))
    parts = [list(published.chosen("benchmarks", f"{7 + k}/3")) for k in range(3)]
    assert sorted(c.text for part in parts for c in part) == sorted(c.text for c in whole)
    assert parts[0] == whole[1::3]


@pytest.mark.cases("python -c raise(SystemExit(3))-way1-ended with 3")
@pytest.mark.parametrize("text, way, error", [
    ("python -c pass", ways.Way(), ""), ("python -c raise(SystemExit(3))", ways.Way(), "ended with 3"),
    ("python -c raise(SystemExit(3))", ways.Way(codes=(0, 3)), ""),
    ("python -c print('up',flush=True);import\\ time;time.sleep(99)", ways.Way(until="up"), ""),
])
def test_a_command_that_fails_is_seen(tmp_path, text, way, error):
    command = published.parse(text)
    if error:
        with pytest.raises(RuntimeError, match=error):
            published.run(tmp_path, command, way)
    else:
        published.run(tmp_path, command, way)
