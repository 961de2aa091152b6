"""What the server of the mutants' runs imports, see runner.py: libraries alone."""

import gc

import chex  # noqa: F401
import hypothesis  # noqa: F401
import jax.experimental.pallas  # noqa: F401
import matplotlib.figure  # noqa: F401
import ml_collections.config_flags  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import pytest  # noqa: F401
import tokenizers  # noqa: F401

gc.freeze()
