"""A small decoder learns two-digit sums by GRPO with int8 rollouts and token-level TIS.

    ./launch/quickstart.sh

or `python -m jaxrl_tis.main --config=configs/quickstart.py --workdir=runs/quickstart`. Two CPU
cores, no download. `--compare` adds three variants: `:off` (same int8 sampler, no correction),
`:centered` (same sampler, centred scores instead of the weight) and `:f32` (float32 sampler).
"""

from configs import default


def get_config(variant: str = "tis"):
    c = default.get_config()
    c.name = f"quickstart-{variant}"
    c.steps = 210
    c.task.tokenizer = "char"
    c.task.params = {"size": 4096, "digits": 2, "terms": 2, "ops": "+"}
    c.task.max_prompt_tokens = 8
    c.warmup.steps = 200
    c.rollout.prompts = 64
    c.rollout.max_new_tokens = 5
    c.engine.slots = 256
    c.engine.steps_per_call = 5
    c.correction.objective = "ppo(clip_high=0.28)"
    c.optimizer.lr = 2.5e-4
    c.train.microbatch_rows = 128
    c.eval.every = 70
    c.eval.prompts = 512
    c.checkpoint.every = 70
    if variant == "off":
        c.correction.weight = "none"
    elif variant == "centered":
        c.correction.weight, c.correction.centering = "none", "top(32)"
    elif variant == "f32":
        c.engine.quantization = "none"
    elif variant != "tis":
        raise ValueError(f"variant {variant!r} is none of tis, off, centered, f32")
    return c
