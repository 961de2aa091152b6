"""Counts of what weights and masks did, by hand, and that no configured method goes without."""

import numpy as np
import pytest

from jaxrl_tis.estimators import methods, presets, weights
from jaxrl_tis.estimators.counts import is_count, of_masks, of_weight
from jaxrl_tis.estimators.loss import LossSpec, policy_loss, weight_counts
from tests import jitted
from tests.estimators import samples

weights = jitted.Module(weights)
is_count, of_masks, of_weight = map(jitted.function, (is_count, of_masks, of_weight))
policy_loss, weight_counts = map(jitted.function, (policy_loss, weight_counts))

LOG2 = float(np.log(2.0))
# Six valid tokens; the ratios of learner and sampler are 4, 1, 1/2 and 1, 1/4, 2.
LOG_RATIO = np.array([[2 * LOG2, 0.0, -LOG2, 9.0], [0.0, -2 * LOG2, LOG2, np.nan]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 0]])
OLD = np.full((2, 4), -2.0)
BATCH = {
    "logp_old": OLD, "logp_prox": OLD, "logp_behav": OLD - LOG_RATIO, "mask": MASK,
    "adv": np.ones((2, 4)),
}
PPO = methods.parse("objective", "ppo")


def of(weight, log_ratio=LOG_RATIO, batch=BATCH):
    found = weight_counts(log_ratio, batch, methods.parse("weight", weight))
    order = ("num_tokens", "changed_raw", "changed", "truncated", "dropped")
    return tuple(int(found[f"correction/weight/{name}"]) for name in order)


@pytest.mark.cases("token_mis(upper=2.0)-expected4", "token_tis(cap=1.0)-expected2")
@pytest.mark.parametrize("weight, expected", [
    ("token_vanilla", (6, 4, 4, 0, 0)),
    ("token_tis(cap=3.0)", (6, 4, 4, 1, 0)),  # 4 is above
    ("token_tis(cap=1.0)", (6, 4, 2, 2, 0)),  # 4 and 2 become 1
    ("token_clip(lower=0.4, upper=2.0)", (6, 4, 4, 2, 0)),  # 4 and 1/4
    ("token_mis(upper=2.0)", (6, 4, 4, 0, 1)),  # 4
    ("token_icepop(lower=0.5, upper=3.0)", (6, 4, 4, 0, 2)),  # 4 and 1/4
    ("seq_tis(cap=1.5)", (6, 6, 6, 3, 0)),  # the products are 2 and 1/2
    ("seq_mis(upper=1.5)", (6, 6, 6, 0, 3)),
    ("geo_tis(cap=1.1)", (6, 6, 6, 3, 0)),  # the means are 2^(1/3) and 2^(-1/3)
    ("seq_mask_tis(lower=0.9, upper=2.0)", (6, 4, 5, 0, 3)),  # the second, with its ratio of 1
    ("prefix_ctpo", (6, 5, 5, 5, 0)),  # products 4, 4, 2 and 1, 1/4, 1/2
    # Times the least ratio before: 4, 4, 1/2 and 1, 1/4, 1/2.
    ("prefix_minpro(cap=1.0)", (6, 5, 3, 2, 0)),
])
def test_counts_of_a_weight(weight, expected):
    assert of(weight) == expected


def test_a_weight_that_changes_nothing_is_seen():
    assert of("token_tis", np.zeros((2, 4))) == (6, 0, 0, 0, 0)
    assert of("token_tis", np.full((2, 4), 1e-6)) == (6, 0, 0, 0, 0)  # two programs' rounding
    assert of("token_tis", np.full((2, 4), 1e-4)) == (6, 6, 6, 0, 0)
    assert weight_counts(LOG_RATIO, BATCH, ("none", {})) == {}


def test_rounding_is_no_truncation():
    raw = np.array([[1.1, 2.0, 3.0]])
    found = of_weight(raw * (1 + 1e-7), raw, np.ones((1, 3)))
    assert found["correction/weight/truncated"] == 0
    assert of_weight(raw * (1 - 1e-4), raw, np.ones((1, 3)))["correction/weight/truncated"] == 3


def test_every_bound_of_a_weight_can_be_lifted():
    """A parameter that is none would go unnoticed: what it does would count as the raw weight."""
    names = {p for name in weights.WEIGHTS for p in methods.parameters("weight", name)}
    lifted = {b for name in weights.WEIGHTS for b in methods.traits("weight", name).unbounded}
    assert names - weights.UNBOUNDED.keys() - lifted == {"ctpo_power"}  # the exponent of the bounds


def test_counts_of_masks():
    keep = np.array([[True, False, True, False], [True, True, False, False]])
    found = of_masks(["veto", "token_k1", "token_k1"], [MASK == 1, keep, ~keep], MASK)
    assert {name: int(x) for name, x in found.items()} == {
        "correction/mask/veto/num_tokens": 6, "correction/mask/veto/dropped": 0,
        "correction/mask/token_k1/num_tokens": 6, "correction/mask/token_k1/dropped": 2,
        "correction/mask/token_k1_2/num_tokens": 6, "correction/mask/token_k1_2/dropped": 4,
    }
    assert all(map(is_count, found)) and not is_count("rollout_corr/kl")


def counted(batch, **parts):
    _, metrics = policy_loss(batch["logp_old"], batch, objective=PPO, **parts)
    return {name: int(x) for name, x in metrics.items() if is_count(name)}


def test_bypass_counts_at_the_update():
    masks = methods.parse_all("mask", "token_ratio(upper=3.0, lower=0.3) & veto")
    parts = dict(centre="behav", weight=("token_tis", {"cap": 3.0}), masks=masks)
    found = counted(BATCH, **parts)
    assert found["correction/mask/token_ratio/dropped"] == 2  # of ratio 4 and 1/4
    assert found["correction/mask/token_ratio/num_tokens"] == 6
    assert found["correction/mask/veto/dropped"] == 0
    assert found["correction/weight/truncated"] == 1 and found["correction/weight/num_tokens"] == 6


def test_beside_weights_of_the_batch_only_masks_of_the_update_are_counted():
    masks = methods.parse_all("mask", "veto & trm_k3(trm_delta=0.5)")
    found = counted(BATCH | {"weights": np.ones((2, 4))}, masks=masks, weight=("token_tis", {}))
    # k3 of the ratio 4 is 4 - 1 - log 4 = 1.6; of 1/4 it is 1/4 - 1 + log 4 = 0.64: both are lost.
    assert found == {"correction/mask/trm_k3/num_tokens": 6, "correction/mask/trm_k3/dropped": 6}
    assert counted(BATCH | {"weights": np.ones((2, 4))}, weight=("token_tis", {})) == {}


@pytest.mark.all
@pytest.mark.parametrize("centre", ["old", "behav"])
@pytest.mark.parametrize("name", methods.TABLES["mask"])
def test_every_mask_is_counted_where_it_is_judged(name, centre):
    logp, batch = samples.make()
    mask = samples.method("mask", name)
    _, metrics = policy_loss(
        logp, batch, objective=PPO, masks=(mask,), centre=centre, rejected_in_denominator=True
    )
    count = batch["mask"].sum()
    assert metrics[f"correction/mask/{name}/num_tokens"] == count
    dropped = metrics[f"correction/mask/{name}/dropped"]
    if LossSpec(objective=PPO, masks=(mask,), centre=centre).masks_at_update:
        share = metrics["actor/rejected_fraction"]
        assert dropped == pytest.approx(float(share * count), abs=1e-3)
    assert 0 <= dropped <= count


def test_every_weight_of_a_preset_is_counted():
    for name, parts in presets.PRESETS.items():
        weight = methods.parse("weight", parts["weight"])
        assert bool(weight_counts(LOG_RATIO, BATCH, weight)) == (weight[0] != "none"), name
