"""Random weights in numpy, for which no program is compiled, stronger than `transformer.init`."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig


def drawn(config: ModelConfig, seed: int = 0, scale: float = 2.0) -> transformer.Params:
    """Norms around 1, biases around 0, matrices of `scale` times what keeps a row's size: at 2 the
    layers matter beside the embedding of the last token."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name, noise = path[-1].key, rng.normal(0, 1, x.shape)
        if "norm" in name or "bias" in name:
            return np.float32(("norm" in name) + 0.2 * noise)
        return np.float32(scale * x.shape[-1 if name == "embed" else -2] ** -0.5 * noise)

    return jax.tree_util.tree_map_with_path(leaf, transformer.abstract_params(config))


def exploding(params, stack="layers", index=1):
    """The parameters, with attention that adds more than float16 holds from this layer of a stack
    on, by weights that fit, and nothing before."""
    layers = params[stack] | {"o": jnp.clip(params[stack]["o"] * 1e9, -6e4, 6e4).at[:index].set(0.0)}
    return params | {stack: layers}
