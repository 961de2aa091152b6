"""What must hold for every weight, mask, objective, KL and advantage in the tables.

A method that is added to a table is tested here without another line; what it does differently on
purpose is in the tables of exceptions below.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import loss as losses
from jaxrl_tis.estimators import methods, reduce
from tests.estimators import samples

PPO = ("ppo", {"clip_low": 0.2, "clip_high": 0.28})
KINDS = ("weight", "mask", "objective", "kl")
ENTRIES = [(kind, name) for kind in KINDS for name in methods.TABLES[kind][0]]
# Objectives whose on-policy gradient is not -A: the factor, by the formula of each.
ON_POLICY_FACTOR = {
    "oapl": 2 * 0.5 * np.array(samples.make()[1]["mask"]).sum(1, keepdims=True),  # 2 beta n
    "fusion_shaped": 0.1 / 1.1**2,  # gamma / (1 + gamma)^2
}
# Not token by token: two entropy groups weigh alike; tokens are dropped at random or by entropy.
OTHER_ON_POLICY = ("espo", "clip_cov", "top_entropy")
# Methods that look at the whole batch, so that micro-batches do not add up.
COUPLED = ("clip_cov", "kl_cov", "m2po", "top_entropy", "quatro", "espo")
# A method whose random choice depends on the layout of the batch.
RANDOM = ("clip_cov",)


def loss_and_gradient(logp, batch, kind, name, aggregation="seq-mean-token-mean", **counts):
    """The loss with one method at work, and its gradient with respect to logp."""
    chosen = samples.method(kind, name)
    parts = {
        "weight": {"objective": PPO, "weight": chosen},
        "mask": {"objective": PPO, "masks": (chosen,), "counts_rejected": True},
        "objective": {"objective": chosen},
        "kl": {"objective": PPO, "kl": chosen, "kl_coeff": 0.1},
    }[kind]

    def total(logp):
        return losses.policy_loss(
            logp, batch, aggregation=aggregation, scale=samples.WIDTH, **parts, **counts
        )[0]

    return jax.value_and_grad(total)(logp)


@functools.cache
def expected(kind, name, is_on_policy=False):
    """Compiled, where every other call of this file runs operation by operation."""
    compute = jax.jit(functools.partial(loss_and_gradient, kind=kind, name=name))
    return jax.device_get(compute(*samples.make(is_on_policy)))


def assert_same(actual, wanted, **tolerances):
    np.testing.assert_allclose(actual[0], wanted[0], **tolerances)
    np.testing.assert_allclose(actual[1], wanted[1], **tolerances)


@pytest.mark.parametrize(
    ("kind", "name"), [e for e in ENTRIES if e[0] != "kl" and e[1] not in OTHER_ON_POLICY]
)
def test_on_policy_gradient_is_minus_the_advantage(kind, name):
    _, batch = samples.make(is_on_policy=True)
    mask = np.asarray(batch["mask"])
    count = mask.sum(axis=1, keepdims=True) * len(mask)
    factor = ON_POLICY_FACTOR[name] if name in ON_POLICY_FACTOR else 1.0
    wanted = np.where(mask, -factor * np.asarray(batch["adv"]) / count, 0.0)
    if kind == "mask" and name == "staleness":
        is_stale = (mask & (np.asarray(batch["version"]) < 3)).any(axis=1, keepdims=True)
        wanted = np.where(is_stale, 0.0, wanted)
    np.testing.assert_allclose(expected(kind, name, True)[1], wanted, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_padding_never_leaks(kind, name):
    logp, batch = samples.make()
    mask = batch["mask"]
    wanted = expected(kind, name)
    assert np.all(wanted[1][~np.asarray(mask)] == 0.0) and np.all(np.isfinite(wanted[1]))
    for value in (100.0, -100.0, jnp.nan, jnp.inf, -jnp.inf):
        poisoned = batch | {
            f: samples.where(mask, batch[f], value) for f in samples.token_fields(batch)
        }
        poisoned |= {f: samples.where(mask, batch[f], 99) for f in samples.INTEGERS}
        actual = loss_and_gradient(samples.where(mask, logp, value), poisoned, kind, name)
        assert_same(actual, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "name"), [e for e in ENTRIES if e[0] != "kl"])
def test_only_logp_carries_a_gradient(kind, name):
    logp, batch = samples.make()
    names = [f for f in samples.token_fields(batch)]

    def total(fields):
        return loss_and_gradient(logp, batch | fields, kind, name)[0]

    gradients = jax.grad(total)({f: batch[f] for f in names})
    for field, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape), err_msg=field)


@pytest.mark.parametrize(("kind", "name"), [e for e in ENTRIES if e[1] not in RANDOM])
def test_packed_rows_equal_unpacked_rows(kind, name):
    wanted = expected(kind, name)
    actual = loss_and_gradient(*samples.packed(*samples.make()), kind, name)
    assert_same(actual, (wanted[0], samples.pack(wanted[1], 0.0)), rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize(("kind", "name"), [e for e in ENTRIES if e[1] not in RANDOM])
def test_a_fully_masked_row_changes_nothing(kind, name):
    logp, batch = samples.make()

    def longer(x):
        if x.ndim < 2:
            return x
        fill = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return jnp.concatenate([x, jnp.full((1, *x.shape[1:]), fill, x.dtype)])

    wanted = expected(kind, name)
    actual = loss_and_gradient(
        longer(logp), {f: longer(x) for f, x in batch.items()}, kind, name
    )
    assert_same((actual[0], actual[1][:-1]), wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(actual[1][-1], np.zeros(samples.WIDTH))
    nothing = batch | {"mask": jnp.zeros_like(batch["mask"])}
    actual = loss_and_gradient(logp, nothing, kind, name)
    assert actual[0] == 0.0
    np.testing.assert_array_equal(actual[1], np.zeros(logp.shape))


@pytest.mark.parametrize(("kind", "name"), [e for e in ENTRIES if e[1] not in COUPLED])
def test_micro_batches_add_up(kind, name):
    logp, batch = samples.make()
    wanted = expected(kind, name)
    parts = []
    for rows in (slice(0, 3), slice(3, 6)):
        micro = {f: x[rows] if jnp.ndim(x) > 1 else x for f, x in batch.items()}
        parts.append(loss_and_gradient(logp[rows], micro, kind, name, num_seqs=6))
    assert_same(
        (sum(p[0] for p in parts), jnp.concatenate([p[1] for p in parts])), wanted,
        rtol=2e-5, atol=1e-7,
    )


@pytest.mark.parametrize("aggregation", reduce.MODES)
@pytest.mark.parametrize("name", ["token_tis", "seq_tis"])
def test_micro_batches_add_up_in_every_aggregation(aggregation, name):
    logp, batch = samples.make()
    wanted = loss_and_gradient(logp, batch, "weight", name, aggregation)
    counts = {"num_tokens": jnp.sum(batch["mask"]), "num_seqs": len(samples.LENGTHS)}
    parts = []
    for rows in (slice(0, 3), slice(3, 6)):
        micro = {f: x[rows] if jnp.ndim(x) > 1 else x for f, x in batch.items()}
        parts.append(loss_and_gradient(logp[rows], micro, "weight", name, aggregation, **counts))
    assert_same(
        (sum(p[0] for p in parts), jnp.concatenate([p[1] for p in parts])), wanted,
        rtol=1e-5, atol=1e-7,
    )


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_masks_of_any_type(kind, name, dtype):
    logp, batch = samples.make()
    other = batch | {"mask": batch["mask"].astype(dtype)}
    actual = loss_and_gradient(logp, other, kind, name)
    assert_same(actual, expected(kind, name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_extreme_log_ratios_stay_finite(kind, name):
    """In the direction where it is bounded, and where it is clamped: no NaN and no infinity."""
    logp, batch = samples.make()
    extreme = jnp.tile(jnp.array([[-60.0, 60.0, 25.0, -25.0, 20.0]]), (len(logp), 1))
    batch = batch | {
        "logp_behav": batch["logp_old"] - extreme, "logp_ref": batch["logp_old"] + extreme,
        "logp_prox": batch["logp_old"] - 0.5 * extreme,
    }
    value, gradient = loss_and_gradient(batch["logp_old"] + extreme[:, ::-1], batch, kind, name)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_bfloat16_log_probs_are_computed_in_float32(kind, name):
    logp, batch = samples.make()
    fields = samples.token_fields(batch)
    low = batch | {f: batch[f].astype(jnp.bfloat16) for f in fields}
    high = batch | {f: low[f].astype(jnp.float32) for f in fields}
    logp = logp.astype(jnp.bfloat16)
    value, gradient = loss_and_gradient(logp, low, kind, name)
    wanted, _ = loss_and_gradient(logp.astype(jnp.float32), high, kind, name)
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, wanted, rtol=1e-6)


# Advantages


def advantage_inputs():
    """Rewards, mask, group and every field that an advantage can ask for; eight sequences."""
    rng = np.random.default_rng(2)
    mask = rng.random((8, 4)) < 0.8
    mask[:, 0] = True
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    uniform = lambda *shape: rng.uniform(0.2, 0.9, shape).astype(np.float32)
    inputs = {
        "rewards": normal(8), "mask": mask, "group": np.array([0, 0, 0, 0, 1, 1, 1, 1]),
        "values": normal(8, 4), "greedy_rewards": normal(8), "sum_pi_squared": uniform(8, 4),
        "logp_old": -uniform(8, 4), "logp_behav": -uniform(8, 4), "weights": uniform(8, 4),
        "grad_norms": uniform(8), "reward_components": normal(8, 2),
    }
    return inputs


def advantage(name, inputs):
    _, parameters = samples.method("advantage", name)
    needed = {f: inputs[f] for f in methods.needs("advantage", name)}
    function = methods.function("advantage", name)
    return function(inputs["rewards"], inputs["mask"], inputs["group"], **needed, **parameters)


ADVANTAGES = list(methods.TABLES["advantage"][0])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_permuting_samples_permutes_advantages(name):
    inputs = advantage_inputs()
    order = np.array([2, 0, 3, 1, 7, 6, 4, 5])
    before = advantage(name, inputs)
    after = advantage(name, {f: x[order] for f, x in inputs.items()})
    np.testing.assert_allclose(after, before[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_carry_no_gradient_and_ignore_padding(name):
    inputs = advantage_inputs()
    mask = inputs["mask"]
    compute = jax.jit(lambda fields: advantage(name, inputs | fields))
    floats = {f: x for f, x in inputs.items() if x.dtype == np.float32}
    adv = compute(floats)
    np.testing.assert_array_equal(np.where(mask, 0.0, adv), np.zeros((8, 4)))
    assert np.any(adv != 0.0) and np.all(np.isfinite(adv))
    for value in (100.0, np.nan):
        poisoned = {f: np.where(mask, x, value) if x.shape == mask.shape else x
                    for f, x in floats.items()}
        np.testing.assert_array_equal(compute(poisoned), adv)
    gradients = jax.grad(lambda fields: jnp.sum(compute(fields)))(floats)
    for gradient in gradients.values():
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
