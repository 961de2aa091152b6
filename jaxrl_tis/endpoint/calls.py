"""Calls of a session that wait for their answers, between the endpoint and the run's sampler."""

import dataclasses
import threading
from collections.abc import Callable

from jaxrl_tis.endpoint.request import Choice, Completion
from jaxrl_tis.engine.records import SamplingParams, Trajectory
from jaxrl_tis.engine.worker import Listener


class Ended(Exception):
    """The session takes no more calls."""

    def __init__(self, why: str):
        super().__init__(f"the session takes no more calls: {why}")


class Call:
    """A call that waits for its answer. All methods can be called from any thread.

    Attributes:
      choice: what to sample: the ids of the prompt, and the sampling parameters.
      digest: of route and body.
      is_gone: the client has disconnected. A retry may still ask for the answer.
      result: the answer, or the error; None before.
    """

    def __init__(self, choice: Choice, digest: bytes):
        self.choice, self.digest, self.is_gone = choice, digest, False
        self.result: Trajectory | Exception | None = None
        self._lock = threading.Lock()
        self._listeners: dict[str, Listener] = {}

    @property
    def is_delivered(self) -> bool:
        """Whether a client got the answer."""
        return isinstance(self.result, Trajectory) and not self.is_gone

    def listen(self, id: str, listener: Listener) -> None:
        """Sends the result to a listener, under the id of its choice."""
        with self._lock:
            self.is_gone, result = False, self.result
            if result is None:
                self._listeners[id] = listener
        if result is not None:
            listener(id, result)

    def leave(self, id: str) -> None:
        """Removes a listener that waits for no answer any more. It gets an error."""
        with self._lock:
            listener = self._listeners.pop(id, None)
            if listener is not None:
                self.is_gone = not self._listeners
        if listener is not None:
            listener(id, RuntimeError("the answer did not come in time"))

    def answer(self, trajectory: Trajectory) -> None:
        """Ends the call with one turn: a record whose prompt is that of the call."""
        self._end(trajectory)

    def fail(self, error: Exception) -> None:
        """Ends the call: a ValueError is the client's fault (400)."""
        self._end(error)

    def _end(self, result: Trajectory | Exception) -> None:
        with self._lock:
            if self.result is not None:
                return
            self.result, listeners = result, self._listeners
            self._listeners = {}
        for id, listener in listeners.items():
            listener(id, result)


class Session:
    """The calls of one session.

    Args:
      sampling: of the run; max_tokens bounds one turn.
      take: called in the endpoint's thread with each call that is no retry.

    Attributes:
      calls: in the order of their arrival.
      retries: number of calls that repeated one of these.
      is_overlong: a call was refused because its prompt left no room.
      end: why the session takes no more calls; "" while it does.
    """

    def __init__(self, sampling: SamplingParams, take: Callable[[Call], None]):
        self.sampling, self._take = sampling, take
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self.retries, self.is_overlong, self.end = 0, False, ""

    def imposed(self, completion: Completion) -> Completion:
        """Returns a completion with the run's sampling parameters. Stops are added, and max_tokens
        can only become smaller."""
        base, asked = self.sampling, completion.choices[0].sampling
        sampling = dataclasses.replace(
            base, stop_ids=tuple(dict.fromkeys([*base.stop_ids, *asked.stop_ids])),
            stop_strings=asked.stop_strings, max_tokens=min(base.max_tokens, asked.max_tokens),
        )
        [choice] = completion.choices
        choice = dataclasses.replace(choice, sampling=sampling)
        return dataclasses.replace(completion, choices=[choice])

    def enter(self, choice: Choice, digest: bytes, is_retry: bool) -> Call:
        """Returns the new call, or the call that a retry repeats. Raises Ended after `close`."""
        is_failed = lambda call: isinstance(call.result, Exception)
        with self._lock:
            if self.end:
                raise Ended(self.end)
            known = [c for c in self.calls if c.digest == digest and not is_failed(c)]
            if is_retry and known:
                self.retries += 1
                # Of equal calls in parallel, the one whose client has gone.
                return next((call for call in known if call.is_gone), known[-1])
            call, take = Call(choice, digest), self._take
            self.calls.append(call)
        take(call)  # without the lock: the owner may hold its own one and close the session
        return call

    def close(self, why: str) -> None:
        """Ends the session and its open calls, and forgets its owner."""
        with self._lock:
            self.end, calls = why, self.calls
            self.calls, self._take = [], lambda call: None
        for call in calls:
            call.fail(Ended(why))
