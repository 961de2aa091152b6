"""The pieces of invariant numerics, each with a form of it that is not invariant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.kernels import tiles
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob import token_logprob
from jaxrl_tis.kernels.logprob_chunked import Kept
from jaxrl_tis.models import attention, invariant, moe, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from tests import jitted

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("bits depend on what XLA makes of the programs"),
]

CONFIG = ModelConfig(
    family="qwen3", vocab_size=256, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, mlp_dim=128, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=False, qk_norm=True, tie_embeddings=True,
)
OPTIMIZED = pytest.mark.usefixtures("optimized")
RNG = np.random.default_rng(0)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def jit(f):
    return jax.jit(f, compiler_options=tiles.COMPILER_OPTIONS)


def normal(*shape, dtype="float32"):
    return RNG.normal(size=shape).astype(jnp.dtype(dtype))


def layout(tensor):
    return sharding.layout((1, 1, tensor), sharding.SERVE_RULES)


def scaled_residual(x_rd, scale):
    return x_rd + x_rd * scale.reshape(1, -1)


def normed(x_rd, scale):
    return transformer.rms_norm(x_rd, scale, 1e-6)


@pytest.mark.all
@OPTIMIZED
def test_without_the_flag_a_rounding_is_left_out_where_operations_are_fused():
    x, scale = normal(16, 256, dtype="bfloat16"), normal(256, dtype="bfloat16")
    apart = np.asarray(jit(normed)(jit(scaled_residual)(x, scale), scale))
    fused = lambda x, scale: normed(scaled_residual(x, scale), scale)
    np.testing.assert_array_equal(np.asarray(jit(fused)(x, scale)), apart)
    assert (np.asarray(jax.jit(fused)(x, scale)) != apart).mean() > 0.1


def kept_sets(count, size):
    ids = np.stack([RNG.permutation(CONFIG.vocab_size)[:size] for _ in range(count)])
    return ids.astype(np.int32)


@pytest.mark.all
@OPTIMIZED
def test_log_probs_of_kept_sets_are_those_of_fast_numerics():
    x, ids = normal(2, 9, 64), kept_sets(18, 12).reshape(2, 9, 12)
    kept = Kept(jnp.asarray(ids), jnp.zeros((2, 9), bool).at[0, 3].set(True))
    params = {"embed": normal(256, 64)}
    args = *transformer.output_head(params, transformer.Program(), x), jnp.asarray(ids[..., 5]), jnp.full((2, 9), 0.7)

    def scores(numerics, layout):
        options = dict(with_entropy=True, kept=kept, layout=layout, numerics=numerics)
        return jit(lambda *args: token_logprob(*args, 8, **options))(*args)

    single = scores("invariant", None)
    for found, expected in zip(single, scores("fast", None), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for found, expected in zip(scores("invariant", layout(2)), single, strict=True):
        np.testing.assert_array_equal(found, expected)


# 16 blocks of 128 tokens and 12 more; less than a part of the mesh; none that a mesh divides.
VOCABULARIES = pytest.mark.parametrize("size", [2060, 20, 131])


@OPTIMIZED
@pytest.mark.cases("2060-4")
@pytest.mark.parametrize("size, tensor", [(2060, 2), (2060, 4), (20, 4)])
def test_logits_of_any_vocabulary_are_those_of_one_device(size, tensor):
    x, weight = normal(3, 96, dtype="bfloat16"), normal(size, 96)
    head = Head(weight, 0)
    logits = lambda layout: np.asarray(jit(lambda x: invariant.logits(x, head, layout))(x))
    single = logits(None)
    np.testing.assert_array_equal(logits(layout(tensor)), single)
    assert single.shape == (3, size)


@pytest.mark.all
@pytest.mark.cases("20")
@OPTIMIZED
@VOCABULARIES
def test_log_probs_of_any_vocabulary_and_their_gradients(size):
    """Bits of the values; the gradients are sums of the mesh."""
    x, weight = normal(2, 9, 64), normal(64, size)
    targets = jnp.asarray(RNG.integers(0, size, (2, 9)), jnp.int32).at[0, 0].set(size - 1)
    ids = jnp.stack([targets, (targets + 7) % size], axis=-1)

    def scores(tensor):
        def total(weight, x):
            found = token_logprob(
                Head(weight, 1), x, targets, jnp.full((2, 9), 0.7), 8, with_entropy=True,
                with_collision=True, ids_bnk=ids, layout=layout(tensor), numerics="invariant",
            )
            return jnp.sum(found.logp + found.entropy) + jnp.sum(found.others), found

        (_, found), gradients = jit(jax.value_and_grad(total, (0, 1), has_aux=True))(weight, x)
        return jax.device_get(found), jax.device_get(gradients)

    single, gradients = scores(1)
    log_p = jax.nn.log_softmax((x @ weight) / 0.7)
    expected = np.take_along_axis(np.asarray(log_p), np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(single.logp, expected, atol=2e-4)
    np.testing.assert_allclose(single.others[..., 0], single.logp, atol=1e-6)
    for tensor in (2, 4) if size == 2060 else (4,):
        found, others = scores(tensor)
        for a, b in zip(found, single, strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(others, gradients, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


@pytest.mark.all
def test_gradients_are_those_of_fast_numerics():
    config = dataclasses.replace(CONFIG, num_layers=1)
    params = transformer.init(config, jax.random.key(0))
    tokens = jnp.asarray(RNG.integers(0, 256, (2, 19)), jnp.int32)

    def gradient(program):
        def loss(params):
            segments, positions = jnp.ones_like(tokens), jnp.arange(19)[None] + 0 * tokens
            x = transformer.rows_hidden(params, config, program, tokens, positions, segments)
            head, x = transformer.output_head(params, program, x)
            found = token_logprob(
                head, x, tokens, jnp.ones(tokens.shape), 64, with_entropy=True,
                layout=program.layout, numerics=program.numerics,
            )
            return jnp.sum(found.logp + 0.1 * found.entropy)

        return jax.jit(jax.grad(loss), compiler_options=program.compiler_options)(params)

    program = transformer.Program(layout=layout(2), remat="dots", numerics="invariant")
    found, fast = gradient(program), gradient(transformer.Program())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(fast), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("changes, mesh, message", [
    ({}, dict(tensor=4), "columns of k and v, 64, cannot be cut into 4 parts of whole tiles of 32"),
    ({}, dict(tensor=4), "rows of down, 128, cannot be cut into 4 parts of whole tiles of 64"),
    ({}, dict(tensor=3), "3 tensor shards are no power of two up to 32"),
    ({}, dict(tensor=64), "64 tensor shards are no power of two up to 32"),
    ({}, dict(context=2), "rows are cut into 2 context shards"),
])
def test_what_the_contract_does_not_cover_is_refused(changes, mesh, message):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=message):
        invariant.check(config, dict(tensor=1, context=1) | mesh, "none")


def test_float8_is_refused():
    with pytest.raises(ValueError, match="'fp8_w8a8' sums floats of few bits; use none, w8a16, w8a8"):
        invariant.check(CONFIG, dict(tensor=2, context=1), "fp8_w8a8")
    invariant.check(CONFIG, dict(tensor=2, context=1), "w8a8")


def test_attention_by_pages_is_plain_attention():
    """Two segments of 21 and 19 tokens in pages of 16; four query and two key/value heads."""
    q, k, v = normal(1, 40, 4, 8), normal(1, 40, 2, 8), normal(1, 40, 2, 8)
    segments = np.repeat([1, 2], [21, 19])[None]
    found, plain = (jitted.function(part.row_attention)(q, 3 * k, v, segments)
                    for part in (invariant, attention))
    np.testing.assert_allclose(found, plain, atol=1e-5)


# Experts


def equal_bits_of_parts(f, *arrays):
    """A function of each token gives the same bits for any part of the tokens, on two devices."""
    whole = np.asarray(jit(lambda *x: f(None, *x))(*arrays))
    for count in (1, 5):
        part = jit(lambda *x: f(None, *x))(*(x[:, 3 : 3 + count] for x in arrays))
        np.testing.assert_array_equal(part, whole[:, 3 : 3 + count])
    np.testing.assert_array_equal(jit(lambda *x: f(layout(2), *x))(*arrays), whole)
    return whole


@pytest.mark.all
@OPTIMIZED
def test_router_logits_do_not_depend_on_other_tokens():
    x, router = normal(2, 19, 64, dtype="bfloat16"), normal(64, 8)
    call = lambda layout, x: invariant.router_logits(x, router, layout, moe.router_logits)
    found = equal_bits_of_parts(call, x)
    exact = np.einsum("btd,de->bte", np.float64(x), np.float64(router))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=1e-5)
    pull = lambda f: jax.vjp(f, x, router)[1](jnp.cos(found))
    plain = pull(moe.router_logits)
    own = pull(lambda x, r: invariant.router_logits(x, r, None, moe.router_logits))
    for a, b in zip(own, plain, strict=True):
        np.testing.assert_array_equal(a, b)


@OPTIMIZED
def test_functions_of_a_row_do_not_depend_on_other_rows():
    """With the gradient of the plain function, and none for integers."""
    kind = MoeConfig(8, 2, 16)
    logits, ids = normal(2, 19, 8), np.int32(RNG.integers(0, 8, (2, 19, 2)))
    plain = lambda logits, ids: moe.gates(moe.scores(logits, kind), ids, kind)
    found = equal_bits_of_parts(lambda layout, *x: invariant.by_row(plain, layout, *x), logits, ids)
    np.testing.assert_allclose(found, jitted.function(plain)(logits, ids), rtol=1e-6)
    total = lambda f: jitted.grad(lambda logits: jnp.sum(jnp.cos(f(logits, ids))))(logits)
    np.testing.assert_allclose(
        total(lambda *x: invariant.by_row(plain, None, *x)), total(plain), atol=1e-6
    )


@pytest.mark.parametrize("moe_fields, scheme, message", [
    (dict(expert_dim=96), "none", "width of an expert, 96, cannot be cut into 2 parts"),
    (dict(expert_dim=128, shared_dim=64), "none",
     "width of the shared experts, 64, cannot be cut into 2 parts of whole tiles of 64"),
    (dict(expert_dim=128), "w8a8", "'w8a8' scales the inputs of an expert's last product, which 2"),
])
def test_experts_that_the_contract_does_not_cover_are_refused(moe_fields, scheme, message):
    config = dataclasses.replace(CONFIG, mlp_dim=96, moe=MoeConfig(8, 2, **moe_fields))
    with pytest.raises(ValueError, match=message):
        invariant.check(config, dict(tensor=2, context=1), scheme)
    invariant.check(config, dict(tensor=1, context=1), scheme)


@pytest.mark.all
@OPTIMIZED
@pytest.mark.parametrize("has_experts", [False, True])
def test_a_packed_sequence_has_the_bits_of_one_alone(has_experts):
    config = dataclasses.replace(CONFIG, num_layers=1)
    if has_experts:
        config = dataclasses.replace(config, family="qwen3_moe", moe=MoeConfig(8, 2, 64))
    params = transformer.init(config, jax.random.key(0))
    program = transformer.Program(numerics="invariant")
    run = jax.jit(
        lambda *rows: transformer.rows_hidden(params, config, program, *rows),
        compiler_options=program.compiler_options,
    )
    first, second = (jnp.asarray(RNG.integers(0, 256, n), jnp.int32) for n in (21, 27))
    position = lambda *lengths: jnp.concatenate([jnp.arange(n) for n in lengths])[None]
    rows = jnp.concatenate([first, second])[None], position(21, 27)
    packed = run(*rows, jnp.repeat(jnp.array([1, 2]), jnp.array([21, 27]))[None])[0]
    for tokens, found in ((first, packed[:21]), (second, packed[21:])):
        count = len(tokens)
        row = jnp.zeros((1, 48), jnp.int32).at[0, :count].set(tokens)
        alone = run(row, position(48), (jnp.arange(48) < count).astype(jnp.int32)[None])[0, :count]
        np.testing.assert_array_equal(found, alone)
