"""Exact bias and variance of weights and objectives of a single response.

Every response is enumerated, up to 3^7 or 5^5 responses. Objectives have the sampler as their centre: their own
ratio contains the whole gap between policy and sampler.
"""

from collections.abc import Mapping

import numpy as np

from jaxrl_tis.estimators import centering, methods, presets
from experiments import exact, group_bias
from experiments.group_bias import Row, Step

WEIGHTS = tuple(n for n in methods.TABLES["weight"] if not methods.needs("weight", n))
OBJECTIVES = (
    "ppo",
    "dual_clip",
    "gspo",
    "gmpo",
    "ctpo",
    "tbpo",
    "cispo",
    "dispo(dispo_low_pos=1.0, dispo_high_pos=4.0, dispo_low_neg=0.8, dispo_high_neg=0.28)",
    "topr",
    "topr_token",
    "topr_geo",
    "aspo",
    "minpro",
    "dppo_tv",
    "dppo_kl",
    "vespo",
    "fusion_cap",
    "fusion_shaped",
    "sapo",
    "r2vpo(r2vpo_lambda=0.04)",
)
# Of whole responses, with the weight that is unbiased without a mask.
MASKS = ("seq_logprob_error", "veto(veto_upper=100.0)")
UNCLIPPED = ("ipo", "kpop")  # presets that drop tokens outside of a trust region, and clip nothing
# The mean of a group of one is no baseline: the advantage is the reward.
STEPS = {
    **{name: Step("dr_grpo", weight=name) for name in WEIGHTS},
    **{
        f"{name}, centred": Step("dr_grpo", weight=name, head=3)
        for name in centering.known("weight")
    },
    **{
        f"objective {spelled.split('(')[0]}": Step("dr_grpo", objective=spelled, centre="behav")
        for spelled in OBJECTIVES
    },
    # Responses have one length here, so the mean over tokens leaves the step of `gspo` with this band.
    "objective luspo": Step(
        "dr_grpo", objective=group_bias.LUSPO, centre="behav", aggregation="seq-mean-token-mean"
    ),
    **{
        f"mask {spelled.split('(')[0]}": Step("dr_grpo", weight="seq_vanilla", masks=spelled)
        for spelled in MASKS
    },
    **{
        f"preset {name}": Step("dr_grpo", **{
            part: presets.PRESETS[name][part] for part in ("centre", "weight", "masks", "objective")
        })
        for name in UNCLIPPED
    },
}


def repeats(response: np.ndarray) -> float:
    """Returns the share of tokens that repeat the previous token; this reward depends on prefixes."""
    return float(np.mean(response[1:] == response[:-1]))


def problem(
    centre: str, vocab: int, horizon: int, drift: float = 0.5, seed: int = 0
) -> exact.Problem:
    """Returns the problem: responses of `horizon` tokens, and the reward `repeats` minus its mean under
    the behaviour. The behaviour's logits have normal noise of standard deviation `drift`."""
    rng = np.random.default_rng(seed)
    logits = exact.random_logits(vocab, horizon, rng)
    behaviour = exact.with_engine_noise(logits, drift, rng)
    raw = exact.Problem(logits, behaviour, repeats, horizon)
    mean = raw.probabilities(behaviour) @ raw.responses["rewards"]
    old = behaviour if centre == "behav" else logits
    return exact.Problem(logits, behaviour, lambda y: repeats(y) - mean, horizon, old=old)


def rows(
    steps: Mapping[str, Step], vocab: int, horizon: int, drift: float = 0.5, seed: int = 0
) -> list[Row]:
    """Returns a row for every step, on one response."""
    cases = {x: problem(x, vocab, horizon, drift, seed) for x in ("old", "behav")}
    truth = cases["old"].true_gradient()
    return [
        group_bias.against(truth, name, cases[step.centre], group_bias.loss(step))
        for name, step in steps.items()
    ]
