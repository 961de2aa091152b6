"""The driver "virtual": samplers run ahead of the learner, and all take turns in one thread.

In a turn each sampler that has something to draw makes one call of its engine. The learner's time is
counted in turns, too: an update takes `rollout.update_turns` of them, so that which version draws which
token does not depend on a clock, and a run can be repeated bit by bit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.stats import Stats
from jaxrl_tis.record.metrics import Timer
from jaxrl_tis.rollouts.bookkeeping import Bookkeeping
from jaxrl_tis.rollouts.controller import Swap
from jaxrl_tis.rollouts.groups import Groups
from jaxrl_tis.rollouts.modes import Mode
from jaxrl_tis.rollouts.queue import Entry
from jaxrl_tis.rollouts.replay import Way
from jaxrl_tis.rollouts.sampler import NewWeights, Sampler


class Asynchronous(Bookkeeping):
    """A source of batches whose samplers run ahead; see `Controller` for what they may.

    Args:
      mode, way: of rollout.mode and rollout.replay.
      batches: records of prompts, on all processes alike.
      timer: of the phases "data", "rollout" and "reward".
      load: (the policy's parameters, version) -> serving parameters.
      start: (serving parameters, version) -> a scheduler.
      slots: sequences that a sampler draws at once.
      arrived: see Bookkeeping.
      pulse: called between two turns.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        mode: Mode,
        way: Way | None,
        groups: Groups,
        batches: Batches,
        timer: Timer,
        load: Callable[[Any, int], Any],
        start: Callable[[Any, int], Scheduler],
        slots: int,
        arrived: Callable[[list[Trajectory]], None] = lambda trajectories: None,
        pulse: Callable[[], None] = lambda: None,
    ):
        super().__init__(config, mode, way, groups, batches, timer, arrived)
        self._load, self._pulse = load, pulse
        self._samplers = {f"sampler {i}": Sampler(start) for i in range(config.rollout.workers)}
        for name in self._samplers:
            self.controller.joined(name, slots)
        self._served: NewWeights | None = None
        self._is_updating = False

    # What the run calls

    def publish(self, params: Any, version: int) -> bool:
        self._finish_update()
        self.controller.published(version)
        self._taken = []
        is_offered = self.controller.offered == version
        if is_offered:
            serving = _apart(self._load(params, version), params)
            self._served = NewWeights(jax.block_until_ready(serving), version)
        self._settle()
        return is_offered

    def _next_entries(self) -> list[Entry]:
        while (entries := self._take()) is None:
            self._pulse()
            if not self._turn():
                raise self._stuck()
            self._counts.waited += 1
        self._is_updating = True
        return entries

    def metrics(self) -> dict[str, float]:
        """Returns what was counted since it was called last: how far the samplers are ahead and what
        new weights cost."""
        return self._measured(self._stats())

    def rest(self) -> None:
        self._finish_update()
        self._gather()
        for sampler in self._samplers.values():
            while sampler.pending:
                sampler.step()  # returns what was dropped
            sampler.rest()

    def close(self, is_over: bool) -> None:
        """Ends nothing, as all happens in the calls of the run."""

    # Turns

    def _finish_update(self) -> None:
        """Lets the turns pass that the learner's update takes, once."""
        is_updating, self._is_updating = self._is_updating, False
        for _ in range(self._config.rollout.update_turns if is_updating else 0):
            self._turn()

    def _turn(self) -> bool:
        """Lets each sampler make a call; returns whether one had anything to draw."""
        self._settle()
        drawing = [name for name, sampler in self._samplers.items() if sampler.pending]
        with self._timer("rollout"):
            for name in drawing:
                self._hear(name, self._samplers[name].step())
        self._counts.passed += 1
        self._reward()
        return bool(drawing)

    def _settle(self) -> None:
        """Carries out decisions until there are none."""
        while decisions := self.controller.decisions():
            for decision in decisions:
                name, is_swap = decision.worker, isinstance(decision, Swap)
                order = self._served if is_swap else self._order(decision)
                sampler = self._samplers[name]
                if is_swap:
                    self._tell(sampler.records())
                with self._timer("rollout"):
                    self._hear(name, sampler.obey(order))
                if is_swap:
                    self.controller.swapped(name, order.version)
                    self._counts.syncs += 1

    def _stats(self) -> Stats:
        return Stats.sum(sampler.stats for sampler in self._samplers.values())

    # Checkpoints

    def _gather(self) -> None:
        """Takes everything back from the samplers."""
        for decision in self.controller.interrupt_all():
            order = self._order(decision)
            self._hear(decision.worker, self._samplers[decision.worker].obey(order))

    def get_state(self, version: int) -> dict[str, Any]:
        """Returns what is to go on with after the update that made `version`: all that samplers
        draw is interrupted for it, and goes on afterwards as it does after a restart."""
        if not self._is_untrained(version):
            self._finish_update()
        self._gather()
        return self._state(version, self._stats())


def _apart(serving: Any, params: Any) -> Any:
    """Copies what the serving parameters share with the policy's, which its update gives away."""
    own = {id(x) for x in jax.tree.leaves(params)}
    return jax.tree.map(lambda x: jnp.copy(x) if id(x) in own else x, serving)
