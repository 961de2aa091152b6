"""Optimizers (optax): gradient clipping, AdamW, learning-rate schedules, float16 loss scaling."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax

from jaxrl_tis.estimators import controllers, ratios

FIRST_SCALE, MAX_SCALE, SCALE_EVERY = 2.0**16, 2.0**24, 400  # of losses, see `scale_loss`
SCHEDULES = ("constant", "linear", "cosine")


def schedule(config: ml_collections.ConfigDict, total_updates: int) -> optax.Schedule:
    """Returns a schedule that warms up from 0 over `warmup` updates, and is then constant, or falls
    to 0 linearly or as a cosine."""
    after = max(1, total_updates - config.warmup)
    decay = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, 0.0, after),
        "cosine": optax.cosine_decay_schedule(config.lr, after),
    }[config.schedule]
    if config.warmup == 0:
        return decay
    ramp = optax.linear_schedule(0.0, config.lr, config.warmup)
    return optax.join_schedules([ramp, decay], [config.warmup])


def total_updates(config: ml_collections.ConfigDict) -> int:
    """Returns the number of updates in a whole run."""
    return config.steps * config.train.epochs * config.train.minibatches


def rate_at(config: ml_collections.ConfigDict, section: str, count: int) -> chex.Numeric:
    """Returns the learning rate after `count` updates; `section` is the config's optimizer or critic."""
    return schedule(config[section], total_updates(config))(count)


def make_optimizer(
    config: ml_collections.ConfigDict, total_updates: int
) -> optax.GradientTransformation:
    """Makes AdamW with global-norm clipping; matrices are decayed, norms and biases are not.
    Gradients and moments are float32 whatever the parameters are."""
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    scaled = optax.inject_hyperparams(optax.scale_by_learning_rate, hyperparam_dtype=jnp.float32)
    return _in_float32(optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _offloaded(adam) if config.offload else adam,
        optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
        scaled(schedule(config, total_updates)),  # keeps the rate in its state, see `rate`
    ))


def rate(opt_state: Any) -> jax.Array | None:
    """Returns the learning rate of the last update that was not skipped; before the first update, its
    rate; None for an optimizer that `make_optimizer` did not make."""
    return optax.tree.get(
        opt_state, "learning_rate", filtering=lambda _, value: isinstance(value, jax.Array)
    )


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    # In bfloat16 a second moment with decay 0.999 never moves: the change is below half a unit.
    cast = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return optax.GradientTransformation(
        lambda params: tx.init(cast(params)),
        lambda grads, state, params: tx.update(cast(grads), state, cast(params)),
    )


def _offloaded(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keeps Adam's moments in host memory between updates."""

    def put(state, space):
        mu, nu = jax.device_put((state.mu, state.nu), space)
        return state._replace(mu=mu, nu=nu)

    def update(grads, state, params):
        updates, state = adam.update(grads, put(state, jax.memory.Space.Device), params)
        return updates, put(state, jax.memory.Space.Host)

    init = lambda params: put(adam.init(params), jax.memory.Space.Host)
    return optax.GradientTransformation(init, update)


def num_updates(opt_state: Any) -> int:
    """Returns the number of updates of an optimizer of `make_optimizer`, without skipped ones."""
    is_its = lambda path, _: getattr(path[-1], "tuple_name", "") == "InjectStatefulHyperparamsState"
    return int(optax.tree.get(opt_state, "count", filtering=is_its))


class Aligned(NamedTuple):
    """The state of an optimizer of `align`: the previous gradient, and the cosine with it."""

    alignment: controllers.GradientAlignment
    inner: Any
    cosine: chex.Array
    is_skipped: chex.Array


def align(
    tx: optax.GradientTransformation, gac_low: float, gac_high: float
) -> optax.GradientTransformation:
    """Wraps tx with `controllers.gradient_alignment`. A skipped step does not change the parameters
    and moments of tx."""

    def init(params):
        # Gradients are float32 whatever the parameters are.
        alignment = controllers.gradient_alignment_init(jax.tree.map(ratios.as_float, params))
        return Aligned(alignment, tx.init(params), jnp.zeros(()), jnp.zeros(()))

    def update(grads, state, params):
        alignment, grads, metrics = controllers.gradient_alignment(
            state.alignment, grads, gac_low=gac_low, gac_high=gac_high
        )
        updates, inner = tx.update(grads, state.inner, params)
        is_skipped = metrics["gac/is_skipped"]
        updates, inner = _unless(is_skipped > 0, updates, state.inner, inner)
        return updates, Aligned(alignment, inner, metrics["gac/cosine"], is_skipped)

    return optax.GradientTransformation(init, update)


def _unless(is_skipped: jax.Array, updates: Any, old: Any, new: Any) -> tuple[Any, Any]:
    """Returns (updates, new state) of a step, or (zeros, old state) of a skipped step."""
    choose = lambda old, new: jnp.where(is_skipped, old, new)
    return jax.tree.map(lambda u: choose(jnp.zeros_like(u), u), updates), jax.tree.map(choose, old, new)


PERTURBATION = "perturbation"  # where the log of the sigmas is beside the parameters, see `hidden`


class Perturbed(NamedTuple):
    """The state of an optimizer of `perturb`: updates so far, the log of each layer's sigma [L], and
    its moments."""

    count: chex.Array
    log_std: chex.Array
    moments: Any
    inner: Any


def perturb(
    tx: optax.GradientTransformation, num_layers: int, **parameters: float
) -> optax.GradientTransformation:
    """Wraps tx with the sigmas of `controllers.layerwise_perturbation`, which have an Adam of their
    own. The gradient has theirs under PERTURBATION."""
    adam = optax.adam(parameters["perturb_lr"])

    def init(params):
        log_std = controllers.layerwise_perturbation(num_layers, **parameters).log_std
        return Perturbed(jnp.zeros((), jnp.int32), log_std, adam.init(log_std), tx.init(params))

    def update(grads, state, params):
        own, others = grads[PERTURBATION], without_perturbation(grads)
        step, moments = adam.update(own.astype(jnp.float32), state.moments)
        updates, inner = tx.update(others, state.inner, params)
        return updates, Perturbed(state.count + 1, state.log_std + step, moments, inner)

    return optax.GradientTransformation(init, update)


def without_perturbation(tree: Any) -> Any:
    is_perturbed = isinstance(tree, dict) and PERTURBATION in tree
    return {n: x for n, x in tree.items() if n != PERTURBATION} if is_perturbed else tree


def perturbed(params: Any, opt_state: Any, minibatch: Mapping[str, jax.Array]) -> tuple[Any, dict]:
    """Returns (parameters, further fields of the minibatch) for the loss. If the optimizer has sigmas,
    the parameters include their logs and the fields the seeds of the noise."""
    opt_state = opt_state.inner if isinstance(opt_state, Scaled) else opt_state
    if not isinstance(opt_state, Perturbed):
        return params, {}
    seeds = noise_seeds(minibatch["draw"], opt_state.count)
    return {**params, PERTURBATION: opt_state.log_std}, {"noise_seed": seeds}


def noise_seeds(draw_mb: jax.Array, count: jax.Array) -> jax.Array:
    """Returns seeds [M,B] of the noise of a minibatch's rows after `count` updates, one per row and
    update."""
    place_mb = jnp.arange(draw_mb.size, dtype=jnp.uint32).reshape(draw_mb.shape)
    # Odd factors, of which multiples lie far apart.
    update = count.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    return draw_mb[0, 0] + update + place_mb * jnp.uint32(0x9E3779B1)


class Scaled(NamedTuple):
    """The state of an optimizer of `scale_loss`: the scale of the next loss, updates since its last
    change, and whether the last gradient was not finite, so that the update was skipped."""

    loss_scale: chex.Array
    since: chex.Array
    inner: Any
    is_skipped: chex.Array


def scale_loss(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps tx with a dynamic loss scale for gradients that pass through float16 (smallest number
    6e-8, largest 65,504). It takes gradients that were divided by the scale.

    A gradient that is not finite changes nothing but the scale, which it halves, to 1 at least; the
    scale doubles after SCALE_EVERY finite ones in a row, to MAX_SCALE at most. Start, factor and
    interval are those of verl's scaler for float16 (arXiv:2510.26788).
    """

    def init(params):
        zero = jnp.zeros((), jnp.int32)
        return Scaled(jnp.float32(FIRST_SCALE), zero, tx.init(params), jnp.zeros(()))

    def update(grads, state, params):
        is_finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, inner = tx.update(grads, state.inner, params)
        updates, inner = _unless(~is_finite, updates, state.inner, inner)
        is_due = state.since + 1 >= SCALE_EVERY
        grown = jnp.minimum(jnp.where(is_due, 2.0, 1.0) * state.loss_scale, MAX_SCALE)
        scale = jnp.where(is_finite, grown, jnp.maximum(state.loss_scale / 2, 1.0))
        since = jnp.where(is_finite & ~is_due, state.since + 1, 0)
        return updates, Scaled(scale, since, inner, 1.0 - is_finite)

    return optax.GradientTransformation(init, update)


def scaled_for(dtype: str, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer for a learner that computes in this dtype. In float16 `scale_loss` is the
    outermost wrapper, so non-finite gradients reach no other state."""
    return scale_loss(tx) if dtype == "float16" else tx


def loss_scale(opt_state: Any) -> Any:
    """Returns the scale of the next loss; None without loss scaling."""
    return opt_state.loss_scale if isinstance(opt_state, Scaled) else None


def update_metrics(opt_state: Any, prefix: str) -> dict[str, jax.Array]:
    """Returns the metrics of an optimizer's last update: PREFIX/lr, gac/{cosine,is_skipped} from
    `align`, alp/std_{mean,max} from `perturb`, PREFIX/{loss_scale,is_skipped} from `scale_loss`."""
    lr = rate(opt_state)
    metrics = {} if lr is None else {f"{prefix}/lr": lr}
    if isinstance(opt_state, Scaled):
        metrics[f"{prefix}/loss_scale"] = opt_state.loss_scale
        metrics[f"{prefix}/is_skipped"] = opt_state.is_skipped
        opt_state = opt_state.inner
    if isinstance(opt_state, Perturbed):
        std = jnp.exp(opt_state.log_std)
        metrics |= {"alp/std_mean": jnp.mean(std), "alp/std_max": jnp.max(std)}
        opt_state = opt_state.inner
    if isinstance(opt_state, Aligned):
        metrics |= {"gac/cosine": opt_state.cosine, "gac/is_skipped": opt_state.is_skipped}
    return metrics


def _is_matrix(params):
    names = ("norm", "bias", "sinks")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path[-1].key.endswith(names), params
    )


def optimizer_shardings(optimizer: optax.GradientTransformation, params, shardings, replicated):
    """Returns the shardings of the optimizer state. Moments have the sharding of their parameters;
    all other arrays are replicated."""
    return optax.tree.map_params(
        optimizer, lambda _, s: s, jax.eval_shape(optimizer.init, params), shardings,
        transform_non_params=lambda _: replicated,
    )
