"""The learner's programs: score, prepare, and the pure steps (state, minibatch) -> (state, metrics).

A minibatch has leading axes [accumulation, rows]; gradients of its micro-batches are summed with
denominators of the whole minibatch, so the split changes nothing but memory.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from jaxrl_tis.estimators import advantages, diagnostics, kl, loss, objectives, ratios, reduce
from jaxrl_tis.estimators import weights
from jaxrl_tis.kernels.logprob import token_logprob
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
    """

    config: ModelConfig
    program: transformer.Program
    max_targets: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Correction:
    """The chosen methods, each a name with its parameters."""

    mode: str
    weight: tuple[str, dict]
    is_batch_normalized: bool
    advantage: tuple[str, dict]
    objective: tuple[str, dict]
    aggregation: str
    scale: float
    kl: tuple[str, dict] | None
    kl_coeff: float
    entropy_coeff: float


def method(table: dict[str, Callable], name: str, fields: ml_collections.ConfigDict):
    """(name, parameters): every keyword of the method that is a field of the config."""
    keywords = [
        p.name for p in inspect.signature(table[name]).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name in fields
    ]
    return name, {key: fields[key] for key in keywords}


def correction(fields: ml_collections.ConfigDict) -> Correction:
    """The methods that `config.correction` names."""
    return Correction(
        mode=fields.mode,
        weight=method(weights.WEIGHTS, fields.weight, fields),
        is_batch_normalized=fields.batch_normalize,
        advantage=method(advantages.ADVANTAGES, fields.advantage, fields),
        objective=method(objectives.OBJECTIVES, fields.objective, fields),
        aggregation=fields.aggregation,
        scale=fields.scale,
        kl=method(kl.KL, fields.kl, fields) if fields.kl_coeff else None,
        kl_coeff=fields.kl_coeff,
        entropy_coeff=fields.entropy_coeff,
    )


# Forward passes


def response_logprobs(
    params: Any, learner: Learner, batch: Batch, with_entropy: bool
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [B,T] of the masked tokens at the rows' temperatures; 0 elsewhere."""
    x_btd = transformer.rows_hidden(
        params, learner.config, learner.program,
        batch["tokens"], batch["positions"], batch["segment_ids"],
    )
    # Token t is predicted from position t - 1; masked tokens are gathered to the left.
    is_target = batch["mask"][:, 1:]
    count = min(learner.max_targets, is_target.shape[1])
    source_bn = jnp.argsort(~is_target, axis=1, stable=True)[:, :count]
    logp_bn, entropy_bn = token_logprob(
        lambda head, x: transformer.head_logits(head, learner.program, x),
        transformer.head_params(params),
        jnp.take_along_axis(x_btd, source_bn[..., None], axis=1),
        jnp.take_along_axis(batch["tokens"], source_bn + 1, axis=1),
        batch["temperature"],
        learner.chunk,
        with_entropy,
    )
    rows = jnp.arange(source_bn.shape[0])[:, None]
    scatter = lambda x_bn: jnp.zeros(batch["mask"].shape).at[rows, source_bn + 1].set(x_bn)
    mask = batch["mask"]
    return tuple(ratios.zero_padding(scatter(x), mask) for x in (logp_bn, entropy_bn))


def prefix_values(params: Any, learner: Learner, batch: Batch) -> jax.Array:
    """Critic's value [B,T] of the prefix before each token, float32."""
    x_btd = transformer.rows_hidden(
        params["decoder"], learner.config, learner.program,
        batch["tokens"], batch["positions"], batch["segment_ids"],
    )
    values_bt = jnp.einsum("btd,d->bt", x_btd.astype(jnp.float32), params["value"])
    return jnp.pad(values_bt, ((0, 0), (1, 0)))[:, :-1]


def make_score(learner: Learner, with_entropy: bool = True) -> Callable[[Any, Batch], Batch]:
    """(params, batch [M, rows, ...]) -> {"logp", "entropy"} [M, rows, T], one micro-batch at a
    time."""

    def score(params, batch):
        def rows(micro):
            logp, entropy = response_logprobs(params, learner, micro, with_entropy)
            return {"logp": logp, "entropy": entropy}

        return jax.lax.map(rows, batch)

    return jax.jit(score)


def make_values(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """(critic params, batch [M, rows, ...]) -> values [M, rows, T]."""
    return jax.jit(
        lambda params, batch: jax.lax.map(lambda b: prefix_values(params, learner, b), batch)
    )


# From a scored rollout batch to what the loss needs


def make_prepare(c: Correction) -> Callable[[Batch], tuple[Batch, Metrics]]:
    """Advantages, engine weights and the measured gap of a whole rollout batch [N,T].

    The batch holds mask, logp_behav, logp_learner (recomputed at the weights that sampled), rewards
    [N], group [N], and values with a critic. Both modes measure the gap; in bypass mode the
    sampler's log-probs become logp_old and the weight is 1.
    """
    name, parameters = c.weight
    level = "seq" if name.startswith("seq") else "token"
    upper = parameters["cap"] if "cap" in parameters else parameters.get("upper", 2.0)

    def prepare(batch: Batch) -> tuple[Batch, Metrics]:
        mask, behav, learner = batch["mask"], batch["logp_behav"], batch["logp_learner"]
        log_ratio = ratios.safe_log_ratio(learner, behav, mask)
        w = loss.importance_weights(
            {"logp_old": learner, "logp_behav": behav, "mask": mask}, c.weight
        )
        metrics = diagnostics.offpolicy_metrics(learner, behav, mask)
        metrics |= diagnostics.probability_metrics(learner, behav, mask)
        metrics |= diagnostics.importance_weight_metrics(
            w, log_ratio, mask, level=level, upper=upper, lower=parameters.get("lower")
        )
        snis, ess = diagnostics.snis_reward(batch["rewards"], log_ratio, mask)
        metrics |= {"reward/learner_snis": snis, "reward/learner_snis_ess": ess}
        if c.is_batch_normalized:
            w, factor = weights.batch_normalize(w, mask, level)
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
        advantage, advantage_parameters = c.advantage
        needed = {n: batch[n] for n in advantages.NEEDS.get(advantage, ())}
        out = {
            "logp_old": behav if c.mode == "bypass" else learner,
            "weights": w,
            "adv": advantages.ADVANTAGES[advantage](
                batch["rewards"], mask, batch["group"], **needed, **advantage_parameters
            ),
        }
        if "values" in batch:
            out["returns"] = advantages.gae_returns(
                batch["rewards"], mask, values=batch["values"],
                gamma=advantage_parameters["gamma"], lam=advantage_parameters["lam"],
            )
        return out, metrics

    return jax.jit(prepare)


# Updates

LossFn = Callable[[Any, Batch, jax.Array, jax.Array], tuple[jax.Array, Metrics]]


def _accumulate(loss_fn: LossFn, params: Any, minibatch: Batch):
    """(gradients, metrics) summed over the micro-batches of a minibatch.

    `loss_fn` divides by the minibatch's own token and sequence counts. Metrics named *_loss add up
    by themselves; the others are means over tokens and are weighted by each part's tokens.
    """
    mask = minibatch["mask"]
    num_tokens = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    num_seqs = jnp.maximum(jnp.sum(jnp.any(mask, axis=-1)), 1).astype(jnp.float32)

    def part(params, micro):
        value, metrics = loss_fn(params, micro, num_tokens, num_seqs)
        share = jnp.sum(micro["mask"]) / num_tokens
        scale = lambda name, x: x if name.endswith("_loss") else x * share
        return value, {name: scale(name, x) for name, x in metrics.items()}

    gradient = jax.grad(part, has_aux=True)

    def add(total, micro):
        return jax.tree.map(jnp.add, total, gradient(params, micro)), None

    first = jax.tree.map(lambda x: x[0], minibatch)
    if len(mask) == 1:
        return gradient(params, first)
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient, params, first)
    )
    return jax.lax.scan(add, zeros, minibatch)[0]


def _make_step(loss_fn: LossFn, optimizer: optax.GradientTransformation, prefix: str):
    def train_step(state: TrainState, minibatch: Batch) -> tuple[TrainState, Metrics]:
        grads, metrics = _accumulate(loss_fn, state.params, minibatch)
        metrics[f"{prefix}/grad_norm"] = optax.global_norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics

    return jax.jit(train_step, donate_argnums=(0,))


def make_train_step(learner: Learner, c: Correction, optimizer: optax.GradientTransformation):
    """The policy update. Minibatch: rows of `batch.rows` plus logp_old, weights, adv and, with a KL
    term, logp_ref; [accumulation, rows, T]. The state is donated."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        logp, entropy = response_logprobs(params, learner, batch, c.entropy_coeff != 0)
        return loss.policy_loss(
            logp, batch, weight=c.weight, objective=c.objective, aggregation=c.aggregation,
            kl=c.kl, kl_coeff=c.kl_coeff, entropy=entropy, entropy_coeff=c.entropy_coeff,
            num_tokens=num_tokens, num_seqs=num_seqs, scale=c.scale or None,
        )

    return _make_step(loss_fn, optimizer, "actor")


def make_critic_step(learner: Learner, clip: float, optimizer: optax.GradientTransformation):
    """The critic's update with the clipped value loss; minibatch fields values and returns."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        values = prefix_values(params, learner, batch)
        loss_bt, metrics = objectives.value_loss(
            values, batch["values"], batch["returns"], batch["mask"], clip
        )
        value = reduce.aggregate(loss_bt, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, metrics | {"critic/vf_loss": value}

    return _make_step(loss_fn, optimizer, "critic")


def make_supervised_step(learner: Learner, optimizer: optax.GradientTransformation):
    """Cross-entropy on the masked tokens, mean over tokens."""

    def loss_fn(params, batch, num_tokens, num_seqs):
        logp, _ = response_logprobs(params, learner, batch, with_entropy=False)
        value = -reduce.aggregate(logp, batch["mask"], "token-mean", num_tokens=num_tokens)
        return value, {"supervised/ce_loss": value}

    return _make_step(loss_fn, optimizer, "supervised")
