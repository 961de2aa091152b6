"""Overheads of a run: compile time, start time, peak memory."""

import resource
import time

import jax

STARTED = time.monotonic()
GIB = 2**30
COMPILING = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration",
)
_compiled = [0.0]


def _listen(event: str, duration_secs: float, **_) -> None:
    if event in COMPILING:
        _compiled[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


def compile_seconds() -> float:
    """Returns the seconds that this process spent lowering and compiling programs, or reading them
    from the cache."""
    return _compiled[0]


def seconds_since_start() -> float:
    """Returns the seconds since this program was loaded."""
    return time.monotonic() - STARTED


def memory() -> dict[str, float]:
    """Returns the peak memory of this process and, if devices report it, of one device, in GiB."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    device = {"time/device_peak_gib": max(peaks) / GIB} if peaks else {}
    return {"time/host_peak_gib": host / GIB} | device
