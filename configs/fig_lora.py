"""LoRA beside full training on the quickstart: accuracy, bytes of a weight sync, and memory.

    ./launch/figures.sh lora    # 2 arms of 5 seeds

The runs are the first 90 of the 210 steps of `configs/quickstart.py`, for both arms, with an evaluation every
10 steps. The same seed starts both arms from the same warmed-up weights. `full` has the quickstart's learning
rate. LoRA has four times that rate, because ten times is too much for a model of this size.

Outcome: held-out accuracy at the end, the mean of the evaluations at steps 70, 80 and 90, and its paired
difference to `full`. LoRA learns less in the same steps if the interval of that difference is below 0.
"""

from configs import quickstart


def get_config():
    c = quickstart.get_config()
    c.name = "figure-lora"
    c.steps = 90
    c.eval.every = 10
    c.checkpoint.every = c.steps
    c.metrics.samples_every = 0
    return c


def lora(rank: int, lr: float):
    return {"model.lora": f"lora(rank={rank}, alpha=32)", "optimizer.lr": lr}


def sweep():
    return {"full": {}, "rank-32": lora(32, 1e-3)}
