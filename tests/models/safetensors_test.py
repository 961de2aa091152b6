"""Checkpoint folders written here, by hand-edited files, and by transformers (golden)."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from jaxrl_tis import models
from jaxrl_tis.models import safetensors as checkpoint
from jaxrl_tis.models import stacking, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxrl_tis.models.stacking import Tensor
from tests.data.tokenizer_files_test import POINTER

UNTIED = ModelConfig(
    family="qwen2", vocab_size=11, embed_dim=8, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, mlp_dim=12, rope=RopeConfig(kind="default", theta=10000.0), max_position=32,
    norm_eps=1e-6, qkv_bias=True, qk_norm=False, tie_embeddings=False)
TIED = ModelConfig(**{**vars(UNTIED), "family": "llama", "qkv_bias": False, "tie_embeddings": True})

QWEN_MOE = ModelConfig(**{
    **vars(UNTIED), "family": "qwen3_moe", "num_layers": 3, "qkv_bias": False, "qk_norm": True,
    "moe": MoeConfig(num_experts=4, top_k=2, expert_dim=6, dense_layers=(1,))})
GLM = ModelConfig(**{
    **vars(UNTIED), "family": "glm4_moe", "num_layers": 3,
    "rope": RopeConfig(kind="default", theta=10000.0, fraction=0.5),
    "moe": MoeConfig(num_experts=4, top_k=2, expert_dim=6, score="sigmoid", dense_layers=(0,),
                     shared_dim=12, num_groups=2, top_groups=1, scale=2.5)})


def random_params(config, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    fill = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), dtype)
    return jax.tree.map(fill, transformer.abstract_params(config))


def saved(folder, config=UNTIED, **kwargs):
    params = random_params(config)
    models.save(folder, config, params, **kwargs)
    return folder, params


def rewrite(folder, change):
    """Loads the single weight file as a dict, applies `change`, and writes it back."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def dtypes(params):
    return jax.tree.map(lambda x: x.dtype, params)


def assert_equal(a, b):
    assert dtypes(a) == dtypes(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.all
def test_matrices_are_transposed_and_layers_stacked(tmp_path):
    folder, params = saved(tmp_path / "m")
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    assert stored["model.layers.1.mlp.gate_proj.weight"].shape == (12, 8)
    np.testing.assert_array_equal(
        stored["model.layers.1.mlp.gate_proj.weight"], params["layers"]["gate"][1].T)
    np.testing.assert_array_equal(
        stored["model.layers.0.self_attn.k_proj.bias"], params["layers"]["k_bias"][0])
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], params["embed"])
    np.testing.assert_array_equal(stored["lm_head.weight"], params["head"].T)
    # Embedding, last norm and head; per layer 2 norms, 4 + 3 matrices and 3 biases.
    assert len(stored) == 3 + 2 * 12


def test_experts_have_tensors_of_their_own(tmp_path):
    folder, params = saved(tmp_path / "m", GLM)
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    sparse, of_layer_2 = params["layers"], "model.layers.2.mlp."
    for name, expected in {
        "experts.3.gate_proj.weight": sparse["expert_gate"][1, 3].T,  # [F 6, D 8]
        "experts.0.up_proj.weight": sparse["expert_up"][1, 0].T,
        "experts.2.down_proj.weight": sparse["expert_down"][1, 2].T,  # [D 8, F 6]
        "gate.weight": sparse["router"][1].T,  # [E 4, D 8]
        "gate.e_score_correction_bias": sparse["router_bias"][1],
        "shared_experts.gate_proj.weight": sparse["gate"][1].T,  # [2 F 12, D 8]
        "shared_experts.down_proj.weight": sparse["down"][1].T,
    }.items():
        np.testing.assert_array_equal(stored[of_layer_2 + name], expected)
    np.testing.assert_array_equal(
        stored["model.layers.0.mlp.gate_proj.weight"], params["dense_layers"]["gate"][0].T)
    # Embedding, last norm and head; a layer has 2 norms, 4 matrices, 3 biases, and 3 matrices of an
    # MLP, or router, bias, 3 shared matrices and 4 x 3 of experts.
    assert len(stored) == 3 + (9 + 3) + 2 * (9 + 2 + 3 + 12)


@pytest.mark.parametrize("config", [QWEN_MOE, GLM], ids=["qwen3_moe", "glm4_moe"])
def test_experts_load_back_equal(tmp_path, config, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 3000)
    folder, params = saved(tmp_path / "m", config)
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded_config, loaded = models.load(folder)
    assert loaded_config == config
    assert_equal(loaded, params)


def fuse(config, tensors):
    """Joins the experts of each layer as transformers 5 holds them."""
    for layer in config.stacks["layers"]:
        prefix = f"model.layers.{layer}.mlp.experts."
        of = lambda e, name, prefix=prefix: tensors.pop(f"{prefix}{e}.{name}_proj.weight")
        gate_up, down = [], []
        for e in range(config.moe.num_experts):
            gate_up.append(np.concatenate([of(e, "gate"), of(e, "up")]))
            down.append(of(e, "down"))
        tensors[prefix + "gate_up_proj"] = np.stack(gate_up)
        tensors[prefix + "down_proj"] = np.stack(down)


@pytest.mark.parametrize("config", [QWEN_MOE, GLM], ids=["qwen3_moe", "glm4_moe"])
def test_fused_experts_are_the_same(tmp_path, config):
    folder, params = saved(tmp_path / "m", config)
    rewrite(folder, lambda tensors: fuse(config, tensors))
    assert_equal(models.load(folder)[1], params)


# A fused tensor as other families have it, [in, out], or with one matrix too few.
@pytest.mark.parametrize("name, change, message", [
    ("gate_up_proj", lambda x: x.swapaxes(1, 2), r"shape \[4, 8, 12\].*only \[4, 12, 8\]"),
    ("down_proj", lambda x: x.swapaxes(1, 2), r"shape \[4, 6, 8\].*only \[4, 8, 6\]"),
    ("gate_up_proj", lambda x: x[:, :6], r"shape \[4, 6, 8\].*only \[4, 12, 8\]"),
    ("gate_up_proj", lambda x: x[:3], r"shape \[3, 12, 8\].*only \[4, 12, 8\]"),
])
def test_an_unknown_layout_of_fused_experts(tmp_path, name, change, message):
    folder, _ = saved(tmp_path / "m", QWEN_MOE)
    name = f"model.layers.2.mlp.experts.{name}"

    def rewritten(tensors):
        fuse(QWEN_MOE, tensors)
        tensors[name] = np.ascontiguousarray(change(tensors[name]))

    rewrite(folder, rewritten)
    with pytest.raises(ValueError, match=f"{name} in .*m has {message}"):
        models.load(folder)


@pytest.mark.all
def test_a_layout_in_which_one_of_the_tensors_is_square(tmp_path):
    # 2F = D = 12: gate_up_proj [4, 12, 12] says nothing, and down_proj does.
    config = ModelConfig(**{**vars(QWEN_MOE), "embed_dim": 12})
    folder, _ = saved(tmp_path / "m", config)

    def transposed(tensors):
        fuse(config, tensors)
        for name, x in tensors.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = np.ascontiguousarray(x.swapaxes(1, 2))

    rewrite(folder, transposed)
    with pytest.raises(ValueError, match=r"down_proj .*\[4, 6, 12\], an unknown layout"):
        models.load(folder)


def test_a_missing_expert_is_named(tmp_path):
    folder, _ = saved(tmp_path / "m", QWEN_MOE)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"missing \(1\): {name}"):
        models.load(folder)


def test_layers_that_predict_further_tokens_are_left(tmp_path):
    folder, params = saved(tmp_path / "m", GLM)
    config = json.loads((folder / "config.json").read_text())
    rewrite(folder, lambda tensors: tensors.update({
        "model.layers.3.eh_proj.weight": np.ones((8, 16), np.float32),
        "model.layers.3.mlp.experts.0.up_proj.weight": np.ones((6, 8), np.float32)}))
    with pytest.raises(ValueError, match=r"unknown \(2\): model.layers.3.eh_proj.weight"):
        models.load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert_equal(models.load(folder)[1], params)


@pytest.mark.all
def test_the_bias_of_a_router_keeps_float32(tmp_path):
    params = transformer.cast(random_params(GLM), "bfloat16")
    assert params["layers"]["router_bias"].dtype == jnp.float32
    assert params["layers"]["router"].dtype == params["embed"].dtype == jnp.bfloat16
    models.save(tmp_path / "m", GLM, params)
    with safe_open(tmp_path / "m" / "model.safetensors", framework="numpy") as file:
        stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    biases = {name for name in stored if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2 and {name for name, x in stored.items() if x == "F32"} == biases
    assert_equal(models.load(tmp_path / "m", dtype="bfloat16")[1], params)


@pytest.mark.parametrize("is_fused", [False, True], ids=["separate", "fused"])
def test_a_device_reads_its_own_experts_alone(tmp_path, is_fused, monkeypatch):
    folder, params = saved(tmp_path / "m", QWEN_MOE)
    if is_fused:
        rewrite(folder, lambda tensors: fuse(QWEN_MOE, tensors))
    mesh = jax.make_mesh((2, 4), ("other", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    of = lambda path, x: spec(None, "expert") if path[-1].key.startswith("expert_") else spec()
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.sharding.NamedSharding(mesh, of(path, x)), params)
    blocks, reads, whole = [], [], stacking._read_block

    def read_block(slot, tensors, box, dtype):
        def tracked(name):
            def read(index):
                part = tensors[name].read(index)
                reads.append((name, part.shape))
                return part
            return Tensor(tensors[name].shape, read)

        blocks.append((slot.names.flat[0], box))
        return whole(slot, {name: tracked(name) for name in slot.names.flat}, box, dtype)

    monkeypatch.setattr(stacking, "_read_block", read_block)
    _, loaded = models.load(folder, sharding=shardings)
    assert_equal(loaded, params)
    shards = loaded["layers"]["expert_up"].addressable_shards
    assert {shard.data.shape for shard in shards} == {(2, 1, 8, 6)}
    # Each of the 4 x 2 tensors of up_proj is read once, whole, for two devices; a block holds one
    # expert of the two layers.
    name = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    expected = {(name.format(layer, e), (6, 8)) for layer in (0, 2) for e in range(4)}
    found = [x for x in reads if x[0].endswith("up_proj.weight") and ".experts." in x[0]]
    assert set(found) == expected and len(found) == 8
    boxes = [box for first, box in blocks if first == name.format(0, 0)]
    assert boxes == [((0, 2), (e, e + 1), (0, 8), (0, 6)) for e in range(4)]


@pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
def test_saved_model_loads_back_equal(tmp_path, config):
    folder, params = saved(tmp_path / "m", config)
    loaded_config, loaded = models.load(folder)
    assert loaded_config == config == models.read_config(folder)
    assert_equal(loaded, params)


def test_shards_with_index_load_back_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1500)
    folder, params = saved(tmp_path / "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1 and not (folder / "model.safetensors").exists()
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    payloads = [safetensors.numpy.load_file(folder / shard) for shard in shards]
    assert all(sum(x.nbytes for x in payload.values()) <= 1500 for payload in payloads)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert index["metadata"]["total_size"] == total
    assert_equal(models.load(folder)[1], params)


@pytest.mark.all
def test_bfloat16_is_kept_on_disk_and_widened_on_request(tmp_path):
    params = random_params(TIED, dtype=jnp.bfloat16)
    models.save(tmp_path / "m", TIED, params)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_equal(models.load(tmp_path / "m", dtype="bfloat16")[1], params)
    widened = models.load(tmp_path / "m")[1]
    assert widened["embed"].dtype == jnp.float32
    assert_equal(widened, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def test_sharded_load_reads_each_slice(tmp_path):
    folder, params = saved(tmp_path / "m")
    mesh = jax.make_mesh((2, 2), ("layer", "in"), devices=jax.devices()[:4],
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    layers = {name: spec("layer", "in") for name in params["layers"]}
    specs = {"embed": spec(), "final_norm": spec("in"), "head": spec("in"), "layers": layers}
    shardings = jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs)
    _, loaded = models.load(folder, sharding=shardings)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    assert loaded["layers"]["down"].addressable_shards[0].data.shape == (1, 6, 8)
    assert_equal(loaded, params)


def test_one_sharding_for_everything(tmp_path):
    folder, params = saved(tmp_path / "m")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    _, loaded = models.load(folder, sharding=device)
    assert loaded["embed"].devices() == {jax.devices()[3]}
    assert_equal(loaded, params)


def test_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    folder, params = saved(tmp_path / "m", TIED)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_equal(models.load(folder)[1], params)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings true.*lm_head.weight"):
        models.load(folder)


def test_stored_rotary_frequencies_are_derived_data(tmp_path):
    folder, params = saved(tmp_path / "m", TIED)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: np.ones(2, np.float32)}))
    assert_equal(models.load(folder)[1], params)


def test_wrong_tensors_are_listed(tmp_path):
    folder, _ = saved(tmp_path / "m")

    def change(tensors):
        del tensors["model.layers.1.self_attn.q_proj.bias"]
        tensors["score.weight"] = np.ones((1, 8), np.float32)
        tensors["model.norm.weight"] = np.ones(9, np.float32)

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        models.load(folder)
    message = str(error.value)
    assert "missing (1): model.layers.1.self_attn.q_proj.bias" in message
    assert "unknown (1): score.weight" in message
    assert "wrong shape (1): model.norm.weight [9], expected [8]" in message


def test_transposed_tensor_is_the_wrong_shape(tmp_path):
    folder, _ = saved(tmp_path / "m")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    with pytest.raises(ValueError, match=r"up_proj.weight \[8, 12\], expected \[12, 8\]"):
        models.load(folder)


def test_integer_weights_are_refused(tmp_path):
    folder, _ = saved(tmp_path / "m")
    name = "model.norm.weight"
    rewrite(folder, lambda t: t.update({name: t[name].astype(np.int8)}))
    with pytest.raises(ValueError, match="model.norm.weight.*I8"):
        models.load(folder)


def test_missing_folder_config_and_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json, tokenizer.json and model.safetensors"):
        models.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty has no config.json"):
        models.load(tmp_path / "empty")
    folder, _ = saved(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        models.load(folder)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_file_is_named(tmp_path, kept):
    folder, _ = saved(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        models.load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pointer_in_the_place_of_a_file_is_named(tmp_path, name):
    folder, _ = saved(tmp_path / "m")
    (folder / name).write_text(POINTER)
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS, .*git lfs pull"):
        models.load(folder)


def test_damaged_config_is_named(tmp_path):
    folder, _ = saved(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        models.load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        models.load(folder)


@pytest.fixture
def sharded_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 2500)
    return saved(tmp_path / "m")[0]


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("place", ["../m/{}", "/{}", "sub/{}", "..", "", "a\\{}", 7])
def test_shard_names_must_be_plain(sharded_folder, place):
    def change(weight_map):
        for name, shard in weight_map.items():
            weight_map[name] = place.format(shard) if isinstance(place, str) else place

    edit_index(sharded_folder, change)
    with pytest.raises(ValueError, match="not a plain file name"):
        models.load(sharded_folder)


def test_index_that_disagrees_with_a_shard(sharded_folder):
    edit_index(sharded_folder, lambda weight_map: weight_map.pop("model.norm.weight"))
    with pytest.raises(ValueError, match="disagree about model.norm.weight"):
        models.load(sharded_folder)


def test_missing_shard(sharded_folder):
    next(sharded_folder.glob("model-00001-*")).unlink()
    with pytest.raises(FileNotFoundError, match="model-00001-of-.*is missing"):
        models.load(sharded_folder)


def test_save_copies_tokenizer_and_writes_metadata(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    folder, _ = saved(tmp_path / "m", tokenizer_files=[tokenizer], metadata={"step": "7"})
    assert (folder / "tokenizer.json").read_text() == "{}"
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}


def test_save_is_all_or_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        saved(tmp_path / "m", tokenizer_files=[tmp_path / "absent.json"])
    assert list(tmp_path.iterdir()) == []
    saved(tmp_path / "m")
    with pytest.raises(FileExistsError, match="m exists"):
        saved(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_export_is_not_seen_before_it_is_whole(tmp_path, monkeypatch):
    write, seen = checkpoint._write_shards, []

    def watched(*args):
        write(*args)
        seen.append((tmp_path / "m").exists())

    monkeypatch.setattr(checkpoint, "_write_shards", watched)
    saved(tmp_path / "m")
    assert seen == [False] and [path.name for path in tmp_path.iterdir()] == ["m"]


def test_save_refuses_other_parameters(tmp_path):
    params = random_params(UNTIED)
    with pytest.raises(ValueError, match="not those of the config"):
        models.save(tmp_path / "m", TIED, params)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[9\], expected \[8\]"):
        models.save(tmp_path / "m", UNTIED, {**params, "final_norm": jnp.ones(9)})


@pytest.mark.all
@pytest.mark.parametrize("name", ["llama_linear", "glm4_moe"])
def test_saving_what_transformers_wrote_gives_its_tensors_back(tmp_path, name):
    source = pathlib.Path(__file__).parent / "golden" / name
    config, params = models.load(source, dtype="bfloat16")
    models.save(tmp_path / "m", config, params)
    ours = safetensors.numpy.load_file(tmp_path / "m" / "model.safetensors")
    theirs = safetensors.numpy.load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype
        np.testing.assert_array_equal(ours[name], theirs[name])
