"""Folders of PEFT: what PEFT itself wrote and computed, the round trip, and folders that are refused."""

import dataclasses
import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_tis import models
from jaxrl_tis.learner import state
from jaxrl_tis.models import lora, peft, peft_config, transformer
from tests import tiny
from tests.models import lora_test

GOLDEN = pathlib.Path(__file__).parent / "golden_peft"
TOKENS = np.arange(12).reshape(2, 6) * 5 % 24


BASES = {
    "qwen3_moe": "qwen3_moe_raw", "glm4_moe": "glm4_moe", "converted": "qwen3_moe_raw",
    "down": "qwen3_moe_raw", "single_experts": "qwen3_moe",
}


def drawn(config, text, size=0.1):
    """Returns (adapter, factors) with random A, and B of this size."""
    adapter, rng = lora_test.adapter(config, text), np.random.default_rng(0)
    shapes = adapter.abstract(transformer.abstract_params(config))
    of = lambda path, x: rng.normal(size=x.shape).astype(np.float32) * (size if path[-1].key == "b" else 1)
    return adapter, jax.tree_util.tree_map_with_path(lambda path, x: np.float32(of(path, x)), shapes)


def base_folder(name):
    return GOLDEN.parent / "golden" / BASES[name] if name in BASES else GOLDEN / "base"


@pytest.mark.all
@pytest.mark.by_jax("a whole model, compared with PEFT")
@pytest.mark.parametrize("name", ["all", "rslora", "regex", "patterns", "whole_name", *BASES])
def test_the_logits_are_those_of_peft(name):
    """make_golden_peft.py wrote the files. Its adapters move logits by 0.01 at least, and those of models
    with experts by 0.1. transformers in float32 is off by up to 1e-5 there (error.npy)."""
    config, params = models.load(base_folder(name))
    expected = np.load(GOLDEN / f"{name}.npy")
    adapted = peft.beside(params, GOLDEN / name, config)
    logits = jax.jit(lambda p: transformer.logits(p, config, jnp.asarray(TOKENS)))
    np.testing.assert_allclose(logits(adapted), expected, rtol=0, atol=5e-5 if name in BASES else 1e-5)
    if name not in BASES:
        np.testing.assert_allclose(logits(lora.merged(adapted)), expected, rtol=0, atol=1e-5)
        assert np.abs(logits(params) - expected).max() > 0.01


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "down"])
def test_a_folder_of_experts_is_written_as_peft_wrote_it(tmp_path, name):
    """The same tensors under the same names, and the same targets with the same ranks and alphas: PEFT
    reads it as it read its own, whose logits are beside it."""
    config = models.read_config(base_folder(name))
    peft.save(tmp_path / "out", *peft.load(GOLDEN / name, config))
    own, written = (
        safetensors.numpy.load_file(x / "adapter_model.safetensors")
        for x in (GOLDEN / name, tmp_path / "out")
    )
    assert own.keys() == written.keys()
    for tensor, x in own.items():
        np.testing.assert_array_equal(written[tensor], x, err_msg=tensor)
    own, written = (
        json.loads((x / "adapter_config.json").read_text()) for x in (GOLDEN / name, tmp_path / "out")
    )
    last = lambda names: {".".join(x.split(".")[-2:]) for x in names}
    assert last(own["target_parameters"]) == last(written["target_parameters"])
    assert set(own["target_modules"]) == set(written["target_modules"])
    of = lambda fields, x: {
        name: fields[pattern].get(name, fields[default])
        for name in fields["target_parameters"]
        for pattern, default in [(f"{x}_pattern", {"rank": "r", "alpha": "lora_alpha"}[x])]
    }
    for x in ("rank", "alpha") if name != "down" else ():
        assert of(own, x) == of(written, x)


def test_gate_and_up_of_experts_share_a_or_have_ranks_of_their_own(tmp_path):
    """PEFT has rank 4 of both together in either folder."""
    ranks, factors = {}, {}
    for name in ("qwen3_moe", "converted"):
        adapter, found = peft.load(GOLDEN / name, models.read_config(base_folder(name)))
        ranks[name], factors[name] = dict(adapter.ranks)["expert_up"], found["layers"]
    assert ranks == {"qwen3_moe": 2, "converted": 4}
    of = lambda name: [factors[name][x]["a"] for x in ("expert_gate", "expert_up")]
    np.testing.assert_array_equal(*of("converted"))
    assert not np.any(of("qwen3_moe")[0] == of("qwen3_moe")[1])


@pytest.mark.parametrize("targets", ["all", "attention", "expert_gate", "expert_up,expert_down", "up"])
@pytest.mark.parametrize("size", [0.1, 0])
def test_a_round_trip_of_experts(tmp_path, targets, size):
    """Also of fresh factors, whose B is zero."""
    config = models.read_config(base_folder("glm4_moe"))
    adapter, factors = drawn(config, f"lora(rank=8, alpha=32, targets='{targets}')", size)
    peft.save(tmp_path / "out", adapter, factors)
    read, found = peft.load(tmp_path / "out", config)
    assert read == adapter
    jax.tree.map(np.testing.assert_array_equal, found, factors)


def test_experts_of_one_layer_alone(tmp_path):
    """Named by the whole name of their tensor. The other layer with experts has factors of zeros."""
    config, name = models.read_config(base_folder("down")), "model.layers.2.mlp.experts.down_proj"
    folder = changed(
        tmp_path, lambda t: {n: x for n, x in t.items() if "layers.0." not in n}, "down",
        target_parameters=[name],
    )
    _, factors = peft.load(folder, config)
    _, whole = peft.load(GOLDEN / "down", config)
    for x, found in factors["layers"]["expert_down"].items():
        np.testing.assert_array_equal(found[1], whole["layers"]["expert_down"][x][1])
        assert not found[0].any() and found[1].any()


def test_gate_and_up_of_different_ranks_have_no_tensor_in_peft(tmp_path):
    adapter, factors = drawn(lora_test.EXPERTS, "lora(rank=4)")
    ranks = tuple((n, 1 if n == "expert_up" else rank) for n, rank in adapter.ranks)
    with pytest.raises(ValueError, match=r"ranks \[2, 1\] .* of expert_gate, expert_up"):
        peft.save(tmp_path / "out", dataclasses.replace(adapter, ranks=ranks), factors)


@pytest.mark.parametrize("text", ["lora(rank=4, alpha=32, targets='all,head')", "rslora(rank=3)"])
def test_a_round_trip(tmp_path, text):
    _, adapted = lora_test.trained(lora_test.UNTIED, text)
    adapter, factors = lora.adapter_of(adapted, lora_test.UNTIED), lora.split(adapted)[0]
    peft.save(tmp_path / "out", adapter, factors, "models/mine")
    read, found = peft.load(tmp_path / "out", lora_test.UNTIED)
    assert dict(read.ranks) == dict(adapter.ranks)
    assert dict(read.scales) == pytest.approx(dict(adapter.scales), rel=1e-15)
    for stack, leaves in factors["layers"].items():
        for x in "ab":
            np.testing.assert_array_equal(found["layers"][stack][x], leaves[x])
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert fields["target_modules"][0] == "down_proj" and fields["lora_alpha"] / fields["r"] == (
        pytest.approx(dict(adapter.scales)["q"])
    )
    assert peft_config.base_of(tmp_path / "out") == ("models/mine", "")
    with pytest.raises(FileExistsError):
        peft.save(tmp_path / "out", adapter, factors)


def test_modules_of_gemma_have_names(tmp_path):
    """Its layers have norms that others lack."""
    config = models.read_config(GOLDEN.parent / "golden" / "gemma3")
    adapter = lora.Adapter.of(lora.parse("lora(rank=2)"), config, transformer.abstract_params(config))
    factors = lora_test.jitted_init(adapter, config, 0)
    peft.save(tmp_path / "out", adapter, factors)
    read, found = peft.load(tmp_path / "out", config)
    assert dict(read.ranks) == dict(adapter.ranks)
    jax.tree.map(np.testing.assert_array_equal, found, factors)


@pytest.mark.parametrize("narrow", ["head", "copy"])
def test_the_copy_of_a_head_may_have_another_precision(narrow):
    exact = np.float32([[1.001, 2.003]])
    rounded = exact.astype(jnp.bfloat16)
    one, other = (rounded, exact) if narrow == "copy" else (exact, rounded)
    assert peft._is_rounded(one, other) and not peft._is_rounded(one, other + other)


def test_an_adapter_of_several_ranks_is_written_with_patterns(tmp_path):
    """One that PEFT wrote with patterns, written again: rank 4 stands for all but the others."""
    config = models.read_config(GOLDEN / "base")
    adapter, factors = peft.load(GOLDEN / "patterns", config)
    assert len(set(adapter.ranks)) > 1 and len({rank for _, rank in adapter.ranks}) > 1
    peft.save(tmp_path / "out", adapter, factors, "hf://owner/name@v1")
    again, read = peft.load(tmp_path / "out", config)
    assert again == adapter and peft_config.base_of(tmp_path / "out") == ("owner/name", "v1")
    jax.tree.map(np.testing.assert_array_equal, read, factors)


def changed(tmp_path, tensors=lambda t: t, source="all", **fields):
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / source, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    path = folder / "adapter_model.safetensors"
    safetensors.numpy.save_file(tensors(safetensors.numpy.load_file(path)), path)
    return folder


@pytest.mark.parametrize("tensors, named", [
    (lambda t: {}, "binds no module"),
    (lambda t: {n.replace("model.model", "model.other"): x for n, x in t.items()}, "bind no module"),
    (lambda t: t | {"base_model.model.extra": np.zeros(2, np.float32)}, "1 tensors that bind no"),
    (lambda t: t | {f"base_model.model.model.embed_tokens.lora_embedding_{x}": np.zeros((2, 2), np.float32)
                    for x in "AB"}, "changed adapts model.embed_tokens, and here the projections of"),
    (lambda t: t | {"base_model.model.model.layers.1.mlp.gate.lora_A.weight": np.zeros((2, 2), np.float32)},
     "1 tensors that bind no"),  # a router, which this model lacks
    (lambda t: {n: x for n, x in t.items() if "lm_head.lora_B" not in n}, "has no tensor"),
    (lambda t: {n: x for n, x in t.items() if "lm_head.lora_A" not in n}, "bind no module"),
    (lambda t: {n: x * np.nan for n, x in t.items()}, "must have finite floats, and its dtype is float32"),
    (lambda t: {n: x.astype(np.int8) for n, x in t.items()}, "and its dtype is int8"),
])
def test_tensors_that_are_of_another_model(tmp_path, tensors, named):
    with pytest.raises(ValueError, match=named):
        peft.load(changed(tmp_path, tensors), models.read_config(GOLDEN / "base"))


def test_an_adapter_of_another_base(tmp_path):
    config, params = models.load(GOLDEN / "base")
    with pytest.raises(ValueError, match="lm_head.base_layer.weight is not this model's head"):
        peft.beside(params | {"head": params["head"] + 1e-3}, GOLDEN / "all", config)
    with pytest.raises(ValueError, match="another base"):
        peft.load(GOLDEN / "all", lora_test.UNTIED)
    with pytest.raises(ValueError, match="the model's head is its embedding"):
        peft.load(GOLDEN / "all", lora_test.DENSE)
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        peft.load(tmp_path, lora_test.DENSE)


MODEL = "hf://owner/name"


def test_an_adapter_of_the_hub(monkeypatch):
    """Messages name it as the user did, with both slashes."""
    path, config = "hf://owner/adapter", models.read_config(GOLDEN / "base")
    found = {path: GOLDEN / "all", "hf://owner/none": GOLDEN}
    monkeypatch.setattr(peft.hub, "local_files", lambda path, names: found.get(path, path))
    adapter, factors = peft.load(path, config)
    expected = peft.load(GOLDEN / "all", config)
    assert adapter == expected[0] and peft_config.base_of(path) == ("base", "")
    jax.tree.map(np.testing.assert_array_equal, factors, expected[1])
    with pytest.raises(ValueError, match="^hf://owner/adapter is of another base or rank"):
        peft.load(path, lora_test.UNTIED)
    with pytest.raises(FileNotFoundError, match="^hf://owner/none has no adapter_config.json"):
        peft.load("hf://owner/none", config)


def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_read():
    setup = types.SimpleNamespace(config=tiny.config(), model=lora_test.UNTIED)
    with pytest.raises(ValueError, match="another base"):
        state.with_adapter(setup, lambda: pytest.fail("read"), GOLDEN / "all")


def test_an_adapter_of_another_revision_is_used_with_a_warning(tmp_path, capsys):
    config, params = models.load(GOLDEN / "base")
    folder = changed(tmp_path, base_model_name_or_path="owner/name", revision="v1")
    for path, is_told in ((f"{MODEL}@v1", False), (f"{MODEL}@v2", True)):
        training = tiny.setup().training
        setup = types.SimpleNamespace(
            config=tiny.config(model__path=path), model=config, learner=training.learner, layout=training.layout,
        )
        adapted = state.with_adapter(setup, lambda: params, folder)
        assert lora.adapter_of(adapted, config).ranks
        assert ("warning: " in capsys.readouterr().err) == is_told
