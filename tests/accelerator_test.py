"""benchmarks/accelerator.py without a device: parts that fail or hang, the schema, the row, the page."""

import copy
import json
import pathlib
import subprocess
import sys
import time

import jsonschema
import pytest

from benchmarks import accelerator, peaks
from docs import make_accelerators
from jaxrl_tis.aot.chips import CHIPS

SCHEMA = json.loads(accelerator.SCHEMA.read_text())
GOOD = {"error": 2e-6, "bound": 1e-3, "is_ok": True}
MEASURES = dict.fromkeys(("d_mean", "d_p99", "d_max", "dp_max", "k3"), 0.01)
WAY = {
    "seconds": {"rollout": 1.0, "score": 0.5, "update": 2.5, "step": 4.0},
    "model_flops": {"rollout": 10, "score": 20, "update": 60, "step": 90},
    "mfu": 0.25, "update_mfu": 0.4, "matrix_share": 0.5,
}
RESULTS = {
    "device": {
        "platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 1, "memory_bytes": 2**36,
        "runtime": "cuda 12090", "driver": "570.1", "processor": "AMD EPYC", "cores": 16,
        "versions": dict.fromkeys(("python", "jax", "jaxlib", "flax", "numpy"), "1.2"),
        "sizes": "full", "model": "Qwen2.5-0.5B's shape",
        "peak": {"bfloat16": 989e12, "int8": 1979e12, "memory": 3.35e12},
        "matrix_rates": {"float32": 4e14, "bfloat16": 7e14, "int8": 1e15}, "copy_rate": 2.5e12,
    },
    "correctness": {
        "logits": {"float32": GOOD, "bfloat16": GOOD | {"error": 0.01, "bound": 0.05}},
        "kernels": {"segment_reduce sum": {"kernel": "XLA"} | GOOD},
    },
    "gate": {
        name: MEASURES | {"largest": "dtype", "failures": []} for name in ("bfloat16", "W8A8")
    },
    "decode": {"tokens": 128, "rows": [
        {"format": name, "batch": batch, "tokens_per_s": 100.0 * batch, "bytes_per_token": 1e9 / batch,
         "bandwidth_share": 0.03}
        for name in ("bfloat16", "W8A8") for batch in (1, 32, 128)
    ]},
    "step": {
        "rows": 32, "prompt_tokens": 256, "new_tokens": 256, "dtype": "bfloat16",
        "matrix_rate": 7e14, "fused": WAY, "separate": WAY,
    },
    "sync": {name: {"seconds": 0.01, "bytes": 10**9} for name in ("bfloat16", "W8A8")},
    "quickstart": {"steps": 30, "seconds": 50.0, "step_seconds": 0.4, "first_accuracy": 0.3,
                   "last_accuracy": 0.4},
}


def example() -> dict:
    """A report of an H100, every number made up."""
    parts = {
        name: {"is_ok": True, "seconds": 20.0, "error": None, "result": result}
        for name, result in copy.deepcopy(RESULTS).items()
    }
    return {"schema": 1, "date": "2026-11-27", "revision": None, "machine": None, "load": 0.1,
            "seconds": 140.0, "passed": True, "parts": parts}


def with_failed(name, error="an error", result=None) -> dict:
    report = example()
    report["parts"][name] = {"is_ok": False, "seconds": 3.0, "error": error, "result": result}
    return report


# Parts in processes of their own


def python(text):
    return [sys.executable, "-c", text]


@pytest.mark.all
def test_the_last_result_of_a_part_counts():
    text = "print('noise'); print('result: {\"a\": 1}'); print('result: {\"a\": 2}')"
    found = accelerator.run_part("gate", 60, python(text))
    assert found.pop("seconds") > 0
    assert found == {"is_ok": True, "error": None, "result": {"a": 2}}


@pytest.mark.all
def test_a_part_that_fails_keeps_its_result_and_has_its_error():
    text = "print('result: {\"a\": 1}'); raise RuntimeError('out of memory')"
    found = accelerator.run_part("gate", 60, python(text))
    assert not found["is_ok"] and found["result"] == {"a": 1}
    assert found["error"].endswith("RuntimeError: out of memory")
    silent = accelerator.run_part("gate", 60, python("import sys; sys.exit(3)"))
    assert (silent["error"], silent["result"]) == ("exit code 3", None)


@pytest.mark.all
def test_a_part_that_hangs_is_stopped_with_the_run_that_it_started(tmp_path):
    alive = tmp_path / "alive"
    child = f"import pathlib, time; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    text = (f"import subprocess, sys; print('result: {{}}', flush=True); "
            f"subprocess.run([sys.executable, '-c', {child!r}])")
    found = accelerator.run_part("gate", 2, python(text))
    assert (found["is_ok"], found["error"]) == (False, "stopped after 2 s")
    assert found["seconds"] < 4
    time.sleep(3.5)
    assert not alive.exists()


def test_results_are_strict_json():
    assert json.loads(accelerator.to_json({"a": float("nan"), "b": [float("inf"), 1.0]})) == {
        "a": None, "b": [None, 1.0]}


def test_the_host_is_there_for_float64(monkeypatch):
    for given, expected in (("cuda", "cuda,cpu"), ("cpu", "cpu"), ("tpu,cpu", "tpu,cpu")):
        monkeypatch.setenv("JAX_PLATFORMS", given)
        assert accelerator.environment("cache")["JAX_PLATFORMS"] == expected
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX_PLATFORMS" not in accelerator.environment("cache")
    assert accelerator.environment("cache")["JAX_COMPILATION_CACHE_DIR"] == "cache"


@pytest.mark.all
def test_eight_minutes_and_what_a_part_leaves_to_the_next(monkeypatch):
    assert sum(accelerator.SECONDS.values()) == 480
    now, limits = [0.0], {}

    def fake(name, seconds, is_smoke):
        limits[name] = seconds
        now[0] += {"a": 4.0, "b": 26.0, "c": 0.0}[name]
        return {"is_ok": True, "seconds": 0.0, "error": None, "result": {}}

    monkeypatch.setattr(accelerator, "run_part", fake)
    monkeypatch.setattr(accelerator, "passed", lambda parts: True)
    monkeypatch.setattr(accelerator.time, "monotonic", lambda: now[0])
    accelerator.measure("", {"a": 10, "b": 20, "c": 30})
    assert limits == {"a": 10.0, "b": 26.0, "c": 30.0}  # 10; 30 - 4; 60 - 30


# What decides the exit code


def test_correctness_and_the_gate_decide():
    report = example()
    assert accelerator.passed(report["parts"])
    for name in ("device", "decode", "step", "sync", "quickstart"):
        assert accelerator.passed(with_failed(name)["parts"])
    for name in ("correctness", "gate"):
        assert not accelerator.passed(with_failed(name, result=RESULTS[name])["parts"])
    for path in (("logits", "bfloat16"), ("kernels", "segment_reduce sum")):
        report = example()
        report["parts"]["correctness"]["result"][path[0]][path[1]]["is_ok"] = False
        assert not accelerator.passed(report["parts"])
    report = example()
    report["parts"]["gate"]["result"]["W8A8"]["failures"] = ["k3 0.1 is not within 0.002"]
    assert not accelerator.passed(report["parts"])


@pytest.mark.parametrize("has_passed", [True, False])
def test_the_exit_code_and_the_files(has_passed, monkeypatch, tmp_path, capsys):
    report = example() | {"passed": has_passed}
    monkeypatch.setattr(accelerator, "measure", lambda machine, **_: report)
    monkeypatch.setattr(sys, "argv", ["accelerator", f"--json={tmp_path}/a.json"])
    with pytest.raises(SystemExit) as end:
        accelerator.main()
    assert end.value.code == (0 if has_passed else 1)
    assert json.loads((tmp_path / "a.json").read_text()) == report
    assert capsys.readouterr().out == accelerator.row(report) + "\n"
    monkeypatch.setattr(sys, "argv", ["accelerator", f"--row={tmp_path}/a.json"])
    accelerator.main()
    assert capsys.readouterr().out == accelerator.row(report) + "\n"


# The schema


def errors(report):
    return [e.json_path for e in jsonschema.Draft202012Validator(SCHEMA).iter_errors(report)]


def test_the_schema_takes_reports_and_failed_parts():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SCHEMA["properties"]["parts"]["properties"]) == list(accelerator.SECONDS)
    assert errors(example()) == []
    for name in RESULTS:
        assert errors(with_failed(name)) == errors(with_failed(name, result={"a": 1})) == []


def paths(tree, path=()):
    for key, x in tree.items():
        yield (*path, key)
        if isinstance(x, dict):
            yield from paths(x, (*path, key))


def test_every_field_is_required_and_no_other_is_allowed():
    fields = [p for p in paths(example()) if "kernels" not in p[:-1]]
    assert len(fields) > 100
    for *path, last in fields:
        for change in (lambda at, key: at.pop(key), lambda at, key: at.update(other=1)):
            at = report = example()
            for key in path:
                at = at[key]
            change(at, last)
            assert errors(report), (path, last)


@pytest.mark.parametrize("path", sorted(make_accelerators.FOLDER.glob("*.json")), ids=lambda p: p.name)
def test_a_stored_report_has_the_schema(path):
    assert errors(json.loads(path.read_text())) == []


# The row and the page


def test_the_row_by_hand():
    assert accelerator.row(example()) == (
        "| NVIDIA H100 80GB HBM3, 2026-11-27 | `full` | 2e-06, 1e-02 | 1 of 1 | passes, passes "
        "| 100, 3,200, 12,800 | 100, 3,200, 12,800 | 4.00, 4.00 | 25%, 25% | 10.0, 10.0 | 50 |"
    )


def test_a_failed_part_and_an_unknown_device_in_the_row():
    report = with_failed("decode")
    for way in ("fused", "separate"):
        report["parts"]["step"]["result"][way]["mfu"] = None
    cells = dict(zip(accelerator.COLUMNS, accelerator.row(report)[2:-2].split(" | "), strict=True))
    assert cells["decode W8A8"] == cells["decode bfloat16"] == "failed"
    assert cells["MFU"] == "" and cells["step"] == "4.00, 4.00"


def test_the_name_of_a_machine():
    assert accelerator.name_of(example() | {"machine": "a", "load": 2.0}) == "a, beside other work"
    assert accelerator.name_of(with_failed("device")) == "unknown device"
    report = example()
    report["parts"]["device"]["result"]["platform"] = "cpu"
    assert accelerator.name_of(report) == "16 cores of AMD EPYC"


def test_the_page_is_current():
    assert make_accelerators.PAGE.read_text(encoding="utf-8") == make_accelerators.page()


def test_figures_of_other_sizes_are_in_other_tables(monkeypatch):
    small = example() | {"machine": "a laptop"}
    small["parts"]["device"]["result"]["sizes"] = "cpu"
    large = with_failed("sync", "ValueError: no memory")
    monkeypatch.setattr(make_accelerators, "reports", lambda: [large, small, with_failed("device")])
    _, cpus, chips, others = make_accelerators.page().split("\n## ")
    assert "a laptop" in cpus and "H100" not in cpus.split("###")[0]
    assert "NVIDIA H100" in chips and "a laptop" not in chips
    assert "| `sync` | ValueError: no memory |" in chips
    assert "| W8A8 | 1000.00, 31.25, 7.81 | 3%, 3%, 3% |" in chips
    assert "Kernel nearest to its bound: segment_reduce sum (2.0e-06 of 1e-03).\n" in chips
    assert "unknown device" in others
    kernels = small["parts"]["correctness"]["result"]["kernels"]
    kernels["dot W8A8"] = {"kernel": "XLA", "error": None, "bound": 0.03, "is_ok": False}
    assert "Kernels above their bound: dot W8A8 (" in make_accelerators.details(small)
    monkeypatch.setattr(make_accelerators, "reports", lambda: [small])
    assert "none to borrow" in make_accelerators.page()


def test_peaks_are_those_of_the_chips():
    for name, kind in {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.items():
        assert peaks.PEAKS[name] == (CHIPS[kind].bf16_rate, CHIPS[kind].int8_rate, CHIPS[kind].hbm_rate)
    assert peaks.PEAKS["TPU7x"].memory == 3.69e12  # jax shows two devices for a chip
    assert peaks.share(5.0, 20.0) == 0.25 and peaks.share(5.0, None) is None


@pytest.mark.all
def test_the_launcher_runs_the_benchmark_and_writes_the_page(tmp_path):
    """With stand-ins for the interpreter and the installation."""
    root = pathlib.Path(__file__).parents[1]
    (tmp_path / "launch").mkdir()
    (tmp_path / "docs" / "accelerators").mkdir(parents=True)
    (tmp_path / "launch" / "accelerator.sh").write_text((root / "launch" / "accelerator.sh").read_text())
    (tmp_path / "launch" / "venv.sh").write_text(
        'prepare_venv() { echo "extra: $1"; PY=./python; }\n')
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho "$@"\ncase "$*" in *--json=*) touch docs/accelerators/h100.json; exit 1;; esac\n')
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(["bash", "launch/accelerator.sh", "h100", "--smoke"], cwd=tmp_path, capture_output=True,
                          text=True, env={"PATH": "/usr/bin:/bin", "EXTRA": "cuda13"})
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "extra: cuda13", "-m benchmarks.accelerator --json=docs/accelerators/h100.json --smoke",
        "docs/make_accelerators.py",
    ]
