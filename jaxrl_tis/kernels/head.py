"""The output head: its matrix, vocabulary axis and matrix products."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels import tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """An output head.

    Attributes:
      weight: [V,D] (a tied table, vocab_axis 0) or [D,V] (vocab_axis 1).
      highest: float32 with precision HIGHEST, as for hidden states of float16 in any case, which no
        TPU multiplies; otherwise the dtype of the hidden states.
    """

    weight: jax.Array
    vocab_axis: int = dataclasses.field(metadata=dict(static=True))
    highest: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[self.vocab_axis]

    @property
    def precision(self) -> jax.lax.Precision | None:
        return jax.lax.Precision.HIGHEST if self.highest else None

    def is_exact(self, x: jax.Array) -> bool:
        """Whether x is multiplied in float32, with precision HIGHEST."""
        return self.highest or x.dtype == jnp.float16

    def cast(self, x: jax.Array) -> tuple["Head", jax.Array]:
        """Returns the head and x in the dtype of their product."""
        highest = self.is_exact(x)
        dtype = jnp.float32 if highest else x.dtype
        weight = self.weight.astype(dtype)
        return dataclasses.replace(self, weight=weight, highest=highest), x.astype(dtype)

    def dot(self, a: jax.Array, b: jax.Array, axes: tuple) -> jax.Array:
        """Contracts the given axes of a and b; sums and result are float32."""
        return jax.lax.dot_general(
            a, b, (axes, ((), ())), precision=self.precision, preferred_element_type=jnp.float32
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Multiplies x [..., D] with the head -> [..., V] float32."""
        head, x = self.cast(x)
        return head.dot(x, head.weight, ((x.ndim - 1,), (1 - self.vocab_axis,)))

    def pull(self, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of x and, in float32, of the weight, from that of the logits
        [..., V]."""
        head, cast_x = self.cast(x)
        gradient = gradient.astype(cast_x.dtype)
        x_bar = head.dot(gradient, head.weight, ((x.ndim - 1,), (self.vocab_axis,)))
        tokens = tuple(range(x.ndim - 1))
        weight_bar = head.dot(gradient, cast_x, (tokens, tokens))
        return x_bar.astype(x.dtype), weight_bar if self.vocab_axis == 0 else weight_bar.T


def tiled_logits(x: jax.Array, head: Head) -> jax.Array:
    """Returns the logits [...,V] of x [...,D] in float32 with the fixed summation order of
    tiles.py, for the vocabulary of one device."""
    head, cast_x = head.cast(x)
    x_rd = cast_x.reshape(-1, x.shape[-1])
    y_rv = tiles.product(x_rd, head.weight, 1 - head.vocab_axis, head.precision)
    return y_rv.reshape(*x.shape[:-1], -1)
