"""Fingerprints of weights: one definition, on any number of devices, that sees every change."""

import hashlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_tis.models import quant
from jaxrl_tis.runtime import fingerprint

DTYPES = (
    "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "uint8", "uint16", "uint32", "int32",
    "bool",
)


def tree(dtype="float32", seed=0):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape)
    as_type = lambda x: (x > 0) if dtype == "bool" else (10 * x).astype(dtype)
    return {
        "embed": as_type(draw(0, 16, 8)), "norm": as_type(draw(1, 8)), "scale": draw(2),
        "layers": {"q": quant.quantize_weight(draw(3, 8, 16), "w8a8"),
                   "o": quant.Transposed(draw(4, 16, 8).astype(jnp.bfloat16))},
    }


def by_hand(tree):
    """The definition once more, number by number, in Python's integers."""
    cut = lambda x: x & 0xFFFFFFFF

    def mixed(x):
        x = cut((x ^ (x >> 16)) * 0x85EBCA6B)
        x = cut((x ^ (x >> 13)) * 0xC2B2AE35)
        return x ^ (x >> 16)

    total = [0, 0]
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, leaf = jax.tree_util.keystr(path), np.asarray(leaf)
        words = leaf.reshape(-1).view(f"u{leaf.dtype.itemsize}").tolist()
        salt = hashlib.blake2b(f"{name} {leaf.dtype} {leaf.shape}".encode(), digest_size=8).hexdigest()
        for k, step in enumerate((0x9E3779B1, 0x85EBCA77)):
            found = sum(mixed(word ^ cut(i * step)) for i, word in enumerate(words))
            total[k] += mixed(cut(found) ^ int(salt[8 * k : 8 * k + 8], 16))
    return "".join(f"{cut(x):08x}" for x in total)


def of(tree):
    return fingerprint.hex(fingerprint.digest(tree))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_is_its_definition(dtype):
    weights = tree(dtype)
    assert of(weights) == by_hand(weights)
    assert len(of(weights)) == 16


@pytest.mark.all
def test_on_eight_devices_it_is_that_on_one():
    weights = tree("bfloat16")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    specs = {(16, 8): ("a", "b"), (8,): ("b",), (): (), (8, 16): ("b", "a"), (1, 16): (None, "a")}
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*specs[x.shape])))
    cut = jax.tree.map(place, weights)
    assert len(cut["embed"].sharding.device_set) == 8
    assert of(cut) == of(jax.device_put(weights, jax.devices()[3])) == of(weights)


def test_a_copy_that_differs_on_one_device_is_refused_by_its_name():
    weights = {"w": jnp.arange(8, dtype=jnp.bfloat16)}
    sent, devices = of(weights), jax.devices()[:4]
    copies = [jax.device_put(weights["w"], device) for device in devices]
    everywhere = NamedSharding(Mesh(np.array(devices), "a"), PartitionSpec())
    joined = lambda: {"w": jax.make_array_from_single_device_arrays((8,), everywhere, copies)}
    fingerprint.check(joined(), sent)
    copies[2] = copies[2].at[5].set(5.03125)  # the next number after 5
    assert (np.asarray(copies[2], np.float32) != np.arange(8)).sum() == 1
    with pytest.raises(RuntimeError, match=f"weights on {devices[2]} have .* sent with {sent}"):
        fingerprint.check(joined(), sent)


@pytest.mark.all
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    strategies.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"]), strategies.data()
)
def test_any_flipped_bit_changes_both_numbers(dtype, data):
    weights = np.asarray(tree(dtype)["embed"])
    size = weights.dtype.itemsize
    index = data.draw(strategies.integers(0, weights.size - 1))
    flipped = weights.reshape(-1).view(f"u{size}").copy()
    flipped[index] ^= np.array(1 << data.draw(strategies.integers(0, 8 * size - 1)), f"u{size}")
    before, after = (
        np.asarray(fingerprint.digest({"w": jnp.asarray(x)}))
        for x in (weights, flipped.view(weights.dtype).reshape(weights.shape))
    )
    assert (before != after).all()


def test_two_numbers_exchanged_are_seen():
    """Also x and -x, which differ by 2^31: no odd multiplier tells their places apart."""
    numbers = np.arange(1, 9, dtype=np.float32) * np.array([1, -1] * 4, np.float32)
    numbers[5] = -numbers[2]
    seen = {of({"w": jnp.asarray(numbers)})}
    for i in range(8):
        for j in range(i):
            other = numbers.copy()
            other[[i, j]] = other[[j, i]]
            seen.add(of({"w": jnp.asarray(other)}))
    assert len(seen) == 1 + 28


def test_names_dtypes_and_shapes_are_part_of_it():
    a, b = jnp.arange(4, dtype=jnp.float32), jnp.ones(4)
    trees = [
        {"a": a, "b": b}, {"a": b, "b": a}, {"a": a, "c": b}, {"a": a}, {},
        {"a": a.reshape(2, 2), "b": b}, {"a": a.reshape(1, 4), "b": b},
        {"a": a.view(jnp.uint32), "b": b}, {"a": a.view(jnp.int32), "b": b},
        {"a": jnp.concatenate([a, jnp.zeros(1)]), "b": b},
    ]
    assert len({of(t) for t in trees}) == len(trees)
    zeros = [{"a": jnp.zeros(4, d)} for d in ("bfloat16", "float16", "uint16", "int16")]
    assert len({of(t) for t in zeros}) == 4


def test_what_it_cannot_read_is_named():
    with pytest.raises(ValueError, match=r"\['w'\] is complex64"):
        fingerprint.digest({"w": jnp.ones(2, jnp.complex64)})
