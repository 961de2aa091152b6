"""Flags of the TPU compiler for each chip.

jaxrl_tis.aot compiles with these flags, and jaxrl_tis.libtpu_flags prints them for a run. Each flag
is accepted by libtpu and changes the program of a shipped config, which tests check. None was timed
on a TPU.
"""

# A product with a weight that the partitioner gathers (a learner with 8-bit products) stays one
# product behind one gather. Otherwise it becomes a ring of partial products with the weight's
# shards. An FSDP layer then has one collective for each weight, which overlaps with the layer
# before, and compiles in a fraction of the time.
_WHOLE_GATHERS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

FLAGS = {"v4": {}, "v5e": _WHOLE_GATHERS, "v5p": {}, "v6e": {}, "tpu7x": {}}


def init_args(chip: str) -> str:
    """Returns the value of LIBTPU_INIT_ARGS for a chip of `chips.CHIPS`."""
    return " ".join(f"--{name}={value}" for name, value in FLAGS[chip].items())
