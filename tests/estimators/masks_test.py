"""Rejection: verl's decisions, exact bounds, limits, and loops over tokens in plain Python."""

import functools
import inspect
import math

import jax
import numpy as np
import pytest

from jaxrl_tis.estimators import masks, methods
from jaxrl_tis.estimators import weights
from tests import jitted

masks, weights = map(jitted.Module, (masks, weights))

NAN = float("nan")
# log_ratio = old - behaviour of a two-row example whose decisions verl 0.9.1 computed.
OLD = np.array([[-1, -0.5, -2, -0.1], [-0.7, -1.2, -0.3, -9]])
BEHAV = np.array([[-1.2, -0.4, -3, -0.1], [-0.9, -0.6, -0.35, -1]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])

BANDS = {
    "token_k1": {"lower": 0.7, "upper": 1.6},
    "token_k2": {"upper": 0.1},
    "token_k3": {"upper": 0.1},
    "seq_sum_k1": {"lower": 0.4, "upper": 1.8},
    "seq_sum_k2": {"upper": 0.4},
    "seq_sum_k3": {"upper": 0.4},
    "seq_mean_k1": {"upper": 1.3},
    "seq_mean_k2": {"upper": 0.12},
    "seq_mean_k3": {"upper": 0.12},
    "seq_max_k2": {"upper": 0.2},
    "seq_max_k3": {"upper": 0.2},
    "token_ratio": {"lower": 0.7, "upper": 1.6},
    "seq_sum_ratio": {"lower": 0.4, "upper": 1.8},
    "seq_mean_ratio": {"lower": 0.7, "upper": 1.2},
}
PARAMETERS = BANDS | {
    "token_dp": {"upper": 0.1},
    "veto": {"veto_ratio": 0.6, "veto_upper": 1.7},
    "seq_logprob_error": {"upper": 1.4},
    "trm": {"trm_delta": 0.4},
    "trm_k3": {"trm_delta": 0.2},
    "opsm": {"opsm_delta": 0.05},
    "staleness": {"staleness_max": 2},
    "token_binary_kl": {"upper": 0.05},
    "seq_mean_binary_kl": {"upper": 0.2},
    "token_kpop": {"upper": 0.05},
}
OF_THE_BATCH = {"m2po", "clip_cov", "top_entropy"}  # in rank_masks_test


def is_inside(name, peers, own):
    """Whether a token with log-ratio `own` in a sequence of log-ratios `peers` is kept."""
    level, _, kind = name.rpartition("_")
    band = BANDS[name]
    if kind == "ratio":
        total = math.fsum(peers)
        log = {"token": own, "seq_sum": total, "seq_mean": total / len(peers)}[level]
        return band["lower"] <= math.exp(max(-20.0, min(20.0, log))) <= band["upper"]
    formula = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }[kind]
    values = [formula(max(-20.0, min(20.0, x))) for x in peers]
    statistic = {
        "token": formula(max(-20.0, min(20.0, own))),
        "seq_sum": math.fsum(values),
        "seq_mean": math.fsum(values) / len(values),
        "seq_max": max(values),
    }[level]
    if kind != "k1":
        return statistic <= band["upper"]
    lower = band["lower"] if "lower" in band else 1 / band["upper"]
    return math.log(lower) <= statistic <= math.log(band["upper"])


def kl(p_logits, q_logits):
    p, q = np.exp(p_logits), np.exp(q_logits)
    p, q = p / p.sum(), q / q.sum()
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def binary_kl(logp, log_ratio, is_reverse=False):
    p, q = (
        min(max(math.exp(x), 1e-6), 1 - 1e-6)
        for x in (logp, logp + log_ratio)
    )
    if is_reverse:
        p, q = q, p
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def oracle(name, inputs):
    """The decision for every token from its definition, in Python floats."""
    log_ratio, mask, seg = (inputs[field] for field in ("log_ratio", "mask", "seg"))
    keep = np.zeros(mask.shape, bool)
    for b, t in np.argwhere(mask):
        is_peer = mask[b] if seg is None else mask[b] & (seg[b] == seg[b, t])
        peers = list(log_ratio[b, is_peer])
        if name in BANDS:
            keep[b, t] = is_inside(name, peers, log_ratio[b, t])
        elif name == "token_dp":
            logp = inputs["logp_behav"][b, t]
            keep[b, t] = abs(math.exp(logp + log_ratio[b, t]) - math.exp(logp)) <= 0.1
        elif name.endswith("_binary_kl"):
            gaps = list(map(binary_kl, inputs["logp_behav"][b, is_peer], peers))
            own = binary_kl(inputs["logp_behav"][b, t], log_ratio[b, t])
            value = own if name.startswith("token_") else math.fsum(gaps) / len(gaps)
            keep[b, t] = value <= PARAMETERS[name]["upper"]
        elif name == "veto":
            keep[b, t] = all(0.6 <= math.exp(x) <= 1.7 for x in peers)
        elif name == "seq_logprob_error":
            factors = [math.exp(min(20.0, abs(x))) for x in peers]
            keep[b, t] = math.fsum(factors) / len(factors) <= 1.4
        elif name == "token_kpop":
            pair = inputs["logp_behav"][b, t], log_ratio[b, t]
            keep[b, t] = max(binary_kl(*pair), binary_kl(*pair, is_reverse=True)) <= 0.05
        elif name == "trm":
            logits = zip(
                inputs["logits_behav"][b, is_peer], inputs["logits"][b, is_peer], strict=True
            )
            keep[b, t] = max(kl(*pair) for pair in logits) <= 0.4
        elif name == "trm_k3":
            keep[b, t] = (
                max(math.exp(x) - 1 - x for x in np.clip(peers, -20, 20)) <= 0.2
            )
        elif name == "opsm":
            gap = (inputs["logp_behav"] - inputs["logp"])[b, is_peer]
            keep[b, t] = inputs["adv"][b, t] >= 0 or math.fsum(gap) / len(gap) <= 0.05
        elif name == "staleness":
            keep[b, t] = all(7 - v <= 2 for v in inputs["version"][b, is_peer])
        else:
            raise AssertionError(name)
    return keep


@jitted.function
def all_masks(inputs):
    log_ratio, mask, seg = (inputs[field] for field in ("log_ratio", "mask", "seg"))
    kept = {}
    for name, parameters in PARAMETERS.items():
        needed = {field: inputs[field] for field in methods.needs("mask", name)}
        kept[name] = masks.MASKS[name](log_ratio, mask, seg, **needed, **parameters)
    return kept


@functools.cache
def make_inputs(is_packed):
    rng = np.random.default_rng(6)
    shape = (40, 7)
    seg = np.sort(rng.integers(1, 4, shape), axis=1) if is_packed else None
    mask = rng.random(shape) < 0.6
    mask[2] = False
    mask[3] = np.arange(7) == 4
    scale = rng.choice([0.3, 1.0, 30.0], shape, p=(0.9, 0.07, 0.03))
    logits = rng.normal(size=(*shape, 5))
    logits_behav = logits + 0.4 * rng.normal(size=logits.shape)
    logits_behav[rng.random(logits.shape) < 0.1] = -np.inf
    return {
        "log_ratio": scale * rng.normal(size=shape),
        "mask": mask,
        "seg": seg,
        "logp": rng.normal(size=shape),
        "logp_behav": rng.normal(size=shape),
        "adv": rng.normal(size=shape),
        "version": rng.choice([4, 5, 6, 7], shape, p=(0.1, 0.3, 0.3, 0.3)),
        "current_version": 7,
        "logits": logits,
        "logits_behav": logits_behav,
    }


def poison(inputs, value):
    """The same inputs with `value` in every entry outside the mask."""
    mask, out = inputs["mask"], dict(inputs)
    for field in ("log_ratio", "logp", "logp_behav", "adv"):
        out[field] = np.where(mask, inputs[field], value)
    for field in ("logits", "logits_behav"):
        out[field] = np.where(mask[..., None], inputs[field], value)
    out["version"] = np.where(mask, inputs["version"], -1000)
    return out


@functools.cache
def computed(is_packed):
    with jax.enable_x64(True):
        return all_masks(poison(make_inputs(is_packed), NAN))


def test_a_band_on_the_probabilities_by_hand():
    # 0.5 against 0.4 and 0.25, 0.001 against 0.1: differences 0.1 in binary, 0.25 and 0.099.
    learner, sampler = np.log(np.array([[[0.5, 0.5, 0.001]], [[0.4, 0.25, 0.1]]]))
    kept = masks.token_dp(
        learner - sampler, np.ones((1, 3), bool), logp_behav=sampler, upper=0.1001
    )
    assert kept.tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    "name, bound",
    [("token_dp", 0.3), ("token_kpop", 0.1), ("token_binary_kl", 0.1), ("seq_mean_binary_kl", 0.003)],
)
@pytest.mark.parametrize("sampler", [-30.0, -9999.0, -math.inf])
def test_a_token_that_only_the_learner_finds_likely_is_dropped(name, bound, sampler):
    """The learner's probability is 0.99, the sampler's 0: 30 nats, which is more than weights count."""
    behav, mask = np.array([[sampler]]), np.ones((1, 1), bool)
    mask_of = masks.MASKS[name]
    assert not mask_of(-0.01 - behav, mask, logp_behav=behav, upper=bound)[0, 0]
    assert mask_of(np.zeros((1, 1)), mask, logp_behav=np.array([[-30.0]]), upper=bound)[0, 0]


def test_the_error_of_a_sequence_by_hand():
    # Ratios 3 and 1/3 are a factor of 3 each, and their geometric mean is 1. A ratio that is not
    # finite is never kept.
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]])
    ratio = np.array([[3, 1 / 3, 9], [1, 1, 4], [np.inf, 1, 1], [np.nan, 1, 1]])
    kept = lambda **bound: masks.seq_logprob_error(np.log(ratio), mask, **bound)[:, 0].tolist()
    assert kept() == [False, True, False, False]  # 3 and 2
    assert kept(upper=3.0001) == [True, True, False, False]
    assert kept(upper=1.9999) == [False] * 4


def test_the_veto_has_two_sides():
    log_ratio = np.log(np.array([[1.0, 100.1], [1.0, 99.9], [0.99e-4, 1.0], [1.01e-4, 1.0]]))
    kept = lambda **bound: masks.veto(log_ratio, np.ones((4, 2)), **bound)[:, 0].tolist()
    assert kept(veto_upper=100.0) == [False, True, False, True]
    assert kept() == [True, True, False, True]


def test_every_entry_has_parameters_in_these_tests():
    assert PARAMETERS.keys() | OF_THE_BATCH == masks.MASKS.keys()


@pytest.mark.all
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_masks_equal_a_loop_over_tokens(name, is_packed):
    inputs, kept = make_inputs(is_packed), computed(is_packed)[name]
    expected = oracle(name, inputs)
    assert kept.dtype == bool
    np.testing.assert_array_equal(kept, expected)
    assert np.any(expected) and np.any(inputs["mask"] & ~expected)


def test_statistics_by_hand():
    # k2 = l^2 / 2; k3: e^0.3 - 1.3 = 0.0499, e^-0.1 - 0.9 = 0.0048, e^0.2 - 1.2 = 0.0214.
    log_ratio, mask = np.array([[0.3, -0.1, 0.2, NAN]]), np.array([[1, 1, 1, 0]])
    expected = {
        "token_k1": [-0.3, 0.1, -0.2, 0],
        "token_k2": [0.045, 0.005, 0.02, 0],
        "token_k3": [0.0499, 0.0048, 0.0214, 0],
        "seq_sum_k1": [-0.4] * 3 + [0],
        "seq_mean_k2": [0.07 / 3] * 3 + [0],
        "seq_max_k2": [0.045] * 3 + [0],
        "seq_sum_k3": [0.0761] * 3 + [0],
        "seq_max_k3": [0.0499] * 3 + [0],
    }
    for name, row in expected.items():
        actual = masks.statistic(name, log_ratio, mask)
        np.testing.assert_allclose(actual, [row], atol=6e-5, err_msg=name)


def test_decisions_and_statistics_of_verl():
    cases = {  # threshold, kept tokens, mean of the statistic over valid tokens
        "token_k1": (
            {"lower": 0.5, "upper": 2.0},
            [[1, 1, 0, 1], [1, 1, 1, 0]],
            -0.107143,
        ),
        "token_k2": ({"upper": 0.1}, [[1, 1, 0, 1], [1, 0, 1, 0]], 0.10375),
        "token_k3": ({"upper": 0.1}, [[1, 1, 0, 1], [1, 0, 1, 0]], 0.130858),
        "seq_sum_k1": (
            {"lower": 0.5, "upper": 2.0},
            [[0] * 4, [1, 1, 1, 0]],
            -0.478571,
        ),
        "seq_sum_k2": ({"upper": 0.5}, [[0] * 4, [1, 1, 1, 0]], 0.38625),
        "seq_sum_k3": ({"upper": 0.5}, [[0] * 4, [1, 1, 1, 0]], 0.498935),
        "seq_mean_k1": ({"lower": 0.9, "upper": 1.1}, [[0] * 4] * 2, -0.107143),
        "seq_mean_k2": ({"upper": 0.08}, [[0] * 4, [1, 1, 1, 0]], 0.10375),
        "seq_mean_k3": ({"upper": 0.08}, [[0] * 4, [1, 1, 1, 0]], 0.130858),
        "seq_max_k2": ({"upper": 0.3}, [[0] * 4, [1, 1, 1, 0]], 0.362857),
        "seq_max_k3": ({"upper": 0.3}, [[0] * 4, [1, 1, 1, 0]], 0.474223),
    }
    for name, (parameters, kept, mean) in cases.items():
        actual = masks.MASKS[name](OLD - BEHAV, MASK, **parameters)
        np.testing.assert_array_equal(actual, np.array(kept, bool), err_msg=name)
        statistic = masks.statistic(name, OLD - BEHAV, MASK)
        np.testing.assert_allclose(
            np.sum(statistic) / 7, mean, rtol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean"])
def test_the_band_of_k1_is_on_the_inverse_ratio(level):
    # pi_old / mu = 3, so mu / pi_old = 1/3: inside [0.25, 1.5], outside [0.5, 4].
    log_ratio, mask = np.log(np.array([[3.0]])), np.ones((1, 1))
    k1, ratio = masks.MASKS[f"{level}_k1"], masks.MASKS[f"{level}_ratio"]
    for function, is_accepted in ((k1, True), (ratio, False)):
        assert function(log_ratio, mask, lower=0.25, upper=1.5) == is_accepted
        assert function(log_ratio, mask, lower=0.5, upper=4.0) != is_accepted


@pytest.mark.parametrize("upper", [1.0, 2.0, 1.001])
@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean"])
def test_both_ends_of_a_k1_band_are_kept(level, upper):
    mask = np.ones((1, 1))
    for log_ratio in (math.log(upper), -math.log(upper)):
        log_ratio = np.array([[log_ratio]])
        assert masks.MASKS[f"{level}_k1"](log_ratio, mask, upper=upper)
        assert masks.MASKS[f"{level}_k1"](log_ratio, mask, lower=1 / upper, upper=upper)
        assert not masks.MASKS[f"{level}_k1"](1.001 * log_ratio + 1e-5, mask, upper=1.0)


def test_the_upper_end_of_k2_k3_and_the_veto_is_kept():
    mask = np.ones((1, 2))
    log_ratio = np.array([[0.5, 0.5]])  # k2 = 0.125 each, exact in binary
    uppers = {"token": 0.125, "seq_sum": 0.25, "seq_mean": 0.125, "seq_max": 0.125}
    for level, upper in uppers.items():
        k2 = masks.MASKS[f"{level}_k2"]
        assert np.all(k2(log_ratio, mask, upper=upper))
        assert not np.any(k2(log_ratio, mask, upper=upper - 1e-6))
    for name in BANDS:
        if name.endswith(("k2", "k3")):
            assert np.all(masks.MASKS[name](np.zeros((1, 2)), mask, upper=0.0)), name
    assert np.all(masks.veto(np.zeros((1, 2)), mask, veto_ratio=1.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ratio_bands_and_the_veto_keep_their_bounds(dtype):
    """As the weights of the same bands: exp would put log(1.3) below 1.3, or log(0.1) below 0.1."""
    step = 2e-6 if dtype == np.float32 else 1e-14
    pairs = {"token_ratio": "token_mis", "seq_sum_ratio": "seq_mis", "seq_mean_ratio": "geo_mis"}
    bounds = (0.1, 1.3, 2.0)
    mask = np.ones((3, 1))

    @jitted.function
    def kept(log_ratio):
        """[below, at, above] of each bound"""
        found = {("veto", x): masks.veto(log_ratio[x], mask, veto_ratio=x) for x in bounds}
        for name, weight in pairs.items():
            for x in bounds:
                for band in ({"lower": x, "upper": 9.0}, {"lower": 0.0, "upper": x}):
                    is_accepted = masks.MASKS[name](log_ratio[x], mask, **band)
                    w = weights.WEIGHTS[weight](log_ratio[x], mask, **band)
                    is_lower = band["lower"] > 0
                    found[name, x, is_lower] = is_accepted
                    found[weight, x, is_lower] = w > 0
        return found

    with jax.enable_x64(dtype == np.float64):
        near = np.array([[-step], [0.0], [step]])
        found = kept({x: np.array(np.log(x) + near, dtype) for x in bounds})
    for (name, x, *is_lower), is_accepted in found.items():
        expected = [False, True, True] if name == "veto" or is_lower[0] else [True, True, False]
        np.testing.assert_array_equal(is_accepted[:, 0], expected, err_msg=f"{name} {x} {is_lower}")


def test_on_policy_nothing_is_rejected():
    inputs = make_inputs(False)
    inputs = inputs | {"log_ratio": np.zeros((40, 7)), "logp": inputs["logp_behav"]}
    inputs["logits"] = inputs["logits_behav"]
    exact = {"trm_delta": 0.0, "opsm_delta": 0.0, "staleness_max": 3, "upper": 1.0}
    for name, parameters in PARAMETERS.items():
        needed = {field: inputs[field] for field in methods.needs("mask", name)}
        tight = {key: exact.get(key, value) for key, value in parameters.items()}
        kept = masks.MASKS[name](inputs["log_ratio"], inputs["mask"], **needed, **tight)
        np.testing.assert_array_equal(kept, inputs["mask"], err_msg=name)


def test_one_catastrophic_token_drops_its_sequence():
    log_ratio = np.log(np.array([[1.0, 0.9e-4, 1.0, 1.0, 1.1e-4, 1e4]]))
    seg, mask = np.array([[1, 1, 1, 2, 2, 2]]), np.ones((1, 6), bool)
    np.testing.assert_array_equal(
        masks.veto(log_ratio, mask, seg), [[0, 0, 0, 1, 1, 1]]
    )
    np.testing.assert_array_equal(masks.veto(log_ratio, mask), np.zeros((1, 6)))
    without = mask & (np.arange(mask.shape[1]) != 1)
    np.testing.assert_array_equal(
        masks.veto(log_ratio, without, seg), [[1, 0, 1, 1, 1, 1]]
    )


def test_trust_region_mask_is_a_maximum_over_tokens():
    # KL of (0.5, 0.5) against (0.4, 0.6): 0.5 ln(0.5/0.4) + 0.5 ln(0.5/0.6) = 0.020411.
    behav = np.log(np.array([[[0.5, 0.5]] * 3]))
    learner = np.log(np.array([[[0.5, 0.5], [0.4, 0.6], [0.5, 0.5]]]))
    mask, unused = np.ones((1, 3), bool), np.full((1, 3), NAN)

    def is_accepted(mask, delta):
        return masks.trm(
            unused, mask, logits_behav=behav, logits=learner, trm_delta=delta
        )

    assert np.all(is_accepted(mask, 0.0205)) and not np.any(is_accepted(mask, 0.0204))
    without = mask & (np.arange(3) != 1)
    np.testing.assert_array_equal(is_accepted(without, 1e-6), [[1, 0, 1]])
    assert np.all(is_accepted(mask, np.inf))


def test_the_sampler_may_exclude_tokens_and_the_learner_may_not():
    # KL of (1, 0) against (0.5, 0.5) is ln 2; of (0.5, 0.5) against (1, 0) infinite.
    one, half = np.array([[[0.0, -np.inf]]]), np.zeros((1, 1, 2))
    mask = np.ones((1, 1))
    for delta, is_accepted in ((0.694, True), (0.693, False)):
        kept = masks.trm(mask, mask, logits_behav=one, logits=half, trm_delta=delta)
        assert kept == is_accepted
    assert not masks.trm(mask, mask, logits_behav=half, logits=one, trm_delta=1e6)


def test_off_policy_sequence_mask_by_hand():
    # mean(log mu - log pi) = 0.6 in the first row and -0.6 in the second.
    behav = np.array([[-1.0, -1.0, NAN], [-1.6, -1.6, NAN]])
    logp = np.array([[-1.6, -1.6, NAN], [-1.0, -1.0, NAN]])
    mask, adv = (
        np.array([[1, 1, 0]] * 2),
        np.array([[-1.0, 1.0, NAN], [-1.0, 1.0, NAN]]),
    )

    def is_accepted(adv, delta):
        return masks.opsm(
            behav - 5.0, mask, logp=logp, logp_behav=behav, adv=adv, opsm_delta=delta
        )

    np.testing.assert_array_equal(is_accepted(adv, 0.5), [[0, 1, 0], [1, 1, 0]])
    np.testing.assert_array_equal(is_accepted(np.abs(adv), 0.5), mask)
    np.testing.assert_array_equal(is_accepted(0.0 * adv, 0.5), mask)
    np.testing.assert_array_equal(is_accepted(adv, np.inf), mask)
    np.testing.assert_array_equal(is_accepted(adv, 0.61), mask)
    logp = behav - 0.5  # exact in binary: the bound itself is kept
    np.testing.assert_array_equal(is_accepted(adv, 0.5), mask)
    np.testing.assert_array_equal(is_accepted(adv, 0.499), [[0, 1, 0]] * 2)


def test_staleness_counts_the_oldest_token():
    version = np.array([[5, 6, 6, 3, 4, 4], [4, 2, 6, 6, 6, 6]])
    mask = np.array([[1, 1, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1]])
    seg = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])

    def is_accepted(staleness_max):
        return masks.staleness(
            np.zeros((2, 6)),
            mask,
            seg,
            version=version,
            current_version=6,
            staleness_max=staleness_max,
        )

    np.testing.assert_array_equal(is_accepted(0), np.zeros((2, 6)))
    np.testing.assert_array_equal(is_accepted(1), [[1, 1, 1, 0, 0, 0], [0] * 6])
    np.testing.assert_array_equal(is_accepted(2), [[1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1]])
    np.testing.assert_array_equal(is_accepted(3), mask)


def test_several_criteria_are_all_met_on_the_mask_as_sampled():
    inputs = make_inputs(True)
    arguments = [inputs[field] for field in ("log_ratio", "mask", "seg")]
    criteria = [("token_k1", BANDS["token_k1"]), ("seq_max_k2", {"upper": 0.3})]
    criteria += [("staleness", PARAMETERS["staleness"])]
    fields = {field: inputs[field] for field in ("version", "current_version", "adv")}
    kept = masks.all_of(criteria, *arguments, **fields)[0]
    expected = inputs["mask"].copy()
    for name, parameters in criteria:
        needed = {field: inputs[field] for field in methods.needs("mask", name)}
        expected &= np.asarray(masks.MASKS[name](*arguments, **needed, **parameters))
    np.testing.assert_array_equal(kept, expected)
    np.testing.assert_array_equal(masks.all_of([], *arguments)[0], inputs["mask"])


def test_unknown_criteria_and_missing_fields_are_errors():
    arguments = np.zeros((1, 2)), np.ones((1, 2))
    with pytest.raises(ValueError, match="'token_k4'.*token_k1"):
        masks.all_of([("token_k4", {})], *arguments)
    with pytest.raises(KeyError, match="opsm needs the field 'logp'.*'adv'"):
        masks.all_of([("opsm", {"opsm_delta": 0.1})], *arguments, adv=arguments[0])
    with pytest.raises(TypeError, match="upper"):
        masks.MASKS["seq_max_k2"](*arguments)


def test_needs_are_required_keywords():
    for name, function in masks.MASKS.items():
        keywords = inspect.signature(function).parameters
        for field in methods.needs("mask", name):
            assert keywords[field].kind == keywords[field].KEYWORD_ONLY, (name, field)
            assert keywords[field].default is keywords[field].empty, (name, field)
