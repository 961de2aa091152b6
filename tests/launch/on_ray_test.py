"""launch/on_ray.sh with a ray, a pgrep and a hostname that only write down their calls."""

import os
import pathlib
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
STUBS = {
    "ray": """\
echo "$RAY_AUTH_MODE $*" >>"$FOLDER/calls"
case $1 in
  health-check)
    left=$(cat "$FOLDER/unhealthy")
    echo $((left > 0 ? left - 1 : 0)) >"$FOLDER/unhealthy"
    [ "$left" -le 0 ] ;;
  start) touch "$FOLDER/raylet"; exit "$(cat "$FOLDER/code")" ;;
  stop) rm -f "$FOLDER/raylet" ;;
esac
""",
    "pgrep": '[ -e "$FOLDER/raylet" ]\n',
    "hostname": 'echo "10.0.0.5 172.17.0.1 "\n',
    "sleep": 'echo "false sleep" >>"$FOLDER/calls"\n',
}
HEAD = ("token start --head --node-ip-address=10.0.0.5 --port=6379 --include-dashboard=false "
        '--num-cpus=0 --resources={"TPU": 0}')


@pytest.fixture
def host(tmp_path):
    """(arguments, address) -> on_ray.sh there, done."""
    names = tmp_path / "bin"
    names.mkdir()
    for name, text in STUBS.items():
        (names / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (names / name).chmod(0o755)
    for name in ("unhealthy", "code"):
        (tmp_path / name).write_text("0")

    def run(*words, address="10.0.0.5:6379"):
        variables = {"FOLDER": str(tmp_path), "PATH": f"{names}:{os.environ['PATH']}",
                     "RAY_ADDRESS": address, "RAY_AUTH_TOKEN": "t"}
        return subprocess.run(["bash", str(ROOT / "launch/on_ray.sh"), *words], capture_output=True,
                              text=True, timeout=60, env=os.environ | variables)
    return tmp_path, run


def calls(folder):
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.all
def test_the_host_of_the_address_is_the_head_and_offers_nothing(host):
    folder, run = host
    done = run("learner", "bash", "-c", 'echo "$RAY_ADDRESS $RAY_AUTH_MODE $1"; exit 7', "-", "a b")
    assert (done.returncode, done.stdout) == (7, "10.0.0.5:6379 token a b\n")
    assert calls(folder) == ["token stop --force", HEAD]


@pytest.mark.all
@pytest.mark.parametrize("address", ["10.0.0.55:6379", "0.0.0.5:6379", "ahead-head-svc:6379"])
def test_other_hosts_wait_for_the_head_and_join(host, address):
    folder, run = host
    (folder / "unhealthy").write_text("2")
    assert run("learner", "true", address=address).returncode == 0
    ask = f"token health-check --address={address}"
    assert calls(folder) == [
        "token stop --force", ask, "false sleep", ask, "false sleep", ask,
        f'token start --address={address} --num-cpus=0 --resources={{"TPU": 0}}']


@pytest.mark.all
def test_a_cluster_outlives_a_restart_of_the_learner(host):
    folder, run = host
    assert run("learner", "true").returncode == run("learner", "true").returncode == 0
    assert calls(folder) == ["token stop --force", HEAD, "token health-check --address=10.0.0.5:6379"]


@pytest.mark.all
def test_a_member_of_another_cluster_joins_this_one(host):
    folder, run = host
    (folder / "raylet").touch()
    (folder / "unhealthy").write_text("1")
    assert run("learner", "true").returncode == 0
    assert calls(folder)[1:] == ["token stop --force", HEAD]


@pytest.mark.all
@pytest.mark.parametrize("words", [("learner", "touch", "ran"), ("worker",)])
def test_a_start_that_fails_is_tried_again(host, words):
    folder, run = host
    (folder / "code").write_text("1")
    assert run(*words).returncode == 42 and not pathlib.Path("ran").exists()


@pytest.mark.all
def test_a_worker_offers_all_and_stays_until_ray_ends(host):
    folder, run = host
    (folder / "bin" / "sleep").write_text('#!/usr/bin/env bash\necho slept >>"$FOLDER/calls"\n'
                                          'rm -f "$FOLDER/raylet"\n')
    start = time.monotonic()
    assert run("worker", address="10.0.0.9:6379").returncode == 42
    assert calls(folder) == [
        "token stop --force", "token health-check --address=10.0.0.9:6379",
        "token start --address=10.0.0.9:6379", "slept"]
    assert time.monotonic() - start < 30


@pytest.mark.all
def test_another_word_shows_the_usage(host):
    done = host[1]("lerner")
    assert done.returncode == 2 and "launch/on_ray.sh learner COMMAND" in done.stderr
