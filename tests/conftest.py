"""Every test sees eight simulated CPU devices; rank promotion is an error."""

import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax  # noqa: E402  (the environment above must be set first)
import pytest  # noqa: E402

from tests import compilation  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir", str(pathlib.Path(tempfile.gettempdir()) / "jaxrl_tis_jit_cache")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture
def quick_compilation():
    with compilation.quick():
        yield


@pytest.fixture(scope="module")
def no_cache_of_programs():
    """For programs of devices that are not there to load them on."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
