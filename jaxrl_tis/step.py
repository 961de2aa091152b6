"""The learner's programs: score, and the pure steps (state, minibatch) -> (state, metrics).

A minibatch has leading axes [accumulation, rows]; gradients of its micro-batches are summed with
denominators of the whole minibatch, so the split changes nothing but memory; unless a method ranks
the tokens of a call, as the masks `m2po` and `clip_cov` do, and `top_entropy` in bypass mode.
Rows hold one sequence each or, with `Learner.max_segments`, several; micro-batches without a token
of any sequence are then skipped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_tis import optimizer as optimizers
from jaxrl_tis.correction import Correction, policy_loss
from jaxrl_tis.estimators import objectives, ratios, reduce, sequence_clipped
from jaxrl_tis.kernels.logprob import Scores, token_logprob
from jaxrl_tis.kernels.logprob_chunked import Kept
from jaxrl_tis.kernels.segment import Segments
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer state of one network."""

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Learner:
    """What every program of the learner is built from.

    Attributes:
      max_targets: most response tokens in a row; only these positions reach the output head.
      chunk: positions whose logits are alive at a time.
      max_segments: most sequences of a packed row; None if every row holds one.
    """

    config: ModelConfig
    program: transformer.Program
    max_targets: int
    chunk: int
    max_segments: int | None = None


# Forward passes


def _score_targets(params: Any, learner: Learner, batch: Batch, **options) -> Scores:
    """`token_logprob` of the masked tokens at their temperatures, [B,T]; 0 elsewhere.

    Where the batch has kept sets, of the distributions over these sets: what the sampler drew from.
    So are then the entropy, the collisions and both sides of the KL to the reference, whose
    estimators are means over the sampler's draws.
    """
    x_btd = transformer.rows_hidden(
        params, learner.config, learner.program,
        batch["tokens"], batch["positions"], batch["segment_ids"], batch.get("evict_step"),
    )
    gather_hidden, gather, scatter = _targets(batch["mask"], learner.max_targets)
    kept = _kept(gather(batch["kept"])) if "kept" in batch else None
    found = token_logprob(
        transformer.output_head(params, learner.program),
        gather_hidden(x_btd),
        gather(batch["tokens"]),
        gather(jnp.where(batch["mask"], batch["temperature"], 1.0)),
        learner.chunk,
        kept=kept,
        layout=learner.program.layout,
        numerics=learner.program.numerics,
        **options,
    )
    return Scores(*(ratios.zero_padding(scatter(x), batch["mask"]) for x in found))


def _kept(ids_bnk: jax.Array) -> Kept:
    """Sets as Trajectory records them; at padding whatever there is."""
    return Kept(ids_bnk, jnp.all(ids_bnk < 0, axis=-1))


def _targets(mask_bt: jax.Array, max_targets: int):
    """(hidden states [B,T,D] -> [B,N,D] that predict the targets, fields [B,T,...] of the targets
    -> [B,N,...], and [B,N] back to [B,T]).

    Token t is predicted from position t - 1. Where fewer tokens than T - 1 can be targets, the
    masked ones are gathered to the left; else N is T, and the row is shifted by one.
    """
    b, t = mask_bt.shape
    if max_targets >= t - 1:
        return lambda x: x, lambda x: jnp.roll(x, -1, axis=1), lambda x: jnp.roll(x, 1, axis=1)
    source_bn = jnp.argsort(~mask_bt[:, 1:], axis=1, stable=True)[:, :max_targets]
    rows = jnp.arange(b)[:, None]
    after = lambda ndim: source_bn.reshape(b, -1, *(1,) * (ndim - 2)) + 1
    return (
        lambda x_btd: jnp.take_along_axis(x_btd, source_bn[..., None], axis=1),
        lambda x: jnp.take_along_axis(x, after(x.ndim), axis=1),
        lambda x_bn: jnp.zeros((b, t)).at[rows, source_bn + 1].set(x_bn),
    )


def response_logprobs(
    params: Any, learner: Learner, batch: Batch, with_entropy: bool
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [B,T] of the masked tokens at their temperatures; 0 elsewhere."""
    found = _score_targets(params, learner, batch, with_entropy=with_entropy)
    return found.logp, found.entropy


def response_logits(params: Any, learner: Learner, batch: Batch) -> jax.Array:
    """Logits [B,T,V] over the temperature that each masked token was drawn from; 0 elsewhere."""
    x_btd = transformer.rows_hidden(
        params, learner.config, learner.program,
        batch["tokens"], batch["positions"], batch["segment_ids"], batch.get("evict_step"),
    )
    logits_btv = transformer.head_logits(params, learner.program, x_btd)
    before_btv = jnp.pad(logits_btv, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    mask_bt1 = batch["mask"][..., None]
    temperature_bt1 = jnp.where(mask_bt1, batch["temperature"][..., None], 1.0)
    return jnp.where(mask_bt1, before_btv / temperature_bt1, 0.0)


def prefix_values(params: Any, learner: Learner, batch: Batch) -> jax.Array:
    """Critic's value [B,T] of the prefix before each token, float32."""
    x_btd = transformer.rows_hidden(
        params["decoder"], learner.config, learner.program,
        batch["tokens"], batch["positions"], batch["segment_ids"], batch.get("evict_step"),
    )
    values_bt = jnp.einsum("btd,d->bt", x_btd.astype(jnp.float32), params["value"])
    return jnp.pad(values_bt, ((0, 0), (1, 0)))[:, :-1]


def make_score(learner: Learner, with_entropy: bool = True) -> Callable[[Any, Batch], Batch]:
    """(params, batch [M, rows, ...]) -> {"logp", "entropy"} [M, rows, T], one micro-batch at a
    time."""

    def score(params, micro):
        logp, entropy = response_logprobs(params, learner, micro, with_entropy)
        return {"logp": logp, "entropy": entropy}

    return _by_micro_batch(learner, score)


def _by_micro_batch(learner: Learner, measure: Callable[[Any, Batch], Any]):
    """Jitted (params, batch [M, rows, ...]) -> measure(params, micro-batch) of each, stacked; 0 for
    those of packed rows that are empty."""

    def one(params, micro):
        if learner.max_segments is None:
            return measure(params, micro)
        zeros = _zeros_like(jax.eval_shape(measure, params, micro))
        return jax.lax.cond(jnp.any(micro["mask"]), measure, lambda *_: zeros, params, micro)

    return jax.jit(
        lambda params, batch: jax.lax.map(lambda micro: one(params, micro), batch),
        compiler_options=learner.program.compiler_options,
    )


def _zeros_like(tree: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)


def make_collisions(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """(params, batch [M, rows, ...]) -> sum of pi^2 over the vocabulary at each masked token [M,
    rows, T], 0 elsewhere."""

    def collisions(params, micro):
        return _score_targets(params, learner, micro, with_collision=True).collision

    return _by_micro_batch(learner, collisions)


def make_logits(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """(params, batch [M, rows, ...]) -> `response_logits` [M, rows, T, V]."""
    return _by_micro_batch(learner, lambda params, b: response_logits(params, learner, b))


def make_score_norms(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """(params, batch [M, rows, ...]) -> |grad sum_t log pi(y_t)|^2 of each row [M, rows], by a
    backward pass for each. Rows hold one sequence."""

    def log_prob(params, row):
        return jnp.sum(response_logprobs(params, learner, row, with_entropy=False)[0])

    def squared_norm(params, row):
        gradient = jax.grad(log_prob)(params, jax.tree.map(lambda x: x[None], row))
        return jnp.square(optax.global_norm(gradient))

    return _by_micro_batch(
        learner, lambda params, b: jax.lax.map(lambda row: squared_norm(params, row), b)
    )


def make_values(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """(critic params, batch [M, rows, ...]) -> values [M, rows, T]."""
    return _by_micro_batch(learner, lambda params, b: prefix_values(params, learner, b))


# Updates

LossFn = Callable[[Any, Batch, jax.Array, jax.Array], tuple[jax.Array, Metrics]]


def _accumulate(loss_fn: LossFn, params: Any, minibatch: Batch):
    """(gradients, metrics) summed over the micro-batches of a minibatch.

    `loss_fn` divides by the minibatch's own token and sequence counts. Metrics named *_loss add up
    by themselves; the others are means over tokens and are weighted by each part's tokens.
    """
    mask = minibatch["mask"]
    num_tokens = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    num_seqs = jnp.maximum(_count_sequences(minibatch), 1).astype(jnp.float32)

    def part(params, micro):
        value, metrics = loss_fn(params, micro, num_tokens, num_seqs)
        share = jnp.sum(micro["mask"]) / num_tokens
        scale = lambda name, x: x if name.endswith("_loss") else x * share
        return value, {name: scale(name, x) for name, x in metrics.items()}

    gradient = jax.grad(part, has_aux=True)

    def add(total, micro):
        return jax.tree.map(jnp.add, total, gradient(params, micro))

    def add_packed(total, micro):
        return jax.lax.cond(jnp.any(micro["mask"]), add, lambda total, _: total, total, micro)

    first = jax.tree.map(lambda x: x[0], minibatch)
    if len(mask) == 1:
        return gradient(params, first)
    add_next = add_packed if "seg" in minibatch else add
    zeros = _zeros_like(jax.eval_shape(gradient, params, first))
    return jax.lax.scan(lambda total, micro: (add_next(total, micro), None), zeros, minibatch)[0]


def _segments(learner: Learner, segment_ids: jax.Array) -> Segments:
    layout = learner.program.layout
    is_cut = layout is not None and layout.mesh.size > 1
    rows = layout.sharding(("batch", None)) if is_cut else None
    return Segments(segment_ids, learner.max_segments, rows)


def _count_sequences(minibatch: Batch) -> jax.Array:
    """Sequences with a valid token."""
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
    """A jitted, donating update; `measure` adds fields that take the parameters."""

    def train_step(state: TrainState, minibatch: Batch) -> tuple[TrainState, Metrics]:
        if learner.max_segments is not None:
            minibatch = minibatch | {"seg": _segments(learner, minibatch["segment_ids"])}
        minibatch = minibatch | measure(state.params, minibatch)
        grads, metrics = _accumulate(loss_fn, state.params, minibatch)
        metrics[f"{prefix}/grad_norm"] = optax.global_norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics |= optimizers.alignment_metrics(opt_state)
        if prefix == "actor" and "lr_scale" in minibatch:
            updates = jax.tree.map(lambda u: u * minibatch["lr_scale"][0, 0], updates)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics

    options = learner.program.compiler_options
    return jax.jit(train_step, donate_argnums=(0,), compiler_options=options)


def make_train_step(learner: Learner, c: Correction, optimizer: optax.GradientTransformation):
    """The policy update. Minibatch: rows of `batch.rows` plus what `Trainer.score` and
    `correction.make_prepare` add; [accumulation, rows, T]. The state is donated."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        logp, entropy = response_logprobs(params, learner, batch, c.entropy_coeff != 0)
        if "logits" in c.needs:
            batch = batch | {"logits": response_logits(params, learner, batch)}
        return policy_loss(c, logp, entropy, batch, num_tokens, num_seqs)

    if "st_ppo_norm" not in c.needs:
        return _make_step(learner, loss_fn, optimizer, "actor")
    return _make_step(learner, loss_fn, optimizer, "actor", _clipping_bias_norm(learner, c))


def _clipping_bias_norm(learner: Learner, c: Correction):
    """(params, minibatch) -> {"st_ppo_norm"}: norm of the gradient that its clip leaves out."""
    bounds = {name: c.objective[1][name] for name in ("clip_low", "clip_high")}

    def left_out(params, batch, num_tokens, num_seqs):
        logp, _ = response_logprobs(params, learner, batch, with_entropy=False)
        seg = batch["seg"] if "seg" in batch else None
        loss_bt = sequence_clipped.turn_clipping_bias(
            logp, batch["logp_old"], batch["adv"], batch["mask"], seg, turn=batch["turn"], **bounds
        )
        mode = "seq-mean-token-mean"
        return reduce.aggregate(loss_bt, batch["mask"], mode, num_seqs=num_seqs, seg=seg), {}

    def measure(params, minibatch):
        grads, _ = _accumulate(left_out, params, minibatch)
        return {"st_ppo_norm": jnp.full(len(minibatch["mask"]), optax.global_norm(grads))}

    return measure


def make_critic_step(learner: Learner, clip: float, optimizer: optax.GradientTransformation):
    """The critic's update with the clipped value loss; minibatch fields values and returns."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        values = prefix_values(params, learner, batch)
        loss_bt, metrics = objectives.value_loss(
            values, batch["values"], batch["returns"], batch["mask"], clip
        )
        value = reduce.aggregate(loss_bt, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, metrics | {"critic/vf_loss": value}

    return _make_step(learner, loss_fn, optimizer, "critic")


def make_supervised_step(learner: Learner, optimizer: optax.GradientTransformation):
    """Cross-entropy on the masked tokens, mean over tokens."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        logp, _ = response_logprobs(params, learner, batch, with_entropy=False)
        value = -reduce.aggregate(logp, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, {"supervised/ce_loss": value}

    return _make_step(learner, loss_fn, optimizer, "supervised")
