"""Programs compiled as in a run; those of tests are not optimised, see conftest.py."""

import contextlib
from importlib import metadata
from unittest import mock

# Later versions of XLA have no other emitters.
HAS_OLD_EMITTERS = metadata.version("jaxlib").startswith("0.10.")
EMITTERS = "xla_cpu_use_fusion_emitters"
QUICK_FLAGS = (f"--{EMITTERS}=false",) if HAS_OLD_EMITTERS else ()
# For a program that runs for longer than it compiles.
OPTIMIZED = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
EMITTED_AS_IN_A_RUN = {EMITTERS: True} if HAS_OLD_EMITTERS else {}  # compiler options


@contextlib.contextmanager
def optimized():
    """For programs of invariant numerics, whose options are given with each."""
    import jax  # after conftest.py has set its environment

    from jaxrl_tis.kernels import tiles

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        with mock.patch.dict(tiles.COMPILER_OPTIONS, EMITTED_AS_IN_A_RUN):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
