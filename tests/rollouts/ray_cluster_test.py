"""A cluster that cannot be used is refused in one sentence, before anything is sampled."""

import contextlib
import os
import signal
import socket
import sys
import time
from unittest import mock

import pytest
import ray

from jaxrl_tis.rollouts import ray_cluster
from jaxrl_tis.runtime import cli
from tests import forked, hosts, ray_nodes, tiny

MAIN = ["-m", "jaxrl_tis.main", "--config=tests/small_run.py", "--config.rollout.driver=ray",
        "--config.rollout.schedule=areal(staleness=1)"]
NODE = {"NodeID": "a" * 20, "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 7}


def rollout(**values):
    names = {f"rollout__{name}": value for name, value in values.items()}
    return tiny.config(rollout__driver="ray", **names).rollout


def refusal(**values) -> str:
    """The sentence of a refusal by `connect`."""
    with pytest.raises(ValueError) as raised:
        ray_cluster.connect(rollout(**values))
    assert cli.exit_code(raised.value) == 2 and "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (ray_cluster.LOOPBACK, ray_cluster.NICENESS, ray_cluster.ALONE, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # as it was, at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: mock.Mock(gcs_address="127.0.0.1:9"))


@pytest.fixture
def nodes(monkeypatch):
    """Gives the cluster nodes with these resources."""
    def give(*resources):
        nodes = [NODE | {"Resources": r, "NodeID": f"{i}" * 20} for i, r in enumerate(resources)]
        nodes.append(NODE | {"Resources": {"CPU": 99, "TPU": 99}, "Alive": False})
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
    return give


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs Ray; install it: pip install 'jaxrl_tis[ray]'" in refusal()


def test_an_address_where_nobody_answers(monkeypatch):
    address = f"127.0.0.1:{hosts.free_port()}"
    for values, other in (({"ray_address": address}, "127.0.0.1:1"), ({}, address)):
        monkeypatch.setenv("RAY_ADDRESS", other)  # the field comes first
        why = refusal(**values)
        assert why.startswith(f"Ray at {address} does not answer") and "ray start --head" in why


def test_an_address_that_does_not_answer_at_all(monkeypatch):
    """A listener whose queue of connections is full."""
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 0.5)
    with socket.socket() as server, contextlib.ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        start = time.monotonic()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert "does not answer: timed out" in refusal(ray_address=address)
        assert time.monotonic() - start < 5


def test_an_address_that_is_none():
    assert "give host:port" in refusal(ray_address="nonsense")


@pytest.mark.parametrize("error", [
    RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.55.0\n  Python: 3.11"),
    ConnectionError(""), PermissionError("AuthenticationError: InvalidAuthToken"),
])
def test_what_ray_raises_is_one_sentence_with_the_versions(monkeypatch, error):
    monkeypatch.setattr(ray, "init", mock.Mock(side_effect=error))
    before = signal.getsignal(signal.SIGTERM)
    why = refusal()
    assert why.startswith("cannot use Ray at local: ") and ray.__version__ in why
    assert (" ".join(str(error).split()) or type(error).__name__) in why
    assert "the same token" in why and "a node on this machine" in why
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_local_ray_is_on_loopback_alone_and_has_no_dashboard(monkeypatch):
    monkeypatch.setattr(ray, "init", mock.Mock())
    assert ray_cluster.connect(rollout()) == "local"
    assert os.environ[ray_cluster.LOOPBACK] == os.environ[ray_cluster.NICENESS] == "0"
    assert ray_cluster.ALONE not in os.environ
    assert ray.init.call_args.kwargs["include_dashboard"] is False
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert ray_cluster.connect(rollout(ray_address=address)) == address
    assert os.environ[ray_cluster.ALONE] == ray_cluster.ALONE_SECONDS
    assert "include_dashboard" not in ray.init.call_args.kwargs
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert ray_cluster.connect(rollout()) is None


def test_the_signal_that_ends_a_run_stays_its_own(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    replaced = lambda *_, **__: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(ray, "init", replaced)
    try:
        ray_cluster.connect(rollout())
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_resources_that_are_not_there(nodes):
    nodes({"CPU": 2}, {"CPU": 3})
    lacking = lambda **values: ray_cluster.lacking(rollout(**values), values["workers"])
    assert lacking(workers=5) == lacking(workers=2, cpus_per_worker=2.0) == ""
    why = lacking(workers=6)
    assert "rollout.workers = 6 need CPU 1 each, and Ray has CPU 5 on 2 nodes, enough for 5" in why
    # One CPU is left over on each node, which is no worker.
    why = lacking(workers=3, cpus_per_worker=1.6)
    assert "need CPU 1.6 each, and Ray has CPU 5 on 2 nodes, enough for 2" in why
    why = lacking(workers=1, tpus_per_worker=4.0, gpus_per_worker=0.5)
    assert "need CPU 1, GPU 0.5, TPU 4 each, and Ray has CPU 5, GPU 0, TPU 0" in why
    nodes({"CPU": 8, "TPU": 4})
    assert lacking(workers=1, tpus_per_worker=4.0) == ""
    assert "enough for 1" in lacking(workers=2, tpus_per_worker=4.0)


def test_an_object_store_that_is_too_small(nodes):
    nodes({"object_store_memory": 100 << 20}, {"object_store_memory": 300 << 20})
    why = ray_cluster.small_store("0" * 20, 200 << 20)
    assert "has 100 MiB" in why and "need 264 MiB" in why and "--object-store-memory=276824064" in why
    assert ray_cluster.small_store("1" * 20, 200 << 20) == ""
    assert ray_cluster.small_store("1" * 20, 238 << 20) != ""
    nodes({})
    assert "has 0 MiB" in ray_cluster.small_store("0" * 20, 1)


def test_where_ray_listens(nodes):
    nodes({"CPU": 1})
    named = ray_cluster.services("0" * 20)
    assert sorted(named.values()) == ["127.0.0.1:7", "127.0.0.1:9"]
    assert ray_cluster.unreachable({}) == ""


# Commands


def refused(tmp_path, *options, main=MAIN[:2], **environment) -> str:
    """What a command prints that ends with 2 before anything is sampled."""
    command = [*main, *MAIN[2:], f"--workdir={tmp_path / 'run'}", *options]
    code, text = forked.run(command, tmp_path / "log", ray_nodes.ENVIRONMENT | environment)
    assert code == 2 and "Traceback" not in text, text[-3000:]
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    return text


@pytest.mark.all
def test_a_command_with_an_address_where_nobody_answers(tmp_path):
    address = f"127.0.0.1:{hosts.free_port()}"
    assert f"Ray at {address} does not answer" in refused(tmp_path, RAY_ADDRESS=address)


@pytest.mark.all
def test_a_command_that_asks_for_more_than_this_machine_has(tmp_path):
    text = refused(tmp_path, "--config.rollout.workers=1000", RAY_ADDRESS="local")
    assert "rollout.workers = 1000 need CPU 1 each, and Ray has CPU" in text


@pytest.mark.all
def test_commands_with_a_head_that_cannot_be_used(tmp_path):
    with ray_nodes.Node(tmp_path, f"--object-store-memory={78 << 20}", "--num-cpus=1") as head:
        def why(name, *options, **environment):
            (tmp_path / name).mkdir()
            return refused(tmp_path / name, *options, RAY_ADDRESS=head.address, **environment)

        unusable = f"cannot use Ray at {head.address}: "
        for name, environment in {
            "wrong": {"RAY_AUTH_TOKEN": "u" * 64}, "disabled": {"RAY_AUTH_MODE": "disabled"},
            "missing": {"RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)},
        }.items():
            text = why(name, **environment)
            assert unusable in text and "the same token" in text
        changed = hosts.changed(tmp_path, "import ray\nray.__version__ = '2.54.0'")
        text = why("version", main=changed)
        assert unusable in text and f"Ray: {ray.__version__}" in text and "Ray: 2.54.0" in text
        text = why("store", "--config.model.embed_dim=512", "--config.model.mlp_dim=16384")
        assert "has 78 MiB, and two versions of the weights and records need" in text
