"""Whole runs whose rollouts come through their own endpoint, with real clients."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl_tis.record import samples
from jaxrl_tis.rollouts.groups import request, sampling_params
from jaxrl_tis.rollouts.source import generate
from jaxrl_tis.runtime import cli
from jaxrl_tis.serve import setup as serving
from tests import tiny
from tests.asynchronous_run_test import params
from tests.serve.clients_test import write_tokenizer

pytestmark = pytest.mark.compiles


def answered(**settings):
    """Records of 12 samples at the first weights, by id."""
    setup = tiny.setup(**settings)
    config, tokenizer = setup.config, setup.tokenizer
    sampling = sampling_params(config, tokenizer, 0.8, is_filtered=True)
    weights = serving.load(setup, None)
    requests = []
    with contextlib.closing(setup.prompter()) as prompter:
        for i in range(12):
            example = {"id": f"x{i}", "prompt": f"{i % 10}+{i // 2}=", "answer": f"{i % 10 + i // 2}"}
            requests.append(request(config, f"r{i}", prompter.ids(example), sampling, example))
    with contextlib.closing(setup.scheduler(setup.engine, weights, 0)) as scheduler:
        return {t.id: t for t in generate(scheduler, requests)}


@pytest.mark.all
def test_a_session_has_the_bits_of_the_episode():
    """The agent plays the environment by token ids. Observations of both are the same."""
    same = dict(
        model__numerics="invariant", engine__quantization="none", task__max_context_tokens=20,
        reward__name="exact",
    )
    episodes = answered(**tiny.EPISODES | same)
    sessions = answered(rollout__harness="tests.tiny_harness:plays", **same)
    for id, episode in episodes.items():
        session = sessions[id]
        assert (episode.outcome == "failed") == (session.outcome == "failed")
        for name in ("prompt", "tokens", "mask", "turn", "logp_behav", "logp_raw", "version"):
            np.testing.assert_array_equal(getattr(session, name), getattr(episode, name))
        if episode.outcome != "failed":
            total = np.nansum(episode.turn_rewards, dtype=np.float64)
            np.testing.assert_allclose(np.nansum(session.turn_rewards), total, rtol=1e-6)
    assert max(t.num_turns for t in sessions.values()) > 1


RUNS = {
    "sync": dict(steps=2),
    "workers": dict(steps=4, rollout__schedule="in_flight(staleness=2)", rollout__workers=2),
}


@pytest.mark.all
@pytest.mark.parametrize("name", ["sync", pytest.param("workers", marks=pytest.mark.all)])
def test_a_run_repeats_bit_by_bit(tmp_path, name):
    settings = tiny.HARNESS | RUNS[name]
    for folder in ("one", "two"):
        tiny.run(tmp_path / folder, **settings)
    one, two = (tiny.lines(tmp_path / folder) for folder in ("one", "two"))
    assert one == two
    steps = [r for r in one if r["phase"] == "train"]
    assert all(r["harness/calls"] > 1 for r in steps) and sum(r["episodes/done"] for r in steps) > 20
    if name == "workers":
        assert max(r["training/off_policy/trajectory_staleness_worst/max"] for r in steps) >= 1
        assert sum(r["async/resumed"] for r in steps) > 0
        assert sum(r["harness/restarted"] for r in steps) == 0
    setup = tiny.setup(**settings)
    jax.tree.map(
        np.testing.assert_array_equal, params(tmp_path / "one", setup),
        params(tmp_path / "two", setup),
    )


@pytest.mark.all
def test_after_a_restart_sessions_begin_anew(tmp_path):
    settings = tiny.HARNESS | RUNS["workers"]
    tiny.run(tmp_path / "run", **settings | dict(steps=2))
    tiny.run(tmp_path / "run", **settings)
    steps = [r for r in tiny.lines(tmp_path / "run") if r["phase"] == "train"]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert sum(r["harness/restarted"] for r in steps) > 0


@pytest.mark.all
def test_forks_are_trained_on(tmp_path):
    """Each session has two rows. Half of the second rows find room."""
    size = tiny.config().rollout.prompts * tiny.config().rollout.group_size
    tiny.run(
        tmp_path, steps=1, metrics__samples_every=1, rollout__fork_rows=size // 2,
        **tiny.HARNESS | dict(rollout__harness="tests.tiny_harness:forks"),
    )
    [step] = [r for r in tiny.lines(tmp_path) if r["phase"] == "train"]
    assert step["harness/forks"] == size and step["harness/fork_rows"] == size // 2
    assert step["harness/left_out_forks"] == step["harness/left_out_tokens"] == size - size // 2
    [*lines] = [line for line in samples.read(tmp_path) if line["phase"] == "train"]
    for line in lines:
        [fork] = line["forks"]
        assert line["prompt"].endswith("1+" + fork["prompt"][-4:])
        assert (fork["fork"], fork["length"], line["fork"]) == (0, 1, 1)


@pytest.mark.all
def test_samplers_in_threads(tmp_path):
    """No token is older than the bound, and some are of older weights than the learner's."""
    settings = tiny.HARNESS | dict(
        rollout__schedule="areal(staleness=2)", rollout__driver="threads", rollout__workers=2,
    )
    tiny.run(tmp_path / "run", steps=4, **settings)
    steps = [r for r in tiny.lines(tmp_path / "run") if r["phase"] == "train"]
    assert len(steps) == 4 and max(r.get("harness/calls", 0.0) for r in steps) > 1
    oldest = [r["training/off_policy/trajectory_staleness_worst/max"] for r in steps]
    assert 1 <= max(oldest) <= 2


@pytest.mark.all
def test_a_harness_that_cannot_be_used_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(ValueError, match="'tests.tiny_harness:missing' cannot be loaded"):
        tiny.run(tmp_path, **tiny.HARNESS | dict(rollout__harness="tests.tiny_harness:missing"))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_system_with_too_few_open_files_is_named_before_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "raise_file_limit", lambda: 287)
    with pytest.raises(ValueError, match="16 sessions .* need 288 open files, .* 287 .*ulimit -Hn"):
        tiny.run(tmp_path / "run", **tiny.HARNESS)
    assert not (tmp_path / "run").exists()


@pytest.mark.all
@pytest.mark.skipif("VERIFIERS_PYTHON" not in os.environ, reason="an environment of its own")
def test_a_run_on_a_taskset_of_verifiers(tmp_path, monkeypatch):
    """By the commands of docs/harness.md. Its agent starts in a process of its own for each session."""
    root, python = pathlib.Path(__file__).parents[1], os.environ["VERIFIERS_PYTHON"]
    folders = [str(root / "tests" / part) for part in ("harness", "serve")]
    monkeypatch.setattr(sys, "path", [*sys.path, *folders])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write = "from jaxrl_tis.harness.verifiers import write_examples; write_examples('verifiers_letters')"
    listed = subprocess.run(
        [python, "-c", write], env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *folders])},
        capture_output=True, text=True, check=True,
    )
    examples = [json.loads(line) for line in listed.stdout.splitlines()]
    assert examples == [{"id": str(i), "prompt": f"{2 * i + 1}+{2 * i + 2}?"} for i in range(4)]
    data = tmp_path / "tasks.jsonl"
    data.write_text(listed.stdout)
    write_tokenizer(tmp_path)
    tiny.run(
        tmp_path / "run", steps=2, rollout__harness="verifiers:verifiers_letters",
        rollout__harness_python=python, task__name="jsonl", task__params={"path": str(data)},
        task__tokenizer=str(tmp_path), task__chat=True, task__max_prompt_tokens=100,
        task__max_context_tokens=300, rollout__max_new_tokens=8, warmup__steps=0,
        eval__params={"path": str(data)}, eval__prompts=4, reward__name="exact",
    )
    steps = [r for r in tiny.lines(tmp_path / "run") if r["phase"] == "train"]
    for record in steps:
        assert record["harness/calls"] == 2
        assert record["episodes/done"] + record["episodes/overlong"] == 16  # answers of 8 tokens are cut
        assert 0 < record["reward/mean"] < 1 and record["actor/grad_norm"] > 0
    assert steps[0]["reward/mean"] != steps[1]["reward/mean"]
