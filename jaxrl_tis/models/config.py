"""Model configuration: one frozen dataclass for all families."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_tis.models import hf_config
from jaxrl_tis.models.hf_config import ARCHITECTURES, MOST_LAYERS
from jaxrl_tis.models.hf_rope import ROPE_FIELDS

# A forged size ends here, and not in a full memory. The last is of all layers together.
LARGEST, MOST_EXPERTS, MOST_EXPERTS_OF_ALL = 10**9, 2**16, 2**18


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
        if self.kind == "yarn" and not (self.theta > 1 and self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError(
                f"rope type 'yarn' needs rope_theta={self.theta} above 1, and beta_fast="
                f"{self.beta_fast} and beta_slow={self.beta_slow} above 0.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"partial_rotary_factor={self.fraction} must be in (0, 1].")

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many dimensions of a head are rotated."""
        return int(head_dim * self.fraction)


@dataclasses.dataclass(frozen=True)
class SlidingConfig:
    """The layers whose tokens attend to a window of the last tokens.

    Attributes:
      window: tokens of the window, the attending one included.
      layers: indices of these layers, ascending.
      rope: their rotary embedding.
    """

    window: int
    layers: tuple[int, ...]
    rope: RopeConfig

    def __post_init__(self):
        if not 1 <= self.window <= LARGEST:
            raise ValueError(f"sliding_window={self.window} must be from 1 to {LARGEST}.")


SCORES = ("softmax", "sigmoid")
ACTIVATIONS = ("silu", "gelu_tanh")


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
      has_biases: the logits of the router and the products of the experts have biases.
      swiglu_limit, swiglu_alpha: of the clamped unit of GPT-OSS, `moe.ClampedSwiglu`; 0: SwiGLU.
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
    has_biases: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.702

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
        if not (0 <= self.swiglu_limit < math.inf and 0 < self.swiglu_alpha < math.inf):
            raise ValueError(
                f"swiglu_limit={self.swiglu_limit} must be at least 0 and swiglu_alpha="
                f"{self.swiglu_alpha} above 0, both finite.")

    @property
    def has_bias(self) -> bool:
        """Whether the router has a bias that only the choice sees."""
        return self.score == "sigmoid"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention, RoPE and a gated MLP, or experts.

    Attributes:
      family: a key of `hf_config.ARCHITECTURES`; names the checkpoint format, not the computation.
      head_dim: size of one head; `num_heads * head_dim` need not equal `embed_dim`.
      max_position: context length the checkpoint claims, in tokens; see `check_length`.
      mlp_dim: width of the MLP of a layer without experts.
      qkv_bias: biases on the query, key and value projections.
      o_bias: a bias on the output projection of attention.
      has_sinks: a head has one more logit in its softmax, whose probability goes to no token.
      qk_norm: RMSNorm over head_dim of queries and keys, before RoPE.
      tie_embeddings: the output head is the transposed embedding.
      moe: the experts; None for a dense model.
      sliding: the layers with a window; None: every layer attends to all tokens.
      activation: of the gate, "silu" or "gelu_tanh" (its approximation by tanh).
      post_norms: RMSNorm of the outputs of attention and MLP, before they are added.
      zero_centered_norms: an RMSNorm multiplies by 1 + its parameter.
      scales_embeddings: embeddings are multiplied by sqrt(embed_dim), rounded to their dtype.
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
    sliding: SlidingConfig | None = None
    activation: str = "silu"
    post_norms: bool = False
    zero_centered_norms: bool = False
    scales_embeddings: bool = False
    o_bias: bool = False
    has_sinks: bool = False

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
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps={self.norm_eps} must be at least 0.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is none of {', '.join(ACTIVATIONS)}.")
        if self.sliding is not None:
            layers = self.sliding.layers
            is_there = all(0 <= i < self.num_layers for i in layers)
            if not layers or list(layers) != sorted(set(layers)) or not is_there:
                raise ValueError(
                    f"the layers with a window, {layers}, must be ascending indices of the "
                    f"{self.num_layers} layers.")
        rotary = self.rope.rotary_dim(self.head_dim)
        if rotary < 2 or rotary % 2:
            raise ValueError(
                f"partial_rotary_factor={self.rope.fraction} rotates {rotary} of head_dim="
                f"{self.head_dim} dimensions; they must be an even number.")
        if self.moe is not None:
            self._check_dense_layers(self.moe.dense_layers)

    @property
    def experts(self) -> MoeConfig:
        """`moe` of a model that has experts."""
        assert self.moe is not None
        return self.moe

    def _check_dense_layers(self, dense: tuple[int, ...]) -> None:
        is_there = all(0 <= i < self.num_layers for i in dense)
        if list(dense) != sorted(set(dense)) or not is_there or len(dense) == self.num_layers:
            raise ValueError(
                f"dense_layers={dense} must be ascending indices of some, and not all, of the "
                f"{self.num_layers} layers.")
        count = (self.num_layers - len(dense)) * self.experts.num_experts
        if count > MOST_EXPERTS_OF_ALL:
            raise ValueError(
                f"num_experts={self.experts.num_experts} in {self.num_layers - len(dense)} layers are "
                f"{count} experts, and {MOST_EXPERTS_OF_ALL} are the most.")

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Returns the indices of the layers in each stack of the parameters: {"layers": those with
        experts, "dense_layers": the others, if there are any}; a dense model has "layers" alone."""
        dense = self.moe.dense_layers if self.moe else ()
        others = tuple(sorted(set(range(self.num_layers)) - set(dense)))
        return {"layers": others} | ({"dense_layers": dense} if dense else {})

    @property
    def num_moe_layers(self) -> int:
        return len(self.stacks["layers"]) if self.moe else 0

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Returns the config from a `config.json` dict of transformers 4 or 5; raises as
        `hf_config.read`."""
        fields = hf_config.read(hf)
        moe, sliding = fields.pop("moe"), fields.pop("sliding")
        if sliding is not None:
            sliding = SlidingConfig(**sliding | {"rope": RopeConfig(**sliding["rope"])})
        return cls(
            **fields | {"rope": RopeConfig(**fields["rope"])},
            moe=None if moe is None else MoeConfig(**moe), sliding=sliding,
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the `config.json` dict of this model; raises as `hf_config.write`."""
        return hf_config.write(self)

    def first_layers(self, count: int) -> "ModelConfig":
        """Returns the config of the model's first layers alone."""
        moe, sliding = self.moe, self.sliding
        first = lambda layers: tuple(i for i in layers if i < count)
        if moe is not None:
            moe = dataclasses.replace(moe, dense_layers=first(moe.dense_layers))
        if sliding is not None:
            sliding = dataclasses.replace(sliding, layers=first(sliding.layers))
            sliding = sliding if sliding.layers else None
        return dataclasses.replace(self, num_layers=count, moe=moe, sliding=sliding)

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


STACKS = ("layers", "dense_layers")


def by_stack(f: Callable[[dict, str], dict], params: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters with f(stack of layers, its name) in place of each stack."""
    return params | {name: f(params[name], name) for name in STACKS if name in params}
