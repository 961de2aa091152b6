"""Programs that run a few times on tiny batches: XLA need not optimise them."""

import contextlib

import jax


@contextlib.contextmanager
def quick():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
