"""Measures the gap of sampler and learner at the same weights, and splits it into causes.

Samples the config's prompts with its engine, scores the tokens with the learner's program, and
changes one setting at a time from one to the other (`ladder.py`). Makes no update. The exit code is
1 above a bound `config.gate.max_*`, and where a log-prob is not finite. docs/gate.md explains the
numbers and the keys of the JSON.

Examples:

    python -m jaxrl_tis.gate --config=configs/quickstart.py
    python -m jaxrl_tis.gate --config=configs/quickstart.py --prompts=64 --json=gate.json
"""

import pathlib
import sys

from absl import flags

from jaxrl_tis import cli_flags
from jaxrl_tis.build import build
from jaxrl_tis.gate.report import check_prompts, failures, measure, table, to_json
from jaxrl_tis.learner.state import initial_policy, with_adapter
from jaxrl_tis.runtime import cli, processes

CONFIG = cli_flags.define_config()
PROMPTS = flags.DEFINE_integer(
    "prompts", None, "Prompts of the batch; default: config.rollout.prompts."
)
ADAPTER = flags.DEFINE_string("adapter", None, "Folder of a PEFT adapter of the model.")
JSON = flags.DEFINE_string("json", None, "Write the report to this file.")


CONNECTED = processes.define_flags()


def main() -> None:
    with CONNECTED():
        code = gate()
    sys.exit(code)


def gate() -> int:
    """Prints the report and returns whether the gate fails."""
    cli.check_folder("json", JSON.value)
    setup = build(CONFIG.value)
    prompts = setup.config.rollout.prompts if PROMPTS.value is None else PROMPTS.value
    check_prompts(setup, prompts)
    params = with_adapter(setup.training, lambda: initial_policy(setup.training), ADAPTER.value)
    report = measure(setup, params, prompts)
    processes.report(table(report))
    if JSON.value and processes.is_first():
        pathlib.Path(JSON.value).write_text(to_json(report) + "\n")
    return int(bool(failures(report)))


if __name__ == "__main__":
    cli_flags.run(main, required=["config"])
