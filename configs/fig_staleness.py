"""Stale samples: M2PO's prosperity before collapse (2510.01161), and the ESS at each lag.

    ./launch/figures.sh staleness    # 12 arms of 5 seeds, 29 minutes on two cores

A float32 sampler runs ahead by up to `staleness` batches of two updates. It reaches a bound of 48 at step 70.
"""

from configs import fig_base

LAGS = (0, 4, 16, 48)
OBJECTIVES = {
    "no-clip": "ppo(clip_low=1.0, clip_high=inf)",  # the ratio alone
    "PPO": "ppo(clip_high=0.28)",
    "M2PO": "m2po",
}


def get_config():
    c = fig_base.get_config()
    c.correction.centre = "behav"
    return c


def _lag(lag):
    """Returns the fields of a lag. Without the sampler's weights, mismatch/* has the whole ratio, with age."""
    if lag == 0:
        return {}
    return {
        "rollout.schedule": f"areal(staleness={lag})", "rollout.update_turns": 4,
        "rollout.old_logp_source": "none",
    }


def sweep():
    return {
        f"{name}-{lag}": _lag(lag) | {"correction.objective": objective}
        for name, objective in OBJECTIVES.items() for lag in LAGS
    }
