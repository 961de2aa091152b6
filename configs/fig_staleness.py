"""Stale samples: M2PO's prosperity before collapse (2510.01161), and how much lag which sample size bears.

    ./launch/figures.sh staleness    # 20 arms of 3 seeds, 40 minutes on two cores

A float32 sampler runs ahead by up to `staleness` batches of two updates; it stands at its bound soon.
"""

from configs import fig_base

LAGS = (0, 2, 4, 8, 16, 32)
OBJECTIVES = {
    "no-clip": "reinforce",
    "PPO": "ppo(clip_high=0.28)",
    "M2PO": "m2po",
}


def get_config():
    c = fig_base.get_config()
    c.correction.mode = "bypass"
    c.rollout.update_turns = 4
    c.rollout.old_logp = "none"
    return c


def sweep():
    return {
        f"{name}-{lag}": {"rollout.mode": f"areal(staleness={lag})", "correction.objective": objective}
        for name, objective in OBJECTIVES.items() for lag in LAGS
    }
