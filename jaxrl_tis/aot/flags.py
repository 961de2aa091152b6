"""Flags of the TPU compiler, by chip: jaxrl_tis.aot compiles with them, and the command
jaxrl_tis.libtpu_flags prints them for a run.

Only flags that libtpu accepts and that change the program of a shipped config are here; the tests
check both. None was timed on a TPU.
"""

# A product with a weight that the partitioner gathers (a learner with 8-bit products) stays one
# product behind one gather. Otherwise it becomes a ring of partial products with the weight's
# shards. An FSDP layer then has one collective for each weight, which overlaps with the layer
# before, and compiles in a fraction of the time.
_WHOLE_GATHERS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

FLAGS = {"v4": {}, "v5e": _WHOLE_GATHERS, "v5p": {}, "v6e": {}, "tpu7x": {}}


def init_args(chip: str) -> str:
    """The value of LIBTPU_INIT_ARGS for a chip of `chips.CHIPS`."""
    return " ".join(f"--{name}={value}" for name, value in FLAGS[chip].items())
