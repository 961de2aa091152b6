"""Programs compiled as in a run; those of tests are not optimised, see conftest.py."""

import contextlib

import jax


@contextlib.contextmanager
def optimized():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
