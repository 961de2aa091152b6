"""Checks and measures the package on one device in at most eight minutes (docs/accelerators.md).

    ./launch/accelerator.sh [NAME]
    python -m benchmarks.accelerator --json=docs/accelerators/NAME.json

Parts: the device and its rates; logits and kernels against float64; the gate of bfloat16 and W8A8
samplers; decode; a GRPO step; a weight sync; 30 steps of the quickstart. Each part is a process of
its own, and a part that fails or is stopped does not end the others. A part may use the seconds that
earlier parts left of their share. Nothing is downloaded. A CPU gets smaller sizes (`sizes` in
benchmarks/accelerator_parts.py). The exit code is 1 if logits, kernels or the gate failed, 0
otherwise.

Examples:

    python -m benchmarks.accelerator --json=h100.json --machine="one NVIDIA H100"
    python -m benchmarks.accelerator --row=h100.json
"""

import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import arguments
from jaxrl_tis.record import provenance
from jaxrl_tis.runtime import cli

# Part -> its share of the eight minutes, seconds.
SECONDS = {
    "device": 30, "correctness": 130, "gate": 80, "decode": 80, "step": 80, "sync": 20,
    "quickstart": 60,
}
SCHEMA = pathlib.Path(__file__).with_name("accelerator_schema.json")
MARK = "result: "  # begins a line of a part's output
LONGEST_ERROR = 2000  # characters
IDLE_LOAD = 0.5  # processes that wait for a core at the start; above it the page says so
COLUMNS = (
    "machine", "sizes", "logits", "kernels", "gate", "decode W8A8", "decode bfloat16", "step",
    "MFU", "sync", "quickstart",
)


def measure_part(name: str, is_smoke: bool = False) -> None:
    """Prints the results of a part, one line of JSON each."""
    from benchmarks import accelerator_parts  # imports jax, for which the parent has no use

    for result in accelerator_parts.PARTS[name](accelerator_parts.sizes(is_smoke)):
        print(MARK + to_json(result), flush=True)


def to_json(result: dict[str, Any]) -> str:
    """Returns a result as strict JSON, with null for NaN and infinities."""
    strict = json.loads(json.dumps(result), parse_constant=lambda _: None)
    return json.dumps(strict, allow_nan=False)


def run_part(
    name: str, seconds: float, command: list[str] | None = None, is_smoke: bool = False
) -> dict[str, Any]:
    """Runs a part for at most so many seconds.

    Returns {is_ok, seconds, error, result}: `result` is the last one that the part printed, None
    without any; `error` is None if the part ended.
    """
    own = [sys.executable, "-m", "benchmarks.accelerator", f"--part={name}"]
    command = command or own + ["--smoke"] * is_smoke
    start, error = time.monotonic(), None
    with (
        tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
    ):
        process = subprocess.Popen(
            command, stdout=out, stderr=log, env=environment(cache), start_new_session=True
        )
        try:
            if process.wait(max(seconds, 0)):
                log.seek(0)
                error = log.read().strip()[-LONGEST_ERROR:] or f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the run that it started
                process.wait()
        out.seek(0)
        results = [line for line in out.read().splitlines() if line.startswith(MARK)]
    result = json.loads(results[-1].removeprefix(MARK)) if results else None
    return {
        "is_ok": error is None, "seconds": time.monotonic() - start, "error": error,
        "result": result,
    }


def environment(cache: str) -> dict[str, str]:
    """Returns the environment of a part. The host computes the float64 results, and so jax also needs
    its CPU backend. A part keeps its compiled programs in the folder `cache`, and so it compiles an
    equal one only once."""
    own = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        own["JAX_PLATFORMS"] = f"{platforms},cpu"
    return os.environ | own


def passed(parts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether logits, kernels and the gate ended and are within their bounds."""
    checks, gate = parts["correctness"], parts["gate"]
    if not (checks["is_ok"] and gate["is_ok"]):
        return False
    compared = [*checks["result"]["logits"].values(), *checks["result"]["kernels"].values()]
    failures = [x for measured in gate["result"].values() for x in measured["failures"]]
    return all(x["is_ok"] for x in compared) and not failures


def measure(
    machine: str, shares: Mapping[str, float] = SECONDS, is_smoke: bool = False
) -> dict[str, Any]:
    """Returns the report of all parts, which benchmarks/accelerator_schema.json describes."""
    load, start, due, parts = os.getloadavg()[0], time.monotonic(), 0.0, {}
    for name, share in shares.items():
        due += share
        arguments.say(f"{name}: at most {due - (time.monotonic() - start):.0f} s")
        parts[name] = run_part(name, due - (time.monotonic() - start), is_smoke=is_smoke)
        state = "done" if parts[name]["is_ok"] else f"failed: {parts[name]['error']}"
        print(f"{name}: {parts[name]['seconds']:.0f} s, {state}", flush=True)
    return {
        "schema": 1, "date": datetime.date.today().isoformat(),
        "revision": provenance.git_revision(), "machine": machine or None, "load": load,
        "seconds": time.monotonic() - start, "passed": passed(parts), "parts": parts,
    }


def name_of(report: Mapping[str, Any]) -> str:
    """Returns the machine as the page names it."""
    found = report["parts"]["device"]["result"]
    if report["machine"]:
        name = report["machine"]
    elif found is None:
        name = "unknown device"
    elif found["platform"] == "cpu":
        name = f"{found['cores']} cores of {found['processor']}"
    else:
        name = found["kind"]
    return name + (", beside other work" if report["load"] > IDLE_LOAD else "")


def number(x: float | None, form: str) -> str:
    """Returns a number as text; null stands for one that is not finite."""
    return "not finite" if x is None else format(x, form)


def row(report: Mapping[str, Any]) -> str:
    """Returns the Markdown row of a report, with the columns COLUMNS."""
    parts = report["parts"]
    results = {name: parts[name]["result"] for name in parts if parts[name]["is_ok"]}
    shown = dict.fromkeys(COLUMNS, "failed")
    shown["machine"] = f"{name_of(report)}, {report['date']}"
    if found := results.get("device"):
        shown["sizes"] = f"`{found['sizes']}`"
    if found := results.get("correctness"):
        shown["logits"] = ", ".join(number(x["error"], ".0e") for x in found["logits"].values())
        good = sum(x["is_ok"] for x in found["kernels"].values())
        shown["kernels"] = f"{good} of {len(found['kernels'])}"
    if found := results.get("gate"):
        shown["gate"] = ", ".join(
            "passes" if not x["failures"] else "fails" for x in found.values()
        )
    if found := results.get("decode"):
        for name in ("W8A8", "bfloat16"):
            rates = [x["tokens_per_s"] for x in found["rows"] if x["format"] == name]
            shown[f"decode {name}"] = ", ".join(f"{rate:,.0f}" for rate in rates)
    if found := results.get("step"):
        ways = found["fused"], found["separate"]
        shown["step"] = ", ".join(f"{x['seconds']['step']:.2f}" for x in ways)
        known = [x["mfu"] for x in ways if x["mfu"] is not None]
        shown["MFU"] = ", ".join(f"{x:.0%}" for x in known)
    if found := results.get("sync"):
        shown["sync"] = ", ".join(f"{1e3 * x['seconds']:.1f}" for x in found.values())
    if found := results.get("quickstart"):
        shown["quickstart"] = f"{found['seconds']:.0f}"
    return f"| {' | '.join(shown[name] for name in COLUMNS)} |"


def main() -> None:
    parser = cli.parser("benchmarks.accelerator", __doc__.partition("\n")[0], __doc__)
    parser.add_argument("--json", default="", help="file for the report")
    parser.add_argument("--machine", default="", help="name for the page; default: the device's")
    parser.add_argument("--row", default="", help="print the row of this report; measure nothing")
    parser.add_argument("--part", choices=SECONDS, help="measure this part in this process")
    given = arguments.parse(parser)
    if given.part:
        return measure_part(given.part, given.smoke)
    if given.row:
        return print(row(json.loads(pathlib.Path(given.row).read_text())))
    cli.check_folder("json", given.json)
    report = measure(given.machine, is_smoke=given.smoke)
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    print(row(report))
    sys.exit(int(not report["passed"]))


if __name__ == "__main__":
    cli.run(main)
