"""Optimizers by optax: gradient clipping, AdamW, and a learning-rate schedule."""

import jax
import jax.numpy as jnp
import ml_collections
import optax

SCHEDULES = ("constant", "linear", "cosine")


def schedule(config: ml_collections.ConfigDict, total_updates: int) -> optax.Schedule:
    """Warm-up from 0 over `warmup` updates, then constant, linear to 0 or cosine to 0."""
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


def make(config: ml_collections.ConfigDict, total_updates: int) -> optax.GradientTransformation:
    """AdamW with global-norm clipping; matrices are decayed, norms and biases are not. Gradients
    and moments are float32 whatever the parameters are."""
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


def _is_matrix(params):
    names = ("norm", "bias")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path[-1].key.endswith(names), params
    )


def state_shardings(optimizer: optax.GradientTransformation, params, shardings, replicated):
    """Shardings of the optimizer state: moments lie like the (abstract) parameters they belong to,
    everything else on all devices."""
    return optax.tree.map_params(
        optimizer, lambda _, s: s, jax.eval_shape(optimizer.init, params), shardings,
        transform_non_params=lambda _: replicated,
    )
