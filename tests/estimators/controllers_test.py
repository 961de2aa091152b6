"""Controllers by hand, each both inside jit and outside, and over many steps in a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import controllers
from tests import jitted

controllers = jitted.Module(controllers)

NAN = float("nan")


def eager(function):
    return function


@pytest.fixture(params=[
    pytest.param(eager, marks=pytest.mark.all, id="eager"), pytest.param(jax.jit, id="jit"),
])
def transform(request):
    return request.param


# ESS-guided learning rate


def sequence_log_ratio(w):
    """[B, 2] log-ratios whose sums are the logs of the weights."""
    log_w = np.log(np.asarray(w, np.float32))
    return jnp.stack([0.25 * log_w, 0.75 * log_w], axis=1)


@pytest.mark.parametrize(
    ("w", "parameters", "factor", "ess"),
    [
        # 7.5^2 / (4 * 21.25) = 0.661765, its root 0.813489.
        ([0.5, 1, 2, 4], {}, 0.813489, 0.661765),
        ([0.5, 1, 2, 4], {"vcpo_rule": "linear"}, 0.661765, 0.661765),
        ([0.5, 1, 2, 4], {"vcpo_ess_target": 0.8}, 0.909509, 0.661765),  # root of 0.827206
        ([0.5, 1, 2, 4], {"vcpo_ess_target": 0.6}, 1.0, 0.661765),
        ([3, 3, 3, 3], {}, 1.0, 1.0),
        ([1e-9, 1e9, 1e-9, 1e-9], {}, 0.5, 0.25),
    ],
)
def test_ess_scale(transform, w, parameters, factor, ess):
    scale = transform(functools.partial(controllers.ess_scale, **parameters))
    log_ratio = sequence_log_ratio(w)
    np.testing.assert_allclose(scale(log_ratio, np.ones((4, 2))), (factor, ess), rtol=1e-5)
    # A common factor changes nothing, however large.
    np.testing.assert_allclose(scale(log_ratio + 400.0, np.ones((4, 2))), (factor, ess), rtol=1e-3)


def test_ess_scale_of_packed_rows_and_of_padding(transform):
    scale = transform(controllers.ess_scale)
    log_ratio = sequence_log_ratio([0.5, 1, 2, 4]).reshape(2, 4)
    seg = np.array([[1, 1, 2, 2, 0]] * 2)
    packed = scale(jnp.pad(log_ratio, ((0, 0), (0, 1)), constant_values=NAN), seg > 0, seg)
    np.testing.assert_allclose(packed, (0.813489, 0.661765), rtol=1e-5)
    empty = np.full((2, 3), NAN)
    dense = jnp.concatenate(
        [jnp.pad(sequence_log_ratio([0.5, 1, 2, 4]), ((0, 0), (0, 1)), constant_values=NAN), empty]
    )
    mask = np.arange(3)[None, :] < np.array([2, 2, 2, 2, 0, 0])[:, None]
    np.testing.assert_allclose(scale(dense, mask), (0.813489, 0.661765), rtol=1e-5)
    np.testing.assert_array_equal(scale(empty, np.zeros((2, 3))), (0.0, 0.0))


def test_ess_scale_has_no_gradient_and_checks_its_parameters():
    log_ratio, mask = sequence_log_ratio([0.5, 1, 2, 4]), np.ones((4, 2))
    gradient = jitted.grad(lambda x: controllers.ess_scale(x, mask)[0])(log_ratio)
    np.testing.assert_array_equal(gradient, np.zeros((4, 2)))
    with pytest.raises(ValueError, match="'cube'; choose sqrt or linear"):
        controllers.ess_scale(log_ratio, mask, vcpo_rule="cube")
    with pytest.raises(ValueError, match="vcpo_ess_target is 0.0"):
        controllers.ess_scale(log_ratio, mask, vcpo_ess_target=0.0)


# Learning-rate halving on a surge of the response length

SURGE = {"window": 3, "surge_cooldown": 2, "surge_floor": 0.2}


def surge_scales(lengths, transform=eager, **parameters):
    """The scale after each step, a window of three steps."""
    update = transform(functools.partial(controllers.length_surge, **(SURGE | parameters)))
    state, scales = controllers.length_surge_init(3), []
    for length in lengths:
        state = update(state, length)
        scales.append(float(state.scale))
    return scales


def test_length_surge_step_by_step(transform):
    # 12 is not above 1.2 * 10; 13 is: cut, and two steps without another (14 > 12, 20 > 14.4);
    # 20 > 15.6: cut; 20 > 16.8 in the cool-down; 20 = 20; 30 > 24: cut down to the floor.
    lengths = [10, 10, 10, 12, 13, 14, 20, 20, 20, 20, 30]
    expected = [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2]
    np.testing.assert_allclose(surge_scales(lengths, transform), expected, rtol=1e-6)


def test_length_surge_keeps_the_types_of_its_state():
    # A config may spell the cool-down 2.0; a checkpoint is restored by type.
    state = controllers.length_surge_init(3)
    new = controllers.length_surge(state, 10, surge_cooldown=2.0, surge_floor=0.2, window=3)
    assert [x.dtype for x in new] == [x.dtype for x in state]


def test_the_window_of_a_surge_is_that_of_its_state():
    with pytest.raises(ValueError, match="window is 100, and the state has 3 lengths"):
        controllers.length_surge(controllers.length_surge_init(3), 10, **SURGE | {"window": 100})


def test_length_surge_needs_a_reference():
    assert surge_scales([1, 5, 25]) == [1, 1, 1]  # no full window yet
    assert surge_scales([0, NAN, 10, 50, 50, 11]) == [1] * 6  # no length to compare with
    assert surge_scales([10, 10, 10, 50], surge_floor=2.0) == [1] * 4  # a cut never raises
    assert surge_scales([10, 10, 10, 14], surge_ratio=1.5) == [1] * 4
    np.testing.assert_allclose(surge_scales([10, 10, 10, 14], surge_factor=0.3)[-1], 0.3)
    with pytest.raises(ValueError, match="window is 0"):
        controllers.length_surge_init(0)


# Gradient alignment


def as_tree(x):
    """The vector of four entries as a pytree of two arrays."""
    x = np.asarray(x, np.float32)
    return {"a": x[:1], "b": {"c": x[1:].reshape(1, 3)}}


def as_vector(tree):
    return np.concatenate([np.ravel(tree["a"]), np.ravel(tree["b"]["c"])])


def aligned(transform, gradient, previous, **thresholds):
    """(new gradient, metrics) of the step after `previous`, both as vectors."""
    thresholds = {"gac_low": 0.5, "gac_high": 0.9} | thresholds
    control = transform(functools.partial(controllers.gradient_alignment, **thresholds))
    state = controllers.GradientAlignment(as_tree(previous))
    state, new, metrics = control(state, as_tree(gradient))
    np.testing.assert_array_equal(as_vector(state.previous), np.asarray(gradient, np.float32))
    return as_vector(new), {name: float(x) for name, x in metrics.items()}


def test_an_aligned_gradient_is_reduced_to_the_lower_cosine(transform):
    # c = 3 / 5; the part along the previous one becomes 3 * 0.5 * 0.8 / (0.6 * sqrt(0.75)).
    for scale in (1.0, 1e-3, 1e3):
        new, metrics = aligned(transform, [3, 4, 0, 0], [scale, 0, 0, 0])
        np.testing.assert_allclose(new, [2.309401, 4, 0, 0], rtol=1e-5)
        np.testing.assert_allclose(new[0] / np.linalg.norm(new), 0.5, rtol=1e-5)
        np.testing.assert_allclose(metrics["gac/cosine"], 0.6, rtol=1e-5)
        assert metrics["gac/is_skipped"] == 0.0


@pytest.mark.parametrize(
    ("gradient", "previous", "cosine"),
    [
        ([0, 2, 1, 0], [3, 0, 0, 4], 0.0),
        ([-3, -4, 0, 1], [3, 4, 0, -1], -1.0),
        ([1, 2, 2, 0], [1, 0, 0, 0], 1 / 3),
        ([1, 2, 3, 4], [0, 0, 0, 0], 0.0),  # the first step
        ([0, 0, 0, 0], [1, 2, 3, 4], 0.0),
    ],
)
def test_other_gradients_stay_as_they_are(transform, gradient, previous, cosine):
    new, metrics = aligned(transform, gradient, previous)
    np.testing.assert_array_equal(new, np.array(gradient, np.float32))
    np.testing.assert_allclose(metrics["gac/cosine"], cosine, rtol=1e-6, atol=1e-7)


def test_a_repeated_gradient_is_skipped(transform):
    new, metrics = aligned(transform, [1, -2, 3, 4], [1, -2, 3, 4])
    np.testing.assert_array_equal(new, np.zeros(4))
    assert metrics["gac/is_skipped"] == 1.0


def test_a_lower_cosine_of_zero_projects_all_of_it_out(transform):
    new, _ = aligned(transform, [3, 4, 0, 0], [2, 0, 0, 0], gac_low=0.0)
    np.testing.assert_allclose(new, [0, 4, 0, 0], atol=1e-6)


def test_a_previous_gradient_with_a_nan_is_left_behind(transform):
    control = transform(
        functools.partial(controllers.gradient_alignment, gac_low=0.5, gac_high=0.9)
    )
    state = controllers.GradientAlignment(as_tree([NAN, 1, 1, 1]))
    state, new, _ = control(state, as_tree([1, 2, 3, 4]))
    np.testing.assert_array_equal(as_vector(new), [1, 2, 3, 4])
    _, new, metrics = control(state, as_tree([1, 2, 3, 4]))
    assert metrics["gac/is_skipped"] == 1.0


def test_gradient_alignment_keeps_types_and_checks_its_thresholds():
    gradient = jax.tree.map(lambda x: x.astype(jnp.bfloat16), as_tree([3, 4, 0, 0]))
    state = controllers.gradient_alignment_init(gradient)
    control = functools.partial(controllers.gradient_alignment, gac_low=0.5, gac_high=0.9)
    state, _, _ = control(state, gradient)
    _, new, metrics = control(state, gradient)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves((state, new)))
    assert metrics["gac/cosine"].dtype == np.float32
    with pytest.raises(ValueError, match="gac_low is 0.9 and gac_high 0.5"):
        controllers.gradient_alignment(state, gradient, gac_low=0.9, gac_high=0.5)


# Dual variable of R2VPO


def test_ratio_variance(transform):
    # r = exp(0.3), exp(-0.1), exp(0.2): (0.349859^2 + 0.095163^2 + 0.221403^2) / 3.
    logp = np.array([[-1.0, -2.0, -0.5, NAN]])
    logp_old = logp - np.array([[0.3, -0.1, 0.2, 5.0]])
    variance = transform(controllers.ratio_variance)
    np.testing.assert_allclose(
        variance(logp, logp_old, np.array([[1, 1, 1, 0]])), 0.060159, rtol=1e-4
    )
    assert variance(logp, logp_old, np.zeros((1, 4))) == 0.0
    assert np.isfinite(variance(logp + 300.0, logp_old, np.array([[1, 1, 1, 0]])))
    gradient = jitted.grad(lambda x: controllers.ratio_variance(x, logp_old, logp < 0.0))(logp)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


def test_the_dual_grows_exactly_while_the_variance_is_too_large(transform):
    dual = transform(functools.partial(controllers.r2vpo_dual, r2vpo_bound=0.05, r2vpo_step=2.0))
    state, path = controllers.r2vpo_dual_init(), []
    for variance in (0.15, 0.05, 0.01, 0.0, 0.0, 0.25):
        state = dual(state, variance)
        path.append(float(state.r2vpo_lambda))
    # 0.2, 0.2, 0.2 - 0.08, 0.12 - 0.1, not below 0, 0.4.
    np.testing.assert_allclose(path, [0.2, 0.2, 0.12, 0.02, 0.0, 0.4], rtol=1e-5, atol=1e-7)


def test_the_dual_finds_the_multiplier_of_the_constraint():
    # With A = +-1 the primal optimum is r = 1 + A / (2 lambda), so its variance 1 / (4 lambda^2)
    # meets the bound 0.01 at lambda = 5.
    def step(state, _):
        variance = 0.25 / jnp.square(state.r2vpo_lambda)
        return controllers.r2vpo_dual(state, variance, r2vpo_bound=0.01, r2vpo_step=50.0), None

    end, _ = jax.lax.scan(step, controllers.r2vpo_dual_init(4.0), length=200)
    np.testing.assert_allclose(end.r2vpo_lambda, 5.0, rtol=1e-4)


@pytest.mark.parametrize(("bound", "step"), [(-0.1, 1.0), (0.1, 0.0)])
def test_the_dual_checks_its_constants(bound, step):
    with pytest.raises(ValueError, match=f"r2vpo_bound is {bound} and r2vpo_step {step}"):
        controllers.r2vpo_dual(
            controllers.r2vpo_dual_init(), 0.0, r2vpo_bound=bound, r2vpo_step=step
        )


# Coefficient of the KL penalty


@pytest.mark.parametrize(
    ("kl", "expected"),
    # 0.1 (1 + clip(kl / 6 - 1, +-0.2) 256 / 10000).
    [(12.0, 0.100512), (6.6, 0.100256), (6.0, 0.1), (5.4, 0.099744), (0.0, 0.099488)],
)
def test_adaptive_kl(transform, kl, expected):
    update = transform(functools.partial(controllers.adaptive_kl, kl_target=6.0))
    state = update(controllers.kl_coefficient_init(0.1), kl, 256)
    np.testing.assert_allclose(state.kl_coeff, expected, rtol=1e-6)


def test_adaptive_kl_in_a_scan_keeps_the_type_of_its_state():
    def step(state, kl):
        return controllers.adaptive_kl(state, kl, np.int32(10000)), state.kl_coeff

    with jax.enable_x64(True):
        kl = np.array([0.05, 0.2, 0.2, 0.1])
        end, before = jax.lax.scan(step, controllers.kl_coefficient_init(1.0), kl)
    np.testing.assert_allclose(before, [1.0, 0.8, 0.96, 1.152], rtol=1e-6)
    np.testing.assert_allclose(end.kl_coeff, 1.152, rtol=1e-6)


@pytest.mark.parametrize("parameters", [{"kl_target": 0.0}, {"kl_horizon": -1.0}])
def test_adaptive_kl_checks_its_constants(parameters):
    with pytest.raises(ValueError, match="give both > 0"):
        controllers.adaptive_kl(controllers.kl_coefficient_init(), 0.1, 8, **parameters)


def test_layerwise_perturbation_begins_with_one_deviation():
    state = controllers.layerwise_perturbation(3, perturb_std=0.02)
    np.testing.assert_allclose(state.log_std, [-3.912023] * 3, rtol=1e-6)
    assert state.log_std.dtype == np.float32
    assert controllers.layerwise_perturbation(1).log_std[0] == np.float32(np.log(1e-2))
    for wrong in ({"perturb_std": 0.0}, {"perturb_lr": -1e-4}):
        with pytest.raises(ValueError, match="give a deviation > 0"):
            controllers.layerwise_perturbation(2, **wrong)
