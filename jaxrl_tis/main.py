"""Runs one config: python -m jaxrl_tis.main --config=configs/quickstart.py --workdir=runs/first."""

from absl import flags

from jaxrl_tis import cli_flags, train

CONFIG = cli_flags.define_config()
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; an interrupted run in it is continued."
)


def main() -> None:
    train.run(CONFIG.value, WORKDIR.value)


if __name__ == "__main__":
    cli_flags.run(main, required=["config", "workdir"])
