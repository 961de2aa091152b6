"""Continuous batching on one thread. The way of a request:

1. `add` checks it and queues it.
2. `step` admits queued requests, in order, into free slots; requests with the same prompt (a
   group) share one prefill, also when they are admitted in different steps.
3. `step` calls `generate` once: every running slot draws up to K tokens.
4. `step` collects the tokens by request id, stamps them with the weights' version, frees the slots
   of finished requests and returns their trajectories.
"""

import collections
import dataclasses
from typing import Any

import numpy as np

from jaxrl_tis.engine.engine import EngineProtocol, Request, ResultTokens, Trajectory

FIELDS = ("tokens", "logp_behav", "logp_raw", "entropy", "logits")


@dataclasses.dataclass
class _Running:
    request: Request
    pieces: list[dict[str, np.ndarray]]


class Scheduler:
    """Feeds an engine; `step()` until `pending` is 0.

    Args:
      engine: see EngineProtocol.
      params: serving parameters.
      version: version of these parameters, stamped on every token they draw.
    """

    def __init__(self, engine: EngineProtocol, params: Any, version: int = 0):
        self._engine = engine
        self._state = engine.init_state()
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, _Running] = {}
        self._prefixes: dict[bytes, tuple[Any, int]] = {}
        self._aborted: list[Trajectory] = []
        self._live: set[str] = set()
        self.set_params(params, version)

    @property
    def pending(self) -> int:
        """Requests that have not been returned yet."""
        return len(self._waiting) + len(self._running) + len(self._aborted)

    def set_params(self, params: Any, version: int) -> None:
        """Weights of all tokens drawn from now on; running sequences keep their cache. Prefixes
        that wait for slots are dropped, so no request starts from older weights."""
        self._params, self._version = params, version
        self._prefixes.clear()

    def add(self, request: Request) -> None:
        """Queues a request; ValueError when it can never run or its id is alive."""
        prompt, sampling, engine = len(request.prompt), request.sampling, self._engine
        if prompt == 0:
            raise ValueError(f"request {request.id}: the prompt is empty; give at least one token")
        if prompt + sampling.max_tokens > engine.max_length:
            raise ValueError(
                f"request {request.id}: {prompt} prompt tokens + {sampling.max_tokens} new tokens "
                f"exceed the cache of {engine.max_length} positions; shorten the prompt or raise "
                "engine.max_length"
            )
        if len(sampling.stop_ids) > engine.max_stop_ids:
            raise ValueError(
                f"request {request.id}: {len(sampling.stop_ids)} stop ids, at most "
                f"{engine.max_stop_ids} are supported"
            )
        if request.id in self._live:
            raise ValueError(f"request {request.id}: another live request has this id")
        self._live.add(request.id)
        # Prompts are compared by their bytes.
        prompt = np.ascontiguousarray(request.prompt, np.int32)
        self._waiting.append(dataclasses.replace(request, prompt=prompt))

    def abort(self, request_id: str) -> None:
        """Ends a request; the next step returns what it has, with stop_reason "abort"."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                self._aborted.append(self._finish(_Running(request, []), "abort"))
                return
        for slot, running in self._running.items():
            if running.request.id == request_id:
                self._state = self._engine.release(self._state, [slot])
                self._aborted.append(self._finish(self._running.pop(slot), "abort"))
                return
        raise KeyError(f"no live request has the id {request_id!r}")

    def step(self) -> list[Trajectory]:
        """Admits, generates once, and returns the trajectories that ended."""
        finished, self._aborted = self._aborted, []
        self._admit()
        if self._running:
            self._state, result = self._engine.generate(self._params, self._state)
            finished += self._collect(result)
        self._live -= {trajectory.id for trajectory in finished}
        return finished

    def _admit(self) -> None:
        free = [slot for slot in range(self._engine.slots) if slot not in self._running]
        admitted = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        self._prefill([r.prompt for r in admitted])
        by_prefix: dict[int, tuple[Any, dict[int, tuple[int, Request]]]] = {}
        for slot, request in zip(free, admitted):
            prefix, row = self._prefixes[request.prompt.tobytes()]
            by_prefix.setdefault(id(prefix), (prefix, {}))[1][slot] = (row, request)
            self._running[slot] = _Running(request, [])
        for prefix, rows in by_prefix.values():
            self._state = self._engine.insert(prefix, self._state, rows)
        awaited = {r.prompt.tobytes() for r in self._waiting}
        self._prefixes = {key: p for key, p in self._prefixes.items() if key in awaited}

    def _prefill(self, prompts: list[np.ndarray]) -> None:
        buckets: dict[int, dict[bytes, np.ndarray]] = {}
        for prompt in prompts:
            if prompt.tobytes() not in self._prefixes:
                bucket = self._engine.bucket(len(prompt))
                buckets.setdefault(bucket, {})[prompt.tobytes()] = prompt
        for unique in buckets.values():
            keys = list(unique)
            for i in range(0, len(keys), self._engine.prefill_batch):
                chunk = keys[i : i + self._engine.prefill_batch]
                prefix = self._engine.prefill(self._params, [unique[key] for key in chunk])
                self._prefixes.update({key: (prefix, row) for row, key in enumerate(chunk)})

    def _collect(self, result: ResultTokens) -> list[Trajectory]:
        host = {name: np.asarray(getattr(result, name)) for name in (*FIELDS, "valid", "remaining")}
        finished = []
        for slot in list(self._running):
            running, valid = self._running[slot], host["valid"][:, slot]
            piece = {name: host[name][valid, slot] for name in FIELDS}
            piece["version"] = np.full(len(piece["tokens"]), self._version, np.int32)
            running.pieces.append(piece)
            if host["remaining"][slot] == 0:
                is_stop = piece["tokens"][-1] in running.request.sampling.stop_ids
                reason = "stop" if is_stop else "length"
                finished.append(self._finish(self._running.pop(slot), reason))
        return finished

    def _finish(self, running: _Running, stop_reason: str) -> Trajectory:
        request = running.request
        dtypes = dict(tokens=np.int32, version=np.int32)
        fields = {
            name: np.concatenate(
                [p[name] for p in running.pieces] or [np.zeros((0, 0) if name == "logits" else 0)]
            ).astype(dtypes.get(name, np.float32))
            for name in (*FIELDS, "version")
        }
        count = len(fields["tokens"])
        return Trajectory(
            id=request.id, prompt=request.prompt, mask=np.ones(count, bool),
            turn=np.zeros(count, np.int32), stop_reason=stop_reason, seed=request.seed,
            request=request.hash, quant_id=self._engine.quant_id,
            temperature=request.sampling.temperature, **fields,
        )
