"""The driver "virtual": samplers and learner take turns in one thread.

In a turn each sampler with pending sequences makes one call of its engine. An update lasts
`rollout.update_turns` turns. The version that samples a token therefore does not depend on a clock,
and a run can be repeated bit by bit.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.engine.weights import apart
from jaxrl_tis.rollouts.bookkeeping import AsyncBookkeeping, batch_parts
from jaxrl_tis.rollouts.controller import Begin, Discard, Interrupt, SyncWeights
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.queue import Entry
from jaxrl_tis.rollouts.sampler import Sampler, SetParams
from jaxrl_tis.rollouts.source import SourceParts


class VirtualSource:
    """A rollout source with asynchronous samplers in one thread; see `Controller` for the rules.

    Args:
      start: (serving parameters, version) -> a scheduler.
      slots: number of sequences that a sampler generates at once.
      on_records: see `AsyncBookkeeping`.
    """

    def __init__(
        self, parts: SourceParts, start: Callable[[Any, int], Scheduler], slots: int,
        on_records: Callable[[list[Trajectory]], None] = lambda trajectories: None,
    ):
        rollout = parts.config.rollout
        self.books = AsyncBookkeeping(parts, on_records)
        self._serving_params = parts.serving_params
        self._heartbeat, self._timer = parts.heartbeat, parts.timer
        self._update_turns, self._is_updating = rollout.update_turns, False
        self._samplers = {f"sampler {i}": Sampler(start) for i in range(rollout.workers)}
        for name in self._samplers:
            self.books.controller.joined(name, slots)
        self._newest: SetParams | None = None  # the newest that samplers may sync to

    # What the run calls

    def publish(self, params: Any, version: int) -> bool:
        self._finish_update()
        self.books.published(version)
        is_synced = self.books.controller.sync_version == version
        if is_synced:
            serving = apart(self._serving_params(params, version), params)
            self._newest = SetParams(jax.block_until_ready(serving), version)
        self._settle()
        return is_synced

    def parts(self, step: int) -> Iterator[list[Sample]]:
        return batch_parts(self.books, self._next_groups)

    def metrics(self) -> dict[str, float]:
        return self.books.metrics(self._stats())

    def observe(self, values: Mapping[str, float]) -> None:
        self.books.observe(values)

    def reduce_staleness(self) -> str:
        return self.books.reduce_staleness()

    def release_cache(self) -> None:
        self._finish_update()
        self._gather()
        for sampler in self._samplers.values():
            while sampler.pending:
                sampler.step()  # returns what was cancelled
            sampler.release_cache()

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns the state. Interrupts all sequences in flight; they continue as after a
        restart."""
        if not self.books.is_untrained(version):
            self._finish_update()
        self._gather()
        return self.books.get_state(version, self._stats())

    def set_state(self, state: dict[str, Any]) -> None:
        self.books.set_state(state)

    def sync_digest(self) -> dict[str, Any]:
        return self.books.sync_digest()

    def close(self, is_over: bool) -> None:
        for sampler in self._samplers.values():
            sampler.close()

    # Turns

    def _next_groups(self) -> list[Entry]:
        """Takes turns until groups of the next batch are available, and marks the update's
        start."""
        while (entries := self.books.take()) is None:
            self._heartbeat()
            if not self._turn():
                raise self.books.stuck()
            self.books.counts.waited += 1
        self._is_updating = True
        return entries

    def _finish_update(self) -> None:
        """Runs the turns that belong to the learner's last update, once."""
        is_updating, self._is_updating = self._is_updating, False
        for _ in range(self._update_turns if is_updating else 0):
            self._turn()

    def _turn(self) -> bool:
        """Runs one turn: each sampler makes one call. Returns whether there was anything to do: a
        pending sequence, or a sample without a reward."""
        self._settle()
        drawing = [name for name, sampler in self._samplers.items() if sampler.pending]
        with self._timer("rollout"):
            for name in drawing:
                self.books.receive(name, self._samplers[name].step())
        self.books.counts.passed += 1
        claim = self.books.claim()
        if claim:
            self.books.add_rewards(claim.keys, self.books.score(claim))
        return bool(drawing or claim)

    def _settle(self) -> None:
        """Carries out the controller's decisions until there are none."""
        while decisions := self.books.controller.decisions():
            for decision in decisions:
                if isinstance(decision, SyncWeights):
                    self._sync(decision.worker)
                else:
                    self._execute(decision)

    def _sync(self, name: str) -> None:
        """Syncs a sampler to the newest weights."""
        sampler = self._samplers[name]
        self.books.report(sampler.records())
        assert self._newest is not None
        with self._timer("rollout"):
            sampler.execute(self._newest)
        self.books.synced(name, self._newest.version)

    def _execute(self, decision: Begin | Interrupt | Discard) -> None:
        command = self.books.command(decision)
        with self._timer("rollout"):
            self.books.receive(decision.worker, self._samplers[decision.worker].execute(command))

    def _gather(self) -> None:
        """Preempts all sequences in flight."""
        for decision in self.books.controller.interrupt_all():
            sampler = self._samplers[decision.worker]
            self.books.receive(decision.worker, sampler.execute(self.books.command(decision)))

    def _stats(self) -> Stats:
        return Stats.sum(sampler.stats for sampler in self._samplers.values())
