"""How much staleness which objective bears, on the quickstart's task: AReaL's table (2505.24298).

    python -m jaxrl_tis.sweep --config=configs/sweeps/asynchrony.py --seeds=0,1,2

The sampler draws two batches while the learner updates, so that it soon stands at its bound and every
batch is as stale as the mode allows; "inf" is bounded by a queue of 16 batches. All arms see the same
number of samples, of the float32 sampler, whose only gap is staleness. `:amplified` has four
minibatches and three times the learning rate.
"""

from configs import quickstart
from jaxrl_tis.sweep import grid, product


def get_config(variant: str = "plain"):
    c = quickstart.get_config("f32")
    c.name = f"asynchrony-{variant}"
    c.steps = 80
    c.rollout.prompts = 32
    c.rollout.update_turns = 2
    c.rollout.queue = 16 * 32
    c.engine.slots = 256
    c.train.microbatch_rows = 256
    c.eval.every = c.checkpoint.every = 80
    c.correction.weight = "none"
    if variant == "amplified":
        c.train.minibatches, c.train.microbatch_rows = 4, 64
        c.optimizer.lr *= 3
    elif variant != "plain":
        raise ValueError(f"variant {variant!r} is neither plain nor amplified")
    return c


NAIVE = {"correction.mode": "bypass", "correction.objective": "ppo(clip_high=0.28)"}
DECOUPLED = {"correction.mode": "decoupled", "correction.objective": "decoupled(clip_high=0.28)"}
OTHERS = [
    {"correction.mode": "decoupled", "correction.objective": "ppo(clip_high=0.28)",
     "correction.weight": "token_tis(cap=2.0)"},
    NAIVE | {"correction.objective": "a3po"},
    NAIVE | {"correction.masks": "m2po"},
    NAIVE | {"correction.controllers": "gradient_alignment(gac_low=0.1, gac_high=0.3)"},
    NAIVE | {"correction.controllers": "ess_scale"},
]


def sweep():
    lags = lambda *values: grid({"rollout.mode": [f"areal(staleness={v})" for v in values]})
    return (
        product(lags(0, 1, 2, 4, 8, "inf"), [NAIVE])
        + product(lags(1, 4, 8, "inf"), [DECOUPLED])
        + product(lags(4, 8), OTHERS)
    )
