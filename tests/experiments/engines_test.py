"""The figure of vLLM: measures by hand, int8 weights read back, tables and pictures of made lines."""

import json
import types

import numpy as np
import pytest
from matplotlib import figure
from safetensors import numpy as safetensors

from experiments import engines


def answer(tokens, logps):
    return types.SimpleNamespace(
        tokens=np.array(tokens, np.int32), logp_behav=np.array(logps, np.float32)
    )


def test_log_probs_are_compared_until_the_answers_part():
    one = answer([5, 7, 8], [-1.0, -2.0, -3.0])
    pairs = [
        engines.prefix(one, answer([5, 9, 8], [-1.5, -2.0, -9.0])),  # the second token differs
        engines.prefix(one, answer([5, 7], [-1.0, -1.75])),  # this one ends
        ({3: -1.0, 4: -2.0}, {4: -2.125, 6: -1.0}),  # likely tokens
    ]
    assert engines.difference(pairs) == {"count": 4, "mean": 0.21875, "max": 0.5}


def test_the_gap_of_answers_and_of_buckets_by_hand():
    """Log ratios 0.5, -0.25 and 1: two sums of 0.25 and 1. Entropies 0.05 and 3 lie in bins 0 and 2."""
    behav, mask = np.full((2, 2), -2, np.float32), np.array([[1, 1], [1, 0]], bool)
    logp = behav + np.array([[0.5, -0.25], [1.0, 9.0]], np.float32)
    entropy = np.array([[0.05, 3.0], [3.0, 0.3]], np.float32)
    found = engines.measured(logp, behav, entropy, mask)
    assert found["d_seq_mean"] == 0.625 and found["d_max"] == 1
    buckets = {name: x for name, x in found.items() if "/log_ratio" in name}
    assert buckets == {
        "entropy_0/log_ratio_abs_mean": 0.5, "entropy_2/log_ratio_abs_mean": 0.625,
        "position_0/log_ratio_abs_mean": 0.75, "position_1/log_ratio_abs_mean": 0.25,
    }
    assert found["entropy_2/token_fraction"] == pytest.approx(2 / 3)


def test_int8_weights_have_a_scale_for_each_output(tmp_path):
    folder, out = tmp_path / "model", tmp_path / "int8"
    folder.mkdir()
    weight = np.array([[127.0, -1.4, 0.6], [0.5, 0.25, -1.27]], np.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: weight, "model.norm.weight": np.ones(3, np.float32)}
    safetensors.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"hidden_size": 3}')
    engines.quantized(folder, out)
    read = safetensors.load_file(out / "model.safetensors")
    assert read[name].dtype == np.int8 and read[name].tolist() == [[127, -1, 1], [50, 25, -127]]
    np.testing.assert_allclose(read[f"{name}_scale"], [[1], [0.01]], rtol=1e-6)
    assert read["model.norm.weight"].tolist() == [1, 1, 1]
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_size"] == 3
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_tables_and_pictures_of_made_lines(tmp_path):
    measures = ("d_mean", "d_p99", "d_max", "dp_max", "d_seq_mean", "k3", "chi2_token", "chi2_seq")
    gap = {name: 0.125 * (i + 1) for i, name in enumerate(measures)}
    gap |= {f"{b}/log_ratio_abs_mean": 0.5 for b in ("entropy_0.5", "entropy_0", "position_4")}
    of = {"count": 9, "mean": 0.25, "max": 2.0}
    line = {
        "sampler": "vLLM", "format": "int8", "cpu": "AVX2", "gap": {"float32": gap},
        "conditions": dict.fromkeys(engines.CONDITIONS, of),
    }
    (tmp_path / engines.NAME).write_text(json.dumps(line) + "\n")
    found = engines.read(tmp_path)
    assert engines.gap_table(found).splitlines()[2] == (
        "| vLLM | int8 | AVX2 | float32 | 0.12 | 0.25 | 0.38 | 0.5 | 0.62 | 0.75 | 0.88 | 1 |"
    )
    cell = "0.25, 2 (9)"
    assert engines.conditions_table(found).splitlines()[2] == (
        f"| vLLM | int8 | AVX2 | {cell} | {cell} | {cell} | {cell} |"
    )
    assert len(engines.runs_table(found).splitlines()) == 2  # no run
    axes = figure.Figure().subplots()
    engines.panel("entropy")(axes, found)
    [curve] = axes.get_lines()
    assert [*curve.get_xdata()] == ["0", "0.5"] and [*curve.get_ydata()] == [0.5, 0.5]
