import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from configs import fig_referee
from jaxrl_tis.data.rewards import worker
from experiments import figures, referee_gradients, referee_runs
from jaxrl_tis.learner import scoring
from jaxrl_tis.learner.trainer import Trainer
from tests.experiments.referee_runs_test import SMALL


def test_measures_are_products_of_halves():
    """Four batches of two parameters; the halves' means are (1, 0), (3, 3) and (1, 1), (1, 3)."""
    found = np.array([[0.0, 0.0], [2.0, 0.0], [3.0, 1.0], [3.0, 5.0]])
    true = np.array([[1.0, 0.0], [1.0, 2.0], [0.0, 3.0], [2.0, 3.0]])
    assert referee_gradients.measures(found, true) == pytest.approx({
        "true2": 1 * 1 + 1 * 3, "own2": 3.0, "dot": ((1 * 1 + 0 * 3) + (3 * 1 + 3 * 1)) / 2,
        "bias2": (1 - 1) * (3 - 1) + (0 - 1) * (3 - 3), "variance": 2.0 + 17 / 3,
    })


@pytest.mark.all
def test_the_gradient_of_an_arm_is_that_of_its_loss():
    """With token TIS: the mean over tokens of -min(p / q, 2) advantage grad log p, by autodiff of this
    sum, with advantages and ratios computed here."""
    arm = fig_referee.arms_of("noise", "short")["token TIS"] | SMALL | {"train.minibatches": 1}
    setup = referee_gradients.descending(referee_runs.Programs().build(arm))
    with contextlib.closing(worker(setup.config.reward)) as rewards:
        params = figures.taught(setup)
        [samples] = referee_gradients.drawn_from(setup, params, rewards, 1)
    for i, sample in enumerate(samples):  # rewards of the little taught model are all 0
        object.__setattr__(sample, "reward", float(i % 3))
    trainer = Trainer(setup.training)
    found = referee_gradients.gradient(trainer, params, params, samples)

    rows = setup.training.rows([s.trajectory for s in samples])
    micro, flat = setup.training.micro_batches(rows)
    logp = flat(scoring.make_score(setup.training.learner)(params, micro)["logp"])
    reward, size = np.array([s.reward for s in samples]), setup.config.rollout.group_size
    groups = reward.reshape(-1, size)
    advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    ratio = np.where(rows["mask"], np.exp(logp - rows["logp_behav"]), 0.0)
    factor = np.minimum(ratio, 2.0) * advantage.reshape(-1, 1) * rows["mask"] / rows["mask"].sum()
    factor = jnp.asarray(factor, jnp.float32).reshape(len(micro["mask"]), -1, factor.shape[1])

    def loss(params):
        one = lambda batch, factor: jnp.sum(
            scoring.response_logprobs(params, setup.training.learner, batch) * factor
        )
        parts = [one(jax.tree.map(lambda x, i=i: x[i], micro), factor[i]) for i in range(len(factor))]
        return -sum(parts)

    expected = np.asarray(ravel_pytree(jax.grad(loss)(params))[0])
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max() + 1e-7)


@pytest.mark.all
def test_the_lines_of_a_seed(monkeypatch, tmp_path):
    real = fig_referee.arms_of
    few = ("none", "centering", fig_referee.EXACT)
    of_part = lambda *part: {n: a | SMALL for n, a in real(*part).items() if n in few}
    monkeypatch.setattr(fig_referee, "arms_of", of_part)
    monkeypatch.setattr(referee_gradients, "CHECKPOINTS", (4, 5))
    monkeypatch.setattr(referee_gradients, "BATCHES", 2)
    referee_gradients.measure_part("stale/short", [0], tmp_path)
    lines = referee_gradients.path_of(tmp_path, "stale/short").read_text().splitlines()
    assert len(lines) == 3 * 2
