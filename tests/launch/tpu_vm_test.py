"""gcloud is a script that plays states."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SHELLCHECK = str(pathlib.Path(sys.executable).with_name("shellcheck"))
SCRIPT = ROOT / "launch" / "tpu_vm.py"
GSM8K = "--config=configs/gsm8k_qwen25_0p5b.py:grpo"
NOT_FOUND = 1, "ERROR: NOT_FOUND: the resource was not found"
NAME = "gsm8k-qwen25-0p5b-grpo"


def call(*arguments, **environment):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True,
                          env=os.environ | environment, cwd=ROOT)


# Decisions


def test_machines_that_are_lost_are_asked_for_anew(scripts):
    machines = scripts("tpu_vm").Machines()
    states = [None, "ACCEPTED", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "SUSPENDING", None,
              "PROVISIONING", "ACTIVE", "ACTIVE"]
    assert [machines.next(state) for state in states] == [
        "create", "wait", "wait", "start", "follow", "delete", "create", "wait", "start", "follow"]


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED", "PREEMPTED"])
def test_states_in_which_nothing_comes_back(scripts, state):
    assert scripts("tpu_vm").Machines().next(state) == "delete"


def test_creations_are_bounded(scripts):
    machines = scripts("tpu_vm").Machines(max_creations=2)
    assert [machines.next(s) for s in (None, "FAILED", None, "FAILED", None)] == [
        "create", "delete", "create", "delete", "give up"]


def test_silence_is_bounded(scripts):
    machines = scripts("tpu_vm").Machines(max_lost_touch=2)
    assert machines.next("ACTIVE") == "start"
    assert not machines.is_over(255) and machines.next("ACTIVE") == "follow"
    assert not machines.is_over(255) and machines.next("ACTIVE") == "give up"
    assert all(machines.is_over(code) for code in (0, 1, 2, 42))


# Whole runs on played states


@pytest.fixture
def play(scripts, cloud, monkeypatch):
    """Runs `tpu_vm.py run` on played answers; returns its exit code and the verbs of the calls."""
    tpu_vm, plan = scripts("tpu_vm"), scripts("plan")
    monkeypatch.setattr(tpu_vm, "POLL_SECONDS", 0.0)

    def run(*arguments, **answers):
        cloud.answer(**answers)
        monkeypatch.setattr(sys, "argv", ["tpu_vm.py", *arguments])
        with pytest.raises(SystemExit) as exited:
            plan.main(tpu_vm.main)
        verbs = []
        for words in cloud.calls():
            verb = words[4]
            if verb == "ssh":
                verb = next((v for v in ("setup", "start", "follow", "status") if f"on_vm.sh {v}" in words[-1]),
                            "unpack")
            verbs.append(verb)
        return exited.value.code, verbs
    return run


def test_a_run_from_nothing_to_its_end(play):
    code, verbs = play(
        "run", GSM8K, "--workdir=gs://b/x",
        describe=[NOT_FOUND, (0, "WAITING_FOR_RESOURCES"), (0, "PROVISIONING"), (0, "ACTIVE")],
        follow=[(0, "the log")], status=[(1, "no such file")],
    )
    assert code == 0
    assert verbs == ["describe", "create", "describe", "describe", "describe", "status", "scp",
                     "unpack", "setup", "start", "describe", "follow"]


def test_a_preempted_run_is_continued_on_new_machines(play, capfd):
    code, verbs = play(
        "run", GSM8K, "--workdir=gs://b/x", "--spot",
        describe=[NOT_FOUND, (0, "ACTIVE"), (0, "ACTIVE"), (0, "SUSPENDED"), NOT_FOUND,
                  (0, "ACTIVE")],
        follow=[(255, "connection closed"), (0, "")], status=[(1, "")],
    )
    assert code == 0
    assert verbs.count("create") == 2 and verbs.count("delete") == 1 and verbs.count("start") == 2
    assert verbs.index("delete") < len(verbs) - 1 - verbs[::-1].index("create")
    out = capfd.readouterr().out
    assert "SUSPENDED: deleting it" in out and "still there, and billed" in out


def test_a_lost_connection_is_taken_up_again(play):
    code, verbs = play("run", GSM8K, "--workdir=gs://b/x", describe=[(0, "ACTIVE")],
                       follow=[(255, ""), (255, ""), (0, "")], status=[(1, "")])
    assert code == 0 and verbs.count("follow") == 3 and verbs.count("start") == 1


def test_a_run_that_is_under_way_is_only_followed(play):
    code, verbs = play("run", GSM8K, "--workdir=gs://b/x", describe=[(0, "ACTIVE")],
                       follow=[(0, "")], status=[(0, 'running: {"attempt": 1}')])
    assert code == 0 and verbs == ["describe", "status", "describe", "follow"]


@pytest.mark.parametrize("code", [1, 2, 42])
def test_the_runs_own_exit_is_passed_on(play, code):
    seen, verbs = play("run", GSM8K, "--workdir=gs://b/x", describe=[(0, "ACTIVE")],
                       follow=[(code, "")], status=[(1, "")])
    assert seen == code and "delete" not in verbs and verbs.count("start") == 1


def test_machines_that_never_come_up_are_given_up(play, capfd):
    code, verbs = play("run", GSM8K, "--workdir=gs://b/x", delete=[(0, "")],
                       describe=[NOT_FOUND, (0, "FAILED")] * 20 + [NOT_FOUND])
    assert code == 1 and verbs.count("create") == 20 and "setup" not in verbs
    assert "given up: 20 times created" in capfd.readouterr().out


def test_a_refusal_of_gcloud_is_passed_on(play, capfd):
    code, verbs = play("run", GSM8K, describe=[(1, "PERMISSION_DENIED: no such project")])
    assert code == 2 and verbs == ["describe"]
    assert "PERMISSION_DENIED" in capfd.readouterr().err


def test_an_environment_that_cannot_be_made_ends_it(play, capfd):
    code, verbs = play("run", GSM8K, describe=[(0, "ACTIVE")], setup=[(1, "pip failed")],
                       status=[(1, "")])
    assert code == 1 and "start" not in verbs
    assert "on_vm.sh setup' failed with 1" in capfd.readouterr().err


def test_create_makes_the_machines_ready_and_no_more(play):
    code, verbs = play("create", GSM8K, describe=[NOT_FOUND, (0, "ACTIVE")])
    assert code == 0 and verbs == ["describe", "create", "describe", "scp", "unpack", "setup"]


@pytest.mark.parametrize("command, verbs", [
    ("status", ["describe", "status"]), ("logs", ["follow"]), ("delete", ["delete"]),
])
def test_the_other_commands(play, command, verbs):
    assert play(command, GSM8K, describe=[(0, "ACTIVE")]) == (0, verbs)


def test_status_where_there_is_nothing(play, capfd):
    assert play("status", GSM8K, describe=[NOT_FOUND])[1] == ["describe"]
    assert "there is none" in capfd.readouterr().out


# What is called


def test_several_slices_are_several_nodes(play, cloud):
    play("run", "--config=configs/dapo_qwen25_32b.py", "--num_slices=2", "--workdir=gs://b/x",
         describe=[NOT_FOUND, (0, "ACTIVE")], follow=[(0, "")], status=[(1, "")])
    create = next(c for c in cloud.calls() if "create" in c)
    assert {"--node-prefix=dapo-qwen25-32b", "--node-count=2", "--accelerator-type=v5p-128"} <= set(create)
    started = [c[5] for c in cloud.calls() if "on_vm.sh start" in c[-1]]
    assert started == ["dapo-qwen25-32b-0", "dapo-qwen25-32b-1"]


def test_secrets_go_by_a_file_and_show_nowhere(play, cloud, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    play("run", GSM8K, "--workdir=gs://b/x", describe=[NOT_FOUND, (0, "ACTIVE")], follow=[(0, "")],
         status=[(1, "")])
    assert any(words[-2].endswith(":.jaxrl_tis_env") or ".jaxrl_tis_env" in " ".join(words)
               for words in cloud.calls())
    said = capfd.readouterr()
    assert "hf_very_secret" not in f"{cloud.calls()}{said.out}{said.err}"


# Dry runs


def test_a_dry_run_shows_a_script_and_does_nothing(cloud, tmp_path):
    done = call("run", "--dry-run", GSM8K, "--accelerator=v5litepod-8", "--spot",
                "--config.correction.preset=tis_2", "--price_per_chip_hour=1.5", "--hours=10",
                HF_TOKEN="hf_very_secret")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cloud" / "log.jsonl").exists()
    for part in ("--accelerator-type=v5litepod-8", "--runtime-version=v2-alpha-tpuv5-lite",
                 "--spot", "launch/on_vm.sh start v5e", "--config.correction.preset=tis_2",
                 "8 chips x 10 h x 1.5 a chip and hour = 120.00", "goes with it"):
        assert part in done.stdout
    assert "hf_very_secret" not in done.stdout + done.stderr
    script = tmp_path / "script.sh"
    script.write_text(f"#!/usr/bin/env bash\n{done.stdout}")
    checked = subprocess.run([SHELLCHECK, str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_the_script_of_a_dry_run_does_what_the_run_does(cloud, tmp_path):
    cloud.answer(describe=[(0, "PROVISIONING"), (0, "ACTIVE")])
    done = call("run", "--dry-run", GSM8K, "--git=https://example.org/x.git#v1")
    script = done.stdout.replace("sleep 30", "sleep 0")
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    calls = [" ".join(words) for words in cloud.calls()]
    order = ["create", "describe", "describe", "git clone", "setup", "start", "follow"]
    assert [word for word, text in zip(order, calls, strict=True) if word in text] == order
    assert "git checkout --quiet v1" in calls[3]


@pytest.mark.parametrize("command", ["create", "status", "logs", "delete"])
def test_every_command_has_a_dry_run(cloud, tmp_path, command):
    done = call(command, "--dry-run", GSM8K, "--zone=us-x", "--project=p")
    assert done.returncode == 0 and "gcloud compute tpus" in done.stdout
    assert "--zone=us-x" in done.stdout and "--project=p" in done.stdout
    assert not (tmp_path / "cloud" / "log.jsonl").exists()


# Refusals


@pytest.mark.parametrize("arguments, said", [
    (["run", "--config=configs/none.py"], "there is no file 'configs/none.py'"),
    (["run", GSM8K, "--accelerator=v5e-8"], "'v5e-8' is none of"),
    (["run", GSM8K, "--num_slices=0"], "there is at least 1"),
    (["run", GSM8K, "--name=No_Good"], "small letters"),
    (["run", GSM8K, "--workdri=x"], "unknown arguments --workdri=x"),
    (["run", "--config=configs/default.py"], "--accelerator is not given"),
    (["run", "--config=configs/dapo_qwen25_32b.py"], "v5p-128 has 16 hosts, which share one folder"),
])
def test_refusals_are_one_line(arguments, said):
    done = call(*arguments, "--dry-run")
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
