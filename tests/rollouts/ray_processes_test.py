"""A learner of two processes whose samplers are Ray actors."""

import signal

import pytest

from jaxrl_tis.record import metrics
from tests import hosts

pytestmark = [pytest.mark.faults, pytest.mark.all]

STEPS = 8
FIELDS = {
    "rollout.driver": "ray", "rollout.workers": "2", "rollout.cpus_per_worker": "0.5",
    "rollout.schedule": "in_flight(staleness=2)", "steps": f"{STEPS}",
    # Each process holds one half of most weights. A worker holds all on its one device.
    "model.num_kv_heads": "2", "mesh.train": "(1,2,1)", "mesh.serve": "(1,1,-1)",
}


def test_processes_evaluate_the_same_episodes(tmp_path):
    """Process 0 plays them for both: replies that come at other times would be other inputs of one
    program. The environment of the second process is never made."""
    fields = FIELDS | {
        "steps": "2", "task.environment": "tests.tiny_environment:Sums", "task.max_context_tokens": "20",
        "task.max_turns": "3", "task.environment_workers": "1", "reward.name": "exact",
    }
    command = [
        *hosts.MAIN, "--config=tests/small_run.py", f"--workdir={tmp_path / 'run'}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]
    with hosts.Hosts(tmp_path / "first", command, devices=2) as pair:
        assert pair.codes() == [0, 0], pair.text(0) + pair.text(1)
    records = metrics.read(tmp_path / "run")
    assert [r["step"] for r in records if r["phase"] == "train"] == [1, 2]
    assert all(r["num_turns/mean"] > 1 for r in records if r["phase"] == "train")


@pytest.mark.parametrize("lora", ["none", "lora(rank=4, alpha=8)"])
def test_both_processes_train_on_the_same_batches_and_stop_together(tmp_path, lora):
    """processes.consistency_every of the config is 1: each step compares the processes' batches.
    The fingerprint at the workers is of the whole tree, whose halves two processes have put. With
    adapters the base goes to the workers once, and the factors at each update."""
    command = [
        *hosts.MAIN, "--config=tests/small_run.py", f"--workdir={tmp_path / 'run'}",
        f"--config.model.lora={lora}",
        *(f"--config.{name}={value}" for name, value in FIELDS.items()),
    ]
    with hosts.Hosts(tmp_path / "first", command, devices=2) as pair:
        pair.wait_for("step 2: held-out accuracy")
        pair.send(1, signal.SIGTERM)
        assert pair.codes() == [42, 42], pair.text(0) + pair.text(1)
        assert all("Traceback" not in pair.text(i) for i in range(2))
    with hosts.Hosts(tmp_path / "second", command, devices=2) as pair:
        assert pair.codes() == [0, 0], pair.text(0) + pair.text(1)
        assert "continuing" in pair.text(0)
    records = [r for r in metrics.read(tmp_path / "run") if r["phase"] == "train"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert {r["async/workers"] for r in records} <= {1.0, 2.0}
    assert max(r["training/off_policy/trajectory_staleness/mean"] for r in records) <= 2
