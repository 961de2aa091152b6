"""Connects a run to Ray, and checks that the cluster has what the run asks for."""

import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import ml_collections

from jaxrl_tis.runtime import addresses, processes

CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.2
RECORDS = 64 << 20  # bytes of an object store for requests and records
# A local Ray listens on loopback alone. By default it listens on every address of the machine.
# Its workers sample at the priority of the learner. By default they are at nice 15.
LOOPBACK, NICENESS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_worker_niceness"
# Seconds without the head of a cluster until Ray ends this process with code 1, by default 60. The
# run notices a lost head by itself, after an update that may take longer.
ALONE, ALONE_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s", "86400"


def connect(rollout: ml_collections.ConfigDict) -> str | None:
    """Connects this process to the cluster of rollout.ray_address or RAY_ADDRESS, or to a local Ray
    that it starts. Returns its address, "local" for the latter; None if the process was connected
    before.

    Raises:
      ValueError: Ray is not installed, or the cluster cannot be used.
    """
    given = rollout.ray_address or os.environ.get("RAY_ADDRESS", "local")
    own, address = processes.first(lambda: (_connect(given, given == "local"), _gcs_address()))
    problem = ""
    if not processes.is_first():
        try:
            own = _connect(address, given == "local")
        except ValueError as error:
            problem = f"process {processes.index()}: {error}"
    if problems := [text for text in processes.exchange(problem) if text]:
        raise ValueError(problems[0])
    return own


def _gcs_address() -> str:
    import ray

    return ray.get_runtime_context().gcs_address


def _connect(address: str, is_local: bool) -> str | None:
    own = {LOOPBACK: "0", NICENESS: "0"} if is_local else {ALONE: ALONE_SECONDS}
    if is_local and address != "local":  # that process 0 has started, with a token
        own["RAY_AUTH_MODE"] = "token"
    for name, value in own.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "rollout.driver = 'ray' needs Ray; install it: pip install 'jaxrl_tis[ray]'"
        ) from error
    if ray.is_initialized():
        return None
    if address not in ("local", "auto") and (why := unreachable({"Ray": address})):
        raise ValueError(
            f"{why}; start it there (ray start --head), or leave rollout.ray_address and RAY_ADDRESS "
            "empty for a local Ray"
        )
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    before = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings(action="ignore"):  # of JAX, that a process with threads forks
            ray.init(
                address, namespace="jaxrl_tis", logging_level=logging.ERROR, log_to_driver=False,
                **options,
            )
    except Exception as error:  # Ray has no common class for what can go wrong here
        why = " ".join(f"{error}".split()) or type(error).__name__
        raise ValueError(
            f"cannot use Ray at {address}: {why[:400]}; this process has Ray {ray.__version__}, and "
            "the cluster needs the same versions of Ray and Python, the same token, and a node on "
            "this machine"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # which Ray has replaced
    return address


def services(node: str) -> dict[str, str]:
    """Returns where Ray listens that this process depends on, by name: the head, and its node."""
    import ray

    [found] = [n for n in ray.nodes() if n["NodeID"] == node]
    return {
        "the head of Ray": ray.get_runtime_context().gcs_address,
        "Ray on this machine": f"{found['NodeManagerAddress']}:{found['NodeManagerPort']}",
    }


def unreachable(named: dict[str, str]) -> str:
    """Returns a sentence if nobody listens at one of these addresses, else ""."""
    for name, address in named.items():
        try:
            socket.create_connection(addresses.parse(address), CONNECT_SECONDS).close()
        except OSError as error:
            return f"{name} at {address} does not answer: {error}"
    return ""


def wanted(rollout: ml_collections.ConfigDict) -> dict[str, float]:
    """Returns the resources of one worker, by Ray's names."""
    named = {
        "CPU": rollout.cpus_per_worker, "GPU": rollout.gpus_per_worker,
        "TPU": rollout.tpus_per_worker,
    }
    return {name: count for name, count in named.items() if count}


def lacking(rollout: ml_collections.ConfigDict, count: int) -> str:
    """Returns a sentence if the nodes do not have the resources of this many workers, else ""."""
    import ray

    each, nodes = wanted(rollout), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = lambda node: int(min((node.get(n, 0) / x for n, x in each.items()), default=count))
    if sum(map(fits, nodes)) >= count:
        return ""
    shown = lambda values: ", ".join(f"{name} {value:g}" for name, value in values.items())
    have = {name: sum(node.get(name, 0) for node in nodes) for name in each}
    return (
        f"rollout.workers = {rollout.workers} need {shown(each)} each, and Ray has {shown(have)} on "
        f"{len(nodes)} nodes, enough for {sum(map(fits, nodes))}; lower rollout.workers or "
        f"rollout.*_per_worker, or add nodes"
    )


def awaited(rollout: ml_collections.ConfigDict, address: str | None) -> Iterator[None]:
    """Waits until the nodes have the resources of one worker; yields from time to time until then.

    Raises:
      ValueError: no such node came within rollout.start_timeout seconds, or none can come.
    """
    since = time.monotonic()
    if not (why := lacking(rollout, rollout.workers)):
        return
    if address == "local":  # no node will come
        raise ValueError(why)
    processes.report(f"{why}; the run begins with one worker, and takes others as nodes come")
    while why := lacking(rollout, 1):
        if time.monotonic() - since > rollout.start_timeout:
            raise ValueError(
                f"{why}; no node came within rollout.start_timeout = {rollout.start_timeout:g} s"
            )
        yield
        time.sleep(RETRY_SECONDS)


def small_store(node: str, stored_bytes: int) -> str:
    """Returns a sentence if the object store of a node cannot hold records and `stored_bytes`, those
    of two versions of the weights, else "". A node that has died has none, and is not judged."""
    import ray

    needed = stored_bytes + RECORDS
    [found] = [n for n in ray.nodes() if n["NodeID"] == node]
    size = int(found["Resources"].get("object_store_memory", 0))
    if size >= needed or not found["Alive"]:
        return ""
    return (
        f"the object store of Ray on node {node[:8]} has {size / 2**20:.0f} MiB, and two versions of "
        f"the weights and records need {needed / 2**20:.0f} MiB; start Ray yourself: ray start --head "
        f"--object-store-memory={needed}"
    )
