"""Tasksets of verifiers 0.4 as a harness: rollout.harness = "verifiers:TASKSET".

The taskset's own environment and agent run, in processes of this machine. An example of the run's
task names a task of the taskset by its `id`: that of the task, or its index. verifiers has
requirements that this project's environment may not meet: rollout.harness_python names a Python
that has it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from jaxrl_tis.data.signatures import SCORE
from jaxrl_tis.harness.protocol import Result, Session

KEY = "JAXRL_TIS_ENDPOINT_KEY"  # variable from which verifiers' client reads the API key


def load(name: str) -> Any:
    """Returns the environment of a taskset. ImportError if it, or verifiers 0.4, is missing."""
    try:
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ImportError(
            "rollout.harness_python has no verifiers 0.4; install 'verifiers>=0.4,<0.5' there: "
            f"{error}"
        ) from error
    config: dict[str, Any] = {"taskset": {"id": name}}
    if "agent" in loaders.env_config_type(name).model_fields:
        config["agent"] = {"runtime": {"type": "subprocess"}}
    return loaders.load_environment(loaders.resolve_env_config(config))


def named(env: Any) -> Iterator[tuple[str, Any]]:
    """Yields (id, task) of a taskset, in its order."""
    for index, task in enumerate(env.taskset):
        yield str(index if task.data.id is None else task.data.id), task


def write_examples(name: str, file: Any = sys.stdout) -> None:
    """Writes the examples of a taskset, for config.task, as JSON lines."""
    for id, task in named(load(name)):
        data = task.data.model_dump(mode="json")
        print(json.dumps({"id": id, "prompt": data["prompt"]}), file=file)


def metrics_of(trace: Any) -> dict[str, float]:
    """Returns the metrics of a trace. Its "score" becomes "metric_score": "score" is the reward."""
    known = {name: value for name, value in trace.metrics.items() if value is not None}
    return {f"metric_{name}" if name == SCORE else name: value for name, value in known.items()}


class Taskset:
    """A harness, see protocol.py. `name` is the id of the taskset."""

    def __init__(self, name: str):
        self._name, self._env = name, load(name)
        self._unread, self._tasks = named(self._env), {}
        self._lock, self._serving = asyncio.Lock(), None

    async def __call__(self, session: Session) -> Result:
        """Plays one episode. RuntimeError if it has errors."""
        import verifiers.v1 as vf

        async with self._lock:
            if self._serving is None:
                serving = self._env.serving()
                await serving.__aenter__()  # until the process ends
                self._serving = serving
        os.environ[KEY] = session.api_key
        client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=KEY)
        [slot] = self._env.slots(self._task(str(session.example["id"])), 1)
        context = vf.ModelContext(session.model, client, vf.Sampling())
        episode = await self._env.run_slot(slot, context)
        if len(episode.traces) != 1:
            raise RuntimeError(f"{len(episode.traces)} agents played the episode; one can be trained")
        [trace] = episode.traces
        if not episode.ok or not trace.ok:
            errors = [*episode.errors, *trace.errors]
            raise RuntimeError(f"the episode has failed: {errors[-1] if errors else trace!r}")
        return Result(trace.reward, metrics_of(trace))

    def _task(self, id: str) -> Any:
        while id not in self._tasks:
            try:
                known, task = next(self._unread)
            except StopIteration:
                raise ValueError(f"the taskset {self._name!r} has no task {id!r}") from None
            self._tasks[known] = task
        return self._tasks[id]
