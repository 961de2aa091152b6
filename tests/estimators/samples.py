"""A small batch with every field that a method can ask for, each method with its parameters, and
the results of all methods from one program, which compiles faster than a program for each."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import methods, ratios
from jaxrl_tis.estimators.loss import accepted, importance_weights, kl_term, needed, policy_loss

LENGTHS = (5, 2, 1, 4, 3, 3)
WIDTH = 5
VOCAB = 4
SCALARS = ("current_version", "key", "st_ppo_norm")
INTEGERS = ("turn", "version", "group")
# Entries once more in another form than that of their default.
FORMS = {
    "objective": tuple(f"{name}(form=survey)" for name in ("kl_cov", "aspo", "st_ppo", "r2vpo")),
    "advantage": ("otb(form=survey)", "otb(form=survey_mean)", "tir_otb(form=survey)"),
}


def method(kind, name):
    """(name, parameters), the published defaults where there are any, of "name" or a form of it."""
    name, _, form = name.rstrip(")").partition("(form=")
    return name, methods.example(kind, name) | ({"form": form} if form else {})


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
        "rewards": np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])[:, None] * np.ones(shape),
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


# What the entries make of a batch: functions of (logp, batch, name) to [B, T].


def weights(logp, batch, name):
    batch = batch | {"logp": logp}
    log_ratio_bt = ratios.as_float(batch["logp_old"]) - batch["logp_behav"]
    return importance_weights(log_ratio_bt, batch, method("weight", name))


def kept(logp, batch, name):
    """1 where the mask keeps a token, 0 elsewhere."""
    log_ratio_bt = ratios.as_float(batch["logp_old"]) - batch["logp_behav"]
    is_accepted_bt, _ = accepted([log_ratio_bt], batch | {"logp": logp}, (method("mask", name),))
    return is_accepted_bt.astype(log_ratio_bt.dtype)


def objective(logp, batch, name):
    name, parameters = method("objective", name)
    batch = batch | {"weights": weights(logp, batch, "token_tis")}
    fields = [batch[field] for field in ("logp_old", "adv", "mask")]
    seg = batch.get("seg")
    extra = needed("objective", name, batch)
    return methods.function("objective", name)(logp, *fields, seg, **extra, **parameters)[0]


def kl(logp, batch, name):
    return kl_term(logp, batch, method("kl", name))


def loss(logp, batch, mode):
    """A loss of all parts, a scalar, with the counts of the full batch."""
    return policy_loss(
        logp, batch, aggregation=mode, objective=method("objective", "dual_clip"),
        weight=method("weight", "seq_tis"), masks=(method("mask", "seq_mean_k3"),),
        kl=method("kl", "k3"), kl_coeff=0.1, num_tokens=batch["num_tokens"],
        num_seqs=batch["num_seqs"], scale=WIDTH,
    )[0]


FUNCTIONS = {"weight": weights, "mask": kept, "objective": objective, "kl": kl, "loss": loss}
ENTRIES = [(kind, name) for kind in ("weight", "mask", "objective", "kl")
           for name in (*methods.TABLES[kind], *FORMS.get(kind, ()))]
LOSSES = [("loss", mode) for mode in ("token-mean", "seq-mean-token-mean")]  # one per count


def counts(batch):
    """The denominators of `loss` if the batch is the full one."""
    is_valid = np.asarray(batch["mask"]) != 0
    return {"num_tokens": np.int32(is_valid.sum()), "num_seqs": np.int32(is_valid.any(1).sum())}


@jax.jit
def results(logp, batch):
    """{entry: (value, gradient of its sum with respect to logp)} of a batch with its counts; of
    weights and masks (value,)."""
    found = {}
    for kind, name in ENTRIES + LOSSES:

        def total(logp, kind=kind, name=name):
            value = FUNCTIONS[kind](logp, batch, name)
            return jnp.sum(value), value

        if kind in ("weight", "mask"):
            found[kind, name] = (total(logp)[1],)
        else:
            gradient, value = jax.grad(total, has_aux=True)(logp)
            found[kind, name] = value, gradient
    return found


# Advantages

ADVANTAGES = (*methods.TABLES["advantage"], *FORMS["advantage"])


def advantage(name, inputs):
    """The advantages [B, T] of an entry; its fields are among the inputs."""
    name, parameters = method("advantage", name)
    needed = {field: inputs[field] for field in methods.needs("advantage", name)}
    function = methods.function("advantage", name)
    return function(inputs["rewards"], inputs["mask"], inputs["group"], **needed, **parameters)


@jax.jit
def advantages(inputs):
    """{name: advantages [B, T]} of every entry."""
    return {name: advantage(name, inputs) for name in ADVANTAGES}
