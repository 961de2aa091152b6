"""What must hold for every weight, mask, objective, KL and advantage in the tables, on one batch.

A method that is added to a table is tested here without another line; what it does differently on
purpose is in the tables of exceptions below. `property_test` has what holds on any batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import ratios
from tests import jitted
from tests.estimators import samples
from tests.estimators.samples import ADVANTAGES, ENTRIES

ratios = jitted.Module(ratios)

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("one pass over every entry: jax.numpy's rules of types and gradients"),
]

LENGTHS = np.array(samples.make()[1]["mask"]).sum(1, keepdims=True)
# Objectives whose on-policy gradient is not -A: the factor, by the formula of each.
ON_POLICY_FACTOR = {
    "oapl": 2 * 1e-3 * LENGTHS,  # 2 beta n
    "seq_ppo": LENGTHS,  # the sequence's loss is on each of its n tokens
    "fusion_shaped": 0.1 / 1.1**2,  # gamma / (1 + gamma)^2
}
# Not token by token: two entropy groups weigh alike; tokens are dropped at random or by entropy.
OTHER_ON_POLICY = ("espo", "clip_cov", "top_entropy")


@functools.cache
def on_policy(kind):
    """{name: results} of a kind where all policies are the same, and the batch."""
    logp, batch = samples.make(is_on_policy=True)
    found = jax.device_get(samples.results(logp, batch | samples.counts(batch)))
    is_told = lambda entry: entry[0] == kind and entry[1] not in OTHER_ON_POLICY
    return {name: found[kind, name] for kind, name in filter(is_told, ENTRIES)}, batch


@pytest.mark.all
def test_on_policy_weights_are_1():
    weights, batch = on_policy("weight")
    for name, (w,) in weights.items():
        np.testing.assert_array_equal(w, batch["mask"], err_msg=name)


def test_on_policy_masks_keep_every_token():
    masks, batch = on_policy("mask")
    is_fresh = np.all(batch["version"] >= 3, where=batch["mask"], axis=1, keepdims=True)
    for name, (is_accepted,) in masks.items():
        wanted = batch["mask"] & is_fresh if name == "staleness" else batch["mask"]
        np.testing.assert_array_equal(is_accepted, wanted, err_msg=name)


def test_on_policy_gradient_is_minus_the_advantage():
    objectives, batch = on_policy("objective")
    for name, (_, gradient) in objectives.items():
        factor = ON_POLICY_FACTOR.get(name, 1.0)
        if name == "luspo":
            factor = np.sum(batch["mask"], axis=1, keepdims=True)
        wanted = np.where(batch["mask"], -factor * batch["adv"], 0.0)
        np.testing.assert_allclose(gradient, wanted, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.all
def test_a_stated_number_of_sequences_changes_nothing():
    """Packed rows of two sequences: ids alone, and the ids with a bound of three."""
    logp, batch = samples.make()
    seg = jnp.where(batch["mask"], np.array([[1, 1, 2, 2, 2]]), 0)
    run = lambda seg: jax.device_get(
        samples.results(logp, batch | samples.counts(batch) | {"seg": seg})
    )
    wanted, bounded = run(seg), run(ratios.Segments(seg, 3))
    for entry in ENTRIES + samples.LOSSES:
        for got, want in zip(bounded[entry], wanted[entry], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, err_msg=" ".join(entry))
    # A bound of one drops the second sequence: the number is used.
    dropped = samples.weights(logp, batch | {"seg": ratios.Segments(seg, 1)}, "seq_vanilla")
    raw = wanted["weight", "seq_vanilla"][0]
    np.testing.assert_allclose(dropped, np.where(seg == 1, raw, 0.0), rtol=1e-6)


def test_only_logp_carries_a_gradient():
    logp, batch = samples.make()
    fields = {name: batch[name] for name in samples.token_fields(batch)}

    @jitted.function
    def gradients(logp, fields):
        """{entry: gradients with respect to the fields}; of a weight or a mask also to logp."""
        found = {}
        for kind, name in ENTRIES:

            def total(logp, fields, kind=kind, name=name):
                return jnp.sum(samples.FUNCTIONS[kind](logp, batch | fields, name))

            found[kind, name] = jitted.grad(total, argnums=1)(logp, fields)
            if kind in ("weight", "mask"):
                found[kind, name]["logp"] = jitted.grad(total)(logp, fields)
        return found

    for (kind, name), of_fields in gradients(logp, fields).items():
        for field, gradient in of_fields.items():
            if kind == "kl" and field == "logits":
                continue  # the policy's own
            np.testing.assert_array_equal(
                gradient, np.zeros(gradient.shape), err_msg=f"{kind} {name} {field}"
            )


@pytest.mark.all
def test_advantages_carry_no_gradient():
    rng = np.random.default_rng(2)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    uniform = lambda *shape: rng.uniform(0.2, 0.9, shape).astype(np.float32)
    batch = {"mask": rng.random((8, 4)) < 0.8, "group": np.array([0, 0, 0, 0, 1, 1, 1, 1])}
    floats = {
        "values": normal(8, 4), "greedy_rewards": normal(8),
        "sum_pi_squared": uniform(8, 4), "logp_old": -uniform(8, 4), "logp_behav": -uniform(8, 4),
        "logp_prox": -uniform(8, 4), "entropy": uniform(8, 4),
        "weights": uniform(8, 4), "grad_norms": uniform(8), "reward_components": normal(8, 2),
    }

    @jitted.function
    def gradients(floats):
        return {
            name: jax.grad(lambda x, name=name: jnp.sum(samples.advantage(name, batch | x)))(floats)
            for name in ADVANTAGES
        }

    for shape in ((8,), (8, 4)):  # rewards per sequence and per token
        for name, of_fields in gradients(floats | {"rewards": normal(*shape)}).items():
            for field, gradient in of_fields.items():
                np.testing.assert_array_equal(
                    gradient, np.zeros(gradient.shape), err_msg=f"{name} {field}"
                )
