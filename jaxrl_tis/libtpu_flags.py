"""Flags of the TPU compiler, by chip.

    export LIBTPU_INIT_ARGS="$(python -m jaxrl_tis.libtpu_flags v5e)"

Export them in the shell of a run: jaxrl_tis.aot compiles with them. Only flags that libtpu accepts
and that change the program of a shipped config are here; the tests check both. None was timed on a
TPU.
"""

import argparse

from jaxrl_tis import cli

# A product with a gathered weight stays one product behind one gather, instead of a ring of partial
# products with the weight's shards: an FSDP layer then has one collective for each weight, which
# the scheduler overlaps with the layer before, and compiles in a fraction of the time.
_WHOLE_GATHERS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

FLAGS = {"v4": {}, "v5e": _WHOLE_GATHERS, "v5p": {}, "v6e": {}, "tpu7x": {}}


def init_args(chip: str) -> str:
    """The value of LIBTPU_INIT_ARGS for a chip of `jaxrl_tis.chips.CHIPS`."""
    return " ".join(f"--{name}={value}" for name, value in FLAGS[chip].items())


def main() -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_tis.libtpu_flags",
        description="The value of LIBTPU_INIT_ARGS for a chip.",
    )
    parser.add_argument("chip", choices=FLAGS)
    print(init_args(parser.parse_args().chip))


if __name__ == "__main__":
    cli.run(main)
