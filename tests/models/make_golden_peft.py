"""Writes tests/models/golden_peft: a random Llama, adapters that PEFT made of it, and PEFT's logits.

Needs torch, transformers and peft (0.21.2 wrote the files that are here):

    python tests/models/make_golden_peft.py
"""

import pathlib

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = pathlib.Path(__file__).parent / "golden_peft"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "all": dict(r=4, lora_alpha=32, target_modules=[*ALL, "lm_head"]),
    "rslora": dict(r=4, lora_alpha=32, use_rslora=True, target_modules="all-linear"),
    "regex": dict(r=3, lora_alpha=6, target_modules=r".*\.(gate|down)_proj"),
    "patterns": dict(
        r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], layers_to_transform=[1],
        rank_pattern={"v_proj": 3}, alpha_pattern={"layers.1.self_attn.q_proj": 5},
    ),
}


def main() -> None:
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=24, max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(FOLDER / "base")
    tokens = torch.arange(12).reshape(2, 6) * 5 % config.vocab_size
    for name, fields in ADAPTERS.items():
        torch.manual_seed(1)
        base = LlamaForCausalLM.from_pretrained(FOLDER / "base", dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **fields))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.05)
        model.peft_config["default"].base_model_name_or_path = "base"
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "README.md").unlink(missing_ok=True)
        with torch.no_grad():
            np.save(FOLDER / f"{name}.npy", model(tokens).logits.numpy())


if __name__ == "__main__":
    main()
