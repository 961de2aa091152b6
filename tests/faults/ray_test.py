"""Runs on Ray whose workers, nodes, head or learner are lost: they have the samples of a run without
a fault. The learning rate is next to nothing, so these are the samples of a synchronous run."""

import collections
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest

from tests import forked, ray_nodes

pytestmark = [pytest.mark.faults, pytest.mark.all]

STEPS, GROUPS, STALENESS = 12, 4, 2
COMMAND = [
    "-m", "jaxrl_tis.main", "--config=tests/small_run.py", f"--config.steps={STEPS}",
    "--config.optimizer.lr=1e-30", "--config.rollout.max_new_tokens=24", "--config.engine.slots=4",
    "--config.engine.steps_per_call=1", f"--config.eval.every={STEPS}", "--config.checkpoint.every=3",
    f"--config.metrics.samples={GROUPS}", "--config.metrics.samples_every=1",
]
ON_RAY = [
    *COMMAND, "--config.rollout.driver=ray", "--config.rollout.workers=2",
    f"--config.rollout.schedule=in_flight(staleness={STALENESS})",
    "--config.rollout.worker_timeout=10",
]
# Holds more objects than the object store has room for.
FILLING = """
import ray, sys, time
import numpy as np
ray.init(sys.argv[1], log_to_driver=False)
held = [ray.put(np.ones(20 << 20, np.uint8)) for _ in range(8)]
print("full", flush=True)
time.sleep(600)
"""


def answers(workdir) -> list[dict]:
    text = pathlib.Path(workdir, "samples.jsonl").read_text()
    return [r for r in map(json.loads, text.splitlines()) if r["phase"] == "train"]


# Episodes of up to three turns.
EPISODES = (
    "--config.task.environment=tests.tiny_environment:Sums", "--config.task.max_context_tokens=60",
    "--config.task.max_turns=3", "--config.task.environment_workers=1", "--config.reward.name=exact",
)


def sampled(record: dict) -> tuple:
    """The prompt and tokens of an answer; of an episode also its turns and rewards."""
    told = [json.dumps(record.get(name)) for name in ("turn", "outcome", "turn_rewards", "reward")]
    return record["prompt"], record["tokens"], *told


@functools.cache
def expected(*options: str) -> dict[str, tuple]:
    """The answers of a synchronous run by request."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxrl_tis_ray_"))
    command = [*COMMAND, *options, f"--workdir={folder / 'run'}", "--config.rollout.schedule=sync"]
    code, text = forked.run(command, folder / "log")
    assert code == 0, text[-3000:]
    return {r["id"]: sampled(r) for r in answers(folder / "run")}


def assert_whole(workdir, *options: str) -> None:
    """Nothing is lost or doubled, no token is too old, and all answers are those of `expected`."""
    found = answers(workdir)
    assert {r["id"]: sampled(r) for r in found} == expected(*options)
    assert len(found) == len(expected(*options)) == STEPS * GROUPS
    assert set(collections.Counter(r["step"] for r in found).values()) == {GROUPS}
    for record in found:
        after = record["step"] - 1
        versions = [v for v in record["version"] if v is not None]  # none of given tokens
        assert after - STALENESS <= min(versions) <= max(versions) <= after


class Learner(forked.Command):
    """A run in FOLDER/run, killed at the end of the block."""

    def __init__(self, folder, *options, address="", number=0, cpus=0.5, **environment):
        self.workdir, log = folder / "run", folder / f"learner{number}.log"
        needed = f"--config.rollout.cpus_per_worker={cpus}"
        command = [*ON_RAY, needed, f"--workdir={self.workdir}", *options]
        environment = ray_nodes.ENVIRONMENT | {"RAY_ADDRESS": address or "local"} | environment
        super().__init__(command, log, environment)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self.wait()

    def until_step(self, step: int) -> None:
        """Waits for this step, or the end of the run."""
        path = self.workdir / "metrics.jsonl"
        steps = lambda: path.read_text().count('"train"') if path.exists() else 0
        ray_nodes.wait_for(lambda: steps() >= step or self.poll() is not None, forked.SECONDS)
        assert self.poll() is None, self.text()[-3000:]

    def until_joined(self) -> None:
        """Waits until both workers have joined, or the end of the run."""
        joined = lambda: self.text().count("joined on node") == 2
        ray_nodes.wait_for(lambda: joined() or self.poll() is not None, forked.SECONDS)
        assert self.poll() is None, self.text()[-3000:]

    def end(self) -> int:
        return self.wait(forked.SECONDS)

    def assert_done(self, *options: str) -> None:
        assert self.end() == 0, self.text()[-3000:]
        assert "Traceback" not in self.text()
        assert_whole(self.workdir, *options)


def of_steps(workdir, name) -> float:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return sum(r[name] for r in lines if r["phase"] == "train")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_hangs_twice_costs_time_alone(tmp_path, number):
    with Learner(tmp_path) as learner:
        # One that is killed before it joined has not left.
        learner.until_joined()
        workers = ray_nodes.named(learner.pid, "ray::RolloutWorker")
        for step, worker in zip((2, 6), workers, strict=True):
            learner.until_step(step)
            os.kill(worker, number)
        learner.assert_done()
        assert of_steps(learner.workdir, "async/left") == 2
        assert "sequences continue elsewhere" in learner.text()
        assert not ray_nodes.descendants(learner.pid)


def test_the_episodes_of_killed_workers_continue_elsewhere(tmp_path):
    with Learner(tmp_path, *EPISODES) as learner:
        learner.until_joined()
        workers = ray_nodes.named(learner.pid, "ray::RolloutWorker")
        for step, worker in zip((2, 6), workers, strict=True):
            learner.until_step(step)
            os.kill(worker, signal.SIGKILL)
        assert learner.end() == 0, learner.text()[-3000:]
        assert_whole(learner.workdir, *EPISODES)
        assert of_steps(learner.workdir, "async/left") == 2
        assert "sequences continue elsewhere" in learner.text()
        assert not ray_nodes.descendants(learner.pid)
    last_turns = {max(json.loads(turns)) for _, _, turns, *_ in expected(*EPISODES).values()}
    assert last_turns >= {0, 1, 2}


def test_lost_nodes_cost_time_alone_and_another_takes_their_place(tmp_path):
    node = functools.partial(ray_nodes.Node, tmp_path, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1")
    with (
        node("--num-cpus=0") as head,
        node("--num-cpus=1", head=head.address) as first,
        node("--num-cpus=1", head=head.address) as second,
        Learner(tmp_path, address=head.address, cpus=1) as learner,
    ):
        learner.until_joined()
        learner.until_step(2)
        first.kill()
        learner.until_step(4)
        second.kill()
        with node("--num-cpus=1", head=head.address):
            learner.assert_done()
        assert of_steps(learner.workdir, "async/left") == 2
        assert learner.text().count("joined on node") >= 3


def test_a_killed_learner_leaves_no_process_of_its_local_ray_and_continues(tmp_path):
    with Learner(tmp_path) as learner:
        learner.until_step(5)
        started = ray_nodes.descendants(learner.pid)
        assert len([line for line in started.values() if "RolloutWorker" in line]) == 2
        learner.kill()
        assert learner.end() == -signal.SIGKILL
    with Learner(tmp_path, number=1) as learner:
        learner.assert_done()
        assert "continuing" in learner.text()
    ray_nodes.wait_for(lambda: not any(map(ray_nodes.is_alive, started)), 120)


def test_a_killed_learner_leaves_no_worker_in_a_cluster_and_continues(tmp_path):
    with ray_nodes.Node(tmp_path, "--num-cpus=1") as head:
        with Learner(tmp_path, address=head.address) as learner:
            learner.until_step(5)
            workers = ray_nodes.named(head.pid, "ray::RolloutWorker")
            assert len(workers) == 2
            learner.kill()
            assert learner.end() == -signal.SIGKILL
        ray_nodes.wait_for(lambda: not any(map(ray_nodes.is_alive, workers)))
        with Learner(tmp_path, address=head.address, number=1) as learner:
            learner.assert_done()
            assert "continuing" in learner.text()


@pytest.mark.parametrize("lost", ["gcs_server", "raylet", "both"])
def test_where_the_head_is_lost_the_run_saves_and_continues_with_another_head(tmp_path, lost):
    """Ray itself ends the learner, with 1, where the node's Ray is lost during a call of it."""
    with ray_nodes.Node(tmp_path, "--num-cpus=1") as head:
        with Learner(tmp_path, address=head.address) as learner:
            learner.until_step(5)
            if lost == "both":
                head.kill()
            else:
                os.kill(ray_nodes.named(head.pid, f"/{lost} ")[0], signal.SIGKILL)
            code, text = learner.end(), learner.text()
            assert "Traceback" not in text and code in (42, 1) and (code, lost) != (1, "gcs_server")
            if code == 42:
                assert re.search(r"at 127.0.0.1:\d+ does not answer: .*; the same command continues", text)
                assert "stopped after step" in text
    with ray_nodes.Node(tmp_path, "--num-cpus=1") as head, \
            Learner(tmp_path, address=head.address, number=1) as learner:
        learner.assert_done()


@pytest.mark.parametrize("spills", ["1", "0"])
def test_a_full_object_store_costs_time_alone(tmp_path, spills):
    """Ray writes objects to the disk, also where it may not spill them there."""
    environment = {"RAY_automatic_object_spilling_enabled": spills}
    store = f"--object-store-memory={80 << 20}"
    with ray_nodes.Node(tmp_path, "--num-cpus=1", store, **environment) as head, \
            Learner(tmp_path, address=head.address) as learner:
        learner.until_step(2)
        other = subprocess.Popen(
            [sys.executable, "-c", FILLING, head.address], stdout=subprocess.PIPE, text=True,
            env=os.environ | ray_nodes.ENVIRONMENT,
        )
        try:
            assert other.stdout.readline() == "full\n"
            learner.assert_done()
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()
