"""Races between the cores and the copies of a TPU kernel that is interpreted."""

import contextlib
import io

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

# A copy takes a place in the clocks by chance; races of two that share one are not seen.
DETECTED = dict(detect_races=True, vector_clock_size=1024)


@contextlib.contextmanager
def none():
    """AssertionError if the interpreter finds a race in what runs inside: jax 0.10 prints it, 0.12
    raises it in the program and again in the next one, unless the first is waited for."""
    np.random.seed(0)  # of the places in the clocks
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except jax.errors.JaxRuntimeError as error:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.effects_barrier()
        pltpu.reset_tpu_interpret_mode_state()
        if "RACE DETECTED" not in str(error):
            raise
        printed.write(str(error))
    assert "RACE DETECTED" not in printed.getvalue(), "the kernel races"
