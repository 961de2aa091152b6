"""Computes what every weight, mask and preset would do to a dump.

Each is the function that trains: `loss.importance_weights`, `loss.accepted`, and for the objective of
a preset the gradient of `loss.policy_loss`, whose factor before the score is a weight, too.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.diagnostics import mismatch
from jaxrl_tis.estimators import counts, loss, methods, presets, ratios, weights

Batch = dict[str, Any]

# Where other bounds than the defaults and examples say more: those of presets, or ours.
CHOSEN = {
    "trm": "trm(trm_delta=0.05)",
    "trm_k3": "trm_k3(trm_delta=0.05)",
    "staleness": "staleness(staleness_max=4)",
    "token_k2": "token_k2(upper=0.24)",  # |log rho| <= log 2, as the bands of 0.5 to 2 have it
    "token_k3": "token_k3(upper=0.31)",  # rho <= 2
    "token_ratio": "token_ratio(lower=0.5, upper=2.0)",
    "token_dp": "token_dp(upper=0.5)",
    "token_binary_kl": "token_binary_kl(upper=0.1)",
    "seq_sum_k1": presets.SEQ_BAND,
    "seq_sum_ratio": "seq_sum_ratio(lower=0.5, upper=2.0)",
    "seq_mean_k1": presets.GEO_BAND,
    "seq_mean_ratio": "seq_mean_ratio(lower=0.999, upper=1.001)",
    "seq_mean_k2": "seq_mean_k2(upper=0.01)",
    "seq_mean_k3": presets.K3_BOUND,
    "veto": "veto(veto_upper=100.0)",  # SkyRL's two sides
}

# A field that methods name -> what the dump would have to hold.
WANTED = {
    "logp": "needs logp (the current learner)",
    "logp_prox": "needs logp (the current learner)",
    "adv": "needs reward and group",
    "turn": "needs turn",
    "version": "needs version",
    "current_version": "needs version",
    "top": "needs top (the sampler's likeliest tokens)",
    "entropy": "needs the entropy of every token",
    "logits": "needs the logits of both sides, which no dump has",
    "logits_behav": "needs the logits of both sides, which no dump has",
}


class Part(NamedTuple):
    """One factor of a token's final weight, of kind "weight", "mask" or "objective".

    `text`: as a config spells it. `seen`: the ratio that it uses, one of `loss.RATIOS`; the centre of
    an objective."""

    kind: str
    text: str
    seen: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """A weight, a mask or a preset of the table.

    Attributes:
      rule: as a config spells it.
      parts: the factors of its weight.
      learner: field of the batch whose ratio to the sampler the weight stands for: weights and
        masks correct the sampler's gap, a preset's loss answers for the drift since, too.
      reason: why the columns do not give it, None where they do.
    """

    kind: str
    name: str
    rule: str
    parts: tuple[Part, ...]
    learner: str
    reason: str | None


def rules(fields: frozenset[str]) -> list[Rule]:
    """Returns every weight, mask and preset as a rule; `fields` are those of the batch."""
    chosen = []
    for kind in ("weight", "mask"):
        for name in methods.TABLES[kind]:
            text = _with_bounds(kind, name)
            parts = (_part(kind, text, _seen(kind, text), fields),)
            chosen.append(Rule(kind, name, text, parts, "logp_old", _reason(parts, (), fields)))
    for name, preset in presets.PRESETS.items():
        parts = tuple(_part(kind, text, seen, fields) for kind, text, seen in _parts(preset))
        head = () if preset["centering"] == "none" else ("top",)
        reason = _reason(parts, head, fields)
        chosen.append(Rule("preset", name, name, parts, "logp_now", reason))
    return chosen


def _parts(preset):
    """Yields (kind, text, ratio) of the methods of a preset."""
    centre, staleness = preset["centre"], preset["staleness_weight"]
    spec = _spec(centre=centre, staleness_weight=loss.staleness_weight(staleness))
    yield "weight", preset["weight"], spec.gap_at_update
    if spec.weighs_staleness:
        yield "weight", staleness, "staleness"
    yield "objective", preset["objective"], centre
    for text in filter(None, map(str.strip, preset["masks"].split("&"))):
        yield "mask", text, spec.seen(methods.parse("mask", text))


def _spec(**fields):
    return loss.LossSpec(objective=("reinforce", {}), **fields)


def _seen(kind, text):
    return _spec().seen(methods.parse(kind, text)) if kind == "mask" else "engine"


def _part(kind, text, seen, fields):
    is_known = kind == "objective" or "logp" in fields or seen != "policy"
    return Part(kind, text, seen if is_known else "engine")


def _with_bounds(kind, name):
    """Returns a method as a config spells it, with a value for each parameter without a default."""
    if kind == "mask" and name in CHOSEN:
        return CHOSEN[name]
    missing = [f"{k}={v}" for k, v in methods.traits(kind, name).example.items()]
    return f"{name}({', '.join(missing)})" if missing else name


def _reason(parts, more, fields):
    chosen = [(kind, methods.parse(kind, text)[0]) for kind, text, _ in parts]
    wanted = [field for kind, name in chosen for field in methods.needs(kind, name)]
    wanted += ["logp_prox" for part in parts if part.seen in ("staleness", "folded")]
    reasons = [WANTED[field] for field in (*wanted, *more) if field not in fields]
    return "; ".join(dict.fromkeys(reasons)) or None


# Numbers


def evaluate_parts(parts: Sequence[Part], batch: Batch) -> list[tuple[jax.Array, jax.Array]]:
    """Returns (factor of each token [R,T], share of the tokens whose factor a bound changed, but not to
    0) for each part. Works under jit. Arguments as `table`."""
    mask, seg, none = batch["mask"], batch["seg"], jnp.zeros(())
    chain = batch | dict.fromkeys(("logp", "logp_prox"), batch["logp_now"])
    log_ratios = {
        seen: ratios.safe_log_ratio(chain[learner], chain[sampler], mask)
        for seen, (learner, sampler) in loss.RATIOS.items()
    }
    raw = functools.cache(lambda level, seen: weights.RAW[level](log_ratios[seen], mask, seg))
    evaluated = []
    for kind, text, seen in parts:
        method = methods.parse(kind, text)
        if kind == "objective":
            evaluated.append((_factor(method, seen, chain), none))
            continue
        log_ratio = log_ratios[seen]
        if kind == "mask":
            evaluated.append((loss.accepted([log_ratio], batch, (method,))[0], none))
        else:
            w = loss.importance_weights(log_ratio, batch, method)
            traits = methods.traits("weight", method[0])
            if text != "none" and traits.is_bounded_ratio:
                counted = counts.of_weight(w, raw(traits.level, seen), mask)
            else:
                counted = loss.weight_counts(log_ratio, batch, method)
            evaluated.append((w, _truncated(counted)))
    return evaluated


def _truncated(counted):
    if not counted:  # weight 1
        return jnp.zeros(())
    truncated, num_tokens = (
        ratios.as_float(counted[f"{counts.PREFIX}weight/{name}"])
        for name in ("truncated", "num_tokens")
    )
    return ratios.safe_divide(truncated, num_tokens)


def _factor(objective, centre, batch):
    """Returns the factor that an objective gives the score of each token [R,T] at the next update, by
    its advantage: minus the gradient of its loss. 0 where it clips."""
    sign = jnp.where(batch["sign"] < 0, -1.0, 1.0)

    def total(logp):
        loss_value, _ = loss.policy_loss(
            logp, batch | {"adv": sign}, objective=objective, centre=centre, aggregation="token-sum"
        )
        return loss_value

    return -jax.grad(total)(batch["logp_now"]) * sign


def numbers(
    w: jax.Array, rho: tuple[jax.Array, jax.Array, jax.Array], batch: Batch
) -> dict[str, jax.Array]:
    """Returns the columns of docs/audit.md for a weight w [R,T]. rho has the ratios of tokens and of
    sequences that the weight stands for, and k3 of the tokens, [R,T] each. Other arguments as `table`."""
    mask, seg = batch["mask"], batch["seg"]
    w = ratios.zero_padding(w, mask)
    mean, w_rs = ratios.masked_mean(w, mask), ratios.sequence_mean(w, mask, seg)
    is_sequence = ratios.sequence_count(w, mask, seg) > 0
    share = ratios.safe_divide(w, mean)
    missed = jnp.maximum(share - rho[0], 0.0)
    share_of_sequences = ratios.safe_divide(w, ratios.masked_mean(w_rs, is_sequence))
    missed_rs = ratios.sequence_mean(jnp.maximum(share_of_sequences - rho[1], 0.0), mask, seg)
    adv = ratios.as_float(batch.get("adv", mask))
    noise, power = (ratios.masked_mean(jnp.square(x), mask) for x in (share * adv, adv))
    is_left = mean > 0
    figures = {
        "tokens_kept": ratios.masked_mean(w != 0, mask),
        "sequences_kept": ratios.masked_mean(
            ratios.sequence_sum(w != 0, mask, seg) > 0, is_sequence),
        "kept_k3": ratios.masked_mean(rho[2], ratios.as_bool(mask) & (w != 0)),
        "ess": ratios.effective_sample_size(w, mask),
        "mean": mean,
        "largest": ratios.masked_max(w, mask),
        "bias_token": jnp.where(is_left, ratios.masked_mean(missed, mask), 1.0),
        "bias_seq": jnp.where(is_left, ratios.masked_mean(missed_rs, is_sequence), 1.0),
        "variance": jnp.where(power > 0, ratios.safe_divide(noise, power), jnp.nan),
    }
    if "reward" in batch:
        total = ratios.masked_sum(w_rs * batch["reward"], is_sequence)
        figures["reward"] = ratios.safe_divide(total, ratios.masked_sum(w_rs, is_sequence))
    return figures


def table(chosen: Sequence[Rule], batch: Batch) -> list[dict[str, Any]]:
    """Returns a row for each rule: kind, name, rule (as a config spells it), reason, and its numbers
    where reason is None.

    Args:
      batch: [R,T] arrays mask, logp_behav, logp_old, logp_now (the learner now, or logp_old where
        it is not known), sign (of the advantage, 1 where it is not known) and what the rules need;
        seg; where they are known adv [R,T] and reward [R,S].
    """
    known = [rule for rule in chosen if rule.reason is None]
    evaluated, figures = _made(known, batch), {}
    rho = {learner: _ratios(batch[learner], batch) for learner in ("logp_old", "logp_now")}
    same = _equal_parts(evaluated, batch)
    keys = {rule: (tuple(same[part] for part in rule.parts if same[part]), rule.learner)
            for rule in known}
    for parts, learner in dict.fromkeys(keys.values()):
        w = math.prod((evaluated[part][0] for part in parts), start=ratios.as_float(batch["mask"]))
        figures[parts, learner] = _numbers(w, rho[learner], batch)
    truncated = {part: share for part, (_, share) in evaluated.items()}
    figures, truncated = jax.device_get((figures, truncated))
    return [
        _row(rule, figures[keys[rule]] | {"truncated": max(truncated[part] for part in rule.parts)})
        if rule.reason is None else _row(rule, {})
        for rule in chosen
    ]


def _equal_parts(made, batch):
    """Returns {part: the first part with the same factor at every token, None if that is 1 everywhere}.
    Where bounds do not act, many rules are equal, and are measured once."""
    mask = np.asarray(batch["mask"])

    def digest(w):
        valid = np.where(mask, np.asarray(w, np.float32), np.float32(0))
        return hashlib.sha256(valid.data).digest()

    seen, representative = {digest(1.0): None}, {}
    for part, (w, _) in made.items():
        representative[part] = seen.setdefault(digest(w), part)
    return representative


_numbers = jax.jit(numbers)


@jax.jit
def _ratios(learner, batch):
    mask, seg = batch["mask"], batch["seg"]
    log_ratio = ratios.safe_log_ratio(learner, batch["logp_behav"], mask)
    of_tokens = weights.raw_token(log_ratio, mask), weights.raw_seq(log_ratio, mask, seg)
    return *of_tokens, mismatch.token_k3(log_ratio)


def _made(known, batch):
    """Returns {part: its result of `evaluate_parts`}. Each kind has one program; they compile in parallel."""
    parts = list(dict.fromkeys(part for rule in known for part in rule.parts))
    kinds = [[p for p in parts if p.kind == kind] for kind in ("weight", "mask", "objective")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = [jax.jit(functools.partial(evaluate_parts, ours)) for ours in kinds]
        results = list(pool.map(lambda program: program(batch), programs))
    return {
        part: x for ours, made in zip(kinds, results, strict=True)
        for part, x in zip(ours, made, strict=True)
    }


def _row(rule, values):
    row = {"kind": rule.kind, "name": rule.name, "rule": rule.rule, "reason": rule.reason}
    return row | {name: float(x) for name, x in values.items()}
