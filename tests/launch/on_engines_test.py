"""launch/on_engines.sh in a copy, with engines that write down how they are called."""

import http.server
import os
import pathlib
import re
import shutil
import subprocess
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_): ...


@pytest.fixture
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def host(tmp_path, port):
    """Starts on_engines.sh in a copy; returns (the folder of weights, how to start it)."""
    clone, weights, names = tmp_path / "clone", tmp_path / "weights", tmp_path / "bin"
    shutil.copytree(ROOT / "launch", clone / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    weights.mkdir()
    names.mkdir()
    for name, text in (
        ("sudo", f'printf "%s|" "$@" >>{tmp_path}/sudo'), ("hostname", "echo 10.0.0.9 fe80::1"),
        ("getent", "echo 10.0.0.4 $2"), ("vllm", 'echo vllm "$@"; sleep 60'),
        ("python", 'echo python "$@"; sleep 60'), ("curl", 'exec /usr/bin/env -S "$CURL" "$@"'),
    ):
        (names / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (names / name).chmod(0o755)
    curl = shutil.which("curl")
    environment = os.environ | {
        "WEIGHTS_FOLDER": str(weights), "PATH": f"{names}:{os.environ['PATH']}", "CURL": curl,
        "ENGINE_PORT": str(port),
    }

    def start(*words, **variables):
        return subprocess.Popen(["bash", "launch/on_engines.sh", *words], cwd=clone, text=True,
                                env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    yield weights, start
    start("stop").communicate(timeout=30)


@pytest.mark.all
def test_a_learner_waits_for_every_engine(host, tmp_path):
    weights, start = host
    (weights / ".engine-127.0.0.1").write_text("127.0.0.1\n")
    learner = start("learner", "echo", "learner runs", ENGINES="127.0.0.1,localhost")
    time.sleep(1.0)
    assert learner.poll() is None
    (weights / ".engine-localhost").write_text("127.0.0.1\n")
    said = learner.stdout.readline() + learner.stdout.readline() + learner.stdout.readline()
    assert learner.wait(30) == 0
    assert said.count(f"is healthy, and sees {weights}") == 2 and said.endswith("\nlearner runs\n")
    # The name of a machine is told to this host.
    assert (tmp_path / "sudo").read_text() == "sed|-i|-e|/ localhost$/d|-e|$a 127.0.0.1 localhost|/etc/hosts|"


@pytest.mark.all
@pytest.mark.parametrize("is_seen, said", [(True, "/health does not answer; see the log"), (False, "there is no ")])
def test_a_learner_that_waits_in_vain_says_why(host, is_seen, said):
    weights, start = host
    if is_seen:
        (weights / ".engine-127.0.0.1").write_text("127.0.0.1\n")
    learner = start("learner", "echo", ENGINES="127.0.0.1", PATIENCE="0", ENGINE_PORT="9")
    out, error = learner.communicate(timeout=30)
    assert learner.returncode == 42 and said in error and out == ""


@pytest.mark.all
@pytest.mark.parametrize("kind, said", [
    ("vllm", "vllm serve OWNER/NAME --host 127.0.0.1 --port {port} --enable-scale-out --logprobs-mode "
     "processed_logprobs --max-logprobs -1 --host 0.0.0.0 --dtype bfloat16"),
    ("sglang", "python -m sglang.launch_server --model-path OWNER/NAME --host 0.0.0.0 --port {port} "
     "--dtype bfloat16"),
])
def test_an_engine_is_started_once_and_stopped(host, tmp_path, port, kind, said):
    weights, start = host
    words = ("10.0.0.7", kind, str(tmp_path), "OWNER/NAME", "--dtype", "bfloat16")
    log = tmp_path / "clone/engine.log"
    assert "started; its log is" in start("start", *words).communicate(timeout=30)[0]
    for _ in range(200):
        if "0.0.0.0" in log.read_text():
            break
        time.sleep(0.05)
    assert re.sub(r" --seed \d+", "", log.read_text()) == said.format(port=port) + "\n"
    assert (weights / ".engine-10.0.0.7").read_text() == "10.0.0.7\n"
    assert start("status").communicate(timeout=30)[0].startswith("running: process ")
    assert "already running" in start("start", *words).communicate(timeout=30)[0]
    start("stop").communicate(timeout=30)
    for _ in range(200):
        if start("status").communicate(timeout=30)[0].startswith("not running"):
            break
        time.sleep(0.05)
    else:
        raise TimeoutError("the engine is not stopped")


@pytest.mark.all
def test_refusals_are_one_line(host, tmp_path):
    weights, start = host
    for words, variables, said in [
        (("serve", "a", "tgi", "/e", "M"), {}, "the kind of engine tgi is unknown; give vllm or sglang"),
        (("serve", "a", "vllm", "/e", "M"), {"WEIGHTS_FOLDER": "/proc/none"}, "/proc/none cannot be written"),
    ]:
        error = start(*words, **variables).communicate(timeout=30)[1]
        assert error.splitlines()[-1].startswith(said)
    assert (weights / ".engine-a").read_text() == "10.0.0.9\n"
