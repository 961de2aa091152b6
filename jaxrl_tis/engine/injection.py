"""A gap of a chosen size that is put into the sampler, to see what gaps do to a run.

Small models in short runs have smaller gaps of their own than the large ones whose runs collapse. What
is injected is the same at every step and every version of the weights, as the gap of another kernel or
format is; it is drawn once from `seed`, and `scale` 0 changes no bit. The recorded log-probs are those
of the distribution that was drawn from, so that the gap is measured and corrected like any other.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_tis import choices
from jaxrl_tis.models import quant
from jaxrl_tis.models.transformer import Params


@dataclasses.dataclass(frozen=True)
class Injection:
    """What is injected.

    Attributes:
      logits: (logits [M,V] float32, positions [M]) -> logits [M,V].
      weights: (the policy's parameters) -> parameters.
      text: how the config spells it.
    """

    logits: Callable[[jax.Array, jax.Array], jax.Array] = lambda logits_mv, position_m: logits_mv
    weights: Callable[[Params], Params] = lambda params: params
    text: str = ""

    def __str__(self) -> str:
        return self.text


def logits(*, scale, growth=0.0, seed=0) -> Injection:
    """Adds scale (1 + growth t) z_v to the logit of token v at position t of a sequence, z_v a
    standard normal draw for each token of the vocabulary. The other sign of `scale` favours the others."""

    def change(logits_mv, position_m):
        z_v = jax.random.normal(jax.random.key(seed), logits_mv.shape[1:], jnp.float32)
        return logits_mv + _strength(scale, growth, position_m)[:, None] * z_v[None]

    return Injection(logits=change) if scale else Injection()


def sharpness(*, scale, growth=0.0) -> Injection:
    """Multiplies logits at position t by exp(scale (1 + growth t)): the sampler is surer than the
    learner, or with a negative scale less sure."""

    def change(logits_mv, position_m):
        return logits_mv * jnp.exp(_strength(scale, growth, position_m))[:, None]

    return Injection(logits=change) if scale else Injection()


def weights(*, scale, seed=0) -> Injection:
    """Multiplies each weight of the layers' projections by 1 + scale z, z a standard normal draw for
    each of them."""

    def change(params):
        layers = dict(params["layers"])
        for i, name in enumerate(quant.QUANTIZED):
            w = layers[name]
            z = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), w.shape, jnp.float32)
            layers[name] = (w.astype(jnp.float32) * (1 + scale * z)).astype(w.dtype)
        return {**params, "layers": layers}

    return Injection(weights=change) if scale else Injection()


def _strength(scale, growth, position_m):
    return scale * (1.0 + growth * position_m.astype(jnp.float32))


INJECTIONS = {"logits": logits, "sharpness": sharpness, "weights": weights}


@functools.cache
def parse(text: str) -> Injection:
    """Reads `config.engine.injected`, such as "logits(scale=0.5)"; nothing for "". ValueError for a
    name or a parameter that there is not, or a value that is no number."""
    if not text:
        return Injection()
    name, parameters = choices.parse("injection", text, INJECTIONS)
    for parameter, value in parameters.items():
        kinds = (int,) if parameter == "seed" else (int, float)
        if type(value) not in kinds or not abs(value) < float("inf"):
            raise ValueError(f"injection {text!r}: {parameter} is {value!r}, not a number")
    return dataclasses.replace(INJECTIONS[name](**parameters), text=text)
