"""What the engine's programs are on TPU, read from the HLO that its compiler makes; each check is
also shown a program that fails it."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_tis import sharding
from jaxrl_tis.aot import hlo
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.kernels import decode_attention
from jaxrl_tis.models import quant, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]

MESH = (4, 1, 2)
SHAPE = pathlib.Path(__file__).parents[2] / "configs" / "shapes" / "Qwen2.5-0.5B-Instruct.json"
STEPS, SLOTS, ROWS, LENGTH, PAGE = 3, 512, 128, 4096, 128
EMBED, VOCAB, MLP = 256, 2000, 768
PREFILLED, CHUNK = 16, 512  # rows of a prefill, tokens of each
PAGES = ROWS * LENGTH // PAGE + 2
# Of one device: the pages of one head, and the scales of int8 ones. 128 MiB of bfloat16, all the
# memory on a v5e's chip: a copy of it must be a temporary in HBM.
KV_LAYER, SCALES_LAYER = (PAGES, 1, PAGE, 128), (PAGES, 1, 2, PAGE)


@functools.cache
def layout():
    return sharding.layout(MESH, sharding.SERVE_RULES, tpu.devices("v5e:2x4"))


def compiled(name, quantization="w8a8", layers=2, kv="bfloat16", dtype="bfloat16"):
    return _compiled(name, quantization, layers, kv, dtype)


@functools.cache
def _compiled(name, quantization, layers, kv, dtype):
    config = ModelConfig(
        family="qwen2", vocab_size=VOCAB, embed_dim=EMBED, num_layers=layers, num_heads=6,
        num_kv_heads=2, head_dim=64, mlp_dim=MLP, rope=RopeConfig("default", 10000.0),
        max_position=LENGTH, norm_eps=1e-6, qkv_bias=True, qk_norm=False, tie_embeddings=True,
    )
    engine = Engine(config, EngineConfig(
        slots=SLOTS, max_length=LENGTH, page_size=PAGE, dtype=dtype, cache_dtype=kv,
        quantization=quantization, steps=STEPS, prefill_batch=PREFILLED, prefill_chunk=CHUNK,
        unroll=False, joins_qkv=True, fp32_head=True, max_draft=1,
    ), layout())
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


def cache_array(dtype=jnp.bfloat16):
    return array((2, 4 * PAGES, 2, PAGE, 128), dtype, None, "data", "tensor")


def drop_ones(dims):
    return tuple(n for n in dims if n > 1)


def in_layers(program, layers=2):
    """Collectives of the layer scan's body, as (kind, operation, dims)."""
    found = [c for c in collectives(program) if c.runs == STEPS * layers]
    return sorted(
        (c.kind, operation(program, c), drop_ones(s.dims)) for c in found for s in c.shapes
    )


def operation(program, collective):
    """What a reduction does: "add", "maximum"; "" for a collective that computes nothing."""
    computations = module(program).computations
    names = computations[collective.computation][collective.name].names("to_apply")
    return "".join(x.opcode for n in names for x in computations[n].values() if x.is_root)


def large_outside_layers(program, layers=2):
    """Collectives elsewhere of rows of the model's width, or of more than 64 x 8 bytes per row."""
    found = [c for c in collectives(program) if c.runs != STEPS * layers]
    return sorted(
        (c.kind, drop_ones(s.dims)) for c in found for s in c.shapes
        if s.bytes > ROWS * 64 * 8 or EMBED in s.dims
    )


def whole_copies(program, layers=2):
    """Arrays outside fusions, other than updates in place, of a KV layer's or the cache's shape, or
    of a weight's in a float type."""
    weights = [(EMBED, MLP // 2), (MLP // 2, EMBED), (EMBED, 320), (192, EMBED)]
    stacks = lambda shapes: {drop_ones((n, *dims)) for dims in shapes for n in (1, layers)}
    kv, weight = stacks([KV_LAYER, SCALES_LAYER]), stacks(weights)
    is_copy = lambda dims, dtype: dims in kv or dims in weight and dtype in ("bf16", "f32")
    return [
        b for b in module(program).buffers()
        if not b.in_place and is_copy(drop_ones(b.shape.dims), b.shape.dtype)
    ]


ADDED = ("all-reduce", "add", (ROWS, EMBED))
LARGEST = ("all-reduce", "maximum", (ROWS,))
REDUCED = {"w8a16": [ADDED] * 2, "w8a8": [ADDED] * 2 + [LARGEST] * 2}
IN_ALL = functools.partial(pytest.param, marks=pytest.mark.all)
# By default one program is compiled.
DECODED = pytest.mark.parametrize("scheme, kv", [
    ("w8a8", "bfloat16"), IN_ALL("w8a16", "bfloat16"), IN_ALL("w8a8", "int8"),
])
WRITTEN = pytest.mark.parametrize("kv", ["bfloat16", IN_ALL("int8")])


@pytest.mark.all
@DECODED
def test_a_layer_of_decode_reduces_rows_twice_and_nothing_else(scheme, kv):
    """W8A8 also needs the largest activation of each row."""
    assert in_layers(compiled("decode", scheme, kv=kv)) == REDUCED[scheme]


@DECODED
def test_outside_the_layers_only_the_embedding_moves_rows(scheme, kv):
    moved = large_outside_layers(compiled("decode", scheme, kv=kv))
    assert moved == [("all-reduce", (ROWS, EMBED))]


def repeated(f, *arrays):
    """A program that maps `f` over the leading axis of arrays, as often as decode runs a layer."""
    return violation(lambda *xs: jax.lax.map(lambda x: f(*x), xs), *arrays)


def test_a_weight_split_along_its_input_is_reduced_once_more():
    x = array((STEPS * 2, SLOTS, EMBED), jnp.bfloat16, None, "data")
    w = array((STEPS * 2, EMBED, EMBED), jnp.bfloat16, None, "tensor")
    assert in_layers(repeated(lambda x, w: x @ w, x, w)) == [ADDED]


@pytest.mark.parametrize("name", ["weights", "keys and values", "logits"])
def test_what_is_gathered_shows_inside_and_outside_the_layers(name):
    shape, dtype, axes = {
        "weights": ((EMBED, MLP), jnp.int8, (None, "tensor")),
        "keys and values": ((SLOTS, 2, 64, 128), jnp.bfloat16, ("data",)),
        "logits": ((SLOTS, VOCAB), jnp.float32, (None, "tensor")),
    }[name]
    whole = lambda x: jax.lax.with_sharding_constraint(x * 2, layout().replicated())
    once = violation(whole, array(shape, dtype, *axes))
    assert ("all-gather", shape) in large_outside_layers(once)
    in_a_layer = repeated(whole, array((STEPS * 2, *shape), dtype, None, *axes))
    assert ("all-gather", "", shape) in in_layers(in_a_layer)


@pytest.mark.all
def test_sorting_a_split_vocabulary_moves_it():
    logits = array((80, VOCAB), jnp.float32, "data", "tensor")
    assert large_outside_layers(violation(lambda x: jnp.sort(x, axis=-1), logits))


@DECODED
def test_decode_holds_no_copy_of_a_weight_or_of_keys_and_values(scheme, kv):
    assert not whole_copies(compiled("decode", scheme, kv=kv))


@pytest.mark.all
@WRITTEN
def test_no_other_program_holds_one(kv):
    for name in ("prefill", "insert"):
        assert not whole_copies(compiled(name, kv=kv))


@pytest.mark.all
@WRITTEN
def test_nor_does_the_verification_of_a_draft(kv):
    """In 64 layers: the scales of two fit into the fast memory, to which they would be moved."""
    assert not whole_copies(compiled("verify", layers=64, kv=kv), layers=64)


@WRITTEN
def test_a_cache_that_is_scanned_over_is_copied(kv):
    dtype = jnp.dtype(kv)
    row = array((4 * PAGES, 2, 128), dtype, "data", "tensor")
    layer = lambda row, kv: (row, kv.at[:, :, 5].set(row))
    program = violation(lambda kv, row: jax.lax.scan(layer, row, kv)[1], cache_array(dtype), row)
    copied = {drop_ones(b.shape.dims) for b in whole_copies(program)}
    assert copied == {drop_ones(KV_LAYER), (2, *drop_ones(KV_LAYER))}


def test_a_weight_that_is_dequantised_first_is_copied():
    w = array((EMBED, MLP), jnp.int8, None, "tensor")
    x = array((SLOTS, EMBED), jnp.bfloat16, "data")
    copy = lambda w: jax.lax.optimization_barrier(w.astype(jnp.bfloat16))
    assert whole_copies(violation(lambda x, w: x @ copy(w), x, w))
    assert not whole_copies(violation(lambda x, w: x @ w.astype(jnp.bfloat16), x, w))


def cache_bytes(layers, kv):
    """Of one device: a key and a value of 64 numbers for each position, float32 scales of both."""
    return layers * PAGES * PAGE * {"bfloat16": 128 * 2, "int8": 128 + 2 * 4}[kv]


@WRITTEN
@pytest.mark.parametrize("name", [
    "decode", *(IN_ALL(name) for name in ("prefill", "insert", "verify")),
])
def test_the_cache_is_written_in_place(name, kv):
    program = compiled(name, kv=kv)
    aliased = sum(alias.shape.bytes for alias in module(program).aliases())
    # The rest are the slots' own numbers.
    assert 0 <= aliased - cache_bytes(2, kv) < 512 * ROWS
    assert temporaries_are_small(program)


def test_a_cache_that_is_not_donated_is_not_aliased():
    for options, count in ((dict(donate_argnums=0), 1), ({}, 0)):
        program = violation(lambda x: x.at[0, 0, 0, 0].set(0), cache_array(), **options)
        assert len(module(program).aliases()) == count


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


def temporaries_are_small(program):
    return temporaries(program) < 0.05 * program.memory_analysis().argument_size_in_bytes


@functools.cache
def attention_by_gathers():
    """Of a layer, where every slot's pages are first put side by side."""

    def attend(q_bngk, kv_lpnsc, table_bp):
        kv_bpnsc = kv_lpnsc[1, table_bp]
        scores = jnp.einsum("bngk,bpnsk->bngps", q_bngk, kv_bpnsc[..., :64])
        p = jax.nn.softmax(scores, axis=(-2, -1))
        return jnp.einsum("bngps,bpnsk->bngk", p, kv_bpnsc[..., 64:])

    q = array((SLOTS, 2, 3, 64), jnp.bfloat16, "data", "tensor")
    table = array((SLOTS, LENGTH // PAGE), jnp.int32, "data")
    args = q, cache_array(), table
    specs = tuple(x.sharding.spec for x in args)
    return violation(layout().shard(attend, specs, specs[0]), *args)


def test_gathered_pages_are_no_small_temporaries():
    assert not temporaries_are_small(attention_by_gathers())


@pytest.mark.all
def test_temporaries_of_decode_do_not_grow_with_depth():
    assert temporaries(compiled("decode", layers=6)) <= temporaries(compiled("decode")) + 2**16
    deep = lambda n: array((n, EMBED, MLP), jnp.int8, None, None, "tensor")
    total = lambda w: jnp.sum(jax.lax.optimization_barrier(w.astype(jnp.float32)))
    used = lambda w: temporaries(violation(total, w))
    # Small arrays stay on the chip, so the violation is 512 layers deep.
    assert used(deep(512)) > used(deep(2)) + 2**16


PRODUCTS = {
    "none": (["bf16", "bf16"], "f32"), "w8a16": (["bf16", "s8"], "f32"),
    "w8a8": (["s8", "s8"], "s32"),
}


def products(program):
    """(dtypes of the arrays in memory, dtype of the result) of the layers' products with a weight
    [EMBED, MLP]."""
    dots = [d for d in module(program).dots() if d.runs == STEPS * 2]
    return [
        (sorted(s.dtype for s in d.sources), d.result.dtype) for d in dots
        if any(s.dims[-2:] == (EMBED, MLP // 2) for s in d.sources)
    ]


@DECODED
def test_projections_read_int8_weights(scheme, kv):
    gate, up = products(compiled("decode", scheme, kv=kv))
    assert gate == up == PRODUCTS[scheme]


@functools.cache
def projected(scheme, prepared=lambda w: w):
    """Products with a weight of a scheme, `prepared` first."""
    weights = lambda dtype: array((STEPS * 2, EMBED, MLP), dtype, None, None, "tensor")
    scale = array((STEPS * 2, 1, MLP), jnp.float32, None, None, "tensor")
    w = weights(jnp.bfloat16)
    if scheme != "none":
        w = quant.QuantArray(weights(jnp.int8), scale, scheme)
    x = array((STEPS * 2, SLOTS, EMBED), jnp.bfloat16, None, "data")
    return repeated(lambda x, w: quant.dot(x, prepared(w)), x, w)


def dequantized(w):
    return jax.lax.optimization_barrier(w.q.astype(jnp.bfloat16) * w.scale.astype(jnp.bfloat16))


@pytest.mark.all
def test_products_of_another_kind_are_told_apart():
    """A scheme's program fails the check of the others, and int8 weights that are dequantised
    first fail that of W8A16."""
    for scheme, kind in PRODUCTS.items():
        assert products(projected(scheme)) == [kind]
    assert products(projected("w8a16", dequantized)) == [PRODUCTS["none"]]
    assert whole_copies(projected("w8a16", dequantized))
    assert not whole_copies(projected("w8a16"))


def heads(program):
    """(precision, dtype of the result) of the products that make logits."""
    dots = module(program).dots()
    return [(d.precision, d.result.dtype) for d in dots if VOCAB // 2 in d.result.dims]


def test_the_head_is_float32_with_highest_precision():
    assert heads(compiled("decode")) == [("highest", "f32")]
    table = array((VOCAB, EMBED), jnp.bfloat16, "tensor")
    x = array((SLOTS, EMBED), jnp.bfloat16, "data")

    def head(highest):
        program = transformer.Program("bfloat16", fp32_head=highest, layout=layout())
        logits = lambda table, x: transformer.head_logits({"embed": table}, program, x)
        return heads(violation(logits, table, x))

    assert head(highest=True) == [("highest", "f32")]
    assert head(highest=False) == [("default", "f32")]


def kernel_runs(program):
    return [c.runs for c in module(program).custom_calls() if c.target == hlo.MOSAIC]


@WRITTEN
def test_attention_is_the_decode_kernel(kv):
    assert kernel_runs(compiled("decode", kv=kv)) == [STEPS * 2]
    assert kernel_runs(attention_by_gathers()) == []


@pytest.mark.all
def test_a_cache_of_float8_is_read_by_the_kernel_and_never_copied():
    program = compiled("decode", kv="float8_e4m3fn")
    assert kernel_runs(program) == [STEPS * 2]
    assert not whole_copies(program)


@pytest.mark.all
def test_thousands_of_slots_of_a_device_have_room_for_their_tables():
    """Scalar memory is one MiB; rows of a table that were padded to 128 lanes would fill it."""
    slots, columns = 4096, 6
    mesh = jax.sharding.Mesh(tpu.devices("v5e:2x4")[:1], ("one",))
    sharding = jax.sharding.NamedSharding(mesh, P())
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    tokens = lambda *shape: of((slots, *shape), jnp.int32)
    program = jax.jit(decode_attention.decode_attention, donate_argnums=3).lower(
        of((slots, 1, 7, 64), jnp.bfloat16), of((slots, 1, 128), jnp.bfloat16), None,
        of((1, 8192, 1, PAGE, 128), jnp.bfloat16), None, of((), jnp.int32), tokens(), tokens(),
        tokens(columns),
    ).compile()
    assert kernel_runs(program) == [1]


def test_nothing_goes_to_the_host_inside_decode():
    assert module(compiled("decode")).host_transfers() == []

    def prints(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    assert module(violation(prints, array((8, 128), jnp.float32))).host_transfers()


@pytest.mark.all
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_float16_is_drawn_with_its_bits(name):
    """Without a kernel, as those cannot store it."""
    found = module(compiled(name, "none", kv="float16", dtype="float16"))
    assert not [c for c in found.custom_calls() if "decode_attention" in c.name]
    precisions = {d.precision for d in found.dots() if any(s.dtype == "f16" for s in d.operands)}
    assert precisions == {"highest"}


@functools.cache
def operations_per_token(quantization, joins_qkv=True):
    """Of Qwen2.5-0.5B's shape with 128 sequences on one v5e chip."""
    shape = ModelConfig.from_hf(json.loads(SHAPE.read_text()))
    one = sharding.layout((1, 1, 1), sharding.SERVE_RULES, tpu.devices("v5e:2x2")[:1])
    engine = Engine(shape, EngineConfig(
        slots=128, max_length=256, page_size=PAGE, dtype="bfloat16", cache_dtype="bfloat16",
        quantization=quantization, steps=4, prefill_batch=32, unroll=False, joins_qkv=joins_qkv,
    ), one)
    program, args = engine.programs()["decode"]
    return hlo.Module(program.lower(*args).compile().as_text()).operations() / 4


@pytest.mark.all
@pytest.mark.parametrize("quantization, most", [("none", 421), ("w8a8", 853)])
def test_a_token_takes_few_operations(quantization, most):
    """Of 24 layers, head, sampling and record. The counts were 844 and 1,347 with three products a layer
    and a rotation outside the kernel."""
    assert operations_per_token(quantization) <= most


@pytest.mark.all
def test_three_products_a_layer_take_more():
    assert operations_per_token("none", joins_qkv=False) > 421 + 24 * 8
