"""The base run of the figures of docs/experiments.md: a minute on one core.

A decoder of 0.1 M parameters learns two-digit sums by 600 supervised steps, until half to three quarters of
held-out sums are right. Then it learns by GRPO, with 256 answers and two updates per step. The sampler is a
float32 engine without a gap. `configs/fig_*.py` add a gap, or change the sampler, learner or correction.
"""

from configs import default


def get_config():
    c = default.get_config()
    c.name = "figure"
    c.steps = 160
    c.model.num_layers = 2
    c.model.embed_dim = 64
    c.model.head_dim = 16
    c.model.mlp_dim = 192
    c.model.max_position = 64
    c.task.tokenizer = "char"
    c.task.params = {"size": 4096, "digits": 2, "terms": 2, "ops": "+"}
    c.task.max_prompt_tokens = 8
    c.warmup.steps = 600
    c.warmup.lr = 3e-3
    c.rollout.prompts = 32
    c.rollout.max_new_tokens = 4
    c.engine.slots = 256
    c.engine.quantization = "none"
    c.correction.objective = "ppo(clip_high=0.28)"
    c.correction.weight = "none"
    c.optimizer.lr = 5e-4
    c.train.minibatches = 2
    c.train.microbatch_rows = 128
    c.eval.every = 20
    c.checkpoint.every = c.steps
    c.metrics.diagnostics_every = 40
    c.metrics.samples_every = 0
    return c
