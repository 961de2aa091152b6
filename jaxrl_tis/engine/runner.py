"""The calls of an engine, with the weights and the decode state that they need."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_tis.engine.drafts import NoDrafts
from jaxrl_tis.engine.fusion import Pair, without_teacher
from jaxrl_tis.engine.protocol import (
    Chunk, EngineProtocol, Insertion, Prefilled, ResultTokens,
)
from jaxrl_tis.engine.stats import Stats


class Runner:
    """Calls an engine on one decode state, and counts the seconds in or waiting for it.

    Args:
      engine: see EngineProtocol.
      params: serving parameters.
      version: version of these parameters.
      teacher: version -> serving parameters of the teacher, None without one.
      stats: where the seconds are counted.
      drafts: are told of prefills and insertions.

    Attributes:
      params: the weights; None after `release_params`, until others are set.
      state: the decode state; None before `start` and after `release_cache`.
    """

    def __init__(
        self, engine: EngineProtocol, params: Any, version: int, stats: Stats,
        teacher: Callable[[int], Any] = lambda version: None, drafts: NoDrafts | None = None,
    ):
        self._engine, self._stats, self._teacher = engine, stats, teacher
        self._drafts = drafts or NoDrafts()
        self.state: Any = None
        self.set_params(params, version)

    def set_params(self, params: Any, version: int) -> None:
        """Takes weights, with those of the teacher as long as there is one."""
        self.version, teacher = version, self._teacher(version)
        self.params = params if teacher is None else Pair(params, teacher)
        self._drop_pages_of_teacher()

    def _drop_pages_of_teacher(self) -> None:
        has_pages = self._engine.num_teachers and self.state is not None
        if has_pages and not isinstance(self.params, Pair):
            self.state = without_teacher(self.state)

    def start(self) -> None:
        """Allocates the decode state if there is none. RuntimeError without weights."""
        if self.params is None:
            raise RuntimeError("the sampler has no weights since it slept; call set_params first")
        if self.state is None:
            self.state = self._engine.init_state()
            self._drop_pages_of_teacher()
            self._drafts.start()

    def release_cache(self) -> None:
        """Frees the memory of slots and pages."""
        self.state = None
        self._drafts.release_cache()

    def release_params(self) -> None:
        """Frees the memory of the weights, and of those that draft. Arrays that the learner holds as well
        stay."""
        self.params = None
        self._drafts.release_params()

    def prefill(self, chunks: list[Chunk]) -> Prefilled:
        self.state, result = self._timed(self._engine.prefill, self.params, self.state, chunks)
        self._drafts.prefill(chunks)
        return result

    def insert(self, rows: dict[int, Insertion]) -> None:
        self.state = self._timed(self._engine.insert, self.state, rows)
        self._drafts.insert(rows)

    def release(self, slots: list[int]) -> None:
        """Stops slots."""
        self.state = self._timed(self._engine.release, self.state, slots)

    def generate(self, table: np.ndarray, shift: np.ndarray) -> ResultTokens:
        self.state, result = self._timed(
            self._engine.generate, self.params, self.state, table, shift
        )
        return result

    def verify(
        self, drafts: np.ndarray, counts: np.ndarray, table: np.ndarray, shift: np.ndarray
    ) -> ResultTokens:
        self.state, result = self._timed(
            self._engine.verify, self.params, self.state, drafts, counts, table, shift
        )
        return result

    def read(self, result: ResultTokens) -> ResultTokens:
        """Waits for a call and returns its result in numpy arrays."""
        return self._timed(jax.tree.map, np.asarray, result)

    def _timed(self, call: Callable, *args) -> Any:
        start = time.perf_counter()
        out = call(*args)
        self._stats.engine_seconds += time.perf_counter() - start
        return out
