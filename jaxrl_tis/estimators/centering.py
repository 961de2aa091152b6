"""Score centering: the drift of off-policy scores, subtracted where the sampler recorded a head.

On policy a score has mean 0, so a constant advantage moves nothing. Sampled from another policy q
and weighted by w, its mean is sum_v q(v) w(v) grad log p(v) at every prefix: the drift. Score
centering (arXiv:2609.20807) subtracts the drift from the step of the sampled token y,

  g = A (w(y) grad log p(y) - sum_v q(v) w(v) grad log p(v)),

which has the mean Cov_q(A, w grad log p) over y ~ q. A token that was not sampled gets the weight
that the chosen weight, masks and objective would give it. Only methods that judge every token by
itself define this weight.

The sum runs over a head H: tokens with recorded ids and q. The other tokens are modelled as
q = rho p with rho = (1 - Q_H) / (1 - P_H), Q_H and P_H the masses of H. They cost nothing, because
sum_v p grad log p = 0 over all tokens. With f the weight as a function of p / q,

  c(v) = q f(p / q) - rho f(1 / rho) p  on H,     L += A sum_H sg[c(v)] log p(v).

If H holds every token with positive probability (a recorded support, over which p is normalised
too), nothing is modelled. If the support was too wide to record, q and p have different supports, and
nothing is subtracted.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from chex import Array

from jaxrl_tis.estimators import methods, ratios
from jaxrl_tis.estimators.methods import Method

# f: ([B,S] log of learner over sampler, [B,S] log-prob of the sampler) -> weights [B,S].
Rule = Callable[[Array, Array], Array]

SMALLEST_TAIL = 1e-6  # of the learner's mass outside the head


def known(kind: str, where: str = "ratio") -> list[str]:
    """Returns the methods whose weight of a token that was not sampled is known: at every ratio, or
    where it is "one"."""
    return [n for n in methods.TABLES[kind] if methods.traits(kind, n).centering == where]


def head_size(text: str, mask_size: int) -> int:
    """How many tokens of a position the head has; 0 if scores are not centred.

    Args:
      text: "none", "top(n)", the n likeliest, or "kept", the recorded support.
      mask_size: most tokens of such a support.

    ValueError for any other text.
    """
    if text in ("none", "kept"):
        return mask_size if text == "kept" else 0
    match = re.fullmatch(r"top\(([1-9]\d{0,2})\)", text)
    if not match:
        raise ValueError(f"centering {text!r} is none of 'none', 'kept' and 'top(n)', n up to 999")
    return int(match[1])


def why_not(
    weight: Method, masks: tuple[Method, ...], objective: Method, centre: str, is_one_update: bool
) -> str | None:
    """Returns why the methods define no weight per token and what to choose; None if they do.

    Args:
      is_one_update: whether a rollout batch gets a single update, so that the policy of the update
        is the one that weights judge.
    """
    if weight[0] not in known("weight"):
        choices = ", ".join(known("weight"))
        return f"the weight {weight[0]!r} has no value for each token; choose {choices}"
    for name, _ in masks:
        if name not in known("mask"):
            choices = ", ".join(known("mask"))
            return f"the mask {name!r} does not decide for each token separately; choose {choices}"
    name, parameters = objective
    if centre != "behav" and not is_one_update:
        return (
            f"with correction.centre = {centre!r} it is of the policy before the first of several "
            "updates; set correction.centre to 'behav' and correction.objective to 'reinforce'"
        )
    ends = ("cispo_mask_low", "cispo_mask_high")
    if name == "cispo" and any(parameters[end] < jnp.inf for end in ends):
        return "the masks of objective 'cispo' depend on the advantage; leave them infinite"
    where = methods.traits("objective", name).centering
    if where == "ratio" or (where == "one" and centre != "behav"):
        return None
    choices = ", ".join(known("objective"))
    return f"the objective {name!r} is not a weight times a log-prob; choose {choices}"


def rule(weight: Method, masks: tuple[Method, ...], objective: Method, centre: str) -> Rule:
    """Returns the weight f of any token, for methods with `why_not` None. The objective's ratio, and
    so its weight, is the token's own ratio if the sampler is its centre, else 1."""

    def f(log_ratio: Array, logp_behav: Array) -> Array:
        everywhere = jnp.ones(log_ratio.shape, bool)
        w = methods.function("weight", weight[0])(log_ratio, everywhere, **weight[1])
        for name, parameters in masks:
            extra = {"logp_behav": logp_behav} if methods.needs("mask", name) else {}
            own = methods.own(parameters)
            is_kept = methods.function("mask", name)(log_ratio, everywhere, **extra, **own)
            w = jnp.where(is_kept, w, 0.0)
        if centre != "behav":
            return w
        name, parameters = objective

        def surrogate(logp):  # its derivative is minus the objective's weight
            loss, _ = methods.function("objective", name)(
                logp, logp_behav, jnp.ones_like(logp), everywhere, **parameters
            )
            return jnp.sum(loss)

        return -w * jax.grad(surrogate)(logp_behav + log_ratio)

    return lambda *args: jax.lax.stop_gradient(f(*args))


def coefficients(logp: Array, logq: Array, is_token: Array, f: Rule) -> tuple[Array, Array, Array]:
    """(c [B,T,K] of the centering term, P_H and Q_H [B,T]), without gradient.

    Args:
      logp: [B,T,K] log-probs of the head's tokens under the policy that is trained, nats.
      logq: [B,T,K] log-probs under the sampling distribution.
      is_token: [B,T,K] bool: the head's tokens; other entries may hold anything.
    """
    b, t, k = logp.shape
    p, q = (jnp.where(is_token, jnp.exp(x), 0.0) for x in (logp, logq))
    p_head, q_head = jnp.sum(p, axis=-1), jnp.sum(q, axis=-1)
    rho = jnp.maximum(1.0 - q_head, 0.0) / jnp.maximum(1.0 - p_head, SMALLEST_TAIL)
    has_tail = rho > 0
    log_rho = jnp.log(jnp.where(has_tail, rho, 1.0))
    # A token of the tail is taken to be as likely as the least likely one of the head.
    least = jnp.min(jnp.where(is_token, logq, 0.0), axis=-1)
    log_ratio = jnp.where(is_token, logp - jnp.where(is_token, logq, 0.0), 0.0)
    flat = lambda x: x.reshape(b, t * k)
    f_head = f(flat(log_ratio), flat(jnp.where(is_token, logq, 0.0))).reshape(b, t, k)
    f_tail = jnp.where(has_tail, rho * f(-log_rho, least), 0.0)
    return jax.lax.stop_gradient((q * f_head - f_tail[..., None] * p, p_head, q_head))


def centered(
    logp_top: Array, batch: dict[str, Array], entropy: Array, f: Rule
) -> tuple[Array, dict[str, Array]]:
    """(loss_bt [B,T], metrics): A sum_H sg[c(v)] log p(v) of every valid token, 0 at padding.

    Gradient: through logp_top.

    Args:
      logp_top: [B,T,K] log-probs of the head's tokens under the policy that is trained, nats.
      batch: mask, adv and logp, logp_behav [B,T] of the sampled tokens, top_ids and top_logps [B,T,K]
        of the head; a negative id is no token; `kept` [B,T,K] where supports are recorded, see
        `fields.FIELDS`. Values at padding are ignored.
      entropy: [B,T] entropy of the policy that is trained, nats.
      f: see `rule`.
    """
    mask = ratios.as_bool(batch["mask"])
    is_token = mask[..., None] & (batch["top_ids"] >= 0)
    if "kept" in batch:
        is_token &= jnp.any(batch["kept"] >= 0, axis=-1, keepdims=True)
    logp_top = jnp.where(is_token, ratios.as_float(logp_top), 0.0)
    logq_top = jnp.where(is_token, ratios.as_float(batch["top_logps"]), 0.0)
    adv = jax.lax.stop_gradient(ratios.zero_padding(batch["adv"], mask))
    c, p_head, q_head = coefficients(logp_top, logq_top, is_token, f)
    loss = adv * jnp.sum(c * logp_top, axis=-1)
    return loss, jax.lax.stop_gradient(
        _metrics(c, p_head, q_head, logp_top, is_token, batch, entropy, adv, f)
    )


def _metrics(c, p_head, q_head, logp_top, is_token, batch, entropy, adv, f):
    """Means over tokens: the masses of the head; the norms of both parts of the step as gradients
    of the logits, with the tokens outside the head as one; the drift of log p(y) + H (mean 0 on
    policy), before and after centering."""
    mask = batch["mask"]
    logp, behav, entropy = (
        ratios.zero_padding(x, mask) for x in (batch["logp"], batch["logp_behav"], entropy)
    )
    w, total = f(logp - behav, behav), jnp.sum(c, axis=-1)
    p, rest = jnp.where(is_token, jnp.exp(logp_top), 0.0), jnp.maximum(1.0 - p_head, 0.0)
    is_drawn = is_token & (batch["top_ids"] == batch["tokens"][..., None])
    is_outside = ~jnp.any(is_drawn, axis=-1)
    norm = lambda head, rest: jnp.sqrt(jnp.sum(jnp.square(head), axis=-1) + jnp.square(rest))
    base = jnp.abs(adv * w) * norm(is_drawn - p, is_outside - rest)
    subtracted = jnp.abs(adv) * norm(c - p * total[..., None], rest * total)
    drift = w * (logp + entropy)
    left = drift - jnp.sum(c * jnp.where(is_token, logp_top + entropy[..., None], 0.0), axis=-1)
    named = {
        "learner_mass": p_head, "sampler_mass": q_head, "base_norm": base, "norm": subtracted,
        "drift": drift, "drift_left": left,
    }
    return {f"centering/{name}": ratios.masked_mean(x, mask) for name, x in named.items()}
