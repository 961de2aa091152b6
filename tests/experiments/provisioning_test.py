"""The solver against the virtual clock, the lag law against an integral."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.provisioning import lag_law, least_staleness, least_workers
from experiments.virtual_clock import simulate
from jaxrl_tis.rollouts import schedules
from tests.experiments.virtual_clock_test import TINY


def idle(workers, staleness, train_s, **changes):
    """The learner's idle share; a batch is a group of two responses of 8 s."""
    costs = dataclasses.replace(
        TINY, workers=workers, call_steps=1, train_s=train_s / 16, swap_s=0.0, **changes
    )
    return simulate(schedules.in_flight(staleness=staleness), costs, 24, 12).learner_idle


@pytest.mark.parametrize("train_s", [1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 11.0])
def test_a_learner_is_busy_at_the_answer_and_idle_below_it(train_s):
    workers, staleness = least_workers(2, train_s, 2 / 8), least_staleness(train_s, 0.0, 8.0)
    assert (workers, staleness) == (math.ceil(8 / train_s), math.ceil(8 / train_s))
    assert idle(workers, staleness, train_s) == 0
    if workers > 1:
        assert idle(workers - 1, staleness, train_s) > 0
    if staleness > 1:
        assert idle(workers, staleness - 1, train_s) > 0


def test_rewards_are_a_part_of_the_tail():
    """3 s more, during which the sampler draws the next."""
    assert least_staleness(4.0, 0.0, 8.0) == 2 and least_staleness(4.0, 0.0, 11.0) == 3
    assert idle(3, 2, 4.0, reward_s=3.0) > 0 == idle(3, 3, 4.0, reward_s=3.0)


def test_pauses_take_time_from_the_samplers():
    assert least_workers(2, 4.0, 2 / 8) == 2
    assert least_workers(2, 4.0, 2 / 8, pause_s=0.5) == 3  # 8 / 3.5
    costs = dataclasses.replace(TINY, call_steps=1, swap_s=0.5)
    at = lambda workers: simulate(
        schedules.in_flight(staleness=4), dataclasses.replace(costs, workers=workers), 24, 12
    ).learner_idle
    assert at(2) > 0 == at(3)


def share(variance, tokens):
    """(E w)^2 / E w^2 for log w normal with this variance a token and E w = 1, by quadrature."""
    x, weight = np.polynomial.hermite_e.hermegauss(80)
    weight, total = weight / weight.sum(), tokens * variance
    w = np.exp(np.sqrt(total) * x - total / 2)
    return (weight @ w) ** 2 / (weight @ w**2), weight @ (np.sqrt(variance) * x - variance / 2) ** 2


@pytest.mark.all
@pytest.mark.parametrize("bound", [0.5, 0.9])
@pytest.mark.parametrize("tokens, growth", [(1, 1.0), (1, 2.0), (20, 1.0), (20, 2.0)])
def test_the_effective_sample_size_is_above_the_bound_up_to_the_lag(bound, tokens, growth):
    variance = 4e-3
    _, drift = share(variance, 1)
    lag = lag_law(bound, drift, tokens, growth)
    assert lag >= 1
    assert share(variance * lag**growth, tokens)[0] >= bound
    assert share(variance * (lag + 1) ** growth, tokens)[0] < bound


def test_a_lag_by_hand():
    """s^2 = 2 (sqrt(1 + 0.0404) - 1) = 0.04; -log(0.5) / 0.04 = 17.3, and 4.16 if drifts line up."""
    drift = 0.04 + 0.04**2 / 4
    assert lag_law(0.5, drift) == 17 and lag_law(0.5, drift, growth=2.0) == 4
    assert lag_law(0.5, drift, tokens=100) == 0
    assert lag_law(0.3, 0.4 + 0.4**2 / 4) == 3  # 1.204 / 0.4 = 3.01
    assert lag_law(0.5, 0.0) == math.inf


@pytest.mark.parametrize("call, why", [
    (lambda: least_workers(2, 0.0, 1.0), "train_s is 0.0"),
    (lambda: least_workers(2, 1.0, 0.0), "rate is 0.0"),
    (lambda: least_workers(2, 1.0, 1.0, pause_s=1.0), "stops a sampler during an update of 1.0 s"),
    (lambda: least_staleness(1.0, -1.0, 1.0), "sync_s is -1.0"),
    (lambda: lag_law(1.0, 0.1), "bound is 1.0"),
    (lambda: lag_law(0.5, -0.1), "drift -0.1"),
])
def test_refusals(call, why):
    with pytest.raises(ValueError, match=why):
        call()
