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
from jaxrl_tis.learner import arriving
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.step import make_arriving_step, make_train_step
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models import transformer
from jaxrl_tis.rollouts import schedules
from tests import tiny
from tests.learner.trainer_test import fake_samples

pytestmark = pytest.mark.compiles

KL, ENTROPY, CAP = 0.3, 0.05, 2.0
WIDTH = 8  # 5 tokens of a prompt and 3 of a response: an unpacked row
# The schedule and driver of the samplers change two things of an update: whether the batch arrives
# in parts, and whether it is scored before. These are all kinds, each with its rows of a
# micro-batch.
WAYS = {
    "fused": (dict(rollout__schedule="sync"), (2, 16)),
    "scored": (dict(rollout__schedule="sync", train__fuse_old_logp="never"), (4,)),
    "arriving": (dict(rollout__schedule="periodic"), (2,)),
}

# Keeps the gradient as its state and moves nothing.
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, params), grads),
)


NAN = float("nan")
FAILED = (2, 3, 5, 8, 9, 10, 11, 12, 13, 14)  # 2, 1, 4 and 3 of the groups of four
TRUNCATED = (1, 2, 6, 12, 13, 14, 15)


def batch(name: str) -> list:
    """16 samples in groups of four: "whole", or some of them "failed" or "truncated"."""
    samples = fake_samples()
    if name == "failed":
        return [
            dataclasses.replace(s, score=NAN, reward=NAN) if i in FAILED else s
            for i, s in enumerate(samples)
        ]
    at_limit = TRUNCATED if name == "truncated" else ()
    ended = lambda s, i: "length" if i in at_limit else "stop"
    return [
        dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, stop_reason=ended(s, i)))
        for i, s in enumerate(samples)
    ]


def advantages(samples: list) -> np.ndarray:
    """grpo's by hand, [N]: failed answers have none and are in no statistic, nor has one that is left
    alone; truncated ones count."""
    out = np.zeros(len(samples))
    for start in range(0, 16, 4):
        rewards = np.array([s.reward for s in samples[start : start + 4]])
        known = rewards[~np.isnan(rewards)]
        if len(known) > 1:
            out[start : start + 4] = (rewards - known.mean()) / (known.std(ddof=1) + 1e-6)
    return np.nan_to_num(out)


def coefficients(aggregation: str, mask: np.ndarray) -> np.ndarray:
    """What the loss of each token is multiplied by, [N,T]."""
    lengths, tokens, sequences = mask.sum(1, keepdims=True), mask.sum(), mask.any(1).sum()
    of_prompts = mask.reshape(4, -1).sum(1)  # groups of four
    per_prompt = np.repeat(np.maximum(of_prompts, 1), 4)[:, None]
    return mask * {
        "token-mean": 1 / tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-sum-norm": 1 / sequences / WIDTH,
        "seq-mean-token-mean": 1 / (np.maximum(lengths, 1) * sequences),
        "prompt-mean": 1 / (per_prompt * (of_prompts > 0).sum()),
    }[aggregation]


@functools.cache
def made(way: str, pack_length: int, microbatch_rows: int):
    """(trainer, state's maker) of a way; the state's reference is not the policy."""
    setup = tiny.setup(
        train__minibatches=1, train__epochs=1, train__pack_length=pack_length,
        train__microbatch_rows=microbatch_rows, train__mask_truncated=True,
        correction__weight=f"token_tis(cap={CAP})",
        correction__objective="ppo", correction__kl_coeff=KL, correction__entropy_coeff=ENTROPY,
        metrics__diagnostics_every=1000, **WAYS[way][0],
    )
    setup = dataclasses.replace(setup.training, optimizer=KEEP)
    with tiny.one_device():
        trainer = Trainer(setup)

    params = initial_params(setup)
    other = jax.tree.map(lambda x: 1.2 * x, params)
    first = initial_state(setup, params) | {"reference": other}
    return trainer, lambda: jax.tree.map(jnp.copy, first)  # which an update donates


@functools.cache
def trainer_of(way: str, pack_length: int, microbatch_rows: int, aggregation: str) -> Trainer:
    """The trainer of a way with the updates of an aggregation; all else does not depend on it."""
    trainer, _ = made(way, pack_length, microbatch_rows)
    setup = trainer.setup
    correction = dataclasses.replace(setup.correction, aggregation=aggregation)
    if aggregation == "seq-mean-token-sum-norm" and pack_length:
        assert correction.scale == WIDTH
    trainer = copy.copy(trainer)
    trainer.setup = dataclasses.replace(setup, correction=correction)
    parts = setup.update_learner, correction, KEEP
    trainer._train_step = make_train_step(*parts, is_scored=bool(setup.recompute_reason))
    trainer.arriving_step = make_arriving_step(*parts)
    return trainer


def updated(kind: str, way: str, pack_length: int, microbatch_rows: int, aggregation: str):
    """(gradient, metrics) of the update of one batch of 16 sequences."""
    trainer = trainer_of(way, pack_length, microbatch_rows, aggregation)
    samples, begun = batch(kind), made(way, pack_length, microbatch_rows)[1]()
    weights = {0: begun["policy"].params}
    if trainer.setup.schedule.on_arrival and arriving.accumulation_blocker(trainer.setup) is None:
        groups = [[s for s in samples if s.group == g] for g in (2, 0, 3, 1)]
        found, _, _, metrics = arriving.update_arriving(trainer, begun, groups, weights, 1, 0)
    else:
        found, _, metrics = trainer.update(begun, trainer.score(begun, samples, weights), 1, 0)
    return jax.device_get(found["policy"].opt_state), metrics


@functools.cache
def reference():
    """(f: coefficients and advantages -> gradient and losses, mask [N,T]), from whole logits."""
    trainer, state = made("scored", 0, 4)
    begun, samples = state(), fake_samples()
    params, config = jax.device_get(begun["policy"].params), trainer.setup.model
    rows = trainer.setup.rows([s.trajectory for s in samples])

    def log_probs(params):
        logits = transformer.logits(params, config, rows["tokens"], None, rows["segment_ids"])
        return jax.nn.log_softmax(logits[:, :-1])

    def losses(params, c, adv):
        logp = jnp.take_along_axis(log_probs(params), rows["tokens"][:, 1:, None], 2)[..., 0]
        fixed, reference = log_probs(params), log_probs(jax.device_get(begun["reference"]))
        old = jax.lax.stop_gradient(logp)
        w = jnp.minimum(jnp.exp(old - rows["logp_behav"][:, 1:]), CAP)
        ahead = jnp.take_along_axis(reference, rows["tokens"][:, 1:, None], 2)[..., 0] - logp
        found = {
            "actor/pg_loss": jnp.sum(c * -w * adv[:, None] * jnp.exp(logp - old)),
            "actor/kl_loss": jnp.sum(c * (jnp.exp(ahead) - ahead - 1)),
            "actor/entropy_loss": jnp.sum(c * -jnp.sum(jnp.exp(fixed) * fixed, -1)),
        }
        pg, kl, entropy = found.values()
        return pg + KL * kl - ENTROPY * entropy, found

    gradient = jax.jit(jax.grad(losses, has_aux=True))
    return lambda c, adv: jax.device_get(gradient(params, c[:, 1:], adv)), rows["mask"]


@pytest.mark.cases(
    "rows-token-mean-fused", "rows-token-mean-scored", "rows-token-mean-arriving",
    "packed-seq-mean-token-mean-scored", "packed-seq-mean-token-sum-norm-scored",
    "packed-prompt-mean-fused",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("aggregation", reduce.MODES)
@pytest.mark.parametrize("pack_length", [0, 24], ids=["rows", "packed"])
def test_every_way_gives_the_gradient_and_the_losses_of_the_definition(pack_length, aggregation, way):
    """Of all answers, of those with a reward, and of those that were not truncated."""
    f, sampled = reference()
    left_out = {"whole": (), "failed": FAILED, "truncated": TRUNCATED}
    for kind, indices in left_out.items():
        mask = sampled & ~np.isin(np.arange(16), indices)[:, None]
        expected, losses = f(coefficients(aggregation, mask), advantages(batch(kind)))
        for size in WAYS[way][1]:
            gradient, metrics = updated(kind, way, pack_length, size, aggregation)
            of = f"{kind}, {way}, micro-batches of {size}"
            for (path, a), (_, b) in zip(
                *map(jax.tree_util.tree_leaves_with_path, (gradient, expected)), strict=True
            ):
                where, atol = f"{of}, {jax.tree_util.keystr(path)}", 1e-5 * np.abs(b).max()
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=atol, err_msg=where)
            for name, value in losses.items():
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), f"{of}, {name}"


def test_every_mode_is_one_of_these_ways():
    """Whatever draws the samples, a batch is updated whole or in parts, scored before or not."""
    of = lambda **s: tiny.setup(train__minibatches=1, train__epochs=1, **s)
    kind = lambda setup: (setup.schedule.on_arrival, bool(setup.training.recompute_reason))
    kinds = {kind(of(**settings)) for settings, _ in WAYS.values()}
    ahead = [schedule for schedule in schedules.SCHEDULES if schedule != "sync"]
    for schedule, driver in itertools.product(ahead, ("virtual", "ray")):
        setup = of(rollout__schedule=schedule, rollout__driver=driver, rollout__workers=2)
        assert kind(setup) in kinds, (schedule, driver)
