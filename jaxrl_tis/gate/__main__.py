"""Measures the gap of sampler and learner at the same weights, and splits it into causes.

Samples the config's prompts with its engine, scores the tokens with the learner's program, and
changes one setting at a time from one to the other (`ladder.py`). Makes no update. The exit code is
1 above a bound `config.gate.max_*`, and where a log-prob is not finite. docs/gate.md explains the
numbers and the keys of the JSON.

With --engine it measures a running engine that serves the weights of the config, see engine.py.

Examples:

    python -m jaxrl_tis.gate --config=configs/quickstart.py
    python -m jaxrl_tis.gate --config=configs/quickstart.py --prompts=64 --json=gate.json
    python -m jaxrl_tis.gate --config=configs/quickstart.py --engine=http://127.0.0.1:8000
"""

import pathlib
import sys
from typing import Any

from absl import flags

from jaxrl_tis import cli_flags
from jaxrl_tis.build import Setup, build
from jaxrl_tis.gate.report import check_prompts, failures, measure, table, to_json
from jaxrl_tis.learner.state import initial_policy, with_adapter
from jaxrl_tis.rollouts.check import ENGINE_KINDS
from jaxrl_tis.runtime import cli, processes

CONFIG = cli_flags.define_config()
PROMPTS = flags.DEFINE_integer(
    "prompts", None, "Prompts of the batch; default: config.rollout.prompts."
)
ADAPTER = flags.DEFINE_string("adapter", None, "Folder of a PEFT adapter of the model.")
ENGINE = flags.DEFINE_string(
    "engine", None, "http://host:port of a running engine that serves the weights of the config."
)
ENGINE_KIND = flags.DEFINE_enum(
    "engine_kind", None, ENGINE_KINDS, "What runs at --engine; default: config.rollout.engine_kind."
)
JSON = flags.DEFINE_string("json", None, "Write the report to this file.")


CONNECTED = processes.define_flags()


def main() -> None:
    with CONNECTED():
        code = gate()
    sys.exit(code)


def gate() -> int:
    """Prints the report and returns whether the gate fails."""
    cli.check_folder("json", JSON.value)
    measured, text, found = _engine(ENGINE.value) if ENGINE.value else _own()
    processes.report(text)
    if JSON.value and processes.is_first():
        pathlib.Path(JSON.value).write_text(to_json(measured) + "\n")
    return int(bool(found))


def _own() -> tuple[dict[str, Any], str, list[str]]:
    """Returns (report, its text, its failures) of the config's own engine."""
    setup, params, prompts = _built()
    report = measure(setup, params, prompts)
    return report, table(report), failures(report)


def _engine(url: str) -> tuple[dict[str, Any], str, list[str]]:
    """Returns (report, its text, its failures) of the engine at an address."""
    try:
        from jaxrl_tis.gate import engine
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'jaxrl_tis[engines]'") from error
    if not processes.is_alone():
        raise ValueError("--engine is measured by one process; start the command on one host alone")
    rollout = CONFIG.value.rollout
    kind = engine.connect(url, ENGINE_KIND.value or rollout.engine_kind, rollout)
    setup, params, prompts = _built()
    report = engine.measure(setup, params, prompts, url, kind)
    return report, engine.table(report), engine.failures(report)


def _built() -> tuple[Setup, Any, int]:
    """Returns the config's programs, the policy's parameters and the number of prompts."""
    setup = build(CONFIG.value)
    prompts = setup.config.rollout.prompts if PROMPTS.value is None else PROMPTS.value
    check_prompts(setup, prompts)
    params = with_adapter(setup.training, lambda: initial_policy(setup.training), ADAPTER.value)
    return setup, params, prompts


if __name__ == "__main__":
    cli_flags.run(main, required=["config"])
