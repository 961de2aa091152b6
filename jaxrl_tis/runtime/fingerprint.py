"""What tells two sets of weights apart: 64 bits, computed where the weights lie.

All arithmetic is that of integers modulo 2^32, whose sums do not depend on their order: a tree has
the same fingerprint on one device and cut over many, on one process and on several.
"""

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Two odd numbers for two hashes: consecutive positions are far apart in each.
STEPS = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)


@jax.jit
def digest(tree: Any) -> jax.Array:
    """Computes the fingerprint of the arrays of a tree, uint32 [2], exactly.

    Each number's bits are mixed with its position by a bijection, so one that differs in any bit
    changes both sums; other changes, such as two numbers or two arrays that are exchanged, another
    dtype or another shape, go unseen once in 2^64. Positions count modulo 2^32. What is static in a
    tree, such as a scheme of quantisation, is not part of it; the arrays that it decides on are.

    ValueError for a dtype of other than 8, 16 or 32 bits.
    """
    total = jnp.zeros(2, jnp.uint32)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        total += _mixed(_sums(name, x) ^ _salt(f"{name} {x.dtype} {x.shape}"))
    return total


def hex(digest: jax.Array) -> str:
    """Spells a fingerprint as 16 hexadecimal characters, the first number first."""
    return np.asarray(digest).astype(">u4").tobytes().hex()


def check(tree: Any, sent: str) -> None:
    """Compares each device's copy of a tree with the fingerprint that it was sent with, see `hex`.

    Raises:
      RuntimeError: one differs; it names the device and both fingerprints.
    """
    for shard in digest(tree).addressable_shards:
        if (found := hex(shard.data)) != sent:
            raise RuntimeError(
                f"the weights on {shard.device} have the fingerprint {found} and were sent with "
                f"{sent}: the weight sync damaged them, and the run stops. Start it again, without "
                "this device if that repeats"
            )


def _sums(name: str, x: jax.Array) -> jax.Array:
    """Adds up the mixed numbers of one array, uint32 [2]."""
    words, position = _words(name, x), jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    return jnp.stack([jnp.sum(_mixed(words ^ (position * step)), dtype=jnp.uint32) for step in STEPS])


def _words(name: str, x: jax.Array) -> jax.Array:
    """Returns the bits of every number as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = x.dtype.itemsize * 8
    if not jnp.issubdtype(x.dtype, jnp.number) or bits not in (8, 16, 32):
        raise ValueError(f"{name} is {x.dtype}; a fingerprint takes numbers of 8, 16 or 32 bits")
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _mixed(word: jax.Array) -> jax.Array:
    """Maps uint32 one to one onto uint32 such that every bit depends on every other (the last steps
    of MurmurHash3)."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _salt(text: str) -> np.ndarray:
    """Returns two uint32 made of a text."""
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), ">u4").astype("u4")
