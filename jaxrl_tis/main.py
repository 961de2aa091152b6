"""Runs one config: python -m jaxrl_tis.main --config=configs/quickstart.py --workdir=runs/first."""

from absl import app, flags, logging
from ml_collections import config_flags

from jaxrl_tis import train

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file; fields are overridden by --config.field=value.", lock_config=True
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; an interrupted run in it is continued."
)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # Orbax tells forty lines per checkpoint
    train.run(CONFIG.value, WORKDIR.value)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
