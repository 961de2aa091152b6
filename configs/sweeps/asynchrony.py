"""How much staleness each objective tolerates, on the quickstart's task: AReaL's table (2505.24298).

    python -m jaxrl_tis.sweep --config=configs/sweeps/asynchrony.py --seeds=0,1,2

A hundred batches of 16 groups of 8, a run in about a minute on two cores. The sampler draws two batches
while the learner updates: it soon stands at its bound, and every batch is as stale as the schedule
allows; "inf" is bounded by a queue of 16 batches. All arms see the same number of samples, of the
float32 sampler, whose only gap is staleness. `:amplified` makes four updates of a batch, at half
the learning
rate: the largest of six rates at which the synchronous run does not end below where it began.
"""

from configs import quickstart
from jaxrl_tis.sweep import product


def get_config(variant: str = "plain"):
    c = quickstart.get_config("f32")
    c.name = f"asynchrony-{variant}"
    c.steps = 100
    c.rollout.prompts = 16
    c.rollout.update_turns = 2
    c.rollout.queue = 16 * 16
    c.engine.slots = 128
    c.train.microbatch_rows = 128
    c.eval.every = c.checkpoint.every = 100
    c.metrics.diagnostics_every = 50
    c.metrics.samples_every = 0
    c.correction.weight = "none"
    if variant == "amplified":
        c.train.minibatches, c.train.microbatch_rows = 4, 32
        c.optimizer.lr /= 2
    elif variant != "plain":
        raise ValueError(f"variant {variant!r} is neither plain nor amplified")
    return c


NAIVE = {"correction.centre": "behav", "correction.objective": "ppo(clip_high=0.28)"}
DECOUPLED = {
    "correction.centre": "prox", "correction.objective": "ppo(clip_high=0.28)",
    "correction.weight": "token_vanilla", "correction.staleness_weight": "folded",
}
OTHERS = [
    {"correction.centre": "old", "correction.objective": "ppo(clip_high=0.28)",
     "correction.weight": "token_tis(cap=2.0)"},
    DECOUPLED | {"correction.weight": "token_mis(upper=2.0)"},
    NAIVE | {"correction.objective": "a3po"},
    NAIVE | {"correction.masks": "m2po"},
    NAIVE | {"correction.controllers": "gradient_alignment(gac_low=0.1, gac_high=0.3)"},
    NAIVE | {"correction.controllers": "ess_scale"},
]


def _lags(*values):
    """Returns arms by staleness bound; without a bound, snapshots are kept for the whole queue."""
    return [
        {"rollout.schedule": f"areal(staleness={value})"}
        | ({"rollout.snapshots": 17} if value == "inf" else {})
        for value in values
    ]


def sweep():
    return (
        product(_lags(0, 8, 1, 4, "inf", 2), [NAIVE])
        + product(_lags(8, "inf", 4), [DECOUPLED])
        + product(_lags(8), OTHERS)
    )
