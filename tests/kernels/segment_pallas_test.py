"""The TPU kernels: against float64 loops in interpret mode, and compiled for chips that are not
there."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_tis.kernels import segment, segment_pallas
from tests import tpu
from tests.kernels import segment_loops as loops

SHAPE, NUM_SEGMENTS = (11, 300), 140  # two blocks of rows, tiles of 128 below, two groups of lanes
close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)


@pytest.fixture
def interpreted(monkeypatch):
    """Tiles of 128 tokens; the public functions choose the kernels, which run in TPU interpret
    mode: reads out of bounds raise, what was not written is NaN, races are looked for."""
    for name in ("REDUCE_TILE", "SCAN_TILE", "CHUNK"):
        monkeypatch.setattr(segment_pallas, name, 128)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, **_: tpu(*x))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield


def make(seed, **options):
    return loops.make(seed, SHAPE, NUM_SEGMENTS, **options)


def value_and_gradient(function, x, weight):
    value, pull = jax.vjp(function, jnp.asarray(x, jnp.float32))
    return jax.device_get((value, pull(jnp.asarray(weight, jnp.float32))[0]))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "logsumexp", "count"])
def test_reductions(interpreted, op):
    batch = make(7)
    reduce = lambda x: segment.segment_reduce(x, batch.seg, NUM_SEGMENTS, op)
    got, gradient = value_and_gradient(reduce, batch.x, batch.weight_bs)
    want, want_gradient = loops.reduce(batch.x, batch.seg, NUM_SEGMENTS, op, batch.weight_bs)
    close(got, want)
    close(gradient, want_gradient)
