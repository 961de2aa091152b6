"""The updates: pure steps (state, minibatch) -> (state, metrics).

A minibatch has leading axes [accumulation, rows]. Gradients of its micro-batches are summed with the
denominators of the whole minibatch, so the split changes only the memory. Methods that rank the tokens
of a call are exceptions: the masks `m2po` and `clip_cov`, and `top_entropy` around the sampler. So is the
load-balancing loss, a product of two means of a micro-batch. Rows hold one sequence each or, with
`Learner.max_segments`, several; empty micro-batches are then skipped.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxrl_tis.diagnostics.correction_metrics import drift_metrics
from jaxrl_tis.estimators import counts, loss, objectives, ratios, reduce, turn_clipped
from jaxrl_tis.kernels.segment import Segments
from jaxrl_tis.learner.correction import (
    Correction, fused_fields, loss_spec, method_outputs, weighed, weight_fields, with_key,
)
from jaxrl_tis.learner.optimizer import loss_scale, perturbed, update_metrics, without_perturbation
from jaxrl_tis.learner.scoring import (
    Batch, Learner, Metrics, prefix_values, response_logits, response_logprobs, response_scores,
    targets, zeros_like,
)
from jaxrl_tis.models import moe


EXPERT_COUNTS = "expert_counts"  # [L,E] choices of a minibatch, which no record gets


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The trained parameters and the optimizer state of one network. With LoRA these are its factors,
    and the base is an argument of each step that is not donated."""

    params: Any
    opt_state: Any


class MicroLoss(NamedTuple):
    """The loss of a micro-batch [B,...] of a minibatch, in two parts.

    Attributes:
      forward: (parameters, micro-batch) -> scores [B,...].
      loss: (scores, (micro-batch, tokens, sequences of the minibatch)) -> (loss, (metrics, fields
        [B,T] that the update returns)). See `Learner.replicated`.
    """

    forward: Callable[[Any, Batch], Any]
    loss: Callable[[Any, tuple], tuple]


def accumulate_gradients(
    learner: Learner, micro_loss: MicroLoss, params: Any, minibatch: Batch, is_whole: bool = True,
    scale: jax.Array | None = None, base: Any = None,
):
    """Returns (gradients, metrics) summed over the micro-batches of a minibatch, and the fields
    [M,B,T] that `micro_loss` returns, {} if there are none.

    The loss is divided by the minibatch's own token and sequence counts, or by nothing if the
    minibatch is a part of an unfinished one. The loss is multiplied by `scale` and its gradients are
    divided by it in float32. Metrics named *_loss and `counts` are summed; the others are means over
    tokens and are weighted by each part's tokens. The gradients are those of `params`, and none of
    the `base` of an adapter.
    """
    mask = minibatch["mask"]
    num_tokens = num_seqs = jnp.float32(1)
    if is_whole:
        num_tokens = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
        num_seqs = jnp.maximum(_count_sequences(minibatch), 1).astype(jnp.float32)

    def scaled_loss(params, micro):
        scores = micro_loss.forward(learner.joined(params, base), micro)
        value, (metrics, fields) = learner.replicated(micro_loss.loss)(
            scores, (micro, num_tokens, num_seqs)
        )
        share = jnp.sum(micro["mask"]) / num_tokens
        adds_up = lambda name: (
            name.endswith("_loss") or counts.is_count(name) or name == EXPERT_COUNTS
        )
        metrics = {name: x if adds_up(name) else x * share for name, x in metrics.items()}
        return value if scale is None else value * scale, (metrics, fields)

    def gradient(params, micro):
        grads, rest = jax.grad(scaled_loss, has_aux=True)(params, micro)
        return jax.tree.map(ratios.as_float, grads), rest  # before sums

    def gradient_if_any(params, micro):
        # The total is not part of the choice, which would keep a second one.
        return jax.lax.cond(jnp.any(targets(micro)), gradient, lambda *_: empty, params, micro)

    def add(total, micro):
        take = gradient_if_any if "seg" in minibatch else gradient
        grads, (metrics, fields) = take(params, micro)
        return jax.tree.map(jnp.add, total, (grads, metrics)), fields

    first = jax.tree.map(lambda x: x[0], minibatch)
    with learner.program.products():  # those of the backward pass are traced here
        if len(mask) == 1:
            grads, (metrics, fields) = gradient(params, first)
            fields = jax.tree.map(lambda x: x[None], fields)
        else:
            empty = zeros_like(jax.eval_shape(gradient, params, first))
            (grads, metrics), fields = jax.lax.scan(add, (empty[0], empty[1][0]), minibatch)
    if scale is not None:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
    return grads, metrics, fields


def _segments(learner: Learner, segment_ids: jax.Array) -> Segments:
    layout = learner.program.layout
    rows = None
    if layout is not None and layout.mesh.size > 1 and not learner.sums_in_order:
        rows = layout.sharding(("batch", None))
    most = learner.max_segments
    assert most is not None
    return Segments(segment_ids, most, rows)


def _count_sequences(minibatch: Batch) -> jax.Array:
    """Counts the sequences with a valid token."""
    mask = minibatch["mask"]
    if "seg" not in minibatch:
        return jnp.sum(jnp.any(mask, axis=-1))
    mask, seg = _as_rows((mask, minibatch["seg"]))
    return jnp.sum(ratios.sequence_count(mask, mask, seg) > 0)


def _as_rows(tree: Any) -> Any:
    """Returns arrays [M,B,...] of micro-batches as the rows [M*B,...] of one batch."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def make_packed_weigh(learner: Learner, c: Correction) -> Callable[[Batch], tuple[Batch, Metrics]]:
    """Makes `correction.weighed` of packed rows [1,B,T] in the layout of a minibatch; the fields that
    it returns are [1,B,T], too."""

    def weigh(batch: Batch) -> tuple[Batch, Metrics]:
        fields, metrics = weighed(c, _as_rows(_laid_out(learner, batch)))
        return {name: x[None] for name, x in fields.items()}, metrics

    return jax.jit(weigh, compiler_options=learner.program.compiler_options)


def _make_step(
    learner: Learner, micro_loss: MicroLoss, optimizer: optax.GradientTransformation, prefix: str,
    measure: Callable[[Any, Batch, Any], Batch] = lambda params, minibatch, base: {},
    router_bias_rate: float = 0.0,
):
    """Makes a jitted update that donates its state and returns (state, metrics), and the fields of
    `micro_loss`, if any. `measure` computes further fields from the parameters. The base of an
    adapter is a third argument."""

    def train_step(state: TrainState, minibatch: Batch, base: Any = None) -> tuple:
        minibatch = _laid_out(learner, minibatch)
        minibatch = minibatch | measure(state.params, minibatch, base)
        params, seeds = perturbed(state.params, state.opt_state, minibatch)
        minibatch = minibatch | seeds
        scale = loss_scale(state.opt_state)
        grads, metrics, fields = accumulate_gradients(
            learner, micro_loss, params, minibatch, scale=scale, base=base
        )
        is_slowed = prefix == "actor" and "lr_scale" in minibatch
        factor = minibatch["lr_scale"][0, 0] if is_slowed else None
        state, measured = _apply(learner, optimizer, prefix, state, grads, factor)
        if EXPERT_COUNTS in metrics:
            rate = router_bias_rate if factor is None else router_bias_rate * factor
            for name in (f"{prefix}/is_skipped", "gac/is_skipped"):
                rate = rate * (1 - measured[name]) if name in measured else rate
            params = moved_bias(state.params, metrics.pop(EXPERT_COUNTS), rate)
            state = dataclasses.replace(state, params=params)
        metrics |= measured
        return (state, metrics, fields) if fields else (state, metrics)

    options = learner.program.compiler_options
    return jax.jit(train_step, donate_argnums=(0,), compiler_options=options)


def moved_bias(params: Any, load_le: jax.Array, rate: chex.Numeric) -> Any:
    """Returns parameters whose router biases moved by +-rate, up where an expert was chosen less
    often than the mean of its layer [L,E], down where more often (arXiv:2408.15664)."""
    layers = params["layers"]
    if "router_bias" not in layers:
        return params
    below_le = jnp.sign(jnp.mean(load_le, axis=-1, keepdims=True) - load_le)
    bias_le = layers["router_bias"] + (rate * below_le).astype(layers["router_bias"].dtype)
    return params | {"layers": layers | {"router_bias": bias_le}}


def _laid_out(learner: Learner, minibatch: Batch) -> Batch:
    minibatch = learner.on_every_device(minibatch)
    if learner.max_segments is not None:
        minibatch = minibatch | {"seg": _segments(learner, minibatch["segment_ids"])}
    return minibatch


def _apply(
    learner: Learner, optimizer: optax.GradientTransformation, prefix: str, state: TrainState,
    grads: Any, factor: jax.Array | None = None,
) -> tuple[TrainState, Metrics]:
    """Returns (the state after an update with these gradients, times `factor`; its metrics)."""
    grads = learner.on_every_device(grads)
    norm = optax.global_norm(without_perturbation(grads))
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = update_metrics(opt_state, prefix)
    if factor is not None:
        updates = jax.tree.map(lambda u: u * factor, updates)
        metrics |= {name: x * factor for name, x in metrics.items() if name == f"{prefix}/lr"}
    if f"{prefix}/is_skipped" in metrics:
        # What the next scale may mend is told there; what overflows at the smallest is told here.
        is_mended = (metrics[f"{prefix}/is_skipped"] > 0) & (loss_scale(state.opt_state) > 1)
        norm = jnp.where(is_mended, 0.0, norm)
    metrics |= {f"{prefix}/grad_norm": norm}
    return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics


def make_train_step(
    learner: Learner, c: Correction, optimizer: optax.GradientTransformation, is_scored: bool = True
):
    """Makes the policy update (state, minibatch) -> (state, metrics). The minibatch has the fields of
    `Correction.is_in_update`, [accumulation, rows, ...]; the state is donated.

    A batch that was not scored before, see `Correction.recompute_reason`, gets its logp_old here:
    the update's own log-prob, detached, from which weights and masks are computed. The update then
    returns (state, metrics, {name: [accumulation, rows, T]}) with the names of `correction.OF_UPDATE`.
    """
    micro_loss = _policy_loss(learner, c, is_scored)
    measures = []
    if c.aggregation == "prompt-mean":
        measures.append(_prompt_divisor)
    if c.environment_ce_coeff:
        measures.append(_count_environment_tokens)
    if "st_ppo_norm" in c.needs:
        measures.append(_clipping_bias_norm(learner, c))

    def measure(params, minibatch, base):
        return functools.reduce(operator.or_, (f(params, minibatch, base) for f in measures), {})

    return _make_step(
        learner, micro_loss, optimizer, "actor", measure, router_bias_rate=c.router_bias_rate
    )


def make_arriving_step(
    learner: Learner, c: Correction, optimizer: optax.GradientTransformation
) -> tuple[Callable, Callable]:
    """Makes the policy update of an unscored batch that arrives in parts. Returns two functions:

    add: (parameters, sums or None, micro-batch [1, rows, ...], base of an adapter or None) -> (sums,
      the fields of `correction.OF_UPDATE` [1, rows, T]); the sums are undivided gradients and metrics, and donated.
    finish: (state, sums, tokens, sequences) -> (state, metrics), with the counts of the whole
      batch; the state is donated.

    Sums of the same parts in another order differ by rounding alone.
    """
    micro_loss = _policy_loss(learner, c, is_scored=False)

    def add(params, sums, micro, base=None):
        *part, fields = accumulate_gradients(
            learner, micro_loss, params, _laid_out(learner, micro), is_whole=False, base=base
        )
        return part if sums is None else jax.tree.map(jnp.add, sums, part), fields

    def finish(state, sums, num_tokens, num_seqs):
        grads, metrics = sums
        count = reduce.denominator(c.aggregation, num_tokens, num_seqs)
        divisor = lambda name: count if name.endswith("_loss") else num_tokens
        mean = lambda name, x: x if counts.is_count(name) else x / divisor(name)
        metrics = {name: mean(name, x) for name, x in metrics.items()}
        grads = jax.tree.map(lambda g: g / count, grads)
        state, measured = _apply(learner, optimizer, "actor", state, grads)
        return state, metrics | measured

    jit = functools.partial(jax.jit, compiler_options=learner.program.compiler_options)
    return jit(add, donate_argnums=(1,)), jit(finish, donate_argnums=(0,))


def _policy_loss(learner: Learner, c: Correction, is_scored: bool) -> MicroLoss:
    pulls_entropy = c.entropy_coeff != 0
    scores_of = functools.partial(
        response_scores, with_entropy=pulls_entropy or c.is_centered or not is_scored,
        pulls_entropy=pulls_entropy, asked=moe.Asked(statistics=c.counts_experts),
        with_dense_kl=c.dense_kl_coeff != 0,
    )

    def forward(params, batch):
        scores = learner.by_parts(scores_of, params, batch)
        if "logits" in c.needs:
            scores["logits"] = learner.by_parts(response_logits, params, batch)
        return scores

    def micro_batch_loss(scores, inputs):
        batch, num_tokens, num_seqs = inputs
        returned, method_counts = {}, {}
        if not is_scored:
            own: tuple = scores["logp"], scores["entropy"]
            if c.environment_ce_coeff:
                own = tuple(ratios.zero_padding(x, batch["mask"]) for x in own)
            batch = batch | fused_fields(*own)
            returned = {name: batch[name] for name in ("logp_old", "entropy")}
        if "logits" in scores:
            batch = batch | {"logits": scores["logits"]}
        if not is_scored:
            outputs = method_outputs(c, batch | {"logp": batch["logp_prox"]})
            returned |= {"weights": outputs.weight, "accepted": outputs.is_accepted}
            batch, method_counts = batch | weight_fields(c, outputs), outputs.counts
        spec = loss_spec(c, batch)
        value, metrics = loss.compute_loss(
            scores["logp"], with_key(c, batch), spec, entropy=scores["entropy"],
            logp_top=scores.get("logp_top"), dense_kl=scores.get("dense_kl"), num_tokens=num_tokens,
            num_seqs=num_seqs,
        )
        metrics |= method_counts | drift_metrics(scores["logp"], batch)
        if "routed" in scores:
            share = jnp.sum(batch["mask"]) / num_tokens
            added, measured = router_loss(c, scores["routed"], share)
            value, metrics = value + added, metrics | measured
        return value, (metrics, returned)

    return MicroLoss(forward, micro_batch_loss)


def router_loss(
    c: Correction, routed: moe.Routed, share: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Returns (the auxiliary losses of the routers, their metrics), from the routers' own choices
    and the scores of all experts.

    Both are means over the layers, times the micro-batch's share of the minibatch. The
    load-balancing loss is E sum_e f_e p_e (arXiv:2101.03961), f the share of choices and p the mean
    probability: 1 at an even load. The gradient passes through p. The z-loss is the mean of
    logsumexp(logits)^2 (arXiv:2202.08906). Prompt tokens and samples that are left out of the loss
    count as well.

    Args:
      routed: statistics of B rows, [B,L,E] and [B,L].
      share: scalar.
    """
    load_le = jnp.sum(routed.load, axis=0)
    probs_le = jnp.sum(routed.probs, axis=0)
    choices_l1 = jnp.maximum(jnp.sum(load_le, axis=-1, keepdims=True), 1.0)
    tokens_l1 = jnp.maximum(jnp.sum(probs_le, axis=-1, keepdims=True), 1.0)
    even_l = jnp.sum(load_le / choices_l1 * probs_le / tokens_l1, axis=-1) * load_le.shape[-1]
    balance = jnp.mean(even_l) * share
    z = jnp.mean(jnp.sum(routed.z, axis=0) / tokens_l1[:, 0]) * share
    metrics = {"moe/load_balance_loss": balance, "moe/router_z_loss": z}
    if c.router_bias_rate:
        metrics[EXPERT_COUNTS] = load_le
    return c.load_balance_coeff * balance + c.router_z_coeff * z, metrics


def _count_environment_tokens(params: Any, minibatch: Batch, base: Any) -> Batch:
    """Returns the number of the minibatch's tokens in `environment`, one number a row [M,B]."""
    count = jnp.sum(minibatch["environment"]).astype(jnp.float32)
    return {"num_environment_tokens": jnp.full(minibatch["mask"].shape[:2], count)}


def _prompt_divisor(params: Any, minibatch: Batch, base: Any) -> Batch:
    """Returns the divisor of each token [M,B,T] in "prompt-mean", from the prompts of the whole
    minibatch."""
    names = ("mask", "group", "seg") if "seg" in minibatch else ("mask", "group")
    rows = {name: _as_rows(minibatch[name]) for name in names}
    return {"prompt_divisor": reduce.prompt_divisor(**rows).reshape(minibatch["mask"].shape)}


def _clipping_bias_norm(learner: Learner, c: Correction):
    """Makes (params, minibatch) -> {"st_ppo_norm"}: the norm of the gradient that the objective's
    clip removes."""
    bounds = {name: c.objective[1][name] for name in ("clip_low", "clip_high")}

    def clipping_bias(logp, inputs):
        batch, _, num_seqs = inputs
        batch, seg = loss.bypassed(batch, c.centre), batch.get("seg")
        loss_bt = turn_clipped.turn_clipping_bias(
            logp, batch[loss.CENTRES[c.centre]], batch["adv"], batch["mask"], seg,
            turn=batch["turn"], **bounds
        )
        mode = "seq-mean-token-mean"
        value = reduce.aggregate(loss_bt, batch["mask"], mode, num_seqs=num_seqs, seg=seg)
        return value, ({}, {})

    left_out = MicroLoss(_log_probs(learner), clipping_bias)

    def measure(params, minibatch, base):
        grads, *_ = accumulate_gradients(learner, left_out, params, minibatch, base=base)
        norm = optax.global_norm(learner.on_every_device(grads))
        return {"st_ppo_norm": jnp.full(len(minibatch["mask"]), norm)}

    return measure


def _log_probs(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    return lambda params, batch: learner.by_parts(response_logprobs, params, batch)


def make_critic_step(learner: Learner, clip: float, optimizer: optax.GradientTransformation):
    """Makes the critic's update with the clipped value loss. The minibatch has the fields "values"
    and "returns"."""

    def forward(params, batch):
        return learner.by_parts(prefix_values, params, batch)

    def value_loss(values, inputs):
        batch, num_tokens, _ = inputs
        loss_bt, metrics = objectives.value_loss(
            values, batch["values"], batch["returns"], batch["mask"], clip
        )
        value = reduce.aggregate(loss_bt, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, (metrics | {"critic/vf_loss": value}, {})

    return _make_step(learner, MicroLoss(forward, value_loss), optimizer, "critic")


def make_distillation_step(learner: Learner, optimizer: optax.GradientTransformation):
    """Makes the update of a model pi that shall draft for the sampler mu, with the loss mean of
    w (log mu - log pi) over the masked tokens. With w = 1 this is an unbiased estimate of
    KL(mu || pi) on samples of mu. The gradient passes through log pi alone. The minibatch has
    "logp_behav" and "weights", w [accumulation, rows, T]."""

    def forward_kl(logp, inputs):
        batch, num_tokens, _ = inputs
        mean = lambda x: reduce.aggregate(x, batch["mask"], "token-mean", num_tokens=num_tokens)
        gap = batch["logp_behav"] - logp
        return mean(batch["weights"] * gap), ({"drafter/kl": mean(gap)}, {})

    return _make_step(learner, MicroLoss(_log_probs(learner), forward_kl), optimizer, "drafter")


def make_supervised_step(learner: Learner, optimizer: optax.GradientTransformation):
    """Makes the supervised update: mean cross-entropy over the masked tokens."""

    def cross_entropy(logp, inputs):
        batch, num_tokens, _ = inputs
        value = -reduce.aggregate(logp, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, ({"supervised/ce_loss": value}, {})

    micro_loss = MicroLoss(_log_probs(learner), cross_entropy)
    return _make_step(learner, micro_loss, optimizer, "supervised")
