"""A small decoder learns to call a calculator for sums and products that it cannot do itself.

    ./launch/quickstart.sh tool

or `python -m jaxrl_tis.main --config=configs/quickstart_tool.py --workdir=runs/quickstart_tool`. Two CPU
cores, no download. The warm-up teaches the format of a call on part of its examples. GRPO then teaches
when to call, and to copy the reply. `--compare` adds three variants whose sampler has artificial noise
on its weights, far more than the int8 error: `:gap_tis` (token-level TIS), `:gap_turn` (turn-level TIS)
and `:gap_off` (no correction).
"""

from configs import quickstart

VARIANTS = "tis", "gap_tis", "gap_turn", "gap_off"


def get_config(variant: str = "tis"):
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is none of {', '.join(VARIANTS)}")
    c = quickstart.get_config()
    c.name = f"quickstart_tool-{variant}"
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
    if variant != "tis":
        c.engine.injected = "weights(scale=0.4)"
    if variant == "gap_turn":
        c.correction.weight = "turn_tis(cap=2.0)"
    elif variant == "gap_off":
        c.correction.weight = "none"
    return c
