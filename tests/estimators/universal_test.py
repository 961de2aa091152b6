"""What must hold for every weight, objective, advantage and aggregation: padding, masks, packing,
gradients, jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import advantages
from jaxrl_tis.estimators import kl as kl_estimators
from jaxrl_tis.estimators import loss as losses
from jaxrl_tis.estimators import objectives
from jaxrl_tis.estimators import reduce
from jaxrl_tis.estimators import weights

PAIRS = [(weight, objective) for weight in weights.WEIGHTS for objective in objectives.OBJECTIVES]
FIELDS = ("logp_old", "logp_behav", "logp_ref", "adv")
LENGTHS = (5, 2, 1, 4, 3, 3)
WIDTH = 5


def make_batch(is_on_policy=False):
    """Six sequences of different lengths, the mask False after each and at one tool token
    inside."""
    rng = np.random.default_rng(5)
    mask = np.arange(WIDTH)[None, :] < np.array(LENGTHS)[:, None]
    mask[0, 2] = False
    logp_old = -rng.exponential(1.0, mask.shape)
    spread = 0.0 if is_on_policy else 0.5
    batch = {
        "logp_old": logp_old,
        "logp_behav": logp_old + spread * rng.normal(size=mask.shape),
        "logp_ref": logp_old + 0.5 * rng.normal(size=mask.shape),
        "adv": rng.normal(size=mask.shape),
        "mask": mask,
    }
    logp = logp_old + spread * rng.normal(size=mask.shape)
    as_jax = {
        name: jnp.array(x) if x.dtype == bool else jnp.array(x, jnp.float32)
        for name, x in batch.items()
    }
    return jnp.array(logp, jnp.float32), as_jax


@functools.partial(jax.jit, static_argnames=("weight", "objective", "aggregation", "kl"))
def loss_and_gradient(logp, batch, weight, objective, aggregation, kl="k3", counts=None):
    """The loss with default parameters, and its gradient with respect to logp."""

    def total(logp):
        return losses.policy_loss(
            logp,
            batch,
            weight=(weight, {}),
            objective=(objective, {}),
            aggregation=aggregation,
            kl=None if kl is None else (kl, {}),
            kl_coeff=0.1,
            scale=WIDTH,
            **({} if counts is None else counts),
        )[0]

    return jax.value_and_grad(total)(logp)


def poison(logp, batch, value):
    """The same batch with `value` in every float entry outside the mask."""
    fill = {name: jnp.where(batch["mask"], batch[name], value) for name in FIELDS}
    return jnp.where(batch["mask"], logp, value), batch | fill


@pytest.mark.parametrize(("weight", "objective"), PAIRS)
def test_on_policy_gradient_is_minus_the_advantage(weight, objective):
    logp, batch = make_batch(is_on_policy=True)
    _, gradient = loss_and_gradient(logp, batch, weight, objective, "token-sum", kl=None)
    np.testing.assert_allclose(gradient, jnp.where(batch["mask"], -batch["adv"], 0.0), rtol=1e-5)


@pytest.mark.parametrize(("weight", "objective"), PAIRS)
def test_padding_never_leaks(weight, objective):
    logp, batch = make_batch()
    expected = loss_and_gradient(logp, batch, weight, objective, "seq-mean-token-mean")
    assert np.all(np.asarray(expected[1])[~np.asarray(batch["mask"])] == 0.0)
    for value in (100.0, -100.0, jnp.nan, jnp.inf, -jnp.inf):
        actual = loss_and_gradient(
            *poison(logp, batch, value), weight, objective, "seq-mean-token-mean"
        )
        np.testing.assert_array_equal(actual[0], expected[0])
        np.testing.assert_array_equal(actual[1], expected[1])


@pytest.mark.parametrize("kl", kl_estimators.KL)
def test_padding_never_leaks_through_the_kl_term(kl):
    logp, batch = make_batch()
    expected = loss_and_gradient(logp, batch, "none", "ppo", "token-mean", kl=kl)
    for value in (100.0, jnp.nan, jnp.inf):
        actual = loss_and_gradient(*poison(logp, batch, value), "none", "ppo", "token-mean", kl=kl)
        np.testing.assert_array_equal(actual[0], expected[0])
        np.testing.assert_array_equal(actual[1], expected[1])


@pytest.mark.parametrize(("weight", "objective"), PAIRS)
def test_only_logp_carries_a_gradient(weight, objective):
    logp, batch = make_batch()

    def total(fields):
        return losses.policy_loss(
            logp,
            batch | fields,
            weight=(weight, {}),
            objective=(objective, {}),
            aggregation="token-mean",
            kl=("k3", {}),
            kl_coeff=0.1,
        )[0]

    gradients = jax.jit(jax.grad(total))({name: batch[name] for name in FIELDS})
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape), err_msg=name)


def pack(x, fill):
    """The six rows of x in three packed rows of width eight: sequences 0 and 1, 2 and 3, 4 and
    5."""
    packed = np.full((3, 8), fill, np.asarray(x).dtype)
    for i, length in enumerate(LENGTHS):
        start = LENGTHS[i - 1] if i % 2 else 0
        packed[i // 2, start : start + length] = x[i, :length]
    return jnp.array(packed)


@pytest.mark.parametrize(("weight", "objective"), PAIRS)
def test_packed_rows_equal_unpacked_rows(weight, objective):
    logp, batch = make_batch()
    value, gradient = loss_and_gradient(logp, batch, weight, objective, "seq-mean-token-mean")
    number = np.tile(np.array([[1], [2]] * 3), (1, WIDTH))
    packed = {name: pack(batch[name], np.nan) for name in FIELDS} | {
        "mask": pack(batch["mask"], False)
    }
    packed["seg"] = pack(number, 0)
    actual = loss_and_gradient(pack(logp, np.nan), packed, weight, objective, "seq-mean-token-mean")
    np.testing.assert_allclose(actual[0], value, rtol=1e-5)
    np.testing.assert_allclose(actual[1], pack(gradient, 0.0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("aggregation", reduce.MODES)
@pytest.mark.parametrize("weight", ["none", "token_tis", "seq_icepop"])
def test_a_fully_masked_row_changes_nothing(aggregation, weight):
    logp, batch = make_batch()
    value, gradient = loss_and_gradient(logp, batch, weight, "dual_clip", aggregation)

    def append(x):
        return jnp.concatenate([x, jnp.full((1, WIDTH), False if x.dtype == bool else jnp.nan)])

    longer = {name: append(x) for name, x in batch.items()}
    actual = loss_and_gradient(append(logp), longer, weight, "dual_clip", aggregation)
    np.testing.assert_allclose(actual[0], value, rtol=1e-6)
    np.testing.assert_allclose(actual[1][:-1], gradient, rtol=1e-6)
    np.testing.assert_array_equal(actual[1][-1], np.zeros(WIDTH))
    nothing = batch | {"mask": jnp.zeros_like(batch["mask"])}
    actual = loss_and_gradient(logp, nothing, weight, "dual_clip", aggregation)
    assert actual[0] == 0.0
    np.testing.assert_array_equal(actual[1], np.zeros(logp.shape))


@pytest.mark.parametrize("aggregation", reduce.MODES)
@pytest.mark.parametrize("weight", ["token_tis", "seq_tis"])
def test_micro_batches_add_up(aggregation, weight):
    logp, batch = make_batch()
    counts = {"num_tokens": jnp.sum(batch["mask"]), "num_seqs": len(LENGTHS)}
    value, gradient = loss_and_gradient(logp, batch, weight, "ppo", aggregation)
    parts = []
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        micro = {name: x[rows] for name, x in batch.items()}
        parts.append(
            loss_and_gradient(logp[rows], micro, weight, "ppo", aggregation, counts=counts)
        )
    np.testing.assert_allclose(sum(part[0] for part in parts), value, rtol=1e-5)
    np.testing.assert_allclose(
        jnp.concatenate([part[1] for part in parts]), gradient, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize(("weight", "objective"), PAIRS)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_masks_of_any_type(weight, objective, dtype):
    logp, batch = make_batch()
    expected = loss_and_gradient(logp, batch, weight, objective, "seq-mean-token-mean")
    other = batch | {"mask": batch["mask"].astype(dtype)}
    actual = loss_and_gradient(logp, other, weight, objective, "seq-mean-token-mean")
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])


@pytest.mark.parametrize(("weight", "objective"), PAIRS)
def test_extreme_log_ratios_stay_finite(weight, objective):
    logp, batch = make_batch()
    extreme = jnp.tile(jnp.array([[-300.0, 300.0, 25.0, -25.0, 20.0]]), (len(LENGTHS), 1))
    batch = batch | {
        "logp_behav": batch["logp_old"] - extreme,
        "logp_ref": batch["logp_old"] + extreme,
    }
    value, gradient = loss_and_gradient(
        batch["logp_old"] + extreme[:, ::-1], batch, weight, objective, "token-mean"
    )
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize(("weight", "objective"), PAIRS)
def test_bfloat16_log_probs_are_computed_in_float32(weight, objective):
    logp, batch = make_batch()
    low = {name: x.astype(jnp.bfloat16) if name in FIELDS else x for name, x in batch.items()}
    high = {name: x.astype(jnp.float32) for name, x in low.items() if name in FIELDS} | {
        "mask": batch["mask"]
    }
    logp = logp.astype(jnp.bfloat16)
    value, gradient = loss_and_gradient(logp, low, weight, objective, "token-mean")
    expected, _ = loss_and_gradient(logp.astype(jnp.float32), high, weight, objective, "token-mean")
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_permuting_samples_permutes_advantages(name):
    rng = np.random.default_rng(2)
    rewards, mask = rng.normal(size=8).astype(np.float32), rng.random((8, 4)) < 0.8
    group, values = np.array([0, 0, 0, 0, 1, 1, 1, 1]), rng.normal(size=(8, 4)).astype(np.float32)
    order = np.array([2, 0, 3, 1, 7, 6, 4, 5])
    needs = advantages.NEEDS[name] if name in advantages.NEEDS else ()
    before, after = (
        advantages.ADVANTAGES[name](
            rewards[o], mask[o], group[o], **{field: values[o] for field in needs}
        )
        for o in (np.arange(8), order)
    )
    np.testing.assert_allclose(after, before[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_advantages_carry_no_gradient_and_ignore_padding(name):
    mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    group = jnp.array([0, 0, 1])
    inputs = {"rewards": jnp.array([[0.2, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])}
    if name in advantages.NEEDS:
        inputs["values"] = jnp.array([[0.1, 0.3, 0.0], [-0.2, 0.0, 0.0], [0.0, 0.0, 0.0]])

    @jax.jit
    def compute(inputs):
        return advantages.ADVANTAGES[name](mask=mask, group=group, **inputs)

    adv = compute(inputs)
    np.testing.assert_array_equal(adv * (1 - mask), np.zeros((3, 3)))
    assert np.any(adv != 0.0)
    for value in (100.0, jnp.nan):
        poisoned = {field: jnp.where(mask == 1, x, value) for field, x in inputs.items()}
        np.testing.assert_array_equal(compute(poisoned), adv)
    gradients = jax.grad(lambda inputs: jnp.sum(compute(inputs)))(inputs)
    for gradient in gradients.values():
        np.testing.assert_array_equal(gradient, np.zeros((3, 3)))
