"""Which cause of off-policy drift the record of a run points to, the evidence, and what to change.

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
                is the one farthest in the direction of op; both null for growth, surge and
                sigmas, which compare two windows. Facts are named config/... or run/..., or by the metric
                that they sum up over the window, or the run; their steps are null.
    changes     list of {field, value, now}: fields of configs/default.py, their new and present
                value, a preset's where the config leaves the field to it; no two findings
                ask for two values of one field, the first in the order of the trees is heard
  undecided   list of {name, title, reason}
  setup       like findings, from the tree of configurations
  nans        metric that is judged -> the steps in which it is NaN
  thresholds  name -> value used
  reward_errors  list of {kind, count, error, traceback, last_at, last}: WORKDIR/reward_errors.jsonl
Numbers that are not finite are the strings "inf" and "-inf".

FILE is a log of another framework: what it printed, JSONL, CSV, a trainer_state.json or the output_dir with
its checkpoints, an event file of TensorBoard, a folder of these, "-" for standard input; text may be .gz.
Several are read as one. Without a config, what hangs on it is not decided. The
object has besides, and `steps` are theirs:
  framework, source, marks    whose it was taken for, whose files the names are from, and what told it
  kinds, rows, updates        kinds of files, steps with a value, updates of a batch that were averaged
  corrections                 like findings: what the record proves about their correction
  assumed, notes              where the record is silent, and what to know of its values
  missing                     list of {metric, serves: [names of findings], switch: their setting}
  unread, texts               names that were not read, and those whose values are no numbers
  nans                        their name -> the steps in which it is null, NaN or infinite
  repeated                    values that were logged again for a step
and evidence has `theirs`, the names that a metric was made of.

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
        "The cause of a run's off-policy drift, the evidence and what to change.", __doc__,
    )
    parser.add_argument(
        "paths", metavar="WORKDIR|FILE", nargs="+",
        help="folder of a run, or the log of another framework",
    )
    parser.add_argument(
        "--from", dest="source", choices=("auto", *FRAMEWORKS), metavar="FRAMEWORK",
        help=f"whose log it is: auto, as for any file, or {', '.join(FRAMEWORKS)}",
    )
    parser.add_argument("--verbose", action="store_true", help="also list names that were not read")
    parser.add_argument("--json", metavar="PATH", help="also write the diagnosis here")
    parser.add_argument(
        "--threshold", metavar="NAME=VALUE", type=_threshold, action="append", default=[],
        help=f"replaces one of {', '.join(THRESHOLDS)}",
    )
    args = parser.parse_args(argv)
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
