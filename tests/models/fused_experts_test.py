"""Tensors of all experts of a layer, beside the files that transformers wrote."""

import itertools
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy as files

from jaxrl_tis import models
from jaxrl_tis.kernels import mxfp4
from jaxrl_tis.models import fused_experts, safetensors
from jaxrl_tis.models.stacking import Tensor

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDER = GOLDEN / "gpt_oss_mxfp4"


def stored(folder):
    return files.load_file(folder / "model.safetensors")


def test_a_written_folder_has_the_tensors_of_transformers(tmp_path):
    """Bit by bit, in bfloat16."""
    config, params = models.load(GOLDEN / "gpt_oss", dtype="bfloat16")
    safetensors.save(tmp_path / "saved", config, jax.tree.map(np.asarray, params))
    found, expected = stored(tmp_path / "saved"), stored(GOLDEN / "gpt_oss")
    assert found.keys() == expected.keys()
    assert found["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 32, 64)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    assert models.read_config(tmp_path / "saved") == config


def test_experts_in_4_bits_are_exact_in_bfloat16():
    params = models.load(FOLDER, dtype="bfloat16")[1]
    jax.tree.map(np.testing.assert_array_equal, params, models.load(FOLDER)[1])
    tensors = stored(FOLDER)
    blocks, scales = (tensors[f"model.layers.1.mlp.experts.gate_up_proj_{x}"] for x in ("blocks", "scales"))
    whole = mxfp4.decode(blocks, scales).swapaxes(1, 2)
    layers = params["layers"]
    for name, columns in (("expert_gate", whole[..., ::2]), ("expert_up", whole[..., 1::2])):
        np.testing.assert_array_equal(np.asarray(layers[name])[1].astype(np.float32), columns)


SLICES = [
    (slice(None), slice(None)), (slice(1, 3), slice(None)), (slice(0, 5), slice(40, 90)),
    (slice(2, 4), slice(32, 96)), (slice(3, 5), slice(0, 7)),
]


def test_a_slice_of_an_expert_reads_its_own_numbers():
    """Both layouts of the same numbers: 4 bits in blocks along the inputs, and floats."""
    rng, config = np.random.default_rng(0), models.read_config(FOLDER)
    config = config.__class__.from_hf(config.to_hf() | {
        "hidden_size": 96, "intermediate_size": 5, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    blocks, scales = rng.integers(0, 256, (8, 10, 3, 16), np.uint8), rng.integers(120, 130, (8, 10, 3), np.uint8)
    whole = mxfp4.decode(blocks, scales)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    of = lambda x: Tensor(x.shape, x.__getitem__)
    for tensors in (
        {f"{name}_blocks": of(blocks), f"{name}_scales": of(scales)}, {name: of(whole.swapaxes(1, 2))},
    ):
        fused_experts.split(config, safetensors.names(config), tensors, "here")
        assert len(tensors) == 16
        for expert, (part, of_part), index in itertools.product((0, 7), enumerate(("gate", "up")), SLICES):
            tensor = tensors[f"model.layers.0.mlp.experts.{expert}.{of_part}_proj.weight"]
            assert tensor.shape == (5, 96)
            np.testing.assert_array_equal(tensor.read(index), whole[expert, part::2][index])


def test_other_shapes_are_refused(tmp_path):
    for suffix, shape in (("", [8, 64, 32]), ("_bias", [8, 32]), ("_blocks", [8, 64, 2, 16])):
        folder = tmp_path / f"model{suffix}"
        shutil.copytree(FOLDER if suffix == "_blocks" else GOLDEN / "gpt_oss", folder)
        tensors, name = stored(folder), f"model.layers.0.mlp.experts.gate_up_proj{suffix}"
        tensors[name] = np.zeros(shape, tensors[name].dtype)
        files.save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=rf"shape \[{', '.join(map(str, shape))}\].* as GPT-OSS has it"):
            models.load(folder)
        del tensors[name]
        files.save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match="missing .*mlp.experts.0.gate_proj"):
            models.load(folder)
