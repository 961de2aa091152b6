"""Flips of routes and the load of experts, by hand and as Python sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.diagnostics import routes
from tests import jitted
from tests import compilation

routes = jitted.Module(routes)

overlap = routes.overlap
flip_metrics = routes.flip_metrics
flip_grid = routes.flip_grid
gap_metrics = routes.gap_metrics


def assert_metrics(metrics, expected, prefix):
    assert set(metrics) == {prefix + name for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[prefix + name], value, rtol=1e-6, err_msg=name)


# Tokens x layers, two of eight experts each; the order does not count. Token 0 differs in one expert
# of layer 1, token 1 nowhere, token 2 in both experts of layer 0; token 3 is padding.
OLD = np.array([[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]]])
BEHAV = np.array([[[[1, 0], [2, 4]], [[4, 5], [7, 6]], [[2, 3], [2, 3]], [[6, 7], [6, 7]]]])
MASK = np.array([[1, 1, 1, 0]])
SHARED = np.array([[[2, 1], [2, 2], [0, 2], [0, 0]]], jnp.uint8)


def test_overlap():
    assert overlap(OLD, BEHAV).dtype == jnp.uint8
    np.testing.assert_array_equal(overlap(OLD, BEHAV), SHARED)
    np.testing.assert_array_equal(overlap(OLD, OLD[..., ::-1]), np.full((1, 4, 2), 2))


def test_flips():
    metrics = flip_metrics(SHARED, MASK, num_chosen=2, num_experts=8)
    expected = {
        "expert": 3 / 12,  # choices: 3 tokens x 2 layers x 2
        "delta": 6 / 48,  # 2 + 4 of 3 x 2 x 8 experts are chosen on one side only
        "router": 2 / 6,
        "token": 2 / 3,
        "layer_0": 1 / 3,
        "layer_1": 1 / 3,
        "position_0": 1 / 2,  # token 0: one of two routers
        "position_1": 0.0,
        "position_2": 1 / 2,  # token 2; token 3 does not count
    }
    assert_metrics(metrics, expected, "mismatch/route_flip_")
    same = flip_metrics(np.full((1, 4, 2), 2), MASK, num_chosen=2, num_experts=8)
    assert_metrics(same, dict.fromkeys(expected, 0.0), "mismatch/route_flip_")


def test_the_grid():
    metrics = flip_grid(SHARED, MASK, num_chosen=2)
    expected = {f"layer_{layer}_position_{at}": 0.0 for layer in (0, 1) for at in (0, 1, 2)}
    expected |= {"layer_1_position_0": 1.0, "layer_0_position_2": 1.0}
    assert_metrics(metrics, expected, "mismatch/route_flip_")


def test_positions_of_packed_rows_begin_with_each_sequence():
    """Two sequences in a row: token 0 of the second flips, at position 0."""
    shared, seg = np.array([[[1], [1], [1], [0], [1]]]), np.array([[1, 1, 1, 2, 2]])
    metrics = flip_metrics(shared, seg > 0, seg, num_chosen=1, num_experts=4)
    found = {name.rpartition("_")[2]: float(x) for name, x in metrics.items() if "position" in name}
    assert found == {"0": 0.5, "1": 0.0, "2": 0.0, "4": 0.0}


def test_positions_count_from_the_first_token_of_the_response():
    """Token 0 has no route, and token 2 flips."""
    shared, mask = np.array([[[1], [1], [0]]]), np.array([[False, True, True]])
    response = np.ones((1, 3), bool)
    metrics = flip_metrics(shared, mask, num_chosen=1, num_experts=4, response=response)
    found = {name.rpartition("_")[2]: float(x) for name, x in metrics.items() if "position" in name}
    assert found == {"0": 0.0, "1": 0.0, "2": 1.0}


def test_flips_of_random_routes():
    rng = np.random.default_rng(0)
    old, behav = (
        np.stack([rng.permutation(6)[:3] for _ in range(4 * 5 * 2)]).reshape(4, 5, 2, 3)
        for _ in range(2)
    )
    mask = rng.random((4, 5)) < 0.6
    shared = overlap(old.astype(np.uint8), behav.astype(np.uint8))
    metrics = flip_metrics(shared, mask, num_chosen=3, num_experts=6)
    flips = [
        [len(set(a) ^ set(b)) for a, b in zip(*layers, strict=True)]
        for layers in zip(old[mask], behav[mask], strict=True)
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
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"mismatch/route_flip_{name}"], value, rtol=1e-6)


def test_the_gap_by_flips():
    """Tokens 0 and 2 flip. Ratios 8, 1.25, 0.25: IcePop keeps 0.5 to 5."""
    behav = np.array([[-3.0, -2.0, -1.0, np.nan]])
    old = behav + np.log(np.array([[8.0, 1.25, 0.25, 1.0]]))
    metrics = gap_metrics(SHARED, old, behav, MASK, num_chosen=2)
    k3 = lambda rho: rho - 1 - np.log(rho)
    expected = {
        "flipped/log_ratio_abs_mean": (np.log(8) + np.log(4)) / 2,
        "flipped/k3_kl": (k3(8) + k3(0.25)) / 2,
        "flipped/icepop_dropped": 1.0,
        "unflipped/log_ratio_abs_mean": np.log(1.25),
        "unflipped/k3_kl": k3(1.25),
        "unflipped/icepop_dropped": 0.0,
    }
    assert set(metrics) == {f"mismatch/route_flip_{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(
            metrics[f"mismatch/route_flip_{name}"], value, rtol=1e-5, err_msg=name
        )


def test_load():
    # Layer 0: experts 0 and 1 take tokens 0 and 2, experts 4 and 5 token 1. Padding does not count.
    load = routes.expert_load(OLD, MASK, num_experts=8)
    np.testing.assert_array_equal(load, [[2, 2, 0, 0, 1, 1, 0, 0], [0, 0, 2, 2, 0, 0, 1, 1]])
    even = np.full((1, 8), 3.0)
    metrics = routes.load_metrics(np.concatenate([load[:1], even]), np.log(np.array([4.0, 2.0])))
    half = -(2 / 3 * np.log(1 / 3) + 1 / 3 * np.log(1 / 6)) / np.log(8)
    expected = {
        "dead_experts": 4,
        "load_max_over_mean/mean": (2 / 0.75 + 1) / 2, "load_max_over_mean/worst": 2 / 0.75,
        # The variance is (4 + 4 + 1 + 1) / 8 - 0.75^2 = 0.6875.
        "load_cv/mean": np.sqrt(0.6875) / 0.75 / 2, "load_cv/worst": np.sqrt(0.6875) / 0.75,
        "load_entropy/mean": (half + 1) / 2, "load_entropy/worst": half,
        "router_entropy/mean": 1.5 / 3, "router_entropy/worst": 1 / 3,  # of log 8 = 3 log 2
    }
    assert_metrics(metrics, expected, "moe/")


def test_the_entropy_of_a_router():
    """Scores of a token need not add up to 1: 3 and 1 are the distribution 3/4, 1/4."""
    probs = np.array([[[[3.0, 1.0, 0.0]], [[1.0, 1.0, 0.0]], [[np.nan] * 3]]])
    entropy = routes.router_entropy(probs, np.array([[1, 1, 0]]))
    of_first = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    np.testing.assert_allclose(entropy, [(of_first + np.log(2)) / 2], rtol=1e-6)


@pytest.mark.parametrize("mask", [np.zeros((1, 4)), np.zeros((1, 4), bool)])
def test_without_a_valid_token_every_metric_is_zero(mask):
    logp = np.full((1, 4), np.nan)
    metrics = flip_metrics(SHARED, mask, num_chosen=2, num_experts=8)
    metrics |= flip_grid(SHARED, mask, num_chosen=2)
    metrics |= gap_metrics(SHARED, logp, logp, mask, num_chosen=2)
    load = routes.expert_load(OLD, mask, num_experts=8)
    metrics |= routes.load_metrics(load, routes.router_entropy(OLD, mask))
    for name, value in metrics.items():
        assert value == 0.0, name


@pytest.mark.parametrize("num_chosen", [2, 3, 7])
def test_equal_sets_do_not_flip_at_all(num_chosen):
    """An optimised program multiplies by a rounded 1 / 3: -3e-8, which prints as -0.0000."""
    same, mask = np.full((1, 64, 3), num_chosen, jnp.uint8), np.ones((1, 64), bool)
    measure = lambda same: routes.flip_metrics(same, mask, num_chosen=num_chosen, num_experts=16)
    with compilation.optimized():
        found = jax.jit(measure)(same)
    assert float(found["mismatch/route_flip_expert"]) == 0.0
