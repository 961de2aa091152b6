"""A batch, a call and formulas that the tests of losses with a ratio of several tokens share."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import methods, objectives

FIELDS = ("logp", "logp_old", "adv", "entropy", "share")
LENGTHS = (7, 3, 1, 5, 0)
WIDTH = 7
PARAMETERS = {"espo": {"vocab_size": 64}}
STATIC = ("vocab_size", "espo_uses_old", "ctpo_geomean", "form")
# (log-ratio, advantage) of a sequence of one token, as in ppo_test.
POINTS = list(itertools.product((0.0, 0.3, -0.3, 1.5, -1.5), (1.0, -1.0)))


def make_batch(spread=0.4):
    """Four sequences, a tool token inside the first that cuts turn 1 in two, and an empty row."""
    rng = np.random.default_rng(3)
    mask = np.arange(WIDTH)[None, :] < np.array(LENGTHS)[:, None]
    mask[0, 3] = False
    logp = -rng.exponential(1.0, mask.shape)
    floats = {
        "logp": logp,
        "logp_old": logp + spread * rng.normal(size=mask.shape),
        "adv": rng.normal(size=mask.shape),
        "entropy": rng.exponential(1.0, mask.shape),
        "share": rng.normal(size=mask.shape),  # of each token's loss in the total
    }
    batch = {name: jnp.array(x, jnp.float32) for name, x in floats.items()}
    turn = np.array([[0, 0, 1, 7, 1, 2, 2], [0, 1, 1, 0, 0, 0, 0], [4] + [0] * 6, [0] * 7, [0] * 7])
    return batch | {"turn": jnp.array(turn), "mask": jnp.array(mask), "st_ppo_norm": 2.5}


@functools.partial(jax.jit, static_argnames=("name", *STATIC))
def evaluate(name, batch, seg=None, **parameters):
    """(loss_bt, metrics, gradient of sum_bt share * loss with respect to logp)."""
    needed = methods.needs("objective", name)
    needed = [field for field in needed if field != "weights"]  # optional
    parameters = PARAMETERS.get(name, {}) | parameters

    def total(logp):
        loss_bt, metrics = objectives.OBJECTIVES[name](
            logp, batch["logp_old"], batch["adv"], batch["mask"], seg,
            **{field: batch[field] for field in needed}, **parameters,
        )
        share = jnp.where(batch["mask"], batch["share"], 0.0)
        return jnp.sum(share * loss_bt), (loss_bt, metrics)

    (_, (loss_bt, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(batch["logp"])
    return loss_bt, metrics, gradient


def row(name, log_ratio, adv, **fields):
    """The entry on one row with logp_old = log 0.2, everything valid and shares of 1."""
    log_ratio = np.array([log_ratio], np.float32)
    adv = np.broadcast_to(np.array(adv, np.float32), log_ratio.shape)
    old = np.full(log_ratio.shape, np.log(0.2), np.float32)
    batch = {"logp": old + log_ratio, "logp_old": old, "adv": adv, "mask": np.ones(old.shape)}
    batch["share"] = batch["mask"]
    for field in ("entropy", "turn", "st_ppo_norm"):
        if field in fields:
            batch[field] = jnp.array(fields.pop(field))
    return evaluate(name, batch, **fields)


# The formulas once more, one sequence at a time in float64: each returns the losses [n], their
# derivatives d loss_t / d logp_s [n, n] and whether each token is clipped.


def ppo_token(ratio, adv, low, high):
    if adv > 0 and ratio > high:
        return -high * adv, 0.0, True
    if adv < 0 and ratio < low:
        return -low * adv, 0.0, True
    return -ratio * adv, -ratio * adv, False


def bands(ratio_t, adv_t, low_t, high_t):
    columns = [ppo_token(*x) for x in zip(ratio_t, adv_t, low_t, high_t, strict=True)]
    loss, slope, is_clipped = (np.array(x) for x in zip(*columns, strict=True))
    return loss, slope, is_clipped


def gspo_loop(x, low=1 - 3e-4, high=1 + 4e-4):
    n = len(x["l"])
    s = np.exp(np.mean(x["l"]))
    loss, slope, is_clipped = bands([s] * n, x["adv"], [low] * n, [high] * n)
    return loss, np.outer(slope, np.ones(n) / n), is_clipped


# What holds for entries of both files.


def check_a_loop(name, spread, loop):
    batch = make_batch(spread)
    loss, metrics, gradient = evaluate(name, batch)
    expected_loss, expected_gradient = np.zeros(loss.shape), np.zeros(loss.shape)
    num_clipped, mask = 0, np.asarray(batch["mask"])
    for i in np.flatnonzero(mask.any(axis=1)):
        valid = mask[i]
        x = {k: np.asarray(batch[k][i], np.float64)[valid] for k in (*FIELDS, "turn")}
        x["l"] = x["logp"] - x["logp_old"]
        expected_loss[i, valid], jacobian, is_clipped = loop(x)
        expected_gradient[i, valid] = x["share"] @ jacobian
        num_clipped += np.sum(is_clipped)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], num_clipped / mask.sum(), rtol=1e-6)


def check_an_empty_batch(name):
    batch = make_batch()
    nothing = evaluate(name, batch | {"mask": jnp.zeros_like(batch["mask"])})
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros(x.shape)), nothing)


def check_one_token(name):
    for log_ratio, adv in POINTS:
        actual = row(name, [log_ratio], adv, turn=[[0]], clip_low=0.2, clip_high=0.2)
        ratio = np.exp(log_ratio)
        expected = ppo_token(ratio, adv, 0.8, 1.2)
        np.testing.assert_allclose(actual[0], [[expected[0]]], rtol=1e-6)
        np.testing.assert_allclose(actual[2], [[expected[1]]], rtol=1e-6)


def check_the_bound(name):
    loose = {"ctpo_low": 100.0, "ctpo_high": 100.0} if name == "ctpo" else {}
    for log_ratio, value in ((9.5, np.exp(9.5)), (12.0, np.exp(10.0)), (300.0, np.exp(10.0))):
        loss, _, gradient = row(name, [log_ratio], -1.0, turn=[[0]], **loose)
        np.testing.assert_allclose(loss, [[value]], rtol=1e-4)
        np.testing.assert_allclose(gradient, [[value if log_ratio < 10 else 0.0]], rtol=1e-4)
