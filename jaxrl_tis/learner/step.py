"""The updates: pure steps (state, minibatch) -> (state, metrics).

A minibatch has leading axes [accumulation, rows]; gradients of its micro-batches are summed with
denominators of the whole minibatch, so the split changes nothing but memory; unless a method ranks
the tokens of a call, as the masks `m2po` and `clip_cov` do, and `top_entropy` in bypass mode.
Rows hold one sequence each or, with `Learner.max_segments`, several; micro-batches without a token
of any sequence are then skipped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_tis.estimators import counts, loss, objectives, ratios, reduce, turn_clipped
from jaxrl_tis.kernels.segment import Segments
from jaxrl_tis.learner.correction import (
    Correction, drift_metrics, judged_alone, loss_arguments, with_key,
)
from jaxrl_tis.learner.optimizer import loss_scale, perturbed, update_metrics, without_perturbation
from jaxrl_tis.learner.scoring import (
    Batch, Learner, Metrics, prefix_values, response_logits, response_logprobs, response_scores,
    zeros_like,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer state of one network."""

    params: Any
    opt_state: Any


# (parameters, micro-batch, tokens, sequences of the minibatch) -> (loss, metrics), or (loss, metrics,
# fields [B,T] of the micro-batch that were made with it).
LossFn = Callable[[Any, Batch, jax.Array, jax.Array], tuple]


def _accumulate(
    learner: Learner, loss_fn: LossFn, params: Any, minibatch: Batch, is_whole: bool = True,
    scale: jax.Array | None = None,
):
    """Returns (gradients, metrics) summed over the micro-batches of a minibatch, and the fields
    [M,B,T] that `loss_fn` makes, {} if it makes none.

    `loss_fn` divides by the minibatch's own token and sequence counts; by nothing where the
    minibatch is a part of one that is not whole yet. Gradients are those of the loss times `scale`,
    divided by it in float32. Metrics named *_loss and `counts` add up by themselves; the others are
    means over tokens and are weighted by each part's tokens.
    """
    mask = minibatch["mask"]
    num_tokens = num_seqs = jnp.float32(1)
    if is_whole:
        num_tokens = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
        num_seqs = jnp.maximum(_count_sequences(minibatch), 1).astype(jnp.float32)

    def part(params, micro):
        value, metrics, *made = loss_fn(params, micro, num_tokens, num_seqs)
        share = jnp.sum(micro["mask"]) / num_tokens
        adds_up = lambda name: name.endswith("_loss") or counts.is_count(name)
        weigh = lambda name, x: x if adds_up(name) else x * share
        metrics = {name: weigh(name, x) for name, x in metrics.items()}
        return value if scale is None else value * scale, (metrics, made[0] if made else {})

    def unscaled(found):
        grads, metrics = found
        if scale is not None:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        return grads, metrics

    def gradient(params, micro):
        with learner.program.products():  # those of the backward pass are traced here
            grads, (metrics, made) = jax.grad(part, has_aux=True)(params, micro)
        return (grads, metrics), made

    def packed_gradient(params, micro):
        # The total is not part of the choice, which would keep a second one.
        return jax.lax.cond(jnp.any(micro["mask"]), gradient, lambda *_: empty, params, micro)

    def add(total, micro):
        found, made = (packed_gradient if "seg" in minibatch else gradient)(params, micro)
        return jax.tree.map(jnp.add, total, found), made

    first = jax.tree.map(lambda x: x[0], minibatch)
    if len(mask) == 1:
        found, made = gradient(params, first)
        return *unscaled(found), jax.tree.map(lambda x: x[None], made)
    empty = zeros_like(jax.eval_shape(gradient, params, first))
    found, made = jax.lax.scan(add, empty[0], minibatch)
    return *unscaled(found), made


def _segments(learner: Learner, segment_ids: jax.Array) -> Segments:
    layout = learner.program.layout
    is_cut = layout is not None and layout.mesh.size > 1 and not learner.sums_in_order
    rows = layout.sharding(("batch", None)) if is_cut else None
    return Segments(segment_ids, learner.max_segments, rows)


def _count_sequences(minibatch: Batch) -> jax.Array:
    """Counts the sequences with a valid token."""
    mask = minibatch["mask"]
    if "seg" not in minibatch:
        return jnp.sum(jnp.any(mask, axis=-1))
    mask, seg = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), (mask, minibatch["seg"]))
    return jnp.sum(ratios.sequence_count(mask, mask, seg) > 0)


def _make_step(
    learner: Learner,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    prefix: str,
    measure: Callable[[Any, Batch], Batch] = lambda params, minibatch: {},
):
    """Makes a jitted, donating update; `measure` adds fields that take the parameters. It returns
    (state, metrics), and the fields that `loss_fn` makes, if any."""

    def train_step(state: TrainState, minibatch: Batch) -> tuple:
        minibatch = _laid_out(learner, minibatch)
        minibatch = minibatch | measure(state.params, minibatch)
        params, seeds = perturbed(state.params, state.opt_state, minibatch)
        minibatch = minibatch | seeds
        scale = loss_scale(state.opt_state)
        grads, metrics, made = _accumulate(learner, loss_fn, params, minibatch, scale=scale)
        is_slowed = prefix == "actor" and "lr_scale" in minibatch
        factor = minibatch["lr_scale"][0, 0] if is_slowed else None
        state, taken = _apply(learner, optimizer, prefix, state, grads, factor)
        metrics |= taken
        return (state, metrics, made) if made else (state, metrics)

    options = learner.program.compiler_options
    return jax.jit(train_step, donate_argnums=(0,), compiler_options=options)


def _laid_out(learner: Learner, minibatch: Batch) -> Batch:
    minibatch = learner.on_every_device(minibatch)
    if learner.max_segments is not None:
        minibatch = minibatch | {"seg": _segments(learner, minibatch["segment_ids"])}
    return minibatch


def _apply(
    learner: Learner, optimizer: optax.GradientTransformation, prefix: str, state: TrainState,
    grads: Any, factor: jax.Array | None = None,
) -> tuple[TrainState, Metrics]:
    """Returns the state after a step along these gradients, times `factor`, and its metrics."""
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
    """Makes the policy update. It takes a minibatch of the fields of `Correction.is_in_update`,
    [accumulation, rows, ...]; the state is donated.

    A batch that was not scored before, see `Correction.why_scored`, gets its logp_old here: the
    update's own log-prob, detached, of which weights and masks are made. The update then returns
    (state, metrics, {"logp", "entropy"} [accumulation, rows, T]).
    """
    loss_fn = _policy_loss(learner, c, is_scored)
    if "st_ppo_norm" not in c.needs:
        return _make_step(learner, loss_fn, optimizer, "actor")
    return _make_step(learner, loss_fn, optimizer, "actor", _clipping_bias_norm(learner, c))


def make_arriving_step(
    learner: Learner, c: Correction, optimizer: optax.GradientTransformation
) -> tuple[Callable, Callable]:
    """Makes the policy update of a batch that comes in parts and was not scored before. Returns

    add: (parameters, sums or None, micro-batch [1, rows, ...]) -> (sums, {"logp", "entropy"} [1,
      rows, T]); the sums are of gradients and metrics, not divided by anything, and donated.
    finish: (state, sums, tokens, sequences) -> (state, metrics), with the counts of the whole batch;
      the state is donated.

    Sums of the same parts in another order differ by rounding alone.
    """
    loss_fn = _policy_loss(learner, c, is_scored=False)

    def add(params, sums, micro):
        *found, made = _accumulate(learner, loss_fn, params, _laid_out(learner, micro), is_whole=False)
        return found if sums is None else jax.tree.map(jnp.add, sums, found), made

    def finish(state, sums, num_tokens, num_seqs):
        grads, metrics = sums
        count = reduce.denominator(c.aggregation, num_tokens, num_seqs)
        divisor = lambda name: count if name.endswith("_loss") else num_tokens
        mean = lambda name, x: x if counts.is_count(name) else x / divisor(name)
        metrics = {name: mean(name, x) for name, x in metrics.items()}
        grads = jax.tree.map(lambda g: g / count, grads)
        state, taken = _apply(learner, optimizer, "actor", state, grads)
        return state, metrics | taken

    jit = functools.partial(jax.jit, compiler_options=learner.program.compiler_options)
    return jit(add, donate_argnums=(1,)), jit(finish, donate_argnums=(0,))


def _policy_loss(learner: Learner, c: Correction, is_scored: bool) -> LossFn:
    pulls_entropy = c.entropy_coeff != 0
    scores = functools.partial(
        response_scores, with_entropy=pulls_entropy or c.is_centered or not is_scored,
        pulls_entropy=pulls_entropy,
    )

    def loss_fn(params, batch, num_tokens, num_seqs):
        made = learner.by_parts(scores, params, batch)
        scored = [] if is_scored else [
            jax.lax.stop_gradient({name: made[name] for name in ("logp", "entropy")})
        ]
        if "logits" in c.needs:
            made["logits"] = learner.by_parts(response_logits, params, batch)
        return *learner.judge(judged, made, (batch, num_tokens, num_seqs)), *scored

    def judged(made, given):
        batch, num_tokens, num_seqs = given
        if not is_scored:
            batch = judged_alone(c, made["logp"], made["entropy"], batch)
        if "logits" in made:
            batch = batch | {"logits": made["logits"]}
        value, metrics = loss.policy_loss(
            made["logp"], with_key(c, batch), entropy=made["entropy"], num_tokens=num_tokens,
            num_seqs=num_seqs, logp_top=made.get("logp_top"), **loss_arguments(c, batch),
        )
        return value, metrics | drift_metrics(c, made["logp"], batch)

    return loss_fn


def _clipping_bias_norm(learner: Learner, c: Correction):
    """Makes (params, minibatch) -> {"st_ppo_norm"}: the norm of the gradient that the objective's
    clip leaves out."""
    bounds = {name: c.objective[1][name] for name in ("clip_low", "clip_high")}

    def left_out(params, batch, num_tokens, num_seqs):
        batch = loss.bypassed(batch, c.mode)
        logp = learner.by_parts(response_logprobs, params, batch)
        return learner.judge(judged, logp, (batch, num_seqs))

    def judged(logp, given):
        batch, num_seqs = given
        seg = batch["seg"] if "seg" in batch else None
        loss_bt = turn_clipped.turn_clipping_bias(
            logp, batch["logp_old"], batch["adv"], batch["mask"], seg, turn=batch["turn"], **bounds
        )
        mode = "seq-mean-token-mean"
        return reduce.aggregate(loss_bt, batch["mask"], mode, num_seqs=num_seqs, seg=seg), {}

    def measure(params, minibatch):
        grads, *_ = _accumulate(learner, left_out, params, minibatch)
        norm = optax.global_norm(learner.on_every_device(grads))
        return {"st_ppo_norm": jnp.full(len(minibatch["mask"]), norm)}

    return measure


def make_critic_step(learner: Learner, clip: float, optimizer: optax.GradientTransformation):
    """Makes the critic's update with the clipped value loss; the minibatch has the fields values
    and returns."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        values = learner.by_parts(prefix_values, params, batch)
        return learner.judge(judged, values, (batch, num_tokens))

    def judged(values, given):
        batch, num_tokens = given
        loss_bt, metrics = objectives.value_loss(
            values, batch["values"], batch["returns"], batch["mask"], clip
        )
        value = reduce.aggregate(loss_bt, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, metrics | {"critic/vf_loss": value}

    return _make_step(learner, loss_fn, optimizer, "critic")


def make_supervised_step(learner: Learner, optimizer: optax.GradientTransformation):
    """Makes the update by cross-entropy on the masked tokens, mean over tokens."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        logp = learner.by_parts(response_logprobs, params, batch)
        return learner.judge(judged, logp, (batch, num_tokens))

    def judged(logp, given):
        batch, num_tokens = given
        value = -reduce.aggregate(logp, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, {"supervised/ce_loss": value}

    return _make_step(learner, loss_fn, optimizer, "supervised")
