"""Runs one config, and continues its run where it was interrupted.

Examples:

    python -m jaxrl_tis.main --config=configs/quickstart.py --workdir=runs/first
    python -m jaxrl_tis.main --config=configs/quickstart.py:off --workdir=runs/off --config.steps=50
"""

from absl import flags
from typing import Any

from jaxrl_tis import cli_flags, train
from jaxrl_tis.runtime import processes

CONFIG = cli_flags.define_config()
WORKDIR: Any = flags.DEFINE_string(
    "workdir", None, "Folder of the run; an interrupted run in it is continued."
)
PROFILE_STEPS = flags.DEFINE_list(
    "profile_steps", [], "Steps whose traces go to WORKDIR/profile, for XProf or TensorBoard."
)
CHANGE = flags.DEFINE_list(
    "change", [],
    "Fields that a continued run may change, or groups of fields, as in optimizer.lr,task.params.",
)
CONNECTED = processes.define_flags()


def main() -> None:
    if wrong := [step for step in PROFILE_STEPS.value if not step.isdigit()]:
        raise ValueError(
            f"--profile_steps={','.join(PROFILE_STEPS.value)}: {', '.join(wrong)} is not the "
            "number of a step; give whole numbers, as in 10,20"
        )
    with CONNECTED():
        profile_steps = {int(step) for step in PROFILE_STEPS.value}
        train.run(CONFIG.value, WORKDIR.value, profile_steps, CHANGE.value)


if __name__ == "__main__":
    cli_flags.run(main, required=["config", "workdir"])
