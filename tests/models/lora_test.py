"""LoRA: the factors, their product with each kind of weight, what a choice says, bad choices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.models import lora, quant, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxrl_tis.models.grouped import grouped_matmul

DENSE = ModelConfig(
    family="llama", vocab_size=24, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, mlp_dim=48, rope=RopeConfig("default", 1e4), max_position=16, norm_eps=1e-6,
    qkv_bias=False, qk_norm=False, tie_embeddings=True,
)
UNTIED = dataclasses.replace(DENSE, tie_embeddings=False)
EXPERTS = dataclasses.replace(
    DENSE, family="qwen3_moe", qk_norm=True, moe=MoeConfig(num_experts=4, top_k=2, expert_dim=16)
)


def adapter(config, text):
    shapes = transformer.abstract_params(config)
    return lora.Adapter.of(lora.parse(text), config, shapes)


def jitted_init(made, config, seed):
    shapes = transformer.abstract_params(config)
    return jax.device_get(jax.jit(lambda: made.init(shapes, jax.random.key(seed)))())


def trained(config, text, size=0.1):
    """Returns (base, adapted parameters with B not zero)."""
    made = adapter(config, text)
    base = transformer.init(config, jax.random.key(0))

    @jax.jit
    def moved():
        factors = made.init(transformer.abstract_params(config), jax.random.key(1))
        leaves, structure = jax.tree.flatten(factors)
        keys = iter(jax.random.split(jax.random.key(2), len(leaves)))
        leaves = [x + size * jax.random.normal(next(keys), x.shape) for x in leaves]
        return jax.tree.unflatten(structure, leaves)

    return base, made.join(base, moved())


def test_the_product_by_hand():
    """x = (1, 2); x W = (1, 2); x A = 1 * 3 + 2 * 1 = 5; s B = 4 / 1 * (0.5, -1) = (2, -4)."""
    w = lora.Adapted(jnp.eye(2), jnp.array([[3.0], [1.0]]), jnp.array([[0.5, -1.0]]), scale=4.0)
    y = transformer.Program().dot(jnp.array([[[1.0, 2.0]]]), w)
    np.testing.assert_array_equal(y, [[[1 + 5 * 2, 2 + 5 * -4]]])


def test_a_fresh_adapter_changes_no_bit_and_starts_as_peft_does():
    tokens = jnp.arange(8).reshape(1, 8)
    for config, text in ((UNTIED, "lora(rank=4, targets='all,head')"), (EXPERTS, "lora(rank=4)")):
        made, base = adapter(config, text), transformer.init(config, jax.random.key(0))
        factors = jitted_init(made, config, 1)
        a, b = factors["layers"]["q"]["a"], factors["layers"]["q"]["b"]
        assert (a.shape, b.shape, a.dtype) == ((2, 32, 4), (2, 4, 32), jnp.float32)
        assert not np.any(b) and 0.9 * 32**-0.5 < np.abs(a).max() <= 32**-0.5
        logits = jax.jit(lambda params, c=config: transformer.logits(params, c, tokens))
        np.testing.assert_array_equal(logits(made.join(base, factors)), logits(base))


@pytest.mark.all
@pytest.mark.parametrize("name", ["q", "k", "v", "o", "gate", "up", "down", "head"])
def test_each_module_alone_moves_the_logits_as_its_merge_does(name):
    base, adapted = trained(UNTIED, f"lora(rank=4, alpha=32, targets='{name}')")
    tokens = jnp.arange(8).reshape(1, 8)
    logits = lambda params: transformer.logits(params, UNTIED, tokens)
    moved = np.asarray(logits(adapted))
    assert np.abs(moved - logits(base)).max() > 1e-3
    np.testing.assert_allclose(moved, logits(lora.merged(adapted)), rtol=0, atol=1e-4)


def test_experts_have_factors_of_the_rank_divided_by_their_number():
    base, adapted = trained(EXPERTS, "lora(rank=8, alpha=16, targets='mlp')")
    w = adapted["layers"]["expert_gate"]
    assert (w.a.shape, w.b.shape, w.scale) == ((2, 4, 32, 4), (2, 4, 4, 16), 4.0)
    tokens = jnp.arange(8).reshape(1, 8)
    logits = jax.jit(lambda params: transformer.logits(params, EXPERTS, tokens))
    np.testing.assert_allclose(
        logits(adapted), logits(jax.jit(lora.merged)(adapted)), rtol=0, atol=1e-4
    )
    assert np.abs(logits(adapted) - np.asarray(logits(base))).max() > 1e-3


@pytest.mark.all
@pytest.mark.parametrize("kind", ["w8a16", "w8a8", "transposed", "master"])
def test_a_quantised_base_has_float_factors_beside_it(kind):
    rng = np.random.default_rng(0)
    x, w, a, b = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, 3, 8), (8, 6), (8, 2), (2, 6)))
    base = {
        "transposed": lambda: quant.transposed(quant.quantize_weight(w, "w8a16")),
        "master": lambda: quant.Master(w, "w8a8"),
    }.get(kind, lambda: quant.quantize_weight(w, kind))()
    program = transformer.Program()
    y = program.dot(x, lora.Adapted(base, a, b, 0.5))
    np.testing.assert_allclose(y, program.dot(x, base) + 0.5 * (x @ a) @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.all
def test_gradients_reach_the_factors_beside_a_quantised_base():
    base, adapted = trained(DENSE, "lora(rank=4)", size=0.02)
    made = lora.adapter_of(adapted, DENSE)
    assert made == adapter(DENSE, "lora(rank=4)")
    quantized = quant.quantize_params(base, quant.Recipe("w8a16"))
    factors, found = lora.split(adapted)
    assert lora.is_same(found, base)
    tokens = jnp.arange(8).reshape(1, 8)
    loss = jax.jit(lambda f: jnp.mean(
        transformer.logits(made.join(quantized, f), DENSE, tokens)[..., 0]
    ))
    gradient = jax.jit(jax.grad(loss))(factors)
    assert all(np.any(g) for g in jax.tree.leaves(gradient))
    norm = np.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(gradient)))
    along = lambda d: loss(jax.tree.map(lambda x, g: x + d * g / norm, factors, gradient))
    assert (along(0.01) - along(-0.01)) / 0.02 == pytest.approx(norm, rel=0.02)


@pytest.mark.all
def test_rows_of_experts_alone():
    rng = np.random.default_rng(1)
    x, w = jnp.asarray(rng.normal(size=(5, 8)), jnp.float32), jnp.asarray(rng.normal(size=(2, 8, 6)), jnp.float32)
    a, b = jnp.asarray(rng.normal(size=(2, 8, 3)), jnp.float32), jnp.asarray(rng.normal(size=(2, 3, 6)), jnp.float32)
    y = grouped_matmul(x, lora.Adapted(w, a, b, 2.0), jnp.array([2, 3], jnp.int32))
    whole = w + 2.0 * a @ b
    np.testing.assert_allclose(y[:2], x[:2] @ whole[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(y[2:], x[2:] @ whole[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text, scale", [("lora(rank=4, alpha=32)", 8.0), ("rslora(rank=4, alpha=32)", 16.0)])
def test_the_scale(text, scale):
    assert dict(adapter(DENSE, text).scales) == dict.fromkeys(
        ("q", "k", "v", "o", "gate", "up", "down"), scale
    )


@pytest.mark.all
def test_a_merge_into_eight_bits_or_bfloat16_loses_small_updates_that_factors_keep():
    """The step of int8 is max / 127. Updates of a twentieth of it leave every code of a merged
    weight as it was, if the scale is; beside the base they are all there."""
    rng = np.random.default_rng(2)
    w = jnp.asarray(rng.uniform(-1, 1, (64, 32)), jnp.float32).at[0].set(1.0)
    quantized = quant.quantize_weight(w, "w8a16")
    a, b = jnp.asarray(rng.normal(size=(64, 2)), jnp.float32), jnp.asarray(rng.normal(size=(2, 32)), jnp.float32)
    a = a.at[0].set(0.0)
    b = b * (0.05 / 127 / jnp.abs(a @ b).max())
    x = jnp.asarray(rng.normal(size=(1, 16, 64)), jnp.float32)
    program, exact = transformer.Program(), (x @ a) @ b
    beside = program.dot(x, lora.Adapted(quantized, a, b, 1.0)) - program.dot(x, quantized)
    np.testing.assert_allclose(beside, exact, rtol=0, atol=1e-5 * np.abs(x @ w).max())
    again = quant.quantize_weight(w + a @ b, "w8a16")
    assert np.mean(again.q != quantized.q) < 0.06
    codes = quant.dot(x, again) - quant.dot(x, quantized)
    lost = lambda found: np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert lost(codes) > 1 and lost(beside) < 0.02
    assert lost(program.dot(x, (w + a @ b).astype(jnp.bfloat16)) - program.dot(x, w.astype(jnp.bfloat16))) > 0.5


def test_a_merge_is_in_float32_alone_and_leaves_the_base():
    base, adapted = trained(DENSE, "lora(rank=4)")
    kept = jax.tree.map(np.array, base)
    jax.jit(lora.merged)(adapted)
    jax.tree.map(np.testing.assert_array_equal, base, kept)
    narrow = lora.adapter_of(adapted, DENSE).join(
        transformer.cast(base, "bfloat16"), lora.split(adapted)[0]
    )
    with pytest.raises(ValueError, match="a merge needs a base in float32"):
        lora.merged(narrow)


@pytest.mark.parametrize("text, named", [
    ("lora(rank=0)", "rank=0 must be a whole number of at least 1"),
    ("lora(rank=1.5)", "rank=1.5 must be"),
    ("lora(alpha=0)", "alpha=0 must be a finite number above 0"),
    ("lora(alpha=None)", "alpha=None must be a finite number above 0"),
    ("lora(targets='query')", "'query', which matches nothing"),
    ("lora(dropout=0.1)", "has no parameter 'dropout'"),
    ("dora(rank=4)", "lora 'dora' is unknown"),
    ("lora(rank=", "neither a name nor"),
])
def test_a_choice_that_cannot_be(text, named):
    with pytest.raises(ValueError, match=named):
        lora.parse(text)


@pytest.mark.parametrize("config, text, named", [
    (DENSE, "lora(rank=17)", "rank 17, and k is 16 wide"),
    (DENSE, "lora(rank=4, targets='head')", "the model's head is its embedding"),
    (DENSE, "lora(rank=4, targets='expert_up')", "match nothing in this model"),
])
def test_a_choice_that_the_model_cannot_have(config, text, named):
    with pytest.raises(ValueError, match=named):
        adapter(config, text)


@pytest.mark.all
def test_the_relative_norm_by_hand():
    """s A B = 4 (3, 1) (0.5, -1) has the squares 16 (2.25 + 9 + 0.25 + 1) = 200, and W = 1 has 2."""
    w = lora.Adapted(jnp.eye(2), jnp.array([[3.0], [1.0]]), jnp.array([[0.5, -1.0]]), scale=4.0)
    assert lora.relative_norm({"q": w, "other": jnp.ones(3)}) == pytest.approx(10)
    _, adapted = trained(EXPERTS, "lora(rank=4)")
    merged, base = lora.merged(adapted), lora.split(adapted)[1]
    names = dict(lora.adapter_of(adapted, EXPERTS).ranks)
    of = lambda tree: np.sqrt(sum(float(jnp.sum(tree["layers"][n] ** 2)) for n in names))
    moved = jax.tree.map(lambda x, y: x - y, merged, base)
    assert lora.relative_norm(adapted) == pytest.approx(of(moved) / of(base), rel=1e-4)


def test_none_has_no_adapter():
    assert lora.parse("none") is None
    params = transformer.init(DENSE, jax.random.key(0))
    assert lora.split(params) == (params, None)
