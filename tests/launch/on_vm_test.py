"""launch/on_vm.sh in a folder with an environment whose Python only writes down what it runs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
[EXTRAS] = re.findall(r"^extras=(\S+)$", (ROOT / "launch/on_vm.sh").read_text(), re.MULTILINE)
SHELLCHECK = str(pathlib.Path(sys.executable).with_name("shellcheck"))
STUB = """#!/usr/bin/env bash
case "$*" in
  *libtpu_flags*) echo "--flag_of=$3" ;;
  *"-m jaxrl_tis.main"*supervise*) exec {python} "$@" ;;
  *supervise.py*) exec {python} "$@" ;;
  *jaxrl_tis.main*)
    printf '%s\\n' "$LIBTPU_INIT_ARGS" "$HF_TOKEN" "$@" >called
    echo "step 1"
    sleep "$(cat seconds)"
    exit "$(cat code)" ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def host(tmp_path):
    """Calls on_vm.sh there."""
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copytree(ROOT / "launch", clone / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "setup.py").write_text("")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = clone / f".venv-{version}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)
    stamp = subprocess.run(["cksum", "setup.py"], cwd=clone, capture_output=True, text=True).stdout
    (clone / f".venv-{version}" / f".installed-{EXTRAS}").write_text(stamp)
    names = tmp_path / "bin"
    names.mkdir()
    (names / "python3.13").symlink_to(sys.executable)
    (python.parent / "ray").write_text('#!/usr/bin/env bash\nsleep 1\necho "ray $*" >>calls\n')
    (clone / "launch" / "on_ray.sh").write_text(
        'echo "$RAY_ADDRESS $LIBTPU_INIT_ARGS $1" >>calls\nshift\n'
        '[ $# -gt 0 ] || set -- sleep 60\nexec "$@"\n')
    for name in (python.parent / "ray", clone / "launch" / "on_ray.sh"):
        name.chmod(0o755)
    (clone / "seconds").write_text("0")
    (clone / "code").write_text("0")
    (tmp_path / ".jaxrl_tis_env").write_text("HF_TOKEN='hf a'\n")
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{names}:{os.environ['PATH']}"}
    run = lambda *words: subprocess.run(
        ["bash", "launch/on_vm.sh", *words], cwd=clone, env=environment, capture_output=True,
        text=True, timeout=60,
    )
    yield clone, run
    run("stop")


def wait_for(path):
    for _ in range(200):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(path)


@pytest.mark.all
def test_setup_uses_the_environment_that_is_there(host):
    clone, run = host
    done = run("setup")
    assert done.returncode == 0 and "using .venv-" in done.stdout


@pytest.mark.all
@pytest.mark.parametrize("code", [0, 1, 2])
def test_start_and_follow(host, code):
    clone, run = host
    (clone / "code").write_text(f"{code}")
    started = run("start", "v5e", "--config=a.py", "--workdir=gs://b/c d")
    assert started.returncode == 0, started.stderr
    followed = run("follow")
    assert followed.returncode == code and "step 1" in followed.stdout
    assert (clone / "called").read_text().splitlines() == [
        "--flag_of=v5e", "hf a", "-m", "jaxrl_tis.main", "--config=a.py", "--workdir=gs://b/c d"]
    assert f'"code": {code}' in run("status").stdout
    assert "hf a" not in (clone / "run.log").read_text()


@pytest.mark.all
def test_a_run_that_goes_on_is_not_started_twice(host):
    clone, run = host
    (clone / "seconds").write_text("30")
    run("start", "v5e", "--config=a.py")
    wait_for(clone / "called")
    assert run("status").stdout.startswith("running: ")
    assert "already running" in run("start", "v5e", "--config=b.py").stdout
    assert json.loads((clone / "run.json").read_text())["attempt"] == 1
    assert "was asked to save and to end" in run("stop").stdout
    assert run("follow").returncode == 143  # its own exit: SIGTERM went to the run
    assert run("status").stdout.startswith("not running")


@pytest.mark.all
def test_status_says_what_the_run_was_started_with(host, scripts):
    clone, run = host
    read = lambda: scripts("tpu_vm").Status.parse(run("status").stdout)
    assert (read().is_running, read().code, read().arguments) == (False, None, None)
    arguments = ["--config=a.py:b", "--workdir=gs://b/c d", "--config.x='y' \"$HOME\" (1, 2)", "a\nb", "é"]
    (clone / "code").write_text("2")
    run("start", "v5e", *arguments)
    run("follow")
    assert (read().is_running, read().code, read().arguments) == (False, 2, arguments)
    assert len(run("status").stdout.splitlines()) == 1


@pytest.mark.all
def test_with_an_address_of_ray_the_run_is_a_member_until_its_end(host, tmp_path):
    clone, run = host
    with (tmp_path / ".jaxrl_tis_env").open("a") as file:
        file.write("RAY_ADDRESS=10.0.0.5:6379\n")
    (clone / "code").write_text("2")
    run("start", "v5e", "--config=a.py", "b c")
    assert run("follow").returncode == 2
    assert (clone / "called").read_text().splitlines()[2:] == ["-m", "jaxrl_tis.main", "--config=a.py", "b c"]
    assert (clone / "calls").read_text().splitlines() == [
        "10.0.0.5:6379 --flag_of=v5e learner", "ray stop"]


@pytest.mark.all
def test_a_worker_machine_has_ray_alone_and_takes_the_newest_address(host, tmp_path):
    clone, run = host
    for port in (1, 2):
        (tmp_path / ".jaxrl_tis_env").write_text(f"RAY_ADDRESS=10.0.0.5:{port}\n")
        assert run("work", "v5p").returncode == 0
        wait_for(clone / "calls")
        for _ in range(200):
            if f":{port} " in (clone / "calls").read_text():
                break
            time.sleep(0.05)
        assert run("status").stdout.startswith("running: ")
    assert "was asked to save and to end" in run("stop").stdout
    run("follow")
    assert (clone / "calls").read_text().splitlines() == [
        "10.0.0.5:1 --flag_of=v5p worker", "ray stop", "10.0.0.5:2 --flag_of=v5p worker", "ray stop"]


@pytest.mark.all
def test_machines_of_a_run_with_engines_see_the_share(host, tmp_path):
    clone, run = host
    (tmp_path / ".jaxrl_tis_env").write_text(
        "ENGINES=a\nWEIGHTS_MOUNT=10.0.0.2:/weights\nWEIGHTS_FOLDER=/mnt/weights/x\n")
    for path, text in {
        tmp_path / "bin/mountpoint": "[ -e mounted ]", tmp_path / "bin/mount.nfs": "",
        tmp_path / "bin/sudo": 'echo "$*" >>calls; [ "$1" != mount ] || touch mounted',
        clone / "launch/vllm.sh": 'echo "vllm.sh $*" >>calls',
        clone / "launch/on_engines.sh":
            'echo "$WEIGHTS_FOLDER $1" >>calls; [ "$1" = serve ] && echo "$@" >>calls && sleep 60\n'
            'shift; exec "$@"',
    }.items():
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    run("start", "v5e", "--config=a.py")
    assert run("follow").returncode == 0
    assert (clone / "called").read_text().splitlines()[-1] == "--config=a.py"
    assert run("engine", "n-worker-0", "OWNER/NAME", "--max-loras", "2").returncode == 0
    served = "serve n-worker-0 vllm .venv-vllm OWNER/NAME --max-loras 2"
    for _ in range(200):
        if served in (calls := (clone / "calls").read_text()):
            break
        time.sleep(0.05)
    folder = "install -d -m 1777 /mnt/weights/x"
    assert calls.splitlines() == [
        "mkdir -p /mnt/weights", "mount -t nfs -o lookupcache=positive 10.0.0.2:/weights /mnt/weights",
        folder, "/mnt/weights/x learner", folder, "vllm.sh install .venv-vllm tpu",
        "/mnt/weights/x serve", served]
    assert "already running" in run("engine", "n-worker-0", "OWNER/NAME").stdout
    assert run("status").stdout.startswith("running: ")


@pytest.mark.all
def test_a_process_that_has_the_number_of_the_supervisor_is_not_it(host):
    clone, run = host
    with subprocess.Popen(["sleep", "60"]) as other:
        (clone / "run.pid").write_text(f"{other.pid}\n")
        (clone / "run.json").write_text('{"attempt": 1, "code": null, "pid": 5}\n')
        assert run("status").stdout.startswith("not running: ")
        assert "nothing runs here" in run("stop").stdout
        assert other.poll() is None
        other.kill()


def test_hosts_and_image_have_what_the_page_and_the_configs_need():
    image = (ROOT / "launch" / "gke" / "Dockerfile").read_text()
    page = (ROOT / "docs" / "launch.md").read_text()
    assert f'".[{EXTRAS}]"' in image and f"`[{EXTRAS}]`" in page
    # gs:// and hf://, metrics.sinks=wandb, configs/smollm2_135m.py, configs/dapo_*.py, rollout.driver=ray
    # and external
    assert {"tpu", "hub", "gcs", "wandb", "tasks", "math", "ray", "engines"} <= set(EXTRAS.split(","))


@pytest.mark.all
def test_another_word_shows_the_usage(host):
    done = host[1]("begin")
    assert done.returncode == 2 and "launch/on_vm.sh start CHIP ARGS" in done.stderr


@pytest.mark.all
def test_every_shell_script_passes_shellcheck():
    scripts = [*ROOT.glob("launch/**/*.sh"), *ROOT.glob("tests/*.sh"), *ROOT.glob(".ci/*")]
    assert len(scripts) > 8
    done = subprocess.run([SHELLCHECK, "--external-sources", *map(str, scripts)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
