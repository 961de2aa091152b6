"""A small model drafts for the policy: none, frozen, and distilled on the samples of every step.

    ./launch/figures.sh drafter    # 4 arms of 3 seeds

The policy of 0.9 M parameters knows sums of two digits a little after 100 supervised steps, and learns them
by GRPO. Two slots decode, so a pass waits for weights. The drafter of 0.01 M parameters has learned the
same sums for 600 steps; `python -m experiments.drafter` trains it. `measured` is `distilled` with the
measured times of passes in place of engine.free_batch_rows.

Fixed before the runs: does acceptance over the last steps differ between `distilled` and `frozen`, and does an arm
sample more tokens per second than `none`? It does where the interval of the paired difference excludes 0.
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
