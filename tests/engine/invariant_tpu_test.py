"""On TPU the sums over tensor shards stay the hand-written tree; the same checks on sums that are
not."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_tis import sharding
from jaxrl_tis.aot import hlo
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.kernels import tiles
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import tpu

pytestmark = [pytest.mark.all, pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]

TENSOR, STEPS, LAYERS, SLOTS, EMBED, MLP = 4, 3, 2, 16, 192, 512
LEVELS = TENSOR.bit_length() - 1  # of the tree that lie across devices


@functools.cache
def layout():
    return sharding.layout((1, 1, TENSOR), sharding.SERVE_RULES, tpu.devices("v5e:2x2"))


@functools.cache
def decode():
    config = ModelConfig(
        family="qwen3", vocab_size=512, embed_dim=EMBED, num_layers=LAYERS, num_heads=8,
        num_kv_heads=4, head_dim=32, mlp_dim=MLP, rope=RopeConfig("default", 10000.0),
        max_position=64, norm_eps=1e-6, qkv_bias=False, qk_norm=True, tie_embeddings=True,
    )
    engine = Engine(config, EngineConfig(
        slots=SLOTS, max_length=64, dtype="bfloat16", cache_dtype="bfloat16", steps=STEPS,
        prefill_batch=4, unroll=False, numerics="invariant",
    ), layout())
    program, args = engine.programs()["decode"]
    return moved(program.lower(*args).compile())


@functools.cache
def product(add):
    """A product like that of `down`, of a layer in a loop, whose parts `add` sums."""
    x, w = P(None, None, "tensor"), P(None, "tensor", None)
    local = lambda x, w: add(tiles.product(x, w))
    split = layout().shard(local, (P(None, "tensor"), P("tensor", None)), P())
    program = jax.jit(
        lambda x, w: jax.lax.map(lambda xw: split(*xw), (x, w)),
        compiler_options=tiles.COMPILER_OPTIONS,
    )
    array = lambda spec, *shape: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(layout().mesh, spec)
    )
    count = STEPS * LAYERS
    args = array(x, count, SLOTS, MLP), array(w, count, MLP, EMBED)
    return moved(program.lower(*args).compile())


def moved(program):
    """Collectives of rows of the model's width in the layers: (kind, dtype)."""
    found = hlo.Module(program.as_text(), assumed_trips=STEPS).collectives()
    return [
        (c.kind, s.dtype) for c in found for s in c.shapes
        if c.runs == STEPS * LAYERS and EMBED in s.dims
    ]


def tree(y):
    return tiles.butterfly(y, "tensor", TENSOR)


def psum(y):
    return jax.lax.psum(y, "tensor")


LEVEL = ("collective-permute", "f32")


def test_a_layer_adds_rows_by_the_tree_of_two_products():
    assert decode() == [LEVEL] * 2 * LEVELS


def test_a_sum_left_to_the_compiler_is_an_all_reduce():
    assert product(tree) == [LEVEL] * LEVELS
    assert product(psum) == [("all-reduce", "f32")]
