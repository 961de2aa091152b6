"""config.json dicts are written out as published checkpoints have them."""

import dataclasses

import pytest

from jaxrl_tis.models import hf_config
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig

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
QWEN3_MOE = {  # Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}
GLM_AIR = {  # GLM-4.5-Air
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
    "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False,
    "vocab_size": 151552,
}
LLAMA31_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}
PUBLISHED = {
    "llama": SMOLLM2, "qwen2": QWEN25, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "glm4_moe": GLM_AIR,
}


def without(hf, *names):
    return {key: value for key, value in hf.items() if key not in names}


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


def test_qwen3_moe():
    assert ModelConfig.from_hf(QWEN3_MOE) == ModelConfig(
        family="qwen3_moe", vocab_size=151936, embed_dim=2048, num_layers=48, num_heads=32,
        num_kv_heads=4, head_dim=128, mlp_dim=6144, rope=RopeConfig(kind="default", theta=1e6),
        max_position=40960, norm_eps=1e-6, qkv_bias=False, qk_norm=True, tie_embeddings=False,
        moe=MoeConfig(num_experts=128, top_k=8, expert_dim=768))


def test_glm_air():
    assert ModelConfig.from_hf(GLM_AIR) == ModelConfig(
        family="glm4_moe", vocab_size=151552, embed_dim=4096, num_layers=46, num_heads=96,
        num_kv_heads=8, head_dim=128, mlp_dim=10944,
        rope=RopeConfig(kind="default", theta=1e6, fraction=0.5),
        max_position=131072, norm_eps=1e-5, qkv_bias=True, qk_norm=False, tie_embeddings=False,
        moe=MoeConfig(num_experts=128, top_k=8, expert_dim=1408, score="sigmoid",
                      dense_layers=(0,), shared_dim=1408))
    assert hf_config.extra_layers(GLM_AIR) == 1


def test_the_settings_in_which_glm_models_differ():
    hf = GLM_AIR | {
        "attention_bias": False, "use_qk_norm": True, "n_shared_experts": 2, "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
        "norm_topk_prob": False, "partial_rotary_factor": 0.25,
    }
    config = ModelConfig.from_hf(hf)
    assert (config.qkv_bias, config.qk_norm, config.rope.fraction) == (False, True, 0.25)
    assert config.moe == MoeConfig(
        num_experts=128, top_k=8, expert_dim=1408, score="sigmoid", normalizes_top_k=False,
        dense_layers=(0, 1, 2), shared_dim=2816, num_groups=8, top_groups=4, scale=2.5)


@pytest.mark.parametrize("changes, dense", [
    ({"mlp_only_layers": [3, 1]}, (1, 3)),
    ({"mlp_only_layers": None}, ()),
    ({"decoder_sparse_step": 2}, (0, 2, 4)),  # experts in the layers 2, 4 and 6, counted from 1
    ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4)),
])
def test_dense_layers_of_qwen3_moe(changes, dense):
    config = ModelConfig.from_hf(QWEN3_MOE | {"num_hidden_layers": 6} | changes)
    assert config.moe.dense_layers == dense


def test_experts_as_transformers_5_writes_them():
    qwen = without(QWEN3_MOE, "num_experts", "rope_theta", "rope_scaling") | {
        "num_local_experts": 128,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    }
    assert ModelConfig.from_hf(qwen) == ModelConfig.from_hf(QWEN3_MOE)
    assert ModelConfig.from_hf(qwen | {"num_experts": 128}) == ModelConfig.from_hf(QWEN3_MOE)
    rope = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "default"}
    names = ("partial_rotary_factor", "rope_theta", "rope_scaling", "num_nextn_predict_layers")
    glm = without(GLM_AIR, *names) | {"rope_parameters": rope, "num_mtp_layers": 2}
    four = GLM_AIR | {"partial_rotary_factor": 0.25}
    assert ModelConfig.from_hf(glm) == ModelConfig.from_hf(four)
    assert hf_config.extra_layers(glm) == 2
    # A GLM model rotates half of a head unless its file says otherwise.
    assert ModelConfig.from_hf(without(GLM_AIR, "partial_rotary_factor")).rope.fraction == 0.5
    with pytest.raises(ValueError, match="two values for partial_rotary_factor: 0.5 and 0.25"):
        ModelConfig.from_hf(GLM_AIR | {"rope_parameters": rope})


def test_layers_behind_the_model_are_those_of_glm():
    assert hf_config.extra_layers(QWEN3_MOE) == 0
    assert hf_config.extra_layers(without(GLM_AIR, "num_nextn_predict_layers")) == 0
    with pytest.raises(ValueError, match="num_nextn_predict_layers=1 and num_mtp_layers=2"):
        hf_config.extra_layers(GLM_AIR | {"num_mtp_layers": 2})


@pytest.mark.parametrize("family, changes, message", [
    ("qwen3_moe", {"num_experts_per_tok": 129}, "top_k=129 is above the 128 experts"),
    ("qwen3_moe", {"num_local_experts": 64}, "num_experts=128 and num_local_experts=64"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts=0 must be from 1"),
    ("qwen3_moe", {"num_experts": None}, "no 'num_experts'"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 .* true or false"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {"decoder_sparse_step": 49}, "dense_layers=.* not all, of the 48 layers"),
    ("qwen3_moe", {"mlp_only_layers": [48]}, r"mlp_only_layers=\[48\] .*num_hidden_layers=48"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers=3"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 512},
     "shared_expert_intermediate_size=512 .* qwen3_moe; only 0 is"),
    ("qwen3_moe", {"n_group": 8}, "n_group=8 .* unknown field"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 48},
     "sliding_window=4096"),
    ("qwen3_moe", {"num_hidden_layers": 10**12, "mlp_only_layers": []}, "num_layers=10{12} "),
    ("glm4_moe", {"n_group": 3}, "num_experts=128 .* num_groups=3"),
    ("glm4_moe", {"n_group": 4, "topk_group": 5}, "top_groups=5 is above num_groups=4"),
    ("glm4_moe", {"n_group": 64, "topk_group": 3}, "top_k=8 is above the 6 experts"),
    ("glm4_moe", {"n_group": 128, "topk_group": 128}, "fewer than two experts each"),
    ("glm4_moe", {"first_k_dense_replace": 46}, "dense_layers=.* not all, of the 46 layers"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
    ("glm4_moe", {"n_shared_experts": -1}, "shared_dim=-1408"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "scale=0.0"),
    ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
    ("glm4_moe", {"partial_rotary_factor": 0.005}, "rotates 0 of head_dim=128"),
    ("glm4_moe", {"sliding_window": 4096}, "sliding_window=4096"),
    ("glm4_moe", {"num_experts": 128}, "num_experts=128"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' .* unknown field"),
    ("glm4_moe", {"num_hidden_layers": 10**12, "first_k_dense_replace": 10**12},
     "num_layers=10{12} "),
])
def test_experts_that_are_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(PUBLISHED[family] | changes)


def test_what_qwen3_coder_states_of_its_layers_is_read():
    stated = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert ModelConfig.from_hf(QWEN3_MOE | stated) == ModelConfig.from_hf(QWEN3_MOE)


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
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast=0.* above 0"),
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
    ("llama", "model_type", "gemma2"),
    ("llama", "model_type", "mixtral"),
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


@pytest.mark.parametrize("family", PUBLISHED)
def test_all_that_transformers_writes_of_its_own_is_known(family):
    published = PUBLISHED[family]
    assert ModelConfig.from_hf(OF_TRANSFORMERS | published) == ModelConfig.from_hf(published)


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
    QWEN3_MOE,
    QWEN3_MOE | {"norm_topk_prob": False, "decoder_sparse_step": 3, "mlp_only_layers": [2]},
    QWEN3_MOE | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    GLM_AIR,
    GLM_AIR | {"attention_bias": False, "use_qk_norm": True, "partial_rotary_factor": 0.25},
    GLM_AIR | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 3,
               "first_k_dense_replace": 0, "norm_topk_prob": False},
])
def test_to_hf_reads_back_equal(hf):
    config = ModelConfig.from_hf(hf)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_an_export_has_no_further_layers():
    assert ModelConfig.from_hf(GLM_AIR).to_hf()["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("hf, changes, message", [
    (SMOLLM2, {"qk_norm": True}, "qk_norm=True cannot be written for family 'llama'"),
    (QWEN3_MOE, {"qkv_bias": True}, "qkv_bias=True cannot be written for family 'qwen3_moe'"),
    (SMOLLM2, {"rope.fraction": 0.5}, "rope.fraction=0.5 cannot be written for family 'llama'"),
    (QWEN3, {"moe": MoeConfig(4, 2, 8)}, "'qwen3' cannot be written with moe=Moe.*: it has none"),
    (QWEN3_MOE, {"moe": None}, "'qwen3_moe' cannot be written with moe=None: it has experts"),
    (QWEN3_MOE, {"moe.score": "sigmoid"}, "moe.score='sigmoid' .* which has 'softmax'"),
    (QWEN3_MOE, {"moe.shared_dim": 64}, "moe.shared_dim=64 .* which has 0"),
    (QWEN3_MOE, {"moe.num_groups": 2, "moe.top_groups": 2}, "moe.num_groups=2 .* which has 1"),
    (QWEN3_MOE, {"moe.scale": 2.5}, "moe.scale=2.5 .* which has 1.0"),
    (GLM_AIR, {"moe.score": "softmax"}, "moe.score='softmax' .* which has 'sigmoid'"),
    (GLM_AIR, {"moe.dense_layers": (0, 2)}, r"moe.dense_layers=\(0, 2\) .* which has \(0, 1\)"),
    (GLM_AIR, {"moe.shared_dim": 100}, "moe.shared_dim=100 .* no multiple of expert_dim=1408"),
])
def test_to_hf_refuses_what_a_family_cannot_say(hf, changes, message):
    config = ModelConfig.from_hf(hf)
    for name, value in changes.items():
        part, _, field = name.rpartition(".")
        if part:
            field, value = part, dataclasses.replace(getattr(config, part), **{field: value})
        config = dataclasses.replace(config, **{field: value})
    with pytest.raises(ValueError, match=message):
        config.to_hf()
