"""Serving trees of every format that travels, small."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.models import quant


def tree(seed: int = 0, scheme: str = "w8a8") -> dict:
    """Quantised, transposed and plain leaves of f32, bf16, int8, fp8; a scalar and one without
    entries."""
    keys = iter(jax.random.split(jax.random.key(seed), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    fp8 = quant.quantize_weight(normal(6, 5), "fp8_w8a8")
    return {
        "embed": normal(7, 4).astype(jnp.bfloat16),
        "layers": {
            "q": quant.quantize_weight(normal(2, 4, 6), scheme),
            "norm": normal(2, 4),
        },
        "head": quant.transposed(fp8),
        "rest": [jnp.float32(seed), jnp.zeros((0, 3), jnp.int8)],
    }


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same(found, wanted) -> None:
    """Bit by bit, and the same format."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
