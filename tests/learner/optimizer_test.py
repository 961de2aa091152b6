"""Schedules, decay and clipping against numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import ml_collections
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_tis import sharding
from jaxrl_tis.learner import optimizer
from jaxrl_tis.learner.optimizer import (
    PERTURBATION, loss_scale, optimizer_shardings, schedule, update_metrics,
)

pytestmark = pytest.mark.by_jax("optax has a version for each jax")


def jitted_transformation(make):
    """`make` of an optimizer whose `init` and `update` are one program each."""
    return lambda *of, **fields: optax.GradientTransformation(*map(jax.jit, make(*of, **fields)))


align, make_optimizer, perturb, scale_loss = map(
    jitted_transformation,
    (optimizer.align, optimizer.make_optimizer, optimizer.perturb, optimizer.scale_loss),
)


def fields(**changes):
    defaults = dict(lr=0.1, schedule="constant", warmup=0, b1=0.9, b2=0.999, eps=1e-8,
                    weight_decay=0.0, clip_norm=1e9, offload=False)
    return ml_collections.ConfigDict(defaults | changes)


@pytest.mark.all
@pytest.mark.parametrize("name, warmup, expected", [
    # (update, rate) of 10 updates at lr 0.1; updates are counted from 0.
    ("constant", 0, {0: 0.1, 9: 0.1}),
    ("constant", 4, {0: 0.0, 1: 0.025, 3: 0.075, 4: 0.1, 9: 0.1}),
    ("linear", 0, {0: 0.1, 5: 0.05, 10: 0.0}),
    ("linear", 2, {0: 0.0, 1: 0.05, 2: 0.1, 6: 0.05, 10: 0.0}),  # 8 updates after the ramp
    ("cosine", 0, {0: 0.1, 5: 0.05, 10: 0.0}),
    # A quarter of the way down: (1 + cos(pi / 4)) / 2 = 0.8535534
    ("cosine", 2, {1: 0.05, 2: 0.1, 4: 0.08535534, 6: 0.05, 10: 0.0}),
])
def test_schedule(name, warmup, expected):
    rate = schedule(fields(schedule=name, warmup=warmup), total_updates=10)
    for update, value in expected.items():
        assert float(rate(update)) == pytest.approx(value, abs=1e-7), update


def test_the_rate_of_the_last_update_is_told():
    """Of 6 updates at 0.1, two of which are the ramp; one that is skipped in between has none."""
    tx = scale_loss(make_optimizer(fields(schedule="linear", warmup=2), 6))
    params = {"a": np.zeros((1, 2))}
    state, told = tx.init(params), []
    for gradient in (1.0, 1.0, 1.0, np.inf, 1.0, 1.0, 1.0):
        _, state = tx.update({"a": np.full((1, 2), gradient)}, state, params)
        told.append(float(update_metrics(state, "critic")["critic/lr"]))
    np.testing.assert_allclose(told, [0, 0.05, 0.1, 0.1, 0.075, 0.05, 0.025], rtol=1e-6)
    assert update_metrics(optax.adam(0.1).init(params), "critic") == {}


def test_a_ramp_longer_than_the_run_is_legal():
    rate = schedule(fields(schedule="cosine", warmup=10), total_updates=4)
    assert float(rate(3)) == pytest.approx(0.03)


PARAMS = {
    "embed": np.full((2, 2), 2.0), "final_norm": np.full((2,), 2.0),
    "layers": {"q": np.full((1, 2, 2), 2.0), "q_bias": np.full((1, 2), 2.0),
               "attn_norm": np.full((1, 2), 2.0), "q_norm": np.full((1, 2), 2.0)},
}


@pytest.mark.all
@pytest.mark.parametrize("changes", [{}, {"schedule": "cosine", "warmup": 2}, {"schedule": "linear"}])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_at_a_rate_of_0_the_parameters_stay_bit_by_bit_under_decay_too(changes, dtype):
    tx = make_optimizer(fields(lr=0.0, weight_decay=0.5, **changes), 10)
    params = jax.tree.map(lambda x: (x / 3).astype(dtype), PARAMS)
    grads, state = jax.tree.map(lambda x: x - 2.5, params), tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for now, start in zip(jax.tree.leaves(params), jax.tree.leaves(PARAMS), strict=True):
        assert np.asarray(now).tobytes() == np.asarray((start / 3).astype(dtype)).tobytes()
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    assert moments and all(jnp.isfinite(x).all() and jnp.any(x != 0) for x in moments)


def test_decay_reaches_matrices_only():
    tx = make_optimizer(fields(weight_decay=0.5), 10)
    updates, _ = tx.update(jax.tree.map(np.zeros_like, PARAMS), tx.init(PARAMS), PARAMS)
    # Without a gradient AdamW moves by -lr * weight_decay * w = -0.1 * 0.5 * 2.
    for name in ("embed", "layers/q"):
        assert _leaf(updates, name) == pytest.approx(-0.1)
    for name in ("final_norm", "layers/q_bias", "layers/attn_norm", "layers/q_norm"):
        assert _leaf(updates, name) == 0.0, name
    # A sink is one logit of each head, of all layers [L,H].
    assert optimizer._is_matrix({"layers": {"sinks": 0, "q": 0}}) == {"layers": {"sinks": False, "q": True}}


def _leaf(tree, name):
    for key in name.split("/"):
        tree = tree[key]
    return float(tree.ravel()[0])


def test_the_global_norm_is_clipped_before_adam():
    # The gradient (3, 4) has norm 5; clipped to 1 it is (0.6, 0.8). With eps = 1 the first step of
    # Adam is -lr g / (|g| + 1): 0.1 * 0.6 / 1.6 = 0.0375 and 0.1 * 0.8 / 1.8 = 0.0444444.
    tx = make_optimizer(fields(clip_norm=1.0, eps=1.0), 10)
    params = {"a": np.zeros((1, 1)), "b": np.zeros((1, 1))}
    grads = {"a": np.full((1, 1), 3.0), "b": np.full((1, 1), 4.0)}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert _leaf(updates, "a") == pytest.approx(-0.0375, abs=1e-6)
    assert _leaf(updates, "b") == pytest.approx(-0.0444444, abs=1e-6)


def test_a_second_step_by_hand():
    # b1 = 0.5, b2 = 0.75, g = 1 then 3. m = 0.5 * 0.5 + 0.5 * 3 = 1.75, over 1 - 0.25: 2.3333333
    # v = 0.75 * 0.25 + 0.25 * 9 = 2.4375, over 1 - 0.5625: 5.5714286; the step is lr m / sqrt(v).
    tx = make_optimizer(fields(b1=0.5, b2=0.75), 10)
    params = {"a": np.zeros((1, 1))}
    _, state = tx.update({"a": np.ones((1, 1))}, tx.init(params), params)
    updates, _ = tx.update({"a": np.full((1, 1), 3.0)}, state, params)
    assert _leaf(updates, "a") == pytest.approx(-0.1 * 2.3333333 / 5.5714286**0.5, rel=1e-5)


def test_state_lies_like_the_parameters():
    mesh = sharding.make_mesh((1, 4, 2))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = {"a": jax.ShapeDtypeStruct((8, 2), jnp.bfloat16),
              "final_norm": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
    tx = make_optimizer(fields(), 10)
    where = {"a": rows, "final_norm": everywhere}
    placed = optimizer_shardings(tx, params, where, everywhere)
    [adam] = [s for s in jax.tree.leaves(placed, is_leaf=_is_adam) if _is_adam(s)]
    assert adam.mu == adam.nu == {"a": rows, "final_norm": everywhere}
    assert adam.count == everywhere
    state = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(placed) == jax.tree.structure(state)


def _is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def test_moments_are_float32_for_bfloat16_parameters():
    tx = make_optimizer(fields(), 10)
    params = {"a": jnp.zeros((2, 2), jnp.bfloat16)}
    updates, state = tx.update({"a": jnp.ones((2, 2), jnp.bfloat16)}, tx.init(params), params)
    [adam] = [s for s in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(s)]
    # b2 = 0.999 and g = 1: nu = 0.001, which bfloat16 would round to 0.00099945.
    assert adam.mu["a"].dtype == adam.nu["a"].dtype == updates["a"].dtype == jnp.float32
    assert float(adam.nu["a"][0, 0]) == pytest.approx(0.001, rel=1e-6)
    assert optax.apply_updates(params, updates)["a"].dtype == jnp.bfloat16


@pytest.mark.all
def test_an_aligned_step_that_is_skipped_leaves_parameters_and_moments():
    plain = make_optimizer(fields(clip_norm=10.0), 10)
    tx = align(plain, gac_low=0.1, gac_high=0.9)
    params = {"a": np.zeros((1, 2))}
    first, second, third = ({"a": np.array([g])} for g in ([1.0, 0.0], [2.0, 0.1], [0.0, 1.0]))
    # Nothing precedes the first gradient; the second has the cosine 2 / sqrt(4.01) = 0.9988 with
    # it and is skipped; the third has 0.1 / sqrt(4.01) = 0.0499 with the second and passes.
    expected, plain_state = plain.update(first, plain.init(params), params)
    updates, state = tx.update(first, tx.init(params), params)
    np.testing.assert_array_equal(updates["a"], expected["a"])
    found = update_metrics(state, "actor")
    assert found == {"actor/lr": np.float32(0.1), "gac/cosine": 0.0, "gac/is_skipped": 0.0}
    updates, state = tx.update(second, state, params)
    np.testing.assert_array_equal(updates["a"], [[0.0, 0.0]])
    jax.tree.map(np.testing.assert_array_equal, state.inner, plain_state)
    metrics = update_metrics(state, "actor")
    assert metrics["gac/cosine"] == pytest.approx(0.99875, abs=1e-4)
    assert metrics["gac/is_skipped"] == 1
    expected, _ = plain.update(third, plain_state, params)
    updates, state = tx.update(third, state, params)
    np.testing.assert_allclose(updates["a"], expected["a"], rtol=1e-6)
    assert update_metrics(state, "actor")["gac/cosine"] == pytest.approx(0.0499, abs=1e-3)
    assert update_metrics(plain_state, "actor") == {"actor/lr": np.float32(0.1)}


def test_a_loss_scale_halves_at_an_overflow_and_doubles_after_many_finite_gradients():
    plain = make_optimizer(fields(), 1000)
    tx, params = scale_loss(plain), {"a": np.ones((1, 2))}
    state = tx.init(params)
    assert loss_scale(state) == 65536 and loss_scale(plain.init(params)) is None
    fine, bad = {"a": np.array([[1.0, -2.0]])}, {"a": np.array([[1.0, np.inf]])}
    expected, plain_state = plain.update(fine, plain.init(params), params)
    updates, state = tx.update(fine, state, params)
    np.testing.assert_array_equal(updates["a"], expected["a"])
    lr = {"actor/lr": np.float32(0.1)}
    assert update_metrics(state, "actor") == lr | {"actor/loss_scale": 65536, "actor/is_skipped": 0}
    for count in range(1, 18):
        updates, state = tx.update(bad, state, params)
        np.testing.assert_array_equal(updates["a"], [[0.0, 0.0]])
        jax.tree.map(np.testing.assert_array_equal, state.inner, plain_state)
        found = update_metrics(state, "actor")
        scale = max(2.0 ** (16 - count), 1)
        assert found == lr | {"actor/loss_scale": scale, "actor/is_skipped": 1}
    for count in range(1, 801):
        _, state = tx.update(fine, state, params)
        assert loss_scale(state) == {400: 2, 800: 4}.get(count, 1 if count < 400 else 2)


def test_the_previous_gradient_lies_like_the_parameters():
    mesh = sharding.make_mesh((1, 4, 2))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    tx = align(make_optimizer(fields(), 10), gac_low=0.1, gac_high=0.9)
    params = {"a": jax.ShapeDtypeStruct((8, 2), jnp.float32)}
    placed = optimizer_shardings(tx, params, {"a": rows}, everywhere)
    assert placed.alignment.previous == {"a": rows} and placed.cosine == everywhere


def test_sigmas_have_an_adam_of_their_own():
    """Its first step is its learning rate, against the gradient; the others never see theirs."""
    tx = perturb(optax.sgd(0.5), 2, perturb_std=0.02, perturb_lr=0.01)
    params = {"w": np.ones(3)}
    grads = {"w": np.full(3, 2.0), PERTURBATION: np.array([4.0, -0.1])}
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -1.0)
    assert updates.keys() == {"w"}
    np.testing.assert_allclose(state.log_std, np.log(0.02) + np.array([-0.01, 0.01]), rtol=1e-6)
    mean = (np.exp(-0.01) + np.exp(0.01)) / 2 * 0.02
    metrics = update_metrics(state, "actor")
    assert float(metrics["alp/std_mean"]) == pytest.approx(mean)
    assert float(metrics["alp/std_max"]) == pytest.approx(0.02 * np.exp(0.01))
