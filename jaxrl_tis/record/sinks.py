"""Additional destinations of a run's metrics: Weights & Biases and Trackio.

Each reads its keys and mode from the environment: WANDB_API_KEY, WANDB_MODE=offline, TRACKIO_DIR,
... A resumed run continues in the same place, by the run_id in config.json. metrics.jsonl remains
the primary record: a sink that fails is left out from then on, and the run goes on.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_tis.record.metrics import Sink

PROJECT = "jaxrl_tis"
LOCAL_MODES = ("offline", "dryrun", "disabled")  # of WANDB_MODE: they need no key


class Wandb:
    """Weights & Biases. Plots every value against "step", because warm-up has its own count."""

    @staticmethod
    def check() -> None:
        """Raises ImportError without the package, ValueError without a key of the service. On a
        terminal the service asks for the key."""
        import wandb

        if os.environ.get("WANDB_MODE") in LOCAL_MODES:
            return
        try:
            wandb.login(verify=False)
        except Exception as error:  # no key, or an invalid setting: each has a class of its own
            raise ValueError(
                f"metrics.sinks names 'wandb', which cannot begin ({_line(error)}): set "
                "WANDB_API_KEY, log in by `wandb login`, or keep the values on this machine with "
                "WANDB_MODE=offline"
            ) from error

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

    @staticmethod
    def check() -> None:
        """Raises ImportError without the package."""
        import trackio  # noqa: F401

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


SINKS: dict[str, type[Wandb] | type[Trackio]] = {"trackio": Trackio, "wandb": Wandb}


class Expendable:
    """A sink whose first failure is one line on stderr. From then on it gets nothing, and the run
    goes on."""

    def __init__(self, name: str, make: Callable[[], Sink]):
        self._name, self._is_lost = name, False
        self._sink: Any = self._tried(make)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tried(lambda: self._sink.log(step, values))

    def close(self) -> None:
        self._tried(lambda: self._sink.close())

    def _tried(self, call: Callable[[], Any]) -> Any:
        if self._is_lost:
            return None
        try:
            return call()
        except Exception as error:  # of the service's package, whatever it is
            self._is_lost = True
            print(
                f"{self._name} has failed and gets no more values: {_line(error)}; metrics.jsonl has all",
                file=sys.stderr, flush=True,
            )


def _line(error: Exception) -> str:
    """Returns an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def check(names: Sequence[str]) -> None:
    """Finds before a run what these sinks of SINKS lack.

    Raises:
      ImportError: the package of one is not installed.
      ValueError: it has no key.
    """
    for name in names:
        try:
            SINKS[name].check()
        except ImportError as error:
            raise ImportError(
                f"metrics.sinks names {name!r}, whose package is missing: "
                f"pip install 'jaxrl_tis[{name}]'"
            ) from error


def make(name: str, workdir: str, run_id: str, config: Mapping[str, Any]) -> Sink:
    """Opens a sink of SINKS."""
    return Expendable(name, lambda: SINKS[name](workdir, run_id, config))
