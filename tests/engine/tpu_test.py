"""What the engine's programs are on TPU, read from the HLO that its compiler makes; each check is
also shown a program that fails it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_tis import hlo, sharding
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import tpu

MESH = (4, 1, 2)
STEPS, SLOTS, ROWS, LENGTH = 3, 64, 16, 8192
EMBED, VOCAB, MLP = 256, 2000, 768
PREFILLED = 4  # prompts of a prefix
KV_LAYER = (ROWS, 1, LENGTH, 128)  # of one device: a slot's keys and values of one head


@pytest.fixture(scope="module", autouse=True)
def _without_a_cache_of_programs():
    """No device is there to load them on."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@functools.cache
def layout():
    return sharding.layout(MESH, sharding.SERVE_RULES, tpu.devices("v5e:2x4"))


@functools.cache
def compiled(name, quantization="w8a8", layers=2):
    config = ModelConfig(
        family="qwen2", vocab_size=VOCAB, embed_dim=EMBED, num_layers=layers, num_heads=6,
        num_kv_heads=2, head_dim=64, mlp_dim=MLP, rope=RopeConfig("default", 10000.0),
        max_position=LENGTH, norm_eps=1e-6, qkv_bias=True, qk_norm=False, tie_embeddings=True,
    )
    engine = Engine(
        config, slots=SLOTS, max_length=LENGTH, dtype="bfloat16", cache_dtype="bfloat16",
        quantization=quantization, steps=STEPS, prefill_batch=PREFILLED, unroll=False,
        layout=layout(), highest_head=True,
    )
    program, args = engine.programs()[name]
    return program.lower(*args).compile()


def module(program):
    return hlo.Module(program.as_text(), assumed_trips=STEPS)


def collectives(program):
    return module(program).collectives(dict(layout().mesh.shape))


def array(shape, dtype, *axes):
    s = jax.sharding.NamedSharding(layout().mesh, P(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=s)


def violation(f, *args, **options):
    return jax.jit(f, **options).lower(*args).compile()


def in_layers(program, layers=2):
    """Collectives of the layer scan's body, as (kind, dtype, dims)."""
    found = [c for c in collectives(program) if c.runs == STEPS * layers]
    return sorted((c.kind, s.dtype, s.dims) for c in found for s in c.shapes)


def large_outside_layers(program, layers=2):
    """Collectives elsewhere of rows of the model's width, or of more than 64 x 8 bytes per row."""
    found = [c for c in collectives(program) if c.runs != STEPS * layers]
    return sorted(
        (c.kind, s.dtype, s.dims) for c in found for s in c.shapes
        if s.bytes > ROWS * 64 * 8 or EMBED in s.dims
    )


def whole_copies(program, layers=2):
    """Arrays outside fusions, other than updates in place, of a KV layer's or the cache's shape, or
    of a weight's in a float type."""
    kv = [KV_LAYER, (1, *KV_LAYER), (layers, *KV_LAYER)]
    weight = [(EMBED, MLP // 2), (MLP // 2, EMBED), (EMBED, 192), (192, EMBED)]
    weight += [(n, *dims) for dims in weight for n in (1, layers)]
    return [
        b for b in module(program).buffers() if not b.in_place
        and (b.shape.dims in kv or b.shape.dims in weight and b.shape.dtype in ("bf16", "f32"))
    ]


REDUCED_ROWS = {
    "none": [("all-reduce", "bf16", (ROWS, EMBED))] * 2,
    "w8a16": [("all-reduce", "bf16", (ROWS, EMBED))] * 2,
    "w8a8": [("all-reduce", "f32", (ROWS,))] * 2 + [("all-reduce", "s32", (ROWS, EMBED))] * 2,
}
SCHEMES = ["w8a8", "w8a16"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_of_decode_reduces_rows_twice_and_nothing_else(scheme):
    drop_ones = lambda found: [(k, t, tuple(n for n in d if n > 1)) for k, t, d in found]
    found = drop_ones(in_layers(compiled("decode", scheme)))
    assert [(k, d) for k, _, d in found] == [(k, d) for k, _, d in REDUCED_ROWS[scheme]], found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outside_the_layers_only_the_embedding_moves_rows(scheme):
    ((kind, _, dims),) = large_outside_layers(compiled("decode", scheme))
    assert (kind, tuple(n for n in dims if n > 1)) == ("all-reduce", (ROWS, EMBED))


def test_sorting_a_split_vocabulary_moves_it():
    logits = array((SLOTS, VOCAB), jnp.float32, "data", "tensor")
    assert large_outside_layers(violation(lambda x: jnp.sort(x, axis=-1), logits))


def test_a_weight_split_along_its_input_is_reduced_once_more():
    x = array((STEPS * 2, SLOTS, EMBED), jnp.bfloat16, None, "data")
    w = array((EMBED, EMBED), jnp.bfloat16, "tensor")
    program = violation(lambda x, w: jax.lax.map(lambda row: row @ w, x), x, w)
    assert in_layers(program) == [("all-reduce", "bf16", (1, ROWS, EMBED))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_holds_no_copy_of_a_weight_or_of_keys_and_values(scheme):
    assert not whole_copies(compiled("decode", scheme))


def test_a_cache_that_is_scanned_over_is_copied():
    cache = array((2, SLOTS, 2, LENGTH, 128), jnp.bfloat16, None, "data", "tensor")
    row = array((SLOTS, 2, 128), jnp.bfloat16, "data", "tensor")
    layer = lambda row, kv: (row, kv.at[:, :, 5].set(row))
    program = violation(lambda kv, row: jax.lax.scan(layer, row, kv)[1], cache, row)
    assert whole_copies(program)


def test_a_weight_that_is_dequantised_first_is_copied():
    w = array((EMBED, MLP), jnp.int8, None, "tensor")
    x = array((SLOTS, EMBED), jnp.bfloat16, "data")
    copy = lambda w: jax.lax.optimization_barrier(w.astype(jnp.bfloat16))
    assert whole_copies(violation(lambda x, w: x @ copy(w), x, w))
    assert not whole_copies(violation(lambda x, w: x @ w.astype(jnp.bfloat16), x, w))


def cache_bytes(layers):
    return layers * ROWS * LENGTH * 128 * 2


def test_the_cache_is_written_in_place_by_decode_and_insert():
    for name in ("decode", "insert"):
        program = compiled(name)
        aliased = sum(alias.shape.bytes for alias in module(program).aliases())
        # The rest are the slots' own numbers.
        assert 0 <= aliased - cache_bytes(2) < 8192
        # Insert brings the prefix to every replica.
        prefix = cache_bytes(2) * PREFILLED / ROWS if name == "insert" else 0
        temp = program.memory_analysis().temp_size_in_bytes
        assert temp < prefix + 0.05 * cache_bytes(2)
    x = array((2, SLOTS, 2, LENGTH, 128), jnp.bfloat16, None, "data", "tensor")
    for options, count in ((dict(donate_argnums=0), 1), ({}, 0)):
        program = violation(lambda x: x.at[0, 0, 0, 0].set(0), x, **options)
        assert len(module(program).aliases()) == count


def test_temporaries_of_decode_are_small_and_do_not_grow_with_depth():
    temp = lambda layers: compiled("decode", "w8a8", layers).memory_analysis().temp_size_in_bytes
    assert temp(2) < 0.05 * compiled("decode").memory_analysis().argument_size_in_bytes
    assert temp(6) <= temp(2) + 2**16
    deep = lambda n: array((n, EMBED, MLP), jnp.int8, None, None, "tensor")
    total = lambda w: jnp.sum(jax.lax.optimization_barrier(w.astype(jnp.float32)))
    used = lambda w: violation(total, w).memory_analysis().temp_size_in_bytes
    # Small arrays stay on the chip, so the violation is 512 layers deep.
    assert used(deep(512)) > used(deep(2)) + 2**16


@pytest.mark.parametrize("scheme, operands, result", [
    ("w8a8", {"s8"}, "s32"), ("w8a16", {"s8", "bf16"}, "f32"),
])
def test_projections_read_int8_weights(scheme, operands, result):
    dots = [d for d in module(compiled("decode", scheme)).dots() if d.runs == STEPS * 2]
    weights = [d for d in dots if any(s.dims[-2:] == (EMBED, MLP // 2) for s in d.sources)]
    assert weights
    for dot in weights:
        assert {s.dtype for s in dot.sources} == operands and dot.result.dtype == result


def test_the_head_is_float32_with_highest_precision():
    (head,) = [d for d in module(compiled("decode")).dots() if VOCAB // 2 in d.result.dims]
    assert head.precision == "highest" and head.result.dtype == "f32"


def test_attention_is_the_decode_kernel():
    (call,) = [c for c in module(compiled("decode")).custom_calls() if c.target == hlo.MOSAIC]
    assert call.runs == STEPS * 2
