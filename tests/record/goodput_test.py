import time

import jax
import jax.numpy as jnp
import pytest

from jaxrl_tis.record import goodput
from tests import tiny


def test_compilation_is_counted(tmp_path):
    before, start = goodput.compile_seconds(), time.monotonic()
    jax.jit(lambda x: jnp.sin(x) * 3.25 + 1.125)(jnp.arange(7.0)).block_until_ready()
    compiled = goodput.compile_seconds() - before
    assert 0 < compiled <= time.monotonic() - start + 0.01
    before = goodput.compile_seconds()
    time.sleep(0.01)
    assert goodput.compile_seconds() == before


def test_lowering_is_counted():
    x = jnp.arange(7.0)
    before = goodput.compile_seconds()
    jax.jit(lambda x: jnp.cos(x) * 2.25).lower(x)
    assert goodput.compile_seconds() > before


def test_memory_is_a_high_water_mark():
    before = goodput.memory()["time/host_peak_gib"]
    block = bytearray(300 << 20)
    block[::4096] = b"x" * len(block[::4096])
    peak = goodput.memory()["time/host_peak_gib"]
    del block
    assert peak >= before and peak > 0.29
    assert goodput.memory()["time/host_peak_gib"] == pytest.approx(peak, abs=0.05)


@pytest.mark.all
def test_a_run_says_where_its_time_went(tmp_path):
    tiny.run(tmp_path / "run", checkpoint__every=1)
    import json

    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train = [x for x in lines if x["phase"] == "train"]
    assert {"time/init_s", "time/warm-up_s"} <= train[0].keys()
    for x in train:
        parts = ("data", "sync", "rollout", "reward", "score", "update")
        assert all(x[f"time/{part}_s"] >= 0 for part in parts)
        assert sum(x[f"time/{part}_s"] for part in parts) <= x["time/step_s"] + 0.01
        assert x["time/host_peak_gib"] > 0.1
    assert "time/init_s" not in train[1] and "time/lost_s" not in train[0]
