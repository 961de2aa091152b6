"""A learner and two rollout workers on one machine, for ./launch/async_local.sh.

    python -m jaxrl_tis.main --config=configs/async_local.py --workdir=runs/async_local

The task is sums of 240 digits: a sequence takes about a second. Two CPU cores, two minutes, extra
[ray]. The run shows workers that stop and return. It is too short to learn the sums.
"""

from configs import default


def get_config():
    c = default.get_config()
    c.name = "async_local"
    c.steps = 40
    c.model.num_layers, c.model.embed_dim, c.model.mlp_dim = 2, 64, 192
    c.task.tokenizer = "char"
    c.task.params = {"size": 4096, "digits": 240, "terms": 2, "ops": "+"}
    c.task.max_prompt_tokens = 496
    c.warmup.steps, c.warmup.rows = 20, 8
    c.rollout.driver = "ray"
    c.rollout.workers = 2
    c.rollout.schedule = "in_flight(staleness=2)"
    c.rollout.worker_timeout = 10.0
    c.rollout.prompts = 8
    c.rollout.group_size = 2
    c.rollout.max_new_tokens = 248
    c.train.microbatch_rows = 16
    c.engine.slots = 4  # few, so that all are always busy
    c.engine.prefill_batch = 4
    c.engine.steps_per_call = 1
    c.eval.every = 40
    c.eval.prompts = 16
    c.checkpoint.every = 20
    c.metrics.samples = 8  # one per group; the script counts them
    c.metrics.samples_every = 1
    return c
