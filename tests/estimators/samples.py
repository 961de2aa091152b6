"""A small batch with every field that a method can ask for, and each method with its parameters."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import methods

LENGTHS = (5, 2, 1, 4, 3, 3)
WIDTH = 5
VOCAB = 4
SCALARS = ("current_version", "key", "st_ppo_norm")
INTEGERS = ("turn", "version", "group")
# Parameters without a published value, by name.
REQUIRED = {
    "upper": 2.0, "trm_delta": 0.5, "opsm_delta": 0.1, "staleness_max": 1, "vocab_size": 32,
    "dispo_low_pos": 1.0, "dispo_high_pos": 4.0, "dispo_low_neg": 0.8, "dispo_high_neg": 0.28,
    "r2vpo_lambda": 0.04, "quatro_delta": 0.1, "quatro_floor": 1e-3, "oapl_beta": 0.5,
    "oapl_beta_value": 0.5, "dro_beta": 0.1,
}


def method(kind, name):
    """(name, parameters), the published defaults where there are any."""
    values = methods.parameters(kind, name)
    is_missing = lambda value: value is inspect.Parameter.empty
    return name, {k: REQUIRED[k] if is_missing(v) else v for k, v in values.items()}


def make(is_on_policy=False):
    """(logp, batch) of six sequences of different lengths, three per prompt.

    The mask is False after each and at one tool token inside. Advantages are one per sequence.
    """
    rng = np.random.default_rng(5)
    mask = np.arange(WIDTH)[None, :] < np.array(LENGTHS)[:, None]
    mask[0, 2] = False
    shape = mask.shape
    old = -rng.exponential(1.0, shape)
    spread = 0.0 if is_on_policy else 0.5
    near = lambda scale: old + scale * rng.normal(size=shape)
    logits = rng.normal(size=(*shape, VOCAB))
    batch = {
        "logp_old": old,
        "logp_prox": near(0.6 * spread),
        "logp_behav": near(spread),
        "logp_ref": near(0.5),
        "adv": np.array([1.2, -0.7, 0.4, -1.1, 0.9, 0.3])[:, None] * np.ones(shape),
        "entropy": rng.uniform(0.5, 2.5, shape),
        "sum_pi_squared": rng.uniform(0.2, 0.9, shape),
        "logits": logits,
        "logits_behav": logits + spread * rng.normal(size=logits.shape),
        "logits_ref": logits + 0.5 * rng.normal(size=logits.shape),
        "mask": mask,
        "turn": np.array([[0, 0, 0, 1, 1]] * 6),
        "version": np.array([[3, 3, 2, 2, 3]] * 6),
        "group": np.array([7, 7, 7, 4, 4, 4])[:, None] * np.ones(shape, int),
    }
    logp = near(spread)
    cast = lambda x: jnp.array(x, None if x.dtype == bool else (
        jnp.int32 if x.dtype.kind == "i" else jnp.float32))
    batch = {name: cast(x) for name, x in batch.items()}
    batch |= {"current_version": jnp.int32(4), "key": jax.random.key(3),
              "st_ppo_norm": jnp.float32(0.5)}
    return jnp.array(logp, jnp.float32), batch


def token_fields(batch):
    """Names of the floats that padding may fill with anything."""
    return [n for n in batch if n not in (*SCALARS, *INTEGERS, "mask")]


def where(mask, x, value):
    """x where the mask holds, `value` elsewhere; for [B,T] and [B,T,V]."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, value)


def pack(x, fill):
    """The six rows of x in three packed rows of width eight: sequences 0 and 1, 2 and 3, 4 and 5."""
    x = np.asarray(x)
    packed = np.full((3, 8, *x.shape[2:]), fill, x.dtype)
    for i, length in enumerate(LENGTHS):
        start = LENGTHS[i - 1] if i % 2 else 0
        packed[i // 2, start : start + length] = x[i, :length]
    return jnp.array(packed)


def packed(logp, batch):
    """The same sequences in packed rows, NaN between them."""
    out = {name: pack(batch[name], np.nan) for name in token_fields(batch)}
    out |= {name: pack(batch[name], 0) for name in INTEGERS}
    out |= {name: batch[name] for name in SCALARS}
    number = np.tile(np.array([[1], [2]] * 3), (1, WIDTH))
    return pack(logp, np.nan), out | {"mask": pack(batch["mask"], False), "seg": pack(number, 0)}
