"""Optimizers by optax: gradient clipping, AdamW, and a learning-rate schedule."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax

from jaxrl_tis.estimators import controllers

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


def make_optimizer(
    config: ml_collections.ConfigDict, total_updates: int
) -> optax.GradientTransformation:
    """Makes AdamW with global-norm clipping; matrices are decayed, norms and biases are not.
    Gradients and moments are float32 whatever the parameters are."""
    return _in_float32(optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config, total_updates), b1=config.b1, b2=config.b2, eps=config.eps,
            weight_decay=config.weight_decay, mask=_is_matrix,
        ),
    ))


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    # In bfloat16 a second moment with decay 0.999 never moves: the change is below half a unit.
    cast = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return optax.GradientTransformation(
        lambda params: tx.init(cast(params)),
        lambda grads, state, params: tx.update(cast(grads), state, cast(params)),
    )


class Aligned(NamedTuple):
    """The state of an optimizer of `align`: the previous gradient, and the cosine with it."""

    alignment: controllers.GradientAlignment
    inner: Any
    cosine: chex.Array
    is_skipped: chex.Array


def align(
    tx: optax.GradientTransformation, gac_low: float, gac_high: float
) -> optax.GradientTransformation:
    """Puts tx behind `controllers.gradient_alignment`; a skipped step leaves parameters and moments
    as they were."""

    def init(params):
        alignment = controllers.gradient_alignment_init(params)
        return Aligned(alignment, tx.init(params), jnp.zeros(()), jnp.zeros(()))

    def update(grads, state, params):
        alignment, grads, metrics = controllers.gradient_alignment(
            state.alignment, grads, gac_low=gac_low, gac_high=gac_high
        )
        updates, inner = tx.update(grads, state.inner, params)
        is_skipped = metrics["gac/is_skipped"]
        choose = lambda old, new: jnp.where(is_skipped > 0, old, new)
        updates = jax.tree.map(lambda u: choose(jnp.zeros_like(u), u), updates)
        inner = jax.tree.map(choose, state.inner, inner)
        return updates, Aligned(alignment, inner, metrics["gac/cosine"], is_skipped)

    return optax.GradientTransformation(init, update)


def alignment_metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Returns gac/{cosine,is_skipped} of the last update of an optimizer of `align`, and {} for
    another."""
    if not isinstance(opt_state, Aligned):
        return {}
    return {"gac/cosine": opt_state.cosine, "gac/is_skipped": opt_state.is_skipped}


def _is_matrix(params):
    names = ("norm", "bias")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path[-1].key.endswith(names), params
    )


def optimizer_shardings(optimizer: optax.GradientTransformation, params, shardings, replicated):
    """Returns the shardings of the optimizer state: moments lie like the (abstract) parameters they
    belong to, everything else on all devices."""
    return optax.tree.map_params(
        optimizer, lambda _, s: s, jax.eval_shape(optimizer.init, params), shardings,
        transform_non_params=lambda _: replicated,
    )
