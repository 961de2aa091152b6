"""GSM8K with Qwen3-8B on a TPU v5e-8 (8 chips of 16 GiB): LoRA factors beside one base, int8 rollouts.

    python -m jaxrl_tis.main --config=configs/gsm8k_qwen3_8b_lora.py --workdir=runs/lora_8b

As configs/gsm8k_one_chip.py, with the base divided over the chips: along the width to train, over the
heads to serve. The sampler multiplies an int8 copy of the base, which it frees during the update.
Compiled for the chips, and never run on them, so there is no expected result.
"""

from configs import gsm8k_one_chip


def get_config():
    c = gsm8k_one_chip.get_config("qwen3_1p7b")
    c.name = "gsm8k_qwen3_8b_lora"
    c.model.path = "hf://Qwen/Qwen3-8B"
    c.model.remat = "full"
    c.mesh.train = (1, -1, 1)
    c.mesh.serve = (-1, 1, 8)
    c.engine.slots, c.engine.prefill_batch = 320, 16
    c.train.microbatch_rows = 8
    return c
