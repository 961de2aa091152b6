"""A small decoder with experts learns two-digit sums by GRPO with int8 rollouts.

    ./launch/quickstart.sh moe

or `python -m jaxrl_tis.main --config=configs/quickstart_moe.py --workdir=runs/quickstart_moe`. Two CPU
cores, no download. 2 M parameters: 4 layers of 8 experts and a shared one; a token uses 2 experts, and
as many parameters as the decoder of configs/quickstart.py has. The sampler records its routes. By
default (`:r3`) the learner replays them. `--compare` adds three variants: `:none` (no replay), `:icepop`
(no replay, IcePop's weight) and `:r2` (replay of the learner's own routes).
"""

from configs import quickstart

VARIANTS = "none", "icepop", "r2", "r3"


def get_config(variant: str = "r3"):
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is none of {', '.join(VARIANTS)}")
    c = quickstart.get_config()
    c.name = f"quickstart_moe-{variant}"
    c.warmup.steps = 300
    c.model.num_experts = 8
    c.model.experts_per_token = 2
    c.model.expert_dim = c.model.shared_expert_dim = 128
    c.model.router = "sigmoid"
    c.engine.record_routes = True
    if variant == "icepop":
        c.correction.preset = "icepop"
    else:
        c.correction.routing = variant
    return c
