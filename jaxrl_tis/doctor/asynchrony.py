"""Facts and findings of runs whose samplers run ahead of the learner, docs/async.md.

The gap of a batch is measured in two ways: mismatch/* at every update, and gate/* at probes. Where
another policy stands in for the weights that drew, only the probes can tell engine and staleness
apart: their engine's part is of a fresh batch, and what is left of the whole is staleness at least.
"""

import itertools
import math

from jaxrl_tis.doctor.case import (
    CHI2, KL, LAG, LENGTH, Case, Clause, Finding, approximates_old_logp, is_ahead, is_direct,
    is_not, is_so,
)
from jaxrl_tis.estimators import methods

OBJECTIVES = ("decoupled", "a3po")  # for stale samples: they clip around the policy of the update
ENGINE_GAP = "mismatch/engine/log_ratio_abs_mean"
STALENESS_GAP = "mismatch/staleness/log_ratio_abs_mean"
MEAN_LAG = "training/off_policy/trajectory_staleness/mean"
IDLE, QUEUE, IN_FLIGHT = "async/learner_idle", "async/queue_groups", "async/in_flight"
AHEAD, RESUMED = "async/batches_ahead", "async/resumed_tokens"
DISCARDED, REPLACED = "async/discarded", "rollout/discarded_groups"
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
    """(engine's, staleness's part of the gap, nats per token)."""
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
    """(largest ratio of a measure of the probes to its bound, that measure)."""
    if all(f"gate/{part}/{m}" not in case.series for m in MEASURES):
        return 0.0, f"gate/{part}"  # the run does not probe
    return max(
        (_probed(case, part, m) / case.setting(f"gate.max_{m}"), f"gate/{part}/{m} by its bound")
        for m in MEASURES
    )


def lag_correlation(case: Case, gap: str, lag: str) -> float:
    """Returns the correlation of the steps' changes of a gap with those of the lag: a trend that both
    have does not count. 0 for what chance makes of so few steps: less than lag_sigma standard errors of
    Fisher's z."""
    steps = case.thresholds["surge_steps"]
    gaps, lags = case.window(gap, steps), case.window(lag, steps)
    common = sorted(gaps.keys() & lags.keys())
    pairs = [
        (gaps[b] - gaps[a], lags[b] - lags[a]) for a, b in itertools.pairwise(common)
        if lags[b] != lags[a]
    ]
    if len(pairs) < case.thresholds["min_steps"]:
        raise KeyError(
            f"{case.thresholds['min_steps']:g} steps after which {lag} changes, with {gap}; there are "
            f"{len(pairs)}"
        )
    xs, ys = zip(*pairs)
    size = math.sqrt(math.fsum(x * x for x in xs) * math.fsum(y * y for y in ys))
    correlation = math.fsum(x * y for x, y in pairs) / size if size else 0.0
    z = math.atanh(max(min(correlation, 1.0 - 1e-9), -1.0 + 1e-9)) * math.sqrt(len(pairs) - 3)
    return correlation if abs(z) >= case.thresholds["lag_sigma"] else 0.0


def corrects_staleness(case: Case) -> bool:
    """Whether what the policy has moved since a token was drawn is in a weight, the objective's own
    too, or the clip is around the policy of the update."""
    weight = case.method("weight")[0]
    is_whole = case.setting("correction.mode") == "bypass" or approximates_old_logp(case)
    return (
        case.method("objective")[0] in OBJECTIVES or weight != "none" and is_whole
        or is_direct(case) or "logp_prox" in methods.needs("weight", weight)
    )


def objective(case: Case) -> str | None:
    """Returns the objective for stale samples, where nothing corrects their staleness."""
    return None if corrects_staleness(case) else "decoupled(upper=5.0)"


def _looks_at_old(case):
    has_weight = case.method("weight")[0] != "none" or case.setting("correction.masks") != ""
    return case.setting("correction.mode") == "decoupled" and has_weight


def _if_ahead(value):
    """A wish that a run with samples of one version alone would refuse."""
    return lambda case: (value(case) if callable(value) else value) if is_ahead(case) else None


def _per_group(metric):
    """A metric over the groups of a batch; 0 where it is not recorded."""
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
    """Returns how many tokens are read anew after an interruption, for each that is trained on."""
    if RESUMED not in case.series:
        return 0.0
    samples = case.setting("rollout.prompts") * case.setting("rollout.group_size")
    return case.mean(RESUMED) / max(samples * case.mean(LENGTH), 1.0)


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
        "versions", "the engine's gap grows with the lag: the old log-probs may be of other weights",
        "At the weights that drew, the engine's part does not know how old a token is. Compare the "
        "versions in the records with the weights that were served and those that are kept for "
        "logp_old; their fingerprints have to be equal.",
        all_of=(STALE, is_not("config/approximates_old_logp"), is_not("config/keeps_old_keys"), GROWS),
        mistake="lowering the precision gap of an engine that is not at fault",
    ),
    Finding(
        "budget", "the gap is above a bound of config.gate",
        "rollout.on_gap_exceeded says what the run does then; the findings below say which part "
        "it is.",
        all_of=(Clause("run/over_budget", ">", 1),),
    ),
    Finding(
        "budget.engine", "the engine alone is above it",
        "Less staleness does not help: give the sampler the learner's precision and kernels, or the "
        "gap the bound that this engine needs.",
        all_of=(Clause("run/engine_over_budget", ">", 1),), parent="budget",
    ),
    Finding(
        "budget.staleness", "staleness makes it",
        "Lower the bound on staleness of rollout.schedule.",
        all_of=(STALE, Clause("run/engine_over_budget", "<=", 1),), parent="budget",
    ),
)

SETUP = (
    Finding(
        "async.engine", "the engine makes most of the gap of stale batches",
        "Format and numerics first, see A: less staleness closes less than half of it. The weight of "
        "the engine's part stays.",
        all_of=(
            STALE, Clause("run/staleness_share", "<", 0.5), Clause("run/engine_gap", ">", 0),
        ), any_of=GAP,
    ),
    Finding(
        "async.staleness", "staleness makes most of the gap",
        "A smaller bound on staleness, or an objective that bears it: the clip around the policy "
        "of the update, decoupled (arXiv:2505.24298), with exact old log-probs "
        "(rollout.old_logp_source ring). The engine's format is not what to repair.",
        all_of=(
            STALE, Clause("run/staleness_share", ">=", 0.5), Clause("run/staleness_gap", ">", 0),
        ), any_of=GAP,
    ),
    Finding(
        "async.naive", "stale samples, and nothing corrects their staleness",
        "Clip around the policy of the update: objective decoupled (arXiv:2505.24298) or a3po "
        "(arXiv:2512.06547) with weight none, preset async; or weigh by the ratio to the sampler, which "
        "needs no old log-probs: objective dis in bypass mode (arXiv:2607.07508). A clip around the "
        "policy that sampled degrades at a staleness of 1 and collapses at 4 in AReaL's ablation.",
        all_of=(is_not("config/corrects_staleness"), Clause(LAG, ">", "lag_naive", absent=False)),
        changes={
            field: _if_ahead(value) for field, value in (
                ("correction.mode", "decoupled"), ("correction.objective", objective),
                ("correction.weight", "none"), ("correction.centering", "none"),
            )
        },
        mistake="a weight of the engine's part alone, which is 1 for a token that is only old",
    ),
    Finding(
        "async.stand_in", "weights and masks look at a policy that did not draw the tokens",
        "With rollout.old_logp_source ewma or none, mismatch/{engine,staleness} and "
        "rollout_corr/* hold both parts in one number: do not read them as the engine's. Probes "
        "(gate/engine) draw a fresh batch and can be trusted. Ring and replica are exact; beside "
        "them it is the objective decoupled that corrects staleness.",
        all_of=(STALE, is_so("config/approximates_old_logp"), is_so("config/looks_at_old")),
    ),
    Finding(
        "async.keys", "the engine's gap grows with the lag, as it does where old keys are kept",
        "In flight, tokens attend to keys and values of older weights, which no log-prob of one "
        "version has. Let new weights interrupt sequences if this part is too large.",
        all_of=(STALE, is_so("config/keeps_old_keys"), GROWS),
    ),
    Finding(
        "async.idle", "the learner waits for samples",
        "A learner never waits if samplers draw a batch in the time of an update, and the bound on "
        "staleness times that time covers a weight sync and the slowest sequence (after "
        "arXiv:2602.02192).",
        all_of=(Clause(IDLE, ">", "idle", absent=False),),
    ),
    Finding(
        "async.samplers", "samplers are slower than the learner",
        "They have not begun all that they may: more samplers, more slots, or shorter responses. A "
        "larger bound would only make samples older.",
        all_of=(Clause("run/ahead_share", "<", "ahead_full"),), parent="async.idle",
        changes={"rollout.workers": lambda case: 2 * case.setting("rollout.workers")},
    ),
    Finding(
        "async.bound", "samplers have begun all that they may",
        "They wait in their turn, for the slowest sequences of a batch: raise the bound on staleness "
        "by one version, or let new weights interrupt sequences. A sample alone waits for no other: "
        "group_size 1 with more prompts, and the advantage batch_mean with the preset flash_reinforce "
        "(FlashREINFORCE), or gae with the objective dis (arXiv:2607.07508).",
        all_of=(Clause("run/ahead_share", ">=", "ahead_full"),), parent="async.idle",
    ),
    Finding(
        "async.full", "whole batches wait, and samplers have nothing to draw: staleness for nothing",
        "The bound is what limits, and the learner does not wait. Lower it by as many versions as "
        "batches wait: samples are then as fast and fresher. Or take fewer samplers.",
        all_of=(
            Clause(IDLE, "<=", "idle_little", absent=False), Clause("run/waiting_batches", ">=", 1),
            Clause("run/in_flight_share", "<", "in_flight_little"),
        ),
    ),
    Finding(
        "async.interrupted", "more tokens are read again after interruptions than are drawn",
        "Hand weights over less often (fully_async with a larger trigger), keep the keys (in_flight), "
        "or let sequences end under their own version (dora).",
        all_of=(Clause("run/read_again", ">", "read_again"),),
    ),
    Finding(
        "async.redundant", "the first candidates to end are the group, which favours short answers",
        "What is discarded was longer than what is kept. Judge lengths and accuracy by evaluations, "
        "and take fewer redundant candidates.",
        all_of=(
            is_so("config/is_redundant"), Clause("run/discarded", ">", "selected"),
        ),
    ),
    Finding(
        "async.replaced", "many groups are replaced because their rewards are all equal",
        "Short groups end, and are replaced, first; those that replace them are of newer weights. "
        "Prompts of a fitting difficulty cost less than rejected ones.",
        all_of=(is_so("config/is_ahead"), Clause("run/replaced", ">", "selected")),
    ),
    Finding(
        "async.shorter", "the run chooses among what ends first, and responses get shorter",
        "Set redundant to 0, or rollout.dynamic_sampling to False, and see whether they still do.",
        all_of=(
            Clause(LENGTH, "<", "shorter", "growth"), Clause(LENGTH, "<", "shorter_sigma", "sigma"),
            is_so("config/is_ahead"),
        ),
        any_of=(
            is_so("config/is_redundant"), Clause("run/replaced", ">", "selected"),
        ),
    ),
)
