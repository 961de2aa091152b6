"""GGUF files written with the gguf package; rows of Q and K permuted here by explicit loops."""

import dataclasses
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import models
from jaxrl_tis.models import gguf as loader
from jaxrl_tis.models import safetensors as checkpoint
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from tests.data.tokenizer_files_test import POINTER

GOLDEN = pathlib.Path(__file__).parent / "golden"
Q4_1 = gguf.GGMLQuantizationType.Q4_1


def rows_in_llama_cpp_order(w, num_heads):
    """Row i of the first half of a head goes to 2i, row i of the second half to 2i + 1."""
    out, half = np.empty_like(w), w.shape[0] // num_heads // 2
    for head in range(num_heads):
        start = head * 2 * half
        for i in range(half):
            out[start + 2 * i] = w[start + i]
            out[start + 2 * i + 1] = w[start + half + i]
    return out


def metadata(config):
    prefix = config.family.replace("_", "") + "."
    experts = {} if config.moe is None else {
        prefix + "expert_count": config.moe.num_experts,
        prefix + "expert_used_count": config.moe.top_k,
        prefix + "expert_feed_forward_length": config.moe.expert_dim,
    }
    return experts | {
        prefix + "block_count": config.num_layers,
        prefix + "context_length": config.max_position,
        prefix + "embedding_length": config.embed_dim,
        prefix + "feed_forward_length": config.mlp_dim,
        prefix + "attention.head_count": config.num_heads,
        prefix + "attention.head_count_kv": config.num_kv_heads,
        prefix + "attention.key_length": config.head_dim,
        prefix + "attention.value_length": config.head_dim,
        prefix + "attention.layer_norm_rms_epsilon": config.norm_eps,
        prefix + "rope.dimension_count": config.head_dim,
        prefix + "rope.freq_base": config.rope.theta,
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
    }


def stored_tensors(config, params):
    """{GGUF name: numpy array in file order}, llama's Q and K permuted."""
    tensors = {}
    for key, value in {**params, **params["layers"]}.items():
        if key == "layers":
            continue
        for layer, array in enumerate(np.asarray(value) if key in params["layers"] else [value]):
            array = np.asarray(array)
            if array.ndim > 1 and key != "embed":
                array = array.swapaxes(-1, -2)  # of experts [E, in, out], too
            if config.family == "llama" and key in ("q", "k"):
                heads = config.num_heads if key == "q" else config.num_kv_heads
                array = rows_in_llama_cpp_order(array, heads)
            name = loader.NAMES[key].removesuffix("[{expert}]").format(layer=layer)
            tensors[name] = np.ascontiguousarray(array)
    return tensors


def write(path, family, fields, tensors, types=()):
    """Writes F32 tensors, or the type that `types` (a dict) gives a tensor."""
    writer = gguf.GGUFWriter(path, family)
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
              list: writer.add_array}
    for key, value in fields.items():
        adders[type(value)](key, value)
    for name, array in tensors.items():
        if name in types:
            quantized = gguf.quants.quantize(array, types[name])
            writer.add_tensor(name, quantized, raw_dtype=types[name])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama():
    return models.load(GOLDEN / "llama_default")


def written(path, model, types=(), drop=(), **changes):
    config, params = model
    fields = {**metadata(config), **changes}
    tensors = stored_tensors(config, params)
    for name in drop:
        (fields if name in fields else tensors).pop(name)
    return write(path, config.family.replace("_", ""), fields, tensors, types)


def dtypes(params):
    return jax.tree.map(lambda x: x.dtype, params)


def assert_same_parameters(loaded, expected):
    assert dtypes(loaded) == dtypes(expected)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def golden_miss(name, config, params):
    tokens, expected = (np.load(GOLDEN / name / f"{x}.npy") for x in ("tokens", "logits"))
    got = np.asarray(transformer.logits(params, config, jnp.asarray(tokens)))
    return np.abs(got - expected).max() / expected.std()


@pytest.mark.all
def test_llama_in_float32(tmp_path, llama):
    path = written(tmp_path / "m.gguf", llama)
    config, params = models.load(path)
    assert config == models.read_config(path)
    # Metadata is float32: an epsilon of 0.05 comes back as the nearest float32.
    assert config == llama[0]
    assert_same_parameters(params, llama[1])
    assert golden_miss("llama_default", config, params) <= 2e-4


def test_control_rows_left_in_llama_cpp_order(tmp_path, llama, monkeypatch):
    path = written(tmp_path / "m.gguf", llama)
    monkeypatch.setattr(loader, "PERMUTED", ())
    config, params = models.load(path)
    assert golden_miss("llama_default", config, params) > 1e-2


@pytest.mark.parametrize("name", ["llama_linear", "qwen2_tied", "qwen2_untied", "qwen3"])
def test_other_families_and_scaling(tmp_path, name):
    model = models.load(GOLDEN / name)
    scaling = {}
    if name == "llama_linear":
        scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config, params = models.load(written(tmp_path / "m.gguf", model, **scaling))
    assert config == model[0]
    assert_same_parameters(params, model[1])


def test_stored_types_are_dequantised(tmp_path, llama):
    # Blocks of 32 with the 16 values -2, -1.5, ..., 5.5 are exact in Q4_1: step 0.5, minimum -2.
    config, params = llama
    grid = np.tile(np.arange(16, dtype=np.float32) / 2 - 2, 2)
    q = np.random.default_rng(0).permuted(np.tile(grid, (64, 1)), axis=1)  # [out 64, in 32]
    k = params["layers"]["k"].astype(jnp.float16).astype(jnp.float32)
    layers = {**params["layers"], "q": jnp.stack([q.T, q[::-1].T]), "k": k}
    types = {f"blk.{i}.attn_q.weight": Q4_1 for i in range(2)}
    types |= {f"blk.{i}.attn_k.weight": gguf.GGMLQuantizationType.F16 for i in range(2)}
    exact = config, {**params, "layers": layers}
    path = written(tmp_path / "m.gguf", exact, types)
    stored = {t.name: t.tensor_type for t in gguf.GGUFReader(path).tensors}
    assert stored["blk.0.attn_q.weight"] == Q4_1
    assert_same_parameters(models.load(path)[1], exact[1])


MOE = ModelConfig(
    family="qwen3_moe", vocab_size=11, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, mlp_dim=24, rope=RopeConfig(kind="default", theta=1e6), max_position=64,
    norm_eps=1e-5, qkv_bias=False, qk_norm=True, tie_embeddings=False,
    moe=MoeConfig(num_experts=4, top_k=2, expert_dim=64))


@pytest.fixture(scope="module")
def moe():
    """Experts of values that Q4_1 stores exactly in blocks of 32 along the input: step 0.5, lowest
    -2."""
    rng = np.random.default_rng(1)
    grid = np.tile(np.arange(16, dtype=np.float32) / 2 - 2, 2)

    def fill(path, leaf):
        if "expert" not in path[-1].key:
            return jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)
        *lead, size_in, size_out = leaf.shape
        blocks = np.tile(grid, (*lead, size_out, size_in // 32, 1))
        return jnp.asarray(rng.permuted(blocks, axis=-1).reshape(*lead, size_out, size_in)
                           .swapaxes(-1, -2))

    params = jax.tree_util.tree_map_with_path(fill, transformer.abstract_params(MOE))
    return MOE, params


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_1"])
def test_experts(tmp_path, moe, kind):
    names = [f"blk.{i}.ffn_{x}_exps.weight" for i in range(2) for x in ("gate", "up", "down")]
    types = {} if kind == "F32" else dict.fromkeys(names, gguf.GGMLQuantizationType[kind])
    path = written(tmp_path / "m.gguf", moe, types)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    # llama.cpp's order is the reverse: {in, out, experts}.
    assert stored["blk.0.ffn_down_exps.weight"].shape.tolist() == [64, 32, 4]
    assert stored["blk.1.ffn_gate_inp.weight"].shape.tolist() == [32, 4]
    assert {stored[name].tensor_type.name for name in names} == {kind}
    config, params = models.load(path)
    assert config == MOE == models.read_config(path)
    assert_same_parameters(params, moe[1])


def test_a_device_dequantises_its_own_experts_alone(tmp_path, moe, monkeypatch):
    names = [f"blk.{i}.ffn_up_exps.weight" for i in range(2)]
    path = written(tmp_path / "m.gguf", moe, dict.fromkeys(names, Q4_1))
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,),
                         devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec
    shardings = jax.tree.map(
        lambda x: jax.sharding.NamedSharding(mesh, spec(None, "expert") if x.ndim == 4 else spec()),
        moe[1])
    sizes, whole = [], loader.dequantize

    def dequantize(data, kind):
        values = whole(data, kind)
        if kind == Q4_1:
            sizes.append(values.shape)
        return values

    monkeypatch.setattr(loader, "dequantize", dequantize)
    _, params = models.load(path, sharding=shardings)
    assert_same_parameters(params, moe[1])
    assert params["layers"]["expert_up"].addressable_shards[0].data.shape == (2, 1, 32, 64)
    assert sizes == [(1, 64, 32)] * 8  # [1, F, D], each of the 2 x 4 experts once


@pytest.mark.parametrize("key, value, message", [
    ("expert_used_count", 5, "top_k=5 is above the 4 experts"),
    ("expert_count", 3, r"unknown \(6\): blk.0.ffn_down_exps.weight\[3\]"),
    ("expert_feed_forward_length", 60, r"wrong shape .*_exps.weight\[0\] \[32, 64\], .*\[32, 60\]"),
    ("expert_feed_forward_length", [64, 64], r"expert_feed_forward_length=\[64, 64\] must be one"),
    ("expert_shared_feed_forward_length", 64, "expert_shared_feed_forward_length=64"),
    ("expert_weights_scale", 2.5, "qwen3moe.expert_weights_scale=2.5"),
])
def test_experts_that_are_refused(tmp_path, moe, key, value, message):
    with pytest.raises(ValueError, match=message):
        models.load(written(tmp_path / "m.gguf", moe, **{f"qwen3moe.{key}": value}))


def test_experts_as_the_files_of_qwen3_coder_have_them(tmp_path, moe):
    shared = {"qwen3moe.expert_shared_feed_forward_length": 0}
    assert models.read_config(written(tmp_path / "m.gguf", moe, **shared)) == MOE
    with pytest.raises(ValueError, match="no qwen3moe.expert_used_count"):
        models.load(written(tmp_path / "n.gguf", moe, drop=["qwen3moe.expert_used_count"]))


@pytest.mark.all
def test_sharded_load(tmp_path, llama):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    shardings = jax.tree.map(
        lambda x: jax.sharding.NamedSharding(
            mesh, spec(None, None, "model") if x.ndim == 3 else spec()), llama[1])
    path = written(tmp_path / "m.gguf", llama)
    _, params = models.load(path, sharding=shardings, dtype="bfloat16")
    assert params["layers"]["q"].addressable_shards[0].data.shape == (2, 32, 8)
    assert params["embed"].dtype == jnp.bfloat16
    assert_same_parameters(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), llama[1]))


@pytest.mark.all
def test_gguf_and_folder_of_one_model_are_equal(tmp_path, llama):
    path = written(tmp_path / "m.gguf", llama)
    config, params = models.load(path)
    models.save(tmp_path / "hf", config, params)
    assert_same_parameters(checkpoint.load(tmp_path / "hf")[1], params)


def test_numbers_are_the_decimals_of_a_config_json(tmp_path, llama):
    small = dataclasses.replace(llama[0], norm_eps=1e-5), llama[1]
    factor = {"llama.rope.scaling.factor": 1.1}
    found = models.read_config(written(tmp_path / "m.gguf", small, **factor))
    assert (found.norm_eps, found.rope.factor) == (1e-5, 1.1)
    assert found.rope.kind == "linear"  # as llama.cpp reads a factor without a type
    path = written(tmp_path / "n.gguf", llama)
    assert models.read_config(path) == llama[0]


def test_absent_optional_metadata_has_the_format_defaults(tmp_path, llama):
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count",
             "rope.freq_base")
    path = written(tmp_path / "m.gguf", llama, drop=[f"llama.{name}" for name in names])
    with pytest.raises(ValueError, match="wrong shape"):  # 32 / 4 heads = 8, but heads have 16
        models.load(path)
    assert (models.read_config(path).head_dim, models.read_config(path).rope.theta) == (8, 1e4)


def test_missing_and_damaged_files(tmp_path, llama):
    with pytest.raises(FileNotFoundError, match="absent.gguf"):
        models.load(tmp_path / "absent.gguf")
    path = written(tmp_path / "m.gguf", llama)
    whole = path.read_bytes()
    for kept in (0, 3, 40, 900, len(whole) // 2, len(whole) - 5000):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"m\.gguf is not a GGUF file, or is truncated"):
            models.load(path)
    path.write_bytes(b"JUNK" + whole[4:])
    with pytest.raises(ValueError, match="is not a GGUF file"):
        models.load(path)
    path.write_text(POINTER)
    with pytest.raises(ValueError, match="m.gguf is a pointer of Git LFS"):
        models.load(path)


def test_forged_array_length_ends_at_the_end_of_the_file(tmp_path, llama):
    path = written(tmp_path / "m.gguf", llama, **{"general.numbers": [7, 8, 9]})
    data = path.read_bytes()
    at = data.index(b"general.numbers") + len(b"general.numbers") + 4 + 4  # value and item types
    assert int.from_bytes(data[at:at + 8], "little") == 3
    data = data[:at] + (2**20).to_bytes(8, "little") + data[at + 8:]
    # int32 items that end exactly with the file: the next slice is empty, not of a wrong size.
    path.write_bytes(data + bytes((at + 8 - len(data)) % 4))
    with pytest.raises(ValueError, match=r"truncated \(it needs \d+ bytes and has \d+\)"):
        models.load(path)


@pytest.mark.parametrize("key, value, message", [
    ("llama.expert_count", 8, "llama.expert_count=8"),
    ("llama.attention.sliding_window", 128, "llama.attention.sliding_window=128"),
    ("llama.rope.scaling.type", "yarn", "'yarn'"),
    ("llama.rope.scaling.type", "linear", "'linear'.*factor None"),
    ("llama.rope.dimension_count", 8, "rope.dimension_count=8 must equal the head size 16"),
    ("llama.attention.value_length", 8, "attention.value_length=8 .* 16"),
    ("llama.attention.head_count_kv", [2, 1], r"head_count_kv=\[2, 1\]"),
    ("llama.attention.head_count", 0, "head_count=0"),
    ("llama.feed_forward_length", [64, 64], "feed_forward_length=.* must be one number for all layers"),
    ("llama.attention.key_length", [8, 8], "key_length=.* must be one number for all layers"),
    ("llama.block_count", "2", "block_count='2' must be one number"),
    ("llama.attention.layer_norm_rms_epsilon", "1e-5", "layer_norm_rms_epsilon='1e-5' must be a number"),
    ("llama.rope.freq_base", "1e4", "rope.freq_base='1e4' must be a number"),
])
def test_settings_that_are_refused(tmp_path, llama, key, value, message):
    with pytest.raises(ValueError, match=message):
        models.load(written(tmp_path / "m.gguf", llama, **{key: value}))


def test_unknown_architecture(tmp_path):
    path = write(tmp_path / "m.gguf", "mamba", {"mamba.block_count": 2}, {})
    with pytest.raises(ValueError, match="general.architecture='mamba'"):
        models.load(path)


def test_missing_metadata_and_tensors_are_named(tmp_path, llama):
    with pytest.raises(ValueError, match="no llama.block_count"):
        models.load(written(tmp_path / "a.gguf", llama, drop=["llama.block_count"]))
    with pytest.raises(ValueError, match="token_embd.weight"):
        models.load(written(tmp_path / "b.gguf", llama, drop=["token_embd.weight"]))
    with pytest.raises(ValueError, match=r"missing \(1\): blk.1.ffn_up.weight"):
        models.load(written(tmp_path / "c.gguf", llama, drop=["blk.1.ffn_up.weight"]))


def test_unknown_tensor_is_named(tmp_path, llama):
    config, params = llama
    tensors = stored_tensors(config, params) | {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write(tmp_path / "m.gguf", "llama", metadata(config), tensors)
    with pytest.raises(ValueError, match=r"unknown \(1\): rope_freqs.weight"):
        models.load(path)
