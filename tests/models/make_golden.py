"""Writes tests/models/golden: tiny random models and their logits, computed by transformers.

    pip install torch==2.13.0
    pip install transformers==5.23.0
    python tests/models/make_golden.py

Weights are bfloat16 on disk and float32 in the computation. They are scaled so that logits have a
standard deviation above 1 and attention is peaked, and the norms' epsilon is large: a wrong
rotation, norm or bias then shows.
`rope.json` holds the frequencies alone, for more settings than there are models.
"""

import json
import pathlib
import shutil

import numpy as np
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

# name -> (config.json as published checkpoints write it, tokens per row, config.json rewritten in
# the style of transformers 5, bytes per shard)
CASES = {
    "llama_default": (
        LLAMA | {"tie_word_embeddings": True, "rope_scaling": None}, 40, False, "1GB"),
    "llama_linear": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}, 40, False, "1GB"),
    "llama_llama3": (LLAMA | {"rope_scaling": LLAMA3}, 64, True, "1GB"),
    "llama_yarn": (LLAMA | {"rope_scaling": YARN}, 96, False, "1GB"),
    "qwen2_tied": (QWEN2 | {"tie_word_embeddings": True}, 40, False, "1GB"),
    "qwen2_untied": (QWEN2 | {"rope_theta": 10000.0}, 40, True, "1GB"),
    "qwen3": (
        SMALL | {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16,
            "attention_bias": False, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        },
        40, True, "20KB",
    ),
}

# (rope_scaling, rope_theta, head_dim)
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
]


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights, representable in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            values = 0.5 + torch.rand(parameter.shape, generator=generator)
        elif name.endswith(".bias"):
            values = torch.randn(parameter.shape, generator=generator)
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            gain = 4.0 if "embed_tokens" in name else gain
            fan_in = parameter.shape[1]
            values = torch.randn(parameter.shape, generator=generator) * gain * fan_in**-0.5
        parameter.data.copy_(values.to(torch.bfloat16))


def write_case(name: str, seed: int) -> None:
    hf, length, is_rewritten, shard_size = CASES[name]
    config = transformers.AutoConfig.for_model(**hf)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fill(model, seed)
    tokens = np.random.default_rng(seed).integers(0, hf["vocab_size"], (2, length), np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
    folder = GOLDEN / name
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard_size)
    (folder / "generation_config.json").unlink()
    if not is_rewritten:
        (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "logits.npy", logits.astype(np.float32))
    print(f"{name}: logits std {logits.std():.2f}")


def write_ropes() -> None:
    records = []
    for scaling, theta, head_dim in ROPES:
        hf = LLAMA | {"rope_scaling": scaling, "rope_theta": theta, "head_dim": head_dim,
                      "max_position_embeddings": 131072}
        config = transformers.AutoConfig.for_model(**hf)
        inv_freq, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
        records.append({"config": hf, "inv_freq": inv_freq.tolist(), "attention_scale": scale})
    (GOLDEN / "rope.json").write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    for seed, name in enumerate(CASES):
        write_case(name, seed)
    write_ropes()


if __name__ == "__main__":
    main()
