"""Measures the gap of sampler and learner in a dump of any trainer, and the effect of each correction.

DUMP is a .jsonl, .jsonl.gz or .npz file of token log-probs; docs/audit.md has its columns, recipes that write
it from other frameworks, and the meaning of every number. Needs no model and no accelerator. A dump
with a malformed line is refused with exit code 2; the message names line and column.

Examples:

    python -m jaxrl_tis.audit dump.jsonl
    python -m jaxrl_tis.audit dump.npz --columns=logp_old=old_log_probs --html=audit.html
"""

import argparse
import concurrent.futures
import pathlib
import types
from collections.abc import Sequence

from jaxrl_tis.audit import dump, measure, table
from jaxrl_tis.runtime import cli


def _renamed(argument: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in argument.split(",")]
    if not all(ours and theirs for ours, _, theirs in pairs):
        raise argparse.ArgumentTypeError(
            f"{argument!r} is not OURS=THEIRS,...; write it as in logp_old=old_log_probs"
        )
    return {ours: theirs for ours, _, theirs in pairs}


def _doctor() -> types.ModuleType:
    """Imports the doctor, which knows all of the package, while the dump is measured."""
    from jaxrl_tis.audit import verdict

    return verdict


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "jaxrl_tis.audit",
        "Measures the gap of sampler and learner in a dump, and the effect of each correction.", __doc__,
    )
    parser.add_argument("dump", metavar="DUMP", help=".jsonl, .jsonl.gz or .npz file")
    parser.add_argument("--columns", metavar="OURS=THEIRS,...", type=_renamed, default={},
                        help="names of the columns in the file")
    parser.add_argument("--current_version", metavar="N", type=int,
                        help="version of the learner's weights; default: the newest in the dump")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers here")
    parser.add_argument("--html", metavar="FILE", help="also write a page of plots here")
    args = parser.parse_args(argv)
    for flag in ("json", "html"):
        cli.check_folder(flag, getattr(args, flag))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        doctor = pool.submit(_doctor)
        report = measure.measure(dump.read(args.dump, args.columns), args.current_version)
    report["doctor"] = doctor.result().verdict(report)
    print(table.text(report))
    if args.json:
        pathlib.Path(args.json).write_text(measure.to_json(report), encoding="utf-8")
    if args.html:
        from jaxrl_tis.audit import page

        pathlib.Path(args.html).write_text(page.page(report), encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
