"""Chunked log-probabilities against the plain formula in float64, and against their memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob import token_logprob
from jaxrl_tis.kernels.logprob_chunked import Kept
from tests.kernels.logprob_reference import Case, scored

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.integers(1, 4), st.integers(1, 11), st.sampled_from([2, 50, 97]), st.integers(1, 40),
    st.booleans(), st.booleans(), st.sampled_from([0, 0, 5]), st.sampled_from([0, 3]),
)
def test_values_and_gradients_equal_float64(b, n, v, chunk, tied, highest, kept_size, num_others):
    case = Case(
        b, n, 6, v, 1 - tied, highest=highest, kept_size=kept_size, num_others=num_others,
        seed=b * n * v,
    )
    case.check(case.run(scored(chunk)))


def test_bfloat16_hidden_states_with_a_float32_head():
    case = Case(v=97, dtype="bfloat16")
    case.check(case.run(scored(9)), tolerance=5e-3)


@pytest.mark.parametrize("highest, logit", [(True, 1 + 2.0**-9), (False, 1.0)])
def test_a_head_of_the_highest_precision_is_not_rounded_to_bfloat16(highest, logit):
    head = Head(np.float32([[0.0], [1 + 2.0**-9]]), vocab_axis=0, highest=highest)
    x, targets = np.ones((1, 1, 1), jnp.bfloat16), np.ones((1, 1), np.int32)
    found = jax.jit(lambda x: token_logprob(head, x, targets, np.ones((1, 1)), 8).logp)(x)
    np.testing.assert_allclose(found, [[-np.log1p(np.exp(-logit))]], rtol=1e-6)


@pytest.mark.all
def test_the_gradient_of_a_bfloat16_head_is_summed_in_float32():
    # 2,000 tokens each add -1/2 * 2^-9 to one entry; a bfloat16 sum would stop at 2^-9 * 2^8 = 1/2.
    n = 2000
    x, targets = jnp.full((1, n, 1), 2.0**-9, jnp.bfloat16), jnp.zeros((1, n), jnp.int32)

    def loss(w):
        return jnp.sum(token_logprob(Head(w, 0), x, targets, jnp.ones((1, n)), 1).logp)

    gradient = jax.jit(jax.grad(loss))(jnp.zeros((2, 1), jnp.bfloat16))
    expected = n * 0.5 * 2.0**-9  # 1.953
    np.testing.assert_allclose(gradient.astype(jnp.float32), [[expected], [-expected]], rtol=5e-3)


def test_by_hand():
    # Logits (0, log 3) are 1/4, 3/4; at temperature 1/2 they are 1/10, 9/10.
    head = Head(np.float32([[0.0, np.log(3.0)]]), vocab_axis=1)
    targets, temperature = np.array([[0, 1]]), np.float32([[1.0, 0.5]])
    found = jax.jit(lambda x: token_logprob(
        head, x, targets, temperature, 8, with_entropy=True, with_collision=True
    ))(np.ones((1, 2, 1), np.float32))
    np.testing.assert_allclose(found.logp, np.log([[0.25, 0.9]]), rtol=1e-6)
    hand = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), -(0.1 * np.log(0.1) + 0.9 * np.log(0.9))
    np.testing.assert_allclose(found.entropy, [hand], rtol=1e-5)
    np.testing.assert_allclose(found.collision, [[0.0625 + 0.5625, 0.01 + 0.81]], rtol=1e-5)


def test_a_kept_set_by_hand():
    # Logits 0, log 3, log 5: the set {0, 1} leaves 1/4, 3/4; an overflown one restricts nothing.
    head = Head(jnp.log(jnp.array([[1.0, 3.0, 5.0]])), vocab_axis=1)
    kept = Kept(jnp.array([[[1, -1, 0], [1, -1, 0]]]), jnp.array([[False, True]]))

    @jax.jit
    def logp(weight):
        ones = jnp.ones((1, 2))
        targets = jnp.ones((1, 2), jnp.int32)
        return token_logprob(Head(weight, 1), ones[..., None], targets, ones, 8, kept=kept).logp

    value, pull = jax.vjp(logp, head.weight)
    np.testing.assert_allclose(value, np.log([[3 / 4, 1 / 3]]), rtol=1e-6)
    (gradient,) = pull(jnp.array([[1.0, 10.0]]))
    expected = [-1 / 4 - 10 / 9, 1 / 4 + 20 / 3, -50 / 9]
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-6)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_other_tokens_by_hand(numerics):
    # Probabilities 1/9, 3/9, 5/9; d log p(v) = onehot - p; the token of a negative id is none.
    head = Head(jnp.log(jnp.array([[1.0, 3.0, 5.0]])), vocab_axis=1)
    ones, targets = jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32)
    ids = jnp.array([[[2, -1, 1]]])

    @jax.jit
    def others(weight):
        return token_logprob(
            Head(weight, 1), ones[..., None], targets, ones, 8, ids_bnk=ids, numerics=numerics
        ).others

    value, pull = jax.vjp(others, head.weight)
    np.testing.assert_allclose(value, [[[np.log(5 / 9), 0.0, np.log(3 / 9)]]], rtol=1e-5)
    (gradient,) = pull(jnp.array([[[1.0, 10.0, 2.0]]]))
    np.testing.assert_allclose(gradient, [[-3 / 9, 2 - 9 / 9, 1 - 15 / 9]], rtol=1e-5, atol=1e-6)


@pytest.mark.all
def test_what_is_not_asked_for_is_zero():
    case = Case()
    head = Head(case.weight, 0)
    found = token_logprob(head, case.x, case.targets, case.temperature, 12)
    np.testing.assert_allclose(found.logp, case.expected()[0][0], rtol=1e-5, atol=1e-5)
    assert not np.any(found.entropy) and not np.any(found.collision)


@pytest.mark.all
@pytest.mark.cases("nan-9", "-inf-1000")
@pytest.mark.parametrize("chunk", [9, 1000])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_token_without_cotangent_leaks_nothing(bad, chunk):
    case = Case(n=7)
    case.g_logp[1, 2:5] = case.g_entropy[1, 2:5] = 0
    expected = case.run(scored(chunk))
    case.x[1, 2:5] = bad
    found, gradients = case.run(scored(chunk))
    assert np.all(np.isnan(found.logp[1, 2:5]))
    for ours, theirs in zip(gradients, expected[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    case.g_logp[1, 3] = 1.0
    assert np.all(np.isnan(case.run(scored(chunk))[1][1]))


def all_sizes(jaxpr):
    """Elements of every array that an equation makes, nested programs included; a kernel's are in
    tiles."""
    for eqn in jaxpr.eqns:
        yield from (int(np.prod(v.aval.shape)) for v in eqn.outvars)
        if eqn.primitive.name == "pallas_call":
            continue
        for param in jax.tree.leaves(
            eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            if hasattr(param, "jaxpr"):
                yield from all_sizes(param.jaxpr)
            elif hasattr(param, "eqns"):
                yield from all_sizes(param)


@pytest.mark.all
def test_no_program_holds_all_the_logits():
    # B N V = 1,536,000; a chunk of 16 positions holds 16 V = 32,000.
    b, n, d, v, chunk = 4, 192, 8, 2000, 16
    x, w = jnp.zeros((b, n, d)), jnp.zeros((d, v))
    targets, ones = jnp.zeros((b, n), jnp.int32), jnp.ones((b, n))

    def loss(x, w, chunk):
        found = token_logprob(
            Head(w, 1), x, targets, ones, chunk, with_entropy=True, with_collision=True,
            ids_bnk=targets[..., None],
        )
        return jnp.sum(found.logp) + jnp.sum(found.entropy) + jnp.sum(found.others)

    step = jax.value_and_grad(loss, (0, 1))
    sizes = lambda chunk: max(all_sizes(jax.make_jaxpr(lambda x, w: step(x, w, chunk))(x, w).jaxpr))
    assert sizes(b * n) == b * n * v
    assert sizes(chunk) == chunk * v

    def temporaries(chunk):
        compiled = jax.jit(lambda x, w: step(x, w, chunk)).lower(x, w).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # A chunk's logits, weights and gradient; the head's gradient and a chunk's share of it.
    bound = 4 * (3 * chunk * v + 2 * d * v + 4 * b * n * d)
    assert temporaries(chunk) < bound < 4 * b * n * v < temporaries(b * n)


def test_programs_for_a_tpu_have_the_kernels_and_others_do_not():
    case = Case(v=97)

    def lowered(platform, kept):
        loss = lambda x, weight: jnp.sum(
            scored()(Head(weight, 0), x, case.targets, case.temperature, None, kept).logp
        )
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(case.x, case.weight)
        return traced.lower(lowering_platforms=(platform,)).as_text().count("tpu_custom_call")

    assert lowered("tpu", None) == 3
    assert lowered("cuda", None) == lowered("cpu", None) == 0
    assert lowered("tpu", Case(kept_size=3).kept) == 0
