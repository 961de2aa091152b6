"""Plays many episodes at once: the side of the run, whose processes are host.py.

The state of an environment is never saved. A call has all answers of its episode so far. A process
that knows the episode takes one step. Another process makes the environment anew and repeats the
answers; digests show whether the observations are the same.
"""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_tis.data import confined
from jaxrl_tis.environments.protocol import Messages, Step


Key = tuple[int, str]  # number of a pool's user, id of an episode


@dataclass(frozen=True)
class Call:
    """The next step of an episode.

    Attributes:
        id: of the episode.
        example: of the task.
        seed: of the environment.
        answers: all answers so far; without any the reply has the prompt.
        digests: of the prompt and the observations so far, in order, from the replies; "" and
            missing ones are unknown, and not compared.
        cuts: whether each answer was cut at a limit of tokens; missing ones are whole.
        is_last: nobody reads the observation that follows the last answer; the reply has "".
    """

    id: str
    example: Mapping[str, Any]
    seed: int
    answers: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    cuts: tuple[bool, ...] = ()
    is_last: bool = False

    def step(self, number: int) -> tuple[Any, ...]:
        """Returns the message to the process for answer `number`, from 0, without its beginning."""
        is_cut = number < len(self.cuts) and self.cuts[number]
        is_last = self.is_last and number == len(self.answers) - 1
        return self.answers[number], is_cut, is_last


@dataclass(frozen=True)
class Reply:
    """The result of a Call.

    Attributes:
        id: of the episode.
        answers: number of answers in the call.
        step: of the environment; without answers its observation is the prompt. None for a fault.
        digest: of the step, see `digest`.
        fault: "" for none, "errors" or "timeouts".
        error: the text of the fault.
        observations: the prompt and the observations of all answers so far; () for a fault.
    """

    id: str
    answers: int
    step: Step | None
    digest: str
    fault: str = ""
    error: str = ""
    observations: tuple[str | Messages, ...] = ()


def digest(step: Step) -> str:
    """Returns a digest of a step's observation and its end."""
    text = json.dumps([step.observation, step.is_done], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Pool:
    """Plays episodes in `workers` confined processes; an episode keeps to its process.

    A call that hangs or ends its process costs its own episode alone. The other episodes of that
    process are repeated in a new one. A call whose process ended is tried again once, because the
    process may have been killed for another reason.

    Args:
        environment: "module:Class" importable along this process's sys.path.
        params: keyword arguments of the class; JSON values.
        workers: number of processes, each with a thread here.
        timeout: seconds of one call of the environment.
        network: whether environments may use the network.

    Raises:
        ValueError: the class is missing, cannot be loaded, or does not accept `params`.
    """

    def __init__(
        self, *, environment: str, params: Mapping[str, Any] = {}, workers: int, timeout: float,
        network: bool = False,
    ):
        if not all(environment.partition(":")):
            raise ValueError(f"the environment {environment!r} is not of the form 'module:Class'")
        what = f"the environment {environment!r}"
        setup = {"environment": environment, "params": dict(params)}
        make = lambda _: confined.Confined(
            "jaxrl_tis.environments.host:make", setup, what=what, timeout=timeout, network=network,
        )
        confined_ones = [make(0)]
        with concurrent.futures.ThreadPoolExecutor(workers) as starts:
            confined_ones += starts.map(make, range(1, workers))
        self._change = threading.Condition()
        self._tickets = itertools.count()
        self._open: dict[Key, int] = {}  # tickets of calls without a returned reply, by episode
        self._replies: dict[Key, Reply] = {}
        self._workers = [_Worker(x, what, self._is_open, self._arrive) for x in confined_ones]
        self._worker_of: dict[Key, _Worker] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(self, call: Call, user: int = 0) -> None:
        """Starts a call and returns at once. An episode has at most one call at a time. Users have
        episodes of their own, also of the same id."""
        key = user, call.id
        with self._change:
            if key in self._open:
                raise ValueError(f"the episode {call.id} has a call without a reply")
            if key not in self._worker_of:
                worker = min(self._workers, key=lambda worker: worker.episodes)
                worker.episodes += 1
                self._worker_of[key] = worker
            self._open[key] = next(self._tickets)
            self._worker_of[key].items.put((self._open[key], key, call))

    def ready(self, wait: float = 0.0, user: int = 0) -> list[Reply]:
        """Returns all replies to a user that have arrived. Waits up to `wait` seconds for the first one;
        without calls it returns at once."""
        own = lambda keys: [key for key in keys if key[0] == user]
        with self._change:
            self._change.wait_for(lambda: own(self._replies) or not own(self._open), wait)
            keys = own(self._replies)
            for key in keys:
                del self._open[key]
            return [self._replies.pop(key) for key in keys]

    def forget(self, ids: Iterable[str], user: int = 0) -> None:
        """Closes episodes. A call of theirs gets no reply; an id can be used again at once."""
        with self._change:
            for key in [(user, id) for id in ids]:
                self._open.pop(key, None)
                self._replies.pop(key, None)
                worker = self._worker_of.pop(key, None)
                if worker is not None:
                    worker.episodes -= 1
                    worker.items.put(key)
            self._change.notify_all()

    def close(self) -> None:
        """Closes all episodes and ends the processes. Calls get no reply; running ones are awaited up
        to their timeout."""
        with self._change:
            self._open, self._replies = {}, {}
        for worker in self._workers:
            worker.items.put(None)
        for worker in self._workers:
            worker.thread.join()

    def _is_open(self, ticket: int, key: Key) -> bool:
        return self._open.get(key) == ticket

    def _arrive(self, ticket: int, key: Key, reply: Reply) -> None:
        with self._change:
            if self._is_open(ticket, key):
                self._replies[key] = reply
                self._change.notify_all()


class SharedPool:
    """The pool of process 0, whose replies all processes of a run get at the same time: their engines
    are one program and have to see the same. All make the same calls.

    Args:
        start: makes the pool; called on process 0. An error is raised on all.
        first: calls a function on process 0 and returns its result, JSON, on all.
    """

    def __init__(self, start: Callable[[], Pool], first: Callable[[Callable[[], Any]], Any]):
        self._pool: Pool | None = None
        self._first = first

        def begin():
            self._pool = start()

        first(begin)

    def submit(self, call: Call, user: int = 0) -> None:
        """As `Pool.submit`."""
        if self._pool is not None:
            self._pool.submit(call, user)

    def ready(self, wait: float = 0.0, user: int = 0) -> list[Reply]:
        """As `Pool.ready`."""
        pool: Any = self._pool  # on the first process alone
        arrived = lambda: [dataclasses.asdict(reply) for reply in pool.ready(wait, user)]
        return [_reply(**fields) for fields in self._first(arrived)]

    def forget(self, ids: Iterable[str], user: int = 0) -> None:
        """As `Pool.forget`."""
        if self._pool is not None:
            self._pool.forget(ids, user)

    def close(self) -> None:
        """As `Pool.close`."""
        if self._pool is not None:
            self._pool.close()


class Lender:
    """Lends the one pool of a run to its users: samplers, evaluations, and the reader of prompts. It
    starts with the first user and ends with the last.

    Args:
        start: makes the pool.
    """

    def __init__(self, start: Callable[[], Pool | SharedPool]):
        self._start, self._lock = start, threading.Lock()
        self._pool: Pool | SharedPool | None = None
        self._numbers, self._count = itertools.count(), 0

    def lend(self) -> "Lent":
        """Returns the pool for one more user, who closes it after use."""
        with self._lock:
            self._pool = self._pool or self._start()
            self._count += 1
            return Lent(self._pool, next(self._numbers), self._back)

    def _back(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._pool is not None:
                self._pool.close()
                self._pool = None


class Lent:
    """A pool as one user has it, see `Lender`."""

    def __init__(self, pool: Pool | SharedPool, user: int, back: Callable[[], None]):
        self._pool, self._user, self._back = pool, user, back
        self._ids: set[str] = set()

    def submit(self, call: Call) -> None:
        """As `Pool.submit`."""
        self._ids.add(call.id)
        self._pool.submit(call, self._user)

    def ready(self, wait: float = 0.0) -> list[Reply]:
        """As `Pool.ready`."""
        return self._pool.ready(wait, self._user)

    def forget(self, ids: Iterable[str]) -> None:
        """As `Pool.forget`."""
        ids = list(ids)
        self._ids.difference_update(ids)
        self._pool.forget(ids, self._user)

    def close(self) -> None:
        """Closes the user's episodes and gives the pool back, once."""
        self.forget(self._ids.copy())
        back, self._back = self._back, lambda: None
        back()


def _reply(step: Mapping[str, Any] | None, observations: Iterable, **fields: Any) -> Reply:
    """Makes a reply from its fields as JSON."""
    last = None if step is None else Step(**step)
    return Reply(step=last, observations=tuple(observations), **fields)


class _Fault(Exception):
    """A call without a step: "errors" or "timeouts", and the error's text."""


class _Ended(_Fault):
    """The process of a call ended."""


class _Worker:
    """A process and its thread. `items` are (ticket, Key, Call), keys to forget, and None for the
    end."""

    def __init__(
        self, process: confined.Confined, what: str, is_open: Callable[[int, Key], bool],
        arrive: Callable[[int, Key, Reply], None],
    ):
        self.episodes = 0
        self.items = queue.SimpleQueue()
        self._process, self._what, self._is_open, self._arrive = process, what, is_open, arrive
        # Episodes in the process: example, seed and answers, and what the environment has said.
        self._played: dict[Key, tuple[tuple, tuple[str | Messages, ...]]] = {}
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.items.get()) is not None:
            if len(item) == 2:
                self._forget(item)
            elif self._is_open(*item[:2]):
                ticket, key, call = item
                self._arrive(ticket, key, self._reply(key, call))
        for key in list(self._played):
            self._forget(key)
        self._process.close()

    def _reply(self, key: Key, call: Call) -> Reply:
        try:
            try:
                step, said = self._play(key, call)
            except _Ended:
                step, said = self._play(key, call)
        except _Fault as fault:
            return Reply(call.id, len(call.answers), None, "", *fault.args)
        except Exception as error:  # an example that is no JSON
            text = f"{type(error).__name__}: {error}"
            return Reply(call.id, len(call.answers), None, "", "errors", text)
        return Reply(call.id, len(call.answers), step, digest(step), observations=said)

    def _play(self, key: Key, call: Call) -> tuple[Step, tuple[str | Messages, ...]]:
        """Takes the last answer of an episode that is here; else makes it anew and repeats all.
        Returns the last step and all observations."""
        count = len(call.answers)
        before = call.example, call.seed, call.answers[:-1]
        known, said = self._played.pop(key, (None, ()))
        number = count if known == before else 0  # of the next step; the prompt is step 0
        if number == 0:
            said = ()
            step = self._ask("reset", key, dict(call.example), int(call.seed))
        else:
            step = self._ask("step", key, *call.step(count - 1))
        while number < count:
            self._compare(key, call, number, step)
            said += (step.observation,)
            step = self._ask("step", key, *call.step(number))
            number += 1
        said += (step.observation,)
        self._played[key] = (call.example, call.seed, call.answers), said
        return step, said

    def _compare(self, key: Key, call: Call, number: int, step: Step) -> None:
        """Raises _Fault if a repeated step is another one than before."""
        known = call.digests[number] if number < len(call.digests) else ""
        if step.is_done or known and known != digest(step):
            self._ask("forget", key)
            raise _Fault(
                "errors", f"{self._what} is not repeatable: step {number} of the episode {call.id} "
                "differs for equal example, seed and answers (step 0 is the prompt)"
            )

    def _ask(self, what: str, key: Key, *message: Any) -> Any:
        [result] = self._process.calls([[what, "{}/{}".format(*key), *message]])
        if result["fault"]:
            self._played.clear()
            kind = _Ended if result["fault"] == "errors" else _Fault
            raise kind(result["fault"], result["error"])
        if result["value"]["error"]:
            raise _Fault("errors", result["value"]["error"])
        step = result["value"]["step"]
        return None if step is None else Step(**step)

    def _forget(self, key: Key) -> None:
        if self._played.pop(key, None) is None:
            return
        try:
            self._ask("forget", key)
        except _Fault as fault:
            print(f"{self._what} failed to close: {fault.args[1]}", file=sys.stderr, flush=True)
