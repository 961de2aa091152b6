"""Thresholds, conditions, findings and facts by which the doctor judges a run.

The findings themselves are the tables of trees.py.
"""

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from jaxrl_tis.estimators import methods, presets
from jaxrl_tis.learner.snapshots import APPROXIMATIONS
from jaxrl_tis.record import names
from jaxrl_tis.rollouts import replay, schedules

# To be calibrated on a run that is known to be good. (ours): the survey gives a word, no number.
THRESHOLDS = {
    "window": 20.0,  # steps judged (ours)
    "min_steps": 10.0,  # fewest values for a verdict (ours)
    "pearson_healthy": 0.99,
    "pearson_broken": 0.95,
    "kl_fine": 0.02,  # nats per token
    "kl_bug": 0.05,  # at the same weights
    "kl_bug_moe": 0.1,  # with routed experts k3 is 1e-3 .. 1e-1 without any bug; dense 1e-5 .. 1e-3
    "kl_negative": -0.02,  # (ours) the mean of k1 is below 0 by noise alone
    "ppl_high": 1.05,  # exp(kl_bug) (ours)
    "ppl_high_moe": 1.1,
    "ppl_low": 0.98,  # exp(-kl_fine) (ours)
    "dp_max": 0.5,  # the response-level threshold of Yao et al. (2025); bfloat16 was seen at 0.4
    "dp_max_quantized": 1.0,  # int8 was seen at 1.0: no evidence beside the quantisation itself
    "engine_share": 0.5,  # of the squared log-ratio of a stale batch (ours)
    "reuse_share": 0.5,  # of the squared log-ratio since a stale batch was drawn (ours)
    "stale_gap": 0.16,  # nats; E|x| of a normal log-ratio x whose KL is kl_fine, s^2 / 2 (ours)
    "route_share": 0.2,  # of the gap, by which tokens with other experts are above the rest (ours)
    "route_dropped": 2.0,  # times as often outside IcePop's band as the rest (ours)
    "chi2_moderate": 0.3,
    "chi2_high": names.CHI2_HIGH["rollout_corr/chi2_token"],
    "tv_low": names.TV_LOW,  # (ours)
    "chi2_toxic": 2.0,
    "chi2_systems": 4.0,
    "head_low": 0.9,  # (ours) the 32 likeliest tokens of a language model hold about 0.95
    "chi2_seq": names.CHI2_HIGH["rollout_corr/chi2_seq"],  # (ours)
    "chi2_seq_product": 10.0,  # where that product weighs: 11 sequences count for one (ours)
    "ess_low": 0.5,
    "ess_broken": 0.3,
    "rejected_look": 0.01,  # (ours) IcePop rejects 1 to 2 tokens in 1,000 in its paper
    "rejected_high": 0.10,
    "rejected_stop": 0.25,
    "rise": 1.2,  # of a mean, from one window to the next (ours)
    "clipped": 0.2,
    "clipped_rise": 1.05,  # of the mean, from one window to the next (ours)
    "clipped_sigma": 3.0,  # of the difference of the two means, in standard errors (ours)
    "clip_width": 0.1,  # narrower bands (GSPO: 4e-4) clip many tokens by design (ours)
    "clip_widest": 1.5,  # of the default; clip-higher (arXiv:2503.14476) takes 1.4 (ours)
    "surge": 1.2,
    "surge_steps": 100.0,
    "lag": 8.0,  # versions; with decoupled PPO as good as synchronous (arXiv:2505.24298)
    "lag_naive": 1.0,  # versions; what PPO around the sampler's policy bears (arXiv:2505.24298)
    "lag_correlation": 0.7,  # of steps' changes; of 20 that are independent 1 in 2,000 is there (ours)
    "lag_sigma": 3.5,  # of that correlation; of changes of 10 to 20 steps of noise 1 in 300 (ours)
    "taken_most": 0.5,  # of the tokens, by the bound of one weight or mask (ours)
    "idle": 0.3,  # of the samplers' turns, with a learner that waits (ours)
    "idle_little": 0.05,  # a learner that does not wait (ours)
    "ahead_full": 0.9,  # of the batches that the schedule lets samplers begin (ours)
    "in_flight_little": 0.5,  # of the slots of all samplers (ours)
    "read_again": 1.0,  # tokens per token that is drawn (ours)
    "selected": 0.25,  # discarded candidates or groups per one that is trained on (ours)
    "shorter": 0.9,  # of a mean length, from one window to the next (ours)
    "steady_sigma": 2.0,  # standard errors by which a mean has to be beyond its threshold (ours)
    "steady_share": 0.75,  # of the steps beyond it by themselves, if the mean is not (ours)
    "surge_sigma": 3.0,  # of the difference of two means, in standard errors (ours)
    "mean_usable": 10.0,  # a mean ratio, in standard errors: else a few steps make it (ours)
    "weight_low": 0.5,  # a mean weight (ours)
    "cap_usual": 3.0,  # bound of weights where none is seen to act: TRL's (ours)
    "shorter_sigma": -3.0,  # of the difference of those two means, in standard errors (ours)
    "mass_lost": 0.005,  # of a distribution, by which a mean ratio is below 1 (ours)
    "mass_sigma": 5.0,  # of that difference, in standard errors, steps taken as independent (ours)
    "mass_gap": 1.0,  # nats; a filter with a larger gap keeps less than exp(-1) of a token's mass (ours)
    "frozen_steps": 40.0,  # fewest of a record that show growth with a distance (ours)
    "frozen_correlation": 0.9,  # rank correlation of the means of tenths of the record (ours)
    "frozen_rise": 2.0,  # of the gap, from the first tenth of the record to the last (ours)
    "frozen_kl": 1e-3,  # nats; of two programs in float32 it is below 1e-5 (ours)
    "frozen_share": 0.1,  # of the growth of the KL to the reference, that of the gap; 1 at a base (ours)
    "samples_move": 0.8,  # rank correlation with the steps; of 10 independent means 1 in 100 (ours)
    "lag_grown": 1.0,  # versions, from the first tenth of the record to the last (ours)
    "cache_fall": 2.0,  # times by which the gap is smaller after a restart of the engine (ours)
    "cache_left": 1.5,  # of the gap at the start of the record, what a restart leaves of it (ours)
    "policies_grown": 1.5,  # of the distance of consecutive policies, first tenth to last (ours)
    "cache_alike": 1.3,  # of the gap of tokens of each entropy, from the first sixth to the last (ours)
    "cache_order": 0.6,  # rank correlation with the steps of the ratio of the two gaps below (ours)
    "cache_first": 1.3,  # of that growth in a response's first tokens over that in its last ones (ours)
    "draft_fall": 0.2,  # of the acceptance of drafts in the first steps of the record (ours)
    "depth_least": 512.0,  # first position of the deepest tokens (ours)
    "depth_share": 0.01,  # of the tokens, those of the deepest octave (ours)
    "depth_gap": 0.02,  # mean |log ratio| of the deepest tokens, nats (ours)
    "depth_rise": 4.0,  # of that gap over the gap of tokens at less than an eighth of the depth (ours)
    "sync_share": 0.9,  # of steps; 20 steps without a period have it once in 250 (ours)
}

PEARSON = "training/rollout_actor_probs_pearson_corr"
DP_MAX, IS_VALID = "training/rollout_probs_diff_max", "training/rollout_probs_diff_valid"
KL, K3, PPL = "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/ppl_ratio"
MEAN_GAP = "rollout_corr/log_ppl_abs_diff"
CHI2, CHI2_SEQ = "rollout_corr/chi2_token", "rollout_corr/chi2_seq"
TV = "mismatch/tv_token"
ESS = "rollout_corr/kept_eff_sample_size"
WEIGHTS_ESS = "rollout_corr/rollout_is_eff_sample_size"  # before rejection
REJECTED = "rollout_corr/rollout_rs_masked_fraction"
OUT_OF_BAND = "rollout_corr/rollout_is_oob_ratio"
NOISE = "variance_proxy/proxy3_pure_noise"
CLIPPED, PPO_KL = "actor/pg_clipfrac", "actor/ppo_kl"
LENGTH, TURNS = "response_length/mean", "num_turns/mean"
LAG = "training/off_policy/trajectory_staleness_worst/mean"
ENGINE_SHARE, FLIPS = "mismatch/engine/share", "mismatch/route_flip_token"
ROUTE_GAPS = tuple(f"mismatch/route_flip_{x}/log_ratio_abs_mean" for x in ("flipped", "unflipped"))
ROUTE_DROPS = tuple(f"mismatch/route_flip_{x}/icepop_dropped" for x in ("flipped", "unflipped"))

# Recorded every metrics.diagnostics_every steps.
PERIODIC = re.compile(r"variance_proxy/.+|mismatch/(route_flip|position|context)_.+")
FALLBACKS = {ESS: WEIGHTS_ESS}  # read where a record has too few values of the metric itself

OPS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to judge.

    Attributes:
      series: metric -> {training step: value}; values are never NaN.
      config: the "config" of config.json, {} without that file.
      thresholds: those of `THRESHOLDS`, as they apply to this run.
      last_step: the last training step, 0 without any.
      unlogged: metrics whose absence from the series tells nothing.
      nans: metric -> the steps of its values that are NaN.
    """

    series: dict[str, dict[int, float]]
    config: dict[str, Any]
    thresholds: dict[str, float]
    last_step: int
    unlogged: frozenset[str] = frozenset()
    nans: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def window(self, metric: str, length: float, before: float = 0) -> dict[int, float]:
        """Returns the values of the `length` steps that end `before` steps ahead of the last
        one."""
        end = self.last_step - before
        values = self.series.get(metric, {})
        return {step: v for step, v in values.items() if end - length < step <= end}

    def source(self, metric: str) -> str:
        """Returns the metric, or its fallback where the judged window has too few of its values."""
        fallback = FALLBACKS.get(metric)
        few = len(self.recent(metric)) < self.thresholds["min_steps"]
        return fallback if few and fallback in self.series else metric

    def interval(self, metric: str) -> int:
        """Returns the number of steps from one value of a metric to the next, above 1 for some of
        `PERIODIC` alone. Their judged window is longer by this factor."""
        if metric not in self.series or not PERIODIC.fullmatch(metric):
            return 1
        newest = sorted(self.series[metric])[-int(self.thresholds["min_steps"]):]
        return min((b - a for a, b in itertools.pairwise(newest)), default=1)

    def recent(self, metric: str) -> list[float]:
        """Returns the values of the judged window."""
        length = self.thresholds["window"] * self.interval(metric)
        return list(self.window(metric, length).values())

    def setting(self, field: str) -> Any:
        """Returns a field of the config, or the preset's value where the config leaves it open;
        KeyError names a field that is missing."""
        node: Any = self.config
        for name in field.split("."):
            if name not in node:
                raise KeyError(f"the field {field} of config.json")
            node = node[name]
        if node is None:
            return presets.PRESETS[self.setting("correction.preset")][name]
        return node

    @property
    def schedule(self) -> schedules.Schedule:
        """The schedule of sampler and learner."""
        return schedules.parse(self.setting("rollout.schedule"))

    def mean(self, metric: str) -> float:
        """Returns the mean over the judged window; KeyError names a metric with too few values."""
        values = self.recent(metric)
        if len(values) < self.thresholds["min_steps"]:
            raise KeyError(metric)
        return math.fsum(values) / len(values)

    def method(self, kind: str) -> methods.Method:
        """Returns the chosen weight, objective or kl as (name, every parameter with its value)."""
        return methods.parse(kind, self.setting(f"correction.{kind}"))


@dataclasses.dataclass(frozen=True)
class Clause:
    """A condition: `statistic` of `metric` compared with a threshold.

    Attributes:
      metric: a key of metrics.jsonl, or a fact of diagnose.FACTS.
      op: a key of `OPS`.
      threshold: a key of `THRESHOLDS`, or a number.
      statistic: one of
        mean, max: over the window.
        steady: the mean. It counts only if it is beyond the threshold by steady_sigma standard errors,
          or if steady_share of the steps are beyond it. A few steps do not decide.
        growth: the mean over the mean of the window before.
        sigma: the difference of these two means in standard errors, with steps as independent.
        surge: the mean of the last min_steps steps over that of surge_steps earlier.
        surge_sigma: the difference of these two means in standard errors.
      absent: the answer where the run does not record the metric; None leaves it open.
    """

    metric: str
    op: str
    threshold: str | float
    statistic: str = "mean"
    absent: bool | None = None


def is_so(fact: str) -> Clause:
    """Returns the condition that a fact holds."""
    return Clause(fact, "==", 1)


def is_not(fact: str) -> Clause:
    """Returns the condition that a fact does not hold."""
    return Clause(fact, "==", 0)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: it holds if its parent, all of `all_of`, one of `any_of` and none of `unless` hold.

    `title` is what is wrong, `advice` what to do, `mistake` the usual wrong reaction. An undecided
    finding in `unless` leaves this one undecided; in `unless_known` it counts as not holding.
    `changes` maps fields of the config to values, or to functions of the case (None: no change).
    """

    name: str
    title: str
    advice: str
    all_of: tuple[Clause, ...] = ()
    any_of: tuple[Clause, ...] = ()
    unless: tuple[str, ...] = ()
    unless_known: tuple[str, ...] = ()
    parent: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    mistake: str = ""


# Facts, usable in a clause like a metric: a number, or (number, name of what it is of); a KeyError
# names what is missing


def is_ahead(case: Case) -> bool:
    """Returns whether samplers run ahead of the learner."""
    try:
        return case.schedule.ahead > 0
    except KeyError:  # written by code without this field
        return False


def largest_age(case: Case) -> float:
    """Returns how many versions a token may be old: by samplers that run ahead, or by replay."""
    way = replay.parse(case.setting("rollout.replay"))
    return replay.max_age(case.schedule, way, case.setting("rollout.max_age"))


def has_older(case: Case) -> bool:
    """Returns whether tokens may be of older weights than those at the start of their update."""
    try:
        return largest_age(case) > 0
    except KeyError:  # written by code without these fields
        return is_ahead(case)


def approximates_old_logp(case: Case) -> bool:
    """Returns whether another policy approximates the one that sampled, see `learner.snapshots`."""
    try:
        return has_older(case) and case.setting("rollout.old_logp_source") in APPROXIMATIONS
    except KeyError:  # written by code without this field
        return False


def leaves_out_lags(case: Case) -> bool:
    """Returns whether the run may have stale tokens and a record without their lag."""
    try:
        return case.setting("metrics.record") == "compact" and has_older(case)
    except KeyError:  # written by code without these fields
        return False


def _is_stale(case):
    """Returns whether tokens are older than the weights that learn; KeyError where no record tells."""
    lags = case.recent(LAG)
    if LAG in case.unlogged and not lags:
        raise KeyError(LAG)
    return any(lags)


def _engine_share(case):
    """Returns the engine's share of the gap; 1 while sampler and learner have the same weights."""
    if not _is_stale(case):
        return 1.0
    if approximates_old_logp(case):
        raise KeyError("logp_old of the weights that sampled, with rollout.old_logp_source ring or replica")
    shares = case.recent(ENGINE_SHARE)
    if not shares:
        raise KeyError(ENGINE_SHARE)
    return math.fsum(shares) / len(shares)


def _reuse_share(case):
    """Returns the share of the policy's movement since sampling that the updates of the batch make."""
    if not _is_stale(case):
        return 1.0
    reuse, before = (case.recent(f"mismatch/{part}/share") for part in ("trust_region", "staleness"))
    if not reuse or not before:
        raise KeyError("mismatch/staleness/share")
    reuse, before = math.fsum(reuse) / len(reuse), math.fsum(before) / len(before)
    return reuse / (reuse + before) if reuse + before > 0 else 1.0


def _route_gap_share(case):
    """Returns the share of the gap by which tokens with other experts are above the rest; 1 where a
    record of flips does not split the gap. A lower bound: attention carries flips to other tokens."""
    if ROUTE_GAPS[0] not in case.series:
        return 1.0
    flipped, rest = map(case.mean, ROUTE_GAPS)
    share = case.mean(FLIPS)
    gap = share * flipped + (1.0 - share) * rest
    return share * (flipped - rest) / gap if gap > 0 else 0.0


def _route_dropped_ratio(case):
    """Returns how much more often tokens with other experts leave IcePop's band than the rest; 0 where
    that is not recorded."""
    if ROUTE_DROPS[0] not in case.series:
        return 0.0
    flipped, rest = map(case.mean, ROUTE_DROPS)
    return flipped / rest if rest > 0 else math.inf if flipped > 0 else 0.0


def _total_variation(case):
    """Returns the total variation per token; where it is not logged its bound by the KL (Pinsker)."""
    if TV in case.series:
        return case.mean(TV), TV
    return math.sqrt(max(case.mean(KL), 0.0) / 2), f"sqrt({KL} / 2)"


def _is_filtered(case):
    """Returns whether filters drop mass that the learner counts."""
    read = case.setting
    drops = read("rollout.top_k") > 0 or read("rollout.top_p") < 1 or read("rollout.min_p") > 0
    return drops and read("rollout.sampling_mask_size") == 0


def _has_other_dtype(case):
    learner = case.setting("model.dtype")
    return any(case.setting(f"engine.{name}") != learner for name in ("dtype", "cache_dtype"))


def _is_quantized(case):
    """Returns whether sampler and learner are quantized differently."""
    def recipe(of):
        scheme = case.setting(f"{of}.quantization")
        return (scheme, *(sorted(case.setting(f"{of}.unquantized")) if scheme != "none" else ()))

    return recipe("engine") != recipe("model")


def _is_product(case):
    level = methods.traits("weight", case.method("weight")[0]).level
    return level == "seq" or "seq_sum_" in case.setting("correction.masks")


def _is_rejecting(case):
    rejects = case.method("weight")[0].endswith(("_mis", "_icepop", "_mask_tis"))
    return rejects or case.setting("correction.masks") != ""


def has_own_weight(case: Case) -> bool:
    """Returns whether the objective itself corrects the sampler's gap."""
    return "logp_behav" in methods.needs("objective", case.method("objective")[0])


def in_bypass(case: Case) -> bool:
    """Returns whether the sampler is the centre of the objective's ratio."""
    return case.setting("correction.centre") == "behav"


def updates(case: Case) -> int:
    """Returns the number of updates of a rollout batch."""
    return case.setting("train.epochs") * case.setting("train.minibatches")


def is_direct(case: Case) -> bool:
    """Returns whether the whole ratio to the sampler weights log pi, detached and without a clip."""
    objective, weight = case.method("objective")[0], case.method("weight")[0]
    is_weighed = objective == "dis" or objective in ("gpg", "reinforce") and weight != "none"
    return in_bypass(case) and is_weighed


def _is_corrected(case):
    is_weighted = case.method("weight")[0] != "none"
    return is_weighted or has_own_weight(case) or case.setting("correction.masks") != ""


def _is_centered(case):
    try:
        return case.setting("correction.centering") != "none"
    except KeyError:  # written by code without this field
        return False


def _has_plain_kl(case):
    is_loss = case.setting("correction.kl_coeff") > 0
    is_loss &= case.setting("correction.kl_placement") == "loss"
    return is_loss and "logp_old" not in methods.needs("kl", case.method("kl")[0])


def _clip_width(case):
    """Returns the width of the band above 1, and 0 for an objective without a band."""
    return case.method("objective")[1].get("clip_high", 0.0)


def _clip_widening(case):
    """Returns the largest ratio of a clip parameter to its default."""
    name, chosen = case.method("objective")
    usual = methods.parameters("objective", name)
    return max(chosen[clip] / usual[clip] for clip in ("clip_low", "clip_high"))


Fact = Callable[[Case], float | tuple[float, str]]
TREE_FACTS: dict[str, Fact] = {
    "run/engine_share": _engine_share,
    "run/reuse_share": _reuse_share,
    "run/route_gap_share": _route_gap_share,
    "run/route_dropped_ratio": _route_dropped_ratio,
    "run/total_variation": _total_variation,
    "config/updates": updates,
    "config/is_bypass": in_bypass,
    "config/is_weighted": lambda c: c.method("weight")[0] != "none",
    "config/is_corrected": _is_corrected,
    "config/is_centered": _is_centered,
    "config/is_direct": is_direct,
    "config/is_clipped_product": lambda c: c.method("objective")[0] == "seq_ppo",
    "config/is_product": _is_product,
    "config/is_rejecting": _is_rejecting,
    "config/is_filtered": _is_filtered,
    "config/is_quantized": _is_quantized,
    "config/is_injected": lambda c: c.setting("engine").get("injected", "") != "",
    "config/is_noisy": lambda c: c.setting("engine.noise_start") > 0,
    "config/has_other_dtype": _has_other_dtype,
    "config/has_other_mesh": lambda c: c.setting("mesh.serve")[2] != c.setting("mesh.train")[2],
    "config/clip_width": _clip_width,
    "config/clip_widening": _clip_widening,
    "config/has_plain_kl": _has_plain_kl,
}
