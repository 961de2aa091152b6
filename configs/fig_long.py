"""Runs of 400 steps, 800 updates: long enough to see a collapse 200 updates ahead, and 100 updates after it.

    ./launch/figures.sh long    # 5 arms of 2 seeds, about 2 minutes of a core each

The arms are of `fig_rescue.py` and `fig_staleness.py`: without a gap, three with noise of 0.4 on the sampler's
weights, and samples of up to 48 batches before with a loss without a clip.
"""

from configs import fig_base, fig_rescue, fig_staleness


def get_config():
    c = fig_base.get_config()
    c.steps = c.checkpoint.every = 400
    c.eval.every = 50
    return c


def sweep():
    rescue, stale = fig_rescue.sweep(), fig_staleness.sweep()
    arms = {name: rescue[name] for name in ("no-gap", "none", "PPO-IS", "TIS-2")}
    return arms | {"no-clip-48": stale["no-clip-48"] | {"correction.centre": "behav"}}
