"""Prints the flags of the TPU compiler for the shell of a run.

Examples:

    python -m jaxrl_tis.libtpu_flags v5e
    export LIBTPU_INIT_ARGS="$(python -m jaxrl_tis.libtpu_flags v5p)"
"""

from jaxrl_tis.aot.flags import FLAGS, init_args
from jaxrl_tis.runtime import cli


def main() -> None:
    """Command line: see the top of the file."""
    parser = cli.parser(
        "jaxrl_tis.libtpu_flags", "Prints the value of LIBTPU_INIT_ARGS for a chip.", __doc__
    )
    parser.add_argument("chip", choices=FLAGS)
    print(init_args(parser.parse_args().chip))


if __name__ == "__main__":
    cli.run(main)
