"""Draws one static HTML page of plots and numbers from the records of one or several runs.

    python -m jaxrl_tis.report WORKDIR [WORKDIR ...] [--out FILE] [--png FILE]

The file needs no other (inline SVG, no script, nothing loaded). plots.py has the list of plots;
docs/report.md describes the page.
"""

import argparse
from collections.abc import Sequence

from jaxrl_tis.report import plots
from jaxrl_tis.report.page import load, write
from jaxrl_tis.runtime import cli, storage


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_tis.report",
                                     description="Draws one HTML page from the records of runs.")
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="folder of a run")
    parser.add_argument("--out", help="HTML file; default: report.html in the first WORKDIR")
    parser.add_argument("--png", help="also write a picture of six plots here")
    args = parser.parse_args(argv)
    print(write(args.workdirs, args.out or storage.folder(args.workdirs[0]) / "report.html"))
    if args.png:
        print(plots.write_png(load(args.workdirs), args.png))


if __name__ == "__main__":
    cli.run(main)
