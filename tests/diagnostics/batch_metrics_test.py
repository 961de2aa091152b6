"""Metrics of a batch: verl's definitions by hand and by loops, packed rows, empty selections."""

import numpy as np
import pytest

from jaxrl_tis.diagnostics import batch_metrics
from tests import jitted

batch_metrics = jitted.Module(batch_metrics)

NAN = float("nan")

reward_metrics = batch_metrics.reward_metrics
advantage_metrics = batch_metrics.advantage_metrics
staleness_metrics = batch_metrics.staleness_metrics
variance_proxy_metrics = batch_metrics.variance_proxy_metrics
length_metrics = batch_metrics.length_metrics


def assert_metrics(metrics, expected):
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def summary(name, x):
    return {f"{name}/mean": np.mean(x), f"{name}/max": np.max(x), f"{name}/min": np.min(x)}


def test_reward_metrics_leave_out_aborted_samples_and_unknown_scores():
    scores = np.array([1.0, 0.0, -0.5, 7.0, NAN])
    rewards = np.array([0.9, -0.1, -0.6, 7.0, NAN])
    metrics = reward_metrics(scores, rewards, np.array([3, 1, 9, 0, 2]))
    expected = summary("critic/score", [1.0, 0.0, -0.5])
    expected |= summary("critic/rewards", [0.9, -0.1, -0.6])
    assert_metrics(metrics, expected)


def test_advantage_metrics():
    adv = np.array([[1.0, -1.0, NAN], [0.5, NAN, NAN]])
    returns = np.array([[2.0, 0.0, NAN], [1.0, NAN, NAN]])
    values = np.array([[1.5, 0.5, NAN], [0.0, NAN, NAN]])
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    expected = summary("critic/advantages", [1.0, -1.0, 0.5])
    expected |= summary("critic/returns", [2.0, 0.0, 1.0])
    assert_metrics(advantage_metrics(adv, returns, mask), expected)
    # Residuals .5, -.5, 1: mean 1/3, unbiased variance (1/36 + 25/36 + 16/36) / 2 = 7/12;
    # returns have variance 1.
    expected |= summary("critic/values", [1.5, 0.5, 0.0])
    expected["critic/vf_explained_var"] = 1 - 7 / 12 / (1 + 1e-5)
    assert_metrics(advantage_metrics(adv, returns, mask, values), expected)
    alone = advantage_metrics(adv, returns, np.array([[1, 0, 0], [0, 0, 0]]), values)
    assert alone["critic/vf_explained_var"] == 0.0


def test_length_metrics():
    metrics = length_metrics(
        np.array([4, 2, 8, 8]),
        np.array([16, 0, 3, 5]),
        max_prompt_length=8,
        max_response_length=16,
        num_turns=np.array([1, 2, 3, 2]),
        tool_calls=np.array([0, 1, 2, 1]),
    )
    expected = summary("response_length", [16, 0, 3, 5]) | summary("prompt_length", [4, 2, 8, 8])
    expected |= summary("response_length_non_aborted", [16, 3, 5])
    expected |= summary("num_turns", [1, 2, 3, 2]) | summary("tool_call_counts", [0, 1, 2, 1])
    expected |= {
        "response/aborted_ratio": 0.25,
        "response_length/clip_ratio": 0.25,
        "response_length_non_aborted/clip_ratio": 1 / 3,
        "prompt_length/clip_ratio": 0.5,
    }
    assert_metrics(metrics, expected)
    turns = length_metrics(
        np.array([4, 2]), np.array([30, 20]), max_prompt_length=8, max_response_length=16,
        longest_turn=np.array([16, 10]),
    )
    assert turns["response_length/clip_ratio"] == 0.5 and turns["response_length/max"] == 30


def test_staleness_metrics():
    # Versions 5 5 7, 6, and none; the learner is at 9. Tokens between are a tool's.
    version = np.array([[5, 99, 5, 7], [6, -9, 99, 99], [0, 0, 0, 0]])
    mask = np.array([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    expected = summary("training/off_policy/trajectory_spans", [3, 1])
    expected |= summary("training/off_policy/trajectory_staleness", [2, 3])
    expected |= summary("training/off_policy/trajectory_staleness_worst", [4, 3])
    expected["training/off_policy/token_staleness/mean"] = (4 + 4 + 2 + 3) / 4
    assert_metrics(staleness_metrics(version, 9, mask), expected)
    seg = np.array([[1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0]])
    packed = staleness_metrics(version.reshape(1, 12), 9, mask.reshape(1, 12), seg)
    assert_metrics(packed, expected)


def make_batch():
    """Four rows of up to six tokens, the third empty; NaN outside the mask."""
    rng = np.random.default_rng(8)
    mask = np.arange(6)[None, :] < np.array([6, 1, 0, 4])[:, None]
    mask[0, 2] = False
    p = rng.uniform(0.05, 0.95, mask.shape)
    batch = {
        "logp_old": np.log(p),
        "adv": rng.normal(size=mask.shape),
        "sum_pi_squared": p**2 + (1 - p) ** 2 * rng.random(mask.shape),
        "w": rng.exponential(1.0, mask.shape),
    }
    batch["w"][0, 1] = 0.0  # a rejected token
    seg = np.where(np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] > 0, 1 + np.arange(4)[:, None] % 2, 0)
    poisoned = {name: np.where(mask, x, NAN).astype(np.float32) for name, x in batch.items()}
    return poisoned, mask, seg


def expected_proxies(batch, mask, is_weighted, gradient_norm):
    """verl's definition by a loop over sequences in float64."""
    power, a_squared, expected_w = [], [], []
    for row in np.flatnonzero(mask.any(axis=1)):
        field = {name: x[row][mask[row]].astype(np.float64) for name, x in batch.items()}
        w = field["w"] if is_weighted else np.ones_like(field["w"])
        score = (1 - 2 * np.exp(field["logp_old"]) + field["sum_pi_squared"]) * w**2
        a_squared.append(field["adv"].mean() ** 2)
        expected_w.append(score.sum())
        unweighted = np.sum(score / np.maximum(w**2, 1e-10))
        power.append(w.mean() ** 2 * a_squared[-1] * max(unweighted, 0.0))
    signal = 0.0 if gradient_norm is None else gradient_norm**2
    noise = 0.0 if gradient_norm is None else max((np.mean(power) - signal) / (len(power) - 1), 0)
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": np.mean(power),
        "variance_proxy/proxy3_pure_noise": noise,
        "variance_proxy/expected_a_squared": np.mean(a_squared),
        "variance_proxy/expected_w": np.mean(expected_w),
    }


@pytest.mark.parametrize("is_weighted", [False, True])
def test_variance_proxies(is_weighted):
    batch, mask, seg = make_batch()
    fields = [batch[name] for name in ("logp_old", "adv", "sum_pi_squared")]
    w = batch["w"] if is_weighted else None
    for gradient_norm in (None, 0.1, 100.0):  # below, and far above the total power
        expected = expected_proxies(batch, mask, is_weighted, gradient_norm)
        metrics = variance_proxy_metrics(*fields, mask, w=w, gradient_norm=gradient_norm)
        assert_metrics(metrics, expected)
    dense = variance_proxy_metrics(*fields, mask, w=w, gradient_norm=0.1)
    packed = variance_proxy_metrics(
        *[x.reshape(2, 12) for x in (*fields, mask.astype(np.float32), seg)],
        w=None if w is None else w.reshape(2, 12),
        gradient_norm=0.1,
    )
    assert_metrics(packed, dense)
    for value in (-100.0, np.inf):
        poisoned = [np.where(mask, x, np.float32(value)) for x in fields]
        assert_metrics(variance_proxy_metrics(*poisoned, mask, w=w, gradient_norm=0.1), dense)


def test_the_noise_is_that_of_a_gradient_of_part_of_the_sequences():
    # Power of four sequences of a token with 1 - 2 * .5 + .5 = .5: (1 + 4 + 9 + 16) / 4 * .5 = 3.75.
    adv = np.array([[1.0], [-2.0], [3.0], [-4.0]])
    fields = (np.full((4, 1), np.log(0.5)), adv, np.full((4, 1), 0.5), np.ones((4, 1)))
    # (3.75 - 1.5^2) / (n - 1), n - 1 = 3, 2, 1; one sequence tells nothing of its noise.
    for count, noise in ((None, 0.5), (3, 0.75), (2, 1.5), (1, 0.0)):
        metrics = variance_proxy_metrics(*fields, gradient_norm=1.5, num_sequences=count)
        assert metrics["variance_proxy/proxy3_pure_noise"] == pytest.approx(noise, rel=1e-5)
        assert metrics["variance_proxy/proxy2_total_power"] == pytest.approx(3.75, rel=1e-5)


def test_empty_selections_are_zero():
    none, empty = np.zeros((2, 3), int), np.full((2, 3), NAN, np.float32)
    unknown, lengths = np.full(4, NAN, np.float32), np.zeros(4, int)
    metrics = reward_metrics(unknown, unknown, lengths)
    metrics |= advantage_metrics(empty, empty, none, empty)
    metrics |= staleness_metrics(none + 7, 1, none)
    metrics |= variance_proxy_metrics(empty, empty, empty, none, w=empty, gradient_norm=0.0)
    for name, value in metrics.items():
        assert value == 0.0, name


def test_nothing_carries_a_gradient():
    batch, mask, _ = make_batch()

    def total(batch):
        fields = [batch[name] for name in ("logp_old", "adv", "sum_pi_squared")]
        metrics = batch_metrics.variance_proxy_metrics(
            *fields, mask, w=batch["w"], gradient_norm=0.1
        )
        metrics |= batch_metrics.advantage_metrics(fields[1], fields[0], mask, fields[2])
        return sum(metrics.values())

    for name, gradient in jitted.grad(total)(batch).items():
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient), err_msg=name)
