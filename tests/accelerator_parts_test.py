"""The parts of benchmarks/accelerator.py, with a tiny model: every result has the schema of its part."""

import json

import jsonschema
import numpy as np
import pytest

from benchmarks import accelerator, accelerator_parts as parts, model
from jaxrl_tis.aot import work

MODEL = model.TINY.model
SCHEMA = json.loads(accelerator.SCHEMA.read_text())


def test_parts_are_those_of_the_command():
    assert list(parts.PARTS) == list(accelerator.SECONDS)


def test_the_sizes_of_a_cpu_and_of_other_devices(monkeypatch):
    small = parts.sizes()
    assert (small.name, small.step) == ("cpu", model.SMALL)
    monkeypatch.setattr(parts.jax, "default_backend", lambda: "gpu")
    full = parts.sizes()
    step = full.step
    assert parts.sizes(is_smoke=True).name == "smoke"
    assert (full.name, step.rows, step.prompt_tokens, step.new_tokens) == ("full", 32, 256, 256)
    assert full.batches == small.batches == (1, 32, 128)
    # Qwen2.5-0.5B without its biases and norms.
    weights = work.layers_weights(step.model) + step.model.vocab_size * step.model.embed_dim
    assert weights == 151_936 * 896 + 24 * (896 * (896 + 128 + 128) + 896**2 + 3 * 896 * 4864)


def test_the_bytes_of_a_token():
    """Keys and values of two bytes; a token table beside a head of its own is not read."""
    assert parts.kv_bytes(MODEL, 10) == 2 * 2 * 1 * 1 * 16 * 10
    table, layers = np.zeros((4, 8), np.float32), {"q": np.zeros(6, np.int8)}
    assert parts.weight_bytes({"embed": table, "layers": layers}) == 128 + 6
    assert parts.weight_bytes({"embed": table, "head": table, "layers": layers}) == 128 + 6


def test_the_model_flops_of_a_step_by_hand():
    """Of the model of `benchmarks.grpo_step`."""
    separate, fused = (model.flops(model.SMALL, is_fused) for is_fused in (False, True))
    head, layers = 2 * 256 * 49152 * 2048, 2 * 4 * (256 * 32 * 24 + 3 * 256 * 768) * 4096
    attention = 2 * 128**2 * 256 * 4 * 32
    assert separate["score"] == head + layers + attention
    assert separate["update"] == fused["update"] == 3 * separate["score"]
    assert fused["score"] == 0 and fused["rollout"] == separate["rollout"]
    assert head + layers // 2 < fused["rollout"] < 1.1 * (head + layers // 2)


@pytest.mark.all
@pytest.mark.compiles
@pytest.mark.parametrize("name", [name for name in parts.PARTS if name != "correctness"])
def test_a_result_has_its_schema(name):
    """The kernels of `correctness` are in accelerator_checks_test.py."""
    *_, last = map(accelerator.to_json, parts.PARTS[name](parts.SMOKE))
    found = json.loads(last)
    jsonschema.validate(found, {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{name}"})
    if name == "step":
        for way in (found["fused"], found["separate"]):
            assert way["seconds"]["step"] > 0 and way["mfu"] is None
        assert found["fused"]["seconds"]["score"] < found["separate"]["seconds"]["score"]
    if name == "decode":
        assert [x["batch"] for x in found["rows"]] == [1, 2, 4] * 2
        assert found["rows"][0]["bytes_per_token"] > 1.9 * found["rows"][1]["bytes_per_token"] > 0
    if name == "gate":
        assert found["W8A8"]["largest"] != "" and found["bfloat16"]["failures"] == []
    if name == "quickstart":
        assert found["steps"] == 3
