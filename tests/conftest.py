"""Every test sees eight simulated CPU devices; rank promotion is an error."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices share the cores with the other worker: one may be late for a collective by more
# than the 40 s after which XLA ends the process.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax  # noqa: E402  (the environment above must be set first)
import pytest  # noqa: E402

from tests import compilation  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs():
    """Every program on CPU maps memory, of which a process may have 65,530 pieces; then the
    compiler crashes."""
    yield
    jax.clear_caches()


@pytest.fixture
def quick_compilation():
    with compilation.quick():
        yield
