"""What is accepted holds every factor of the ratio once, or says which one stays in the gradient. The
gradient of a token's loss tells what it holds."""

import itertools

import jax
import numpy as np
import pytest

from jaxrl_tis.estimators.loss import policy_loss
from jaxrl_tis.validate import doubts, validate
from tests import jitted, tiny

# Log-ratios of which no two sums are equal.
FACTORS = {"engine": 0.01, "staleness": 0.02, "trust_region": 0.04}
STALE = dict(rollout__schedule="areal")
RUNS = {
    "synchronous": {}, "stale": STALE, "without old": STALE | dict(rollout__old_logp_source="none"),
}
CASES = list(itertools.product(
    ("ppo", "cispo", "reinforce", "gpg"), ("old", "prox", "behav"), ("none", "token_vanilla"),
    ("none", "token_vanilla", "folded"),
))
NAMES = "objective", "centre", "weight", "staleness_weight"


def held(logs):
    """{case: the sum of the factors that multiply the score of a token}, each as often as it does."""
    chain = np.cumsum([-1.0, *logs.values()])[:, None, None].astype(np.float32)
    fields = dict(zip(("logp_behav", "logp_old", "logp_prox"), chain, strict=False))
    batch = fields | {"adv": np.ones((1, 1), np.float32), "mask": np.ones((1, 1), bool)}

    def gradients(logp):
        of = lambda case: lambda x: policy_loss(x, batch, **dict(zip(NAMES, case, strict=True)))[0]
        return {case: -jax.grad(of(case))(logp)[0, 0] for case in CASES}

    return {case: np.log(x) for case, x in jitted.function(gradients)(chain[3]).items()}


def told(case, run):
    """The factors that a doubt names; None if the config is refused."""
    fields = {f"correction__{name}": x for name, x in zip(NAMES, case, strict=True)}
    config = tiny.config(**fields | RUNS[run], correction__masks="")
    try:
        chosen = validate(config)
    except ValueError:
        return None
    text = " ".join(doubts(config, chosen.correction, chosen.schedule, chosen.replay))
    said = {"engine": "factor engine", "staleness": "staleness of the ratio", "trust_region": "has no ratio"}
    return {name for name, words in said.items() if words in text}


@pytest.mark.parametrize("run", RUNS)
def test_what_is_accepted_holds_every_factor_once_or_says_which_it_lacks(run):
    logs = FACTORS if run != "synchronous" else FACTORS | {"staleness": 0.0}
    sums, whole = held(logs), sum(logs.values())
    found = {case: told(case, run) for case in CASES}
    for case, lacking in found.items():
        if lacking is not None:
            expected = whole - sum(logs[name] for name in lacking)
            assert sums[case] == pytest.approx(expected, abs=1e-5), case
        elif run == "stale" and case[1:4:2] != ("behav", "folded"):
            assert abs(sums[case] - whole) > 1e-3, case
    complete = {case for case, lacking in found.items() if lacking == set()}
    assert ("ppo", "prox", "token_vanilla", "token_vanilla") in complete or run == "without old"
    assert ("cispo", "prox", "token_vanilla", "folded") in complete
