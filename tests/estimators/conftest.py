"""The programs of these tests run once or twice on small batches: XLA need not optimise them."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
