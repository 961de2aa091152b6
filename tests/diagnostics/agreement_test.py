"""Agreement of discrete choices: experts, kept sets and tokens, by hand and as Python sets."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.diagnostics import agreement

route_metrics = jax.jit(agreement.route_metrics, static_argnames="num_experts")
kept_metrics = jax.jit(agreement.kept_metrics)


def assert_metrics(metrics, expected, prefix):
    assert set(metrics) == {prefix + name for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[prefix + name], value, rtol=1e-6, err_msg=name)


def test_route_flips():
    # Tokens x layers, two of eight experts each; the order does not count. Token 0 differs in one
    # expert of layer 1, token 1 nowhere, token 2 in both experts of layer 0; token 3 is padding.
    old = jnp.array([[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]]])
    behav = jnp.array([[[[1, 0], [2, 4]], [[4, 5], [7, 6]], [[2, 3], [2, 3]], [[6, 7], [6, 7]]]])
    metrics = route_metrics(old, behav, jnp.array([[1, 1, 1, 0]]), num_experts=8)
    expected = {
        "expert": 3 / 12,  # choices: 3 tokens x 2 layers x 2
        "delta": 6 / 48,  # 2 + 4 of 3 x 2 x 8 experts are chosen on one side only
        "router": 2 / 6,
        "token": 2 / 3,
        "layer_0": 1 / 3,
        "layer_1": 1 / 3,
    }
    assert_metrics(metrics, expected, "mismatch/route_flip_")
    same = route_metrics(old, old[..., ::-1], jnp.ones((1, 4)), num_experts=8)
    assert_metrics(same, dict.fromkeys(expected, 0.0), "mismatch/route_flip_")


def test_route_flips_of_random_routes():
    rng = np.random.default_rng(0)
    old, behav = (
        np.stack([rng.permutation(6)[:3] for _ in range(4 * 5 * 2)]).reshape(4, 5, 2, 3)
        for _ in range(2)
    )
    mask = rng.random((4, 5)) < 0.6
    metrics = route_metrics(old.astype(np.uint8), behav.astype(np.uint8), mask, num_experts=6)
    flips = [
        [len(set(a) ^ set(b)) for a, b in zip(*layers)] for layers in zip(old[mask], behav[mask])
    ]
    flips = np.array(flips)
    expected = {
        "expert": flips.mean() / 2 / 3,
        "delta": flips.mean() / 6,
        "router": (flips > 0).mean(),
        "token": (flips > 0).any(axis=1).mean(),
        "layer_0": (flips[:, 0] > 0).mean(),
        "layer_1": (flips[:, 1] > 0).mean(),
    }
    assert_metrics(metrics, expected, "mismatch/route_flip_")


# Kept ids of five tokens and padding: equal in another order; one of three in common; both without
# a filter; only the sampler filters; the learner drops the sampled token.
KEPT_OLD = jnp.array([[[3, 5, -1], [1, 2, -1], [-1] * 3, [-1] * 3, [0, 1, 2], [7, 8, 9]]])
KEPT_BEHAV = jnp.array([[[5, 3], [2, 4], [-1, -1], [6, 0], [4, 2], [1, 2]]])
TOKENS = jnp.array([[3, 2, 9, 6, 4, 0]])
MASK = jnp.array([[1, 1, 1, 1, 1, 0]])
EXPECTED = {
    "jaccard": (1 + 1 / 3 + 1 + 0 + 1 / 4) / 5,
    "identical": 2 / 5,
    "token_outside": 1 / 5,
}


def test_kept_sets_as_ids():
    metrics = kept_metrics(KEPT_OLD, KEPT_BEHAV, TOKENS, MASK)
    assert_metrics(metrics, EXPECTED, "mismatch/kept_")


def test_kept_sets_as_bits():
    def bits(ids):
        return np.any(np.array(ids)[..., None] == np.arange(10), axis=-2)

    metrics = kept_metrics(bits(KEPT_OLD), bits(KEPT_BEHAV), TOKENS, MASK)
    assert_metrics(metrics, EXPECTED, "mismatch/kept_")


def test_padding_and_the_type_of_the_mask_do_not_count():
    is_valid = np.array(MASK) > 0
    for dtype, fill in ((bool, -1), (np.int32, 0), (np.float32, 999)):
        kept = [np.where(is_valid[..., None], x, fill) for x in (KEPT_OLD, KEPT_BEHAV)]
        metrics = kept_metrics(*kept, np.where(is_valid, TOKENS, fill), is_valid.astype(dtype))
        assert_metrics(metrics, EXPECTED, "mismatch/kept_")


def test_without_a_valid_token_every_metric_is_zero():
    none = jnp.zeros_like(MASK)
    metrics = kept_metrics(KEPT_OLD, KEPT_BEHAV, TOKENS, none)
    routes = jnp.zeros((1, 6, 2, 1), int)
    metrics |= route_metrics(routes, routes + 1, none, num_experts=4)
    for name, value in metrics.items():
        assert value == 0.0, name
