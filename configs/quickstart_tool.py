"""A small decoder learns to call a calculator for sums and products that it cannot do itself.

    python -m jaxrl_tis.main --config=configs/quickstart_tool.py --workdir=runs/tool

Two CPU cores, no download. The warm-up teaches the format of a call on part of its examples. GRPO
then teaches when to call, and to copy the reply. `--compare` adds two variants: `:turn` (turn-level
TIS) and `:off` (no correction).
"""

from configs import default


def get_config(variant: str = "tis"):
    c = default.get_config()
    c.name = f"quickstart-tool-{variant}"
    c.steps = 60
    c.task.tokenizer = "char"
    c.task.params = {"size": 4096, "digits": 2, "terms": 2, "ops": "+*"}
    c.task.environment = "jaxrl_tis.environments.calculator:Calculator"
    c.task.environment_workers = 1
    c.task.max_turns = 2
    c.task.max_prompt_tokens = 8
    c.task.max_context_tokens = 32
    c.warmup.steps = 200
    c.warmup.params = {"split": "warmup", "calls": 0.5}
    c.rollout.prompts = 32
    c.rollout.max_new_tokens = 8
    c.engine.slots = 256
    c.engine.steps_per_call = 4
    c.correction.objective = "ppo(clip_high=0.28)"
    c.optimizer.lr = 2.5e-4
    c.train.microbatch_rows = 128
    c.eval.every = 20
    c.eval.prompts = 256
    c.checkpoint.every = 20
    if variant == "turn":
        c.correction.weight = "turn_tis(cap=2.0)"
    elif variant == "off":
        c.correction.weight = "none"
    elif variant != "tis":
        raise ValueError(f"variant {variant!r} is none of tis, turn, off")
    return c
