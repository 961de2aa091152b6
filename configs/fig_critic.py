"""Collapse and rescue with PPO: one answer per prompt, and a critic.

    ./launch/figures.sh critic    # 10 arms of 5 seeds of 80 steps, 23 minutes on two cores
"""

from configs import fig_base
from configs.fig_rescue import CORRECTIONS, INT8, UNCORRECTED, with_gap


def get_config():
    c = fig_base.get_config()
    c.steps = c.checkpoint.every = 80
    c.eval.every = 10
    c.rollout.prompts, c.rollout.group_size = 256, 1
    c.correction.advantage = "gae"
    c.critic.lr = 1e-3
    return c


def sweep():
    return {"no-gap": UNCORRECTED} | with_gap(CORRECTIONS) | {"int8": INT8 | UNCORRECTED}
