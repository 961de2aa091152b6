"""gcloud is a script that plays states."""

import functools
import os
import pathlib
import shlex
import subprocess
import sys
import types

import pytest

from tests.launch.fakes import verb_of

SHELLCHECK = str(pathlib.Path(sys.executable).with_name("shellcheck"))
GSM8K = "--config=configs/gsm8k_qwen25_0p5b.py:grpo"
DAPO = "--config=configs/dapo_qwen25_32b.py"
NAME = "gsm8k-qwen25-0p5b-grpo"
BUCKET = "--workdir=gs://b/x"

# What gcloud and a host say.
NOT_FOUND = 1, "ERROR: (gcloud...) NOT_FOUND: Resource 'projects/p/x' was not found."
NO_NETWORK = 1, "ERROR: (gcloud...) There was a problem refreshing your current auth tokens"
PREEMPTED = 1, 'ERROR: (gcloud...) This TPU has terminal state "PREEMPTED", so it cannot be used anymore.'
NO_CODE = 0, "not running: no code"
RUNNING = 0, 'running: {"attempt": 1, "code": null, "pid": 7} on host-0'
GONE = 0, 'not running: {"attempt": 1, "code": null, "pid": 7} on host-0'


def ended(code):
    return 0, f'SSH: Attempting...\nnot running: {{"attempt": 1, "code": {code}, "pid": 7}} on host-0'


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


def test_a_bounded_request_that_brings_nothing_is_the_last(scripts):
    machines = scripts("tpu_vm").Machines(is_bounded=True)
    # One that failed before is of an earlier start; machines that were there are asked for anew.
    states = ["FAILED", None, "ACTIVE", "SUSPENDED", None, "WAITING_FOR_RESOURCES", "FAILED"]
    assert [machines.next(state) for state in states] == [
        "delete", "create", "start", "delete", "create", "wait", "expire"]


def test_what_is_heard_of_the_run(scripts):
    tpu_vm = scripts("tpu_vm")
    machines = tpu_vm.Machines(has_run=True)
    assert machines.ended(tpu_vm.Status(is_running=True)) is None and machines.has_run
    assert [machines.ended(tpu_vm.Status(False, code)) for code in (0, 1, 42)] == [0, 1, 42]
    assert machines.ended(tpu_vm.Status(is_running=False)) is None
    assert machines.next("ACTIVE") == "start"


def test_silence_is_bounded_and_counted_in_a_row(scripts):
    tpu_vm = scripts("tpu_vm")
    assert tpu_vm.Machines().max_lost_touch * tpu_vm.POLL_SECONDS == 3600
    machines = tpu_vm.Machines(max_lost_touch=3, has_run=True)
    quiet = lambda: machines.ended(None)
    quiet(), machines.next(tpu_vm.UNKNOWN)
    machines.ended(tpu_vm.Status(is_running=True))
    assert machines.lost_touch == 0
    quiet(), quiet()
    assert machines.next("ACTIVE") == "follow"
    assert machines.next(tpu_vm.UNKNOWN) == "wait"
    assert machines.next("ACTIVE") == "give up" == machines.next("SUSPENDED") == machines.next(None)


def test_describes_that_fail_now_and_then_in_a_long_queue_do_not_add_up(scripts):
    tpu_vm = scripts("tpu_vm")
    machines = tpu_vm.Machines(max_lost_touch=2)
    for _ in range(5):
        assert machines.next(tpu_vm.UNKNOWN) == "wait" == machines.next("WAITING_FOR_RESOURCES")


def test_a_run_that_its_host_forgets_each_time_is_given_up(scripts):
    tpu_vm = scripts("tpu_vm")
    machines = tpu_vm.Machines(max_lost_touch=2)
    for _ in range(2):
        assert [machines.next("ACTIVE"), machines.next("ACTIVE")] == ["start", "follow"]
        machines.ended(tpu_vm.Status(is_running=False))
    assert machines.next("ACTIVE") == "give up"


@pytest.mark.parametrize("text, running, code, arguments", [
    ('a\nrunning: {"code": null} on h with ["--a=b", "--c=d\\ne"]\nb', True, None, ["--a=b", "--c=d\ne"]),
    ('not running: {"attempt": 2, "code": 42, "pid": 7} on h with ["--a"]', False, 42, ["--a"]),
    ("not running: no run.json on h", False, None, None),
    ("not running: no code", False, None, None),
])
def test_a_status_is_read(scripts, text, running, code, arguments):
    status = scripts("tpu_vm").Status.parse(text)
    assert (status.is_running, status.code, status.arguments) == (running, code, arguments)


@pytest.mark.parametrize("text", ["", "Warning: it is running: slowly", PREEMPTED[1]])
def test_no_status(scripts, text):
    assert scripts("tpu_vm").Status.parse(text) is None


# Whole runs on played states


@pytest.mark.all
def test_a_run_from_nothing_to_its_end(play):
    code, verbs = play(
        "run", GSM8K, BUCKET,
        describe=[NOT_FOUND, (0, "WAITING_FOR_RESOURCES"), (0, "PROVISIONING"), (0, "ACTIVE")],
        follow=[(0, "the log")], status=[NO_CODE, ended(0)],
    )
    assert code == 0
    assert verbs == ["describe", "create", "describe", "describe", "describe", "status", "scp",
                     "unpack", "setup", "start", "describe", "follow", "status"]


@pytest.mark.all
@pytest.mark.parametrize("last_words", [(255, "connection closed"), PREEMPTED, (0, "")])
def test_a_preempted_run_is_continued_on_new_machines(play, capfd, last_words):
    code, verbs = play(
        "run", GSM8K, BUCKET, "--spot",
        describe=[NOT_FOUND, (0, "ACTIVE"), (0, "ACTIVE"), (0, "SUSPENDED"), NOT_FOUND,
                  (0, "ACTIVE")],
        follow=[last_words, (0, "")], status=[NO_CODE, PREEMPTED, NO_CODE, ended(0)],
    )
    assert code == 0
    assert verbs.count("create") == 2 and verbs.count("delete") == 1 and verbs.count("start") == 2
    assert verbs.index("delete") < len(verbs) - 1 - verbs[::-1].index("create")
    out = capfd.readouterr().out
    assert "SUSPENDED: deleting it" in out and "still there, and billed" in out


@pytest.mark.all
def test_a_request_that_fails_after_others_is_made_again(play, capfd):
    code, verbs = play(
        "run", GSM8K, BUCKET, create=[(0, ""), NO_NETWORK, NO_NETWORK, (0, "")],
        describe=[NOT_FOUND, (0, "ACTIVE"), (0, "SUSPENDED"), *[NOT_FOUND] * 3, (0, "ACTIVE")],
        status=[NO_CODE, PREEMPTED, NO_CODE, ended(0)],
    )
    assert code == 0 and verbs.count("create") == 4 and verbs.count("start") == 2
    assert "failed with 1; it is tried again" in capfd.readouterr().out


@pytest.mark.all
def test_a_first_request_that_fails_is_a_mistake(play):
    code, verbs = play("run", GSM8K, BUCKET, create=[(1, "no quota")], describe=[NOT_FOUND])
    assert code == 1 and verbs == ["describe", "create"]


@pytest.mark.all
def test_requests_that_fail_for_an_hour_are_given_up(play, scripts, monkeypatch):
    tpu_vm = scripts("tpu_vm")
    monkeypatch.setattr(tpu_vm, "Machines", functools.partial(tpu_vm.Machines, max_lost_touch=30))
    code, verbs = play("run", GSM8K, BUCKET, create=[(0, ""), NO_NETWORK],
                       describe=[NOT_FOUND, (0, "SUSPENDED"), NOT_FOUND])
    assert code == 1 and verbs.count("create") == 31


HOSTS = f"{RUNNING[1]}\nnot running: {{\"attempt\": 1, \"code\": null, \"pid\": 7}} on host-1"


@pytest.mark.all
def test_a_host_that_was_started_anew_gets_the_run_again(play):
    code, verbs = play("run", DAPO, BUCKET, describe=[(0, "ACTIVE")], status=[(0, HOSTS), (0, HOSTS), ended(0)])
    assert code == 0 and verbs.count("start") == 1 and "setup" not in verbs


def test_hosts_are_looked_at_beside_the_log(play, scripts, monkeypatch):
    """One of two hosts was started anew after the log began; later the run has ended everywhere."""
    tpu_vm = scripts("tpu_vm")
    monkeypatch.setattr(tpu_vm, "HOSTS_SECONDS", 0.0)
    waits = iter([True, True, False])

    class Log:
        def __init__(self, command): ...
        def poll(self): return None if next(waits) else 0
        def wait(self, seconds=None): ...
        def kill(self): ...

    monkeypatch.setattr(tpu_vm.subprocess, "Popen", Log)
    seen = []
    monkeypatch.setattr(tpu_vm.plans.Shell, "read", lambda self, command: (0, [HOSTS, ended(0)[1]][len(seen)]))
    monkeypatch.setattr(tpu_vm.plans.Shell, "run", lambda self, command: seen.append(command))
    given = types.SimpleNamespace(num_slices=1, project="p", zone="z", internal_ips=False)
    topology = types.SimpleNamespace(kind="v5p")
    plan = types.SimpleNamespace(name="a", hosts=2, workers=None, topology=topology, arguments=["--x"])
    tpu_vm._follow(tpu_vm.plans.Shell(False), tpu_vm.Gcloud(plan, given), [], None)
    [start] = seen
    assert "on_vm.sh start v5p --x" in start[-1]


@pytest.mark.all
def test_machines_that_are_preempted_while_they_are_set_up(play):
    code, verbs = play(
        "run", GSM8K, BUCKET, describe=[(0, "ACTIVE"), (0, "SUSPENDED"), NOT_FOUND, (0, "ACTIVE")],
        setup=[PREEMPTED, (0, "")], status=[NO_CODE, PREEMPTED, NO_CODE, ended(0)])
    assert code == 0 and verbs.count("setup") == 2 and verbs.count("create") == 1


@pytest.mark.all
def test_a_lost_connection_is_taken_up_again(play):
    code, verbs = play("run", GSM8K, BUCKET, describe=[(0, "ACTIVE")], follow=[(255, "")],
                       status=[NO_CODE, RUNNING, (255, ""), ended(0)])
    assert code == 0 and verbs.count("follow") == 3 and verbs.count("start") == 1


@pytest.mark.all
def test_a_run_whose_host_was_restarted_is_started_again(play, capfd):
    code, verbs = play("run", GSM8K, BUCKET, describe=[(0, "ACTIVE")], follow=[(255, "")],
                       status=[NO_CODE, GONE, GONE, ended(0)])
    assert code == 0 and verbs.count("start") == 2
    assert "knows nothing of the run any more" in capfd.readouterr().out


@pytest.mark.all
@pytest.mark.parametrize("arguments", ["", f' with ["{GSM8K}", "{BUCKET}", "--config.steps=7"]'])
def test_a_run_that_is_under_way_is_only_followed(play, arguments):
    code, verbs = play("run", GSM8K, BUCKET, "--config.steps=7", describe=[(0, "ACTIVE")],
                       status=[(0, RUNNING[1] + arguments), ended(0)])
    assert code == 0 and verbs == ["describe", "status", "describe", "follow", "status"]


@pytest.mark.all
def test_another_run_of_the_same_name_is_not_followed(play, capfd):
    code, verbs = play("run", GSM8K, BUCKET, "--config.steps=7", describe=[(0, "ACTIVE")],
                       status=[(0, f'{RUNNING[1]} with ["{GSM8K}", "--workdir=gs://b/y"]'), ended(0)])
    assert code == 2 and verbs == ["describe", "status"]
    said = capfd.readouterr().err
    assert f"runs already, with {GSM8K} --workdir=gs://b/y;" in said
    assert f"this would be {GSM8K} {BUCKET} --config.steps=7" in said


@pytest.mark.all
@pytest.mark.parametrize("code", [1, 2, 42])
def test_the_runs_own_exit_is_passed_on(play, code):
    seen, verbs = play("run", GSM8K, BUCKET, describe=[(0, "ACTIVE")], follow=[(code, "")],
                       status=[NO_CODE, ended(code)])
    assert seen == code and "delete" not in verbs and verbs.count("start") == 1


@pytest.mark.all
def test_machines_that_never_come_up_are_given_up(play, scripts, monkeypatch, capfd):
    tpu_vm = scripts("tpu_vm")
    monkeypatch.setattr(tpu_vm, "Machines", functools.partial(tpu_vm.Machines, max_creations=3))
    code, verbs = play("run", GSM8K, BUCKET, failedData=[(0, "no quota for this chip")],
                       describe=[NOT_FOUND, (0, "FAILED")] * 3 + [NOT_FOUND])
    assert code == 1 and verbs.count("create") == 3 and "setup" not in verbs
    assert verbs.count("reason") == 3 == verbs.count("delete")
    out = capfd.readouterr().out
    assert "given up: 3 times created" in out and out.count("\nno quota for this chip\n") == 3


@pytest.mark.all
def test_a_request_that_expires_is_deleted_and_told(play, capfd):
    code, verbs = play("run", GSM8K, BUCKET, "--valid-until=2h", failedData=[(0, "no chips in time")],
                       describe=[NOT_FOUND, (0, "WAITING_FOR_RESOURCES"), (0, "FAILED")])
    assert code == 1 and verbs.count("create") == 1 and verbs[-2:] == ["reason", "delete"]
    out = capfd.readouterr().out
    assert "--valid-until=2h: it is deleted, and not asked for anew" in out
    assert "no chips in time" in out


@pytest.mark.all
def test_a_deletion_that_fails_is_tried_again(play):
    code, verbs = play("run", GSM8K, BUCKET, delete=[NO_NETWORK, (0, "")], status=[ended(0)],
                       describe=[(0, "SUSPENDED"), (0, "SUSPENDED"), (1, "INVALID_ARGUMENT")])
    assert code == 2 and verbs.count("delete") == 2


@pytest.mark.all
def test_a_describe_that_fails_once_ends_nothing(play, capfd):
    code, verbs = play("run", GSM8K, BUCKET, follow=[(255, ""), (0, "")],
                       describe=[NO_NETWORK, (0, "ACTIVE"), NO_NETWORK, (0, "ACTIVE")],
                       status=[NO_CODE, (1, "no network"), ended(0)])
    assert code == 0 and verbs.count("start") == 1 and "create" not in verbs
    assert "problem refreshing your current auth tokens" in capfd.readouterr().out


@pytest.mark.all
@pytest.mark.parametrize("answer", [
    (1, "ERROR: (gcloud...) PERMISSION_DENIED: Cloud TPU API has not been used"),
    (1, "ERROR: (gcloud...) UNAUTHENTICATED: no credentials"),
    (1, "ERROR: (gcloud...) INVALID_ARGUMENT: Zone x"),
    (1, "ERROR: (gcloud...) You do not currently have an active account selected."),
    (1, "ERROR: (gcloud...) Error parsing [queued_resource].\nFailed to find attribute [project]."),
    (1, "ERROR: (gcloud...) The required property [project] is not currently set."),
    (2, "ERROR: (gcloud.compute.tpus) Invalid choice: 'queued-resources'."),
])
def test_a_refusal_of_gcloud_is_passed_on(play, capfd, answer):
    code, verbs = play("run", GSM8K, describe=[answer])
    assert code == 2 and verbs == ["describe"]
    assert answer[1] in capfd.readouterr().err


@pytest.mark.all
def test_an_environment_that_cannot_be_made_ends_it(play, capfd):
    code, verbs = play("run", GSM8K, describe=[(0, "ACTIVE")], setup=[(1, "pip failed")],
                       status=[NO_CODE])
    assert code == 1 and "start" not in verbs
    assert "on_vm.sh setup' failed with 1" in capfd.readouterr().err


@pytest.mark.all
def test_create_reaches_machines_that_do_not_answer_at_once(play):
    code, verbs = play("create", GSM8K, describe=[(0, "ACTIVE")], setup=[(255, ""), (0, "")])
    assert code == 0 and verbs.count("setup") == 2


@pytest.mark.all
def test_create_makes_the_machines_ready_and_no_more(play):
    code, verbs = play("create", GSM8K, describe=[NOT_FOUND, (0, "ACTIVE")])
    assert code == 0 and verbs == ["describe", "create", "describe", "scp", "unpack", "setup"]


@pytest.mark.all
@pytest.mark.parametrize("command, verbs", [
    ("status", ["describe", "status"]), ("logs", ["follow"]), ("stop", ["stop"]),
    ("delete", ["delete"]),
])
def test_the_other_commands(play, command, verbs):
    assert play(command, GSM8K, describe=[(0, "ACTIVE")]) == (0, verbs)


@pytest.mark.all
@pytest.mark.parametrize("command", ["status", "logs", "stop", "delete"])
def test_the_other_commands_need_no_slice(play, cloud, command):
    assert play(command, "--config=configs/default.py", "--name=mine", describe=[(0, "ACTIVE")])[0] == 0
    assert all("mine" in words for words in cloud.calls())


@pytest.mark.all
@pytest.mark.parametrize("command", ["status", "stop"])
def test_every_host_of_every_slice_is_asked(play, cloud, command):
    play(command, DAPO, "--num_slices=2", describe=[(0, "ACTIVE")])
    asked = [words for words in cloud.calls() if words[4] == "ssh"]
    assert [words[5] for words in asked] == ["dapo-qwen25-32b-0", "dapo-qwen25-32b-1"]
    assert all("--worker=all" in words for words in asked)


@pytest.mark.all
def test_status_where_there_is_nothing(play, capfd):
    assert play("status", GSM8K, describe=[NOT_FOUND])[1] == ["describe"]
    assert "there is none" in capfd.readouterr().out


@pytest.mark.all
def test_status_goes_on_to_the_next_slice(play):
    assert play("status", DAPO, "--num_slices=2", describe=[(0, "ACTIVE")], status=[(1, "")]) == (
        1, ["describe", "status", "status"])


@pytest.mark.all
def test_status_where_gcloud_fails(play, capfd):
    assert play("status", GSM8K, describe=[NO_NETWORK]) == (2, ["describe"])
    assert "auth tokens" in capfd.readouterr().err


# What is called


@pytest.mark.all
def test_several_slices_are_several_nodes(play, cloud):
    play("run", DAPO, "--num_slices=2", BUCKET, describe=[NOT_FOUND, (0, "ACTIVE")],
         status=[NO_CODE, ended(0)])
    create = next(c for c in cloud.calls() if "create" in c)
    assert {"--node-prefix=dapo-qwen25-32b", "--node-count=2", "--accelerator-type=v5p-128"} <= set(create)
    started = [c[5] for c in cloud.calls() if "on_vm.sh start" in c[-1]]
    assert started == ["dapo-qwen25-32b-0", "dapo-qwen25-32b-1"]


PLAIN = ["gcloud", "compute", "tpus", "queued-resources", "create"]
ALPHA = ["gcloud", "alpha", *PLAIN[1:]]


@pytest.mark.all
@pytest.mark.parametrize("options, start, flags", [
    ([], PLAIN, []),
    (["--spot"], PLAIN, ["--spot"]),
    (["--reserved"], PLAIN, ["--reserved"]),
    (["--reservation=chips-7"], ALPHA, ["--reservation=chips-7"]),
    (["--reservation=projects/p/reservations/r", "--reserved"], ALPHA,
     ["--reservation=projects/p/reservations/r"]),
    (["--network=research", "--subnetwork=research-us", "--service-account=me@p.iam"], PLAIN,
     ["--network=research", "--subnetwork=research-us", "--service-account=me@p.iam"]),
    (["--internal-ips"], PLAIN, ["--internal-ips"]),
    *[([f"--valid-until={text}"], PLAIN, [f"--valid-until-duration={text}"])
      for text in ("2h", "90m", "1d12h", "1w", "PT1H30M", "P1DT2H", "30s")],
    *[([f"--valid-until={text}"], PLAIN, [f"--valid-until-time={text}"])
      for text in ("2030-01-31T08:00:00Z", "2030-01-31", "2030-01-31 08:00:00+01:00")],
])
def test_how_machines_are_asked_for(play, cloud, options, start, flags):
    play("create", GSM8K, *options, describe=[NOT_FOUND, (0, "ACTIVE")])
    [create] = [words for words in cloud.calls() if "create" in words]
    assert create == [
        *start, NAME, f"--node-id={NAME}", "--accelerator-type=v5litepod-8",
        "--runtime-version=v2-alpha-tpuv5-lite", *flags]


@pytest.mark.all
@pytest.mark.parametrize("command", ["run", "status", "logs", "stop"])
def test_hosts_without_external_addresses_are_reached_by_their_internal_ones(play, cloud, command, capfd):
    play(command, GSM8K, BUCKET, "--internal-ips", describe=[(0, "ACTIVE")],
         status=[NO_CODE, ended(0)])
    reached = [words for words in cloud.calls() if words[3] == "tpu-vm"]
    assert reached and all("--internal-ip" in words for words in reached)
    assert not any("--internal-ip" in words for words in cloud.calls() if words[3] != "tpu-vm")
    if command == "run":
        assert "delete --config=configs/gsm8k_qwen25_0p5b.py:grpo --internal-ips" in capfd.readouterr().out


@pytest.mark.all
def test_secrets_go_by_a_file_and_show_nowhere(play, cloud, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    play("run", GSM8K, BUCKET, describe=[(0, "ACTIVE")], status=[NO_CODE, ended(0)])
    copy = cloud.copies / ".jaxrl_tis_env"
    assert copy.read_text() == "HF_TOKEN=hf_very_secret\n" and copy.stat().st_mode & 0o777 == 0o600
    assert not any("rm -f" in words[-1] for words in cloud.calls())
    said = capfd.readouterr()
    assert "hf_very_secret" not in f"{cloud.calls()}{said.out}{said.err}"


@pytest.mark.all
def test_without_secrets_old_ones_are_removed(play, cloud):
    play("run", GSM8K, BUCKET, describe=[(0, "ACTIVE")], status=[NO_CODE, ended(0)])
    [setup] = [words[-1] for words in cloud.calls() if verb_of(words) == "setup"]
    assert setup == f"--command=rm -f .jaxrl_tis_env && bash {NAME}/launch/on_vm.sh setup"


@pytest.mark.all
def test_what_is_copied_is_not_where_others_expect_it(play, cloud):
    play("create", GSM8K, describe=[(0, "ACTIVE")])
    play("create", GSM8K, describe=[(0, "ACTIVE")])
    first, second = [pathlib.Path(words[5]) for words in cloud.calls() if words[4] == "scp"]
    assert first.parent != second.parent and not first.parent.exists()
    assert (cloud.copies / f"{NAME}.tar.gz").stat().st_size > 0


@pytest.mark.all
@pytest.mark.parametrize("arguments", [
    [GSM8K, "--zone=us-x", "--project=p", "--accelerator=v5litepod-4"],
    [DAPO, "--name=mine", "--num_slices=2", BUCKET],
    ["--config=configs/default.py", "--accelerator=v5litepod-8"],
    [GSM8K, "--internal-ips"],
])
def test_the_command_that_ends_the_bill_works(play, cloud, capfd, arguments):
    play("run", *arguments, "--config.steps=7", describe=[(0, "ACTIVE")], status=[NO_CODE, ended(0)])
    line = next(line for line in capfd.readouterr().out.splitlines() if "billed, until: " in line)
    words = shlex.split(line.partition("billed, until: ")[2])
    assert words[:3] == ["python", "launch/tpu_vm.py", "delete"]
    assert [word for word in arguments if word not in words] == [BUCKET] * (BUCKET in arguments)
    assert play(*words[2:])[0] == 0
    described, deleted = cloud.calls()[0], cloud.calls()[-1]
    assert deleted[4] == "delete" and deleted[5:-2] == described[5:-1]


# Dry runs


@pytest.mark.all
def test_a_dry_run_shows_a_script_and_does_nothing(call, cloud, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert call("tpu_vm", "run", "--dry-run", GSM8K, "--accelerator=v5litepod-8", "--spot",
                "--config.correction.preset=tis_2", "--price_per_chip_hour=1.5", "--hours=10") == 0
    shown = capfd.readouterr()
    assert cloud.calls() == []
    for part in ("--accelerator-type=v5litepod-8", "--runtime-version=v2-alpha-tpuv5-lite",
                 "--spot", "launch/on_vm.sh start v5e", "--config.correction.preset=tis_2",
                 "8 chips x 10 h x 1.5 a chip and hour = 120.00", "goes with it"):
        assert part in shown.out
    assert "hf_very_secret" not in shown.out + shown.err
    script = tmp_path / "script.sh"
    script.write_text(f"#!/usr/bin/env bash\n{shown.out}")
    checked = subprocess.run([SHELLCHECK, str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.all
@pytest.mark.parametrize("more, order", [
    (["--git=https://example.org/x.git#v1"],
     ["create", "describe", "describe", "git fetch", "environment", "setup", "start", "follow"]),
    ([], ["create", "describe", "describe", "code.tar.gz", "tar -xzf", "environment", "setup", "start",
          "follow"]),
])
def test_the_script_of_a_dry_run_does_what_the_run_does(
    call, cloud, tmp_path, monkeypatch, capfd, more, order
):
    secret = "hf 'very' secret"
    monkeypatch.setenv("HF_TOKEN", secret)
    call("tpu_vm", "run", "--dry-run", GSM8K, *more)
    cloud.answer(describe=[(0, "PROVISIONING"), (0, "ACTIVE")])
    (tmp_path / "temporary").mkdir()
    script = capfd.readouterr().out.replace("sleep 30", "sleep 0")
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True,
                         env=os.environ | {"TMPDIR": str(tmp_path / "temporary")})
    assert ran.returncode == 0, ran.stderr
    calls = [" ".join(words) for words in cloud.calls()]
    assert [word for word, text in zip(order, calls, strict=True) if word in text] == order
    copy = cloud.copies / ".jaxrl_tis_env"
    told = subprocess.run(["bash", "-c", f'unset HF_TOKEN; source {copy}; printf %s "$HF_TOKEN"'],
                          capture_output=True, text=True)
    assert told.stdout == secret and copy.stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.all
@pytest.mark.parametrize("command", ["create", "status", "logs", "stop", "delete"])
def test_every_command_has_a_dry_run(call, cloud, capfd, command):
    assert call("tpu_vm", command, "--dry-run", GSM8K, "--zone=us-x", "--project=p") == 0
    shown = capfd.readouterr().out
    assert "gcloud compute tpus" in shown and "--zone=us-x" in shown and "--project=p" in shown
    assert cloud.calls() == []


# Refusals


@pytest.mark.parametrize("arguments, said", [
    (["run", "--config=configs/none.py"], "there is no file 'configs/none.py'"),
    (["run", GSM8K, "--accelerator=v5e-8"], "'v5e-8' is unknown; give one of"),
    (["run", GSM8K, "--num_slices=0"], "give at least 1"),
    (["run", GSM8K, "--name=No_Good"], "small letters"),
    (["run", GSM8K, "--workdri=x"], "unknown arguments --workdri=x"),
    (["run", "--config=configs/default.py"], "--accelerator is missing"),
    (["run", DAPO], "is not shared by the 16 hosts of v5p-128"),
    (["run", GSM8K, "--spot", "--reserved"], "--spot and --reserved exclude each other"),
    (["run", GSM8K, "--spot", "--reservation=r"], "--spot and --reservation=r exclude each other"),
    (["run", GSM8K, "--reservation="], "--reservation is empty"),
    (["run", GSM8K, "--network="], "--network is empty"),
    (["run", GSM8K, "--subnetwork="], "--subnetwork is empty"),
    (["run", GSM8K, "--valid-until="], "--valid-until is empty"),
    (["run", GSM8K, "--valid-until=soon"], "--valid-until=soon is neither a duration nor a time"),
    (["run", GSM8K, "--valid-until=P"], "--valid-until=P is neither a duration"),
    (["run", GSM8K, "--service-account=me"], "--service-account=me is not an email address"),
])
def test_refusals_are_one_line(call, capfd, arguments, said):
    code = call("tpu_vm", *arguments, "--dry-run")
    error = capfd.readouterr().err
    assert code == 2 and said in error and len(error.splitlines()) == 1


@pytest.fixture
def unfit(call, scripts, monkeypatch):
    """Makes the clone one whose commit cannot run."""
    monkeypatch.setattr(scripts("clone"), "_git", lambda *words: ["git", *words])
    monkeypatch.setattr(scripts("clone"), "problem", lambda shell, plan: "it is not committed")
    monkeypatch.setattr(scripts("clone"), "changes", lambda shell: "configs/a.py")


@pytest.mark.parametrize("command", ["run", "create"])
def test_a_clone_that_cannot_run_is_refused_before_machines_are_asked_for(
    unfit, play, cloud, capfd, command
):
    assert play(command, GSM8K, describe=[(1, "PERMISSION_DENIED")]) == (2, [])
    assert capfd.readouterr().err == "it is not committed\n"
    assert play(command, GSM8K, "--dry-run") == (0, [])
    out = capfd.readouterr().out
    assert "# refused as it stands: it is not committed" in out
    assert "# what is not committed here is not copied: configs/a.py" in out


@pytest.mark.all
def test_with_another_clone_this_one_does_not_matter(unfit, play):
    code, verbs = play("create", GSM8K, "--git=https://example.org/x.git", describe=[(0, "ACTIVE")])
    assert code == 0 and verbs == ["describe", "unpack", "setup"]
