import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import export, models
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.models import lora, peft, transformer
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.record.provenance import write_run_files
from tests import configs_test, tiny

pytestmark = pytest.mark.by_jax("checkpoints through orbax")
BASE = pathlib.Path(__file__).parent / "models/golden_peft/base"


@pytest.fixture(scope="module")
def run():
    return tiny.finished()


def restored(workdir, step=None):
    """The policy of a checkpoint, as the run itself reads it."""
    from jaxrl_tis.learner.state import read_params

    return read_params(tiny.setup().training, str(workdir), step)


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_folder_holds_the_policy(run, tmp_path, dtype):
    assert export.export(str(run), str(tmp_path / "out"), dtype=dtype) == tiny.STEPS
    model, params = models.load(tmp_path / "out", dtype="float32")
    assert model == tiny.setup().model
    for read, own in zip(jax.tree.leaves(params), jax.tree.leaves(restored(run)), strict=True):
        np.testing.assert_array_equal(read, own.astype(dtype).astype("float32"))
    tokens = np.arange(6)[None]
    expected = transformer.logits(restored(run), model, tokens)
    tolerance = 0 if dtype == "float32" else 0.05
    np.testing.assert_allclose(transformer.logits(params, model, tokens), expected, atol=tolerance)


def test_an_older_step(run, tmp_path):
    assert export.export(str(run), str(tmp_path / "out"), step=4, dtype="float32") == 4
    _, params = models.load(tmp_path / "out")
    np.testing.assert_array_equal(params["embed"], restored(run, 4)["embed"])
    assert not np.array_equal(params["embed"], restored(run)["embed"])
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["step"] == "4" and file.metadata()["run"] == "tiny"


def workdir_of(folder, path):
    """A workdir with the parameters at `path` as its policy."""
    config = tiny.config(model__path=str(path), task__tokenizer="")
    write_run_files(folder, config.to_dict())
    with Checkpoints(folder, keep=1) as checkpoints:
        _, params = models.load(path)
        checkpoints.save(3, {"policy": {"params": params}}, {"step": 3})


HF = {"model_type": "qwen2", "vocab_size": 272, "hidden_size": 16, "intermediate_size": 24,
      "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
      "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
      "rope_theta": 1e4, "hidden_act": "silu", "eos_token_id": 258}


@pytest.mark.all
def test_tokenizer_and_chat_template_come_along(tmp_path):
    source = tmp_path / "model"
    configs_test.write_checkpoint(source, HF)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    config = models.read_config(source)
    models.save(tmp_path / "weights", config, transformer.init(config, jax.random.key(0)))
    (tmp_path / "weights" / "model.safetensors").rename(source / "model.safetensors")
    workdir_of(tmp_path / "run", source)
    assert export.export(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float32") == 3
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
             "chat_template.jinja"}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.chat([{"role": "user", "content": "2+3"}]) == "2+3!"


GLM = HF | {
    "model_type": "glm4_moe", "num_hidden_layers": 2, "moe_intermediate_size": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "attention_bias": True,
}


def test_experts_are_exported_with_the_bias_of_their_router_in_float32(tmp_path):
    source = tmp_path / "model"
    configs_test.write_checkpoint(source, GLM)
    config = models.read_config(source)
    params = transformer.init(config, jax.random.key(0))
    bias = 0.1 + np.arange(4, dtype=np.float32)[None] * 2.0**-12  # all one in bfloat16
    params["layers"]["router_bias"] = bias
    models.save(tmp_path / "weights", config, params)
    (tmp_path / "weights" / "model.safetensors").rename(source / "model.safetensors")
    workdir_of(tmp_path / "run", source)
    export.export(str(tmp_path / "run"), str(tmp_path / "out"), dtype="bfloat16")
    assert models.read_config(tmp_path / "out") == config
    _, read = models.load(tmp_path / "out", dtype="bfloat16")
    np.testing.assert_array_equal(read["layers"]["router_bias"], bias)
    np.testing.assert_array_equal(
        read["layers"]["expert_up"], params["layers"]["expert_up"].astype("bfloat16")
    )


def by_transformers(folder):
    """The special ids that AutoTokenizer has, and those of GenerationConfig.from_pretrained, or
    where it finds no file of its own, of GenerationConfig.from_model_config."""
    read = lambda name: json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    vocab = {t["content"]: t["id"] for t in read("tokenizer.json")["added_tokens"]}
    named = read("tokenizer_config.json")
    special = {n: vocab[x] for n, x in named.items() if n.endswith("_token") and isinstance(x, str)}
    defaults = {"llama": {"bos_token_id": 1, "eos_token_id": 2}, "qwen2": {}}
    config = read("config.json")
    of_model = defaults[config["model_type"]] | config
    generation = read("generation_config.json") or of_model
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "temperature", "top_k")
    return special, *({n: x[n] for n in names if n in x} for x in (generation, of_model))


def exported(tmp_path, hf, edit=lambda source: None):
    """The source and the export of a checkpoint with this config.json."""
    source = tmp_path / "model"
    configs_test.write_checkpoint(source, hf)
    edit(source)
    config = models.read_config(source)
    models.save(tmp_path / "weights", config, transformer.init(config, jax.random.key(0)))
    (tmp_path / "weights" / "model.safetensors").rename(source / "model.safetensors")
    workdir_of(tmp_path / "run", source)
    export.export(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float32")
    return source, tmp_path / "out"


def test_end_tokens_of_config_json_alone_are_kept(tmp_path):
    hf = HF | {"eos_token_id": [258, 7, 9], "bos_token_id": 5, "pad_token_id": 6, "temperature": 0.6}
    source, out = exported(
        tmp_path, hf, lambda source: (source / "generation_config.json").unlink()
    )
    assert by_transformers(out) == by_transformers(source)
    assert by_transformers(out)[1] == {
        "eos_token_id": [258, 7, 9], "bos_token_id": 5, "pad_token_id": 6, "temperature": 0.6,
    }
    assert load_tokenizer(out).eos_ids == load_tokenizer(source).eos_ids == (258, 7, 9)


def test_end_tokens_of_either_file_stay_where_they_are(tmp_path):
    def edit(source):
        (source / "generation_config.json").write_text('{"top_k": 3, "eos_token_id": [258, 3]}')

    source, out = exported(tmp_path, HF | {"eos_token_id": 7}, edit)
    assert by_transformers(out) == by_transformers(source)
    assert load_tokenizer(out).eos_ids == (258, 3, 7)


def test_end_tokens_that_no_model_file_names_are_written(tmp_path):
    def edit(source):
        (source / "generation_config.json").write_text('{"top_k": 3}')
        (source / "config.json").write_text(json.dumps(HF | {"eos_token_id": None}))

    _, out = exported(tmp_path, HF, edit)
    assert by_transformers(out)[2] == {"eos_token_id": [258]}


def test_the_tokenizer_of_a_gguf_file_becomes_files(tmp_path):
    from tests.data import tokenizer_files_test

    path = tokenizer_files_test.write_gguf(tmp_path / "model.gguf", pad=2, add_bos=True)
    tokenizer = load_tokenizer(path)
    (tmp_path / "folder").mkdir()
    folder = export._described(tokenizer, tmp_path / "folder")
    again = load_tokenizer(folder)
    assert export._identity(again) == export._identity(tokenizer)
    read = lambda name: json.loads((folder / name).read_text())
    # Its padding is its end token, which stays so; ids as written by write_gguf.
    ids = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
    assert read("generation_config.json") == read("config.json") == ids
    named = read("tokenizer_config.json")
    assert (named["bos_token"], named["eos_token"], named["pad_token"]) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>"
    )
    assert named["chat_template"] == tokenizer_files_test.TEMPLATE
    text = "ab a"
    assert again.encode(text, add_special=True) == tokenizer.encode(text, add_special=True)


def test_the_tokenizer_of_characters_becomes_files(run, tmp_path):
    export.export(str(run), str(tmp_path / "out"))
    assert by_transformers(tmp_path / "out") == (
        {"pad_token": 0, "bos_token": 1, "eos_token": 2},
        *[{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2]}] * 2,
    )
    own, read = load_tokenizer("char"), load_tokenizer(tmp_path / "out")
    text = "12 + 3*4-5/6=7890"
    assert read.encode(text) == own.encode(text)
    assert read.encode(text, add_special=True) == own.encode(text, add_special=True)
    assert read.decode(own.encode(text)) == text


@pytest.mark.parametrize("lost, named", [
    ("generation_config.json", "end tokens, generation config"), ("chat_template.jinja", "chat template"),
])
def test_a_lost_file_is_noticed(tmp_path, monkeypatch, lost, named):
    def edit(source):
        (source / "chat_template.jinja").write_text("{{ messages[0].content }}!")
        (source / "generation_config.json").write_text('{"eos_token_id": [258, 3]}')

    monkeypatch.setattr(
        export, "TOKENIZER_FILES", [name for name in export.TOKENIZER_FILES if name != lost]
    )
    with pytest.raises(RuntimeError, match=f"reads back with another {named}; it is now"):
        exported(tmp_path, HF, edit)
    assert (tmp_path / "out.wrong").is_dir()


def test_what_reads_back_wrong_is_set_aside(run, tmp_path, monkeypatch):
    load = models.load

    def damaged(*args, **kwargs):
        config, params = load(*args, **kwargs)
        return config, params | {"embed": params["embed"] + 1}

    monkeypatch.setattr(export.models, "load", damaged)
    with pytest.raises(RuntimeError, match="reads back with another model; it"):
        export.export(str(run), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists() and (tmp_path / "out.wrong").is_dir()


@pytest.mark.all
def test_an_adapter_whose_scale_is_no_quotient_of_floats_is_itself(tmp_path):
    """32 / sqrt(5) * 5 / 5 is another float than 32 / sqrt(5)."""
    model = models.read_config(BASE)
    shapes = transformer.abstract_params(model)
    adapter = lora.Adapter.of(lora.parse("rslora(rank=5, alpha=32.0)"), model, shapes)
    factors = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), adapter.abstract(shapes))
    peft.save(tmp_path / "out", adapter, factors)
    read, _ = peft.load(tmp_path / "out", model)
    assert export._is_same(read, adapter)
    scales = tuple((name, scale * 1.001) for name, scale in adapter.scales)
    assert not export._is_same(dataclasses.replace(adapter, scales=scales), adapter)


def test_refusals(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="is it the --workdir of a run"):
        export.export(str(tmp_path), str(tmp_path / "out"))
    with pytest.raises(FileNotFoundError, match="no checkpoint 99 .*complete steps there"):
        export.export(str(run), str(tmp_path / "out"), step=99)
    for write in (export.export, export.export_adapter):
        with pytest.raises(ValueError, match="gs://b/out is not a folder of this machine; export to one"):
            write(str(run), "gs://b/out")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="give the export a folder of its own"):
        export.export(str(run), str(tmp_path / "out"))


@pytest.mark.parametrize("options, words", [
    (["--merged", "--dtype=bfloat16"], "would lose small updates"),
    (["--merged", "--adapter"], "not allowed with"),
])
def test_a_merge_that_would_lose_an_adapter_is_refused(monkeypatch, capsys, options, words):
    monkeypatch.setattr(sys, "argv", ["export", "run", "out", *options])
    with pytest.raises(SystemExit) as ended:
        export.main()
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.all
def test_the_command(run, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_tis.export", str(run), str(tmp_path / "out")],
        capture_output=True, text=True, cwd=configs_test.ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out'}: the policy after step 5, in bfloat16, read back and compared\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
