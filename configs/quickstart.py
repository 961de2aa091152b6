"""A small decoder learns two-digit addition by GRPO with int8 rollouts and token-level TIS.

    python -m jaxrl_tis.main --config=configs/quickstart.py --workdir=runs/quickstart

Two CPU cores. `--config=configs/quickstart.py:off` samples as before but drops the
correction, `:f32` samples in float32.
"""

from configs import default


def get_config(variant: str = "tis"):
    c = default.get_config()
    c.name = f"quickstart-{variant}"
    c.steps = 60
    c.task.tokenizer = "char"
    c.task.params = {"size": 4096, "digits": 2, "terms": 2, "ops": "+"}
    c.task.max_prompt_tokens = 8
    c.warmup.steps = 150
    c.warmup.rows = 64
    c.rollout.max_new_tokens = 5
    c.eval.prompts = 512
    if variant == "off":
        c.correction.weight = "none"
    elif variant == "f32":
        c.engine.quantization = "none"
    elif variant != "tis":
        raise ValueError(f"variant {variant!r} is none of tis, off, f32")
    return c
