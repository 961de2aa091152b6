"""Keys of older weights in the prefix cache of an engine of others, from an arithmetic of their gap.

The policy moves by DRIFT at each of 120 steps. A token of entropy H at position t after a prompt of 32
tokens has the mean |log ratio| H (FLOOR + d 32 / (32 + t)), d the distance of the policy from the
weights that read the prompt.
"""

import math

import numpy as np
import pytest

from jaxrl_tis.doctor import frozen, stale_cache
from jaxrl_tis.doctor.asynchrony import MEAN_LAG, STALENESS_GAP
from jaxrl_tis.doctor.case import K3, KL, LAG, PEARSON, THRESHOLDS, Case
from jaxrl_tis.doctor.diagnose import describe, diagnose, walk
from jaxrl_tis.doctor.frameworks import ABS_GAP, REWARD
from tests.doctor.confusion_test import RECORDS, linear, noisy
from tests.doctor.runs import HEALTHY, config_of, names, write_run

EXTERNAL = {"rollout.driver": "external"}
FLOOR, DRIFT, PROMPT = 0.01, 0.002, 32
ENTROPIES = {0: 0.05, 0.1: 0.3, 0.5: 1.0, 2: 3.0}  # least entropy of a bucket: that of its tokens
SHARES = (0.4, 0.3, 0.2, 0.1)
LATER = (0.1, 0.2, 0.3, 0.4)
OCTAVES = (0, 1, 2, 4, 8, 16, 32, 64)  # of responses of 128 tokens


def attended(start):
    """Mean share of the prompt for the tokens of an octave."""
    return np.mean([PROMPT / (PROMPT + t) for t in range(start, max(2 * start, 1))])


SIZES = [max(start, 1) / 128 for start in OCTAVES]
DEEP = [PROMPT / (PROMPT + 127 - start) for start in OCTAVES]  # as if late tokens attended to it most


def process(restart=None, drift=DRIFT, floor=lambda s: FLOOR, shares=lambda s: SHARES, prompt=None,
            noise=0.0, seed=0):
    """The metrics of a run, as functions of the step: entropies and positions every tenth step."""
    prompt = [attended(start) for start in OCTAVES] if prompt is None else prompt
    errors = np.exp(noise * np.random.default_rng(seed).standard_normal((20, 121)))

    def distance(s):
        return drift * (s if restart is None or s < restart else s - restart)

    def size(s, share):
        return floor(s) + distance(s) * share

    def mean(s, power=1):
        entropy = sum(h**power * x for h, x in zip(ENTROPIES.values(), shares(s), strict=True))
        return entropy * sum(x * size(s, a) ** power for a, x in zip(prompt, SIZES, strict=True))

    tenth = lambda f, k: lambda s: float(f(s) * errors[k, s]) if s % 10 == 0 else None
    k3 = lambda s: float(math.pi / 4 * mean(s, 2) * errors[0, s])
    found = {ABS_GAP: lambda s: float(mean(s) * errors[1, s]), K3: k3, KL: k3, REWARD: linear(0.2, 0.6)}
    found |= {STALENESS_GAP: 0.0, "actor/lr": 1e-6, LAG: 0.0, MEAN_LAG: 0.0}
    overall = lambda s: sum(x * size(s, a) for a, x in zip(prompt, SIZES, strict=True))
    for i, (start, h) in enumerate(ENTROPIES.items()):
        name = f"mismatch/entropy_{start}"
        found[f"{name}/log_ratio_abs_mean"] = tenth(lambda s, h=h: h * overall(s), 2 + i)
        found[f"{name}/token_fraction"] = tenth(lambda s, i=i: shares(s)[i], 19)
    entropy = lambda s: sum(h * x for h, x in zip(ENTROPIES.values(), shares(s), strict=True))
    for i, start in enumerate(OCTAVES):
        name = f"mismatch/position_{start}"
        found[f"{name}/log_ratio_abs_mean"] = tenth(
            lambda s, i=i: entropy(s) * size(s, prompt[i]), 6 + i)
        found[f"{name}/token_fraction"] = tenth(lambda s, i=i: SIZES[i], 19)
    return found


def case_of(values, changes=EXTERNAL, steps=120):
    recorded = HEALTHY | dict(values)
    series = {
        name: {s: x for s in range(1, steps + 1) if (x := v(s) if callable(v) else v) is not None}
        for name, v in recorded.items()
    }
    return Case({n: x for n, x in series.items() if x}, config_of(changes).to_dict(), THRESHOLDS, steps)


def is_found(*args, **kwargs):
    found = walk(case_of(*args, **kwargs), (*frozen.CAUSES, *stale_cache.CAUSES))
    return found["stale_cache"].status


def fact(name, values, **kwargs):
    return stale_cache.FACTS[f"cache/{name}"](case_of(values, **kwargs))[0]


def test_the_falls_of_a_gap_by_hand():
    """(1, 2, .., 9) and again (1, 2, .., 9): medians of five are 7 before and 3 after the restart; at
    half of it, too, nothing falls to 0.9 times the start."""
    values = [*range(1, 10)] * 2
    assert stale_cache._falls(values, 1.0) == {9: pytest.approx(7 / 3)}
    assert 9 not in stale_cache._falls(values, 0.9)
    assert stale_cache._falls([1.0] * 4 + [0.0] * 5, 1.0) == {}
    assert stale_cache._falls([1.0] * 5 + [0.0] * 5, 1.0) == {5: math.inf}


def test_facts_by_hand():
    """The restart before step 51 leaves steps 53 to 120. The first and the last sixth of the tenth
    steps are 60 and 120, 9 and 69 steps after the restart."""
    values = process(restart=51)
    late, every = attended(64), sum(x * attended(start) for x, start in zip(SIZES, OCTAVES, strict=True))
    size = lambda d, share: FLOOR + DRIFT * d * share
    grown = lambda share: size(69, share) / size(9, share)
    assert fact("every_entropy", values) == pytest.approx(grown(every))
    # Before position 64 / 8 are 0, 1, 2-3 and 4-7, of 1, 1, 2 and 4 tokens.
    early = np.mean([PROMPT / (PROMPT + t) for t in range(8)])
    assert fact("first_tokens", values) == pytest.approx(grown(early) / grown(late))
    assert fact("restart", values) == pytest.approx(size(48, every) / size(2, every))
    assert fact("gap_by_steps", values) == pytest.approx(1)
    # 68 steps in tenths of 6 or 7: 2 to 7 and 63 to 69 after the restart.
    assert fact("gap_grown", values) == pytest.approx(size(66, every) / size(4.5, every))
    assert fact("policies_grown", values | {"actor/lr": linear(1e-6, 3e-6)}) == pytest.approx(
        (1 + 2 * (117 - 1) / 119) / (1 + 2 * (55.5 - 1) / 119))


def of_position(start, gap, share):
    """A bucket whose gap and share are functions of the step."""
    tenth = lambda f: lambda s: f(s) if s % 10 == 0 else None
    name = f"mismatch/position_{start}"
    return {f"{name}/log_ratio_abs_mean": tenth(gap), f"{name}/token_fraction": tenth(share)}


def test_few_last_tokens():
    """Those from 64 on are half a percent, so the last ones are those from 32 on, whose gap doubles."""
    values = dict.fromkeys(HEALTHY) | {ABS_GAP: lambda s: 0.01 * s}
    values |= of_position(0, lambda s: 0.001 * s, lambda s: 0.495)
    values |= of_position(32, lambda s: 0.1 + 0.1 * (s > 60), lambda s: 0.5)
    values |= of_position(64, lambda s: 9.0, lambda s: 0.005)
    assert fact("first_tokens", values) == pytest.approx((115 / 15) / 2)


def test_chance_in_the_first_tokens_is_none():
    """Their gap is twice as large in the last two values, and falls in those before."""
    values = dict.fromkeys(HEALTHY) | {ABS_GAP: lambda s: 0.01 * s}
    values |= of_position(64, lambda s: 0.1, lambda s: 0.5)
    rising = of_position(0, lambda s: 0.1 + 0.001 * s, lambda s: 0.5)
    chance = of_position(0, lambda s: 0.4 if s > 100 else 0.2 - 0.001 * s, lambda s: 0.5)
    assert fact("first_tokens", values | rising) == pytest.approx(0.215 / 0.115)
    assert fact("first_tokens", values | chance) == 0.0


@pytest.mark.parametrize("values", [
    process(restart=70), process(), process(restart=60, prompt=[0.5] * 8),
    process(restart=70, noise=0.1, seed=1), process(noise=0.1, seed=2),
    process(restart=70) | {LAG: 2.0, MEAN_LAG: lambda s: 1.0 + s % 2, STALENESS_GAP: 0.05},
], ids=["restart", "first tokens", "alike in all tokens", "noise", "noise without a restart", "stale"])
def test_keys_of_older_weights_are_found(values):
    assert is_found(values)


def still(values):
    return values | {REWARD: noisy(0.3, 0.05, 2)}


LOOK_ALIKES = {
    "a gap that stays": process(drift=0.0),
    "precision of growing weights": process(drift=0.0, floor=lambda s: FLOOR * (1 + s / 20)),
    "another gap until a restart": process(drift=0.0, floor=lambda s: FLOOR * (1 if s < 60 else 0.2)),
    "entropy that grows, and falls": process(
        drift=0.0, floor=lambda s: 3 * FLOOR,
        shares=lambda s: np.add(SHARES, (s % 80) / 80 * np.subtract(LATER, SHARES)),
    ) | {  # the last bucket has no end, so its mean entropy grows
        "mismatch/entropy_2/log_ratio_abs_mean": lambda s: 0.1 + (s % 80) / 200 if s % 10 == 0 else None},
    "a lag that grows": process(restart=70) | {LAG: linear(0.0, 8.0)},
    "weights that come every seventieth step": process(restart=70) | {LAG: lambda s: (s % 70) / 10},
    "a lag that the gap follows": process(restart=70, floor=lambda s: FLOOR * (1 + s % 3)) | {
        LAG: lambda s: 1.0 + s % 3, MEAN_LAG: lambda s: 1.0 + s % 3},
    "updates that grow": process(restart=70) | {"actor/lr": linear(1e-6, 9e-6)},
    "staleness that grows": process(restart=70) | {STALENESS_GAP: linear(0.01, 0.05)},
    "a sampler that stays behind": still(process(restart=70)),
    "a gap that grows with the depth": process(prompt=DEEP),
    "a restart that leaves the gap": process(prompt=[0.5] * 8) | {
        ABS_GAP: lambda s: 0.02 + (0.002 * s if s < 70 else 0.001 * (s - 40)), K3: linear(0.002, 0.2)},
    "a small gap": process(restart=70, drift=DRIFT / 20, floor=lambda s: FLOOR / 20),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_other_causes_are_not(name):
    assert is_found(LOOK_ALIKES[name]) is False


def test_of_an_engine_of_ours_nothing_is_asked():
    assert is_found(process(restart=70), {}) is False
    assert is_found({}, {}, steps=12) is False
    assert is_found(process(restart=20), steps=59) is None
    assert is_found(process(restart=70) | {f"mismatch/entropy_{n}/log_ratio_abs_mean": None
                                           for n in ENTROPIES}) is None


def test_no_record_of_another_cause_has_it():
    """Those of confusion_test.py, as if engines of others had sampled."""
    found = [is_found(values, changes | EXTERNAL, steps) for _, _, values, changes, steps in RECORDS]
    assert len(found) > 100 and True not in found


def test_the_remedy_is_named_and_the_engine_is_not_blamed(tmp_path):
    broken = {PEARSON: linear(0.995, 0.8), KL: linear(0.001, 0.2)}
    diagnosis = diagnose(write_run(tmp_path, process() | broken, EXTERNAL))
    assert "stale_cache" in diagnosis["verdict"] and "A" not in names(diagnosis["findings"])
    told = describe(diagnosis)
    for words in ("/reset_prefix_cache", "reset_running_requests", "/flush_cache", "canary"):
        assert words in told
    healthy = diagnose(write_run(tmp_path, process(drift=0.0), EXTERNAL))
    assert healthy["verdict"] == ["healthy"]
    weights = process(drift=0.0, floor=lambda s: FLOOR * (1 + s / 20)) | broken
    assert "A" in diagnose(write_run(tmp_path, weights, EXTERNAL))["verdict"]
