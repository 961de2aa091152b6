"""Writes tests/models/golden_peft: adapters that PEFT made of small models, and PEFT's logits.

Needs torch, transformers (5.24) and peft (0.21.2 wrote the files that are here):

    python tests/models/make_golden_peft.py [CASE ...]

The base of most cases is a random Llama, which this script writes too. Models with experts are those of
tests/models/golden. Each adapter is read again by PEFT before its logits are computed.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FOLDER = pathlib.Path(__file__).parent / "golden_peft"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "all": dict(r=4, lora_alpha=32, target_modules=[*ATTENTION, *MLP, "lm_head"]),
    "rslora": dict(r=4, lora_alpha=32, use_rslora=True, target_modules="all-linear"),
    "regex": dict(r=3, lora_alpha=6, target_modules=r".*\.(gate|down)_proj"),
    "patterns": dict(
        r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], layers_to_transform=[1],
        rank_pattern={"v_proj": 3}, alpha_pattern={"layers.1.self_attn.q_proj": 5},
    ),
    "whole_name": dict(r=2, target_modules=["q_proj", "lm_head"], layers_to_transform=[1]),
}
# Everything of a model with experts, with half of the ranks of gate_up_proj for either part.
EXPERTS = dict(
    r=6, lora_alpha=12, target_modules=ATTENTION,
    rank_pattern={"mlp.experts.gate_up_proj": 4, "mlp.experts.down_proj": 2},
    alpha_pattern={"mlp.experts.gate_up_proj": 24},
)
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", *(f"mlp.{x}.weight" for x in MLP)]
SHARED = [f"mlp.shared_experts.{x}.weight" for x in MLP]
# name -> (base, fields)
WITH_EXPERTS = {
    "qwen3_moe": ("qwen3_moe_raw", EXPERTS | {"target_parameters": PARAMETERS}),
    "glm4_moe": ("glm4_moe", EXPERTS | {"target_parameters": [*PARAMETERS, *SHARED]}),
    # PEFT turns these into target_parameters. Gate and up of an expert share A.
    "converted": ("qwen3_moe_raw", dict(r=2, lora_alpha=6, target_modules=["q_proj", *MLP])),
    "down": ("qwen3_moe_raw", dict(
        r=2, lora_alpha=6, target_modules=[], target_parameters=["experts.down_proj"])),
}


def fill(model: torch.nn.Module, is_apart: bool) -> None:
    """Fills B; `is_apart` gives either part of gate_up_proj ranks of its own."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
            if is_apart and "experts.base_layer.lora_B" in name:
                rank, experts = 4, parameter.shape[1] // 4
                gate, up = parameter.data.reshape(2, -1, rank, experts)
                gate[:, 2:] = up[:, :2] = 0


def read_logits(base: pathlib.Path, name: str) -> np.ndarray:
    """Returns the logits of a folder as PEFT reads it."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.config._experts_implementation = "eager"
    model = PeftModel.from_pretrained(plain, FOLDER / name).eval()
    tokens = torch.arange(12).reshape(2, 6) * 5 % 24
    with torch.no_grad():
        return model(tokens).logits.numpy()


def write(base: pathlib.Path, name: str, fields: dict) -> None:
    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **fields))
    fill(model, fields.get("lora_alpha") == EXPERTS["lora_alpha"])
    model.peft_config["default"].base_model_name_or_path = base.name
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "README.md").unlink(missing_ok=True)
    np.save(FOLDER / f"{name}.npy", read_logits(base, name))


def write_single_experts(base: pathlib.Path) -> None:
    """An adapter as PEFT wrote it with transformers 4, where each expert has modules of its own."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    sizes, tensors = {"gate_proj": (32, 16), "up_proj": (32, 16), "down_proj": (16, 32)}, {}
    for layer in range(model.config.num_hidden_layers):
        for expert in range(model.config.num_experts):
            for leaf, (d_in, d_out) in sizes.items():
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{leaf}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(2, d_in) * d_in**-0.5
                tensors[f"{name}.lora_B.weight"] = torch.randn(d_out, 2) * 0.05
    folder = FOLDER / "single_experts"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=2, lora_alpha=6, target_modules=MLP, bias="none",
    )
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    np.save(FOLDER / "single_experts.npy", read_logits(base, "single_experts"))


def main() -> None:
    golden = FOLDER.parent / "golden"
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=24, max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    cases = {name: (FOLDER / "base", fields) for name, fields in ADAPTERS.items()}
    cases |= {name: (golden / base, fields) for name, (base, fields) in WITH_EXPERTS.items()}
    chosen = sys.argv[1:] or ["base", *cases, "single_experts"]
    if "base" in chosen:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(FOLDER / "base")
    for name in chosen:
        if name in cases:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            write(*cases[name][:1], name, cases[name][1])
    if "single_experts" in chosen:
        write_single_experts(golden / "qwen3_moe")


if __name__ == "__main__":
    main()
