"""Artificial gaps between sampler and learner of a chosen size, to study the effect of gaps on a run.

Small models in short runs have smaller gaps than the large models whose runs collapse. An injected gap
is the same at every step and every version of the weights, as the gap of another kernel or format is.
It is sampled once from `seed`, and `scale` 0 changes no bit. The recorded log-probs include it, so the
gap is measured and corrected like any other.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_tis import choices
from jaxrl_tis.models import quant
from jaxrl_tis.models.config import STACKS, by_stack
from jaxrl_tis.models.transformer import Params


@dataclasses.dataclass(frozen=True)
class Injection:
    """An artificial change of the sampler's logits or weights.

    Attributes:
      logits: (logits [M,V] float32, positions [M]) -> logits [M,V].
      weights: (the policy's parameters) -> parameters.
      text: the value of config.engine.injected.
    """

    logits: Callable[[jax.Array, jax.Array], jax.Array] = lambda logits_mv, position_m: logits_mv
    weights: Callable[[Params], Params] = lambda params: params
    text: str = ""

    def __str__(self) -> str:
        return self.text


def logits(*, scale, growth=0.0, seed=0) -> Injection:
    """Adds scale (1 + growth t) z_v to the logit of token v at position t of a sequence, z_v a
    standard normal sample for each token of the vocabulary. The sign of `scale` flips the favoured
    tokens."""

    def change(logits_mv, position_m):
        z_v = jax.random.normal(jax.random.key(seed), logits_mv.shape[1:], jnp.float32)
        return logits_mv + _strength(scale, growth, position_m)[:, None] * z_v[None]

    return Injection(logits=change) if scale else Injection()


def sharpness(*, scale, growth=0.0) -> Injection:
    """Multiplies logits at position t by exp(scale (1 + growth t)): the sampler is surer than the
    learner, or less sure with a negative scale."""

    def change(logits_mv, position_m):
        return logits_mv * jnp.exp(_strength(scale, growth, position_m))[:, None]

    return Injection(logits=change) if scale else Injection()


def weights(*, scale, seed=0) -> Injection:
    """Multiplies each weight of the layers' projections by 1 + scale z, z a standard normal sample
    per weight."""

    def changed(layers, stack):
        for i, name in enumerate(quant.QUANTIZED, STACKS.index(stack) * len(quant.QUANTIZED)):
            if name in layers:
                w, z = layers[name], _normal(layers[name], seed, i)
                layers = layers | {name: (w.astype(jnp.float32) * (1 + scale * z)).astype(w.dtype)}
        return layers

    return Injection(weights=lambda params: by_stack(changed, params)) if scale else Injection()


def router(*, scale, seed=0) -> Injection:
    """Adds scale z / sqrt(D) to each of the D x E weights of a router, z a standard normal sample
    per weight. A token's normed input has D numbers of mean square 1, so the noise of each router
    logit has a standard deviation of about `scale`. A dense model has no router to change."""

    def changed(layers, _):
        if "router" not in layers:
            return layers
        w = layers["router"]
        z = _normal(w, seed, 0) * w.shape[-2] ** -0.5
        return layers | {"router": (w.astype(jnp.float32) + scale * z).astype(w.dtype)}

    return Injection(weights=lambda params: by_stack(changed, params)) if scale else Injection()


def _normal(like: jax.Array, seed: int, index: int) -> jax.Array:
    return jax.random.normal(
        jax.random.fold_in(jax.random.key(seed), index), like.shape, jnp.float32
    )


def _strength(scale, growth, position_m):
    return scale * (1.0 + growth * position_m.astype(jnp.float32))


INJECTIONS: dict[str, Callable[..., Injection]] = {
    "logits": logits, "sharpness": sharpness, "weights": weights, "router": router,
}


@functools.cache
def parse(text: str) -> Injection:
    """Parses `config.engine.injected`, such as "logits(scale=0.5)"; "" injects nothing. ValueError
    for an unknown name or parameter, or a value that is not a number."""
    if not text:
        return Injection()
    name, parameters = choices.parse("injection", text, INJECTIONS)
    for parameter, value in parameters.items():
        kinds = (int,) if parameter == "seed" else (int, float)
        if type(value) not in kinds or not abs(value) < float("inf"):
            raise ValueError(f"injection {text!r}: {parameter} is {value!r}, not a number")
    return dataclasses.replace(INJECTIONS[name](**parameters), text=text)
