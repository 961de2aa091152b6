"""Which settings of a correction hold each factor of the ratio of the trained policy to the sampler.

A loss that is right holds every factor once: engine, staleness and trust region, see `estimators.loss`.
"""

from collections.abc import Iterator

import ml_collections

from jaxrl_tis.diagnostics.attribution import FACTORS
from jaxrl_tis.estimators import loss, methods
from jaxrl_tis.learner.correction import Correction
from jaxrl_tis.learner.snapshots import APPROXIMATIONS

OF_CENTRE = {"old": FACTORS[1:], "prox": FACTORS[2:], "behav": FACTORS}
OF_GAP = {"engine": FACTORS[:1], "folded": FACTORS[:2], "policy": FACTORS}
SET_STALENESS = (
    "set correction.staleness_weight to 'token_vanilla' or 'token_tis(cap=2.0)', or to 'folded' for one "
    "weight of both"
)


def holders(c: Correction) -> dict[str, list[str]]:
    """Returns {factor: the settings that hold it}."""
    name, _ = c.objective
    traits, found = methods.traits("objective", name), {factor: [] for factor in FACTORS}

    def add(who, factors):
        for factor in factors:
            found[factor].append(who)

    ratio = f"the ratio of objective {name!r}"
    if "logp_behav" in traits.needs and not traits.weighs_itself:
        add(ratio, FACTORS)
    elif traits.has_ratio:
        add(ratio, OF_CENTRE[c.centre])
    if traits.weighs_itself:
        add(f"objective {name!r} itself", ("engine",))
    if c.weight != loss.NO_WEIGHT:
        add(f"the weight {c.weight[0]!r}", OF_GAP[c.gap_at_update])
    if c.weighs_staleness:
        add(f"the staleness weight {c.staleness_weight[0]!r}", ("staleness",))
    return found


def problems(c: Correction) -> Iterator[str]:
    """Yields a sentence for factors that the loss would count twice."""
    for factor, who in holders(c).items():
        if len(who) < 2:
            continue
        remedy = "set correction.weight to 'none'"
        if factor == "staleness" and c.staleness_weight != loss.NO_WEIGHT:
            remedy = "set correction.staleness_weight to 'none'"
            if c.centre == "old":
                remedy = f"set correction.centre to 'prox', or {remedy[4:]}"
        yield f"{who[0]} and {who[1]} would count the factor {factor} of the ratio twice; {remedy}"
        return
    if c.staleness_weight == loss.FOLDED and c.weight == loss.NO_WEIGHT:
        yield (
            "correction.staleness_weight = 'folded' makes staleness a part of correction.weight, which is "
            "'none'; choose a weight, as 'token_mis(upper=5.0)'"
        )


def staleness_problems(
    c: Correction, rollout: ml_collections.ConfigDict, is_replayed: bool
) -> Iterator[str]:
    """Yields a sentence for a factor that a run with tokens of older weights cannot know, or that its
    loss does not hold. Around the sampler a loss may do without any weight, as a baseline, see
    `doubts`; with groups that are trained on again it may not."""
    setting = f"tokens of older weights (rollout.schedule = {rollout.schedule!r})"
    if is_replayed:
        setting = f"replayed samples (rollout.replay = {rollout.replay!r})"
    source, found = rollout.old_logp_source, holders(c)
    if source in APPROXIMATIONS and c.weighs_staleness:
        yield (
            f"the staleness weight {c.staleness_weight[0]!r} needs the learner's log-probs under the "
            f"weights that sampled each token, and with rollout.old_logp_source = {source!r} the factor "
            "staleness is not known apart from engine; set correction.staleness_weight to 'folded', or "
            "the source to ring"
        )
    elif found["staleness"] or source in APPROXIMATIONS and found["engine"]:
        return
    elif not c.is_bypassed or is_replayed:
        remedy = "set correction.weight, as 'token_tis(cap=2.0)'" if c.is_bypassed else SET_STALENESS
        yield f"{setting} have the factor staleness, and nothing in the loss holds it; {remedy}"


def doubts(c: Correction, is_stale: bool, has_gap: bool, num_updates: int) -> Iterator[str]:
    """Yields a line for each factor of the ratio that stays in the gradient.

    Args:
      is_stale: whether tokens can be of older weights.
      has_gap: whether the sampler's program is another than the learner's.
      num_updates: of a rollout batch.
    """
    found = holders(c)
    missing = ["engine"] * (has_gap and not found["engine"] and not c.is_centered)
    missing += ["staleness"] * (is_stale and c.is_bypassed and not found["staleness"])
    if missing:
        yield (
            f"nothing in the loss holds the factor {' and '.join(missing)} of the ratio to the sampler, "
            "which stays in the gradient: set correction.weight, as 'token_tis(cap=2.0)'"
        )
    if num_updates > 1 and not found["trust_region"]:
        yield (
            f"objective {c.objective[0]!r} has no ratio, and a batch has {num_updates} updates: from the "
            "second on, samples are another policy's. Choose an objective with a ratio, or "
            "correction.centre = 'behav' with a weight"
        )
    if not is_stale and c.weighs_staleness:
        yield (
            f"correction.staleness_weight is {c.staleness_weight[0]!r}, and all tokens of a batch are of "
            "the newest weights: it is 1"
        )
