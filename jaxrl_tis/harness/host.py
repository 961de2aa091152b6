"""Runs sessions of a harness, many at once, in the process that process.py starts.

Messages are JSON lines. In: {"harness": name} once, then {"start": [key, fields of a Session]} and
{"cancel": key}, {"ping": null}. Out: {"error": text} once, "" if the harness can be used, then one
reply for each key that was not cancelled, and PONG for each ping that the event loop takes.

This file imports the standard library only, because the process may be another Python.
"""

import asyncio
import functools
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jaxrl_tis.data import confined, signatures
from jaxrl_tis.data.signatures import ERROR_CHARACTERS, Unusable
from jaxrl_tis.harness import verifiers
from jaxrl_tis.harness.protocol import Result, Session

PONG = {"pong": True}
VERIFIERS = "verifiers"  # verifiers:TASKSET

Reply = dict[str, Any]


def load(name: str) -> Callable[[Session], Any]:
    """Returns the harness of "module:function" or "verifiers:TASKSET".

    Raises:
        ImportError, AttributeError: it cannot be imported.
        TypeError: it is no function of one argument.
    """
    module, _, rest = name.partition(":")
    if module == VERIFIERS:
        return verifiers.Taskset(rest)
    harness = confined.function(name)
    if not callable(harness):
        raise TypeError(f"{name} is a {type(harness).__name__}, not a function of a session")
    try:
        inspect.signature(harness).bind(None)
    except TypeError as error:
        raise TypeError(f"{name} is no function of one argument, the session: {error}") from error
    return harness


def reading(result: Any) -> Reply:
    """Returns what a harness returned as JSON values.

    Raises:
        Unusable: it is no number and no Result, a number in it is not finite in float32, or a metric
            has the name of the reward.
    """
    result = result if isinstance(result, Result) else Result(result)
    return {
        "reward": None if result.reward is None else _number(result.reward, "the reward"),
        "metrics": signatures.metrics(result.metrics, "the harness returned"),
        "calls": None if result.calls is None else [_call(*call) for call in result.calls],
    }


def _number(value: Any, what: str) -> float:
    number = signatures.finite(value)
    if number is None:
        raise Unusable(f"the harness returned {what} {value!r:.80}, not a finite number of float32")
    return number


def _call(token_ids: Any, logprobs: Any = None) -> tuple[list[int], list[float] | None]:
    ids = [int(token) for token in token_ids]
    return ids, None if logprobs is None else [_number(x, "the log-prob") for x in logprobs]


class Host:
    """The sessions of one process. Asynchronous functions share the event loop, others have a
    thread for each session."""

    def __init__(self, harness: Callable[[Session], Any], send: Callable[[Reply], None]):
        self._harness, self._send = harness, send
        self._tasks: dict[str, asyncio.Task] = {}
        self._errors = signatures.Errors()

    def start(self, item: tuple[str, Mapping[str, Any]]) -> None:
        key, fields = item
        self._tasks[key] = asyncio.ensure_future(self._play(key, Session(**fields)))

    def cancel(self, key: str) -> None:
        """Ends a session without a reply. A thread goes on until its next call is refused."""
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    def ping(self, _: None) -> None:
        self._send(PONG)

    async def _play(self, key: str, session: Session) -> None:
        try:
            reply = reading(await self._called(session)) | {"error": ""}
        except BaseException as error:
            if key not in self._tasks:
                return
            reply = {"error": self._errors.text(error)}
        if self._tasks.pop(key, None) is not None:  # else it was cancelled
            self._send({"key": key} | reply)

    def _called(self, session: Session) -> Awaitable[Any]:
        harness: Any = self._harness
        if any(map(inspect.iscoroutinefunction, (harness, harness.__call__))):
            return harness(session)
        return asyncio.wrap_future(_in_thread(functools.partial(harness, session)))


def _in_thread(function: Callable[[], Any]) -> Future:
    """Calls a function in a thread of its own. The thread does not hold up the process's end."""
    future = Future()

    def run():
        try:
            result = function()
        except StopIteration as error:  # which no asyncio.Future can hold
            wrapped = RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__)
            outcome = functools.partial(future.set_exception, wrapped)
        except BaseException as error:
            outcome = functools.partial(future.set_exception, error)
        else:
            outcome = functools.partial(future.set_result, result)
        if not future.cancelled():
            outcome()

    threading.Thread(target=run, daemon=True).start()
    return future


def serve() -> None:
    """Main loop of the process."""
    messages, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    # The harness must not read our messages or write among them.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    out: Any = sys.stdout
    out.reconfigure(line_buffering=True)  # a pipe, whose lines are shown as they come
    lock = threading.Lock()

    def send(reply: Reply) -> None:
        line = json.dumps(reply).encode() + b"\n"
        with lock:
            while line:
                line = line[replies.write(line):]

    try:
        host = Host(load(json.loads(messages.readline())["harness"]), send)
    except BaseException as error:
        text = confined.printable(f"{type(error).__name__}: {error}")
        send({"error": text[:ERROR_CHARACTERS]})
        return
    send({"error": ""})
    asyncio.run(_run(host, messages))


async def _run(host: Host, messages: Any) -> None:
    loop = asyncio.get_running_loop()
    actions: dict[str, Callable] = {"start": host.start, "cancel": host.cancel, "ping": host.ping}

    def read():
        for line in messages:
            [(action, argument)] = json.loads(line).items()
            loop.call_soon_threadsafe(actions[action], argument)
        # The run is gone. The first process of a namespace is safe from its own signal.
        try:
            os.killpg(0, signal.SIGKILL)
        finally:
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()
