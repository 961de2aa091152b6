"""Finds the cause of a run's off-policy drift in its metrics, with the evidence and the change to make.

Reads WORKDIR/metrics.jsonl and, if there is one, WORKDIR/config.json, and walks the two trees of
trees.py over the last `window` training steps. A condition without enough recorded values is neither
true nor false, and findings that need it are listed as not decided. The gap rollout_corr/* is
measured before any weight, so a correction may stay on during the search for its cause.

--json writes one object:
  workdir     the folder
  steps       [first, last] training step recorded; null without any
  window      [first, last] judged step; null without any
  verdict     names of the findings without a parent that hold, else ["not enough data"]
  findings    findings that hold, in the order of the tree; each has
    name, title, advice, mistake   title: what is wrong; advice: what to do; mistake: the usual
                wrong reaction, or ""
    parent      name of the finding that this one makes precise, or null
    evidence    list of {metric, statistic, value, op, threshold, steps: [first, last], crossed,
                extreme_step}: crossed counts the steps that pass the threshold alone, extreme_step
                is the one farthest in the direction of op; both null for growth, surge and
                sigmas, which compare two windows. Facts are named config/... or run/..., or by the metric
                that they sum up over the window, or the run; their steps are null.
    changes     list of {field, value, now}: fields of configs/default.py, their new and present
                value, or the preset's where the config leaves the field open. No two findings ask
                for different values of a field: the first in the order of the trees wins
  undecided   list of {name, title, reason}
  setup       like findings, from the tree of configurations
  nans        metric that is judged -> the steps in which it is NaN
  thresholds  name -> value used
  reward_errors  list of {kind, count, error, traceback, last_at, last}: WORKDIR/reward_errors.jsonl
Numbers that are not finite are the strings "inf" and "-inf".

FILE is a log of another framework: console output, JSONL, CSV, a trainer_state.json or the output_dir with
its checkpoints, an event file of TensorBoard, a folder of these, or "-" for standard input. Text may be
.gz. Several files are read as one log. Findings that need a config are not decided. The object also has,
with the steps of that framework:
  framework, source, marks    the framework, the source of its names, the names that identify it
  kinds, rows, updates        kinds of files, steps with a value, updates of a batch that were averaged
  corrections                 like findings: what the log proves about that correction
  assumed, notes              assumptions about what is not logged, and notes on the values
  missing                     list of {metric, serves: [names of findings], switch: setting that logs it}
  unread, texts               metrics that were not read, and metrics without numbers
  nans                        metric -> the steps in which it is null, NaN or infinite
  repeated                    number of values that were logged again for a step
and evidence has `theirs`, that framework's names behind a metric.

Examples:

    python -m jaxrl_tis.doctor runs/first
    python -m jaxrl_tis.doctor train.log --from=verl --verbose
"""

import json
import pathlib
from collections.abc import Sequence

from jaxrl_tis.doctor import foreign, readers
from jaxrl_tis.doctor.case import THRESHOLDS
from jaxrl_tis.doctor.diagnose import describe, diagnose, strict
from jaxrl_tis.doctor.frameworks import FRAMEWORKS
from jaxrl_tis.runtime import cli


def _threshold(argument: str) -> tuple[str, float]:
    name, _, value = argument.partition("=")
    return name, float(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "jaxrl_tis.doctor",
        "Finds the cause of a run's off-policy drift, with evidence and the change to make.", __doc__,
    )
    parser.add_argument(
        "paths", metavar="WORKDIR|FILE", nargs="+",
        help="folder of a run, or the log of another framework",
    )
    parser.add_argument(
        "--from", dest="source", choices=("auto", *FRAMEWORKS), metavar="FRAMEWORK",
        help=f"framework of the log: auto, the default, or {', '.join(FRAMEWORKS)}",
    )
    parser.add_argument("--verbose", action="store_true", help="also list metrics that were not read")
    parser.add_argument("--json", metavar="PATH", help="also write the diagnosis here")
    parser.add_argument(
        "--threshold", metavar="NAME=VALUE", type=_threshold, action="append", default=[],
        help=f"replace a threshold: {', '.join(THRESHOLDS)}",
    )
    args = parser.parse_args(argv)
    cli.check_folder("json", args.json)
    is_foreign = args.source or len(args.paths) > 1 or readers.is_log(foreign.path_of(args.paths[0]))
    if is_foreign:
        diagnosis = foreign.diagnose(args.paths, args.source or "auto", dict(args.threshold))
    else:
        diagnosis = diagnose(args.paths[0], dict(args.threshold))
    if args.json:
        content = json.dumps(strict(diagnosis), indent=2, allow_nan=False)
        pathlib.Path(args.json).write_text(content + "\n", encoding="utf-8")
    print(foreign.describe(diagnosis, args.verbose) if is_foreign else describe(diagnosis))


if __name__ == "__main__":
    cli.run(main)
