"""Measures the gap of sampler and learner in a dump: every metric that its columns allow, under the
names of docs/metrics.md."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.diagnostics import attribution, batch_metrics, divergences, mismatch
from jaxrl_tis.estimators import centering, methods, ratios

Batch = dict[str, Any]

NUM_BUCKETS = 32  # of every profile, so that they share a program; what is beyond joins the last


def metrics(batch: Batch) -> dict[str, jax.Array]:
    """Returns all metrics of a batch, see `whatif.table` for its fields. Works under jit."""
    behav, old, mask, seg = (batch[k] for k in ("logp_behav", "logp_old", "mask", "seg"))
    log_ratio = ratios.safe_log_ratio(old, behav, mask)
    values = mismatch.offpolicy_metrics(old, behav, mask, seg)
    values |= mismatch.probability_metrics(old, behav, mask)
    values |= divergences.divergence_metrics(log_ratio, mask, seg)
    values |= divergences.response_metrics(old, behav, mask, seg)
    values |= divergences.percentile_metrics(old, behav, mask, seg)
    if "reward" in batch:
        snis, ess = mismatch.snis_reward(batch["reward"], log_ratio, mask, seg)
        is_sequence = ratios.sequence_count(log_ratio, mask, seg) > 0
        values |= {
            "reward/mean": ratios.masked_mean(batch["reward"], is_sequence),
            "reward/learner_snis": snis, "reward/learner_snis_ess": ess,
        }
    if "version" in batch:
        lag = batch["version"], batch["current_version"], mask, seg
        values |= batch_metrics.staleness_metrics(*lag)
    if "top" in batch:
        values |= _head(batch)
    return values | _causes(batch)


def _causes(batch):
    """Returns the drift by its factors, engine and staleness; {} where the current learner is unknown."""
    if "logp" not in batch:
        return {}
    now, mask = batch["logp"], batch["mask"]
    chain = now, now, batch["logp_old"], batch["logp_behav"], mask
    found = attribution.factor_statistics(*chain, batch["seg"])
    return {name: x for name, x in found.items() if "trust_region" not in name}


def _head(batch):
    """Returns the mean masses of the top tokens that scores would be centred over."""
    pairs = batch["top"]
    is_token = batch["mask"][..., None] & jnp.all(jnp.isfinite(pairs), axis=-1)
    f = centering.rule(methods.parse("weight", "none"), (), methods.parse("objective", "reinforce"),
                       "behav")
    _, learner, sampler = centering.coefficients(pairs[..., 1], pairs[..., 0], is_token, f)
    masses = {"learner_mass": learner, "sampler_mass": sampler}
    return {f"centering/{k}": ratios.masked_mean(x, batch["mask"]) for k, x in masses.items()}


# Where the gap is


def profiles(batch: Batch) -> dict[str, dict[str, float]]:
    """Returns {"<kind>_<label>": statistics} of the tokens by position in the response and in the context,
    length of the response, entropy, turn, distance from a tool's text, and age of the weights. Buckets
    without a token are left out."""
    octaves = (0, *(2**k for k in range(NUM_BUCKETS - 1)))
    labels: dict[str, Any] = dict.fromkeys(("position", "length", "context"), octaves)
    labels |= dict.fromkeys(("turn", "lag"), range(NUM_BUCKETS))
    labels["after_tool"] = ("none", *octaves[1:])
    labels["entropy"] = attribution.ENTROPY_STARTS
    statistics = jax.jit(functools.partial(attribution.bucket_statistics, num_buckets=NUM_BUCKETS))
    profile = {}
    for kind, bucket in jax.jit(_buckets)(batch).items():
        values = statistics(batch["logp_old"], batch["logp_behav"], bucket, batch["mask"])
        values = jax.device_get(values)
        for k, label in enumerate(labels[kind]):
            if values["token_fraction"][k] > 0:
                profile[f"{kind}_{label}"] = {name: float(x[k]) for name, x in values.items()}
    return profile


def _buckets(batch):
    """{kind: bucket of each token [R,T]}"""
    mask, seg = batch["mask"], batch["seg"]
    octave = attribution.power_of_two_bucket
    length = ratios.to_tokens(ratios.sequence_count(mask, mask, seg), seg, mask.shape[1])
    buckets = {
        "position": octave(attribution.response_positions(mask, seg)), "length": octave(length),
    }
    if "position" in batch:
        buckets["context"] = octave(batch["position"])
    if "entropy" in batch:
        buckets["entropy"] = attribution.entropy_bucket(batch["entropy"])
    if "turn" in batch:
        buckets["turn"] = batch["turn"]
        buckets["after_tool"] = octave(attribution.tool_distances(mask, seg))
    if "version" in batch:
        buckets["lag"] = batch["current_version"] - batch["version"]
    return buckets
