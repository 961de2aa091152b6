"""Model configuration: one frozen dataclass for all dense families, read from a HF `config.json`.

Reading is strict. A setting that changes the computation and is not implemented in
`models.transformer` is a `ValueError` with the field and its value. An unknown field is a
`ValueError` too. A model that loads is therefore computed as its authors intended.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Fields inside rope_scaling / rope_parameters, by rope type: HF name -> RopeConfig name.
ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}

# Fields without which the rope type has no meaning (the others have published defaults).
ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}

# A forged size ends here, and not in a full memory.
LARGEST, MOST_LAYERS, MOST_EXPERTS = 10**9, 10**4, 2**16

# Read by from_hf, so neither harmless nor unknown.
IMPLEMENTED = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
})

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

# The bias of the attention projections: HF's llama and qwen3 put it on o_proj too, which is not
# implemented; HF's qwen2 always has it on q, k and v and never on o.
ATTENTION_BIAS = {"llama": False, "qwen2": True, "qwen3": False}

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
    "use_cache", "initializer_range",
    "auto_map", "_commit_hash", "_from_auto", "_output_attentions", "_original_object_hash",
    "_from_model_config", "use_return_dict", "return_dict", "output_hidden_states",
    "output_attentions", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward", "tie_encoder_decoder",
    "cross_attention_hidden_size", "finetuning_task", "id2label", "label2id", "num_labels",
    "problem_type", "prefix", "task_specific_params", "gradient_checkpointing",
    "max_sequence_length", "model_max_length",
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `models.rope.rope_frequencies` computes it.

    Attributes:
      kind: "default" (arXiv:2104.09864), "linear" (positions divided by `factor`,
        arXiv:2306.15595), "llama3" (low frequencies divided, Llama 3.1) or "yarn"
        (arXiv:2309.00071).
      theta: base of the geometric sequence of wavelengths.
      factor: context extension factor (every kind but "default").
      low_freq_factor, high_freq_factor: band limits of "llama3", in turns over
        `original_max_position`.
      original_max_position: trained context in tokens ("llama3" and "yarn").
      beta_fast, beta_slow: band limits of "yarn", in turns over `original_max_position`.
      attention_factor: scale of cos and sin under "yarn"; None derives it from `factor`,
        `mscale` and `mscale_all_dim`.
      truncate: whether "yarn" rounds its band limits outwards to whole dimensions.
      fraction: share of a head's dimensions that are rotated, the first ones.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    fraction: float = 1.0

    def __post_init__(self):
        if self.kind not in ROPE_FIELDS:
            raise ValueError(
                f"rope type {self.kind!r} is not implemented; known: {sorted(ROPE_FIELDS)}.")
        if not self.theta > 0:
            raise ValueError(f"rope_theta={self.theta} must be positive.")
        if not self.factor >= 1:
            raise ValueError(f"rope factor={self.factor} must be at least 1.")
        if self.kind in ("llama3", "yarn") and self.original_max_position < 1:
            raise ValueError(
                f"rope type {self.kind!r} needs original_max_position_embeddings >= 1, "
                f"got {self.original_max_position}.")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor={self.low_freq_factor} must be positive and below "
                f"high_freq_factor={self.high_freq_factor}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"partial_rotary_factor={self.fraction} must be in (0, 1].")

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many dimensions of a head are rotated."""
        return int(head_dim * self.fraction)


SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """The routed experts of a model, each a SwiGLU MLP; a router chooses `top_k` for every token.

    Attributes:
      num_experts: experts of a layer.
      top_k: experts of a token.
      expert_dim: width of one expert's MLP.
      score: "softmax" over the experts, or "sigmoid" of each (with a bias that the choice alone
        sees).
      normalizes_top_k: the gates of the chosen experts are divided by their sum.
      dense_layers: indices of the layers with a dense MLP of `ModelConfig.mlp_dim`, ascending.
      shared_dim: width of the experts that every token passes through, as one MLP; 0: none.
      num_groups, top_groups: the experts are cut into `num_groups` equal groups, and a token chooses
        among those of `top_groups` groups. A group's score is the sum of its two highest.
      scale: what the gates are multiplied by.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    score: str = "softmax"
    normalizes_top_k: bool = True
    dense_layers: tuple[int, ...] = ()
    shared_dim: int = 0
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def __post_init__(self):
        for name in ("num_experts", "top_k", "expert_dim", "num_groups", "top_groups"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 to {LARGEST}.")
        if not 0 <= self.shared_dim <= LARGEST:
            raise ValueError(f"shared_dim={self.shared_dim} must be from 0 to {LARGEST}.")
        if self.num_experts > MOST_EXPERTS:
            raise ValueError(f"num_experts={self.num_experts} must be at most {MOST_EXPERTS}.")
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r} is none of {', '.join(SCORES)}.")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts={self.num_experts} cannot be cut into num_groups={self.num_groups} "
                "equal groups.")
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"top_groups={self.top_groups} is above num_groups={self.num_groups}.")
        choice = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > choice:
            raise ValueError(
                f"top_k={self.top_k} is above the {choice} experts that a token can choose from.")
        if self.num_groups > 1 and self.num_experts < 2 * self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} of num_experts={self.num_experts} have fewer than two "
                "experts each, and a group's score is that of two.")
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be positive.")

    @property
    def has_bias(self) -> bool:
        """Whether the router has a bias that only the choice sees."""
        return self.score == "sigmoid"

    @property
    def route_dtype(self) -> str:
        """The smallest dtype of numpy that holds the ids of the experts."""
        return "uint8" if self.num_experts <= 256 else "uint16"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention, RoPE and a SwiGLU MLP, or experts.

    Attributes:
      family: "llama", "qwen2" or "qwen3"; names the checkpoint format, not the computation.
      head_dim: size of one head; `num_heads * head_dim` need not equal `embed_dim`.
      max_position: context length the checkpoint claims, in tokens; see `check_length`.
      qkv_bias: biases on the query, key and value projections (qwen2).
      qk_norm: RMSNorm over head_dim of queries and keys, before RoPE (qwen3).
      tie_embeddings: the output head is the transposed embedding.
      moe: the experts; None for a dense model.
    """

    family: str
    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope: RopeConfig
    max_position: int
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    moe: MoeConfig | None = None

    def __post_init__(self):
        if self.family not in ARCHITECTURES:
            raise ValueError(
                f"model_type={self.family!r} is not implemented; known: {sorted(ARCHITECTURES)}.")
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "mlp_dim", "max_position"):
            most = MOST_LAYERS if name == "num_layers" else LARGEST
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 to {most}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates it in halves.")
        rotary = self.rope.rotary_dim(self.head_dim)
        if rotary < 2 or rotary % 2:
            raise ValueError(
                f"partial_rotary_factor={self.rope.fraction} rotates {rotary} of head_dim="
                f"{self.head_dim} dimensions; they must be an even number.")
        if self.moe is not None:
            self._check_dense_layers(self.moe.dense_layers)

    def _check_dense_layers(self, dense: tuple[int, ...]) -> None:
        is_there = all(0 <= i < self.num_layers for i in dense)
        if list(dense) != sorted(set(dense)) or not is_there or len(dense) == self.num_layers:
            raise ValueError(
                f"dense_layers={dense} must be ascending indices of some, and not all, of the "
                f"{self.num_layers} layers.")

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Returns the indices of the layers in each stack of the parameters: {"layers": those with
        experts, "dense_layers": the others, if there are any}; a dense model has "layers" alone."""
        dense = self.moe.dense_layers if self.moe else ()
        others = tuple(i for i in range(self.num_layers) if i not in dense)
        return {"layers": others} | ({"dense_layers": dense} if dense else {})

    @property
    def num_moe_layers(self) -> int:
        return len(self.stacks["layers"]) if self.moe else 0

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Returns the config from a `config.json` dict of transformers 4 or 5.

        Raises:
          ValueError: a field is missing, unknown, or set to a value that is not implemented.
        """
        family = _required(hf, "model_type")
        if not isinstance(family, str) or family not in ARCHITECTURES:
            raise ValueError(
                f"model_type={family!r} is not implemented; known: {sorted(ARCHITECTURES)}.")
        _refuse_unimplemented(hf, family)
        num_layers = _integer(hf, "num_hidden_layers")
        _refuse_sliding_window(hf, family, num_layers)
        embed_dim, num_heads = _integer(hf, "hidden_size"), _integer(hf, "num_attention_heads")
        max_position = _integer(hf, "max_position_embeddings")
        return cls(
            family=family,
            vocab_size=_integer(hf, "vocab_size"),
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(hf, family, num_heads),
            head_dim=_head_dim(hf, family, embed_dim, num_heads),
            mlp_dim=_integer(hf, "intermediate_size"),
            rope=_rope_from_hf(hf, max_position),
            max_position=max_position,
            norm_eps=_number(hf, "rms_norm_eps"),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tie_embeddings=_tie_embeddings(hf),
        )

    def check_length(self, length: int) -> str:
        """Returns "" if sequences of `length` tokens fit into `max_position`. Returns a warning if
        they do not and the rope type extends the context.

        Raises:
          ValueError: they do not fit, and the rope type does not extend the context.
        """
        if length <= self.max_position:
            return ""
        problem = (
            f"sequences of up to {length} tokens exceed max_position_embeddings = "
            f"{self.max_position}"
        )
        if self.rope.kind == "default":
            raise ValueError(f"{problem} of the model, and its rope type does not extend positions")
        return f"{problem} of the model; its rope type {self.rope.kind!r} extends the positions"

    def to_hf(self) -> dict[str, Any]:
        """Returns the `config.json` dict of this model, which transformers 4 and 5 can read.

        Raises:
          ValueError: `qkv_bias` or `qk_norm` differ from what the family has by definition.
        """
        for name, owner in (("qkv_bias", "qwen2"), ("qk_norm", "qwen3")):
            if getattr(self, name) != (self.family == owner):
                raise ValueError(
                    f"{name}={getattr(self, name)} cannot be written for family "
                    f"{self.family!r}: only {owner!r} has it.")
        hf = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.embed_dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "rope_theta": self.rope.theta,
            "rope_scaling": _rope_scaling_to_hf(self.rope),
        }
        if self.family == "qwen2":
            return hf | {"use_sliding_window": False}
        return hf | {"attention_bias": False}


STACKS = ("layers", "dense_layers")


def by_stack(f: Callable[[dict, str], dict], params: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters with f(stack of layers, its name) in place of each stack."""
    return params | {name: f(params[name], name) for name in STACKS if name in params}


def _required(hf: Mapping[str, Any], key: str) -> Any:
    if key not in hf or hf[key] is None:
        raise ValueError(f"config.json has no {key!r}; the model cannot be built without it.")
    return hf[key]


def _integer(hf: Mapping[str, Any], key: str) -> int:
    value = _required(hf, key)
    if type(value) is not int:
        raise ValueError(f"{key}={value!r} in config.json must be an integer.")
    return value


def _number(hf: Mapping[str, Any], key: str) -> float:
    value = _required(hf, key)
    if type(value) not in (int, float):
        raise ValueError(f"{key}={value!r} in config.json must be a number.")
    return float(value)


def _boolean(hf: Mapping[str, Any], key: str) -> bool:
    value = _required(hf, key)
    if type(value) is not bool:
        raise ValueError(f"{key}={value!r} in config.json must be true or false.")
    return value


def _is_set(hf: Mapping[str, Any], key: str) -> bool:
    """Whether a field is set; null counts as absent everywhere in this format."""
    return key in hf and hf[key] is not None


def _refuse_unimplemented(hf: Mapping[str, Any], family: str) -> None:
    only = ONLY_VALUE | {"attention_bias": ATTENTION_BIAS[family]}
    for key, value in hf.items():
        if key in IMPLEMENTED or key in HARMLESS or value is None:
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

    `layer_types` decides if present. Otherwise a llama window applies to every layer, and a qwen
    window to layers from `max_window_layers` if `use_sliding_window` is true.
    """
    if _is_set(hf, "layer_types"):
        types = hf["layer_types"]
        is_full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
        if not is_full or len(types) != num_layers:
            raise ValueError(
                f"layer_types={types!r} is not implemented; only 'full_attention' in each of the "
                f"num_hidden_layers={num_layers} layers is.")
        return
    if not _is_set(hf, "sliding_window"):
        return
    if family != "llama":
        if not (_is_set(hf, "use_sliding_window") and hf["use_sliding_window"]):
            return
        if _is_set(hf, "max_window_layers") and hf["max_window_layers"] >= num_layers:
            return
    raise ValueError(
        f"sliding_window={hf['sliding_window']!r} is in use and not implemented; "
        "only full attention is.")


def _num_kv_heads(hf: Mapping[str, Any], family: str, num_heads: int) -> int:
    """Returns the number of key/value heads; checkpoints before grouped-query attention omit it."""
    if family == "llama" and not _is_set(hf, "num_key_value_heads"):
        return num_heads
    return _integer(hf, "num_key_value_heads")


def _head_dim(hf: Mapping[str, Any], family: str, embed_dim: int, num_heads: int) -> int:
    """Returns the head size: required for qwen3, else hidden_size / heads by default."""
    if family == "qwen3" or _is_set(hf, "head_dim"):
        return _integer(hf, "head_dim")
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            f"hidden_size={embed_dim} must be a multiple of num_attention_heads={num_heads} "
            "when head_dim is not given.")
    return embed_dim // num_heads


def _tie_embeddings(hf: Mapping[str, Any]) -> bool:
    """Returns whether embeddings are tied; False by default, as in the families' config classes."""
    return _is_set(hf, "tie_word_embeddings") and _boolean(hf, "tie_word_embeddings")


def _merge_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all RoPE fields merged: top-level rope_theta, rope_scaling, rope_parameters."""
    sources = [{"rope_theta": hf["rope_theta"]}] if _is_set(hf, "rope_theta") else []
    for key in ("rope_scaling", "rope_parameters"):
        if _is_set(hf, key):
            if not isinstance(hf[key], Mapping):
                raise ValueError(f"{key}={hf[key]!r} in config.json must be an object.")
            fields = {k: v for k, v in hf[key].items() if v is not None}
            if "type" in fields:
                sources.append({"rope_type": fields.pop("type")})
            sources.append(fields)
    merged = {}
    for source in sources:
        for key, value in source.items():
            if key in merged and merged[key] != value:
                raise ValueError(
                    f"config.json gives two values for {key}: {merged[key]!r} and {value!r}; "
                    "remove one."
                )
            merged[key] = value
    return merged


def _rope_from_hf(hf: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Returns the RopeConfig; rope_theta is 10000 by default, as in old checkpoints.

    A given `factor` is used unchanged, even if it differs from `max_position_embeddings` /
    `original_max_position_embeddings` (as transformers 5; some releases of 4 used the quotient).
    """
    fields = _merge_rope(hf)
    kind = fields.pop("rope_type") if "rope_type" in fields else "default"
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise ValueError(f"rope_type={kind!r} is not implemented; known: {sorted(ROPE_FIELDS)}.")
    theta = 10000.0
    if "rope_theta" in fields:
        theta = _number(fields, "rope_theta")
        del fields["rope_theta"]
    if "partial_rotary_factor" in fields and fields.pop("partial_rotary_factor") != 1:
        raise ValueError("partial_rotary_factor other than 1 is not implemented.")
    if kind == "default":  # transformers computes nothing with the fields of the other types
        fields = {k: v for k, v in fields.items() if all(k not in known for known in ROPE_FIELDS.values())}
    for key, value in fields.items():
        if key not in ROPE_FIELDS[kind]:
            raise ValueError(
                f"{key}={value!r} is not a field of rope_type={kind!r}; remove it, or correct the "
                "rope type."
            )
    for key in ROPE_REQUIRED[kind]:
        if key not in fields:
            raise ValueError(f"rope_type={kind!r} needs the field {key!r}.")
    rope = {ROPE_FIELDS[kind][key]: _rope_value(fields, key) for key in fields}
    if kind == "yarn" and "original_max_position" not in rope:
        rope["original_max_position"] = max_position
    return RopeConfig(kind=kind, theta=theta, **rope)


def _rope_value(fields: Mapping[str, Any], key: str) -> float | int | bool:
    if key == "original_max_position_embeddings":
        return _integer(fields, key)
    if key == "truncate":
        return _boolean(fields, key)
    return _number(fields, key)


def _rope_scaling_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    fields = {key: getattr(rope, name) for key, name in ROPE_FIELDS[rope.kind].items()}
    return {"rope_type": rope.kind} | {k: v for k, v in fields.items() if v is not None}
