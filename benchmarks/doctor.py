"""Measures how often the doctor is right about simulated logs of nine frameworks.

    python -m benchmarks.doctor [--logs=200] [--broken=50] [--only=trl,verl]
    python -m benchmarks.doctor --write

Each log is simulated token by token. Contexts have a next-token distribution of the sampler and one
of the learner. Sequences of 1 to 2,000 tokens are sampled from the first. Each framework's own
metrics are computed from them, under its default correction and under others. In clean logs the two
distributions differ by Gaussian or heavy-tailed noise. A broken log also has a cause. --write puts
the table into docs/doctor.md.
"""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import tempfile
from collections.abc import Callable

import numpy as np

from benchmarks import arguments
from configs import default
from jaxrl_tis.doctor import foreign
from jaxrl_tis.doctor.case import THRESHOLDS, Case
from jaxrl_tis.doctor.diagnose import adapted, diagnosis_of
from jaxrl_tis.runtime import cli

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "doctor.md"
BEGIN, END = "<!-- rates: python -m benchmarks.doctor --write -->", "<!-- end of rates -->"
OURS = "this program"
CONTEXTS, VOCABULARY = 1024, 32
BUDGET = 150_000  # tokens of a log
LONGEST = 2000
STEPS = (12, 20, 40, 120)

# Policies


@dataclasses.dataclass(frozen=True)
class Policies:
    """Log-probs of the next token, in nats, [CONTEXTS, VOCABULARY] each.

    Attributes:
      sampled: the distribution that tokens are sampled from.
      recorded: the distribution that the sampler reports.
      learner: the learner's distribution.
      noisy: the sampler's distribution before its top-p filter.
      top_p: the threshold of this filter.
    """

    sampled: np.ndarray
    recorded: np.ndarray
    learner: np.ndarray
    noisy: np.ndarray
    top_p: float

    @property
    def gap(self):
        return self.learner - self.recorded

    def mean(self, values: np.ndarray) -> float:
        """Returns the mean of values [CONTEXTS, VOCABULARY] over sampled tokens."""
        drawn = np.exp(self.sampled)
        return float(np.sum(drawn * np.where(drawn > 0, values, 0.0)) / len(drawn))

    @property
    def kl(self):
        return self.mean(-self.gap)

    @property
    def chi2(self):
        return self.mean(np.exp(2 * self.gap)) - 1.0

    @property
    def pearson(self):
        """Returns the correlation of the two probabilities over sampled tokens."""
        x, y = np.exp(self.recorded), np.exp(self.learner)
        x, y = x - self.mean(x), y - self.mean(y)
        return self.mean(x * y) / math.sqrt(self.mean(x * x) * self.mean(y * y))

    @property
    def kept(self):
        """Returns the mean ratio of learner and sampler probabilities."""
        return self.mean(np.exp(self.gap))


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def nucleus(logp, top_p):
    """Returns the log-probs of the smallest sets of tokens with a mass of at least top_p."""
    order = np.argsort(-logp, axis=-1)
    probs = np.take_along_axis(np.exp(logp), order, -1)
    is_cut = np.cumsum(probs, -1) - probs >= top_p
    kept = np.full_like(logp, -np.inf)
    np.put_along_axis(kept, order, np.where(is_cut, -np.inf, np.take_along_axis(logp, order, -1)), -1)
    return log_softmax(kept)


def noise(rng, kind):
    """Returns noise for logits: normal, or heavy-tailed with a scale for each context."""
    shape = (CONTEXTS, VOCABULARY)
    if kind == "normal":
        return rng.standard_normal(shape)
    scale = np.exp(0.5 * rng.standard_normal((CONTEXTS, 1)))
    return scale * np.clip(rng.standard_t(4, shape), -15, 15)


def base(rng, sharpness):
    """Returns logits of contexts; a larger mass on one token makes them sharper."""
    ranks = rng.permuted(np.tile(np.log1p(np.arange(VOCABULARY)), (CONTEXTS, 1)), axis=1)
    return -sharpness * np.exp(0.3 * rng.standard_normal((CONTEXTS, 1))) * ranks


def gap_of(rng, logits, kind, kl):
    """Returns noise that gives about this KL between sampler and learner."""
    size, found = math.sqrt(2 * kl), noise(rng, kind)
    for _ in range(4):
        logp = log_softmax(logits)
        now = float(np.mean(np.sum(np.exp(logp) * (logp - log_softmax(logits + size * found)), -1)))
        size *= min(math.sqrt(kl / now), 30.0)
    return size * found


# Tokens


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens of a step: log-probs [N] and the starts of sequences."""

    recorded: np.ndarray
    learner: np.ndarray
    starts: np.ndarray

    @property
    def gap(self):
        return self.learner - self.recorded

    @property
    def lengths(self):
        return np.diff(np.append(self.starts, len(self.recorded)))

    def sums(self, values):
        return np.add.reduceat(values, self.starts)

    def means(self, values):
        return self.sums(values) / self.lengths


@dataclasses.dataclass(frozen=True)
class Shape:
    """Numbers of steps and of sequences a step, mean length, and spread of the log length."""

    steps: int
    sequences: int
    length: float
    spread: float

    def lengths(self, normal: np.ndarray) -> np.ndarray:
        """Returns log-normal lengths for standard normal numbers."""
        found = self.length * np.exp(self.spread * normal - self.spread**2 / 2)
        return np.clip(np.round(found), 1, LONGEST).astype(int)


def shape(rng) -> Shape:
    """Returns a random shape of a log within the token budget."""
    length = float(np.exp(rng.uniform(0.0, math.log(LONGEST / 2))))
    steps, sequences = int(rng.choice(STEPS)), int(rng.choice((4, 8, 16, 64, 256)))
    while steps * sequences * length > BUDGET and sequences > 4:
        sequences //= 2
    while steps * sequences * length > BUDGET and steps > STEPS[0]:
        steps = max(s for s in STEPS if s < steps)
    return Shape(steps, sequences, length, float(rng.choice((0.3, 0.6, 1.0))))


def batch(rng, policies, shape) -> Batch:
    """Samples the sequences of a step."""
    lengths = shape.lengths(rng.standard_normal(shape.sequences))
    contexts = rng.integers(CONTEXTS, size=lengths.sum())
    cumulated = np.cumsum(np.exp(policies.sampled), -1)
    cumulated[:, -1] = 1.0
    chosen = (cumulated[contexts] > rng.random((len(contexts), 1))).argmax(-1)
    return Batch(
        policies.recorded[contexts, chosen], policies.learner[contexts, chosen],
        np.cumsum(lengths) - lengths,
    )


# What frameworks log, from their sources


def pearson(x):
    return float(np.corrcoef(np.exp(x.recorded), np.exp(x.learner))[0, 1])


def offpolicy(x: Batch) -> dict[str, float]:
    """Computes verl's rollout_corr_helper.compute_offpolicy_metrics, without its prefix."""
    gap, means = x.gap, x.means(x.gap)
    return {
        "kl": -gap.mean(), "k3_kl": (np.exp(gap) - gap - 1).mean(), "ppl_ratio": np.exp(-means).mean(),
        "log_ppl_abs_diff": np.abs(means).mean(), "chi2_token": np.exp(2 * gap).mean() - 1,
        "chi2_seq": np.exp(2 * np.clip(x.sums(gap), -20, 20)).mean() - 1,
    }


def verl_weights(x, level, cap=2.0):
    """Computes verl's compute_is_metrics: mean, min and max before the cap, sample size after
    it."""
    log_w = x.gap if level == "token" else np.repeat(x.sums(x.gap), x.lengths)
    w = np.exp(np.clip(log_w, -20, 20))
    bounded = np.clip(w, 1 / cap, cap)
    return {
        "rollout_is_mean": w.mean(), "rollout_is_min": w.min(), "rollout_is_max": w.max(),
        "rollout_is_eff_sample_size": bounded.mean() ** 2 / np.square(bounded).mean(),
    }


def probabilities(x):
    gaps = np.abs(np.exp(x.learner) - np.exp(x.recorded))
    return {"rollout_actor_probs_pearson_corr": pearson(x), "rollout_probs_diff_max": gaps.max(),
            "rollout_probs_diff_mean": gaps.mean(), "rollout_probs_diff_valid": 1}


def verl(x, variant):
    weights = {} if variant == "none" else verl_weights(x, variant)
    found = {f"rollout_corr/{name}": value for name, value in (offpolicy(x) | weights).items()}
    found |= {f"training/{name}": value for name, value in probabilities(x).items()}
    return found | {
        "response_length/mean": x.lengths.mean(), "critic/score/mean": 0.5,
        "rollout_corr/rollout_log_ppl": -x.means(x.recorded).mean(),
    }


def trl(x, variant):
    level, bound = variant.split("_")
    w = np.exp(x.gap if level == "token" else x.sums(x.gap))
    w = np.minimum(w, 3.0) if bound == "truncate" else np.where(w > 3.0, 0.0, w)
    ratio, gap = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
    return {
        f"{gap}/mean": np.abs(x.gap).mean(), f"{gap}/max": np.abs(x.gap).max(),
        f"{ratio}/min": w.min(), f"{ratio}/mean": w.mean(), f"{ratio}/max": w.max(),
        "completions/mean_length": x.lengths.mean(),
    }


def openrlhf(x, variant):
    return {"train/vllm_kl": -x.gap.mean(), "train/rollout/response_length_mean": x.lengths.mean()}


def slime(x, variant):
    found = {"train/train_rollout_logprob_abs_diff": x.means(np.abs(x.gap)).mean(),
             "rollout/rollout_log_probs": x.means(x.recorded).mean(),
             "rollout/log_probs": x.means(x.learner).mean(),
             "rollout/response_len/mean": x.lengths.mean()}
    if variant == "tis":
        return found | {"train/tis": x.means(np.exp(x.gap)).mean()}
    found |= {f"train/mis_{name}": value for name, value in offpolicy(x).items()}
    k1, k3 = x.means(-x.gap), x.means(np.exp(x.gap) - x.gap - 1)
    after = np.minimum(np.exp(np.clip(x.sums(x.gap), -20, 20) if "seq" in variant else x.gap), 2.0)
    return found | {
        "train/mis_kl": k1.mean(), "train/mis_k3_kl": k3.mean(),
        "train/mis_chi2_token": x.means(np.exp(2 * x.gap)).mean() - 1,
        "train/mis_tis_weight_after_bound": (after if "seq" in variant else x.means(after)).mean(),
    }


def skyrl(x, variant):
    loss, gap = "policy/loss_metrics/", "policy/rollout_train_logprobs_abs_diff"
    ratio = {} if variant == "none" else {loss + "is_ratio_mean": np.exp(np.clip(x.gap, -20, 20)).mean()}
    return ratio | {
        f"{gap}_mean": np.abs(x.gap).mean(), f"{gap}_max": np.abs(x.gap).max(),
        "policy/policy_entropy": 0.5, "generate/avg_num_tokens": x.lengths.mean(),
    }


def prime_rl(x, variant):
    return {"mismatch_kl/all/mean": (np.exp(x.gap) - x.gap - 1).mean(),
            "train/agg/effective/num_output_tokens/mean": x.lengths.mean()}


def nemo_rl(x, variant):
    w = np.exp(x.sums(x.gap) if variant == "sequence" else x.gap)
    low, high = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0)}.get(variant, (0.0, math.inf))
    out = (w < low) | (w > high)
    bounded = np.where(out, 0.0, w) if variant == "icepop" else np.clip(w, low, high)
    found = {
        "train/token_mult_prob_error": np.exp(np.abs(x.gap)).mean(), "train/probs_ratio": 1.0,
        "train/gen_kl_error": (np.exp(x.gap) - x.gap - 1).mean(),
        "train/sampling_importance_ratio": bounded.mean(),
        "train/mean_gen_tokens_per_sample": x.lengths.mean(),
    }
    return found | ({"train/is_oob_ratio": out.mean()} if high < math.inf else {})


def tunix(x, variant):
    w, found = np.exp(np.clip(x.gap, -20, 20)), probabilities(x)
    trainer, weights = "sampler_trainer/train/", "sampler_is/train/"
    return {
        trainer + "probs_pearson_corr": found["rollout_actor_probs_pearson_corr"],
        trainer + "prob_diff_max": found["rollout_probs_diff_max"],
        trainer + "prob_diff_mean": found["rollout_probs_diff_mean"],
        trainer + "logp_diff_mean": np.abs(x.gap).mean(),
        trainer + "logp_diff_max": np.abs(x.gap).max(),
        weights + "weight_mean": np.minimum(w, 2.0).mean(),
        weights + "weight_max": np.minimum(w, 2.0).max(),
        weights + "frac_clipped_at_threshold": (w > 2.0).mean(),
        "actor/train/sampler_is/weight_mean": np.minimum(w, 2.0).mean(),
        "actor/train/sampler_is/weight_min": np.minimum(w, 2.0).min(),
        "completions/train/mean_length": x.lengths.mean(),
    }


def tinker(x, variant):
    return {
        "optim/kl_sample_train_v1": -x.gap.mean(), "optim/kl_sample_train_v2": np.square(x.gap).mean() / 2,
        "optim/entropy": -x.recorded.mean(), "env/all/total_ac_tokens": len(x.recorded),
        "env/all/total_episodes": len(x.starts), "env/all/turns_per_episode": 1.0,
    }


LAYOUTS: dict[str, tuple[Callable[[Batch, str], dict[str, float]], tuple[str, ...]]] = {
    # The framework's default comes first, and is taken for half of the logs.
    "verl": (verl, ("token", "sequence")),
    "trl": (trl, ("sequence_mask", "sequence_truncate", "token_truncate", "token_mask")),
    "openrlhf": (openrlhf, ("default",)),
    "slime": (slime, ("tis", "mis", "mis_seq")),
    "skyrl": (skyrl, ("token",)),
    "prime_rl": (prime_rl, ("default",)),
    "nemo_rl": (nemo_rl, ("token", "tis", "icepop", "sequence")),
    "tunix": (tunix, ("token",)),
    "tinker": (tinker, ("default",)),
    OURS: (verl, ("token", "sequence")),
}

# Logs

CLIPPING = {"verl": "actor/pg_clipfrac", "trl": "clip_ratio/region_mean", "slime": "train/pg_clipfrac",
            "openrlhf": "train/ppo_clip_ratio", "skyrl": "policy/loss_metrics/clip_ratio",
            "tunix": "actor/train/pg_clipfrac", OURS: "actor/pg_clipfrac"}
TRUST = {"nemo_rl": "train/probs_ratio_", "tunix": "actor/train/is_ratio/"}
LAGS = {"verl": ("training/off_policy/trajectory_staleness_worst/mean",
                 "training/off_policy/trajectory_staleness/mean"),
        "skyrl": ("async/staleness_mean",), "prime_rl": ("off_policy/mean",),
        "nemo_rl": ("train/avg_trajectory_age",),
        "tinker": ("training_client/step", "sampling_client/step_mean")}  # their difference
# KL of the policy to its reference. Those of SAMPLER_LOGP also log the sampler's own log-probs.
KL_REF = {"verl": "actor/kl_loss", "trl": "kl", "openrlhf": "train/kl", "slime": "train/kl_loss",
          "skyrl": "policy/policy_kl", "nemo_rl": "train/kl_penalty", "tunix": "actor/train/kl",
          OURS: "actor/kl_loss"}
SAMPLER_LOGP = ("verl", "slime", "tinker", OURS)
SAMPLER = {"verl": ("training/", "rollout_corr/"), "trl": ("sampling/",), "openrlhf": ("train/vllm_kl",)}
WEIGHTS = {"verl": ("rollout_corr/rollout_is",), "slime": ("train/tis", "train/mis_tis"),
           "skyrl": ("policy/loss_metrics/is_ratio",)}
MEANS = ("sampling/importance_sampling_ratio/mean", "rollout_corr/rollout_is_mean",
         "train/mis_tis_weight_after_bound", "train/sampling_importance_ratio")
# Causes that are put in, and the logs that can show them.
BROKEN = {
    "mass": ("verl", "trl", "slime", "skyrl", "nemo_rl", "tunix"),
    "shrunk": ("verl", "trl", "slime", OURS),
    "weights.lag": tuple(LAGS),
    "weights.sync": ("trl", "slime", "openrlhf", "skyrl", "prime_rl", "nemo_rl", "tunix", "tinker"),
    "inactive.unrecorded": tuple(SAMPLER), "inactive.copied": tuple(name for name in LAYOUTS if name != OURS),
    "inactive.ones": ("verl", "trl", "slime", "skyrl", "tunix"),
    "inactive.uncorrected": tuple(WEIGHTS), "inactive.bypass": ("verl",),
    "inactive.trust_region": tuple(TRUST), "blind.cap": ("trl", "tunix"),
    "frozen": (*KL_REF, "tinker"),
    "A": ("verl", "openrlhf", "slime", "prime_rl", "nemo_rl", "tunix", "tinker", OURS),
    "A.record": ("verl", "openrlhf", "slime", "tinker", OURS), "A.spike": (OURS,),
    "C": ("verl", OURS), "D": ("verl", "slime", OURS),
    "E": (OURS,), "F": ("verl", "trl", "openrlhf", "slime", "skyrl", "prime_rl", "nemo_rl", "tunix", "tinker", OURS),
}
NEEDS_STEPS = {"E": 120, "F": 120, "weights.lag": 40, "weights.sync": 40, "frozen": 120}


@dataclasses.dataclass(frozen=True)
class Log:
    """`rows`: [(step, {name: value})]; `holds`: findings that are right of these policies, or of
    this record, and with those below them not counted as wrong."""

    rows: list[tuple[int, dict[str, float]]]
    holds: frozenset[str]


RANGES = {"A": (0.08, 0.3), "C": (0.1, 0.4), "D": (0.4, 1.2), "blind.cap": (0.1, 0.6)}  # of KL
SAME = ("inactive.ones", "inactive.copied")
WIDEST = 1.5  # times as large as its usual size a gap swells at most
CYCLES = ("weights.lag", "weights.sync")
FARTHEST = (0.05, 0.3)  # KL of the policy to its base at the end of a log with a frozen sampler


def policies(rng, cause, length) -> Policies:
    """Returns a sampler and a learner that differ by noise and, if given, a cause."""
    while True:
        logits = base(rng, math.exp(rng.uniform(math.log(0.5), math.log(6.0))))
        kind = "normal" if cause in ("C", "D") else str(rng.choice(("normal", "heavy")))
        low, high = RANGES.get(cause, (1e-6, 0.01))
        kl = math.exp(rng.uniform(math.log(low), math.log(high)))
        if cause not in RANGES and rng.random() < 0.5:  # products of sequences spread by about 1
            kl = min(rng.uniform(0.1, 2.0) / length, high)
        noisy = log_softmax(logits + gap_of(rng, logits, kind, kl))
        top_p = float(rng.choice((0.8, 0.9, 0.95))) if cause == "mass" else 1.0
        sampled = recorded = nucleus(noisy, top_p) if top_p < 1 else noisy
        learner = log_softmax(logits)
        if cause == "A.record":
            recorded = log_softmax(float(rng.choice((0.5, 0.7))) * sampled)
        if cause in SAME:
            learner = recorded
        found = Policies(sampled, recorded, learner, noisy, top_p)
        if _is_wanted(found, cause):
            return found


def _is_wanted(found, cause):
    """Whether the policies have the gap that their cause should show, or else a small one."""
    if cause == "mass":
        return found.kept < 0.98
    if cause == "A":
        return 0.07 < found.kl < 0.4 and found.pearson < 0.9
    if cause == "A.record":
        return found.kl < -0.04
    if cause == "C":
        return 0.5 < found.chi2 < 0.8
    if cause == "D":
        return 3.0 < found.chi2 < 8.0
    return cause == "blind.cap" or found.kl < 0.012 and found.chi2 < 0.15


def autocorrelated(rng, level, steps):
    """Returns a series around a level with autocorrelation 0.8 between steps."""
    x, found = 0.0, []
    for _ in range(steps):
        x = 0.8 * x + 0.2 * rng.standard_normal()
        found.append(level * math.exp(x))
    return found


def _by_step(rng, at, size, cause, lags):
    """Returns the policies of each step: their gap varies over time or contains a version lag."""
    if cause in CYCLES:
        drift = gap_of(rng, at.learner, "normal", max(2e-3, at.kl))
        moved = [dataclasses.replace(at, learner=log_softmax(at.learner + k * drift))
                 for k in range(max(lags) + 1)]
        return [moved[lag] for lag in lags]
    if cause == "frozen":
        drift = gap_of(rng, at.learner, "normal", rng.uniform(*FARTHEST))
        return [dataclasses.replace(at, learner=log_softmax(at.learner + (i + 1) / size.steps * drift))
                for i in range(size.steps)]
    if cause not in (None, "mass"):
        return [at] * size.steps
    gap = at.noisy - at.learner
    sizes = autocorrelated(rng, 1.0, size.steps)
    noisy = [log_softmax(at.learner + min(x, WIDEST) * gap) for x in sizes]
    sampled = [nucleus(x, at.top_p) for x in noisy] if at.top_p < 1 else noisy
    return [dataclasses.replace(at, sampled=x, recorded=x) for x in sampled]


def _to_reference(rng, at, now, cause):
    """Returns the KL of the policy to its reference at each step: k3 of a learner whose sampler is
    frozen, and a growing KL of any size for a sampler that follows."""
    if cause == "frozen":
        gaps = (at.learner - learner.learner for learner in now)
        return [at.mean(np.exp(gap) - gap - 1) for gap in gaps]
    far = math.exp(rng.uniform(math.log(1e-3), math.log(0.3)))
    noise = np.exp(0.1 * rng.standard_normal(len(now)))
    return [far * ((i + 1) / len(now)) ** 2 * x for i, x in enumerate(noise)]


def simulate(rng, framework: str, cause: str | None = None) -> Log:
    """Returns a simulated log of a framework, clean or with a cause."""
    make, variants = LAYOUTS[framework]
    variant = variants[0] if rng.random() < 0.5 else str(rng.choice(variants))
    size = _sized(rng, cause)
    at = policies(rng, cause, size.length)
    if cause == "shrunk":
        size, variant, at = _long(rng, framework, variant)
    if cause == "blind.cap" and framework == "trl":
        variant = "token_truncate"
    if cause == "D" and framework == "slime":
        variant = "mis"
    is_averaged = framework == "trl" and cause not in (*NEEDS_STEPS, "blind.cap")
    every = 10 if is_averaged and rng.random() < 0.5 else 1
    period = int(rng.choice((3, 4, 5, 8)))
    lags = [i % period if cause in CYCLES else int(rng.integers(4)) for i in range(size.steps)]
    is_lagging = cause == "weights.lag" or cause is None and rng.random() < 0.5
    clipped = autocorrelated(rng, float(rng.choice((0.001, 0.01, 0.05))), size.steps)
    other = np.random.default_rng(rng.bit_generator.seed_seq.spawn(1)[0])
    by_step = _by_step(rng, at, size, cause, lags)
    kl_ref = _to_reference(other, at, by_step, cause)
    has_reference = framework in KL_REF and (
        other.random() < 0.5 or cause == "frozen" and framework not in SAMPLER_LOGP
    )
    rows = []
    for i, now in enumerate(by_step):
        grown = size.length * (1.6 if cause == "F" and i >= size.steps - 15 else 1.0)
        part = dataclasses.replace(size, sequences=max(size.sequences // every, 4), length=grown)
        parts = [make(batch(rng, now, part), variant) for _ in range(every)]
        row = {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}
        if has_reference:
            row[KL_REF[framework]] = kl_ref[i]
        if framework in CLIPPING:
            row[CLIPPING[framework]] = clipped[i] if cause != "E" else 0.1 + 0.3 * i / size.steps
        for bound, value in (("min", 0.7), ("max", 1.4)) if framework in TRUST else ():
            moves = cause != "inactive.trust_region"
            row[TRUST[framework] + bound] = value + 0.01 * rng.standard_normal() if moves else 1.0
        if is_lagging and framework in LAGS:
            row |= _aged(framework, i, lags[i])
        rows.append((every * (i + 1), _damaged(row, framework, cause, i == size.steps - 3)))
    return Log(rows, _holding(at, size, rows))


def _sized(rng, cause):
    """Returns a shape of a log that is large enough to show the cause."""
    size = shape(rng)
    if cause in NEEDS_STEPS:
        length = min(size.length, 100.0)
        size = dataclasses.replace(size, steps=NEEDS_STEPS[cause], length=length)
    if cause in (*CYCLES, "blind.cap", "frozen"):
        size = dataclasses.replace(size, sequences=math.ceil(4000 / size.length))
    if cause in ("C", "D"):
        size = dataclasses.replace(size, sequences=512, length=min(size.length, 3.0), spread=0.3)
    if cause in ("A", "A.record"):
        size = dataclasses.replace(size, sequences=max(size.sequences, math.ceil(300 / size.length)))
    if cause in ("F", "E"):
        size = dataclasses.replace(size, sequences=max(size.sequences, 16), spread=0.3)
    return size


def _long(rng, framework, variant):
    """Returns (shape, variant, policies) of long sequences with sequence-level weights."""
    variant = {"trl": "sequence_mask", "slime": "mis_seq"}.get(framework, "sequence")
    is_bounded = framework in ("trl", "slime")  # else a filter makes the mean small
    while True:
        at = policies(rng, None if is_bounded else "mass", 1.0)
        if not is_bounded or at.kl > 4e-3:
            break
    length = float(np.clip(rng.uniform(3.0, 6.0) / abs(at.kl), 100.0, 1500.0))
    return Shape(12, 8, length, 0.3), variant, at


def _aged(framework, step, lag):
    """Returns the fields with the age of the samples."""
    if framework == "tinker":
        return dict(zip(LAGS[framework], (float(step), float(step - lag)), strict=True))
    return dict.fromkeys(LAGS[framework], float(lag))


def _damaged(row, framework, cause, is_spike):
    """Returns a row of the log with metrics removed or changed by the cause."""
    prefixes = {"inactive.unrecorded": SAMPLER, "inactive.uncorrected": WEIGHTS}.get(cause, {})
    if prefixes:
        return {n: x for n, x in row.items() if not n.startswith(prefixes[framework])}
    if cause == "inactive.bypass":
        return {n: x for n, x in row.items() if not n.startswith("training/")}
    if cause == "A.spike" and is_spike:
        return row | {"training/rollout_probs_diff_max": 0.97}
    return row


def _holding(at, size, rows):
    """Returns the findings whose statements are true of this log, whatever its cause."""
    held = {"blind", "healthy", "watch"}  # of the record alone
    lengths = size.lengths(np.linspace(-2.5, 2.5, 41))
    growth = np.minimum(lengths * math.log1p(2 * max(at.chi2, 0.0)), 50.0)  # twice: the gap swells
    if np.mean(np.exp(growth)) > THRESHOLDS["chi2_seq"] / 2:
        held |= {"D"}
    widest = log_softmax(at.learner + WIDEST * (at.noisy - at.learner))
    if np.abs(np.exp(at.learner) - np.exp(widest)).max() > THRESHOLDS["dp_max"]:
        held |= {"A"}  # there is such a token
    weights = [row[name] for _, row in rows for name in MEANS if name in row]
    if weights and np.mean(weights) < 0.6:
        held |= {"shrunk"}
    return frozenset(held)


# The doctor


def found_in(log: Log, framework: str) -> set[str]:
    """Returns the findings that the doctor reports for a log, without those about the set-up."""
    if framework == OURS:
        series = collections.defaultdict(dict)
        for step, row in log.rows:
            for name, value in row.items():
                series[name][step] = value
        case = Case(dict(series), CONFIG, THRESHOLDS, len(log.rows))
        diagnosis = diagnosis_of(adapted(case), "")
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps({"step": step} | row) + "\n" for step, row in log.rows)
            file.flush()
            diagnosis = foreign.diagnose([file.name], framework)
    found = diagnosis["findings"] + diagnosis.get("corrections", [])
    return {finding["name"] for finding in found}


CONFIG = json.loads(json.dumps(default.get_config().to_dict()))
CONFIG["engine"]["quantization"] = "none"  # else a single token is no evidence


@dataclasses.dataclass
class Counts:
    """Counts of logs by (finding, framework) with the finding, among clean and broken ones."""

    logs: int
    broken: int
    wrong: collections.Counter
    right: collections.Counter


def rng_of(framework, cause, index):
    key = f"{framework} {cause} {index}".encode()
    return np.random.default_rng(list(key))


def measure(logs: int, broken: int, frameworks=tuple(LAYOUTS), causes=tuple(BROKEN)) -> Counts:
    """Counts findings over `logs` clean logs of each framework and `broken` logs of each cause."""
    counts = Counts(logs, broken, collections.Counter(), collections.Counter())
    for framework in frameworks:
        arguments.say(f"logs of {framework}")
        for index in range(logs):
            log = simulate(rng_of(framework, None, index), framework)
            wrong = {name for name in found_in(log, framework) if not {name, name.split(".")[0]} & log.holds}
            counts.wrong.update((name, framework) for name in wrong)
        for cause in causes:
            for index in range(broken if framework in BROKEN[cause] else 0):
                log = simulate(rng_of(framework, cause, index), framework, cause)
                counts.right[cause, framework] += cause in found_in(log, framework)
    return counts


def table(counts: Counts, frameworks=tuple(LAYOUTS)) -> list[str]:
    """Returns the rows of the page: the findings that are missed or wrong in some log, with percentages."""
    rows = ["| finding | found, % | wrong, % |", "|---|---|---|"]
    for name in (*BROKEN, *sorted({name for name, _ in counts.wrong} - set(BROKEN))):
        of_cause = [f for f in frameworks if f in BROKEN.get(name, ())]
        found = [(f, counts.right[name, f], counts.broken) for f in of_cause]
        wrong = [(f, counts.wrong[name, f], counts.logs) for f in frameworks]
        cells = _shares(x for x in found if x[1] < x[2]), _shares(x for x in wrong if x[1])
        rows += [f"| `{name}` | {' | '.join(cells)} |"] * any(cells)
    return rows


def _shares(parts):
    return ", ".join(f"{framework} {100 * number / of:.3g}" for framework, number, of in parts)


def text(counts: Counts) -> str:
    """Returns what stands in the page."""
    head = (
        f"{counts.logs} clean logs of each framework, {counts.broken} with each of {len(BROKEN)} causes that "
        "its metrics can show. \"Found\":\nshare of the logs with the cause, 100 % where no number stands. "
        "\"Wrong\": share of the clean logs, 0 % where no\nnumber stands. Other findings have no row."
    )
    return "\n".join([BEGIN, head, "", *table(counts), END])


def write(content: str) -> None:
    """Replaces the table in the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + content + rest.split(END)[1], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--logs", type=int, default=200, help="clean logs of each framework")
    parser.add_argument("--broken", type=int, default=50, help="logs of each cause and framework")
    parser.add_argument("--only", help="frameworks, separated by commas")
    parser.add_argument("--write", action="store_true", help="put the table into docs/doctor.md")
    args = arguments.parse(parser, logs=1, broken=1)
    if args.only and args.write:
        raise ValueError(f"--write needs every framework, and --only={args.only} leaves some out")
    frameworks = tuple(args.only.split(",")) if args.only else tuple(LAYOUTS)
    for framework in frameworks:
        if framework not in LAYOUTS:
            raise ValueError(f"--only={framework}: choose one of {', '.join(LAYOUTS)}")
    counts = measure(args.logs, args.broken, frameworks)
    print("\n".join(table(counts, frameworks)))
    if args.write:
        write(text(counts))


if __name__ == "__main__":
    cli.run(main)
