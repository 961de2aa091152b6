"""Staleness inside a batch, on the quickstart's task.

The arms make more updates per batch, by minibatches and by epochs, with and without a correction.

    python -m jaxrl_tis.sweep --config=configs/sweeps/staleness.py --seeds=0,1,2

The last update of a batch is (minibatches x epochs - 1) updates away from the sampling weights. Every arm
has the same number of steps, and so of samples.
"""

from configs import quickstart
from jaxrl_tis.sweep import grid, product, zipped

get_config = quickstart.get_config


def sweep():
    updates = zipped({"train.minibatches": [1, 4, 4, 4], "train.epochs": [1, 1, 2, 4]})
    return product(updates, grid({"correction.weight": ["none", "token_tis(cap=2.0)"]}))
