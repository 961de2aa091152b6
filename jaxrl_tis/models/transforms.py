"""Parameter transforms for quantized samplers: QuRL's scaling and QeRL's noise.

`fold` changes the learner's parameters once before training. `add_noise` changes the sampler's
parameters at every weight sync.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_tis.models.config import STACKS, by_stack
from jaxrl_tis.models.transformer import Params

# Projections that read the output of a norm.
NORM_FED = {
    "attn_norm": ("q", "k", "v"),
    "mlp_norm": ("gate", "up", "router", "expert_gate", "expert_up"),
}


def fold(params: Params, scale: float) -> Params:
    """Returns parameters with QuRL's invariant scaling (arXiv:2602.13953).

    Projections that read a norm are divided by `scale`, and the norm is multiplied by it. The model
    stays the same function of the tokens. The steps of Adam do not depend on the size of a
    gradient. They therefore move these projections by `scale` times more, relative to their size
    and their quantization step, and an update changes more of the 8-bit values. Absmax scales
    follow the weights: the 8-bit values and the relative error of the products do not change. A
    fold of the sampler's copy alone would have no effect. The paper uses 1.5 with a learning rate
    of 1e-6, and no fold with 1e-5.
    """
    def folded(layers, _):
        norms = {norm: layers[norm] * scale for norm in NORM_FED}
        fed = [name for names in NORM_FED.values() for name in names if name in layers]
        return layers | norms | {name: layers[name] / scale for name in fed}

    return by_stack(folded, params)


class Noise(NamedTuple):
    """The noise of one sync: a key, and the standard deviation, a float32 scalar."""

    key: jax.Array
    sigma: jax.Array


def noise(seed: int, version: int, steps: int, start: float, end: float, stages: int) -> Noise:
    """Returns the noise of a weight version: new for each version, and the same after a restart.

    Args:
      version: updates before these weights, 0 .. steps - 1.
      steps, start, end, stages: see `noise_sigma`.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), NOISE_STREAM), version)
    return Noise(key, jnp.float32(noise_sigma(version, steps, start, end, stages)))


NOISE_STREAM = 0x61716E  # keeps these draws apart from others of the run's seed


def noise_sigma(version: int, steps: int, start: float, end: float, stages: int) -> float:
    """Returns QeRL's annealed sigma (arXiv:2510.11696): start (end / start)^((k - 1) / (stages -
    1)).

    The run has stages + 1 equal parts. The first part adds no noise (sigma 0). Parts k = 1 ..
    stages follow.
    """
    stage = min(version * (stages + 1) // steps, stages)
    if stage == 0 or start == 0:
        return 0.0
    return start * (end / start) ** ((stage - 1) / max(stages - 1, 1))


def add_noise(params: Params, noise: Noise) -> Params:
    """Returns parameters with N(0, sigma^2) added to both norms of a layer (QeRL,
    arXiv:2510.11696).

    Each channel gets one sample. It acts as noise on the rows of the projections after the norm: q,
    k and v share one noise, the projections of the MLP and its router another. Sigma 0 changes no bit."""
    def noisy(layers, stack):
        for index, name in enumerate(NORM_FED, STACKS.index(stack) * len(NORM_FED)):
            w = layers[name]
            draw = jax.random.normal(jax.random.fold_in(noise.key, index), w.shape, jnp.float32)
            layers = layers | {name: (w.astype(jnp.float32) + noise.sigma * draw).astype(w.dtype)}
        return layers

    return by_stack(noisy, params)
