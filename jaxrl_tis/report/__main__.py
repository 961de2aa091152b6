"""Draws one static HTML page of plots and numbers from the records of one or several runs.

The file needs no other (inline SVG, no script, nothing loaded). plots.py has the list of plots;
docs/report.md describes the page.

Examples:

    python -m jaxrl_tis.report runs/first
    python -m jaxrl_tis.report runs/first runs/second --out=page.html --png=page.png
"""

from collections.abc import Sequence

from jaxrl_tis.report import plots
from jaxrl_tis.report.page import load, write
from jaxrl_tis.runtime import cli, storage


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("jaxrl_tis.report", "Draws one HTML page from the records of runs.", __doc__)
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="folder of a run")
    parser.add_argument("--out", help="HTML file; default: report.html in the first WORKDIR")
    parser.add_argument("--png", help="also write a picture of six plots here")
    args = parser.parse_args(argv)
    print(write(args.workdirs, args.out or storage.folder(args.workdirs[0]) / "report.html"))
    if args.png:
        print(plots.write_png(load(args.workdirs), args.png))


if __name__ == "__main__":
    cli.run(main)
