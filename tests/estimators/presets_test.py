"""The presets against verl 0.9.1's table, written out here by its own fields."""

import pytest

from jaxrl_tis.estimators import methods, presets
from jaxrl_tis.estimators.presets import PRESETS

# name: (rollout_is, threshold, rollout_rs, rs threshold (lower, upper), bypass, loss_type)
GEO, K3 = ("seq_mean_k1", (0.999, 1.001)), ("seq_mean_k3", (None, 0.01))
OFF, TOKEN, SEQ, BAND = (None, 2.0), ("token", 2.0), ("sequence", 2.0), ("token", (0.5, 5.0))
NONE = (None, None)
VERL = {
    "decoupled_token_is": (*TOKEN, *NONE, False, "ppo_clip"),
    "decoupled_seq_is": (*SEQ, *NONE, False, "ppo_clip"),
    "decoupled_token_icepop": (*BAND, *NONE, False, "ppo_clip"),
    "decoupled_seq_is_rs": (*SEQ, "seq_sum_k1", (0.5, 2.0), False, "ppo_clip"),
    "decoupled_geo_rs": (*OFF, *GEO, False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": (*SEQ, *GEO, False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": (*TOKEN, *GEO, False, "ppo_clip"),
    "decoupled_k3_rs": (*OFF, *K3, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": (*SEQ, *K3, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": (*TOKEN, *K3, False, "ppo_clip"),
    "bypass_ppo_clip": (*OFF, *NONE, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (*OFF, *GEO, True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (*OFF, *K3, True, "ppo_clip"),
    "bypass_pg_is": (*SEQ, *NONE, True, "reinforce"),
    "bypass_pg_token_icepop": (*BAND, *NONE, True, "reinforce"),
    "bypass_pg_geo_rs": (*OFF, *GEO, True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": (*SEQ, *GEO, True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": (*TOKEN, *GEO, True, "reinforce"),
    "disabled": (*OFF, *NONE, False, "ppo_clip"),
}


def parsed(name):
    bundle = PRESETS[name]
    assert set(bundle) == set(presets.FIELDS)
    return (
        bundle["centre"], methods.parse("weight", bundle["weight"]),
        methods.parse_all("mask", bundle["masks"]),
        methods.parse("objective", bundle["objective"]),
    )


@pytest.mark.parametrize("name", VERL)
def test_verl(name):
    level, threshold, criterion, bounds, is_bypass, loss = VERL[name]
    centre, weight, masks, objective = parsed(name)
    assert centre == ("behav" if is_bypass else "old")
    assert objective[0] == {"ppo_clip": "dual_clip", "reinforce": "reinforce"}[loss]
    if level is None:
        assert weight == ("none", {})
    elif isinstance(threshold, tuple):
        assert weight == (f"{level}_icepop", dict(zip(("lower", "upper"), threshold, strict=True)))
    else:
        short = {"token": "token", "sequence": "seq"}[level]
        assert weight == (f"{short}_tis", {"cap": threshold})
    if criterion is None:
        assert masks == ()
    else:
        [(found, parameters)] = masks
        given = {"lower": bounds[0], "upper": bounds[1]}
        assert found == criterion
        assert parameters == {key: given[key] for key in parameters}


def test_the_blog():
    """Its comparison: PPO alone, PPO on the sampler's log-probs, and weights without and with a cap."""
    assert parsed("normal")[:2] == ("old", ("none", {}))
    assert parsed("ppo_is")[:2] == ("behav", ("none", {}))
    assert parsed("vanilla_is")[1] == ("token_vanilla", {})
    assert parsed("tis_2")[1] == ("token_tis", {"cap": 2.0})
    assert parsed("tis_8")[1] == ("token_tis", {"cap": 8.0})
    assert all(
        parsed(name)[3] == ("ppo", {"clip_low": 0.2, "clip_high": 0.2})
        for name in ("normal", "ppo_is", "vanilla_is", "tis_2", "tis_8")
    )


def test_centered_scores():
    assert parsed("centered") == ("behav", ("none", {}), (), ("reinforce", {}))
    assert parsed("centered_tis_2")[1] == ("token_tis", {"cap": 2.0})
    is_centered = {name for name, bundle in PRESETS.items() if bundle["centering"] != "none"}
    assert is_centered == {"centered", "centered_tis_2"}
    assert PRESETS["centered"]["centering"] == "top(32)"


def test_flash_reinforce():
    """What its authors' code does: a ratio of each token without a cap, whole trajectories dropped by
    a mean above 3e-3, no clip."""
    assert parsed("flash_reinforce") == (
        "behav", ("token_vanilla", {}), (("seq_mean_binary_kl", {"upper": 3e-3}),),
        ("reinforce", {}),
    )


def test_unclipped_ratios_inside_a_trust_region():
    """prime-rl: a ratio of each token without a cap, tokens dropped outside the region, no clip."""
    for name, mask in (("ipo", ("token_dp", {"upper": 0.3})), ("kpop", ("token_kpop", {"upper": 0.1}))):
        assert parsed(name) == ("behav", ("token_vanilla", {}), (mask,), ("reinforce", {}))


def test_every_preset_parses():
    for name in PRESETS:
        parsed(name)


def test_mis_ppo_masks_the_ratio_to_the_sampler():
    for name, mask in (("mis_ppo", "token_ratio"), ("seq_mis_ppo", "seq_sum_ratio")):
        centre, weight, masks, objective = parsed(name)
        assert (centre, weight[0], objective[1]) == ("behav", "none", {"clip_low": 1.0, "clip_high": float("inf")})
        assert masks == ((mask, {"lower": 0.0, "upper": 2.0}),)


def test_routes_are_replayed_by_the_updates_of_a_batch():
    """arXiv:2512.01374: none in one update, r2 in two, r3 beyond."""
    assert [presets.routing(n) for n in (1, 2, 3, 4, 8)] == ["none", "r2", "r3", "r3", "r3"]
    by_minibatches = {name for name, b in PRESETS.items() if b["routing"] != "none"}
    assert by_minibatches == {"moe", "async_moe"}
