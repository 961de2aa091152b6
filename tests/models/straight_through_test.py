"""The learner's product: the sampler's numbers forward, the float product's gradients backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_tis.models import quant, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.models.quant import Master, Recipe

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

RNG = np.random.default_rng(0)
I, O = 96, 40
CONFIG = ModelConfig(
    family="qwen3", vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig(kind="default", theta=10000.0), max_position=16,
    norm_eps=1e-5, qkv_bias=False, qk_norm=True, tie_embeddings=True,
)
PARAMS = transformer.init(CONFIG, jax.random.key(0))
TOKENS = jnp.asarray(RNG.integers(0, 50, (3, 12)), jnp.int32)


def operands(rows, dtype="float32"):
    x = jnp.asarray(RNG.normal(0, 2, (rows, I)), dtype)
    return x, jnp.asarray(RNG.normal(0, 0.1, (I, O)), jnp.float32)


def learner(x_mri, w, scheme):
    """Products [M,R,O] and gradient of a program like the learner's: micro-batches, each with its
    backward pass that recomputes, whose gradients are summed."""

    @jax.checkpoint
    def loss(w, x):
        y = quant.dot(jnp.abs(x), Master(w, scheme))
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    def step(total, x):
        (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(w, x)
        return total + gradient, y

    gradient, y_mro = jax.lax.scan(step, jnp.zeros_like(w), x_mri)
    return y_mro, gradient


def sampler(x_ri, weight):
    return quant.dot(jnp.abs(x_ri), weight)


def fake(x_ri, w, scheme):
    """The quantised values, multiplied as floats."""
    q = quant.quantize_weight(w, scheme)
    x_q, x_scale = quant.quantize(jnp.abs(x_ri), -1, quant.SCHEMES[scheme].dtype)
    restored = x_q.astype(jnp.float32) * x_scale
    return (restored @ (q.q.astype(jnp.float32) * q.scale)).astype(x_ri.dtype)


@pytest.mark.all
@pytest.mark.cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_learners_products_are_the_samplers_bit_by_bit(dtype):
    x, w = operands(24, dtype)
    load = jax.jit(quant.quantize_weight, static_argnums=1)
    program = jax.jit(learner, static_argnums=2)
    by_micro = {m: program(x.reshape(m, -1, I), w, "w8a8")[0].reshape(24, O) for m in (1, 24)}
    weight, decode = load(w, "w8a8"), jax.jit(sampler)
    for rows in (1, 3, 24):
        sampled = jnp.concatenate([decode(x[i : i + rows], weight) for i in range(0, 24, rows)])
        assert sampled.dtype == x.dtype
        for learned in by_micro.values():
            np.testing.assert_array_equal(learned, sampled)


@pytest.mark.all
@pytest.mark.cases(str(P(None, ("out", "in"))))
@pytest.mark.parametrize(
    "spec", [P("in", "out"), P(("in", "out")), P(None, ("out", "in"))], ids=str
)
def test_a_split_learner_quantises_and_multiplies_as_one_device_does(spec):
    """The weights are quantised in the learner's own program, and int32 sums have no order."""
    mesh = jax.make_mesh((4, 2), ("in", "out"), axis_types=(AxisType.Auto,) * 2)
    x, w = operands(24)
    split_w = jax.device_put(w, NamedSharding(mesh, spec))
    split_x = jax.device_put(x.reshape(3, 8, I), NamedSharding(mesh, P(None, "in")))
    alone = jax.jit(quant.quantize_weight, static_argnums=1)(w, "w8a8")
    split = jax.jit(quant.quantize_weight, static_argnums=1)(split_w, "w8a8")
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(a, b)
    learned, _ = jax.jit(learner, static_argnums=2)(split_x, split_w, "w8a8")
    sampled = jax.jit(sampler)(x, alone)
    np.testing.assert_array_equal(learned.reshape(24, O), sampled)


@pytest.mark.all
def test_a_product_of_restored_floats_is_not_the_samplers():
    x, w = operands(24)
    sampled = jax.jit(sampler)(x, quant.quantize_weight(w, "w8a8"))
    faked = jax.jit(fake, static_argnums=2)(x, w, "w8a8")
    np.testing.assert_allclose(faked, sampled, rtol=1e-4, atol=1e-5)
    assert (np.asarray(faked) != np.asarray(sampled)).mean() > 0.5


@pytest.mark.all
@pytest.mark.parametrize("scheme", [s for s in quant.SCHEMES if s != "none"])
def test_the_product_of_a_master_is_that_of_its_quantised_weight(scheme):
    x, w = operands(5)
    quantized = quant.quantize_weight(w, scheme)
    np.testing.assert_array_equal(
        jax.jit(quant.dot)(x, Master(w, scheme)), jax.jit(quant.dot)(x, quantized)
    )
    assert np.abs(quant.dot(x, Master(w, scheme)) - quant.dot(x, w)).max() > 1e-3


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", [s for s in quant.SCHEMES if s != "none"])
def test_gradients_are_those_of_the_float_product_at_its_own_operands(scheme, dtype):
    x, w = operands(7, dtype)
    g = jnp.asarray(RNG.normal(0, 1, (7, O)), dtype)
    _, pull = jax.vjp(lambda x, w: quant.dot(x, Master(w, scheme)), x, w)
    x_bar, w_bar = pull(g)
    assert x_bar.dtype == x.dtype and w_bar.dtype == w.dtype
    as_float = lambda a: np.asarray(a.astype(jnp.float32), np.float64)
    cast_w = as_float(w.astype(dtype))
    tolerance = dict(rtol=1e-5, atol=1e-4) if dtype == "float32" else dict(rtol=0.01, atol=0.02)
    np.testing.assert_allclose(as_float(x_bar), as_float(g) @ cast_w.T, **tolerance)
    np.testing.assert_allclose(as_float(w_bar), as_float(x).T @ as_float(g), **tolerance)
    # Those of the float program, bit by bit; the quantised operands would give others.
    for ours, plain in zip((x_bar, w_bar), jax.vjp(quant.dot, x, w)[1](g), strict=True):
        np.testing.assert_array_equal(as_float(ours), as_float(plain))
    q = quant.quantize_weight(w, scheme)
    restored = as_float(quant.dot(jnp.eye(I), q))
    assert np.abs(as_float(g) @ restored.T - as_float(g) @ cast_w.T).max() > 1e-3


def forward(params, program, tokens=TOKENS):
    return jax.jit(lambda p, t: transformer.logits(p, CONFIG, t, program=program))(params, tokens)


@pytest.mark.cases("w8a8")
@pytest.mark.parametrize("recipe", [
    Recipe("w8a8"), Recipe("w8a16"), Recipe("w8a8", ("down", "q")), Recipe("fp8_w8a8"),
], ids=lambda recipe: recipe.id)
def test_the_model_computes_what_the_quantised_model_does(recipe):
    program = transformer.Program(quantization=recipe)
    served = jax.jit(lambda p: quant.quantize_params(p, recipe))(PARAMS)
    stack = (lambda p: transformer.unstack(p, CONFIG)) if recipe.unquantized else lambda p: p
    learned = forward(stack(PARAMS), program)
    np.testing.assert_allclose(learned, forward(stack(served), transformer.Program()), atol=1e-5)
    assert np.abs(learned - forward(PARAMS, transformer.Program())).max() > 1e-3


@pytest.mark.cases("none")
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_every_parameter_of_a_quantised_model_has_the_gradient_of_its_layers(remat):
    """Near that of the float model: the operands differ by the error of quantisation alone."""

    def gradient(program):
        def loss(params):
            logits = transformer.logits(params, CONFIG, TOKENS, program=program)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 3])

        return jax.jit(jax.grad(loss))(PARAMS)

    plain = transformer.Program(remat=remat)
    expected = gradient(plain)
    found = gradient(dataclasses.replace(plain, quantization=Recipe("w8a8")))
    assert jax.tree.structure(found) == jax.tree.structure(expected)

    def check(path, a, b):
        cosine = np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))
        assert cosine > 0.98, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(check, found, expected)
