"""The order of prompts: shuffled every epoch, cut into batches, split over hosts.

The position is the number of batches read. It is the same on every host, for any number of hosts.
Batch k has the examples k * batch_size .. (k + 1) * batch_size - 1 of one endless sequence of
shuffled epochs. Host s reads the s-th contiguous piece of the batch.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain

from jaxrl_tis.data.examples import listed
from jaxrl_tis.data.tasks import Examples, Source, make
from jaxrl_tis.runtime import processes

AHEAD = 2  # batches
EPOCHS, MOST = 2**31, 2**62  # and examples in all: Grain's own endless repeat overflows in batch(1)
# The field of the configuration that each part of a fingerprint belongs to.
FIELDS = {
    "task": "task.name", "params": "task.params", "length": "task.params", "examples": "task.params",
    "seed": "seed", "batch_size": "rollout.prompts",
}


def sound(source: Source) -> Source:
    """Raises ValueError for a source with unusable examples."""
    if source.bad:
        raise ValueError(
            f"{len(source.bad)} examples cannot be used; fix or remove them:{listed(source.bad)}"
        )
    return source


class Batches:
    """Endless iterator over this host's part of each batch, a list of examples.

    Args:
        task: a name in TASKS, with its parameters `params`.
        batch_size: examples per step over all hosts; every host gets batch_size / shard_count.
        seed: seed of the order (the task's own seed is in `params`).
        check: returns the source without unusable examples, as Prompter.checked does; by default
            unusable examples are an error.

    A batch that spans the end of an epoch can contain an example twice.

    Raises:
        ValueError: an unknown task, one with no examples, or hosts that do not divide the batch.
    """

    def __init__(
        self, task: str, params: Mapping[str, Any], *, batch_size: int, seed: int,
        shard_index: int = 0, shard_count: int = 1, check: Callable[[Source], Examples] = sound,
    ):
        if batch_size < 1 or batch_size % shard_count:
            raise ValueError(
                f"a batch of {batch_size} prompts cannot be divided among {shard_count} hosts; set "
                f"rollout.prompts to a multiple of {shard_count}"
            )
        if not 0 <= shard_index < shard_count:
            raise ValueError(f"shard_index {shard_index} is not below shard_count {shard_count}")
        self._is_shared = shard_count > 1
        self.source = check(make(task, params))
        if len(self.source) == 0:
            raise ValueError(f"task {task!r} with {dict(params)} has 0 examples; give at least 1")
        self.fingerprint = _fingerprint(task, params, self.source, batch_size, seed)
        batches = (
            grain.MapDataset.source(self.source)
            .seed(seed)
            .shuffle()
            .repeat(min(EPOCHS, MOST // len(self.source)))
            .batch(batch_size // shard_count, batch_fn=list)
            .slice(slice(shard_index, None, shard_count))
        )
        # A thread reads ahead where that takes time. It would only compete with decoding elsewhere.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        if self.source.is_late:
            options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)
        self._iterator = iter(batches.to_iter_dataset(options))

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        return next(self._iterator)

    def next_whole(self) -> list[dict[str, Any]]:
        """Returns the next batch with the parts of all hosts, which call this together."""
        part = next(self)
        return processes.gather(part) if self._is_shared else part

    def get_state(self) -> dict[str, Any]:
        """Returns the position as JSON values, with the fingerprint of its sequence of batches."""
        return {"fingerprint": self.fingerprint, "position": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved position.

        Raises:
            ValueError: the position was saved for other data, another order or another batch.
        """
        if changed := self.differing(state):
            fields = dict.fromkeys(FIELDS[name] for name in changed)
            raise ValueError(
                f"the data differ from those of the checkpoint ({', '.join(changed)} differ): "
                f"saved {json.dumps(state['fingerprint'])}, this run "
                f"{json.dumps(self.fingerprint)}. Use the old data to resume, a new workdir, or "
                f"--change={','.join(fields)} to continue with the new data"
            )
        self._iterator.set_state(dict(state["position"]))

    def differing(self, state: Mapping[str, Any]) -> dict[str, list]:
        """Returns {part of the fingerprint: [saved, here]} for each difference in data, order or batch
        size."""
        saved, here = state["fingerprint"], self.fingerprint
        names = sorted(here.keys() | saved.keys())
        return {n: [saved.get(n), here.get(n)] for n in names if saved.get(n) != here.get(n)}

    def moved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a state to this sequence: the position after the same number of examples, rounded up
        to a whole batch if the batch size differs."""
        read = state["position"]["next_index"] * state["fingerprint"]["batch_size"]
        position = {"next_index": -(-read // self.fingerprint["batch_size"])}
        return {"fingerprint": self.fingerprint, "position": position}


def _fingerprint(
    task: str, params: Mapping[str, Any], source: Examples, batch_size: int, seed: int
) -> dict[str, Any]:
    """Returns the values that determine the sequence of batches."""
    inputs = {
        "task": task,
        "params": {name: params[name] for name in sorted(params)},
        "length": len(source),
        "examples": source.digest(),
        "seed": seed,
        "batch_size": batch_size,
    }
    return json.loads(json.dumps(inputs, default=str))
