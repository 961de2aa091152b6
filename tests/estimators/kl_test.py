"""KL estimators: values and gradients by hand, expectations by enumeration of one token and two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import kl, methods, returns
from tests import jitted

kl, returns = map(jitted.Module, (kl, returns))

NAN = float("nan")
SAMPLED = [name for name in kl.KL if not name.startswith("exact")]
PLAIN = ["k1", "k2", "k3", "abs"]


def entry(name, logp_old):
    """The entry with the policy that sampled filled in, if it takes one."""
    if methods.needs("kl", name):
        return lambda logp, logp_ref: kl.KL[name](logp, logp_ref, logp_old=logp_old)
    return kl.KL[name]


def value_and_gradient(name, logp, logp_ref, logp_old=None):
    function = entry(name, logp_old)
    return function(logp, logp_ref), jitted.grad(lambda x: jnp.sum(function(x, logp_ref)))(logp)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        # z = 0.5, 0, -0.5
        ("k1", [0.5, 0, -0.5], [1, 1, 1]),
        ("k2", [0.125, 0, 0.125], [0.5, 0, -0.5]),
        ("k3", [np.exp(-0.5) - 0.5, 0, np.exp(0.5) - 1.5], [1 - np.exp(-0.5), 0, 1 - np.exp(0.5)]),
        ("abs", [0.5, 0, 0.5], [1, 0, -1]),
        ("k1+", [0.5, 0, -0.5], [0.5, 0, -0.5]),
        ("k2+", [0.125, 0, 0.125], [0.5, 0, -0.5]),
        ("k3+", [np.exp(-0.5) - 0.5, 0, np.exp(0.5) - 1.5], [0.5, 0, -0.5]),
        ("abs+", [0.5, 0, 0.5], [0.5, 0, -0.5]),
    ],
)
def test_values_and_gradients(name, value, gradient):
    logp, ref = np.array([[-1.0, -1.0, -1.5]]), np.array([[-1.5, -1.0, -1.0]])
    actual = value_and_gradient(name, logp, ref)
    np.testing.assert_allclose(actual[0], [value], rtol=1e-5)
    np.testing.assert_allclose(actual[1], [gradient], rtol=1e-5)


def test_k3_is_bounded_by_ten_and_flat_beyond():
    # exp(2.6) - 3.6 = 9.86 passes, exp(2.7) - 3.7 = 11.2 and exp(30) are cut, and so is z = 30 with
    # 20 - 1 + exp(-20).
    z = np.array([[-2.6, -2.7, -30.0, 30.0]])
    value, gradient = value_and_gradient("k3", z, np.zeros((1, 4)))
    np.testing.assert_allclose(value, [[np.exp(2.6) - 3.6, 10, 10, 10]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[1 - np.exp(2.6), 0, 0, 0]], rtol=1e-5)
    # The straight-through form has the value with its bounds, and a gradient without any.
    straight, gradient = value_and_gradient("k3+", z, np.zeros((1, 4)))
    np.testing.assert_array_equal(straight, value)
    np.testing.assert_allclose(gradient, z, rtol=1e-6)


def test_k3_of_a_small_difference_keeps_its_digits():
    value = kl.KL["k3"](np.array([[1e-3]]), np.zeros((1, 1)))
    np.testing.assert_allclose(value, [[0.5e-6]], rtol=1e-3)  # z^2 / 2


def test_is_k3_by_hand():
    # r = 2 and 0.5, z = 0.5 and -1: r (exp(-z) - 1 + z), and r z.
    old = np.array([[-2.0, -2.0]])
    logp = old + np.log(np.array([[2.0, 0.5]]))
    ref = logp - np.array([[0.5, -1.0]])
    value, gradient = value_and_gradient("is_k3", logp, ref, old)
    np.testing.assert_allclose(value, [[2 * 0.106531, 0.5 * 0.718282]], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[1.0, -0.5]], rtol=1e-5)
    # Where the policy has not moved yet, the value is the one of k3, and the gradient is not.
    value, gradient = value_and_gradient("is_k3", logp, ref, logp)
    np.testing.assert_allclose(value, kl.KL["k3"](logp, ref), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, -1.0]], rtol=1e-5)


def test_is_k3_stops_at_the_bounds_of_its_ratio():
    old, ref = np.zeros((1, 3)), np.array([[24.0, 24.0, -31.0]])
    value, gradient = value_and_gradient("is_k3", np.array([[25.0, 20.0, -30.0]]), ref, old)
    # r = exp(20), exp(20), exp(-20); z = 1, -4, 1. Only the second log-ratio is within +-20.
    r, k3 = np.exp([20.0, 20.0, -20.0]), np.exp([-1.0, 4.0, -1.0]) - 1 + np.array([1, -4, 1])
    np.testing.assert_allclose(value, [r * k3], rtol=1e-5)
    np.testing.assert_allclose(gradient, [[0, -4 * np.exp(20.0), 0]], rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "difference", "value", "gradient"),
    [
        (0.5, 0.5, 0.4, 0.0),  # already lowered below 0.8: max(0.25, 0.4)
        (0.5, -0.5, -0.25, -0.25),
        (1.0, 0.5, 0.5, 0.5),
        (1.0, -0.5, -0.5, -0.5),
        (1.5, 0.5, 0.75, 0.75),
        (1.5, -0.5, -0.6, 0.0),  # already raised above 1.2: max(-0.75, -0.6)
    ],
)
def test_clipped_is_k2(ratio, difference, value, gradient):
    old = np.array([[-1.5]])
    logp = old + jnp.log(ratio)
    actual = value_and_gradient("clipped_is_k2", logp, logp - difference, old)
    np.testing.assert_allclose(actual[0], [[value]], rtol=1e-5)
    np.testing.assert_allclose(actual[1], [[gradient]], rtol=1e-5)
    wide = kl.clipped_is_k2(logp, logp - difference, logp_old=old, clip_low=0.9, clip_high=0.9)
    np.testing.assert_allclose(wide, [[ratio * difference]], rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in kl.KL if methods.needs("kl", n)])
def test_what_an_entry_needs_is_required(name):
    logp, logits = np.zeros((1, 2)), np.zeros((1, 2, 3))
    fields = {f: logits if f.startswith("logits") else logp for f in methods.needs("kl", name)}
    np.testing.assert_array_equal(kl.KL[name](logp, logp, **fields), np.zeros((1, 2)))
    for field in fields:
        with pytest.raises(TypeError, match=field):
            kl.KL[name](logp, logp, **{f: x for f, x in fields.items() if f != field})


# One token, all outcomes

LOGITS, REF = np.array([0.3, -0.7, 1.1, 0.0]), np.array([-0.2, 0.5, 0.4, -1.0])
OLD = np.array([0.9, -0.1, 0.2, 0.4])


def exact(logits, ref_logits):
    """KL(softmax(logits) || softmax(ref_logits))."""
    logp, logp_ref = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    return jnp.sum(jnp.exp(logp) * (logp - logp_ref))


def estimate(logits, name, sampler):
    """Expectation over the samples of `sampler`, whose probabilities carry no gradient."""
    logp, ref, old = (jax.nn.log_softmax(x)[None, :] for x in (logits, REF, sampler))
    p_old = jax.lax.stop_gradient(jnp.exp(old))
    return jnp.sum(p_old * entry(name, jax.lax.stop_gradient(old))(logp, ref))


@pytest.mark.all
@pytest.mark.parametrize("name", SAMPLED)
def test_expectations_on_policy(name):
    has_value = name in ("k1", "k3", "k1+", "k3+", "is_k3", "clipped_is_k2")
    with jax.enable_x64(True):
        reverse, forward = jitted.grad(exact)(LOGITS, REF), jitted.grad(exact, 1)(REF, LOGITS)
        gradients = {"k1": np.zeros(4), "k3": forward, "clipped_is_k3": forward}
        value, gradient = jitted.value_and_grad(estimate)(LOGITS, name, LOGITS)
        assert has_value == bool(np.isclose(value, exact(LOGITS, REF), rtol=1e-12))
        if name != "abs":
            expected = gradients.get(name, reverse)
            np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-12)
        assert np.abs(reverse - forward).max() > 0.02


@pytest.mark.parametrize("name", SAMPLED)
def test_only_the_is_forms_are_unbiased_on_samples_of_another_policy(name):
    with jax.enable_x64(True):
        if name == "clipped_is_k2":  # OLD is outside the default band
            wide = {"clip_low": 1.0, "clip_high": 10.0}

            def estimator(logits):
                logp, ref, old = (jax.nn.log_softmax(x)[None, :] for x in (logits, REF, OLD))
                return jnp.sum(jnp.exp(old) * kl.clipped_is_k2(logp, ref, logp_old=old, **wide))

            value, gradient = jitted.value_and_grad(estimator)(LOGITS)
        else:
            value, gradient = jitted.value_and_grad(estimate)(LOGITS, name, OLD)
        is_exact = np.isclose(value, exact(LOGITS, REF), rtol=1e-10)
        is_exact &= np.allclose(gradient, jitted.grad(exact)(LOGITS, REF), rtol=1e-10)
        assert is_exact == (name in ("is_k3", "clipped_is_k2"))


def test_exact_forms_by_hand_and_by_their_gradients():
    logits, ref = (np.asarray(x, np.float32)[None, None, :] for x in (LOGITS, REF))
    p, q = (np.exp(x) / np.exp(x).sum() for x in (LOGITS, REF))
    dummy, z = np.zeros((1, 1)), np.log(p / q)
    reverse = kl.KL["exact_reverse"](dummy, dummy, logits=logits, logits_ref=ref)
    np.testing.assert_allclose(reverse, [[np.sum(p * z)]], rtol=1e-5)
    forward = kl.KL["exact_forward"](dummy, dummy, logits=logits, logits_ref=ref)
    np.testing.assert_allclose(forward, [[-np.sum(q * z)]], rtol=1e-5)
    for name, expected in (("exact_reverse", p * (z - np.sum(p * z))), ("exact_forward", p - q)):

        def total(logits, ref, name=name):
            return jnp.sum(kl.KL[name](dummy, dummy, logits=logits, logits_ref=ref))

        gradient, to_reference = jitted.grad(total, argnums=(0, 1))(logits, ref)
        np.testing.assert_allclose(gradient[0, 0], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(to_reference, np.zeros((1, 1, 4)))


@pytest.mark.all
@pytest.mark.parametrize("name", ["exact_reverse", "exact_forward"])
def test_exact_forms_of_a_kept_set(name):
    """Tokens that neither policy can draw change nothing; one that only the first can is inf."""
    short = np.array([[[0.3, -0.7]]]), np.array([[[0.1, 0.4]]])
    cut = (jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=-np.inf) for x in short)
    dummy = np.zeros((1, 1))

    def total(logits, ref):
        return jnp.sum(kl.KL[name](dummy, dummy, logits=logits, logits_ref=ref))

    expected, gradient = jitted.value_and_grad(total)(*short)
    value, padded = jitted.value_and_grad(total)(*cut)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(padded[..., :2], gradient, rtol=1e-6)
    assert padded[0, 0, 2] == 0.0
    one = np.array([[[0.0, -np.inf]]])
    both = np.array([[[0.0, 0.0]]])
    arguments = (both, one) if name == "exact_reverse" else (one, both)
    assert total(*arguments) == np.inf
    np.testing.assert_allclose(total(*arguments[::-1]), np.log(2.0), rtol=1e-6)


# Two tokens, all sequences: where the KL is placed decides which gradient comes out


def test_penalized_rewards_by_hand():
    mask = np.array([[1, 1, 0], [0, 1, 1]])
    kl_bt = np.array([[0.5, -0.25, NAN], [NAN, 1.0, 2.0]])
    expected = [[-0.05, 2.025, 0], [0, -0.1, 2.8]]
    actual = kl.penalized_rewards(np.array([2.0, 3.0]), mask, kl_bt, 0.1)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    per_token = np.array([[0.0, 2.0, NAN], [NAN, 0.0, 3.0]])
    np.testing.assert_allclose(
        kl.penalized_rewards(per_token, mask, kl_bt, 0.1), expected, rtol=1e-6
    )
    gradient = jitted.grad(lambda x: jnp.sum(kl.penalized_rewards(per_token, mask, x, 0.1)))(kl_bt)
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_sequence_kl_of_dense_and_of_packed_rows():
    # Means 2 and 5 of the two sequences with tokens.
    kl_bt = np.array([[1.0, 3.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(kl.sequence_kl(kl_bt, mask), 3.5)
    packed = kl.sequence_kl(
        np.array([[1.0, NAN, 3.0, 5.0]]), np.array([[1, 0, 1, 1]]), np.array([[1, 1, 1, 2]])
    )
    np.testing.assert_allclose(packed, 3.5)
    assert kl.sequence_kl(kl_bt, np.zeros((3, 3))) == 0.0


def test_clipped_is_k3_has_the_gradient_of_the_forward_kl_inside_the_band():
    old, ref = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.3, 0.5])

    def expected(logits, low, high):  # over all samples of the old policy
        logp = jax.nn.log_softmax(logits)[None]
        value = kl.clipped_is_k3(logp, ref[None], logp_old=old[None], clip_low=low, clip_high=high)
        return jnp.sum(jnp.exp(old) * value[0])

    logits = np.array([0.3, -0.2, 0.1])
    p = np.exp(logits) / np.exp(logits).sum()
    forward = p - np.exp(ref)  # of KL(ref || softmax)
    np.testing.assert_allclose(jax.grad(expected)(logits, 1.0, 9.0), forward, rtol=1e-4, atol=1e-6)
    # Two tokens are outside of the band on the side that the KL pushes to: their gradient is 0.
    r = p / np.exp(old)
    coefficient = (1 - np.exp(ref) / p) * np.exp(old) * r
    moved = ((r < 0.95) & (coefficient > 0)) | ((r > 1.05) & (coefficient < 0))
    kept = np.where(moved, 0.0, coefficient)
    np.testing.assert_allclose(
        jax.grad(expected)(logits, 0.05, 0.05), kept - p * kept.sum(), rtol=1e-4, atol=1e-6)
    assert 0 < moved.sum() < 3
