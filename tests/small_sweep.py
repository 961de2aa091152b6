"""A sweep of tests/small_run.py."""

from jaxrl_tis.sweep import grid
from tests import small_run


def get_config():
    c = small_run.get_config()
    c.steps = 1
    return c


def sweep():
    return grid({"optimizer.lr": [1e-3, 3e-3]}) + [{"reward.name": "tests.tiny_rewards:absent"}]
