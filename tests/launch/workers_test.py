"""Machines of rollout workers: gcloud is a script that plays their states."""

import functools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
import types

import pytest

from tests.launch.fakes import verb_of

SHELLCHECK = str(pathlib.Path(sys.executable).with_name("shellcheck"))
CONFIG = "--config=configs/gsm8k_qwen25_0p5b.py:grpo"
NAME = "gsm8k-qwen25-0p5b-grpo"
ASYNC = [CONFIG, "--workdir=gs://b/x", "--worker_accelerator=v5litepod-4"]
TWO = [*ASYNC, "--num_workers=2"]
FIELDS = ["--config.rollout.driver=ray", "--config.rollout.workers=2", "--config.rollout.tpus_per_worker=4"]
TOKEN = "0123456789abcdef" * 4

# What gcloud and a host say.
NOT_FOUND = 1, "ERROR: (gcloud...) NOT_FOUND: Resource 'projects/p/x' was not found."
ACTIVE, WAITING, SUSPENDED = (0, "ACTIVE"), (0, "WAITING_FOR_RESOURCES"), (0, "SUSPENDED")
ADDRESS, NO_TOKEN, A_TOKEN = (0, "10.0.0.5"), (0, "SSH: Attempting..."), (0, f"SSH: Attempting...\n{TOKEN}")
NO_CODE, RUNNING = (0, "not running: no code"), (0, 'running: {"code": null} on host')
ENDED = 0, 'not running: {"code": 0} on host'


@pytest.fixture
def play_all(play, cloud):
    """(arguments, learner=answers, workers=answers, ...) -> the exit code, and the calls as pairs of
    the machine and the step. The answers of a machine are for describe and status."""
    def run(*arguments, learner=((ACTIVE,), (NO_CODE, ENDED)), workers=(), token=NO_TOKEN, **answers):
        by_words = {"networkEndpoints": [ADDRESS], "RAY_AUTH_TOKEN": [token], "failedData": [(0, "")]}
        for i, (states, statuses) in enumerate(workers):
            by_words |= {f"worker-{i}__describe": list(states), f"worker-{i}__status": list(statuses)}
        by_words |= {"describe": list(learner[0]), "status": list(learner[1])} | answers
        code, _ = play(*arguments, **by_words)
        return code, [(machine_of(words), verb_of(words)) for words in cloud.calls()]
    return run


def machine_of(words):
    found = re.search(rf"{NAME}-(worker-\d)", " ".join(words))
    return found[1] if found else "learner"


def steps(calls, machine):
    """Returns the steps of a machine that change something."""
    return [verb for name, verb in calls if name == machine
            and verb in ("create", "delete", "setup", "start", "work", "stop")]


def environment(cloud):
    return dict(line.split("=") for line in (cloud.copies / ".jaxrl_tis_env").read_text().split())


# Runs


@pytest.mark.all
def test_machines_are_requested_together_and_ray_starts_on_all(play_all, cloud, capfd):
    code, calls = play_all(
        "run", *TWO,
        learner=((NOT_FOUND, ACTIVE), (NO_CODE, RUNNING, RUNNING, RUNNING, ENDED)),
        workers=[((NOT_FOUND, ACTIVE), (NO_CODE, RUNNING))] * 2,
    )
    assert code == 0
    creations = [i for i, (_, verb) in enumerate(calls) if verb == "create"]
    assert [calls[i][0] for i in creations] == ["learner", "worker-0", "worker-1"]
    assert all(verb in ("describe", "create") for _, verb in calls[:creations[-1]])
    assert steps(calls, "learner") == ["create", "setup", "start"]
    assert steps(calls, "worker-0") == ["create", "setup", "work"] == steps(calls, "worker-1")
    assert calls.index(("learner", "start")) < calls.index(("worker-0", "work"))
    words = [call[-1] for call in cloud.calls()]
    [start], works = ([w for w in words if f"on_vm.sh {verb}" in w] for verb in ("start", "work"))
    assert shlex.split(start.partition("start ")[2]) == ["v5e", CONFIG, "--workdir=gs://b/x", *FIELDS]
    assert [w.partition("on_vm.sh ")[2] for w in works] == ["work v5e", "work v5e"]


@pytest.mark.all
def test_every_host_gets_one_address_and_one_token_that_show_nowhere(play_all, cloud, capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    code, calls = play_all("run", *ASYNC, workers=[((ACTIVE,), (NO_CODE, RUNNING))],
                           learner=((ACTIVE,), (NO_CODE, RUNNING, RUNNING, ENDED)))
    seen = environment(cloud)
    assert code == 0 and seen.keys() == {"HF_TOKEN", "RAY_ADDRESS", "RAY_AUTH_TOKEN"}
    assert seen["RAY_ADDRESS"] == "10.0.0.5:6379" and re.fullmatch("[0-9a-f]{64}", seen["RAY_AUTH_TOKEN"])
    said = capfd.readouterr()
    assert seen["RAY_AUTH_TOKEN"] not in f"{cloud.calls()}{said.out}{said.err}"


@pytest.mark.all
def test_the_run_starts_when_the_first_worker_machine_is_there(play_all, capfd):
    code, calls = play_all(
        "run", *TWO, workers=[((WAITING, WAITING, WAITING, ACTIVE), (NO_CODE, RUNNING)), ((WAITING,), ())],
        learner=((ACTIVE,), (NO_CODE, RUNNING, RUNNING, ENDED)))
    assert code == 0
    start = calls.index(("learner", "start"))
    assert calls[:start].count(("worker-0", "describe")) == 4
    assert "as soon as the first worker machine is there" in capfd.readouterr().out
    assert steps(calls, "worker-1") == []


@pytest.mark.all
def test_a_preempted_worker_is_requested_again_and_the_learner_goes_on(play_all):
    code, calls = play_all(
        "run", *ASYNC, learner=((ACTIVE,), (NO_CODE, *[RUNNING] * 12, ENDED)),
        workers=[((ACTIVE, ACTIVE, SUSPENDED, NOT_FOUND, ACTIVE), (NO_CODE, NO_CODE, RUNNING))])
    assert code == 0
    assert steps(calls, "worker-0") == ["setup", "work", "delete", "create", "setup", "work"]
    assert steps(calls, "learner") == ["setup", "start"]


@pytest.mark.all
def test_workers_join_the_new_head_of_a_preempted_learner(play_all):
    code, calls = play_all(
        "run", *ASYNC, workers=[((ACTIVE,), (NO_CODE, RUNNING))],
        learner=((ACTIVE, ACTIVE, SUSPENDED, NOT_FOUND, ACTIVE),
                 (NO_CODE, NO_CODE, NO_CODE, RUNNING, RUNNING, ENDED)))
    assert code == 0
    assert steps(calls, "learner") == ["setup", "start", "delete", "create", "setup", "start"]
    assert steps(calls, "worker-0") == ["setup", "work"] * 2


@pytest.mark.all
def test_a_run_under_way_keeps_its_token_and_its_workers(play_all, cloud):
    code, calls = play_all(
        "run", *TWO, token=A_TOKEN, learner=((ACTIVE,), (RUNNING, RUNNING, RUNNING, ENDED)),
        workers=[((ACTIVE,), (RUNNING,)), ((ACTIVE,), (NO_CODE, RUNNING))])
    assert code == 0 and steps(calls, "learner") == [] == steps(calls, "worker-0")
    assert steps(calls, "worker-1") == ["setup", "work"]
    assert environment(cloud)["RAY_AUTH_TOKEN"] == TOKEN


@pytest.mark.all
def test_ray_that_has_ended_on_a_worker_is_started_again(play_all):
    code, calls = play_all(
        "run", *ASYNC, learner=((ACTIVE,), (NO_CODE, *[RUNNING] * 8, ENDED)),
        workers=[((ACTIVE,), (NO_CODE, (0, 'not running: {"code": 42} on host'), NO_CODE, RUNNING))])
    assert code == 0 and steps(calls, "worker-0") == ["setup", "work"] * 2


@pytest.mark.all
def test_a_worker_that_cannot_be_set_up_ends_nothing(play_all, capfd):
    code, calls = play_all(
        "run", *ASYNC, learner=((ACTIVE,), (NO_CODE, *[RUNNING] * 8, ENDED)),
        workers=[((ACTIVE,), (NO_CODE, NO_CODE, RUNNING))],
        **{"worker-0__setup": [(1, "no space left"), (0, "")]})
    assert code == 0 and steps(calls, "worker-0") == ["setup", "setup", "work"]
    assert "on_vm.sh setup' failed with 1" in capfd.readouterr().out


@pytest.mark.all
def test_without_any_worker_machine_the_run_is_not_started(play_all, scripts, monkeypatch, capfd):
    tpu_vm = scripts("tpu_vm")
    monkeypatch.setattr(tpu_vm, "Machines", functools.partial(tpu_vm.Machines, max_creations=2))
    code, calls = play_all("run", *ASYNC, workers=[((NOT_FOUND, (0, "FAILED")) * 2 + (NOT_FOUND,), ())],
                           learner=((ACTIVE,), (NO_CODE,)))
    assert code == 1 and steps(calls, "learner") == []
    assert steps(calls, "worker-0") == ["create", "delete"] * 2
    out = capfd.readouterr().out
    assert "given up: 2 times created" in out
    assert f"delete {CONFIG} --worker_accelerator=v5litepod-4" in out


@pytest.mark.all
def test_create_requests_the_worker_machines_too(play_all):
    code, calls = play_all("create", *TWO, learner=((NOT_FOUND, WAITING, ACTIVE), ()),
                           workers=[((NOT_FOUND, WAITING), ())] * 2)
    assert code == 0 and steps(calls, "learner") == ["create", "setup"]
    assert steps(calls, "worker-0") == ["create"] == steps(calls, "worker-1")


@pytest.mark.all
def test_workers_are_tended_beside_the_log(scripts):
    tpu_vm = scripts("tpu_vm")

    class Worker:
        count = 0

        def tend(self, shell, cluster):
            self.count += 1
            time.sleep(0.1)
            if self.count == 5:
                raise ValueError("enough")

    class Gcloud:
        follow = staticmethod(lambda: ["sleep", "60"])
        plan = types.SimpleNamespace(hosts=1)

    tpu_vm.POLL_SECONDS, start = 0.0, time.monotonic()
    with pytest.raises(ValueError, match="enough"):
        tpu_vm._follow(None, Gcloud, [Worker()], None)
    assert time.monotonic() - start < 30  # the log does not outlive an error


# Other commands


@pytest.mark.all
@pytest.mark.parametrize("command", ["status", "stop", "delete"])
def test_a_command_reaches_all_machines(play_all, command):
    code, calls = play_all(command, *TWO, workers=[((ACTIVE,), (RUNNING,))] * 2)
    assert code == 0
    assert [name for name, verb in calls if verb == command] == ["learner", "worker-0", "worker-1"]


@pytest.mark.all
def test_what_cannot_be_deleted_does_not_keep_the_others(play_all, capfd):
    code, calls = play_all("delete", *TWO, delete=[NOT_FOUND, (0, "")])
    assert code == 1 and [verb for _, verb in calls] == ["delete"] * 3
    assert f"delete {NAME} --force --quiet failed with 1" in capfd.readouterr().err


@pytest.mark.all
def test_what_cannot_be_stopped_does_not_keep_the_others(play_all):
    code, calls = play_all("stop", *TWO, stop=[(255, ""), (0, "")])
    assert code == 1 and [verb for _, verb in calls] == ["stop"] * 3


@pytest.mark.all
@pytest.mark.parametrize("learner, worker", [
    ((ACTIVE,), (NOT_FOUND, (0, "FAILED"))), ((NOT_FOUND, (0, "FAILED")), (ACTIVE,)),
])
def test_a_run_that_gives_up_says_how_to_end_the_bill(play_all, capfd, learner, worker):
    code, _ = play_all(
        "run", *ASYNC, "--valid-until=2h", learner=(learner, (NO_CODE,)), workers=[(worker, (NO_CODE,))])
    assert code == 1
    said = capfd.readouterr().out
    assert "--valid-until=2h: it is deleted" in said
    assert f"billed until: python launch/tpu_vm.py delete {CONFIG}" in said


# Dry runs


@pytest.mark.all
def test_the_script_of_a_dry_run_does_what_the_run_does(call, cloud, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    assert call("tpu_vm", "run", "--dry-run", *TWO, "--price_per_chip_hour=1") == 0
    shown = capfd.readouterr().out
    assert "8 chips, 1 host; rollout workers on 2 x v5litepod-4: 8 chips\n" in shown
    assert "# 16 chips x 1 h" in shown and cloud.calls() == []
    script = tmp_path / "script.sh"
    script.write_text(f"#!/usr/bin/env bash\n{shown.replace('sleep 30', 'sleep 0')}")
    checked = subprocess.run([SHELLCHECK, str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    cloud.answer(networkEndpoints=[ADDRESS], describe=[(0, "PROVISIONING"), ACTIVE])
    ran = subprocess.run(["bash", str(script)], capture_output=True, text=True,
                         env=os.environ | {"TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    calls = [(machine_of(words), verb_of(words)) for words in cloud.calls()]
    assert steps(calls, "learner") == ["create", "setup", "start"]
    assert steps(calls, "worker-0") == ["create", "setup", "work"] == steps(calls, "worker-1")
    assert calls[-1] == ("learner", "follow")
    seen = environment(cloud)
    assert seen["RAY_ADDRESS"] == "10.0.0.5:6379" and len(seen["RAY_AUTH_TOKEN"]) == 64


# Plans


@pytest.mark.all
@pytest.mark.parametrize("given, kept", [
    (["--config.rollout.driver=ray"], FIELDS[1:]),
    (["--config.rollout.tpus_per_worker=1", "--config.rollout.workers=8"], FIELDS[:1]),
])
def test_fields_that_are_given_are_kept(call, capfd, given, kept):
    assert call("tpu_vm", "run", "--dry-run", *TWO, *given) == 0
    [line] = [x for x in capfd.readouterr().out.splitlines() if "on_vm.sh start" in x]
    assert shlex.split(line.strip())[0].split()[-len(kept + given):] == kept + given


@pytest.mark.parametrize("arguments, said", [
    (["--config.rollout.driver=ray"], "needs machines for the rollout workers; give --worker_accelerator"),
    (["--num_workers=2"], "--num_workers=2 needs --worker_accelerator"),
    (["--worker_accelerator=v5litepod-4", "--num_workers=0"], "--num_workers=0 is below 1"),
    (["--worker_accelerator=v5litepod-16"], "has 4 hosts, and a rollout worker uses one"),
    (["--worker_accelerator=v5e-8"], "'v5e-8' is unknown"),
    (["--worker_accelerator=v5litepod-4", "--config.rollout.driver=threads"], "leave one of the two out"),
])
def test_refusals_are_one_line(call, capfd, arguments, said):
    assert call("tpu_vm", "run", "--dry-run", CONFIG, "--workdir=gs://b/x", *arguments) == 2
    error = capfd.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.all
@pytest.mark.parametrize("given, code, said", [
    ((), 0, "rollout workers on 8 x v5p-8"), (("--num_workers=3",), 0, "rollout workers on 3 x v5p-8"),
    (("--config.rollout.driver=virtual",), 0, "v5p-64: 32 chips, 8 hosts\n"),
    (("--num_workers=0",), 2, "--num_workers=0 is below 1"),
])
def test_a_config_with_workers_of_its_own(call, capfd, given, code, said):
    own = "--config=configs/dapo_qwen25_32b.py:async"
    assert call("tpu_vm", "run", "--dry-run", own, "--workdir=gs://b/x", *given) == code
    assert said in "".join(capfd.readouterr())


@pytest.mark.parametrize("flag", ["--worker_accelerator=v5litepod-4", "--config.rollout.driver=ray"])
def test_a_jobset_has_no_rollout_workers(call, capfd, flag):
    assert call("jobset", "manifest", CONFIG, "--workdir=gs://b/x", "--image=i", flag) == 2
    assert "worker_accelerator" in capfd.readouterr().err
