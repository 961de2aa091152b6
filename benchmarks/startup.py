"""Measures the seconds to a run's first step, with an empty and a full compilation cache.

    python -m benchmarks.startup [--config=configs/quickstart.py] [--rounds=3]

Each round starts the run in a new folder and ends it after the first step is recorded. Imports, the
supervised steps of the warm-up and the evaluation at step 0 come before it. The first round fills
the cache. "compiled" counts programs missing in the cache.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import arguments
from jaxrl_tis.record import metrics
from jaxrl_tis.runtime import cli

# Counts programs, and prints what it has counted when the record has its first step.
RUN = """
import collections
import jax
from jaxrl_tis import cli_flags, main
from jaxrl_tis.record import metrics

seen, seconds = collections.Counter(), collections.Counter()
kinds = {"jaxpr_trace_duration": "trace", "jaxpr_to_mlir_module_duration": "lower",
         "backend_compile_duration": "compile or load"}

def took(event, s, **_):
    if (kind := kinds.get(event.rpartition("/")[2])):
        seconds[kind] += s
        seen["programs"] += kind == "compile or load"

def happened(event, **_):
    seen["loaded"] += event.endswith("cache_hits")

jax.monitoring.register_event_duration_secs_listener(took)
jax.monitoring.register_event_listener(happened)
write = metrics.MetricsWriter.write

def write_and_tell(self, step, phase, values):
    write(self, step, phase, values)
    if phase == "train":
        parts = ", ".join(f"{kind} {s:.1f} s" for kind, s in seconds.items())
        print(f"{parts}; {seen['programs'] - seen['loaded']} of {seen['programs']} programs compiled")

metrics.MetricsWriter.write = write_and_tell
cli_flags.run(main.main, required=["config", "workdir"])
"""


def phases(record: pathlib.Path) -> set[str]:
    return {line["phase"] for line in metrics.read(record.parent)} if record.exists() else set()


def first_step(config: str, folder: pathlib.Path, cache: pathlib.Path) -> tuple[dict[str, float], str]:
    """Runs until the first step is done.

    Returns ({phase: seconds from the start of the process to its first line in the record}, the
    run's output about its programs).
    """
    arguments = [f"--config={config}", f"--workdir={folder}"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    log, found, start = folder.with_suffix(".log"), {}, time.monotonic()
    with open(log, "w") as out:
        process = subprocess.Popen([sys.executable, "-c", RUN, *arguments], env=environment,
                                   stdout=out, stderr=subprocess.STDOUT)
        try:
            while "train" not in found:
                if process.poll() is not None:
                    raise RuntimeError(log.read_text()[-3000:])
                time.sleep(0.05)
                for phase in phases(folder / metrics.FILE_NAME) - set(found):
                    found[phase] = time.monotonic() - start
            time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
    [told] = [line for line in log.read_text().splitlines() if "programs compiled" in line][:1]
    return found, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with a full cache")
    args = arguments.parse(parser, config="tests/small_run.py", rounds=1)
    full = []
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        for number in range(args.rounds + 1):
            arguments.say("a run to its first step")
            found, told = first_step(args.config, folder / f"run{number}", folder / "cache")
            parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in found.items())
            print(f"{'full' if number else 'empty'} cache: {parts}; {told}", flush=True)
            if number:
                full.append(found["train"])
    if full:
        print(f"first step with a full cache: median {statistics.median(full):.1f} s")


if __name__ == "__main__":
    cli.run(main)
