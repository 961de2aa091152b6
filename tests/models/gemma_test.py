"""Gemma 3: layers with a sliding window, two rotary bases, four norms around 1, GeGLU and a scaled
embedding. golden_test.py compares its logits with transformers; here each of these is taken away."""

import dataclasses
import functools
import math
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import models, sharding
from jaxrl_tis.engine.cache import KV
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models import attention, placement, safetensors, transformer
from jaxrl_tis.models import gguf as gguf_loader
from jaxrl_tis.models.config import ModelConfig
from tests.models import golden_test, gguf_test, samplers

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

FOLDER = pathlib.Path(__file__).parent / "golden" / "gemma3"
GEMMA_1B = {  # as published
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}


@functools.cache
def gemma():
    return models.load(FOLDER)


def test_a_published_config():
    config = ModelConfig.from_hf(GEMMA_1B)
    assert config.sliding.window == 512 and config.tie_embeddings and config.qk_norm
    assert config.sliding.layers == tuple(i for i in range(26) if i not in (5, 11, 17, 23))
    assert (config.rope.theta, config.sliding.rope.theta) == (1e6, 1e4)
    leaves = jax.tree.leaves(transformer.abstract_params(config))
    assert sum(x.size for x in leaves) == 999_885_952  # as its card says: 1 B
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_both_styles_of_config_are_one_model():
    later = ModelConfig.from_hf({k: v for k, v in GEMMA_1B.items() if "rope" not in k} | {
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4
        + ["sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
        },
    })
    assert later == ModelConfig.from_hf(GEMMA_1B)


def test_scaling_beside_parameters_by_kind_is_of_full_layers():
    by_kind = {"full_attention": {"rope_theta": 1000000}, "sliding_attention": {"rope_theta": 10000}}
    config = ModelConfig.from_hf({k: v for k, v in GEMMA_1B.items() if "rope" not in k} | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_parameters": by_kind,
    })
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert config.sliding.rope.kind == "default"


def test_the_largest_model_is_refused_in_both_formats(tmp_path):
    """It scales its queries by 168, and llama.cpp knows it by its number of layers."""
    fields = {
        "block_count": 62, "context_length": 64, "embedding_length": 5376, "feed_forward_length": 64,
        "attention.head_count": 32, "attention.head_count_kv": 16, "attention.key_length": 128,
        "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
    }
    fields = {f"gemma3.{key}": value for key, value in fields.items()}
    path = gguf_test.write(
        tmp_path / "m.gguf", "gemma3", fields, {"token_embd.weight": np.zeros((4, 5376), np.float32)})
    with pytest.raises(ValueError, match="27B scales its queries by 168, not by the head size 128"):
        models.read_config(path)


@pytest.mark.parametrize("changes, message", [
    ({"layer_types": ["chunked_attention"] * 26}, "layer_types=.* is not implemented"),
    ({"layer_types": ["full_attention"]}, "for each of the num_hidden_layers=26"),
    ({"query_pre_attn_scalar": 168}, "query_pre_attn_scalar=168 is not implemented"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"sliding_window": None}, "no 'sliding_window'"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
    ({"layer_types": [["x"]] * 26}, "layer_types=.* is not implemented"),
    ({"head_dim": None}, "no 'head_dim'"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan in config.json must be a finite number"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be at least 0"),
])
def test_settings_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(GEMMA_1B | changes)


def test_invariant_numerics_are_refused():
    config, params = gemma()
    program = transformer.Program(numerics="invariant")
    with pytest.raises(ValueError, match="no layers with a sliding window"):
        transformer.logits(params, config, jnp.zeros((1, 4), jnp.int32), program=program)


def other(config, params):
    """{what is taken away: (config, parameters)}."""
    change, sliding = functools.partial(dataclasses.replace, config), config.sliding
    window = lambda **fields: change(sliding=dataclasses.replace(sliding, **fields))
    layers = {k: v for k, v in params["layers"].items() if "post_norm" not in k}
    return {
        "no window": (window(window=10**6), params),
        "a window of one token more": (window(window=10), params),
        "a window in all layers": (window(layers=tuple(range(config.num_layers))), params),
        "one rotary base": (window(rope=config.rope), params),
        "silu": (change(activation="silu"), params),
        "norms around 0": (change(zero_centered_norms=False), params),
        "no post norms": (change(post_norms=False), params | {"layers": layers}),
        "an unscaled embedding": (change(scales_embeddings=False), params),
    }


@pytest.mark.all
@pytest.mark.parametrize("name", [
    "no window", "a window of one token more", "a window in all layers", "one rotary base", "silu",
    "norms around 0", "no post norms", "an unscaled embedding",
])
def test_controls(name):
    assert golden_test.miss("gemma3", *other(*gemma())[name]) > 1e-2


@pytest.mark.all
def test_new_parameters_have_norms_of_one():
    config, _ = gemma()
    params = transformer.init(config, jax.random.key(0))
    norms = [x for name, x in params["layers"].items() if "norm" in name]
    assert len(norms) == 6 and not any(map(np.any, norms)) and not np.any(params["final_norm"])


@pytest.mark.all
def test_a_folder_that_is_written_is_the_model(tmp_path):
    config, params = gemma()
    safetensors.save(tmp_path / "saved", config, params)
    assert models.load(tmp_path / "saved")[0] == config
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "saved")[1], params)


def test_a_gguf_file_is_the_model(tmp_path):
    """Its norms are stored as the factors, and so is the last one."""
    config, params = gemma()
    layers = tuple(i for i in range(4) if (i + 1) % 6)
    sliding = dataclasses.replace(config.sliding, layers=layers)
    tensors = {
        name: x + 1 if "norm" in name else x
        for name, x in gguf_test.stored_tensors(config, params).items()
    }
    fields = {
        key.replace("gemma3text", "gemma3"): value
        for key, value in gguf_test.metadata(config).items()
    } | {"gemma3.attention.sliding_window": 9}
    path = gguf_test.write(tmp_path / "model.gguf", "gemma3", fields, tensors)
    loaded, loaded_params = gguf_loader.load(path)
    assert loaded.norm_eps == np.float32(config.norm_eps)
    assert loaded == dataclasses.replace(config, sliding=sliding, norm_eps=loaded.norm_eps)
    close = functools.partial(np.testing.assert_allclose, atol=1e-7)
    jax.tree.map(close, loaded_params, params)
    known = {f"{gguf.TENSOR_NAMES[t]}.weight".replace("{bid}", "0")
             for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GEMMA3]}
    assert {name for name in tensors if name.startswith("blk.0") or "blk" not in name} <= known


def test_packed_rows_equal_sequences_alone():
    config, params = gemma()
    tokens = np.random.default_rng(0).integers(0, 97, 40).astype(np.int32)
    run = jax.jit(lambda *x: transformer.logits(params, config, *x))
    positions = np.concatenate([np.arange(24), np.arange(16)])
    packed = run(tokens[None], positions[None], np.repeat([1, 2], [24, 16])[None])[0]
    for part in (slice(0, 24), slice(24, 40)):
        row = np.zeros((1, 40), np.int32)
        row[0, : part.stop - part.start] = tokens[part]
        alone = run(row, np.arange(40)[None], np.ones((1, 40), np.int32))[0]
        np.testing.assert_allclose(
            packed[part], alone[: part.stop - part.start], atol=2e-5)


# The engine: pages of eight positions, a window of nine.

ENGINES = {
    "unrolled": {}, "scanned": dict(unroll=False), "chunks": dict(prefill_chunk=8),
    "int8 keys": dict(cache_dtype="int8"),
}


@pytest.mark.all
@pytest.mark.cases("scanned", "chunks")
@pytest.mark.parametrize("name", ENGINES)
def test_the_sampler_has_the_log_probs_of_the_learner(name):
    config, params = gemma()
    sizes = dict(slots=4, max_length=48, steps=3, prefill_batch=2, page_size=8)
    engine = Engine(config, EngineConfig(**sizes | ENGINES[name]))
    for t, row in samplers.sampled(engine, engine.load(jax.tree.map(jnp.asarray, params))):
        atol = 0.3 if name == "int8 keys" else 2e-4
        np.testing.assert_allclose(t.logp_behav, samplers.logps(t, golden_logits(row)), atol=atol)


@jax.jit
def golden_logits(tokens):
    config, params = gemma()
    return transformer.logits(params, config, tokens)


def test_grouped_rows_read_the_pages_of_their_window():
    """64 rows of any length."""
    rng = np.random.default_rng(2)
    size, columns, window = 16, 12, 20
    index = rng.integers(0, size * columns, 64).astype(np.int32)[:, None]
    table = 1 + np.arange(64 * columns, dtype=np.int32).reshape(64, -1)
    pages = rng.normal(0, 1, (2, 1 + table.size, 2, size, 8)).astype(np.float32)
    q = rng.normal(0, 1, (64, 1, 4, 8)).astype(np.float32)

    def read(numbers):
        k, v = (jnp.asarray(x)[numbers] for x in pages)
        return KV(k, v, None, None)

    rows = [jnp.asarray(x) for x in (table, index)]
    begin = attention.Window(window, True).first(rows[1])
    out = attention.paged_attention_by_length(jnp.asarray(q), read, *rows, begin)
    for row in range(64):
        first, last = max(0, index[row, 0] - window + 1), index[row, 0]
        of_row = [np.swapaxes(x[table[row]], 1, 2).reshape(-1, 2, 8) for x in pages]
        k, v = (np.swapaxes(x[first : last + 1], 0, 1).astype(np.float64) for x in of_row)
        scores = np.einsum("ngk,nsk->ngs", q[row, 0].reshape(2, 2, 8), k) / 8**0.5
        p = np.exp(scores)
        expected = np.einsum("ngs,nsk->ngk", p / p.sum(-1, keepdims=True), v).reshape(4, 8)
        np.testing.assert_allclose(out[row, 0], expected, atol=2e-5)


@pytest.mark.all
def test_a_mesh_gives_the_logits_of_one_device():
    config, params = gemma()
    tokens = np.random.default_rng(0).integers(0, 97, (4, 40)).astype(np.int32)
    expected = transformer.logits(params, config, jnp.asarray(tokens))
    layout = sharding.layout((2, 1, 2, 2), sharding.TRAIN_RULES, vocab_size=97)
    placed = placement.put(params, layout, config)
    program = transformer.Program(layout=layout)
    found = jax.jit(lambda p, t: transformer.logits(p, config, t, program=program))(placed, tokens)
    np.testing.assert_allclose(found, expected, atol=5e-5)
