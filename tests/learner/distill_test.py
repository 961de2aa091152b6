"""The drafter learns what the sampler drew: weights of sequences and one update by hand, and an oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_tis.learner import distill
from jaxrl_tis.learner.state import DrafterState
from jaxrl_tis.learner.step import TrainState
from jaxrl_tis.models import quant, transformer
from tests import tiny, weights

pytestmark = pytest.mark.compiles


def test_weights_of_sequences():
    """Tokens 2, 1, 0, 1. Rewards 1, 3, 5 and one unknown: the sum over 3 tokens is 2 + 3, and their mean
    is 1. Of rewards that are not above 0 nothing is learned."""
    rows = {"sampled": np.array([[1, 1], [1, 0], [0, 0], [0, 1]], bool)}
    weigh = lambda *rewards: distill.sequence_weights(rows | {"rewards": np.array(rewards)}, "reward")
    assert distill.sequence_weights(rows, "none").tolist() == [1, 1, 0, 1]
    np.testing.assert_allclose(weigh(1, 3, 5, np.nan), [0.6, 1.8, 0, 0])
    np.testing.assert_allclose(weigh(-1, 3, 0, 1), [0, 1.5, 0, 0.5])
    assert weigh(0, -1, 7, np.nan).tolist() == [0] * 4


def made(**fields):
    """A distiller of the tiny policy's own shape, with plain gradient descent; state; and a batch whose
    second row holds no sampled token."""
    setup = tiny.setup(
        engine__drafter_every=0, engine__quantization="none", train__microbatch_rows=4, **fields
    ).training
    engine = setup.config.copy_and_resolve_references().unlock()
    engine.engine.drafter_every = 2
    program = dataclasses.replace(setup.learner.program, quantization=quant.Recipe("none"))
    setup = dataclasses.replace(
        setup, config=engine.lock(), drafter_optimizer=optax.sgd(0.5),
        drafter=dataclasses.replace(setup.learner, program=program),
    )
    params = weights.drawn(setup.model, seed=3)
    state = lambda: DrafterState(
        TrainState(jax.tree.map(jnp.copy, params), setup.drafter_optimizer.init(params)), jnp.int32(0)
    )
    rng, length = np.random.default_rng(0), setup.row_length
    shape = 4, length
    rows = {
        "tokens": rng.integers(1, setup.model.vocab_size, shape, dtype=np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (4, 1)),
        "segment_ids": np.ones(shape, np.int32), "temperature": np.full(shape, 0.8, np.float32),
        "logp_behav": -rng.random(shape, np.float32), "sampled": np.zeros(shape, bool),
        "rewards": np.array([1, 1, 3, 0], np.float32),
    }
    rows["sampled"][[0, 2, 3], 5:] = True
    return setup, params, state, rows


def forward_kl(params, setup, rows, weight_n):
    """mean of w (log mu - log pi), by logits of whole rows."""
    logits = transformer.logits(params, setup.model, rows["tokens"]) / 0.8
    logp = jax.nn.log_softmax(logits)[:, :-1]
    logp = jnp.take_along_axis(logp, rows["tokens"][:, 1:, None], axis=-1)[..., 0]
    gap = (rows["logp_behav"][:, 1:] - logp) * rows["sampled"][:, 1:]
    return jnp.sum(weight_n[:, None] * gap) / rows["sampled"].sum()


@pytest.mark.all
@pytest.mark.parametrize("weighting, weight_n", [("none", [1, 0, 1, 1]), ("reward", [0.5, 0, 1.5, 0])])
def test_an_update_descends_the_forward_kl(weighting, weight_n):
    setup, params, state, rows = made(engine__drafter_weighting=weighting)
    distiller = distill.Distiller(setup)
    assert distiller.update(same := state(), rows, 3, 3) == (same, {})  # due every other step
    new, metrics = distiller.update(state(), rows, 4, 7)
    seen = rows | {"sampled": rows["sampled"] & (np.array(weight_n) > 0)[:, None]}
    # An update takes the mean over the tokens of sequences with a weight.
    oracle = functools.partial(forward_kl, setup=setup, rows=seen)
    grads = jax.grad(oracle)(params, weight_n=np.array(weight_n))
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    for found, wanted in zip(*map(jax.tree.leaves, (new.network.params, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert metrics["drafter/kl"] == pytest.approx(float(oracle(params, weight_n=np.ones(4))), abs=1e-5)
    assert int(new.version) == 7
    nothing = rows | {"sampled": np.zeros_like(rows["sampled"])}
    assert distiller.update(same := state(), nothing, 4, 7) == (same, {})


@pytest.mark.all
def test_rows_of_several_updates_are_all_read_once():
    """Five rows in micro-batches of four: two updates, the second of one row."""
    setup, _, state, rows = made()
    rows = {name: np.concatenate([x, x[:1]])[[0, 0, 2, 3, 4]] for name, x in rows.items()}
    distiller, seen = distill.Distiller(setup), []
    step = distiller._step
    distiller._step = lambda network, batch: (seen.append(np.asarray(batch["mask"])), step(network, batch))[1]
    distiller.update(state(), rows, 2, 1)
    assert [x.shape[:2] for x in seen] == [(1, 4)] * 2
    assert [x.any(axis=-1).sum() for x in seen] == [4, 1]
    assert sum(x.sum() for x in seen) == rows["sampled"].sum()
