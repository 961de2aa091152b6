"""Which weights say what the learner thought of tokens that several versions of the policy drew.

`WAYS` are the choices of `config.rollout.old_logp_source`. Two are exact, logp_old is scored at the
weights that drew each token: a `RingSnapshots` of snapshots scores a batch as it is consumed, a
`ReplicaSnapshots` keeps one snapshot and scores what it drew before the samplers move on. Two let
another policy stand
in: "ewma" an average of the policy (PPO-EWMA, arXiv:2110.00641), which is part of the state and the
centre of the trust region, too, and "none" the policy itself at the start of the update. What is
missing between them and the weights that drew then counts as the sampler's gap.

All classes are used alike. `publish` takes the weights that sample from now on, `add_logps` the
sequences that have ended or were interrupted, before the next `publish`. A batch is scored with the
object itself, as a mapping from version to parameters, and with the log-probs that `pop_logps` returns.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.models import lora
from jaxrl_tis.sharding import HOST_MEMORY

WAYS = ("ring", "replica", "ewma", "none")
APPROXIMATIONS = ("ewma", "none")
CENTRE = 10.0  # mean age of the average in updates

Meta = dict[str, Any]


def num_bytes(params: Any) -> int:
    """Counts the bytes of arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def num_snapshots(staleness: float) -> int:
    """Returns the number of weight versions that the tokens of one batch can have: `staleness`
    older ones and the policy's own. ValueError if the staleness has no bound."""
    if staleness == math.inf:
        raise ValueError(
            "rollout.schedule has no bound on staleness, and no number of snapshots is enough; set "
            "rollout.snapshots, or rollout.old_logp_source to another source"
        )
    return int(staleness) + 1


class RingSnapshots(Mapping):
    """The parameters of the newest versions, in host memory, each cut over the devices as it was. Of
    adapted parameters these are the factors: the versions share their base.

    A version that is asked for comes back to the devices; the newest is returned as it was
    published while it is still there, that is until an update donates it.

    Args:
      count: most versions, at least 1.
      size: bytes of one.
      max_bytes: of all of them; ValueError where count times size is more.
    """

    def __init__(self, count: int, size: int, max_bytes: float):
        if count < 1:
            raise ValueError(
                f"rollout.old_logp_source = 'ring' has {count} snapshots and needs at least 1; set "
                "rollout.snapshots above 0"
            )
        if count * size > max_bytes:
            raise ValueError(
                f"{count} snapshots of {size:,} bytes of parameters are {count * size:,} bytes, and "
                f"rollout.snapshot_gib allows {int(max_bytes):,}: raise it, set "
                "rollout.snapshots lower, or rollout.old_logp_source to 'none'"
            )
        self._count, self._kept = count, {}
        self._newest: tuple[int, Any] | None = None
        self._join = lambda factors: factors

    def publish(self, params: Any, version: int) -> None:
        """Copies the parameters of a version to host memory and drops the oldest version beyond
        `count`. Versions must not decrease."""
        if self._kept and version < max(self._kept):
            raise ValueError(f"version {version} comes after {max(self._kept)}")
        if version not in self._kept:
            # The update that comes next may donate them: nothing is left to be copied then.
            trained, base = lora.split(params)
            if base is not None:
                self._join = functools.partial(lora.join_like, params, base)
            self._kept[version] = jax.block_until_ready(_moved(trained, HOST_MEMORY))
        for old in sorted(self._kept)[: -self._count]:
            del self._kept[old]
        self._newest = version, params

    def add_logps(self, trajectories: list[Trajectory]) -> None:
        """Does nothing: the weights of the tokens stay."""

    def pop_logps(self, trajectories: list[Trajectory]) -> list[np.ndarray] | None:
        """Returns None: nothing is scored before."""

    def __getitem__(self, version: int) -> Any:
        kept = self._kept[version]
        newest, params = self._newest or (None, None)
        if version == newest and not any(x.is_deleted() for x in jax.tree.leaves(params)):
            return params
        return self._join(_moved(kept, "device"))

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._kept))

    def __len__(self) -> int:
        return len(self._kept)

    def state(self) -> tuple[dict[str, Any], Meta]:
        """Returns the state for a checkpoint: (arrays, JSON values)."""
        return {str(v): params for v, params in self._kept.items()}, {"versions": list(self)}

    @staticmethod
    def abstract(meta: Meta, params: Any) -> dict[str, Any]:
        """Returns the shapes and places of the arrays that `restore` takes, for the `meta` of a
        `state` and the abstract parameters of the policy."""
        on_host = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST_MEMORY)
            ), params,
        )
        return {str(version): on_host for version in meta["versions"]}

    def restore(
        self, arrays: dict[str, Any], meta: Meta, join: Callable[[Any], Any] = lambda x: x
    ) -> None:
        """Continues from a `state`; `join` returns the parameters of what `publish` kept of them."""
        kept = {version: arrays[str(version)] for version in meta["versions"]}
        self._kept, self._newest, self._join = kept, None, join


def _moved(params: Any, memory_kind: str) -> Any:
    return jax.device_put(
        params, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory_kind), params)
    )


class ReplicaSnapshots(Mapping):
    """The parameters of the current sampler, and the learner's log-probs of tokens that earlier
    parameters sampled.

    Every sequence that older weights have drawn a part of must have ended before the weights
    change; a token that did not is scored nowhere, and `Trainer.score` names its version.

    Args:
      size, max_bytes: see `RingSnapshots`.
      log_probs: (parameters, trajectories) -> the learner's log-probs of their tokens, [n] each.
      max_sequences: whose log-probs are kept; the oldest go first, which are of sequences that were
        given up where the number covers all that can be under way.
    """

    def __init__(
        self, size: int, max_bytes: float,
        log_probs: Callable[[Any, list[Trajectory]], list[np.ndarray]], max_sequences: int,
    ):
        self._snapshot, self._log_probs = RingSnapshots(1, size, max_bytes), log_probs
        self._max_sequences = max_sequences
        self._known: dict[str, np.ndarray] = {}  # request -> [n], NaN where unknown

    def publish(self, params: Any, version: int) -> None:
        """Replaces the parameters by those of a new version."""
        self._snapshot.publish(params, version)

    def add_logps(self, trajectories: list[Trajectory]) -> None:
        """Scores the tokens that the present weights have sampled."""
        [version] = self._snapshot
        drawn = [t for t in trajectories if np.any(t.mask & (t.version == version))]
        if not drawn:
            return
        for t, logp in zip(drawn, self._log_probs(self._snapshot[version], drawn), strict=True):
            known, before = np.full(len(logp), np.nan, np.float32), self._known.pop(t.id, ())
            known[: len(before)] = before[: len(known)]  # longer where the sequence started again
            self._known[t.id] = np.where(t.mask & (t.version == version), logp, known)
        for old in list(self._known)[: -self._max_sequences]:
            del self._known[old]

    def pop_logps(self, trajectories: list[Trajectory]) -> list[np.ndarray] | None:
        """Returns the log-probs of the trajectories of a batch, [n] each, NaN where there is none,
        and keeps them no longer."""
        unknown = lambda t: np.full(len(t.tokens), np.nan, np.float32)
        return [self._known.pop(t.id) if t.id in self._known else unknown(t) for t in trajectories]

    def __getitem__(self, version: int) -> Any:
        return self._snapshot[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self._snapshot)

    def __len__(self) -> int:
        return len(self._snapshot)

    def state(self) -> tuple[dict[str, Any], Meta]:
        """Returns the state for a checkpoint: (arrays, JSON values)."""
        arrays, meta = self._snapshot.state()
        meta |= {"ids": list(self._known), "lengths": [len(x) for x in self._known.values()]}
        known = {"known": np.concatenate(list(self._known.values()))} if self._known else {}
        return arrays | known, meta

    @staticmethod
    def abstract(meta: Meta, params: Any) -> dict[str, Any]:
        """Returns the shapes and shardings of the arrays that `restore` takes, see
        `RingSnapshots.abstract`."""
        total = sum(meta["lengths"])
        known = {"known": jax.ShapeDtypeStruct((total,), np.float32)} if total else {}
        return RingSnapshots.abstract(meta, params) | known

    def restore(
        self, arrays: dict[str, Any], meta: Meta, join: Callable[[Any], Any] = lambda x: x
    ) -> None:
        """Continues from a `state`, see `RingSnapshots.restore`."""
        self._snapshot.restore(arrays, meta, join)
        self._known = {}
        if meta["ids"]:
            parts = np.split(np.asarray(arrays["known"]), np.cumsum(meta["lengths"])[:-1])
            self._known = dict(zip(meta["ids"], parts, strict=True))


class NewestSnapshots(Mapping):
    """The last published parameters, without a copy: for on-policy runs, and for `old_logp_source`
    ewma and none."""

    def __init__(self):
        self._newest: dict[int, Any] = {}

    def publish(self, params: Any, version: int) -> None:
        """Replaces the parameters by those of a new version."""
        self._newest = {version: params}

    def add_logps(self, trajectories: list[Trajectory]) -> None:
        """Does nothing."""

    def pop_logps(self, trajectories: list[Trajectory]) -> list[np.ndarray] | None:
        """Returns None: nothing is scored before."""

    def __getitem__(self, version: int) -> Any:
        return self._newest[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self._newest)

    def __len__(self) -> int:
        return len(self._newest)

    def state(self) -> tuple[dict[str, Any], Meta]:
        """Returns an empty state, as every checkpoint contains the policy."""
        return {}, {}

    @staticmethod
    def abstract(meta: Meta, params: Any) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def restore(
        self, arrays: dict[str, Any], meta: Meta, join: Callable[[Any], Any] = lambda x: x
    ) -> None:
        """Does nothing."""


WeightSnapshots = RingSnapshots | ReplicaSnapshots | NewestSnapshots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average:
    """A mean of the policy's parameters over its updates, in which each weighs `decay` times the one
    after it: sum_i decay^(n-i) p_i / sum_i decay^(n-i), with p_0 those before the first update. So
    the authors' code has it (openai/ppo-ewma).

    Attributes:
      mean: float32; the policy's parameters may be too short to hold small steps.
      weight: float32 scalar, the sum that divides.
    """

    mean: Any
    weight: Any

    @classmethod
    def of(cls, params: Any) -> "Average":
        """Starts at these parameters, with buffers of its own."""
        mean = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        return cls(mean, jnp.ones(()))

    def params(self, like: Any) -> Any:
        """Returns the mean in the dtypes of `like`."""
        return jax.tree.map(lambda x, p: x.astype(p.dtype), self.mean, like)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def averaged(average: Average, params: Any, centre: float = CENTRE) -> Average:
    """Returns the average updated with the parameters after an update. `centre` is the mean age of
    the average in updates: decay = 1 - 1 / (centre + 1)."""
    weight = average.weight * (1 - 1 / (centre + 1)) + 1
    mean = jax.tree.map(
        lambda mean, p: mean + (p.astype(jnp.float32) - mean) / weight, average.mean, params
    )
    return Average(mean, weight)
