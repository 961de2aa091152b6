"""What controllers set for a step and learn from it, by hand."""

import functools
import math

import numpy as np
import pytest

from jaxrl_tis.learner import control, correction
from tests import jitted
from tests.learner.step_test import fields

pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")


def chosen(controllers, **changes):
    return correction.parse(fields(controllers=controllers, **changes))


def begin(c, *of_step):
    return jitted.function(functools.partial(control.begin, c))(*of_step)


def rows():
    """Two responses of 2 and 1 tokens, whose weights are e^(0.5 - 0.25) and e^(-1)."""
    mask = np.array([[False, True, True], [False, True, False]])
    return {
        "mask": mask, "sampled": mask,
        "logp_old": np.full((2, 3), -7.0),  # of older weights
        "logp_prox": np.array([[9.0, -1.0, -2.0], [9.0, -3.0, 9.0]]),
        "logp_behav": np.array([[0.0, -1.5, -1.75], [0.0, -2.0, 0.0]]),
    }


def ess():
    a, b = math.exp(0.25), math.exp(-1)
    return (a + b) ** 2 / (2 * (a * a + b * b))


def test_without_controllers_nothing_is_set():
    c = chosen("")
    assert control.init(c) == {} and begin(c, {}, rows()) == ({}, {})


@pytest.mark.all
def test_ess_scales_the_learning_rate():
    states, settings = begin(chosen("ess_scale"), {}, rows())
    assert states == {} and set(settings) == {"lr_scale"}
    assert settings["lr_scale"] == pytest.approx(math.sqrt(ess()), rel=1e-5)


def test_a_surge_multiplies_what_the_sample_size_left():
    own = chosen("length_surge(surge_cooldown=5, surge_floor=0.1, window=7)")
    assert len(control.init(own)["length_surge"].lengths) == 7
    c = chosen("length_surge(surge_cooldown=5, surge_floor=0.1) & ess_scale(vcpo_ess_target=1e-9)")
    states = control.init(c)
    states, settings = begin(c, states, rows())
    assert settings["lr_scale"] == 1.0
    assert states["length_surge"].lengths[0] == 1.5 and states["length_surge"].step == 1
    # A hundred steps later 1.5 tokens are compared with 1: a surge.
    surge = states["length_surge"]._replace(
        lengths=np.ones(100), step=np.int32(100), scale=np.float32(0.5)
    )
    states, settings = begin(c, {"length_surge": surge}, rows())
    assert settings["lr_scale"] == 0.25 and states["length_surge"].cooldown == 5
    both = chosen("length_surge(surge_cooldown=5, surge_floor=0.1) & ess_scale")
    _, settings = begin(both, {"length_surge": surge}, rows())
    assert settings["lr_scale"] == pytest.approx(0.25 * math.sqrt(ess()), rel=1e-5)


def test_empty_rows_do_not_shorten_the_mean_length():
    c = chosen("length_surge(surge_cooldown=5, surge_floor=0.1)")
    padded = {name: np.pad(x, ((0, 2), (0, 0))) for name, x in rows().items()}
    states, _ = begin(c, control.init(c), padded)
    assert states["length_surge"].lengths[0] == 1.5


def test_answers_that_are_not_trained_on_count_in_the_mean_length():
    """Answers of 2, 1 and 6 tokens; the last is truncated."""
    c = chosen("length_surge(surge_cooldown=5, surge_floor=0.1)")
    cut = {name: np.pad(x, ((0, 1), (0, 3))) for name, x in rows().items()}
    cut["sampled"][2] = True
    states, _ = begin(c, control.init(c), cut)
    assert states["length_surge"].lengths[0] == 3.0


def test_the_kl_coefficient_follows_the_measured_kl():
    c = chosen("adaptive_kl(kl_target=0.1, kl_horizon=100.0)", kl_coeff=0.5)
    states, settings = begin(c, control.init(c), rows())
    assert settings == {"kl_coeff": 0.5}
    # An error of 0.11 / 0.1 - 1 = 0.1 over 20 of 100 sequences: 2 % more.
    states = control.end(c, states, {"actor/kl_to_reference": 0.11}, 20)
    _, settings = begin(c, states, rows())
    assert settings["kl_coeff"] == pytest.approx(0.51, rel=1e-5)


def test_the_dual_starts_at_the_objectives_multiplier():
    c = chosen("r2vpo_dual(r2vpo_bound=0.1, r2vpo_step=2.0)", weight="none",
               objective="r2vpo(r2vpo_lambda=0.3)")
    states, settings = begin(c, control.init(c), rows())
    assert settings["r2vpo_lambda"] == pytest.approx(0.3)
    states = control.end(c, states, {"actor/ratio_variance": 0.25}, 20)
    _, settings = begin(c, states, rows())
    assert settings["r2vpo_lambda"] == pytest.approx(0.6)  # 0.3 + 2 (0.25 - 0.1)


def test_settings_replace_those_of_the_config():
    c = chosen("", weight="none", objective="r2vpo(r2vpo_lambda=0.3)", kl_coeff=0.5)
    data = control.fields({"kl_coeff": 0.7, "r2vpo_lambda": 0.9, "lr_scale": 0.1}, 2)
    assert {name: x.tolist() for name, x in data.items()} == {
        "kl_coeff": [np.float32(0.7)] * 2, "r2vpo_lambda": [np.float32(0.9)] * 2,
        "lr_scale": [np.float32(0.1)] * 2,
    }
    now = correction.controlled(c, data)
    assert now.kl_coeff == np.float32(0.7)
    assert now.objective[1] == c.objective[1] | {"r2vpo_lambda": np.float32(0.9)}
    assert correction.controlled(c, {}) == c
