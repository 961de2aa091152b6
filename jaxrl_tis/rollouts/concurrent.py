"""What sources have in common whose samplers draw while the learner is at work.

The learner's thread publishes, rewards and takes batches. Others tell what samplers did. All of it
happens under one lock, which nobody holds while an engine, a reward or a hand-over of weights is at
work.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.rollouts.bookkeeping import Bookkeeping
from jaxrl_tis.rollouts.groups import Groups, Sample
from jaxrl_tis.rollouts.modes import Mode
from jaxrl_tis.rollouts.queue import Entry, Key
from jaxrl_tis.rollouts.replay import Way

PULSE_SECONDS = 0.1


class Concurrent(Bookkeeping):
    """A source adds how weights reach its samplers (`_send`, `_offer`), how orders do (`_decide`),
    what it looks at before it waits (`_check_samplers`), `_stats` and what it measures beside the
    others (`_own_metrics`); all but `_send` are called with the lock.

    Args:
      mode, way: of rollout.mode and rollout.replay.
      batches: records of prompts.
      timer: of the phases "data", "rollout" (waiting for a batch) and "reward".
      load: (the policy's parameters, version) -> serving parameters.
      pulse: called while the learner waits.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, mode: Mode, way: Way | None, groups: Groups,
        batches: Batches, timer: Timer, load: Callable[[Any, int], Any], pulse: Callable[[], None],
    ):
        super().__init__(config, mode, way, groups, batches, timer)
        self._load, self._pulse = load, pulse
        self._changed = threading.Condition()
        self._error: BaseException | None = None  # what another thread ended with
        self._handed_over = (0.0, 0)  # seconds, bytes since the last batch
        self._last_batch = time.monotonic()

    def publish(self, params: Any, version: int) -> bool:
        with self._changed:
            self._raise()
            hands_over = self.controller.hands_over(version)
        sent = self._hand_over(params, version) if hands_over else None
        self._reward()
        with self._changed:
            if hands_over:
                self._offer(sent, version)
            self.controller.published(version)
            self._taken = []
            self._decide()
        return hands_over

    def _hand_over(self, params: Any, version: int) -> Any:
        """Brings new weights to where samplers take them; meanwhile these draw with the old."""
        start = time.monotonic()
        served = jax.block_until_ready(self._load(params, version))
        sent = self._send(served, version)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(served))
        self._handed_over = time.monotonic() - start, size
        return sent

    def _next_entries(self) -> list[Entry]:
        while True:
            with self._timer("rollout"), self._changed:
                self._raise()
                if (entries := self._take()) is not None:
                    self._decide()
                    return entries
                if not (keys := self._queue.claim("reward")):
                    self._wait()
                claimed = self._claimed(keys)
            if keys:
                self._give_rewards(keys, claimed)
            self._pulse()

    def _wait(self) -> None:
        """Waits, with the lock, until something has changed, for PULSE_SECONDS at most."""
        self._check_samplers()
        start = time.monotonic()
        self._changed.wait(PULSE_SECONDS)
        self._counts.waited += time.monotonic() - start

    def _reward(self) -> None:
        with self._changed:
            claimed = self._claimed(keys := self._queue.claim("reward"))
        if keys:
            self._give_rewards(keys, claimed)

    def _give_rewards(
        self, keys: list[Key], claimed: list[tuple[dict[str, str], Trajectory]]
    ) -> None:
        samples: list[Sample] = self._scored(claimed)
        with self._changed:
            self._rewarded(keys, samples)
            self._decide()

    def metrics(self) -> dict[str, float]:
        """Returns what was counted since it was called last: how far the samplers are ahead, who
        waited, what new weights cost, and what the source itself counts."""
        with self._changed:
            now, (seconds, size) = time.monotonic(), self._handed_over
            self._counts.passed = now - self._last_batch
            own = self._own_metrics()
            values = self._measured(self._stats()) | own
            self._handed_over, self._last_batch = (0.0, 0), now
            return values | {"sync/bytes": size, "sync/seconds": seconds}

    def tighten(self) -> str:
        with self._changed:
            return super().tighten()

    def facts(self) -> dict[str, Any]:
        with self._changed:
            return super().facts()

    def _raise(self) -> None:
        """Raises what another thread ended with."""
        if self._error is not None:
            raise self._error
