"""Reads the `config.json` of a Hugging Face folder, and writes it.

Reading is strict. A setting that changes the computation and is not implemented in
`models.transformer` is a `ValueError` with the field and its value. An unknown field is a
`ValueError` too. A model that loads is therefore computed as its authors intended.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_tis.models import hf_rope
from jaxrl_tis.models.hf_fields import boolean, either, flag, integer, is_set, number, required

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

MOST_LAYERS = 10**4  # a forged size ends here, and not in a full memory

# Read by from_hf, so neither harmless nor unknown.
IMPLEMENTED = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
})

# Read by from_hf for one family alone.
OF_FAMILY = {
    "qwen3_moe": frozenset({
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step",
    }),
    "glm4_moe": frozenset({
        "n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor",
        "first_k_dense_replace", "num_nextn_predict_layers", "num_mtp_layers", "attention_bias",
        "use_qk_norm", "partial_rotary_factor",
    }),
    "gemma3_text": frozenset({
        "query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern",
        "_sliding_window_pattern",
    }),
    "gpt_oss": frozenset({
        "num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token", "swiglu_limit",
        "swiglu_alpha", "quantization_config", "initial_context_length",
    }),
}

# Known fields with the only value that this model computes.
ONLY_VALUE = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_causal": True,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_experts": None,
    "num_local_experts": None,
    "num_experts_per_tok": None,
}

# The same for one family. HF's llama, qwen3 and qwen3_moe put the bias of the attention projections
# on o_proj too, which is not implemented; HF's qwen2 always has it on q, k and v and never on o.
ONLY_VALUE_OF: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "qwen2": {"attention_bias": True},
    "qwen3": {"attention_bias": False},
    "qwen3_moe": {
        "attention_bias": False, "qkv_bias": False, "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    "glm4_moe": {},
    "gemma3_text": {
        "attention_bias": False, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False,
    },
    "gpt_oss": {"attention_bias": True},
}

# Whether a family has biases on q, k and v, and norms of q and k; config.json says so for the others.
QKV_BIAS = {
    "llama": False, "qwen2": True, "qwen3": False, "qwen3_moe": False, "gemma3_text": False,
    "gpt_oss": True,
}
QK_NORM = {
    "llama": False, "qwen2": False, "qwen3": True, "qwen3_moe": True, "gemma3_text": True,
    "gpt_oss": False,
}

# What a family computes in a way of its own: ModelConfig name -> value. The others have the defaults.
COMPUTES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "activation": "gelu_tanh", "post_norms": True, "zero_centered_norms": True,
        "scales_embeddings": True,
    },
    "gpt_oss": {"o_bias": True, "has_sinks": True},
}
DEFAULTS = {
    "activation": "silu", "post_norms": False, "zero_centered_norms": False,
    "scales_embeddings": False, "o_bias": False, "has_sinks": False,
}
# Every so many layers one is full where config.json does not say. Other families have no windows.
SLIDING_PATTERN = {"gemma3_text": 6, "gpt_oss": 2}
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of gpt_oss where config.json does not say

# What all experts of a family have: MoeConfig name -> value.
PLAIN = {"has_biases": False, "swiglu_limit": 0.0}
EXPERTS_OF: dict[str, dict[str, Any]] = {
    "qwen3_moe": PLAIN | {
        "score": "softmax", "shared_dim": 0, "num_groups": 1, "top_groups": 1, "scale": 1.0,
    },
    "glm4_moe": PLAIN | {"score": "sigmoid"},
    # A softmax over the chosen is one over all, divided by the sum of the chosen.
    "gpt_oss": {
        "score": "softmax", "normalizes_top_k": True, "dense_layers": (), "shared_dim": 0,
        "num_groups": 1, "top_groups": 1, "scale": 1.0, "has_biases": True,
    },
}

# What config.json says of the tokenizer and of generation, which an export takes along.
GENERATION = frozenset({
    "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "max_new_tokens",
})

# Fields that do not change the logits: names, token ids, training and generation defaults, and what
# the configuration classes of transformers 4 and 5 add of their own.
# attention_dropout is among them: neither sampling nor this trainer drops anything.
HARMLESS = GENERATION | {
    "attention_dropout",
    "_name_or_path", "name_or_path", "architectures", "transformers_version", "torch_dtype",
    "dtype", "transformers.js_config", "is_llama_config", "unsloth_fixed", "unsloth_version",
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_experts_implementation", "_experts_implementation_internal", "attn_implementation",
    "use_cache", "initializer_range", "cache_implementation",
    "auto_map", "_commit_hash", "_from_auto", "_output_attentions", "_original_object_hash",
    "_from_model_config", "use_return_dict", "return_dict", "output_hidden_states",
    "output_attentions", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward", "tie_encoder_decoder",
    "cross_attention_hidden_size", "finetuning_task", "id2label", "label2id", "num_labels",
    "problem_type", "prefix", "task_specific_params", "gradient_checkpointing",
    "max_sequence_length", "model_max_length", "router_aux_loss_coef", "output_router_logits",
}


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `ModelConfig`, with those of its `rope`, `moe` and `sliding` as dicts
    (`moe` None for a dense model, `sliding` None without windows).

    Raises:
      ValueError: a field is missing, unknown, or set to a value that is not implemented.
    """
    family = required(hf, "model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ValueError(
            f"model_type={family!r} is not implemented; known: {sorted(ARCHITECTURES)}.")
    _refuse_unimplemented(hf, family)
    num_layers = integer(hf, "num_hidden_layers")
    rope, sliding_rope = hf_rope.read(hf, family, integer(hf, "max_position_embeddings"))
    sliding = None
    if family in SLIDING_PATTERN:
        sliding = _sliding(hf, family, num_layers, sliding_rope or {})
    else:
        _refuse_sliding_window(hf, family, num_layers)
    embed_dim, num_heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    head_dim = _head_dim(hf, family, embed_dim, num_heads)
    if family == "gemma3_text" and (scalar := integer(hf, "query_pre_attn_scalar")) != head_dim:
        raise ValueError(
            f"query_pre_attn_scalar={scalar} is not implemented; only head_dim={head_dim} is.")
    return {
        "family": family,
        "vocab_size": integer(hf, "vocab_size"),
        "embed_dim": embed_dim,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(hf, family, num_heads),
        "head_dim": head_dim,
        "mlp_dim": integer(hf, "intermediate_size"),
        "rope": rope,
        "max_position": integer(hf, "max_position_embeddings"),
        "norm_eps": number(hf, "rms_norm_eps"),
        "qkv_bias": QKV_BIAS[family] if family in QKV_BIAS else flag(hf, "attention_bias"),
        "qk_norm": QK_NORM[family] if family in QK_NORM else flag(hf, "use_qk_norm"),
        "tie_embeddings": flag(hf, "tie_word_embeddings", family == "gemma3_text"),
        "moe": _moe(hf, family, num_layers),
        "sliding": sliding,
    } | DEFAULTS | COMPUTES.get(family, {})


def write(config: Any) -> dict[str, Any]:
    """Returns the `config.json` dict of a `ModelConfig`, which transformers 4 and 5 can read.

    Raises:
      ValueError: the family has no field for a setting of the model.
    """
    family = config.family
    for name, by_family in (("qkv_bias", QKV_BIAS), ("qk_norm", QK_NORM)):
        if family in by_family:
            _refuse_other(family, name, getattr(config, name), by_family[family])
    for name, value in (DEFAULTS | COMPUTES.get(family, {})).items():
        _refuse_other(family, name, getattr(config, name), value)
    if family != "glm4_moe":
        _refuse_other(family, "rope.fraction", config.rope.fraction, 1)
    if family not in SLIDING_PATTERN:
        _refuse_other(family, "sliding", config.sliding, None)
    hf = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": hf_rope.scaling_to_hf(config.rope),
    }
    if family == "qwen2":
        hf |= {"use_sliding_window": False}
    elif family == "glm4_moe":
        hf |= {
            "attention_bias": config.qkv_bias, "use_qk_norm": config.qk_norm,
            "partial_rotary_factor": config.rope.fraction, "num_nextn_predict_layers": 0,
        }
    elif family == "gemma3_text":
        del hf["hidden_act"]
        hf |= {
            "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config.head_dim,
        } | _sliding_to_hf(config)
    elif family == "gpt_oss":
        hf |= {"attention_bias": True} | _sliding_to_hf(config)
    else:
        hf |= {"attention_bias": False}
    return hf | _moe_to_hf(config)


def extra_layers(hf: Mapping[str, Any]) -> int:
    """Returns how many layers that predict further tokens are stored behind those of the model."""
    if hf["model_type"] != "glm4_moe":
        return 0
    return either(hf, "num_nextn_predict_layers", "num_mtp_layers", 0)


def _refuse_other(family: str, name: str, value: Any, only: Any) -> None:
    if value != only:
        raise ValueError(
            f"{name}={value!r} cannot be written for family {family!r}, which has {only!r}.")


def _refuse_unimplemented(hf: Mapping[str, Any], family: str) -> None:
    implemented = IMPLEMENTED | OF_FAMILY.get(family, frozenset())
    only = ONLY_VALUE | ONLY_VALUE_OF[family]
    for key, value in hf.items():
        if key in implemented or key in HARMLESS or value is None:
            continue
        if key not in only:
            raise ValueError(
                f"{key}={value!r} in config.json is an unknown field and may change the "
                "computation; remove it only if it does not."
            )
        if value != only[key]:
            raise ValueError(
                f"{key}={value!r} in config.json is not implemented for {family}; "
                f"only {only[key]!r} is.")


def _refuse_sliding_window(hf: Mapping[str, Any], family: str, num_layers: int) -> None:
    """Raises ValueError for a sliding window that a layer uses; unused windows are accepted.

    `layer_types` decides if present. Otherwise a window applies to every layer; of qwen2 and qwen3 to
    layers from `max_window_layers`, and of all qwen families only if `use_sliding_window` is true.
    """
    if is_set(hf, "layer_types"):
        types = hf["layer_types"]
        is_full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
        if not is_full or len(types) != num_layers:
            raise ValueError(
                f"layer_types={types!r} is not implemented; only 'full_attention' in each of the "
                f"num_hidden_layers={num_layers} layers is.")
        return
    if not is_set(hf, "sliding_window"):
        return
    if family.startswith("qwen"):
        if not (is_set(hf, "use_sliding_window") and hf["use_sliding_window"]):
            return
        of_some = family != "qwen3_moe" and is_set(hf, "max_window_layers")
        if of_some and hf["max_window_layers"] >= num_layers:
            return
    raise ValueError(
        f"sliding_window={hf['sliding_window']!r} is in use and not implemented; "
        "only full attention is.")


def _sliding(
    hf: Mapping[str, Any], family: str, num_layers: int, rope: dict[str, Any]
) -> dict[str, Any] | None:
    """Returns the fields of the SlidingConfig; None if all layers are full."""
    if is_set(hf, "layer_types"):
        types = hf["layer_types"]
    else:
        keys = "sliding_window_pattern", "_sliding_window_pattern"
        pattern = either(hf, *keys, SLIDING_PATTERN[family])
        if pattern < 1:
            raise ValueError(f"sliding_window_pattern={pattern} in config.json must be at least 1.")
        layers = range(min(num_layers, MOST_LAYERS))
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(x not in known for x in types):
        raise ValueError(
            f"layer_types={types!r} is not implemented; it must have one of {', '.join(known)} for "
            f"each of the num_hidden_layers={num_layers} layers.")
    sliding = tuple(i for i, kind in enumerate(types) if kind == known[0])
    if not sliding:
        return None
    return {"window": integer(hf, "sliding_window"), "layers": sliding, "rope": rope}


def _sliding_to_hf(config: Any) -> dict[str, Any]:
    sliding = config.sliding
    layers = () if sliding is None else sliding.layers
    types = [
        "sliding_attention" if i in layers else "full_attention" for i in range(config.num_layers)
    ]
    hf = {"layer_types": types}
    if sliding is None:
        return hf | {"sliding_window": None}
    if config.family == "gpt_oss":
        _refuse_other(config.family, "sliding.rope", sliding.rope, config.rope)
        return hf | {"sliding_window": sliding.window}
    if sliding.rope.kind != "default" or sliding.rope.fraction != 1:
        raise ValueError(
            f"sliding.rope={sliding.rope} cannot be written for family {config.family!r}: it has no "
            "field for its scaling.")
    return hf | {
        "sliding_window": sliding.window, "rope_local_base_freq": sliding.rope.theta,
    }


def _num_kv_heads(hf: Mapping[str, Any], family: str, num_heads: int) -> int:
    """Returns the number of key/value heads; checkpoints before grouped-query attention omit it."""
    if family == "llama" and not is_set(hf, "num_key_value_heads"):
        return num_heads
    return integer(hf, "num_key_value_heads")


def _head_dim(hf: Mapping[str, Any], family: str, embed_dim: int, num_heads: int) -> int:
    """Returns the head size: required for qwen3 and Gemma, else hidden_size / heads by default."""
    if family in ("qwen3", "gemma3_text") or is_set(hf, "head_dim"):
        return integer(hf, "head_dim")
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            f"hidden_size={embed_dim} must be a multiple of num_attention_heads={num_heads} "
            "when head_dim is not given.")
    return embed_dim // num_heads


def _moe(hf: Mapping[str, Any], family: str, num_layers: int) -> dict[str, Any] | None:
    if family not in EXPERTS_OF:
        return None
    if family == "gpt_oss":
        return EXPERTS_OF[family] | _moe_of_gpt_oss(hf)
    expert_dim = integer(hf, "moe_intermediate_size")
    moe = EXPERTS_OF[family] | {
        "top_k": integer(hf, "num_experts_per_tok"),
        "expert_dim": expert_dim,
        "normalizes_top_k": boolean(hf, "norm_topk_prob"),
    }
    if family == "qwen3_moe":
        return moe | {
            "num_experts": either(hf, "num_experts", "num_local_experts"),
            "dense_layers": _dense_layers(hf, num_layers),
        }
    first = integer(hf, "first_k_dense_replace")
    if first < 0:
        raise ValueError(f"first_k_dense_replace={first} in config.json must be at least 0.")
    return moe | {
        "num_experts": either(hf, "n_routed_experts", "num_local_experts"),
        "dense_layers": tuple(range(min(first, num_layers, MOST_LAYERS))),
        "shared_dim": integer(hf, "n_shared_experts") * expert_dim,
        "num_groups": integer(hf, "n_group"),
        "top_groups": integer(hf, "topk_group"),
        "scale": number(hf, "routed_scaling_factor"),
    }


def _moe_of_gpt_oss(hf: Mapping[str, Any]) -> dict[str, Any]:
    if is_set(hf, "quantization_config"):
        stored = hf["quantization_config"]
        method = stored.get("quant_method") if isinstance(stored, Mapping) else None
        if method != "mxfp4":
            raise ValueError(
                f"quant_method={method!r} in config.json is not implemented; only 'mxfp4' is.")
    of = lambda key, otherwise: number(hf, key) if is_set(hf, key) else otherwise
    return {
        "num_experts": either(hf, "num_local_experts", "num_experts"),
        "top_k": either(hf, "num_experts_per_tok", "experts_per_token"),
        "expert_dim": integer(hf, "intermediate_size"),
        "swiglu_limit": of("swiglu_limit", SWIGLU_LIMIT),
        "swiglu_alpha": of("swiglu_alpha", SWIGLU_ALPHA),
    }


def _dense_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the indices of the layers without experts by `mlp_only_layers` and, if a layer has
    experts at every `decoder_sparse_step`-th place only, by that."""
    step = integer(hf, "decoder_sparse_step") if is_set(hf, "decoder_sparse_step") else 1
    if step < 1:
        raise ValueError(f"decoder_sparse_step={step} in config.json must be at least 1.")
    only = hf["mlp_only_layers"] if is_set(hf, "mlp_only_layers") else []
    if not isinstance(only, list) or not all(type(i) is int and 0 <= i < num_layers for i in only):
        raise ValueError(
            f"mlp_only_layers={only!r} in config.json must be indices of the "
            f"num_hidden_layers={num_layers} layers.")
    dense, layers = set(only), range(min(num_layers, MOST_LAYERS))
    return tuple(i for i in layers if i in dense or (i + 1) % step)


def _moe_to_hf(config: Any) -> dict[str, Any]:
    family, moe = config.family, config.moe
    if (moe is None) == (family in EXPERTS_OF):
        raise ValueError(
            f"family {family!r} cannot be written with moe={moe}: it has "
            f"{'experts' if moe is None else 'none'}.")
    if moe is None:
        return {}
    for name, only in EXPERTS_OF[family].items():
        _refuse_other(family, f"moe.{name}", getattr(moe, name), only)
    if family == "gpt_oss":
        _refuse_other(family, "moe.expert_dim", moe.expert_dim, config.mlp_dim)
        return {
            "num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
            "swiglu_limit": moe.swiglu_limit, "swiglu_alpha": moe.swiglu_alpha,
        }
    hf = {
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.normalizes_top_k,
    }
    if family == "qwen3_moe":
        return hf | {
            "num_experts": moe.num_experts,
            "mlp_only_layers": list(moe.dense_layers),
            "decoder_sparse_step": 1,
        }
    first = len(moe.dense_layers)
    _refuse_other(family, "moe.dense_layers", moe.dense_layers, tuple(range(first)))
    if moe.shared_dim % moe.expert_dim:
        raise ValueError(
            f"moe.shared_dim={moe.shared_dim} cannot be written for family {family!r}: it is no "
            f"multiple of expert_dim={moe.expert_dim}.")
    return hf | {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_dim // moe.expert_dim,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": first,
    }
