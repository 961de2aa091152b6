"""Scores sampled texts with reward functions in separate processes.

A reward function returns a number, or a mapping of named components, see `RewardWorker.results`.
signatures.py has the supported signatures, graders.py the package's own rewards.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from jaxrl_tis.data import confined
from jaxrl_tis.data.graders import UNSURE
from jaxrl_tis.data.signatures import LARGEST, SCORE
from jaxrl_tis.record.failures import Failures

DROP = "drop"  # of reward.on_error
BATCH = 16  # texts per call of a batched function
PULSE_SECONDS = 0.5

Outcome = dict[str, Any]  # see signatures.make


@dataclasses.dataclass(frozen=True)
class Scored:
    """The reward of an answer and its components; NaN for a missing reward or component."""

    score: float
    components: dict[str, float]
    is_failed: bool = False


def soft_overlong_penalty(length_tokens: int, max_length: int, buffer: int) -> float:
    """Returns the length penalty to add to the reward (DAPO, 2503.14476, equation 13).

    0 up to max_length - buffer tokens, then linear down to -1 at max_length tokens, and -1 above.
    All three are in tokens of the response.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer {buffer} must be above 0 and at most max_length {max_length}")
    return max(-1.0, min(0.0, (max_length - buffer - length_tokens) / buffer))


def weighted(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the weight of each component: the configured weight, else 1, or 0 if there is a "score"."""
    default = lambda name: 1.0 if name == SCORE or SCORE not in parts else 0.0
    return {name: float(weights[name]) if name in weights else default(name) for name in parts}


class RewardWorker:
    """Scores texts with a reward function in separate processes, see confined.Confined.

    If the function hangs, crashes, raises or returns NaN, the item fails and is counted in `counts`
    and `failures`. The process is replaced if necessary, and scoring continues.

    Args:
        function: a name in graders.REWARDS, or "module:function" importable along this process's
            sys.path; or several of them, separated by commas.
        timeout: seconds of one item.
        on_error: the score of a failed item; "drop" for no score.
        signature: one of signatures.SIGNATURES.
        weights: of components, by name; see `weighted`.
        network: whether the function may use the network.
        workers: number of processes; for an async function, number of concurrent calls.
        share: (items, f: items -> results) -> results; if several processes have the same texts,
            each calls f with its part and receives all results.
        heartbeat: called whenever results arrive.
        failures: counts, prints and keeps failures; by default they are printed only.
        judge: address and model of the reward "judge", see graders.Judge.

    Raises:
        ValueError: the function cannot be loaded, or has no known signature.
    """

    def __init__(
        self, function: str, *, timeout: float, on_error: str | float = DROP,
        signature: str = "auto", weights: Mapping[str, float] = {}, network: bool = False,
        workers: int = 1, share: Callable[[list, Callable], list] = lambda items, f: f(items),
        heartbeat: Callable[[], None] = lambda: None, failures: Failures | None = None, judge: str = "",
    ):
        self.on_error = math.nan if on_error == DROP else float(on_error)
        self._weights, self._timeout, self._workers = weights, timeout, workers
        self._share, self._heartbeat = share, heartbeat
        self.failures = Failures() if failures is None else failures
        self.counts = {"timeouts": 0, "errors": 0, "non_finite": 0, "dropped": 0, "unsure": 0}
        self._names: dict[str, None] = {}  # of the components that were seen
        self._is_closed = False
        self.last_error = ""
        setup = {"name": function, "signature": signature, "timeout": timeout, "workers": workers}
        setup["judge"] = judge
        make = lambda _: confined.Confined(
            "jaxrl_tis.data.signatures:make", setup, what=f"the reward {function!r}",
            timeout=timeout, network=network,
        )
        self._confined = [make(0)]
        if workers > 1 and not self._confined[0].traits["async"]:
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                self._confined += pool.map(make, range(1, workers))

    def __enter__(self) -> "RewardWorker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def score(
        self, texts: Sequence[str], examples: Sequence[dict[str, Any]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[float]:
        """Returns one score per text, in order; blocks until all are scored or have failed."""
        return [scored.score for scored in self.results(texts, examples, tokens)]

    def results(
        self, texts: Sequence[str], examples: Sequence[dict[str, Any]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[Scored]:
        """Returns the reward and components of each text, in order. `tokens` are the texts' token ids,
        for functions that ask for them; a text that no model wrote has bytes instead.

        A number is the reward, with the components {"reward": number}. Of named components "score"
        is the reward if present, else their weighted sum; components that are None are left out. The
        text "unsure" is no reward and no failure. A failed answer has the components of the others,
        each NaN or an equal part of `on_error`.
        """
        ids: list = [None] * len(texts)
        if self._confined[0].traits["tokens"]:
            written = [text.encode(errors="replace") for text in texts] if tokens is None else tokens
            ids = [list(map(int, t)) for t in written]
        self._is_closed = False
        items = [[t, dict(e), i] for t, e, i in zip(texts, examples, ids, strict=True)]
        outcomes = self._share(items, self._outcomes)
        scored = [self._scored(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]
        if any(s is None for s in scored):
            self.failures.write()
        names = self._names or {"reward": None}
        without = lambda score, *is_failed: Scored(score, dict.fromkeys(names, score / len(names)), *is_failed)
        of = {None: without(self.on_error, True), UNSURE: without(math.nan)}
        return [s if isinstance(s, Scored) else of[s] for s in scored]

    def failed(
        self, fault: str, error: str, text: str, example: Mapping[str, Any], kind: str = "",
        traceback: str = "",
    ) -> Scored:
        """Records that an answer has no reward, under one of the names of `counts`. Returns its
        reward. Without a kind, the kind is the beginning of the error."""
        self.counts[fault] += 1
        self.counts["dropped"] += math.isnan(self.on_error)
        self.last_error = error
        id = str(example["id"]) if "id" in example else "?"
        self.failures.add(kind or error.partition(": ")[0], error, traceback, id, text)
        return Scored(self.on_error, {}, is_failed=True)

    def unused_weights(self) -> list[str]:
        """Returns the weighted names that no result has had."""
        return [name for name in self._weights if name not in self._names]

    def close(self) -> None:
        """Ends the processes and their child processes; a later `score` starts new processes."""
        self._is_closed = True
        for process in self._confined:
            process.close()

    # Calls

    def _outcomes(self, items: list) -> list[Outcome]:
        """Returns the outcome of each item, in order."""
        traits = self._confined[0].traits
        if not traits["batched"] and not traits["async"] and len(self._confined) == 1:
            results = self._confined[0].calls([[[item]] for item in items], self._heartbeat)
            return [_outcome(result) for result in results]
        size = max(1, len(items)) if traits["async"] else 1
        if traits["batched"]:
            size = max(1, min(BATCH, math.ceil(len(items) / len(self._confined))))
        units = [items[i : i + size] for i in range(0, len(items), size)]
        processes = list(self._confined)  # a thread takes one, and gives it back
        pool = concurrent.futures.ThreadPoolExecutor(len(processes))
        try:
            calls = [pool.submit(self._called, processes, unit) for unit in units]
            waiting = set(calls)
            while waiting:
                _, waiting = concurrent.futures.wait(
                    waiting, PULSE_SECONDS, concurrent.futures.FIRST_COMPLETED
                )
                self._heartbeat()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [outcome for call in calls for outcome in call.result()]

    def _called(self, processes: list[confined.Confined], unit: list) -> list[Outcome]:
        """Returns the outcomes of a unit; after a fault of the whole unit its items are called singly."""
        process = processes.pop()
        try:
            [result] = process.calls([[unit]], timeout=self._limit(len(unit)))
            if result["fault"] and len(unit) > 1 and not self._is_closed:
                results = process.calls([[[item]] for item in unit])
                return [_outcome(result) for result in results]
            return [_outcome(result)] * len(unit) if result["fault"] else result["value"]
        finally:
            processes.append(process)

    def _limit(self, count: int) -> float:
        """Returns the timeout of a unit of `count` items, in seconds."""
        if not self._confined[0].traits["async"]:
            return count * self._timeout
        return self._timeout * (math.ceil(count / self._workers) + 1)

    # Results

    def _scored(self, item: list, outcome: Outcome) -> Scored | str | None:
        """Returns the result of an item, None for a failed item, UNSURE where nobody can tell."""
        if "value" not in outcome:
            self._failed(item, **outcome)
            return None
        value = outcome["value"]
        if UNSURE in value:
            self.counts[UNSURE] += 1
            return UNSURE
        if "bad" in value:
            error = f"the reward returned {value['bad']}"
            self._failed(item, "errors", error, error)
            return None
        return self._summed(item, value["parts"])

    def _summed(self, item: list, parts: dict[str, float | None]) -> Scored | None:
        weights = weighted(parts, self._weights)
        summed = {name: parts[name] for name, weight in weights.items() if weight}
        if summed.get(SCORE, 0.0) is None or all(x is None for x in summed.values()):
            error = f"the reward returned None for {SCORE if SCORE in summed else 'every part'}"
            if not summed:
                error = "reward.weights gives every part of the reward weight 0"
            self._failed(item, "errors", error, error)
            return None
        total = sum(weights[name] * x for name, x in summed.items() if x is not None)
        if not abs(total) <= LARGEST:  # also NaN
            error = f"the score is {summed}"
            self._failed(item, "non_finite", "a score that is not finite in float32", error)
            return None
        self._names |= dict.fromkeys(parts)
        known = lambda x: x if x is not None and abs(x) <= LARGEST else math.nan
        return Scored(total, {name: known(x) for name, x in parts.items()})

    def _failed(self, item: list, fault: str, kind: str, error: str, traceback: str = "") -> None:
        text, example, _ = item
        self.failed(fault, error, text, example, kind, traceback)


def _outcome(result: dict[str, Any]) -> Outcome:
    """Returns the outcome of an item from the answer of its process."""
    if not result["fault"]:
        [outcome] = result["value"]
        return outcome
    kind = result["error"].partition(":")[0]
    return {"fault": result["fault"], "kind": kind, "error": result["error"], "traceback": ""}


def worker(reward: ml_collections.ConfigDict, **more: Any) -> RewardWorker:
    """Returns the RewardWorker of a config's section `reward`."""
    names = "timeout", "on_error", "signature", "network", "workers", "judge"
    fields = {name: reward[name] for name in names}
    return RewardWorker(reward.name, weights=reward.weights.to_dict(), **fields, **more)
