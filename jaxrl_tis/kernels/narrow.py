"""Pallas calls that also work with JAX_ENABLE_X64."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def pallas_call(*args, **kwargs) -> Callable:
    """Returns `pl.pallas_call` traced without 64-bit types, which TPU kernels do not have.

    With JAX_ENABLE_X64 every Python int of an index map or a loop would be 64-bit. int64 arguments
    are ids and become int32.
    """
    call = pl.pallas_call(*args, **kwargs)

    def run(*arrays: jax.Array):
        with jax.enable_x64(False):
            return call(*(x.astype(jnp.int32) if x.dtype == jnp.int64 else x for x in arrays))

    return run
