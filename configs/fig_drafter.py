"""A small model drafts for the policy: none, frozen, and distilled on the samples of every step.

    ./launch/figures.sh drafter    # 4 arms of 2 seeds, two minutes each on one core

The policy of 0.8 M parameters has taken 100 supervised steps on sums of two digits. The learning rate is so
high that it changes quickly, and it learns no sums: in 40 steps its entropy falls from 1.3 to 0.4 nats. The
drafter of 0.01 M parameters has taken 600 steps on the same sums; `python -m experiments.drafter` trains it.
`measured` is `distilled` with the measured times of passes in place of engine.free_batch_rows. All arms draw
the same samples but for rounding.

Does acceptance in the last steps differ between `distilled` and `frozen`, and does an arm sample more tokens per
second than `none`? The learning rate and the warm-up were chosen on seed 0.
"""

from configs import fig_base

FOLDER = "runs/figures/drafter-model"
SMALL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 1,
    "model.head_dim": 16, "model.mlp_dim": 64,
}
DRAFTS = {"engine.drafter": FOLDER, "engine.max_draft": 3, "engine.free_batch_rows": 8}
DISTILLED = DRAFTS | {"engine.drafter_every": 1}


def get_config():
    c = fig_base.get_config()
    c.steps = c.checkpoint.every = 40
    c.model.num_layers = 4
    c.model.embed_dim = 128
    c.model.head_dim = 32
    c.model.mlp_dim = 384
    c.warmup.steps = 100
    c.warmup.rows = 32
    c.warmup.lr = 3e-3
    c.rollout.prompts = 8
    c.engine.slots = 2
    c.engine.prefill_batch = 2
    c.optimizer.lr = 1e-3
    c.train.microbatch_rows = 32
    c.eval.every = 40
    c.eval.prompts = 64
    return c


def sweep():
    return {
        "none": {}, "frozen": DRAFTS, "distilled": DISTILLED,
        "measured": DISTILLED | {"engine.free_batch_rows": 0},
    }
