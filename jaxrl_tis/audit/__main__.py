"""Measures the gap of sampler and learner in a dump of any trainer, and the effect of each correction.

DUMP is a .jsonl, .jsonl.gz or .npz file of token log-probs, perhaps with the routes of a mixture of experts;
docs/audit.md has its columns, recipes that write
it from other frameworks, and the meaning of every number. Needs no model and no accelerator. A dump
with a malformed line is refused with exit code 2; the message names line and column.

Examples:

    python -m jaxrl_tis.audit dump.jsonl
    python -m jaxrl_tis.audit dump.npz --columns=logp_old=old_log_probs --html=audit.html
    python -m jaxrl_tis.audit dump.jsonl --num_experts=128 --routes_shape=48,8
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


def _shape(argument: str) -> tuple[int, int]:
    try:
        layers, chosen = (int(x) for x in argument.split(","))
    except ValueError:
        layers = chosen = 0
    if min(layers, chosen) < 1:
        raise argparse.ArgumentTypeError(
            f"{argument!r} is not LAYERS,K; write it as in 48,8: 48 layers, 8 experts per token"
        )
    return layers, chosen


def _count(argument: str) -> int:
    if not argument.isdecimal() or int(argument) < 1:
        raise argparse.ArgumentTypeError(f"{argument!r} is not a whole number from 1")
    return int(argument)


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
    parser.add_argument("--num_experts", metavar="E", type=_count,
                        help="experts of a router; default: the largest id of the routes, plus 1")
    parser.add_argument("--routes_shape", metavar="LAYERS,K", type=_shape,
                        help="shape of a row of routes in base64 that does not state it (SGLang)")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers here")
    parser.add_argument("--html", metavar="FILE", help="also write a page of plots here")
    args = parser.parse_args(argv)
    for flag in ("json", "html"):
        cli.check_folder(flag, getattr(args, flag))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        doctor = pool.submit(_doctor)
        read = dump.read(args.dump, args.columns, args.routes_shape)
        report = measure.measure(read, args.current_version, args.num_experts)
    report["doctor"] = doctor.result().verdict(report)
    print(table.text(report))
    if args.json:
        pathlib.Path(args.json).write_text(measure.to_json(report), encoding="utf-8")
    if args.html:
        from jaxrl_tis.audit import page

        pathlib.Path(args.html).write_text(page.page(report), encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
