"""Transforms of the parameters around a quantised sampler.

`fold` is for the learner's own parameters, once before training. `add_noise` is for those that are
handed to the sampler, at every sync.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_tis.models.transformer import Params

# Projections that read the output of a norm.
NORM_FED = {"attn_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up")}


def fold(params: Params, scale: float) -> Params:
    """Applies the invariant scaling of QuRL (arXiv:2602.13953): the model stays the same function
    of the tokens, with the projections that read a norm divided by `scale` and the norm multiplied
    by it.

    An optimizer whose steps do not depend on the size of a gradient, such as Adam, then moves these
    projections by `scale` times more of their own size, and so of their quantisation step: an
    update reaches more of the 8-bit values. That is all: absmax scales follow the weights, so the
    8-bit values themselves, and the relative error of the products, stay what they were. A fold of
    the sampler's copy alone would therefore change nothing; this one is for the parameters that
    are trained. The paper takes 1.5 with a learning rate of 1e-6 and none with 1e-5.
    """
    layers = dict(params["layers"])
    for norm, fed in NORM_FED.items():
        layers[norm] = layers[norm] * scale
        layers |= {name: layers[name] / scale for name in fed}
    return {**params, "layers": layers}


class Noise(NamedTuple):
    """The noise of one sync: a key, and the standard deviation, a float32 scalar."""

    key: jax.Array
    sigma: jax.Array


def noise(seed: int, version: int, steps: int, start: float, end: float, stages: int) -> Noise:
    """Returns the noise of the weights of a version. It is drawn anew for each, and is the same in
    a run that continues.

    Args:
      version: updates before these weights, 0 .. steps - 1.
      steps, start, end, stages: see `noise_sigma`.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), NOISE_STREAM), version)
    return Noise(key, jnp.float32(noise_sigma(version, steps, start, end, stages)))


NOISE_STREAM = 0x61716E  # keeps these draws apart from others of the run's seed


def noise_sigma(version: int, steps: int, start: float, end: float, stages: int) -> float:
    """Computes the annealing of QeRL (arXiv:2510.11696): sigma_k = start (end / start)^((k - 1) /
    (stages - 1)).

    The run is cut into stages + 1 equal parts: in the first nothing is added to the noise of
    quantisation itself (sigma 0), then follow k = 1 .. stages.
    """
    stage = min(version * (stages + 1) // steps, stages)
    if stage == 0 or start == 0:
        return 0.0
    return start * (end / start) ** ((stage - 1) / max(stages - 1, 1))


def add_noise(params: Params, noise: Noise) -> Params:
    """Adds N(0, sigma^2) to the weights of the two norms of a layer that feed projections, one
    draw per channel (QeRL, arXiv:2510.11696). What the norm feeds sees it as noise on the rows of
    its matrices, one for q, k and v, one for gate and up. Sigma 0 changes no bit."""
    layers = dict(params["layers"])
    for index, name in enumerate(NORM_FED):
        w = layers[name]
        draw = jax.random.normal(jax.random.fold_in(noise.key, index), w.shape, jnp.float32)
        layers[name] = (w.astype(jnp.float32) + noise.sigma * draw).astype(w.dtype)
    return {**params, "layers": layers}
