"""Weights cut in their width: the numbers and gradients of one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.aot.hlo import Module
from jaxrl_tis.models import fsdp, quant
from tests import tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("collectives sum the gradients")]

B, T, D, F, V = 8, 4, 16, 24, 12
MESHES = [(1, 8, 1), (8, 1, 1), (2, 2, 2), (1, 2, 2, 2)]
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def pulled(f, cotangent, *arrays):
    """(value, gradients) of f at arrays."""
    value, pull = jax.vjp(f, *arrays)
    return value, pull(cotangent)


def weight_kinds():
    return {"float": lambda w: w, "w8a8": lambda w: quant.Master(w, "w8a8")}


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("is_split_in", [False, True])
@pytest.mark.parametrize("kind", weight_kinds())
def test_a_product_and_its_gradients(shape, is_split_in, kind):
    layout = sharding.layout(shape, sharding.TRAIN_RULES)
    sizes = (F, D) if is_split_in else (D, F)
    x, w, y_bar = drawn((B, T, sizes[0]), sizes, (B, T, sizes[1]))
    place = weight_kinds()[kind]
    cut = lambda x, w: fsdp.dot(x, place(w), layout, is_split_in)
    whole = lambda x, w: quant.dot(x, place(w))
    axes = ("mlp", "embed") if is_split_in else ("embed", "mlp")
    stored = jax.device_put(w, layout.sharding(axes))
    value, (x_bar, w_bar) = jax.jit(functools.partial(pulled, cut))(y_bar, x, stored)
    expected, gradients = pulled(whole, y_bar, x, w)
    close(value, expected)
    close(x_bar, gradients[0])
    close(w_bar, gradients[1])
    assert w_bar.sharding.is_equivalent_to(stored.sharding, 2)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("v", [V, V + 1])
def test_rows_of_a_table_and_its_gradient(shape, v):
    """Tokens that come twice, and a vocabulary that the tensor shards do not divide."""
    layout = sharding.layout(shape, sharding.TRAIN_RULES, vocab_size=v)
    table, x_bar = drawn((v, D), (B, T, D))
    tokens = np.random.default_rng(1).integers(0, v, (B, T)).astype(np.int32)
    stored = jax.device_put(table, layout.sharding(("vocab", "embed")))
    cut = lambda table: fsdp.take(table, tokens, layout, "float32")
    value, (table_bar,) = jax.jit(functools.partial(pulled, cut))(x_bar, stored)
    expected = np.zeros((v, D), np.float32)
    np.add.at(expected, tokens, x_bar)
    np.testing.assert_array_equal(value, table[tokens])
    close(table_bar, expected)
    assert table_bar.sharding.is_equivalent_to(stored.sharding, 2)


@pytest.mark.all
def test_gradients_are_summed_in_the_dtype_of_the_layout():
    """1 + 2^-9 is no bfloat16 number; the sum of eight devices' ones is one in either dtype."""
    x = np.ones((B, 1, D), np.float32)
    y_bar = np.full((B, 1, F), 1 + 2**-9, np.float32)
    y_bar[1:] = 1.0
    sums = {"float32": 8 + 2**-9, "bfloat16": 8}
    for shape, (dtype, expected) in itertools.product(((1, 8, 1), (8, 1, 1)), sums.items()):
        layout = sharding.layout(shape, sharding.TRAIN_RULES, grad_reduce_dtype=dtype)
        dot = lambda x, w, layout=layout: fsdp.dot(x, w, layout, False)
        product = functools.partial(pulled, dot)
        w_bar = jax.jit(product)(y_bar, x, jnp.ones((D, F)))[1][1]
        assert w_bar.dtype == jnp.float32
        np.testing.assert_array_equal(w_bar, np.full((D, F), expected, np.float32))


def test_many_devices_exchange_in_stages(monkeypatch):
    """As sixteen do four by four, eight do two by two here."""
    monkeypatch.setattr(sharding, "STAGE", 2)
    sharding.stages.cache_clear()
    test_a_product_and_its_gradients((1, 8, 1), False, "float")
    sharding.stages.cache_clear()
    monkeypatch.setattr(sharding, "STAGE", 8)
    sizes = lambda n: [len(groups[0]) for groups in sharding.stages(n)]
    assert sharding.stages(8) == [None]
    assert (sizes(16), sizes(32), sizes(64), sizes(12)) == ([4, 4], [8, 4], [8, 8], [4, 3])
    assert sharding.stages(16)[0][1] == [1, 5, 9, 13] and sharding.stages(16)[1][1] == [4, 5, 6, 7]


@pytest.mark.all
@pytest.mark.cases("False-v5p:4x4x4-sizes1", "True-v5e:2x4-sizes2")
@pytest.mark.parametrize("chips, sizes", [
    ("v5e:4x4", (4096, 12_288)), ("v5p:4x4x4", (5120, 27_648)), ("v5e:2x4", (896, 4864)),
])
@pytest.mark.parametrize("is_split_in", [False, True])
def test_a_tpu_gathers_weights_and_scatters_their_gradients(chips, sizes, is_split_in):
    """Of the shipped configs' MLPs: a device makes no sum whole."""
    devices = tpu.devices(chips)
    layout = sharding.layout((1, len(devices), 1), sharding.TRAIN_RULES, devices)
    sizes, axes = (sizes, ("embed", "mlp"))
    if is_split_in:
        sizes, axes = sizes[::-1], axes[::-1]
    like = lambda dtype, shape, *axes: jax.ShapeDtypeStruct(
        shape, dtype, sharding=layout.sharding(axes)
    )
    rows = lambda width: like("bfloat16", (len(devices), 128, width), "batch", "length", None)
    product = functools.partial(pulled, lambda x, w: fsdp.dot(x, w, layout, is_split_in))
    text = jax.jit(product).lower(
        rows(sizes[1]), rows(sizes[0]), like("float32", sizes, *axes)
    ).compile().as_text()
    found = Module(text).collectives(dict(layout.mesh.shape))
    moved = {kind: sum(c.bytes * c.runs for c in found if c.kind == kind) for kind in (
        "all-reduce", "reduce-scatter", "all-gather",
    )}
    count = sizes[0] * sizes[1]
    assert moved["all-reduce"] == 0
    assert moved["reduce-scatter"] >= 4 * count and moved["all-gather"] >= 2 * count
    assert {c.axes for c in found if c.bytes > 2**20} == {("fsdp",)}


def test_rows_of_one_device_are_not_cut():
    assert not fsdp.is_cut(None)
    assert not fsdp.is_cut(sharding.layout((1, 1, 8), sharding.TRAIN_RULES))
    assert not fsdp.is_cut(sharding.layout((1, 4, 2), sharding.SERVE_RULES))
    for shape in ((1, 4, 2), (8, 1, 1), (1, 1, 2, 4)):
        assert fsdp.is_cut(sharding.layout(shape, sharding.TRAIN_RULES))
