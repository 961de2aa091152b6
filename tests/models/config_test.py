"""config.json dicts are written out as published checkpoints have them."""

import dataclasses

import pytest

from jaxrl_tis.models.config import ModelConfig, RopeConfig

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896,
    "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936, "use_mrope": False,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "pad_token_id": None, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": None,
    "tie_word_embeddings": True, "transformers_version": "5.0.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}
LLAMA31_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}
PUBLISHED = {"llama": SMOLLM2, "qwen2": QWEN25, "qwen3": QWEN3}


def test_smollm2():
    assert ModelConfig.from_hf(SMOLLM2) == ModelConfig(
        family="llama", vocab_size=49152, embed_dim=576, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64,  # 576 / 9
        mlp_dim=1536, rope=RopeConfig(kind="default", theta=100000.0), max_position=8192,
        norm_eps=1e-5, qkv_bias=False, qk_norm=False, tie_embeddings=True)


def test_qwen25_ignores_a_window_that_is_switched_off():
    config = ModelConfig.from_hf(QWEN25)
    assert (config.qkv_bias, config.qk_norm, config.tie_embeddings) == (True, False, True)
    assert (config.head_dim, config.rope.theta) == (64, 1e6)  # 896 / 14


def test_qwen3_states_its_head_dim():
    config = ModelConfig.from_hf(QWEN3)
    assert (config.qkv_bias, config.qk_norm) == (False, True)
    assert (config.head_dim, config.num_heads * config.head_dim) == (128, 2048)
    with pytest.raises(ValueError, match="head_dim"):
        ModelConfig.from_hf({k: v for k, v in QWEN3.items() if k != "head_dim"})


def test_untied_unless_stated_and_old_llama_defaults():
    absent = ("tie_word_embeddings", "num_key_value_heads", "rope_theta", "rope_scaling")
    config = ModelConfig.from_hf({k: v for k, v in SMOLLM2.items() if k not in absent})
    assert (config.tie_embeddings, config.num_kv_heads, config.rope.theta) == (False, 9, 10000.0)
    with pytest.raises(ValueError, match="num_key_value_heads"):
        ModelConfig.from_hf({k: v for k, v in QWEN25.items() if k != "num_key_value_heads"})


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 500000.0, "rope_scaling": LLAMA31_ROPE},
    {"rope_theta": 500000.0, "rope_scaling": {**LLAMA31_ROPE, "type": "llama3"}},
    {"rope_parameters": {**LLAMA31_ROPE, "rope_theta": 500000.0}},
    {"rope_theta": 500000.0, "rope_parameters": LLAMA31_ROPE},
])
def test_rope_of_transformers_4_and_5(spelling):
    hf = {k: v for k, v in SMOLLM2.items() if k not in ("rope_theta", "rope_scaling")}
    assert ModelConfig.from_hf(hf | spelling).rope == RopeConfig(
        kind="llama3", theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position=8192)


def test_rope_type_by_its_old_name():
    rope = ModelConfig.from_hf(SMOLLM2 | {"rope_scaling": {"type": "linear", "factor": 2}}).rope
    assert rope == RopeConfig(kind="linear", theta=100000.0, factor=2.0)


def test_yarn_fields_and_default_original_length():
    scaling = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2,
               "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None, "truncate": False}
    assert ModelConfig.from_hf(QWEN25 | {"rope_scaling": scaling}).rope == RopeConfig(
        kind="yarn", theta=1e6, factor=4.0, original_max_position=32768, beta_fast=16.0,
        beta_slow=2.0, mscale=1.0, mscale_all_dim=0.5, truncate=False)


@pytest.mark.parametrize("rope, message", [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "'linear'.*'yarn'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "100000 and 5.0"),
    ({"rope_scaling": {"type": "linear"}}, "'linear' needs the field 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}},
     "low_freq_factor=1.0"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_medium": 1}}, "beta_medium=1"),
    ({"rope_scaling": {**LLAMA31_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
])
def test_rope_settings_that_are_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(SMOLLM2 | rope)


@pytest.mark.parametrize("family, field, value", [
    ("llama", "model_type", "gemma3_text"),
    ("llama", "model_type", "qwen3_moe"),
    ("llama", "attention_bias", True),
    ("qwen3", "attention_bias", True),
    ("qwen2", "attention_bias", False),
    ("llama", "mlp_bias", True),
    ("llama", "hidden_act", "gelu"),
    ("llama", "pretraining_tp", 2),
    ("llama", "rope_interleaved", True),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "quantization_config", {"quant_method": "fp8"}),
    ("llama", "attn_logit_softcapping", 50.0),
    ("llama", "final_logit_softcapping", 30.0),
    ("qwen3", "num_experts", 128),
    ("llama", "num_local_experts", 8),
    ("llama", "sliding_window", 4096),
    ("qwen3", "layer_types", ["sliding_attention"] * 28),
    ("qwen3", "layer_types", ["full_attention"] * 27),
    ("qwen3", "layer_types", ["full_attention"] * 27 + ["sliding_attention"]),
    ("qwen2", "use_mrope", True),
    ("llama", "embedding_multiplier", 12.0),
    ("llama", "vocab_size", "49152"),
    ("llama", "vocab_size", 0),
    ("llama", "tie_word_embeddings", 1),
    ("llama", "rms_norm_eps", "1e-5"),
])
def test_settings_that_are_refused_by_name_and_value(family, field, value):
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(PUBLISHED[family] | {field: value})
    assert field in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("fields", [
    {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "_commit_hash": "0" * 40},
    {"use_return_dict": True, "num_labels": 2, "_output_attentions": False, "min_p": 0.1},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"type": "default", "factor": 1.0}},
    {"rope_scaling": {"rope_type": "default", "factor": 8.0, "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 100000, "factor": None}},
])
def test_fields_that_compute_nothing_are_no_error(fields):
    assert ModelConfig.from_hf(SMOLLM2 | fields) == ModelConfig.from_hf(SMOLLM2)


# What LlamaConfig, Qwen2Config and Qwen3Config of transformers 4.46.3, 4.57.6 and 5.24.0 have of their
# own beside the fields of the model (to_dict() and vars()); fields that are null are left out.
OF_TRANSFORMERS = {
    "_attn_implementation_autoset": False, "_name_or_path": "", "_output_attentions": False,
    "add_cross_attention": False, "chunk_size_feed_forward": 0, "diversity_penalty": 0.0,
    "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "name_or_path": "", "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_labels": 2, "num_return_sequences": 1, "output_attentions": False,
    "output_hidden_states": False, "output_scores": False, "pruned_heads": {},
    "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict": True,
    "return_dict_in_generate": False, "temperature": 1.0, "tf_legacy_loss": False,
    "tie_encoder_decoder": False, "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0,
    "use_bfloat16": False, "use_return_dict": True,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_that_transformers_writes_of_its_own_is_known(family):
    published = PUBLISHED[family]
    assert ModelConfig.from_hf(OF_TRANSFORMERS | published) == ModelConfig.from_hf(published)


def test_positions():
    config = ModelConfig.from_hf(SMOLLM2)  # 8192 positions
    assert config.check_length(8192) == ""
    with pytest.raises(ValueError, match="8193 tokens exceed max_position_embeddings = 8192"):
        config.check_length(8193)
    extended = ModelConfig.from_hf(SMOLLM2 | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert extended.check_length(8192) == ""
    assert "8193 tokens exceed" in extended.check_length(8193)
    assert "'linear' extends" in extended.check_length(8193)


def test_sliding_window_in_use():
    used = QWEN25 | {"use_sliding_window": True}
    with pytest.raises(ValueError, match="sliding_window=32768"):
        ModelConfig.from_hf(used)
    assert ModelConfig.from_hf(used | {"max_window_layers": 24}).num_layers == 24


@pytest.mark.parametrize("field", [
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "rms_norm_eps",
])
def test_missing_fields_are_named(field):
    with pytest.raises(ValueError, match=field):
        ModelConfig.from_hf({k: v for k, v in SMOLLM2.items() if k != field})


def test_null_is_the_same_as_absent():
    ModelConfig.from_hf(SMOLLM2 | {"head_dim": None, "quantization_config": None, "novel": None})


@pytest.mark.parametrize("changes, numbers", [
    ({"num_key_value_heads": 4}, ("9", "4")),
    ({"hidden_size": 577}, ("577", "9")),
    ({"head_dim": 63}, ("63",)),
])
def test_sizes_that_do_not_divide_name_both_numbers(changes, numbers):
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(SMOLLM2 | changes)
    assert all(number in str(error.value) for number in numbers)


@pytest.mark.parametrize("hf", [
    SMOLLM2,
    QWEN25,
    QWEN25 | {"tie_word_embeddings": False},
    QWEN3,
    SMOLLM2 | {"rope_scaling": LLAMA31_ROPE},
    SMOLLM2 | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    QWEN25 | {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "truncate": False}},
])
def test_to_hf_reads_back_equal(hf):
    config = ModelConfig.from_hf(hf)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_to_hf_refuses_a_family_that_cannot_say_it():
    config = ModelConfig.from_hf(SMOLLM2)
    with pytest.raises(ValueError, match="qk_norm=True.*'llama'"):
        dataclasses.replace(config, qk_norm=True).to_hf()
