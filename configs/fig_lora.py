"""LoRA beside full training on the quickstart: accuracy, bytes of a weight sync, and memory.

    ./launch/figures.sh lora    # arms of 5 seeds

The run is `configs/quickstart.py`, with an evaluation every 15 steps. Every arm has the same 210 steps, and
the same seed starts every arm from the same warmed-up weights. `full` has the quickstart's learning rate.
The arms of LoRA have four times that rate, because ten times is too much for a model of this size. One
further arm has six times that rate.

Outcome: held-out accuracy at the end, the mean of the evaluations at steps 180, 195 and 210, and its paired
difference to `full`. LoRA learns as well as full training if the interval of that difference contains 0.
"""

from configs import quickstart


def get_config():
    c = quickstart.get_config()
    c.name = "figure-lora"
    c.eval.every = 15
    c.checkpoint.every = c.steps
    c.metrics.samples_every = 0
    return c


def lora(rank: int, lr: float):
    return {"model.lora": f"lora(rank={rank}, alpha=32)", "optimizer.lr": lr}


def sweep():
    return {
        "full": {},
        "rank-32": lora(32, 1e-3),
        "rank-8": lora(8, 1e-3),
        "rank-32-fast": lora(32, 1.5e-3),
    }
