"""The two decision trees of the doctor, as tables.

`CAUSES` leads from symptoms to the causes A-F, after the survey "Off-Policy Drift in LLM RL" (v2,
2026); `SETUP` from the kind of run to the corrections it needs, after "Off-Policy Corrections in
LLM RL Training". A finding comes after the findings that it names. Changes name fields of
configs/default.py.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxrl_tis.doctor import asynchrony, depth, effects, frozen, stale_cache
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, CLIPPED, DP_MAX, ESS, FLIPS, K3, KL, LAG, LENGTH, MEAN_GAP, NOISE, OUT_OF_BAND,
    PEARSON, PPL, PPO_KL, REJECTED, TURNS, Case, Clause, Finding, approximates_old_logp, has_older, in_bypass,
    is_direct, is_not, is_so, largest_age, updates,
)
from jaxrl_tis.estimators import methods

# Changes of the config


def _of(field: str, scale: float | None = None) -> Callable[[Case], Any]:
    """Returns a function that reads a field of the config, perhaps times a number."""
    return lambda case: case.setting(field) if scale is None else scale * case.setting(field)


def _geo_mask(case):
    """Returns the masks with a band for the geometric mean that keeps about nine of ten responses.

    A fixed 1 % suits responses of hundreds of tokens; the mean over a few tokens spreads more. None
    for an objective that multiplies the weights of a response, where a rejected token would weigh 0.
    """
    is_product = "weights" in methods.needs("objective", case.method("objective")[0])
    if is_product and (in_bypass(case) or _rejected_stay(case)):
        return None
    gaps = case.recent(MEAN_GAP) or [0.0]
    width = min(max(math.log(1.01), 2.0 * math.fsum(gaps) / len(gaps)), 1.0)
    band = f"seq_mean_ratio(lower={math.exp(-width):.4g}, upper={math.exp(width):.4g})"
    masks = [mask.strip() for mask in case.setting("correction.masks").split("&")]
    replaced: tuple[str, ...] = ("seq_mean_k1", "seq_mean_ratio", "seq_sum_")
    replaced += () if has_older(case) else ("staleness",)  # nothing for it to judge
    return " & ".join([*(m for m in masks if m and not m.startswith(replaced)), band])


def _rejected_stay(case):
    """Returns True where rejected tokens have to stay in the batch, or stay already."""
    has_kl = case.setting("correction.sampler_kl_coeff") and not in_bypass(case)
    return True if has_kl or case.setting("correction.rejected_in_denominator") else None


def _centre(case):
    """Returns a centre beside which weights see the gap before the update alone; None where the whole
    drift of stale samples is weighted."""
    if has_older(case):
        return None if asynchrony.corrects_staleness(case) else "prox"
    return "old" if in_bypass(case) else None


def _staleness_weight(case):
    """Returns the weight of staleness where the config has older tokens and nothing corrects them."""
    if not has_older(case) or asynchrony.corrects_staleness(case):
        return None
    return "folded" if approximates_old_logp(case) else "token_vanilla"


def _beside(case, weight):
    """Returns a weight; None for stale samples whose objective weights them."""
    if not has_older(case):
        return weight
    is_weighed = is_direct(case) and case.method("weight")[0] == "none"  # by the objective itself
    return None if is_weighed or case.method("objective")[0] in asynchrony.OBJECTIVES else weight


def _weight(case):
    """Returns the usual weight where the config has none."""
    return _beside(case, TIS if case.method("weight")[0] == "none" else None)


def _token_weight(case):
    """Returns the usual weight where the config has none, or one for sequences."""
    is_product = case.method("weight")[0].startswith("seq_")
    return _beside(case, TIS) if is_product else _weight(case)


def _icepop(case):
    return _beside(case, "token_icepop(lower=0.5, upper=5.0)")


def _old_logp(case):
    """Returns a source of the old log-probs that masks need, where the config has none."""
    if not has_older(case) or case.setting("rollout.old_logp_source") != "none":
        return None
    return "ring" if largest_age(case) < math.inf else "ewma"


def _clipped_kl(case):
    """Returns the KL with the policy's clipped ratio, where that ratio is known."""
    is_known = in_bypass(case) or not has_older(case)
    return "clipped_is_k2" if is_known or case.setting("rollout.old_logp_source") != "none" else None


def _no_weight(case):
    """Returns no weight; None where the weight is all that tells stale samples from fresh ones."""
    if case.setting("correction.staleness_weight") == "folded":
        return None
    return None if is_direct(case) and (has_older(case) or updates(case) > 1) else "none"


def _usual_clip(case):
    name, chosen = case.method("objective")
    if name in asynchrony.OBJECTIVES and not has_older(case):
        return "ppo"
    usual = methods.parameters("objective", name)
    changed = {k: v for k, v in chosen.items() if not k.startswith("clip_") and v != usual[k]}
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in changed.items())})" if changed else name


def _serve_like_train(case):
    serve = case.setting("mesh.serve")
    return (*serve[:2], case.setting("mesh.train")[2], *serve[3:])


TIS = "token_tis(cap=2.0)"
# Scores are centred with weights of single tokens alone, see estimators/centering.py.
GEO = {
    "correction.masks": _geo_mask, "correction.centering": "none",
    "rollout.old_logp_source": _old_logp, "correction.rejected_in_denominator": _rejected_stay,
}
WEIGHABLE = {
    "correction.centre": _centre, "correction.objective": asynchrony.fit_objective,
    "correction.staleness_weight": _staleness_weight, "correction.centering": "none",
}
WEIGHED = WEIGHABLE | {"correction.weight": _weight}
TOKENS_WEIGHED = WEIGHABLE | {"correction.weight": _token_weight}
REPLAYED = {"correction.routing": "r3", "engine.record_routes": True}
ICEPOP = WEIGHABLE | {"correction.weight": _icepop}
SAME_DTYPE = {"engine.dtype": _of("model.dtype"), "engine.cache_dtype": _of("model.dtype")}
SAME_QUANTIZATION = {f"engine.{f}": _of(f"model.{f}") for f in ("quantization", "unquantized")}
SAME_ENGINE = SAME_QUANTIZATION | SAME_DTYPE
HALF_RATE = {"optimizer.lr": _of("optimizer.lr", 0.5)}


# Conditions that several findings share


def _rejected(threshold: str) -> tuple[Clause, ...]:
    return tuple(Clause(m, ">", threshold, absent=False) for m in (REJECTED, OUT_OF_BAND))


GAP = (
    Clause(PEARSON, "<", "pearson_broken", "steady"),
    Clause(KL, ">", "kl_bug", "steady"), Clause(KL, "<", "kl_negative", "steady"),
    Clause(PPL, ">", "ppl_high", "steady"), Clause(PPL, "<", "ppl_low", "steady"),
    Clause(DP_MAX, ">", "dp_max", "max"),
)
HEAVY_TOKENS = (
    Clause(ESS, "<", "ess_low", "steady"), Clause(CHI2, ">", "chi2_high", "steady"),
)
CLIPPING = (
    Clause(CLIPPED, ">", "clipped", absent=False), Clause("config/clip_width", ">=", "clip_width"),
)
HEAVY = (Clause(CHI2, ">", "chi2_high", "steady"), Clause(CHI2_SEQ, ">", "chi2_seq", "steady"))
APART = Clause("run/total_variation", ">", "tv_low")
STALE, FRESH = Clause(LAG, ">", 0, absent=False), Clause(LAG, "<=", 0, absent=True)
ROUTED, DENSE = Clause(FLIPS, ">=", 0, absent=False), Clause(FLIPS, "<", 0, absent=True)
REUSED, ONCE = Clause("config/updates", ">", 1), Clause("config/updates", "<=", 1)
UNCENTRED, INDIRECT = is_not("config/is_centered"), is_not("config/is_direct")
DIFFERENT, SAME = Clause(DP_MAX, ">", 0, "max"), Clause(DP_MAX, "<=", 0, "max")
EXPLAINED = ("A.filter", "A.noise", "A.injected", "A.routing", "A.quantized", "A.dtype", "A.parallel")
ESCALATIONS = ("escalate.system", "escalate.ess", "escalate.weights")
RUN = tuple(
    f.name for f in (
        *frozen.CAUSES, *stale_cache.CAUSES, *depth.CAUSES, *effects.CAUSES, *asynchrony.CAUSES,
    )
    if f.parent is None
)
BROKEN = ("A", "B.lag", "B.reuse", *ESCALATIONS, "D", "C", "E")
NOTED = ("D.noise", "rejected.many", "rejected.blind", "clipped.many", "F", *RUN)

CAUSES = (
    *frozen.CAUSES,
    *stale_cache.CAUSES,
    *depth.CAUSES,
    Finding(
        "A", "sampler and learner give different probabilities at the same weights",
        "Remove the difference first: precision, then tensor parallelism, then kernels "
        "(arXiv:2510.26788, 2605.14220). A correction hides this gap and does not close it. Below "
        "a correlation of 0.95 a repair is cheaper than any correction.",
        all_of=(Clause("run/engine_share", ">=", "engine_share"),), any_of=GAP,
        unless_known=("frozen", "stale_cache"),
        mistake="read rollout_corr/kl as learning: at the same weights it is the gap of the engine",
    ),
    Finding(
        "A.record", "the recorded log-probs are not those of the distribution that was sampled",
        "Check the sampler's temperature, its filters and the weights behind its log-probs. On "
        "average no policy gives its own samples a lower probability than another policy does. If "
        "few responses are affected, the mask seq_logprob_error leaves them out (NeMo-RL).",
        any_of=(
            Clause(PPL, "<", "ppl_low", "steady"), Clause(KL, "<", "kl_negative", "steady"),
        ), parent="A",
    ),
    Finding(
        "A.filter", "top-k, top-p or min-p cut the distribution of the sampler",
        "Sample without filters. The learner scores the unfiltered distribution, so every ratio "
        "contains the kept mass, even at equal weights.",
        all_of=(is_so("config/is_filtered"),), parent="A",
        changes={"rollout.top_k": 0, "rollout.top_p": 1.0, "rollout.min_p": 0.0},
    ),
    Finding(
        "A.routing", "the routers of sampler and learner choose different experts",
        "Replay the sampler's routes in the learner (arXiv:2510.11370); the presets moe and async_moe replay "
        "by train.minibatches, and older records mean IcePop by moe. As a cheap first step, "
        "mask tokens whose ratio leaves a band (IcePop, arXiv:2510.18855). In docs/referee.md a k3 of "
        "0.03 nats cost nothing with answers of 4 tokens, and 0.04 of reward with 24, where token "
        "weights helped a little; GSPO's ratio to the sampler did harm.",
        all_of=(ROUTED, Clause("run/route_gap_share", ">=", "route_share")), parent="A",
        changes=REPLAYED,
    ),
    Finding(
        "A.quantized", "sampler and learner are quantized differently",
        "Sample once with the learner's arithmetic: if the gap closes, quantization is the cause. "
        "If you need the speed, let the learner multiply as the sampler does (model.quantization; "
        "arXiv:2601.14243, 2604.07853). Or keep the gap and correct it, with token weights "
        "(arXiv:2601.18150, 2602.13953) or centred scores (arXiv:2609.20807; correction.preset "
        "centered or centered_tis_2). In docs/referee.md int8 alone (k3 up to 0.001 nats, answers of 4 "
        "and 24 tokens) cost nothing with or without a weight.",
        all_of=(is_so("config/is_quantized"),), parent="A", changes=SAME_QUANTIZATION,
    ),
    Finding(
        "A.noise", "the config adds noise to the sampler's norms",
        "Sample once without the noise to see the rest of the gap. The noise is exploration "
        "(arXiv:2510.11696) and part of this gap.",
        all_of=(is_so("config/is_noisy"),), parent="A", changes={"engine.noise_start": 0.0},
    ),
    Finding(
        "A.injected", "the config adds an artificial gap to the sampler",
        "Remove it to see the sampler's own gap.",
        all_of=(is_so("config/is_injected"),), parent="A", changes={"engine.injected": ""},
    ),
    Finding(
        "A.dtype", "sampler and learner compute in different precisions",
        "Give the sampler, its cache and the learner one dtype. In float16 the gap is an eighth "
        "of that in bfloat16 (arXiv:2510.26788). A TPU multiplies float32 as bfloat16 unless the "
        "highest precision is requested; the output head has a switch for it.",
        all_of=(is_so("config/has_other_dtype"),), unless=("A.quantized",), parent="A",
        changes=SAME_DTYPE | {"model.fp32_head": True},
    ),
    Finding(
        "A.parallel", "sampler and learner split their sums over different numbers of devices",
        "Give both the same degree of tensor parallelism, or use reductions that do not depend on "
        "it (arXiv:2511.17826).",
        all_of=(is_so("config/has_other_mesh"),), unless=("A.quantized", "A.dtype"), parent="A",
        changes={"mesh.serve": _serve_like_train},
    ),
    Finding(
        "A.kernels", "no setting explains the gap: kernels, or a fault of the engine",
        "Score one batch of fixed tokens with both programs, without an update between them. Set "
        "xla_allow_excess_precision=False in both. Look for a decode kernel whose result depends "
        "on the batch, and for a weight that the sampler did not receive.",
        unless=EXPLAINED, parent="A",
        changes={"model.fp32_head": True},
    ),
    Finding(
        "A.spike", "only the largest probability difference shows the gap",
        "Look at this token: its position, cache page and experts. A mask on the difference drops "
        "such tokens meanwhile (token_dp, as in the preset ipo).",
        all_of=(
            Clause(PEARSON, ">=", "pearson_broken"), Clause(KL, "<=", "kl_bug"),
            Clause(DP_MAX, ">", "dp_max", "max"),
        ), parent="A",
        mistake="average the maximum away: the spike is often the fault that ends the run",
    ),
    Finding(
        "B.lag", "the samples are stale, and most of the gap comes from their age",
        "Sample with fresher weights first (a smaller staleness bound). Then correct the rest. In "
        "docs/referee.md the decoupled loss (preset async) regained all that four steps of age had cost "
        "answers of 24 tokens.",
        all_of=(Clause("run/engine_share", "<", "engine_share"),),
        any_of=(
            *GAP, Clause(KL, ">", "kl_fine", "steady"), Clause(CHI2, ">", "chi2_moderate", "steady"),
            # Where logp_old is of the weights that drew, rollout_corr/* does not see the age.
            Clause(asynchrony.STALENESS_GAP, ">", "stale_gap", absent=False),
        ),
    ),
    Finding(
        "B.reuse", "the policy moves far while it reuses one batch",
        "Take fewer updates per batch. The clip handles the rest. A KL to the sampler "
        "(correction.sampler_kl_coeff, prime-rl) also holds tokens that a mask has dropped.",
        all_of=(
            REUSED, is_not("config/is_bypass"), Clause(PPO_KL, ">", "kl_fine", "steady"),
            Clause("run/reuse_share", ">=", "reuse_share"),
        ),
        changes={"train.epochs": 1, "train.minibatches": 1},
    ),
    Finding(
        "escalate.system", "the gap is too large for weights and rejection",
        "Reduce the gap itself: precision, kernels, routing, fresher weights. In docs/referee.md no "
        "correction was better than none with noise on the sampler's weights (k3 of 1.4 nats), and with "
        "answers of 24 tokens sequence weights, geometric masks and GSPO's ratio to the sampler collapsed "
        "the runs. Age alone was corrected there (k3 of 0.6 nats), by the decoupled loss (preset async).",
        any_of=(Clause(CHI2, ">", "chi2_systems", "steady"), *_rejected("rejected_stop")),
        changes=SAME_ENGINE,
    ),
    Finding(
        "escalate.ess", "few samples carry the batch, even after rejection",
        "Reduce the gap itself: precision, kernels, routing, fresher weights.",
        all_of=(is_so("config/is_rejecting"), Clause(ESS, "<", "ess_broken", "steady")),
        changes=SAME_ENGINE,
    ),
    Finding(
        "escalate.weights", "rejection alone does not correct this gap",
        "Reject responses by their geometric mean ratio, and weight the remaining tokens by their "
        "ratio. In docs/referee.md this was better than no correction where the weights changed within "
        "an answer of 24 tokens (chi2 of 3.3).",
        any_of=(Clause(CHI2, ">", "chi2_toxic", "steady"), *_rejected("rejected_high")),
        unless=("escalate.system", "escalate.ess"), changes=GEO | TOKENS_WEIGHED,
    ),
    Finding(
        "D", "the importance weights have a very large variance",
        "Reject outliers before you weight the rest.",
        any_of=(*HEAVY_TOKENS, Clause(CHI2_SEQ, ">", "chi2_seq", "steady")),
    ),
    Finding(
        "D.product", "the weight is a product over the whole sequence",
        "Reject by the geometric mean, which does not grow with the length, and use token weights.",
        all_of=(is_so("config/is_product"),), any_of=HEAVY_TOKENS, unless=ESCALATIONS, parent="D",
        changes=GEO | TOKENS_WEIGHED,
        mistake=(
            "keep sequence weights because they are unbiased, when they cost more than half of "
            "the sample size"
        ),
    ),
    Finding(
        "D.tokens", "single tokens dominate the weights",
        "Drop tokens whose ratio leaves a band (IcePop, arXiv:2510.18855), or whole responses with such a "
        "token (veto, with veto_upper on both sides). KPop (token_kpop, arXiv:2606.15079) drops them by "
        "their KL. In docs/referee.md it did harm with answers of 24 tokens and large noise. If the band "
        "rejects 10 to 25 % of the tokens, reduce the gap itself. Or train with noise that flattens sharp "
        "distributions: correction.controllers = layerwise_perturbation with the centre behav (ALP, "
        "arXiv:2603.19470).",
        all_of=(is_not("config/is_product"),), any_of=HEAVY_TOKENS, unless=ESCALATIONS,
        parent="D", changes=ICEPOP,
    ),
    Finding(
        "D.routing", "tokens that the learner sends to other experts have the extreme ratios",
        "Replay the sampler's routes in the learner (R3, arXiv:2510.11370). A band drops such tokens "
        "and leaves the cause.",
        all_of=(Clause("run/route_dropped_ratio", ">=", "route_dropped"),), any_of=HEAVY_TOKENS,
        parent="D", changes=REPLAYED,
        mistake="take a low share of tokens outside IcePop's band for a small gap",
    ),
    Finding(
        "D.length", "the token ratios are fine, but their product over a response is not",
        "Reject by the geometric mean and use token weights. A small bias per token grows "
        "exponentially with the length, and long responses are lost first.",
        unless=("D.product", "D.tokens", *ESCALATIONS), parent="D",
        changes=GEO | TOKENS_WEIGHED,
        mistake="change to sequence weights or sums: they put this product into the gradient",
    ),
    Finding(
        "B.correct", "the gap that fresher weights leave can be corrected",
        "Recompute log-probs for the clip, and weight tokens by the rest of the ratio "
        "(arXiv:2505.24298). For long queues or responses, also reject by the geometric mean.",
        unless=("D", *ESCALATIONS), parent="B.lag", changes=WEIGHED,
    ),
    Finding(
        "D.noise", "the weights make the gradient noisier",
        "Reject outliers by the geometric mean in place of weights, or lower the cap.",
        all_of=(
            is_so("config/is_weighted"), Clause(NOISE, ">", "rise", "growth", absent=False),
            Clause(NOISE, ">", "surge_sigma", "sigma", absent=False),
        ),
        unless=("D", *ESCALATIONS), changes=GEO | {"correction.weight": _no_weight},
    ),
    Finding(
        "C", "the token ratios drift moderately",
        "Reject responses by their geometric mean: this drops outliers and leaves the gradient of "
        "the other responses unchanged. mismatch/tail_above and tail_below tell on which side the ratios "
        "leave 1/2 to 2. Gaps of opposite sign cancel in this mean. They add up in "
        "seq_mean_k2, in seq_logprob_error (NeMo-RL), and in seq_mean_binary_kl, where rare tokens "
        "count little (FlashREINFORCE).",
        all_of=(Clause(CHI2, ">", "chi2_moderate", "steady"),), unless=("D", *ESCALATIONS),
        changes=GEO,
    ),
    Finding(
        "rejected.many", "more than 1 % of the tokens are rejected",
        "Look at their places: late positions, one expert, after the answer of a tool.",
        any_of=_rejected("rejected_look"), unless=ESCALATIONS,
    ),
    Finding(
        "rejected.blind", "the gap grows, but the share of rejected tokens does not",
        "Judge the gap by the KL. Adapt the band, or reduce the gap itself.",
        all_of=(
            Clause(OUT_OF_BAND, "<=", 1, "growth", absent=False), Clause(K3, ">", "kl_fine", "steady"),
            Clause(K3, ">", "rise", "growth"), Clause(K3, ">", "surge_sigma", "sigma"),
        ),
        mistake="take a low share of rejected tokens for a small gap",
    ),
    Finding(
        "E", "many tokens are clipped, and their share grows",
        "Use fresher samples, or fewer and smaller updates per batch. Then change to an objective "
        "whose ratio does not grow with the length (GSPO, GMPO), or reject tokens and drop the "
        "clip.",
        all_of=(
            *CLIPPING, Clause(CLIPPED, ">", "clipped_rise", "growth"),
            Clause(CLIPPED, ">", "clipped_sigma", "sigma"),
        ),
    ),
    Finding(
        "clipped.many", "many tokens are clipped, but their share does not grow",
        "Change nothing while the share stays flat. Watch it.", all_of=CLIPPING, unless=("E",),
    ),
    Finding(
        "E.bypass", "the clipped ratio contains the engine's gap",
        "Move the gap out of the ratio and into a weight. With the centre behav the ratio does not start "
        "at 1, so tokens are clipped before the policy has moved.",
        all_of=(is_so("config/is_bypass"),), parent="E", changes=WEIGHED,
    ),
    Finding(
        "E.product", "the clipped ratio is a product over the whole response",
        "Clip the geometric mean in a narrow band (GSPO, arXiv:2507.18071). The product spreads "
        "with the length, so one small step clips whole responses. With GSPO the tokens of long "
        "responses count less; LUSPO (arXiv:2602.05261) multiplies by the length.",
        all_of=(is_so("config/is_clipped_product"),), parent="E",
        changes={"correction.objective": "gspo"},
    ),
    Finding(
        "E.pressure", "the updates of each batch are too large",
        "Use one epoch and half the learning rate.",
        all_of=(is_not("config/is_bypass"),), parent="E",
        changes={"train.epochs": 1} | HALF_RATE,
    ),
    Finding(
        "E.widened", "the clip band is wider than usual",
        "Return to the usual band.",
        all_of=(Clause("config/clip_widening", ">", "clip_widest"),), unless=("E.product",), parent="E",
        changes={"correction.objective": _usual_clip},
        mistake="widen the clip because many tokens are clipped",
    ),
    Finding(
        "F", "responses get longer fast: the optimizer amplifies the mismatch",
        "Halve the learning rate now and reject outliers: a length surge comes tens of steps "
        "before a collapse (arXiv:2602.01826). Compare correction.aggregation: with prompt-mean every "
        "prompt has the same weight, however long its responses. If the length still grows at the lower "
        "rate, check the reward: length, end of sequence, reward hacking.",
        all_of=(
            Clause(LENGTH, ">", "surge", "surge"),
            Clause(LENGTH, ">", "surge_sigma", "surge_sigma"),
        ),
        changes=HALF_RATE | GEO,
        mistake="debug the reward before you lower the learning rate",
    ),
    *effects.CAUSES,
    *asynchrony.CAUSES,
    Finding(
        "healthy", "sampler and learner agree",
        "Nothing to correct. Continue.",
        all_of=(Clause(PEARSON, ">=", "pearson_healthy"), Clause(KL, "<", "kl_fine")),
        unless=BROKEN, unless_known=NOTED,
    ),
    Finding(
        "watch", "the gap is between healthy and broken",
        "Change nothing, and watch the trend. Below the thresholds of A and C a run may need no "
        "correction.",
        all_of=(Clause(PEARSON, ">=", "pearson_broken"),), unless=(*BROKEN, "healthy"),
        unless_known=NOTED,
    ),
)

SETUP = (
    Finding(
        "engine.same", "the sampler gives the learner's probabilities",
        "Use no weight.",
        all_of=(SAME,), changes={"correction.weight": _no_weight},
    ),
    Finding(
        "engine.corrected", "another engine samples, and its gap is corrected",
        "Keep the correction.",
        all_of=(DIFFERENT, is_not("config/is_bypass"), is_so("config/is_corrected")),
    ),
    Finding(
        "engine.centred", "another engine samples, and the drift of its scores is subtracted",
        "Keep centring. A weight also bounds single tokens.",
        all_of=(DIFFERENT, is_so("config/is_centered")),
    ),
    Finding(
        "engine.head", "the tokens that scores are centred over hold little of the sampler's mass",
        "Record more of the likeliest tokens, for example top(64). Centring models the rest of "
        "the mass.",
        all_of=(Clause("centering/sampler_mass", "<", "head_low", absent=False),),
    ),
    Finding(
        "engine.uncorrected", "another engine samples, and nothing corrects its gap",
        "Add a truncated weight, unless the gap is below the thresholds of A and C. Recomputed "
        "log-probs keep the clip in place, but the samples are still the sampler's.",
        all_of=(DIFFERENT, is_not("config/is_bypass"), is_not("config/is_corrected"), UNCENTRED),
        unless=("healthy",), changes=WEIGHED,
    ),
    Finding(
        "engine.tolerated", "another engine samples, and its small gap is not corrected",
        "Change nothing while the gap stays this small.",
        all_of=(DIFFERENT, is_not("config/is_bypass"), is_not("config/is_corrected"), UNCENTRED),
        unless=("engine.uncorrected",),
    ),
    Finding(
        "engine.folded", "another engine samples, and the clipped ratio contains its gap",
        "Separate the gap from the clipped ratio: the trust region assumes a ratio that starts at "
        "1.",
        all_of=(DIFFERENT, is_so("config/is_bypass"), UNCENTRED, INDIRECT), unless=("healthy",),
        changes=WEIGHED,
    ),
    Finding(
        "engine.bypass", "another engine samples, and the clipped ratio contains its small gap",
        "Change nothing while the gap stays this small.",
        all_of=(DIFFERENT, is_so("config/is_bypass"), UNCENTRED, INDIRECT), unless=("engine.folded",),
    ),
    Finding(
        "engine.direct", "another engine samples, and the whole ratio to it weights the gradient",
        "Keep this weight. It contains the engine's gap and staleness once, and no clip surrounds "
        "it. Watch the share of tokens that its band or a mask drops.",
        all_of=(DIFFERENT, is_so("config/is_direct"), UNCENTRED),
    ),
    # Total variation bounds the bias of token corrections, chi2 the variance of exact ones.
    Finding(
        "quadrant.system", "total variation and chi2 are high: no correction is enough",
        "Reduce the gap first: precision, weight syncs, replay of routes.",
        all_of=(APART,), any_of=HEAVY,
    ),
    Finding(
        "quadrant.sequences", "total variation is low, chi2 is high: small drifts add up over responses",
        "Mask or truncate whole responses.", any_of=HEAVY, unless=("quadrant.system",),
    ),
    Finding(
        "quadrant.tokens", "total variation is moderate, chi2 is low",
        "Token weights, or a mask on the geometric mean, are enough.",
        all_of=(APART,), unless=("quadrant.system",),
    ),
    Finding(
        "quadrant.none", "total variation and chi2 are low: effectively on-policy",
        "No correction is needed.",
        unless=("quadrant.system", "quadrant.sequences", "quadrant.tokens"),
    ),
    Finding(
        "training.once", "synchronous, one update per batch",
        "No correction of staleness is needed.",
        all_of=(FRESH, ONCE),
    ),
    Finding(
        "training.reused", "synchronous, several updates per batch",
        "Change nothing: the clip corrects the drift within a step.", all_of=(FRESH, REUSED),
    ),
    Finding(
        "training.async", "asynchronous, within the staleness bound",
        "Keep the bound, and a weight with a clip around recomputed log-probs. Neither is enough "
        "alone.",
        all_of=(STALE, Clause(LAG, "<=", "lag")), changes=WEIGHED,
    ),
    Finding(
        "training.late", "asynchronous, samples older than the staleness bound",
        "Delay generation until the lag is at most 4 (code) to 8 (mathematics) versions, and "
        "weight the remaining gap (arXiv:2505.24298).",
        all_of=(Clause(LAG, ">", "lag", absent=False),), changes=WEIGHED,
    ),
    Finding(
        "kl.reused", "the KL loss has no ratio, with several updates per batch",
        "Give the KL term the clipped ratio of the policy term (arXiv:2510.01555), or move the KL "
        "into the reward. From the second update on, the samples are not the policy's.",
        all_of=(is_so("config/has_plain_kl"), REUSED), changes={"correction.kl": _clipped_kl},
    ),
    Finding(
        "model.dense", "no routed experts",
        "Use token-level ratios.", all_of=(DENSE,)),
    Finding(
        "model.moe_once", "routed experts, one update per batch",
        "Use weights alone. A replay of routes adds bias and gains nothing.", all_of=(ROUTED, ONCE),
    ),
    Finding(
        "model.moe_few", "routed experts, two or three updates per batch",
        "Replay the learner's own routes (R2) and clip (arXiv:2512.01374).",
        all_of=(ROUTED, REUSED, Clause("config/updates", "<", 4)),
    ),
    Finding(
        "model.moe_many", "routed experts, four or more updates per batch",
        "Replay the sampler's routes (R3) and clip. R2 is not enough (arXiv:2512.01374).",
        all_of=(ROUTED, Clause("config/updates", ">=", 4)),
    ),
    Finding(
        "trajectory.single", "one turn",
        "Nothing special.",
        all_of=(Clause(TURNS, "<=", 1, absent=True),),
    ),
    Finding(
        "trajectory.agentic", "several turns with tools",
        "Mask the tokens of tools, look at the gap after them (mismatch/after_tool_* of this project's "
        "record), and consider credit and ratios per turn.", all_of=(Clause(TURNS, ">", 1, absent=False),),
    ),
    *asynchrony.SETUP,
)
