"""Facts and findings about a sampler whose weights stay behind while its version says that it is fresh.

An adapter of LoRA never arrives, or the sampler keeps the weights of its start. Samples then stay as
they were, and the gap is the distance that the policy has moved: it grows with this distance and not
with the lag. Other gaps grow, too, when entropy or length change. There the samples change.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

from jaxrl_tis.doctor.asynchrony import MEAN_LAG, lag_correlation
from jaxrl_tis.doctor.case import K3, KL, LAG, LENGTH, Case, Clause, Finding, is_not, is_so
from jaxrl_tis.doctor.corrections import moving
from jaxrl_tis.doctor.frameworks import ABS_GAP, KL_REF, REWARD, SAMPLER_LOGP

DISTANCES = (KL_REF, "lora/norm")  # of the policy from its base; else the steps
SAMPLES = (LENGTH, SAMPLER_LOGP, REWARD)  # of the sampler alone
BLOCKS = 10  # parts of the record, whose means are compared


def blocks(case: Case, metric: str) -> list[float]:
    """Returns the means of the BLOCKS equal parts of a record; KeyError with too few values."""
    values = [x for _, x in sorted(case.series[metric].items())] if metric in case.series else []
    least = max(case.thresholds["frozen_steps"], BLOCKS)
    if len(values) < least:
        raise KeyError(f"{least:g} values of {metric}, there are {len(values)}")
    edges = [len(values) * i // BLOCKS for i in range(BLOCKS + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(y < x for y in values) + sum(y == x for y in values) / 2 for x in values]


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Returns Spearman's correlation, and 0 where one of the two is constant or not finite."""
    is_usable = all(map(math.isfinite, (*xs, *ys))) and min(len(set(xs)), len(set(ys))) > 1
    return statistics.correlation(_ranks(xs), _ranks(ys)) if is_usable else 0.0


def _has_moved(case, metric):
    return metric in case.series and len(set(case.series[metric].values())) > 1


def _distance(case):
    """Returns (blocks of the distance of the policy from its base, its name)."""
    for metric in DISTANCES:
        if _has_moved(case, metric):
            return [abs(x) for x in blocks(case, metric)], metric
    return list(range(BLOCKS)), "the steps"


def _gap_by_distance(case):
    gap = [abs(x) for x in blocks(case, moving(case))]
    distance, name = _distance(case)
    return rank_correlation(gap, distance), f"rank correlation of {moving(case)} with {name}"


def _gap_grown(case):
    first, *_, last = (abs(x) for x in blocks(case, moving(case)))
    return (last / first if first else math.inf), f"{moving(case)}, last tenth of the record by the first"


def nats(case: Case) -> list[float]:
    """Returns the blocks of the gap as a KL. A normal log ratio of variance s^2 has the mean |x| =
    s sqrt(2 / pi) and the KL s^2 / 2."""
    for metric in (K3, KL):
        if metric in case.series:
            return [abs(x) for x in blocks(case, metric)]
    if ABS_GAP in case.series:
        return [math.pi / 4 * x * x for x in blocks(case, ABS_GAP)]
    raise KeyError(f"{K3} or {ABS_GAP}")


def _share_of_distance(case):
    """Returns (the growth of the gap by the growth of the KL to the reference, its name). 1 where no
    such KL is logged and the sampler's own log-probs are, which show whether samples change."""
    if not _has_moved(case, KL_REF):
        if SAMPLER_LOGP not in case.series:
            raise KeyError(f"{KL_REF} to the reference, or {SAMPLER_LOGP}")
        return 1.0, f"{SAMPLER_LOGP} is logged"
    gap, distance = nats(case), [abs(x) for x in blocks(case, KL_REF)]
    moved = distance[-1] - distance[0]
    share = (gap[-1] - gap[0]) / moved if moved > 0 else 0.0
    return share, f"growth of the gap by that of {KL_REF}"


def samples_move(case: Case) -> tuple[float, str]:
    """Returns (largest rank correlation of a metric of the samples with the steps, its name)."""
    found = [
        (abs(rank_correlation(blocks(case, m), range(BLOCKS))), f"{m} with the steps")
        for m in SAMPLES if _has_moved(case, m)
    ]
    return max(found, default=(0.0, "metrics of the samples"))


def lag_grown(case: Case) -> float | tuple[float, str]:
    """Returns the growth of the lag over the record, in versions."""
    if LAG not in case.series:
        if LAG in case.unlogged:
            raise KeyError(LAG)
        return 0.0
    first, *_, last = blocks(case, LAG)
    return last - first, f"{LAG}, last tenth of the record minus the first"


def _gap_follows_lag(case):
    """Returns the correlation of the changes of the gap and the lag; 0 with too few of them."""
    try:
        return lag_correlation(case, moving(case), MEAN_LAG)
    except KeyError:
        return 0.0


FACTS = {
    "record/gap_by_distance": _gap_by_distance,
    "record/gap_grown": _gap_grown,
    "record/gap_nats": lambda case: (nats(case)[-1], "the gap in the last tenth, nats"),
    "record/share_of_distance": _share_of_distance,
    "record/samples_move": samples_move,
    "record/lag_grown": lag_grown,
    "record/gap_follows_lag": _gap_follows_lag,
    "config/has_lora": lambda case: case.setting("model.lora") != "none",
}

CAUSES = (
    Finding(
        "frozen", "the sampler's adapter is old or absent, or its weights are pinned",
        "After a sync, score one fixed text with sampler and learner, and compare fingerprints of "
        "the weights that the sampler holds. The gap grows with the distance of the policy from "
        "its start, the lag does not, and the samples do not change. So the sampler still has the "
        "weights of its start, whatever version it reports.",
        all_of=(
            Clause("record/gap_by_distance", ">=", "frozen_correlation"),
            Clause("record/gap_grown", ">=", "frozen_rise"),
            Clause("record/gap_nats", ">", "frozen_kl"),
            Clause("record/share_of_distance", ">", "frozen_share"),
            Clause("record/samples_move", "<", "samples_move"),
            Clause("record/lag_grown", "<", "lag_grown"),
            Clause("record/gap_follows_lag", "<=", "lag_correlation"),
        ),
        mistake="lower the precision gap, or add weights: they correct towards a policy that stands still",
    ),
    Finding(
        "frozen.adapter", "the run trains an adapter: the sampler's is old or absent",
        "Check every weight sync with rollout.canary, which compares the factors' fingerprints.",
        all_of=(is_so("config/has_lora"),), parent="frozen",
        changes={"rollout.canary": lambda c: "lora" if c.setting("rollout.canary") == "never" else None},
    ),
    Finding(
        "frozen.pinned", "the run trains all weights: the sampler's are pinned",
        "Check every weight sync with rollout.canary. Compare the sampler's log-probs of a fixed "
        "text at two versions: they must differ.",
        all_of=(is_not("config/has_lora"),), parent="frozen", changes={"rollout.canary": "always"},
    ),
)
