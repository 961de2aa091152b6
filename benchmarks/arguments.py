"""The flag `--smoke` of every benchmark, and the lines that say what a benchmark is doing."""

import argparse
import sys
from typing import Any


def parse(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Returns the command line's arguments; the parser gets the flag --smoke.

    Args:
      smoke: values of the parser's arguments with --smoke, so small that every part runs in
        seconds. They take precedence over the command line: a published command with --smoke is
        small, whatever its sizes.

    Raises:
      ValueError: the parser has no argument of such a name.
    """
    parser.add_argument(
        "--smoke", action="store_true",
        help="sizes with which every part runs once in seconds; its figures mean nothing",
    )
    args = parser.parse_args()
    if unknown := sorted(set(smoke) - set(vars(args))):
        raise ValueError(f"--smoke sets {', '.join(unknown)}, which {parser.prog} has not")
    if args.smoke:
        vars(args).update(smoke)
    return args


def say(text: str) -> None:
    """Prints what comes next, on stderr: tables on stdout stay whole."""
    print(f"  {text}", file=sys.stderr, flush=True)
