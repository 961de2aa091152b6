"""The gate with a sampler whose weights are off by a known noise, which it has to find.

    python -m tests.gate.noisy NOISE --config=... [other flags of jaxrl_tis.gate]
"""

import functools
import sys
from typing import Any
from unittest import mock

import jax

from jaxrl_tis import cli_flags
from jaxrl_tis.gate import report

_sample = report.sample


def perturbed(params: Any, noise: float) -> Any:
    """Every weight times 1 + noise * N(0, 1)."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    factor = lambda x, key: 1 + noise * jax.random.normal(key, x.shape, x.dtype)
    return tree.unflatten([x * factor(x, key) for x, key in zip(leaves, keys, strict=True)])


def sample(noise: float, setup, params, prompts: int, **_):
    return _sample(setup, perturbed(params, noise), prompts)


if __name__ == "__main__":
    from jaxrl_tis.gate import __main__

    noise = float(sys.argv.pop(1))
    with mock.patch.object(report, "sample", functools.partial(sample, noise)):
        cli_flags.run(__main__.main, required=["config"])
