"""Facts and findings about runs whose samplers run ahead of the learner, docs/async.md.

The gap of a batch is measured in two ways: mismatch/* at every update, and gate/* at probes. Where
another policy approximates the weights that sampled, only the probes separate engine and staleness:
their engine's part comes from a fresh batch, and the rest of the gap is at least the staleness.
"""

import itertools
import math
import statistics

from jaxrl_tis.doctor.case import (
    CHI2, KL, LAG, LENGTH, Case, Clause, Finding, approximates_old_logp, has_older, has_own_weight,
    in_bypass, is_ahead, is_direct, is_not, is_so,
)
from jaxrl_tis.estimators import methods

OBJECTIVES = ("a3po",)  # for stale samples: they clip around the policy of the update by themselves
ENGINE_GAP = "mismatch/engine/log_ratio_abs_mean"
STALENESS_GAP = "mismatch/staleness/log_ratio_abs_mean"
MEAN_LAG = "training/off_policy/trajectory_staleness/mean"
IDLE, QUEUE, IN_FLIGHT = "async/learner_idle", "async/queue_groups", "async/in_flight"
AHEAD, RESUMED = "async/batches_ahead", "async/resumed_tokens"
DISCARDED, REPLACED = "async/discarded", "rollout/discarded_groups"
ACCEPTANCE, DRAFTER_LAG = "rollout/draft_acceptance", "rollout/drafter_lag"
MEASURES = ("d_mean", "d_p99", "d_max", "dp_max", "k3")  # of probes, each with a bound


# Facts


def _probed(case: Case, part: str, measure: str) -> float:
    """Returns the mean of the last probes; KeyError without any in the last surge_steps steps."""
    metric = f"gate/{part}/{measure}"
    values = case.window(metric, case.thresholds["surge_steps"]).values()
    if not values:
        raise KeyError(f"{metric}, which rollout.gap_probe_every measures")
    return math.fsum(values) / len(values)


def _gaps(case):
    """Returns the parts of engine and staleness of the gap, nats per token."""
    try:
        engine = _probed(case, "engine", "d_mean")
        if approximates_old_logp(case):
            return engine, max(0.0, _probed(case, "total", "d_mean") - engine)
        return engine, _probed(case, "staleness", "d_mean")
    except KeyError:
        if approximates_old_logp(case):
            raise
        return case.mean(ENGINE_GAP), case.mean(STALENESS_GAP)


def _staleness_share(case):
    engine, staleness = _gaps(case)
    return staleness / (engine + staleness) if engine + staleness else 0.0


def _over_budget(case, part):
    """Returns (largest ratio of a probe's measure to its bound, that measure)."""
    if all(f"gate/{part}/{m}" not in case.series for m in MEASURES):
        return 0.0, f"gate/{part}"  # the run does not probe
    return max(
        (_by_bound(_probed(case, part, m), case.setting(f"gate.max_{m}")), f"gate/{part}/{m} by its bound")
        for m in MEASURES
    )


def _by_bound(x, bound):
    return x / bound if bound else math.inf if x > 0 else 0.0


def lag_correlation(case: Case, gap: str, lag: str) -> float:
    """Returns the correlation of the step-to-step changes of a gap and the lag, so a common trend does not
    count. Returns 0 below lag_sigma standard errors of Fisher's z, which chance can produce."""
    steps = case.thresholds["surge_steps"]
    gaps, lags = case.window(gap, steps), case.window(lag, steps)
    common = sorted(s for s in gaps.keys() & lags.keys() if math.isfinite(gaps[s] + lags[s]))
    pairs = [
        (gaps[b] - gaps[a], lags[b] - lags[a]) for a, b in itertools.pairwise(common)
        if lags[b] != lags[a]
    ]
    least = max(case.thresholds["min_steps"], 4)  # Fisher's z needs more than 3
    if len(pairs) < least:
        raise KeyError(
            f"{least:g} steps after which {lag} changes, with {gap}; there are {len(pairs)}"
        )
    xs, ys = zip(*pairs, strict=True)
    size = math.sqrt(math.fsum(x * x for x in xs) * math.fsum(y * y for y in ys))
    correlation = math.fsum(x * y for x, y in pairs) / size if size else 0.0
    z = math.atanh(max(min(correlation, 1.0 - 1e-9), -1.0 + 1e-9)) * math.sqrt(len(pairs) - 3)
    return correlation if abs(z) >= case.thresholds["lag_sigma"] else 0.0


def corrects_staleness(case: Case) -> bool:
    """Returns whether staleness is corrected: by a weight of its own or with the engine's, or by the
    objective itself."""
    is_weighted = case.method("weight")[0] != "none"
    is_whole = in_bypass(case) or approximates_old_logp(case)
    return (
        case.method("objective")[0] in OBJECTIVES or is_weighted and is_whole or is_direct(case)
        or case.setting("correction.staleness_weight") != "none"
    )


def fit_objective(case: Case) -> str | None:
    """Returns PPO for an objective that corrects the gap itself, because a weight would correct it twice,
    or that takes no weight; None for any other, and for one that is meant for stale samples."""
    name = case.method("objective")[0]
    if has_older(case) and name in OBJECTIVES:
        return None
    is_unfit = has_own_weight(case) or not methods.traits("objective", name).takes_weight
    return "ppo" if is_unfit else None


def _looks_at_old(case):
    is_apart = case.setting("correction.staleness_weight") != "folded"
    has_weight = is_apart and case.method("weight")[0] != "none"
    return not in_bypass(case) and (has_weight or case.setting("correction.masks") != "")


def _if_older(value):
    """Returns a change for runs with tokens of older weights; other runs would refuse it."""
    return lambda case: (value(case) if callable(value) else value) if has_older(case) else None


def _per_group(metric):
    """Returns a fact: a metric per group of a batch; 0 where it is not recorded."""
    def share(case):
        if metric not in case.series:
            return 0.0
        return case.mean(metric) / case.setting("rollout.prompts"), metric + " per group"

    return share


def _ahead_share(case):
    return case.mean(AHEAD) / (case.schedule.ahead + 1)


def _in_flight_share(case):
    slots = case.setting("engine.slots") * case.setting("rollout.workers")
    return case.mean(IN_FLIGHT) / slots


def _read_again(case):
    """Returns the number of tokens prefilled again after an interruption, per trained token."""
    if RESUMED not in case.series:
        return 0.0
    samples = case.setting("rollout.prompts") * case.setting("rollout.group_size")
    return case.mean(RESUMED) / max(samples * case.mean(LENGTH), 1.0)


def _draft_fall(case):
    """Returns (the part of the first steps' acceptance of drafts that is lost, from what to what)."""
    last, lag = case.mean(ACCEPTANCE), case.mean(DRAFTER_LAG)
    few = int(case.thresholds["min_steps"])
    first = statistics.fmean(x for _, x in sorted(case.series[ACCEPTANCE].items())[:few])
    fall = 1 - last / first if first else 0.0
    return fall, f"part of {ACCEPTANCE} lost, from {first:.2f} to {last:.2f} at lag {lag:.3g}"


def _distillation(case):
    """Returns the engine.drafter_every to set; None where it is set."""
    return 1 if case.setting("engine.drafter_every") != 1 else None


FACTS = {
    "run/staleness_share": _staleness_share,
    "run/engine_gap": lambda c: _gaps(c)[0],
    "run/staleness_gap": lambda c: _gaps(c)[1],
    "run/lag_correlation": lambda c: lag_correlation(c, ENGINE_GAP, MEAN_LAG),
    "run/over_budget": lambda c: _over_budget(c, "total"),
    "run/engine_over_budget": lambda c: _over_budget(c, "engine"),
    "run/ahead_share": _ahead_share,
    "run/in_flight_share": _in_flight_share,
    "run/waiting_batches": _per_group(QUEUE),
    "run/read_again": _read_again,
    "run/discarded": _per_group(DISCARDED),
    "run/replaced": _per_group(REPLACED),
    "run/draft_fall": _draft_fall,
    "config/has_drafter": lambda c: c.setting("engine.drafter") != "",
    "config/is_ahead": is_ahead,
    "config/approximates_old_logp": approximates_old_logp,
    "config/corrects_staleness": corrects_staleness,
    "config/looks_at_old": _looks_at_old,
    "config/keeps_old_keys": lambda c: is_ahead(c) and c.schedule.on_sync == "in_place",
    "config/is_redundant": lambda c: is_ahead(c) and c.schedule.redundant > 0,
}

# Findings

STALE = Clause(LAG, ">", 0, absent=False)
GAP = (Clause(KL, ">", "kl_fine", "steady"), Clause(CHI2, ">", "chi2_moderate", "steady"))
GROWS = Clause("run/lag_correlation", ">", "lag_correlation")

CAUSES = (
    Finding(
        "versions",
        "the engine's gap grows with the lag, so the old log-probs may come from other weights",
        "Compare the versions in the records with the served weights and with the snapshots for "
        "logp_old: their fingerprints must be equal. At the weights that sampled, the engine's "
        "gap does not depend on a token's age.",
        all_of=(STALE, is_not("config/approximates_old_logp"), is_not("config/keeps_old_keys"), GROWS),
        mistake="lower the precision gap: the engine is not at fault",
    ),
    Finding(
        "budget", "the gap is above a bound of config.gate",
        "rollout.on_gap_exceeded sets the reaction. The findings below name the part that exceeds the "
        "bound.",
        all_of=(Clause("run/over_budget", ">", 1),),
    ),
    Finding(
        "budget.engine", "the engine's part alone is above the bound",
        "Give the sampler the learner's precision and kernels, or set the bound that this engine "
        "needs. Less staleness does not help.",
        all_of=(Clause("run/engine_over_budget", ">", 1),), parent="budget",
    ),
    Finding(
        "budget.staleness", "staleness lifts the gap above the bound",
        "Lower the staleness bound of rollout.schedule.",
        all_of=(STALE, Clause("run/engine_over_budget", "<=", 1),), parent="budget",
    ),
)

SETUP = (
    Finding(
        "async.engine", "the engine makes most of the gap of stale batches",
        "Repair number formats and numerics first, see A. Less staleness closes less than half of "
        "the gap. Keep the weight for the engine's part.",
        all_of=(
            STALE, Clause("run/staleness_share", "<", 0.5), Clause("run/engine_gap", ">", 0),
        ), any_of=GAP,
    ),
    Finding(
        "async.staleness", "staleness makes most of the gap",
        "Lower the staleness bound. Or clip around the policy of the update (correction.centre prox, "
        "arXiv:2505.24298) with a staleness_weight, and exact old log-probs (rollout.old_logp_source "
        "ring). The engine's number format is not the cause.",
        all_of=(
            STALE, Clause("run/staleness_share", ">=", 0.5), Clause("run/staleness_gap", ">", 0),
        ), any_of=GAP,
    ),
    Finding(
        "async.naive", "the samples are stale, and nothing corrects their staleness",
        "Clip around the policy of the update, and weight what is older: preset async, decoupled PPO "
        "(arXiv:2505.24298); or the objective a3po (arXiv:2512.06547) with weight none. Or weight by "
        "the ratio to the sampler, which needs no old log-probs: objective dis around the sampler "
        "(arXiv:2607.07508). "
        "In AReaL's ablation a clip around the policy that sampled degrades at a staleness of 1 "
        "and collapses at 4.",
        all_of=(is_not("config/corrects_staleness"), Clause(LAG, ">", "lag_naive", absent=False)),
        changes={
            field: _if_older(value) for field, value in (
                ("correction.centre", "prox"), ("correction.objective", fit_objective),
                ("correction.weight", "token_mis(upper=5.0)"),
                ("correction.staleness_weight", "folded"), ("correction.centering", "none"),
            )
        },
        mistake="weight the engine's part alone: this weight is 1 for a token that is only old",
    ),
    Finding(
        "async.stand_in", "weights and masks use a policy that did not sample the tokens",
        "Do not read mismatch/{engine,staleness} and rollout_corr/* as the engine's gap: with "
        "rollout.old_logp_source ewma or none they contain both parts. Probes (gate/engine) sample a "
        "fresh batch and are exact. Ring and replica are exact, too.",
        all_of=(STALE, is_so("config/approximates_old_logp"), is_so("config/looks_at_old")),
    ),
    Finding(
        "async.keys", "the engine's gap grows with the lag, as expected where old keys are kept",
        "Let new weights interrupt sequences, if this part is too large. In flight, tokens attend "
        "to keys and values of older weights, which no log-prob of one version contains.",
        all_of=(STALE, is_so("config/keeps_old_keys"), GROWS),
    ),
    Finding(
        "async.idle", "the learner waits for samples",
        "Meet two conditions (after arXiv:2602.02192): samplers finish a batch in the time of an "
        "update, and the staleness bound times that time covers a weight sync and the slowest "
        "sequence.",
        all_of=(Clause(IDLE, ">", "idle", absent=False),),
    ),
    Finding(
        "async.samplers", "samplers are slower than the learner",
        "Add samplers or slots, or shorten responses. The samplers have not begun all sequences "
        "that the bound allows, so a larger bound only makes samples older.",
        all_of=(Clause("run/ahead_share", "<", "ahead_full"),), parent="async.idle",
        changes={"rollout.workers": lambda case: 2 * case.setting("rollout.workers")},
    ),
    Finding(
        "async.bound", "the staleness bound holds the samplers back",
        "Raise the staleness bound by one version, or let new weights interrupt sequences: "
        "samplers wait for the slowest sequences of a batch. A sample without a group waits for "
        "no other: group_size 1 with more prompts, and the advantage batch_mean with the preset "
        "flash_reinforce (FlashREINFORCE), or gae with the objective dis (arXiv:2607.07508).",
        all_of=(Clause("run/ahead_share", ">=", "ahead_full"),), parent="async.idle",
    ),
    Finding(
        "async.full", "whole batches wait and samplers are idle, so staleness gains nothing",
        "Lower the staleness bound by the number of waiting batches, or use fewer samplers. "
        "Sampling stays as fast, and samples are fresher.",
        all_of=(
            Clause(IDLE, "<=", "idle_little", absent=False), Clause("run/waiting_batches", ">=", 1),
            Clause("run/in_flight_share", "<", "in_flight_little"),
        ),
    ),
    Finding(
        "async.interrupted", "more tokens are prefilled again after interruptions than trained on",
        "Sync weights less often (fully_async with a larger trigger), keep the KV cache "
        "(in_flight), or let sequences end under their own version (dora).",
        all_of=(Clause("run/read_again", ">", "read_again"),),
    ),
    Finding(
        "async.redundant",
        "a group is made of its first finished candidates, which favours short answers",
        "Use fewer redundant candidates. Judge lengths and accuracy by evaluations, because the "
        "discarded candidates were longer.",
        all_of=(
            is_so("config/is_redundant"), Clause("run/discarded", ">", "selected"),
        ),
    ),
    Finding(
        "async.replaced", "many groups are replaced because all their rewards are equal",
        "Choose prompts of a fitting difficulty, which cost less than rejected ones. Short groups "
        "finish first and are replaced first, by groups of newer weights.",
        all_of=(is_so("config/is_ahead"), Clause("run/replaced", ">", "selected")),
    ),
    Finding(
        "async.shorter", "the run selects the answers that finish first, and responses get shorter",
        "Set redundant to 0, or rollout.dynamic_sampling to False, and check whether responses "
        "still get shorter.",
        all_of=(
            Clause(LENGTH, "<", "shorter", "growth"), Clause(LENGTH, "<", "shorter_sigma", "sigma"),
            is_so("config/is_ahead"),
        ),
        any_of=(
            is_so("config/is_redundant"), Clause("run/replaced", ">", "selected"),
        ),
    ),
    Finding(
        "async.drafter", "the drafter is stale: fewer of its tokens are accepted than at the start",
        "Distil it on the samples of each step with engine.drafter_every (arXiv:2510.26475), with a higher "
        "engine.drafter_lr if it is distilled already, or leave it out. "
        "The samples are right: only the time of drafts is lost.",
        all_of=(
            is_so("config/has_drafter"), Clause(DRAFTER_LAG, ">=", 1, absent=False),
            Clause("run/draft_fall", ">", "draft_fall"),
        ),
        changes={"engine.drafter_every": _distillation},
    ),
)
