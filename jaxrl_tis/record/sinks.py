"""Additional destinations of a run's metrics: Weights & Biases and Trackio.

Each reads its keys and mode from the environment: WANDB_API_KEY, WANDB_MODE=offline, TRACKIO_DIR,
... A resumed run continues in the same place, by the run_id in config.json. metrics.jsonl remains
the primary record.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_tis.record.metrics import Sink

PROJECT = "jaxrl_tis"


class Wandb:
    """Weights & Biases. Plots every value against "step", because warm-up has its own count."""

    def __init__(self, workdir: str, run_id: str, config: Mapping[str, Any]):
        import wandb

        os.makedirs(workdir, exist_ok=True)
        self._run = wandb.init(
            project=PROJECT, name=config["name"], id=run_id, resume="allow", dir=workdir,
            config=dict(config), settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, a dashboard on this machine (`trackio show`) or in a Space of the hub."""

    def __init__(self, workdir: str, run_id: str, config: Mapping[str, Any]):
        import trackio

        name = f"{config['name']}-{run_id[:6]}"
        self._run = trackio.init(
            project=PROJECT, name=name, resume="allow", config=dict(config), auto_log_gpu=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[str, str, Mapping[str, Any]], Sink]] = {"trackio": Trackio, "wandb": Wandb}


def make(name: str, workdir: str, run_id: str, config: Mapping[str, Any]) -> Sink:
    """Opens a sink of SINKS.

    Raises:
      ImportError: its package is not installed.
    """
    try:
        return SINKS[name](workdir, run_id, config)
    except ImportError as error:
        raise ImportError(
            f"metrics.sinks names {name!r}, whose package is missing: pip install 'jaxrl_tis[{name}]'"
        ) from error
