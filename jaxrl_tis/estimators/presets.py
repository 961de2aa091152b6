"""Named corrections: combinations of centre, weights, masks and objective.

Each preset is the fields of `config.correction` that it sets; a field that the config spells out
wins over the preset's. The first block are verl's 19 presets (verl 0.9.1,
verl/trainer/config/algorithm.py), with its policy losses: dual-clip PPO, or REINFORCE. Then the
variants of the blog post on truncated importance sampling (Yao et al. 2025, "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training"), and what common systems need.
"""

from typing import Any

GEO_BAND = "seq_mean_k1(lower=0.999, upper=1.001)"
SEQ_BAND = "seq_sum_k1(lower=0.5, upper=2.0)"
K3_BOUND = "seq_mean_k3(upper=0.01)"
ICEPOP = "token_icepop(lower=0.5, upper=5.0)"
UNCLIPPED = "ppo(clip_low=1.0, clip_high=inf)"


def _bundle(
    centre: str, weight: str, masks: str, objective: str, staleness_weight: str = "none"
) -> dict[str, str]:
    return {
        "centre": centre, "weight": weight, "staleness_weight": staleness_weight, "masks": masks,
        "objective": objective, "centering": "none", "routing": "none",
    }


def _decoupled(weight: str, masks: str = "") -> dict[str, str]:
    return _bundle("old", weight, masks, "dual_clip")


def _bypass(objective: str, weight: str = "none", masks: str = "") -> dict[str, str]:
    return _bundle("behav", weight, masks, objective)


def _ppo(weight: str, centre: str = "old") -> dict[str, str]:
    return _bundle(centre, weight, "", "ppo")


def _at_prox(weight: str, staleness_weight: str, objective: str = "ppo") -> dict[str, str]:
    return _bundle("prox", weight, "", objective, staleness_weight)


def _asynchronous() -> dict[str, str]:
    return _at_prox("token_mis(upper=5.0)", "folded")


def _centered(weight: str) -> dict[str, str]:
    return _bypass("reinforce", weight) | {"centering": "top(32)"}


NORMAL, TIS_2 = _ppo("none"), _ppo("token_tis(cap=2.0)")
FACTORED = _at_prox("token_tis(cap=2.0)", "token_vanilla")

BY_MINIBATCHES = "by minibatches"  # of routing, see `routing`


def routing(minibatches: int) -> str:
    """The routes to replay in models with experts, by the updates of a rollout batch: none in one, r2
    in two, r3 beyond (arXiv:2512.01374)."""
    return {1: "none", 2: "r2"}.get(minibatches, "r3")


# The fields of config.correction that a preset sets.
FIELDS = ("centre", "weight", "staleness_weight", "masks", "objective", "centering", "routing")

PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": _decoupled("token_tis"),
    "decoupled_seq_is": _decoupled("seq_tis"),
    "decoupled_token_icepop": _decoupled(ICEPOP),
    "decoupled_seq_is_rs": _decoupled("seq_tis", SEQ_BAND),
    "decoupled_geo_rs": _decoupled("none", GEO_BAND),
    "decoupled_geo_rs_seq_tis": _decoupled("seq_tis", GEO_BAND),
    "decoupled_geo_rs_token_tis": _decoupled("token_tis", GEO_BAND),
    "decoupled_k3_rs": _decoupled("none", K3_BOUND),
    "decoupled_k3_rs_seq_tis": _decoupled("seq_tis", K3_BOUND),
    "decoupled_k3_rs_token_tis": _decoupled("token_tis", K3_BOUND),
    "bypass_ppo_clip": _bypass("dual_clip"),
    "bypass_ppo_clip_geo_rs": _bypass("dual_clip", masks=GEO_BAND),
    "bypass_ppo_clip_k3_rs": _bypass("dual_clip", masks=K3_BOUND),
    "bypass_pg_is": _bypass("reinforce", "seq_tis"),
    "bypass_pg_token_icepop": _bypass("reinforce", ICEPOP),
    "bypass_pg_geo_rs": _bypass("reinforce", masks=GEO_BAND),
    "bypass_pg_geo_rs_seq_tis": _bypass("reinforce", "seq_tis", GEO_BAND),
    "bypass_pg_geo_rs_token_tis": _bypass("reinforce", "token_tis", GEO_BAND),
    "disabled": _decoupled("none"),
    # The blog post's comparison.
    "normal": NORMAL,
    "ppo_is": _ppo("none", centre="behav"),
    "vanilla_is": _ppo("token_vanilla"),
    "tis_2": TIS_2,
    "tis_8": _ppo("token_tis(cap=8.0)"),
    # Every factor of the ratio with a bound of its own. In `decoupled` (arXiv:2110.00641), engine and
    # staleness are one weight; in `capped_ratio` all three are weights.
    "factored": FACTORED,
    "decoupled": _at_prox("token_vanilla", "folded"),
    "capped_ratio": _at_prox("token_tis(cap=2.0)", "token_vanilla", "cispo(clip_high=inf)"),
    "seq_capped_ratio": _at_prox(
        "seq_tis(cap=2.0)", "seq_vanilla", "cispo(clip_high=inf, level=seq)"
    ),
    # MIS-PPO (Liu et al. 2025): PPO around the sampler, its ratio masked to [0, C] and unclipped.
    "mis_ppo": _bypass(UNCLIPPED, masks="token_ratio(lower=0.0, upper=2.0)"),
    "seq_mis_ppo": _bypass(UNCLIPPED, masks="seq_sum_ratio(lower=0.0, upper=2.0)"),
    # Centred scores (arXiv:2609.20807), alone and with a weight.
    "centered": _centered("none"),
    "centered_tis_2": _centered("token_tis(cap=2.0)"),
    # FlashREINFORCE (Hu et al. 2026); its advantage and aggregation are fields of their own.
    "flash_reinforce": _bypass("reinforce", "token_vanilla", "seq_mean_binary_kl(upper=0.003)"),
    # Unclipped ratios inside a trust region: prime-rl's default loss, and KPop (arXiv:2606.15079).
    "ipo": _bypass("reinforce", "token_vanilla", "token_dp(upper=0.3)"),
    "kpop": _bypass("reinforce", "token_vanilla", "token_kpop(upper=0.1)"),
    # By system: what samples, and how far behind the learner.
    "same_engine": NORMAL,
    "colocated": TIS_2,
    "disaggregated": TIS_2,
    "async": _asynchronous(),
    "icepop": _ppo(ICEPOP),
    "moe": TIS_2 | {"routing": BY_MINIBATCHES},
    "async_moe": FACTORED | {"routing": BY_MINIBATCHES},
}
