"""Replay: variance, diversity and sampling against the size of the buffer and reuse (Arnal et al., 2604.08706).

    ./launch/figures.sh replay    # 7 arms of 4 seeds

`fresh` samples all 32 groups of a batch. With reuse u only 32 / u are new. A buffer holds the groups of the last
4 or 16 batches.

Fixed before the runs: what does an arm lose against `fresh` after as many updates, and does it gain over `fresh`
after as many samples? The interval of the paired difference over seeds decides, where it excludes 0.
"""

from configs import fig_base

REUSES, AGES = (2, 4), (4, 16)


def get_config():
    return fig_base.get_config()


def sweep():
    way = lambda name, uses: f"{name}(uses={uses}, most={2 * uses})"
    arms = {f"uniform-{uses}-{age}": (way("uniform", uses), age) for uses in REUSES for age in AGES}
    arms |= {f"{name}-2-16": (way(name, 2), 16) for name in ("newest", "fresh_by_ess")}
    return {"fresh": {}} | {
        arm: {"rollout.replay": replay, "rollout.max_age": age} for arm, (replay, age) in arms.items()
    }
