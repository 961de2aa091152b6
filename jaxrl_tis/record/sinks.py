"""Services that a run's values go to beside its own record, which stays the truth.

Each takes its keys and its mode from the environment: WANDB_API_KEY, WANDB_MODE=offline,
TRACKIO_DIR, ... A continued run goes on in the same place, by the id in its config.json.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_tis.record.metrics import Sink

PROJECT = "jaxrl_tis"


class Wandb:
    """Weights & Biases; every value is drawn over "step", as those of warm-up begin anew."""

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
