"""Rewards: functions of the sampled text and the task's record, scored in processes of their own.

A function returns a number, or several by name, its components: see `RewardWorker.results`. The
signatures that it may have are in signatures.py, those that come with the package in graders.py.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from jaxrl_tis.data import confined
from jaxrl_tis.record.failures import Failures

DROP = "drop"  # of reward.on_error
SCORE = "score"  # the component that is the reward where there is one
BATCH = 16  # texts for one call of a function that takes several
PULSE_SECONDS = 0.5

Outcome = dict[str, Any]  # see signatures.make


@dataclasses.dataclass(frozen=True)
class Scored:
    """The reward of an answer: NaN where there is none. A void component is NaN, too."""

    score: float
    components: dict[str, float]
    is_failed: bool = False


def soft_overlong_penalty(length_tokens: int, max_length: int, buffer: int) -> float:
    """What to add to the reward of a long response (DAPO, 2503.14476, equation 13).

    0 up to max_length - buffer tokens, then linear down to -1 at max_length tokens, and -1 above.
    All three are in tokens of the response.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer {buffer} must be above 0 and at most max_length {max_length}")
    return max(-1.0, min(0.0, (max_length - buffer - length_tokens) / buffer))


def weighted(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> dict[str, float]:
    """The weight of each part in the reward: the given one; else 1, or 0 beside a "score"."""
    default = lambda name: 1.0 if name == SCORE or SCORE not in parts else 0.0
    return {name: float(weights[name]) if name in weights else default(name) for name in parts}


class RewardWorker:
    """Scores texts with a reward function in processes of its own: see confined.Confined.

    The function may hang, crash, raise or return NaN: the item has then failed, is counted in
    `counts` and `failures`, the process is replaced where it has to be, and scoring goes on.

    Args:
        function: a name in graders.REWARDS, or "module:function" importable along this process's
            sys.path; or several of them, separated by commas.
        timeout: seconds that one item may take.
        on_error: the score of an item that failed; "drop" for none.
        signature: one of signatures.SIGNATURES.
        weights: of components, by name; see `weighted`.
        network: whether the function may use it.
        workers: processes that score at once; for an async function, calls at once.
        share: (items, f: items -> results) -> results; where several processes have the same texts,
            each calls f with its part and gets the results of all.
        heartbeat: called whenever results come.
        failures: where they are counted, printed and kept; by default printed alone.

    Raises:
        ValueError: the function cannot be loaded, or has no known signature.
    """

    def __init__(
        self, function: str, *, timeout: float, on_error: str | float = DROP,
        signature: str = "auto", weights: Mapping[str, float] = {}, network: bool = False,
        workers: int = 1, share: Callable[[list, Callable], list] = lambda items, f: f(items),
        heartbeat: Callable[[], None] = lambda: None, failures: Failures | None = None,
    ):
        self.on_error = math.nan if on_error == DROP else float(on_error)
        self._weights, self._timeout, self._workers = weights, timeout, workers
        self._share, self._heartbeat = share, heartbeat
        self.failures = Failures() if failures is None else failures
        self.counts = {"timeouts": 0, "errors": 0, "non_finite": 0, "dropped": 0}
        self._names: dict[str, None] = {}  # of the components that were seen
        self._is_closed = False
        self.last_error = ""
        setup = {"name": function, "signature": signature, "timeout": timeout, "workers": workers}
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
        self, texts: Sequence[str], records: Sequence[dict[str, Any]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[float]:
        """One score for each text, in order; blocks until all are scored or given up."""
        return [scored.score for scored in self.results(texts, records, tokens)]

    def results(
        self, texts: Sequence[str], records: Sequence[dict[str, Any]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[Scored]:
        """What each text is worth, in order; `tokens` are those of the texts, for functions that
        ask for them. Bytes stand in for those of a text that no model wrote.

        A number is the reward. Of several by name "score" is the reward where there is one, and
        otherwise their weighted sum is; one that is None is left out. Where there is only a number,
        the components are {"reward": it}. An answer that failed has the components of the others,
        each NaN or an equal part of `on_error`.
        """
        ids: list = [None] * len(texts)
        if self._confined[0].traits["tokens"]:
            written = [text.encode(errors="replace") for text in texts] if tokens is None else tokens
            ids = [list(map(int, t)) for t in written]
        self._is_closed = False
        items = [[t, dict(r), i] for t, r, i in zip(texts, records, ids, strict=True)]
        outcomes = self._share(items, self._outcomes)
        scored = [self._scored(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]
        if any(s is None for s in scored):
            self.failures.write()
        names = self._names or {"reward": None}
        failed = Scored(self.on_error, dict.fromkeys(names, self.on_error / len(names)), True)
        return [failed if s is None else s for s in scored]

    def unused_weights(self) -> list[str]:
        """Names with a weight that no result has had."""
        return [name for name in self._weights if name not in self._names]

    def close(self) -> None:
        """Ends the processes and all that they started; a later `score` starts new ones."""
        self._is_closed = True
        for process in self._confined:
            process.close()

    # Calls

    def _outcomes(self, items: list) -> list[Outcome]:
        """The outcome of each item, in order."""
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
        """The outcomes of a unit, whose items are called one by one after a fault of all."""
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
        """Seconds for a unit of so many items."""
        if not self._confined[0].traits["async"]:
            return count * self._timeout
        return self._timeout * (math.ceil(count / self._workers) + 1)

    # Results

    def _scored(self, item: list, outcome: Outcome) -> Scored | None:
        """The result of an item, None where it failed."""
        if "value" not in outcome:
            return self._failed(item, **outcome)
        value = outcome["value"]
        if "bad" in value:
            error = f"the reward returned {value['bad']}"
            return self._failed(item, "errors", error, error)
        return self._summed(item, value["parts"])

    def _summed(self, item: list, parts: dict[str, float | None]) -> Scored | None:
        weights = weighted(parts, self._weights)
        summed = {name: parts[name] for name, weight in weights.items() if weight}
        if summed.get(SCORE, 0.0) is None or all(x is None for x in summed.values()):
            error = f"the reward returned None for {SCORE if SCORE in summed else 'every part'}"
            if not summed:
                error = "reward.weights gives every part of the reward weight 0"
            return self._failed(item, "errors", error, error)
        if any(x is not None and not math.isfinite(x) for x in summed.values()):
            error = f"the score is {summed}"
            return self._failed(item, "non_finite", "a score that is not finite", error)
        self._names |= dict.fromkeys(parts)
        total = sum(weights[name] * x for name, x in summed.items() if x is not None)
        is_known = lambda x: x is not None and math.isfinite(x)
        return Scored(total, {name: x if is_known(x) else math.nan for name, x in parts.items()})

    def _failed(self, item: list, fault: str, kind: str, error: str, traceback: str = "") -> None:
        text, record, _ = item
        self.counts[fault] += 1
        self.counts["dropped"] += math.isnan(self.on_error)
        self.last_error = error
        id = str(record["id"]) if "id" in record else "?"
        self.failures.add(kind, error, traceback, id, text)


def _outcome(result: dict[str, Any]) -> Outcome:
    """The outcome of a single item from what its process says."""
    if not result["fault"]:
        [outcome] = result["value"]
        return outcome
    kind = result["error"].partition(":")[0]
    return {"fault": result["fault"], "kind": kind, "error": result["error"], "traceback": ""}


def worker(reward: ml_collections.ConfigDict, **more: Any) -> RewardWorker:
    """The worker that a config's group `reward` names; see RewardWorker."""
    fields = {name: reward[name] for name in ("timeout", "on_error", "signature", "network", "workers")}
    return RewardWorker(reward.name, weights=reward.weights.to_dict(), **fields, **more)
