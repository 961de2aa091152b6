"""Draws for a run whose rollout.driver is "processes": several of these may come and go.

The config and its fields have to be the learner's. Ends with 0 where the run has come to its end, with
2 where the learner refuses it, and with 42 where the learner is lost or Ctrl-C ends it: what started
it should start it again.

Examples:

    python -m jaxrl_tis.worker --learner=127.0.0.1:8471 --config=configs/quickstart.py
    python -m jaxrl_tis.worker --learner=HOST0:8471 --config=configs/quickstart.py --name=second
"""

import functools
import os
import socket
import time

from absl import flags

from jaxrl_tis import cli_flags
from jaxrl_tis.build import build
from jaxrl_tis.rollouts import remote
from jaxrl_tis.rollouts.worker import LearnerLost, RolloutWorker
from jaxrl_tis.runtime import addresses, cli

CONFIG = cli_flags.define_config()
LEARNER = flags.DEFINE_string("learner", None, "host:port that the learner listens at.")
NAME = flags.DEFINE_string("name", "", "Unique among the learner's workers; default: host and process.")
PATIENCE = flags.DEFINE_float(
    "patience", 60.0, "Seconds to wait for a learner that is not there yet.", lower_bound=0.0,
)
PARTIALS = flags.DEFINE_float(
    "partial_seconds", 1.0, "Seconds between two reports of what there is of all sequences, from which "
    "others go on if this worker dies.", lower_bound=0.0,
)


def main() -> None:
    address, config = addresses.parse(LEARNER.value), CONFIG.value
    token = remote.read_token(address[0])
    try:
        setup = build(config)
        worker = RolloutWorker(
            address, token, setup.identity, NAME.value or f"{socket.gethostname()}-{os.getpid()}",
            setup.engine.slots, setup.engine.abstract_params(),
            functools.partial(setup.scheduler, setup.engine), config.rollout.worker_timeout,
            PARTIALS.value,
        )
        _wait_for(address, PATIENCE.value)
        worker.run()
    except LearnerLost as error:
        raise cli.Interrupted(str(error)) from error
    except KeyboardInterrupt as error:
        raise cli.Interrupted("stopped; others go on with what it drew") from error


def _wait_for(address: tuple[str, int], seconds: float) -> None:
    """Waits until somebody listens; LearnerLost where nobody does."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, max(seconds, 1.0)).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise LearnerLost(f"no learner at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.5)


if __name__ == "__main__":
    cli_flags.run(main, required=["config", "learner"])
