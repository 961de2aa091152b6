"""Reductions over a vocabulary that is split over a mesh axis, for code inside the mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.kernels import tiles
from jaxrl_tis.sharding import Layout


@dataclasses.dataclass(frozen=True)
class Shards:
    """The split of the vocabulary: `count` equal parts in order over a mesh axis, or one part.

    Inside the mesh, `sum`, `max` and `min` reduce the devices' values of the same rows. `totals`
    sums over the vocabulary, with `is_invariant` in the order of invariant numerics.
    """

    axis: Any = None
    count: int = 1
    is_invariant: bool = False

    @classmethod
    def of(cls, layout: Layout | None) -> "Shards":
        if layout is None or layout.mesh.size == 1 or layout.rules["vocab"] is None:
            return WHOLE
        axis = layout.rules["vocab"]
        return cls(axis, layout.mesh.shape[axis])

    @property
    def index(self) -> jax.Array | int:
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def totals(self, *numbers_bv: jax.Array) -> jax.Array:
        """Returns the sums of n arrays over the vocabulary, [n,B]."""
        if self.is_invariant:
            sums = [tiles.vocabulary_sum(x, self.axis, self.count) for x in numbers_bv]
            return jnp.stack(sums)
        return self.sum(jnp.stack([jnp.sum(x, axis=-1) for x in numbers_bv]))

    def max(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def min(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.pmin(x, self.axis)

    def gather(self, x: jax.Array) -> jax.Array:
        """Stacks the parts' x on a new first axis."""
        return x[None] if self.axis is None else jax.lax.all_gather(x, self.axis)

    def at(self, x_bv: jax.Array, ids_b: jax.Array) -> jax.Array:
        """Returns the entry of each row at a token id, [B]."""
        if self.axis is None:
            return chosen(x_bv, ids_b)
        local_b1 = self.local(ids_b, x_bv.shape[1])[:, None]
        here_b1 = jnp.take_along_axis(x_bv, local_b1, axis=1, mode="fill", fill_value=0)
        return self.sum(here_b1[:, 0])

    def ids(self, width: int) -> jax.Array:
        """Returns the token ids of a part of this width, [1,width]."""
        return self.index * width + jnp.arange(width)[None]

    def local(self, ids: jax.Array, width: int) -> jax.Array:
        """Returns token ids relative to the first id of this part; ids of other parts become `width`."""
        local = ids - self.index * width
        return jnp.where((local >= 0) & (local < width), local, width)


WHOLE = Shards()


def chosen(x: jax.Array, index_b: jax.Array) -> jax.Array:
    """Returns x[b, index_b[b]] for indices that are there. Nothing else is computed, as
    `jnp.take_along_axis` does."""
    row_b = jnp.arange(len(index_b))
    return x.at[row_b, index_b].get(mode="promise_in_bounds", wrap_negative_indices=False)
