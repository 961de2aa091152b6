"""Every way to an update divides the loss as its aggregation says.

The expected gradient is that of a sum over tokens of a coefficient times a log-prob, each sequence in
a row of its own, from whole logits. The coefficients are written down here, from the definition of
each aggregation.
"""

import copy
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_tis.estimators import reduce
from jaxrl_tis.models import transformer
from jaxrl_tis.rollouts import modes
from jaxrl_tis.state import initial_params, initial_state
from jaxrl_tis.step import make_arriving_step, make_train_step
from jaxrl_tis.trainer import Trainer
from tests import tiny
from tests.trainer_test import fake_samples

pytestmark = [
    pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")
]

KL, ENTROPY, CAP = 0.3, 0.05, 2.0
WIDTH = 8  # 5 tokens of a prompt and 3 of a response: an unpacked row
# The mode and driver of the samplers change two things of an update: whether the batch arrives in
# parts, and whether it is scored before. These are all kinds, each with its rows of a micro-batch.
WAYS = {
    "fused": (dict(rollout__mode="sync"), (2, 16)),
    "scored": (dict(rollout__mode="sync", train__fuse_score="never"), (4,)),
    "arriving": (dict(rollout__mode="periodic"), (2,)),
}

# Keeps the gradient as its state and moves nothing.
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, params), grads),
)


def coefficients(aggregation: str, mask: np.ndarray) -> np.ndarray:
    """What the loss of each token is multiplied by, [N,T]."""
    lengths, tokens, sequences = mask.sum(1, keepdims=True), mask.sum(), len(mask)
    return mask * {
        "token-mean": 1 / tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-sum-norm": 1 / sequences / WIDTH,
        "seq-mean-token-mean": 1 / (lengths * sequences),
    }[aggregation]


@functools.cache
def made(way: str, pack_length: int, microbatch_rows: int):
    """(trainer, state's maker) of a way; the state's reference is not the policy."""
    setup = tiny.setup(
        train__minibatches=1, train__epochs=1, train__pack_length=pack_length,
        train__microbatch_rows=microbatch_rows, correction__weight=f"token_tis(cap={CAP})",
        correction__objective="ppo", correction__kl_coeff=KL, correction__entropy_coeff=ENTROPY,
        metrics__percentile_every=1000, **WAYS[way][0],
    )
    setup = dataclasses.replace(setup, optimizer=KEEP)
    with tiny.one_device():
        trainer = Trainer(setup)

    def state():
        params = initial_params(setup)
        other = jax.tree.map(lambda x: 1.2 * x, params)
        return initial_state(setup, params) | {"reference": other}

    return trainer, state


def updated(way: str, pack_length: int, microbatch_rows: int, aggregation: str):
    """(gradient, metrics, rows) of the update of one batch of 16 sequences."""
    trainer, state = made(way, pack_length, microbatch_rows)
    setup = trainer.setup
    correction = dataclasses.replace(setup.correction, aggregation=aggregation)
    if aggregation == "seq-mean-token-sum-norm" and pack_length:
        assert correction.scale == WIDTH
    trainer = copy.copy(trainer)
    parts = setup.update_learner, correction, KEEP
    trainer._train_step = make_train_step(*parts, is_scored=bool(setup.why_scored))
    trainer._arriving = make_arriving_step(*parts)
    batch, begun = fake_samples(), state()
    weights = {0: begun["policy"].params}
    if setup.mode.on_arrival and trainer.why_waits is None:
        groups = [[s for s in batch if s.group == g] for g in (2, 0, 3, 1)]
        found, _, rows, metrics = trainer.update_arriving(begun, groups, weights, 1, 0)
    else:
        found, rows, metrics = trainer.update(begun, trainer.score(begun, batch, weights), 1, 0)
    return jax.device_get(found["policy"].opt_state), metrics, rows


@functools.cache
def reference():
    """(f: coefficients -> gradient and losses, mask [N,T]) of the same batch, from whole logits."""
    trainer, state = made("scored", 0, 4)
    begun, batch = state(), fake_samples()
    params, config = jax.device_get(begun["policy"].params), trainer.setup.model
    rows = trainer.setup.rows([s.trajectory for s in batch])
    rewards = np.array([s.reward for s in batch]).reshape(4, 4)
    adv = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)

    def log_probs(params):
        logits = transformer.logits(params, config, rows["tokens"], None, rows["segment_ids"])
        return jax.nn.log_softmax(logits[:, :-1])

    def losses(params, c):
        logp = jnp.take_along_axis(log_probs(params), rows["tokens"][:, 1:, None], 2)[..., 0]
        fixed, reference = log_probs(params), log_probs(jax.device_get(begun["reference"]))
        old = jax.lax.stop_gradient(logp)
        w = jnp.minimum(jnp.exp(old - rows["logp_behav"][:, 1:]), CAP)
        ahead = jnp.take_along_axis(reference, rows["tokens"][:, 1:, None], 2)[..., 0] - logp
        found = {
            "actor/pg_loss": jnp.sum(c * -w * adv.reshape(-1, 1) * jnp.exp(logp - old)),
            "actor/kl_loss": jnp.sum(c * (jnp.exp(ahead) - ahead - 1)),
            "actor/entropy_loss": jnp.sum(c * -jnp.sum(jnp.exp(fixed) * fixed, -1)),
        }
        pg, kl, entropy = found.values()
        return pg + KL * kl - ENTROPY * entropy, found

    gradient = jax.jit(jax.grad(losses, has_aux=True))
    return lambda c: jax.device_get(gradient(params, c[:, 1:])), rows["mask"]


@pytest.mark.parametrize("aggregation", reduce.MODES)
@pytest.mark.parametrize("pack_length", [0, 24], ids=["rows", "packed"])
def test_every_way_gives_the_gradient_and_the_losses_of_the_definition(pack_length, aggregation):
    f, mask = reference()
    expected, losses = f(coefficients(aggregation, mask))
    for way, size in [(way, size) for way, (_, sizes) in WAYS.items() for size in sizes]:
        gradient, metrics, _ = updated(way, pack_length, size, aggregation)
        of = f"{way}, micro-batches of {size}"
        for (path, a), (_, b) in zip(
            *map(jax.tree_util.tree_leaves_with_path, (gradient, expected)), strict=True
        ):
            where = f"{of}, {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max(), err_msg=where)
        for name, value in losses.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4), f"{of}, {name}"


def test_every_mode_is_one_of_these_ways():
    """Whatever draws the samples, a batch is updated whole or in parts, scored before or not."""
    of = lambda **s: tiny.setup(train__minibatches=1, train__epochs=1, **s)
    kind = lambda setup: (setup.mode.on_arrival, bool(setup.why_scored))
    kinds = {kind(of(**settings)) for settings, _ in WAYS.values()}
    ahead = [mode for mode in modes.MODES if mode != "sync"]
    for mode, driver in itertools.product(ahead, ("virtual", "processes")):
        setup = of(rollout__mode=mode, rollout__driver=driver, rollout__workers=2)
        assert kind(setup) in kinds, (mode, driver)
