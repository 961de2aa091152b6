"""Every test sees eight simulated CPU devices; rank promotion is an error.

Programs here run a few times on tiny arrays: XLA need not optimise them, its older emitters write
less code for LLVM (half the seconds), and equal ones are compiled once for all processes, in the
cache that launch/venv.sh names. OPTIMIZED=1 compiles as a run does; what is proven bit by bit is
compiled so always, by `compilation.optimized`.
"""

import functools
import gc
import os
import pathlib

from tests import compilation, threaded

pytest_plugins = ("tests.budget", "tests.runs")

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices share the cores with the other worker: one may be late for a collective by more
# than the 40 s after which XLA ends the process.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)
if "OPTIMIZED" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    FLAGS += ("--xla_cpu_parallel_codegen_split_count=1", *compilation.QUICK_FLAGS)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

CACHE = pathlib.Path(__file__).parents[1] / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax  # noqa: E402  (the environment above must be set first)
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

# A new context for every program takes longer than lowering a small one.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)
jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(100_000, 20, 20)  # tracing makes many objects, few of them garbage


def pytest_itemcollected(item):
    """The cases that a marker `cases` does not name are marked `all`."""
    cases = item.get_closest_marker("cases")
    if cases and item.callspec.id not in cases.args:
        item.add_marker("all")


@pytest.fixture(scope="module", autouse=True)
def _programs(request):
    """Every program on CPU maps memory, of which a process may have 65,530 pieces; then the
    compiler crashes. The compiler of TPU programs cannot read what it wrote into the cache."""
    jax.config.update("jax_enable_compilation_cache", not hasattr(request.module, "tpu"))
    compilation_cache.reset_cache()
    yield
    jax.clear_caches()


@pytest.fixture
def optimized():
    with compilation.optimized():
        yield


@pytest.fixture
def in_threads():
    """Rewards, templates and environments need no process of their own."""
    with threaded.children():
        yield
