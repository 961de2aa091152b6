"""Runs an untrusted function in its own process: a reward, or the chat template of a model.

This file imports the standard library and child.py only. The process starts in tens of milliseconds
and never holds an accelerator.
"""

import contextlib
import errno
import functools
import glob
import importlib
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_tis.data.child import Child

START_SECONDS = 60.0
MEMORY = 4 << 30  # bytes
# Limits of the process and of each child process, in addition to memory.
LIMITS = {
    resource.RLIMIT_FSIZE: 1 << 30,  # bytes of a file
    resource.RLIMIT_NPROC: 512,  # more threads of its user; root has no such limit
    resource.RLIMIT_CORE: 0,
}
RESULT_BYTES = 4 << 20
# Audit events of sending through a socket, and of resolving addresses.
SENDS = ("socket.connect", "socket.sendto", "socket.sendmsg")
ASKS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")


class Confined:
    """Calls a function in its own process. A call that times out or ends the process gets a new process.

    Messages are JSON, so the function cannot run code in this process. A faulty function cannot
    stop a run. This is no sandbox against a hostile function: it can read and write the files of its
    user.

    The process is a `Child`. Without `network` Python's sockets are refused as well. LIMITS and
    `memory` bound the process. It ends when its parent dies, unless the function hangs in C code that
    holds the interpreter lock.

    Args:
        make: "module:function" importable along this process's sys.path. The process calls it with
            `argument`; it returns the function.
        argument: a JSON value.
        what: the function's name for messages.
        timeout: seconds of one call.
        memory: bytes of the process.
        network: whether the function may use the network.

    Attributes:
        traits: the attribute `traits` of the function, if it has one.

    Raises:
        ValueError: `make` failed.
    """

    def __init__(
        self, make: str, argument: Any, *, what: str, timeout: float, memory: int = MEMORY,
        network: bool = False,
    ):
        self._setup = {
            "make": make, "argument": argument, "memory": memory, "network": network,
        }
        self._what, self._timeout, self._network = what, timeout, network
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._start()

    def calls(
        self, items: Sequence[Sequence[Any]], heartbeat: Callable[[], None] = lambda: None,
        timeout: float | None = None,
    ) -> list[dict[str, Any]]:
        """Calls the function with the arguments of each item, in order; `timeout` replaces the
        default of a call.

        Returns one result per item: {"value": returned value, "error": ""}, or for a failed call
        {"value": None, "error": text, "fault": "errors" or "timeouts"}. `heartbeat` is called whenever
        results arrive.
        """
        results, timeout = [], self._timeout if timeout is None else timeout
        with self._lock:
            while len(results) < len(items):
                try:
                    child = self._child or self._start()
                    self._call_in_process(child, items[len(results) :], results, heartbeat, timeout)
                except (TimeoutError, EOFError, OSError, ValueError) as fault:
                    self.close()
                    name = "timeouts" if isinstance(fault, TimeoutError) else "errors"
                    error = f"{type(fault).__name__}: {fault}"
                    results.append({"value": None, "error": error, "fault": name})
                    heartbeat()
        return results

    def close(self) -> None:
        """Ends the process and its child processes; a later call starts a new process."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _start(self) -> Child:
        # On a large host the threads of BLAS alone would reserve more memory than the limit.
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._child = child = Child(
            "jaxrl_tis.data.confined:serve", what=self._what, network=self._network, env=threads,
            most=RESULT_BYTES,
        )
        try:
            self.traits = child.begin(self._setup, START_SECONDS)["value"]
        except ValueError:
            self._child = None
            raise
        return child

    def _call_in_process(
        self, child: Child, items: Sequence, results: list, heartbeat: Callable, timeout: float
    ) -> None:
        """Appends to `results` until all items are done; raises at the first item that stops the process."""
        child.write(items, time.monotonic() + timeout)
        end = len(results) + len(items)
        while len(results) < end:
            for result in child.lines(time.monotonic() + timeout):
                if len(results) == end:
                    raise EOFError("more results than texts")
                results.append(result | {"fault": "errors" if result["error"] else None})
            heartbeat()


def _refuse_network(event: str, arguments: tuple) -> None:
    """Audit hook: refuses Python sockets other than local files of this machine."""
    is_local = event in SENDS and arguments[0].family not in (socket.AF_INET, socket.AF_INET6)
    if event in SENDS + ASKS and not is_local:
        raise OSError(
            errno.ENETUNREACH, "no network access here; for rewards reward.network=True allows it"
        )


def function(path: str) -> Any:
    """Imports the object of "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def printable(text: str) -> str:
    """Returns the text with lone surrogates escaped, as no file can hold them."""
    return text.encode(errors="backslashreplace").decode()


def result_line(call: Callable[[], Any]) -> str:
    """Returns the result of a call as JSON: its value, or its error."""
    try:
        return json.dumps({"value": call(), "error": ""})
    except BaseException as fault:
        error = printable(f"{type(fault).__name__}: {fault}")[:1000]
        return json.dumps({"value": None, "error": error})


def serve() -> None:
    """Main loop of the process: reads the function to make, then batches of calls from stdin, and writes
    one line per result."""
    items, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    # The function must not read our messages or write among them.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    out: Any = sys.stdout
    out.reconfigure(line_buffering=True)  # a pipe, whose lines are shown as they come
    setup = json.loads(items.readline())
    batches, process = queue.SimpleQueue(), os.getpid()
    reader = threading.Thread(target=_read_batches, args=(items, batches), daemon=True)
    reader.start()
    limits = {resource.RLIMIT_AS: setup["memory"], **LIMITS}
    limits[resource.RLIMIT_NPROC] += _count_threads()
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))

    def send(call: Callable[[], Any]) -> None:
        result = result_line(call)
        if os.getpid() != process:  # a fork of the function that returned here
            os._exit(1)
        results.write(result.encode() + b"\n")

    loaded = []

    def make():
        loaded.append(function(setup["make"])(setup["argument"]))
        return getattr(loaded[0], "traits", None)

    if not setup["network"]:
        sys.addaudithook(_refuse_network)
    send(make)
    if not loaded:
        return
    while True:
        for arguments in batches.get():
            send(functools.partial(loaded[0], *arguments))


def _count_threads() -> int:
    """Returns the number of threads of this user in the process's namespace; they count towards limits."""
    count = 0
    for tasks in glob.glob("/proc/[0-9]*/task"):
        with contextlib.suppress(OSError):
            if os.stat(tasks).st_uid == os.getuid():
                count += len(os.listdir(tasks))
    return count


def _read_batches(items, batches: queue.SimpleQueue) -> None:
    for line in items:
        batches.put(json.loads(line))
    # The other side is gone, and the function may be hanging. The first process of a namespace is
    # safe from its own signal; with it end all others there.
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
