"""A small decoder learns to call a calculator for sums and products that it cannot do itself.

    python -m jaxrl_tis.main --config=configs/quickstart_tool.py --workdir=runs/tool

Two CPU cores, no download. The warm-up teaches the format of a call on part of its examples. GRPO
then teaches when to call, and to copy the reply. `--compare` adds two variants: `:turn` (turn-level
TIS) and `:off` (no correction).
"""

from configs import quickstart


def get_config(variant: str = "tis"):
    if variant not in ("tis", "turn", "off"):
        raise ValueError(f"variant {variant!r} is none of tis, turn, off")
    c = quickstart.get_config("off" if variant == "off" else "tis")
    c.name = f"quickstart-tool-{variant}"
    c.steps = 60
    c.task.params = {"size": 4096, "digits": 2, "terms": 2, "ops": "+*"}
    c.task.environment = "jaxrl_tis.environments.calculator:Calculator"
    c.task.environment_workers = 1
    c.task.max_turns = 2
    c.task.max_context_tokens = 32
    c.warmup.params = {"split": "warmup", "calls": 0.5}
    c.rollout.prompts = 32
    c.rollout.max_new_tokens = 8
    c.engine.steps_per_call = 4
    c.eval.every = c.checkpoint.every = 20
    c.eval.prompts = 256
    if variant == "turn":
        c.correction.weight = "turn_tis(cap=2.0)"
    return c
