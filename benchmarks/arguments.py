"""The flag `--smoke` of every benchmark, its processes, and the lines that say what it is doing."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


def result(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a module in a process of its own, and returns the JSON in the last line that it prints. If
    it fails, its reason is on stderr, and this process ends too."""
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"python -m {' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def say(text: str) -> None:
    """Prints what comes next, on stderr: tables on stdout stay whole."""
    print(f"  {text}", file=sys.stderr, flush=True)
