"""GSM8K with a small model on one TPU v5e chip (16 GiB): LoRA factors beside one base, int8 rollouts.

    python -m jaxrl_tis.main --config=configs/gsm8k_one_chip.py:qwen25_0p5b --workdir=runs/one_chip

Models: qwen25_0p5b, gemma3_1b (its hub page asks for a login), qwen3_1p7b. The learning rate is ten
times that of configs/gsm8k_qwen25_0p5b.py, as docs/lora.md advises. Compiled for the chip, and never
run on one, so there is no expected result.
"""

from configs import gsm8k_qwen25_0p5b

# Hub name, slots of the sampler, and rows of a micro-batch.
MODELS = {
    "qwen25_0p5b": ("Qwen/Qwen2.5-0.5B-Instruct", 128, 4),
    "gemma3_1b": ("google/gemma-3-1b-it", 64, 2),
    "qwen3_1p7b": ("Qwen/Qwen3-1.7B", 32, 1),
}


def get_config(model: str = "qwen25_0p5b"):
    if model not in MODELS:
        raise ValueError(f"model {model!r} is none of {', '.join(MODELS)}")
    name, slots, rows = MODELS[model]
    c = gsm8k_qwen25_0p5b.get_config("grpo")
    c.name = f"gsm8k_one_chip-{model}"
    c.model.path = f"hf://{name}"
    c.model.lora = "lora(rank=32, alpha=32)"
    c.optimizer.lr = 1e-5
    c.mesh.train = c.mesh.serve = (1, 1, 1)
    c.rollout.prompts = 128
    c.engine.quantization = "w8a8"
    c.engine.slots, c.engine.prefill_batch = slots, 8
    c.train.microbatch_rows = rows
    if model == "qwen3_1p7b":
        c.task.template_kwargs = {"enable_thinking": False}
    return c
