"""Writes tests/models/golden: tiny random models and their logits, computed by transformers.

    pip install torch==2.13.0
    pip install transformers==5.23.0
    python tests/models/make_golden.py [CASE ...]

Weights are bfloat16 on disk and float32 in the computation. They are scaled so that logits have a
standard deviation above 1 and attention is peaked, and the norms' epsilon is large: a wrong
rotation, norm or bias then shows.
`rope.json` holds the frequencies alone, for more settings than there are models.

Models with experts have peaked routers, of which every expert is chosen, and three more files:

- `routes.npy` [layers with experts, B, T, k]: the chosen ids.
- `replayed.npy`: the logits where each token takes the route of the token before it, and the first
  that of the last.
- `error.npy`: the logits of a second run in float64 minus `logits.npy`. This is the error of
  transformers in float32. Its modules convert to float32 in places (norms, softmax, router, rotary
  angles). In the second run these are float64 too.

`gpt_oss_mxfp4` is written with random bytes and exponents in place of its experts' weights. Its logits
are those of the weights that transformers makes of them.

`torch.topk` leaves the order of equal scores open. On a CPU it chose the experts 6 and 5 of eight
equal ones, and 10 and 11 of sixteen. In the case with ties the lower id comes first, as it does in
`jax.lax.top_k`: its two runs replace `torch.topk` by a stable sort.
"""

import contextlib
import json
import pathlib
import shutil
import sys
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GOLDEN = pathlib.Path(__file__).parent / "golden"
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 0.05, "hidden_act": "silu",
}
LLAMA = SMALL | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 16,
    "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN2 = SMALL | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0,
    "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

QWEN3 = {"head_dim": 16, "attention_bias": False, "rope_theta": 1000000.0}
QWEN3_MOE = SMALL | QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True,
    "mlp_only_layers": [], "decoder_sparse_step": 1, "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.001, "output_router_logits": False, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 2, "rope_scaling": None,
}
GLM = SMALL | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 3,
    "head_dim": 16, "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5,
    "rope_theta": 1000000, "rope_scaling": None, "moe_intermediate_size": 16,
    "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
}


GEMMA = SMALL | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16,
    "num_hidden_layers": 4, "query_pre_attn_scalar": 16, "sliding_window": 9,
    "sliding_window_pattern": 3, "rope_theta": 1000000, "rope_local_base_freq": 10000,
    "rope_scaling": None, "attention_bias": False, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
    "cache_implementation": "hybrid",
}
del GEMMA["hidden_act"]


GPT_OSS = SMALL | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16,
    "num_hidden_layers": 3, "intermediate_size": 32, "attention_bias": True,
    "num_local_experts": 8, "num_experts_per_tok": 3, "experts_per_token": 3, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "initial_context_length": 64, "rope_theta": 150000, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, "truncate": False},
    "swiglu_limit": 1.25, "tie_word_embeddings": False, "router_aux_loss_coef": 0.9,
    "output_router_logits": False,
}


class Case(NamedTuple):
    """A model to write.

    Attributes:
      hf: config.json as published checkpoints write it.
      length: tokens per row.
      is_rewritten: config.json is rewritten in the style of transformers 5.
      shard_size: bytes per shard.
      is_fused: the experts of a layer are stored as transformers 5 holds them in memory.
      has_ties: the experts 2i and 2i + 1 have the same score.
      seed: of weights and tokens; None for the place in the table.
      is_mxfp4: the weights of experts are stored in 4 bits.
    """

    hf: dict
    length: int = 40
    is_rewritten: bool = False
    shard_size: str = "1GB"
    is_fused: bool = False
    has_ties: bool = False
    seed: int | None = None
    is_mxfp4: bool = False

    @property
    def num_experts(self) -> int:
        names = "num_experts", "n_routed_experts", "num_local_experts"
        return next((self.hf[name] for name in names if name in self.hf), 0)


CASES = {
    "llama_default": Case(LLAMA | {"tie_word_embeddings": True, "rope_scaling": None}),
    "llama_linear": Case(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama_llama3": Case(LLAMA | {"rope_scaling": LLAMA3}, 64, True),
    "llama_yarn": Case(LLAMA | {"rope_scaling": YARN}, 96),
    "qwen2_tied": Case(QWEN2 | {"tie_word_embeddings": True}),
    "qwen2_untied": Case(QWEN2 | {"rope_theta": 10000.0}, is_rewritten=True),
    "qwen3": Case(
        SMALL | QWEN3 | {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "tie_word_embeddings": True,
        },
        is_rewritten=True, shard_size="20KB",
    ),
    "qwen3_moe": Case(QWEN3_MOE, shard_size="40KB"),
    "qwen3_moe_raw": Case(QWEN3_MOE | {"num_hidden_layers": 3, "norm_topk_prob": False,
                                       "mlp_only_layers": [1]}),
    "qwen3_moe_step": Case(QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2},
                           is_rewritten=True, is_fused=True),
    "qwen3_moe_ties": Case(QWEN3_MOE, has_ties=True),
    "glm4_moe": Case(GLM, 48, seed=5),
    "glm4_moe_norm": Case(
        GLM | {"attention_bias": False, "use_qk_norm": True, "n_routed_experts": 8, "n_group": 1,
               "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": False,
               "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.25, "num_hidden_layers": 2},
        is_rewritten=True, is_fused=True,
    ),
    "gemma3": Case(GEMMA),
    "gemma3_linear": Case(
        GEMMA | {"num_hidden_layers": 3, "sliding_window": 16, "rope_scaling": {
            "rope_type": "linear", "factor": 8.0}},
        is_rewritten=True,
    ),
    "gpt_oss": Case(GPT_OSS, is_rewritten=True, seed=9),
    "gpt_oss_mxfp4": Case(GPT_OSS | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0, "quantization_config": {
            "quant_method": "mxfp4", "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head"]},
    }, is_mxfp4=True, seed=6),
}

# (rope_scaling, rope_theta, head_dim[, partial_rotary_factor])
ROPES = [
    ({"rope_type": "linear", "factor": 2.5}, 10000.0, 8),
    ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}, 500000.0, 64),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
     1000000.0, 128),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
      "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16.0, "beta_slow": 2.0},
     10000.0, 64),
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
      "truncate": False, "attention_factor": 1.25}, 150000.0, 64),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}, 10000.0, 8),
    ({"rope_type": "linear", "factor": 2.5}, 10000.0, 64, 0.25),
    ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
     1000000.0, 128, 0.5),
]


def fill(model: torch.nn.Module, case: Case, seed: int) -> None:
    """Random weights, representable in bfloat16, and biases of routers, which are float32."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            values = 0.5 + torch.rand(parameter.shape, generator=generator)
            values -= float(case.hf["model_type"] == "gemma3_text")  # its norms multiply by 1 + values
        elif name.endswith(("bias", "sinks")):
            # Every expert of a router is chosen.
            gain = 0.3 if name.endswith(("router.bias", "proj_bias")) else 1.0
            values = torch.randn(parameter.shape, generator=generator) * gain
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            gain = 4.0 if "embed_tokens" in name else gain
            gain = 2.0 if name.endswith(("mlp.gate.weight", "mlp.router.weight")) else gain
            gain = 1.5 if name == "lm_head.weight" and case.num_experts else gain
            fan_in = parameter.shape[-2 if case.hf["model_type"] == "gpt_oss" and parameter.ndim == 3 else -1]
            values = torch.randn(parameter.shape, generator=generator) * gain * fan_in**-0.5
            if case.has_ties and name.endswith("mlp.gate.weight"):
                values[1::2] = values[::2]
        parameter.data.copy_(values.to(torch.bfloat16))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # Some sums of score and bias are negative.
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.15 - 0.25)


@contextlib.contextmanager
def patched(owner, **values):
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def lower_first(x: torch.Tensor, k: int, dim: int = -1, sorted: bool = True):
    """torch.topk with the lower index first among equal values."""
    values, ids = torch.sort(x, dim=dim, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


def replaying(routes: np.ndarray, case: Case):
    """torch.topk with the next of the routes [L, B, T, k] in place of its choice of experts."""
    topk, of_layers = torch.topk, iter(routes)

    def replay(x, k, dim=-1, sorted=True):
        if x.shape[-1] != case.num_experts:
            return topk(x, k, dim=dim, sorted=sorted)
        ids = torch.from_numpy(next(of_layers)).reshape(-1, k)
        return x.gather(-1, ids), ids

    return replay


def run(
    case: Case, tokens: np.ndarray, seed: int, dtype: torch.dtype, replayed=None, weights=None
):
    """Returns the model, the logits, and the routes of its layers with experts. `weights` are those
    of `fill` where they are None."""
    config = transformers.AutoConfig.for_model(**case.hf)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    fill(model, case, seed)
    if weights is not None:
        model.load_state_dict(weights)
    routes = []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if router is not None:
            router.register_forward_hook(lambda _, __, out: routes.append(out[2].numpy()))
    topk = {"topk": lower_first} if case.has_ties else {}
    topk = topk if replayed is None else {"topk": replaying(replayed, case)}
    with torch.no_grad(), patched(torch, **topk):
        logits = model(torch.from_numpy(tokens).long(), use_cache=False).logits
    assert logits.dtype == dtype
    return model, logits.numpy(), [ids.reshape(*tokens.shape, -1) for ids in routes]


def write_mxfp4(folder: pathlib.Path, case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Writes the model with random bytes for its experts and returns the weights that transformers
    reads."""
    hf = {name: value for name, value in case.hf.items() if name != "quantization_config"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
    fill(model, case, seed)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, x in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = x.to(torch.bfloat16).contiguous()
            continue
        experts, width, out = x.shape
        blocks = rng.integers(0, 256, (experts, out, width // 32, 16), np.uint8)
        exponents = rng.integers(122, 126, (experts, out, width // 32), np.uint8)
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(exponents)}
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(case.hf, indent=1) + "\n")
    stored = transformers.Mxfp4Config(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=stored, dtype=torch.float32)
    return read.state_dict()


def run_in_float64(case: Case, tokens: np.ndarray, seed: int, weights=None):
    """Returns what `run` does in float64, also where the modules convert to float32."""
    def check(_, __, out):
        outputs = out if isinstance(out, tuple) else (out,)
        assert all(x.dtype != single for x in outputs if isinstance(x, torch.Tensor))

    single, double = torch.float32, torch.float64
    hook = torch.nn.modules.module.register_module_forward_hook(check)
    with (
        patched(torch, float32=double, float=double),
        patched(torch.Tensor, float=torch.Tensor.double),
    ):
        result = run(case, tokens, seed, double, weights=weights)
    hook.remove()
    return result


def write_case(name: str, seed: int) -> None:
    case = CASES[name]
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, case.hf["vocab_size"], (2, case.length), np.int32)
    folder = GOLDEN / name
    weights = write_mxfp4(folder, case, seed) if case.is_mxfp4 else None
    model, logits, routes = run(case, tokens, seed, torch.float32, weights=weights)
    if weights is None:
        write_model(folder, case, model)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "logits.npy", logits.astype(np.float32))
    print(f"{name}: logits std {logits.std():.2f}")
    if routes:
        write_routes(folder, case, tokens, seed, logits, routes, weights)


def write_model(folder: pathlib.Path, case: Case, model: torch.nn.Module) -> None:
    biases = {n: x.clone() for n, x in model.named_buffers() if n.endswith("correction_bias")}
    model.to(torch.bfloat16)
    for buffer, values in biases.items():
        model.get_submodule(buffer.rpartition(".")[0]).e_score_correction_bias = values
    model.save_pretrained(
        folder, max_shard_size=case.shard_size, save_original_format=not case.is_fused)
    (folder / "generation_config.json").unlink()
    if not case.is_rewritten:
        (folder / "config.json").write_text(json.dumps(case.hf, indent=1) + "\n")


def write_routes(folder, case, tokens, seed, logits, routes, weights=None) -> None:
    _, exact, exact_routes = run_in_float64(case, tokens, seed, weights)
    np.testing.assert_array_equal(np.sort(routes), np.sort(exact_routes))
    for ids in routes:
        load = np.bincount(ids.flat, minlength=case.num_experts)
        assert load.all(), f"an expert is never chosen: {load}"
    error = exact - logits
    np.save(folder / "routes.npy", np.asarray(routes, np.uint8))
    np.save(folder / "error.npy", error.astype(np.float32))
    replay = np.roll(routes, 1, axis=2)
    _, replayed, _ = run(case, tokens, seed, torch.float32, replay, weights)
    np.save(folder / "replayed.npy", replayed)
    load = np.bincount(np.ravel(routes)) / np.size(routes)
    print(f"  loads {load.min():.3f} to {load.max():.3f}, error {np.abs(error).max():.1e}")


def write_ropes() -> None:
    records = []
    for scaling, theta, head_dim, *partial in ROPES:
        model = GLM | {"partial_rotary_factor": partial[0]} if partial else LLAMA
        hf = model | {"rope_scaling": scaling, "rope_theta": theta, "head_dim": head_dim,
                      "max_position_embeddings": 131072}
        config = transformers.AutoConfig.for_model(**hf)
        inv_freq, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
        records.append({"config": hf, "inv_freq": inv_freq.tolist(), "attention_scale": scale})
    (GOLDEN / "rope.json").write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for seed, name in enumerate(CASES):
        if name in (sys.argv[1:] or CASES):
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            write_case(name, CASES[name].seed or seed)
    write_ropes()


if __name__ == "__main__":
    main()
