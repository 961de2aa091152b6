"""A pytest plugin that counts compilations: `-p tests.compile_log`, see tests/profile.sh.

Each process appends a line for every test to $COMPILE_LOG: what the test took with its fixtures,
and how much of it was tracing and compiling. `python -m tests.compile_log FILE` draws the table by
test file, and names the tests that belong under the marker `compiles` but do not have it.
"""

import collections
import json
import os
import sys
import time

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
COLUMNS = ("seconds", "cpu", "tests", "programs", "trace", "lower", "compile")
HEAVY_S = 3.0  # of tracing and compiling in one test

_totals = collections.Counter()
_now = time.monotonic  # some tests replace it
_started = [0.0, 0.0]


def _count(event: str, seconds: float, **_) -> None:
    if event in EVENTS:
        _totals[EVENTS[event]] += seconds
        _totals["programs"] += EVENTS[event] == "compile"


def pytest_configure(config) -> None:
    import jax

    jax.monitoring.register_event_duration_secs_listener(_count)


def pytest_runtest_setup(item) -> None:
    _totals.clear()
    _started[:] = _now(), time.process_time()


def pytest_runtest_teardown(item, nextitem) -> None:
    line = {
        "test": item.nodeid, "seconds": _now() - _started[0],
        "cpu": time.process_time() - _started[1],
        "is_marked": item.get_closest_marker("compiles") is not None, **_totals,
    }
    with open(os.environ["COMPILE_LOG"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def table(lines: list[dict]) -> str:
    """Rows by test file, the slowest first."""
    files = collections.defaultdict(collections.Counter)
    for line in lines:
        counts = files[line["test"].split("::")[0]]
        counts["tests"] += 1
        counts.update({name: x for name, x in line.items() if name in COLUMNS})
    rows = [f"{'file':50}" + "".join(f"{name:>10}" for name in COLUMNS)]
    total = sum(files.values(), collections.Counter())
    ordered = sorted(files.items(), key=lambda pair: -pair[1]["seconds"])
    for name, counts in (*ordered, ("all", total)):
        rows.append(f"{name:50}" + "".join(f"{counts[column]:10.0f}" for column in COLUMNS))
    return "\n".join(rows)


def unmarked(lines: list[dict]) -> list[str]:
    """Tests that trace and compile long without the marker `compiles`."""
    spent = lambda line: sum(line.get(kind, 0.0) for kind in EVENTS.values())
    return [line["test"] for line in lines if not line["is_marked"] and spent(line) > HEAVY_S]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as log:
        found = [json.loads(line) for line in log]
    print(table(found))
    print(f"\nmore than {HEAVY_S} s of compiling, but not marked:", *unmarked(found), sep="\n  ")
