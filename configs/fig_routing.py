"""Routing replay against the number of minibatches: none, r2 and r3 for N = 1, 2, 4 and 8.

    ./launch/figures.sh routing    # 24 arms of 2 seeds

The base run with experts: 0.3 M parameters, 2 layers of 8 experts and a shared one, 2 experts a token.
The sampler is int8 (W8A8). Half of the arms also add noise to the sampler's routers, which flips more
routes than int8 does. The learning rate falls as 1 / sqrt(N), equally for the three ways of routing.
"""

from configs import fig_base
from jaxrl_tis.sweep import Arm

MINIBATCHES = 1, 2, 4, 8
ROUTINGS = "none", "r2", "r3"
NOISE = {"engine.injected": "router(scale=0.3)"}


def get_config():
    c = fig_base.get_config()
    c.model.num_experts = 8
    c.model.experts_per_token = 2
    c.model.expert_dim = c.model.shared_expert_dim = 64
    c.model.router = "sigmoid"
    c.engine.quantization = "w8a8"
    c.engine.record_routes = True
    c.warmup.steps = 300
    c.steps = c.checkpoint.every = 80
    c.metrics.diagnostics_every = 20
    return c


def arm(routing: str, minibatches: int) -> Arm:
    base = get_config()
    return {
        "correction.routing": routing,
        "train.minibatches": minibatches,
        "train.microbatch_rows": min(128, base.rollout.prompts * base.rollout.group_size // minibatches),
        "optimizer.lr": base.optimizer.lr * (base.train.minibatches / minibatches) ** 0.5,
    }


def sweep():
    plain = {f"{r}-{n}": arm(r, n) for n in MINIBATCHES for r in ROUTINGS}
    return plain | {f"noise-{name}": fields | NOISE for name, fields in plain.items()}
