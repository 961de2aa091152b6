"""The batches that programs are compiled for are those of a run."""

import dataclasses
import types
from unittest import mock

import jax
import pytest

from jaxrl_tis.aot import batches
from jaxrl_tis.aot.batches import abstract_minibatch
from jaxrl_tis.fields import route_dtype
from jaxrl_tis.learner.distill import Distiller
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from tests import tiny
from tests.learner import distill_test
from tests.learner.routing_test import R3, samples_with_routes
from tests.learner.trainer_test import fake_samples

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]


class Reached(Exception):
    """An update was called, with this minibatch."""


def with_ids_of(sample, dtype):
    trajectory = sample.trajectory
    trajectory = dataclasses.replace(trajectory, routes=trajectory.routes.astype(dtype))
    return dataclasses.replace(sample, trajectory=trajectory)


def with_fork(sample):
    trajectory = dataclasses.replace(sample.trajectory, forks=(sample.trajectory,))
    return dataclasses.replace(sample, trajectory=trajectory)


@pytest.mark.all
@pytest.mark.parametrize("overrides", [
    {"correction__advantage": "gae", "rollout__group_size": 1, "rollout__prompts": 16},
    {"correction__kl_coeff": 0.1, "train__minibatches": 1},
    {"train__pack_length": 100, "engine__retention": (1, 1)},
    R3 | {"correction__kl_coeff": 0.1},
    R3 | {"train__minibatches": 1, "train__epochs": 1},  # scored by its update
    R3 | {"model__num_experts": 300, "train__pack_length": 100},
    R3 | {"correction__routing": "r2"},
    tiny.HARNESS,
    tiny.HARNESS | {"train__pack_length": 100, "rollout__fork_rows": 8},
], ids=["critic", "reference", "packed", "r3", "r3, fused", "300 experts", "r2", "forks", "forks, packed"])
def test_the_minibatch_is_that_of_a_run(overrides):
    """Names, shapes and dtypes of what a step hands to its first update, where it is stopped, and to the
    program that weighs packed rows before."""
    def stopping(state, minibatch, base):
        raise Reached(minibatch)

    setup = tiny.setup(**overrides)
    with tiny.one_device():
        trainer = Trainer(setup.training)
    state = initial_state(setup.training, initial_params(setup.training))
    samples = samples_with_routes() if setup.model.moe else fake_samples()
    if setup.model.moe:
        samples = [with_ids_of(s, route_dtype(setup.model.moe.num_experts)) for s in samples]
    if setup.config.rollout.harness:
        samples[0] = with_fork(samples[0])
    rows = trainer.score(state, samples, {0: state["policy"].params})
    weigh = mock.patch.object(trainer, "weigh", mock.Mock(wraps=trainer.weigh))
    with mock.patch.object(trainer, "_train_step", stopping), pytest.raises(Reached) as reached, weigh as weigh:
        trainer.update(state, rows, 1, 0)
    kinds = lambda batch: {name: (x.shape, x.dtype) for name, x in batch.items()}
    assert kinds(reached.value.args[0]) == kinds(abstract_minibatch(setup))
    assert weigh.called == bool(setup.training.packer)
    for call in weigh.call_args_list:
        assert kinds(call.args[0]) == kinds(batches.abstract_weighing(setup))


@pytest.mark.all
def test_the_minibatch_of_a_drafter_is_that_of_a_run():
    setup, _, state, rows = distill_test.made()
    distiller, seen = Distiller(setup), []
    with (
        mock.patch.object(distiller, "_step", lambda _, batch: seen.append(batch)),
        pytest.raises(TypeError),  # no pair is returned
    ):
        distiller.update(state(), rows, 4, 7)
    expected = batches.abstract_distillation(types.SimpleNamespace(training=setup, config=setup.config))
    kinds = lambda batch: {name: (x.shape, x.dtype, x.sharding) for name, x in batch.items()}
    assert kinds(seen[0]) == kinds(expected)


def test_rows_of_a_minibatch_by_hand():
    """16 sequences in minibatches of 4, and these in micro-batches of 2. Numbers of a sequence have a
    place for each token of its row, which may hold several."""
    layout = types.SimpleNamespace(sharding=lambda axes: None)
    setup = types.SimpleNamespace(
        config=types.SimpleNamespace(train=types.SimpleNamespace(microbatch_rows=2)),
        training=types.SimpleNamespace(packer=None, row_length=8, layout=layout),
    )
    batch = {
        "tokens": jax.ShapeDtypeStruct((16, 8), "int32"), "rewards": jax.ShapeDtypeStruct((16,), "float32"),
        "reward_components": jax.ShapeDtypeStruct((16, 3), "float32"),
    }
    shapes = {name: x.shape for name, x in batches._in_rows(setup, batch, 4).items()}
    assert shapes == {"tokens": (2, 2, 8), "rewards": (2, 2, 8), "reward_components": (2, 2, 8, 3)}
