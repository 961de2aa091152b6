"""A 64-bit fingerprint of a pytree of weights, computed on the devices that hold the weights.

The arithmetic is integer addition modulo 2^32, which does not depend on order. A tree therefore has
the same fingerprint for every sharding and number of processes.
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

    A bijection mixes the bits of each number with its position, so changing any bits of one number
    always changes both sums. Other changes (exchanged numbers or arrays, another dtype or shape)
    stay undetected with probability 2^-64. Positions count modulo 2^32. Static parts of a tree,
    such as a quantization scheme, are not included; their arrays are.

    Raises:
      ValueError: a dtype does not have 8, 16 or 32 bits.
    """
    total = jnp.zeros(2, jnp.uint32)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        total += _mixed(_sums(name, x) ^ _salt(f"{name} {x.dtype} {x.shape}"))
    return total


def hex(digest: jax.Array) -> str:
    """Returns a fingerprint as 16 hexadecimal characters, the first number first."""
    return np.asarray(digest).astype(">u4").tobytes().hex()


def check(tree: Any, sent: str) -> None:
    """Checks each device's copy of a tree against the sender's fingerprint (see `hex`).

    Raises:
      RuntimeError: a copy differs; the message names the device and both fingerprints.
    """
    for shard in digest(tree).addressable_shards:
        if (found := hex(shard.data)) != sent:
            raise RuntimeError(
                f"the weights on {shard.device} have the fingerprint {found} and were sent with "
                f"{sent}: the weight sync damaged them, and the run stops. Start it again, without "
                "this device if that repeats"
            )


def _sums(name: str, x: jax.Array) -> jax.Array:
    """Returns the two sums of the mixed numbers of one array, uint32 [2]."""
    words, position = _words(name, x), jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
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
    """Returns two uint32 hashed from a text."""
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), ">u4").astype("u4")
