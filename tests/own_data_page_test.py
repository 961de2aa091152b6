"""docs/own_data.md: its files are pasted and its commands are run."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxrl_tis import cli_flags, train
from tests import tiny

pytestmark = pytest.mark.compiles

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own_data.md").read_text().partition("\n## Rewards")[0]
BLOCK = r"(?:<!-- (?P<mark>[^>]*) -->\n)?```\n(?P<text>.*?)```"
BLOCKS = [(found["mark"] or "", found["text"]) for found in re.finditer(BLOCK, PAGE, re.DOTALL)]
FILES = {mark.removeprefix("file: "): text for mark, text in BLOCKS if mark.startswith("file: ")}
RUNS = [text for mark, text in BLOCKS if not mark]
[OWN_MODEL], [REFUSED], [SAID] = (
    [t for m, t in BLOCKS if m == mark] for mark in ("own model", "refused", "said")
)
# The page's model and batch are larger than a test needs.
SMALL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 1,
    "model.head_dim": 16, "model.mlp_dim": 48, "rollout.prompts": 2, "rollout.group_size": 2,
    "engine.slots": 4, "engine.prefill_batch": 4, "train.microbatch_rows": 4, "steps": 1,
}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder with the page's files, in which configs are where they are in a clone."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_written(command, folder):
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "python"
    return subprocess.run([sys.executable, *words[1:]], cwd=folder, capture_output=True, text=True)


def parsed(command):
    """Returns the config and the workdir of a command of the page."""
    python, m, main, *flags = shlex.split(command.replace("\\\n", " "))
    assert (python, m, main) == ("python", "-m", "jaxrl_tis.main")
    [workdir] = [f.removeprefix("--workdir=") for f in flags if f.startswith("--workdir=")]
    return cli_flags.parsed([f for f in flags if not f.startswith("--workdir=")]), workdir


def run_small(command):
    """Runs a command of the page in this process, smaller, and returns its workdir."""
    config, workdir = parsed(command)
    config.update_from_flattened_dict(SMALL)
    with tiny.one_device():
        train.run(config, workdir)
    return workdir


def test_the_page_has_five_layouts():
    assert len(re.findall(r"^### [1-5]\. ", PAGE, re.MULTILINE)) == len(RUNS) == 5


def test_the_command_with_a_model_and_a_reward_is_taken(clone):
    config, _ = parsed(OWN_MODEL)
    assert (config.model.path, config.reward.name) == ("models/mine", "my_reward:score")
    assert config.task.params.to_dict() == {"path": "train.jsonl"}


@pytest.mark.all
def test_the_first_command_as_it_is_written(clone):
    done = as_written(RUNS[0], clone)
    assert done.returncode == 0, done.stderr
    assert "step 2: held-out accuracy" in done.stdout


@pytest.mark.all
@pytest.mark.parametrize("command", RUNS, ids=[re.search(r"runs/(\w+)", r)[1] for r in RUNS])
def test_each_layout_is_trained_on(clone, command):
    workdir = run_small(command)
    records = [json.loads(line) for line in (clone / workdir / "metrics.jsonl").read_text().splitlines()]
    assert [r["data/bad_examples"] for r in records if r["phase"] == "train"] == [0]
    samples = [json.loads(x) for x in (clone / workdir / "samples.jsonl").read_text().splitlines()]
    assert {(s["prompt"], s["answer"]) for s in samples} <= {
        ("2+3=", "5"), ("4+4=", "8"), ("1+6=", "7"), ("2+2=", "4"), ("3+5=", "8"),
    }


@pytest.mark.all
def test_bad_examples_end_the_start_and_the_mended_file_starts(clone):
    done = as_written(REFUSED, clone)
    assert (done.returncode, done.stderr) == (2, SAID)
    assert not (clone / "runs/bad/config.json").exists()
    (clone / "bad.jsonl").write_text(FILES["bad.jsonl"].splitlines()[0] + "\n")
    run_small(REFUSED)
