"""Runs of several processes: every host runs the same program over one mesh of all devices.

All processes hold the same scheduler, batch and rows, and make the same decisions. Data of a single
process (examples, rewards, requests to stop) is exchanged here before a decision depends on it.
"""

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxrl_tis.runtime import cli

END_SECONDS = 10  # for the others to end, too, before a process ends by itself
OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")  # errors of JAX that no other process is the cause of
_reported: set[str] = set()  # topics of `report_once`


def define_flags() -> Callable:
    """Defines the command-line flags by which processes find each other. Returns `connected` with
    the values of these flags."""
    coordinator = flags.DEFINE_string(
        "coordinator", "",
        "host:port of process 0, where hosts do not find each other as they do on TPU VMs and GKE.",
    )
    count = flags.DEFINE_integer("num_processes", 0, "Processes; with --coordinator.")
    index = flags.DEFINE_integer("process_id", -1, "From 0; with --coordinator.")
    heartbeat = flags.DEFINE_integer(
        "heartbeat_timeout", 100, "Seconds after which a silent process counts as dead."
    )
    seconds = flags.DEFINE_float(
        "connect_seconds", 300.0, "Seconds to wait for all processes at the start.", lower_bound=1.0,
    )
    return lambda: connected(
        coordinator.value, count.value, index.value, heartbeat.value, seconds.value
    )


@contextlib.contextmanager
def connected(
    coordinator: str, count: int, index: int, heartbeat_timeout: int, seconds: float = 300.0
) -> Iterator[None]:
    """Connects the processes of a run, and ends them together (see `_leave`).

    Args:
      coordinator: host:port of process 0. With "", processes on TPU machines find each other, and
        elsewhere there is a single process.
      count, index: number of processes, and index of this process; needed with a coordinator.
      heartbeat_timeout: seconds of silence after which a process counts as dead; then all end.
      seconds: longest wait for all processes; then this process ends with RESTART.

    Raises:
      ValueError: the three are not given together.
      Interrupted: the others did not come.
    """
    given = bool(coordinator), count > 0, index >= 0
    if any(given) and not (all(given) and index < count):
        raise ValueError(
            f"--coordinator={coordinator} --num_processes={count} --process_id={index}: give all "
            "three, with a process_id from 0 to num_processes - 1"
        )
    timeouts: dict[str, Any] = dict(
        heartbeat_timeout_seconds=heartbeat_timeout,
        shutdown_timeout_seconds=max(3 * heartbeat_timeout, END_SECONDS),
        initialization_timeout=math.ceil(seconds) + END_SECONDS,
    )
    try:
        if coordinator:
            _use_as_many_threads(count)
            with _in_time(seconds):
                jax.distributed.initialize(coordinator, count, index, **timeouts)
        elif cli.has_tpu() and "tpu" in (jax.config.jax_platforms or "tpu"):  # type: ignore[attr-defined]
            with _in_time(seconds):
                _find_each_other(timeouts)
    except jax.errors.JaxRuntimeError as error:
        raise cli.Interrupted(
            f"the processes did not connect: {error}; start the same command again on all hosts"
        ) from error
    try:
        yield
    except KeyboardInterrupt:
        if jax.process_count() == 1:
            raise
        print(cli.STOPPED_TEXT, file=sys.stderr, flush=True)
        os._exit(cli.STOPPED)  # the end of the interpreter would wait for all
    except Exception as error:
        if jax.process_count() == 1:
            raise
        _leave(error)


def _use_as_many_threads(count: int) -> None:
    """Gives XLA on CPU as many threads as one process with all devices would have. The last bits of
    a matrix product depend on the number of threads."""
    found = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    virtual = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    devices = max(int(found[1]) if found else 1, virtual)
    threads = max(count * devices, len(os.sched_getaffinity(0)))
    os.environ.setdefault("PJRT_NPROC", f"{threads}")


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    """Ends this process with RESTART if the block takes longer. JAX's own timeout is set longer,
    because JAX aborts the process when it is reached."""
    def give_up():
        print(
            f"not all processes came within {seconds:g} s (--connect_seconds); the same command "
            "on all hosts continues", file=sys.stderr, flush=True,
        )
        os._exit(cli.RESTART)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _find_each_other(timeouts: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):  # a TPU of a machine that belongs to no cluster
        jax.distributed.initialize(**timeouts)


def _leave(error: Exception) -> None:
    """Ends this process at once after an error; a normal exit would wait for all processes.

    The exit code is that of the error, whether all processes or only this one raised it. If the
    error only reports that another process is gone, the code is RESTART: the exit code of the other
    process has the cause.
    """
    code = cli.exit_code(error)
    if code is None:
        traceback.print_exception(error)
    else:
        print(error, file=sys.stderr)
    is_foreign = isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith(OWN)
    is_lost = is_foreign and not _all_came()
    if is_lost:
        print("another process is lost; the same command on all hosts continues", file=sys.stderr)
    elif code is not None:
        _all_came()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        time.sleep(1)  # it serves the connections of the others, which are ending too
    os._exit(cli.RESTART if is_lost else 1 if code is None else code)


def _all_came() -> bool:
    """Whether all processes reach this call within END_SECONDS."""
    try:
        meet("the end", END_SECONDS)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def meet(where: str, seconds: float) -> None:
    """Waits until all processes have made this call, in any thread. Uses no device.

    Raises:
      jax.errors.JaxRuntimeError: a process is gone, or does not arrive within these seconds.
    """
    if jax.process_count() > 1:
        client: Any = distributed.global_state.client
        client.wait_at_barrier(where, int(1000 * seconds))


def is_alone() -> bool:
    return jax.process_count() == 1


def index() -> int:
    return jax.process_index()


def is_first() -> bool:
    """Whether this is the process that writes the record, the report and the manifests."""
    return index() == 0


def report(text: str, stream: TextIO | None = None) -> None:
    """Prints a line, once for all processes; `stream` defaults to stdout."""
    if is_first():
        print(text, file=stream, flush=True)


def report_once(topic: str, text: str) -> None:
    """Prints a line to stderr, the first one of its topic in this process."""
    if topic not in _reported:
        _reported.add(topic)
        report(text, sys.stderr)


# Exchange


def exchange(value: Any) -> list[Any]:
    """Returns the JSON values that all processes passed, in order of process index."""
    if is_alone():
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    width = 1 << int(sizes.max() - 1).bit_length()  # few widths are few programs
    padded = np.zeros(max(width, 1024), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def gather(items: list) -> list:
    """Joins the lists of all processes in their order."""
    return [item for part in exchange(items) for item in part]


def share(items: list, f: Callable[[list], list]) -> list:
    """Returns f(items), one result for each item. Each process computes a part of the results."""
    count, index = jax.process_count(), jax.process_index()
    first = lambda i: i * len(items) // count
    return gather(f(items[first(index) : first(index + 1)]))


def shard() -> dict[str, int]:
    """Returns the part of the data that this process reads, as data.pipeline.Batches takes it."""
    return {"shard_index": jax.process_index(), "shard_count": jax.process_count()}


def any_of(flag: bool) -> bool:
    """Whether the value is true on any process."""
    if is_alone():
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def first(f: Callable[[], Any]) -> Any:
    """Calls f on process 0 and returns its result, which must be JSON, on all processes. An error
    of f is raised on all processes."""
    if is_alone():
        return f()
    failed, outcome = None, None
    if is_first():
        try:
            outcome = [None, "", f()]
        except Exception as error:
            failed = error
            outcome = [cli.exit_code(error) or 1, f"{error}", None]
    code, message, value = exchange(outcome)[0]
    if failed is not None:
        raise failed
    if code == 2:
        raise ValueError(message)
    if code == cli.RESTART:
        raise cli.Interrupted(message)
    if code is not None:
        raise RuntimeError(message)
    return value


def difference(values: Mapping[str, Any]) -> str | None:
    """Compares named arrays and JSON values over all processes. Returns a message with the first
    difference and each process's value, or None if all are equal."""
    if is_alone():
        return None
    everyone = exchange({name: _digest(value) for name, value in values.items()})
    for name in dict.fromkeys(name for names in everyone for name in names):
        if len({other.get(name) for other in everyone}) > 1:
            shown = exchange(f"{values[name]}"[:60] if name in values else "nothing")
            values_shown = ", ".join(f"{text} on process {i}" for i, text in enumerate(shown))
            return f"{name} is not the same everywhere: {values_shown}"
    return None


def _digest(value: Any) -> str:
    if isinstance(value, np.ndarray):
        content: Any = np.ascontiguousarray(value)
        return f"{value.dtype}{value.shape}{zlib.crc32(content):x}"
    return f"{zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode()):x}"
