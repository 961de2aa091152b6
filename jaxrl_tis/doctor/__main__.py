"""Which cause of off-policy drift the record of a run points to, the evidence, and what to change.

    python -m jaxrl_tis.doctor WORKDIR [--json PATH] [--threshold NAME=VALUE ...]

Reads WORKDIR/metrics.jsonl and, if there is one, WORKDIR/config.json, and walks the two trees of
trees.py over the last `window` training steps. A condition whose metrics the run did not
record, or not for long enough, is neither true nor false, and what hangs on it is listed as not
decided. The gap rollout_corr/* is measured before any weight, so a correction may stay on while its
cause is looked for.

--json writes one object:
  workdir     the folder
  steps       [first, last] training step recorded; null without any
  window      [first, last] of those judged; null likewise
  verdict     names of the findings without a parent that hold, ["not enough data"] if none does
  findings    what holds, in the order of the tree; each has
    name, title, advice, mistake   mistake: the usual wrong reaction, or ""
    parent      name of the finding that it makes precise, or null
    evidence    list of {metric, statistic, value, op, threshold, steps: [first, last], crossed,
                extreme_step}: crossed counts the steps that pass the threshold alone, extreme_step
                is the one farthest in the direction of op; both null for growth, sigma and surge,
                which compare two windows. Facts are named config/... or run/..., or by the metric
                that they sum up over the window, or the run; their steps are null.
    changes     list of {field, value, now}: fields of configs/default.py, their new and present
                value, a preset's where the config leaves the field to it; no two findings
                ask for two values of one field, the first in the order of the trees is heard
  undecided   list of {name, title, reason}
  setup       like findings, from the tree of configurations
  thresholds  name -> value used
Numbers that are not finite are the strings "inf" and "-inf".
"""

import argparse
import json
import pathlib
from collections.abc import Sequence

from jaxrl_tis import cli
from jaxrl_tis.doctor.case import THRESHOLDS
from jaxrl_tis.doctor.diagnose import describe, diagnose, strict


def _threshold(argument: str) -> tuple[str, float]:
    name, _, value = argument.partition("=")
    return name, float(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_tis.doctor",
        description="The cause of a run's off-policy drift, the evidence and what to change.",
    )
    parser.add_argument("workdir", metavar="WORKDIR", help="folder of a run")
    parser.add_argument("--json", metavar="PATH", help="also write the diagnosis here")
    parser.add_argument(
        "--threshold", metavar="NAME=VALUE", type=_threshold, action="append", default=[],
        help=f"replaces one of {', '.join(THRESHOLDS)}",
    )
    args = parser.parse_args(argv)
    diagnosis = diagnose(args.workdir, dict(args.threshold))
    if args.json:
        content = json.dumps(strict(diagnosis), indent=2, allow_nan=False)
        pathlib.Path(args.json).write_text(content + "\n", encoding="utf-8")
    print(describe(diagnosis))


if __name__ == "__main__":
    cli.run(main)
