"""Computes log-probs of given tokens, entropy and collision probability without storing logits.

Output head, softmax and gather are one operation, and [tokens, vocabulary] is never stored. On TPU
a Pallas kernel processes tiles of tokens and vocabulary (`logprob_pallas`). On other platforms XLA
processes chunks of positions (`logprob_chunked`). Both return a few numbers per token for the
vocabulary of one device (`Moments`). For a sharded vocabulary these numbers are combined over its
mesh axes, and the backward pass sums the gradient of x. Logits never leave a device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_tis.kernels import logprob_chunked, logprob_invariant, logprob_pallas, tiles
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob_chunked import (
    ELSEWHERE, Fields, Kept, Moments, chunks, split_kept,
)
from jaxrl_tis.sharding import Layout

BODIES = {
    "chunked": logprob_chunked, "pallas": logprob_pallas, "invariant": logprob_invariant,
}


class Scores(NamedTuple):
    """Log-probs and moments of each token's distribution, [B,N] float32.

    Attributes:
      logp: log-prob of the token, in nats.
      entropy: entropy of the distribution, in nats; zeros if not requested.
      collision: sum of the squared probabilities, the chance that two samples agree; no gradient;
        zeros if not requested.
      others: [B,N,K] log-probs of K other ids, in nats; 0 for a negative id.
    """

    logp: jax.Array
    entropy: jax.Array
    collision: jax.Array
    others: jax.Array


@dataclasses.dataclass(frozen=True)
class Cut:
    """The mesh axes that shard rows, positions, vocabulary and width; none without a layout.

    Sizes that the mesh does not divide are padded inside the program. If n devices share the width
    of a head, it is multiplied in n parts of its vocabulary, each in full width. Either each device
    multiplies one part, and the tokens are sent in n pieces (`is_spread`). Or the parts are sent
    one after the other, and each device multiplies all of them.

    Attributes:
      parts: number of vocabulary parts that a device multiplies one after the other.
      index: the current part.
    """

    layout: Layout | None = None
    rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()
    is_spread: bool = False
    parts: int = 1
    index: jax.Array | int = 0

    @classmethod
    def of(cls, layout: Layout | None) -> "Cut":
        """Returns the cut of a layout that gathers the whole width at once."""
        if layout is None or layout.mesh.size == 1:
            return cls()
        # A vocabulary that `sharding.layout` stores whole is shared out here all the same.
        vocab = layout.axes("vocab") or layout.axes("mlp")
        cut = cls(layout, layout.axes("batch"), layout.axes("length"), vocab, layout.axes("embed"))
        if not set(cut.width) <= set(cut.tokens):
            raise ValueError(f"the width is cut over {cut.width}, tokens only over {cut.tokens}")
        return cut

    def in_parts(self, head: Head, x_bnd: jax.Array) -> "Cut":
        """Returns the cut that sends either tokens or head parts, whichever gives a device fewer
        bytes: two passes in the compute dtype and one for the gradient sum."""
        if self.layout is None or self.count(self.width) == 1:
            return self
        dtype = jax.eval_shape(lambda head, x: head.cast(x)[0].weight, head, x_bnd).dtype
        traffic = lambda dtype: 2 * dtype.itemsize + jnp.dtype(self.layout.grad_reduce_dtype).itemsize
        sharing = tuple(a for a in self.tokens if a not in self.width)
        token_bytes = x_bnd.size // self.count(sharing) * traffic(x_bnd.dtype)
        head_bytes = head.weight.size // self.count(self.vocab) * traffic(dtype)
        if token_bytes < head_bytes:
            return dataclasses.replace(self, is_spread=True)
        return dataclasses.replace(self, parts=self.count(self.width))

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.rows + self.positions

    @property
    def columns(self) -> tuple[str, ...]:
        """The mesh axes along which devices multiply different columns of the head."""
        return self.vocab + self.width if self.is_spread else self.vocab

    @property
    def num_parts(self) -> int:
        """The number of parts of the whole vocabulary."""
        return self.count(self.columns) * self.parts

    def count(self, axes: tuple[str, ...]) -> int:
        return self.layout.count(axes) if self.layout is not None and axes else 1

    def fill(self, x: jax.Array, value: float = 0) -> jax.Array:
        """Pads [B,N,...] to multiples of the mesh's shards of rows and positions."""
        missing = -x.shape[0] % self.count(self.rows), -x.shape[1] % self.count(self.positions)
        width = tuple((0, n) for n in missing) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, width, constant_values=value)

    def fill_head(self, head: Head, numerics: str = "fast") -> Head:
        """Pads the head with zero columns to parts of equal size; the padding is no token."""
        count = self.num_parts
        unit = tiles.VOCAB_UNIT if count > 1 and numerics == "invariant" else count
        return dataclasses.replace(head, weight=tiles.fill(head.weight, head.vocab_axis, unit))

    def head_spec(self, head: Head) -> PartitionSpec:
        cuts = (self.vocab, self.width)
        return PartitionSpec(*(cuts if head.vocab_axis == 0 else cuts[::-1]))

    def run(self, body, in_specs: tuple, out_specs: Any, *inputs) -> Any:
        """Runs `body` on every device of the mesh, or directly without a mesh."""
        if self.layout is None:
            return body(*inputs)
        return self.layout.shard(body, in_specs, out_specs)(*inputs)

    # Inside `run`

    @property
    def shared_axis(self) -> int:
        """The axis of [B,N,...] that the devices of the width share."""
        return int(self.width[0] in self.positions)

    def gather_tokens(self, tree: Any) -> Any:
        """Returns [B,N,...] gathered from all devices of the width."""
        layout: Any = self.layout
        return jax.tree.map(lambda x: layout.gather(x, self.shared_axis), tree)

    def own_tokens(self, tree: Any) -> Any:
        """Returns this device's part of an array from `gather_tokens`."""

        def own(x):
            size = x.shape[self.shared_axis] // self.count(self.width)
            first = jax.lax.axis_index(self.width) * size
            return jax.lax.dynamic_slice_in_dim(x, first, size, self.shared_axis)

        return jax.tree.map(own, tree)

    def pieces(self, shape: tuple[int, int]) -> tuple[Callable, Callable]:
        """Returns (split, join) of `chunks` for the pieces of a device's tokens that are sent at a
        time."""
        b, n = shape
        return chunks(shape, b * -(-n // self.count(self.width)))

    def whole_width(self, head: Head, x: jax.Array) -> Head:
        """Returns this device's current columns of the head in full width, in the compute dtype."""
        weight = head.cast(x)[0].weight
        layout: Any = self.layout
        vocab, width = head.vocab_axis, 1 - head.vocab_axis
        if self.is_spread:
            weight = jax.lax.all_to_all(weight, self.width, vocab, width, tiled=True)
        elif self.width:
            if self.parts > 1:
                size = head.vocab_size // self.parts
                weight = jax.lax.dynamic_slice_in_dim(weight, self.index * size, size, vocab)
            weight = layout.gather(weight, width)
        return dataclasses.replace(head, weight=weight)

    def sum_over_vocabulary(self, x_bar: jax.Array) -> jax.Array:
        """Returns the gradient of x for a device's own tokens, summed over all devices' columns."""
        if self.layout is not None and self.is_spread:
            x_bar = self.layout.scatter(x_bar, self.shared_axis)
        return jax.lax.psum(x_bar, self.vocab) if self.vocab else x_bar

    def sum_over_tokens(self, weight_bar: jax.Array, head: Head) -> jax.Array:
        """Returns the head's gradient for a device's own width, summed over all devices' tokens."""
        if self.layout is None:
            return weight_bar
        vocab, width = head.vocab_axis, 1 - head.vocab_axis
        if not self.is_spread:
            return self.layout.sum_rows(self.layout.scatter(weight_bar, width))
        weight_bar = self.layout.sum_rows(weight_bar)
        return jax.lax.all_to_all(weight_bar, self.width, width, vocab, tiled=True)

    def over_parts(self, f: Callable[["Cut"], Any]) -> Any:
        """Returns the stacked results of f(cut) for each part."""
        at = lambda i: f(dataclasses.replace(self, index=i))
        return jax.lax.map(at, jnp.arange(self.parts))

    def first_column(self, columns: int) -> jax.Array | int:
        """Returns the token id of this part's first column."""
        device = jax.lax.axis_index(self.columns) if self.columns else 0
        return (device * self.parts + self.index) * columns

    def local_size(self, vocab_size: int, columns: int) -> jax.Array | int:
        """Returns the number of this part's columns that are tokens."""
        if columns * self.num_parts == vocab_size:
            return columns
        return jnp.clip(vocab_size - self.first_column(columns), 0, columns)

    def local_ids(self, ids: jax.Array, columns: int) -> jax.Array:
        """Returns token ids relative to this part's first column, ELSEWHERE for ids of other
        parts."""
        if self.num_parts == 1:
            return ids
        local = ids - self.first_column(columns)
        return jnp.where((local >= 0) & (local < columns), local, ELSEWHERE)

    def local_kept(self, kept: Kept | None, columns: int) -> Kept | None:
        if kept is None:
            return None
        return kept._replace(ids_bnk=self.local_ids(kept.ids_bnk, columns))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static settings of `scores`: its body, the vocabulary size, and arguments of
    `token_logprob`."""

    body: str
    cut: Cut
    vocab_size: int
    chunk: int
    with_entropy: bool
    with_collision: bool
    pulls_entropy: bool


def token_logprob(
    head: Head, x_bnd: jax.Array, targets_bn: jax.Array, temperature_bn: jax.Array, chunk: int, *,
    with_entropy: bool = False, with_collision: bool = False, pulls_entropy: bool = True,
    kept: Kept | None = None, ids_bnk: jax.Array | None = None, layout: Layout | None = None,
    numerics: str = "fast",
) -> Scores:
    """Returns log-softmax(head(x) / temperature) at the targets, in nats, and moments.

    Gradients flow to x and the head's weight through `logp`, `entropy` and `others`, in reverse
    mode only. The backward pass computes the logits again and saves one normalizer and one entropy
    per token (a single chunk outside TPU keeps its logits). Temporaries are numbers per token, one
    block of logits ([chunk, V]; a tile in VMEM on TPU), a copy of a head with another dtype or a
    sharded width, and its float32 gradient (outside TPU also the share of a chunk). A token without
    cotangent adds exactly nothing to any gradient, even if its hidden state is NaN.

    Args:
      head: the output head; the compute dtype is x's, or float32 if `head.highest`.
      x_bnd: [B,N,D] hidden states.
      targets_bn: [B,N] int32 tokens that they predict.
      temperature_bn: [B,N] positive; gets no gradient.
      chunk: positions per chunk outside TPU, summed over the rows of a device.
      pulls_entropy: whether a gradient flows through `entropy`.
      kept: token sets that restrict the distributions; computed in chunks on every platform.
      ids_bnk: [B,N,K] int32 other tokens to score, members of the kept set if there is one;
        negative ids are ignored.
      layout: `sharding.Layout` of a mesh; rows and positions are cut over its axes for "batch" and
        "length", the head over those for "vocab" (whatever the vocabulary's size) and "embed". None
        is one device.
      numerics: "invariant" gives the sampler's bits on every platform, see tiles.py.
    """
    b, n = targets_bn.shape
    cut = Cut.of(layout)
    cut = cut if numerics == "invariant" else cut.in_parts(head, x_bnd)
    if ids_bnk is None:
        ids_bnk = jnp.zeros((b, n, 0), jnp.int32)
    ids_bnk = cut.fill(jnp.where(ids_bnk < 0, ELSEWHERE, ids_bnk))
    rows = cut.fill(x_bnd), cut.fill(targets_bn), cut.fill(temperature_bn, 1), ids_bnk
    inputs = cut.fill_head(head, numerics), *rows
    pulls_entropy = with_entropy and pulls_entropy
    run = lambda body: functools.partial(
        scores,
        Plan(body, cut, head.vocab_size, chunk, with_entropy, with_collision, pulls_entropy),
    )
    if kept is not None:
        kept = Kept(cut.fill(kept.ids_bnk), cut.fill(kept.overflow_bn))
    if numerics == "invariant":
        results = run("invariant")(*inputs, kept)
    elif kept is None:
        results = jax.lax.platform_dependent(
            *inputs, None, tpu=run("pallas"), default=run("chunked")
        )
    else:
        results = run("chunked")(*inputs, kept)
    return Scores(*(s[:b, :n] for s in results))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scores(
    plan: Plan, head: Head, x_bnd: jax.Array, targets_bn: jax.Array, temperature_bn: jax.Array,
    ids_bnk: jax.Array, kept: Kept | None,
) -> Scores:
    """Returns `token_logprob` by a plan, for sizes that the mesh divides; ELSEWHERE marks an
    ignored id."""
    return _forward(plan, head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept)[0]


def _forward(plan, head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept):
    cut = plan.cut

    def inputs(cut, head, x, targets, temperature, ids, kept):
        columns = head.vocab_size
        return (
            head, x, cut.local_ids(targets, columns), temperature, cut.local_ids(ids, columns),
            cut.local_kept(kept, columns), cut.local_size(plan.vocab_size, columns),
            plan.chunk, plan.with_entropy, plan.with_collision,
        )

    def moments(cut, head, *tokens):
        return BODIES[plan.body].moments(*inputs(cut, head, *tokens))

    def finish(found, axes, ids):
        return _finish(_combine(found, axes), plan, ids)

    def body(head, x, targets, temperature, ids, kept):
        tokens = x, targets, temperature, ids, kept
        if cut.parts > 1:
            found = cut.over_parts(lambda cut: moments(cut, cut.whole_width(head, x), *tokens)[0])
            return *finish(found, cut.vocab, ids), None
        head = cut.whole_width(head, x)
        if plan.body == "invariant":
            over: tuple = cut.vocab, cut.count(cut.vocab)
            found, normaliser = logprob_invariant.finished(
                *inputs(cut, head, *tokens), *over
            )
            *single, others = found
            scores = Scores._make([*single, jnp.where(ids == ELSEWHERE, 0.0, others)])
            return scores, normaliser, None
        if not cut.is_spread:
            found, logits = moments(cut, head, *tokens)
            return *finish(found, cut.vocab, ids), logits

        def piece(tokens):
            *_, ids, _ = tokens = cut.gather_tokens(tokens)
            found, _ = moments(cut, head, *tokens)
            return cut.own_tokens(finish(found, cut.columns, ids))

        split, join = cut.pieces(targets.shape)
        pieces = (
            split(x), split(targets), split(temperature, 1), split(ids), split_kept(split, kept)
        )
        return *jax.tree.map(join, jax.lax.map(piece, pieces)), None

    token_spec = PartitionSpec(cut.rows, cut.positions)
    found, normaliser, logits = cut.run(
        body,
        (cut.head_spec(head), *(token_spec,) * 5),
        (token_spec, token_spec, PartitionSpec(None, cut.rows, cut.positions, cut.vocab)),
        head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept,
    )
    given = head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept
    return found, (*given, normaliser, found.entropy, logits)


def _combine(m: Moments, axes: tuple[str, ...]) -> Moments:
    """Returns the moments [B,N] over the whole vocabulary from those of its parts [P,B,N] and of
    the devices along the axes."""
    is_stacked = m.top.ndim == 3
    if not axes and not is_stacked:
        return m
    top = jnp.max(m.top, axis=0) if is_stacked else m.top
    top = jax.lax.pmax(top, axes) if axes else top
    down = m.top - (top[None] if is_stacked else top)
    scale = jnp.exp(down)
    dot = scale * (m.dot + down * m.total)
    parts: tuple = scale * m.total, dot, scale**2 * m.squares, m.target, m.others
    parts = tuple(jnp.sum(x, axis=0) for x in parts) if is_stacked else parts
    return Moments(top, *(jax.lax.psum(parts, axes) if axes else parts))


def _finish(m: Moments, plan: Plan, ids: jax.Array) -> tuple[Scores, jax.Array]:
    """Returns (scores, normalizer); `ids` are the ids of the other tokens."""
    normaliser = m.top + jnp.log(m.total)
    zeros = jnp.zeros_like(normaliser)
    entropy = jnp.log(m.total) - m.dot / m.total if plan.with_entropy else zeros
    collision = m.squares / m.total**2 if plan.with_collision else zeros
    others = jnp.where(ids == ELSEWHERE, 0.0, m.others - normaliser[..., None])
    return Scores(m.target - normaliser, entropy, collision, others), normaliser


def _backward(plan, saved, cotangents: Scores):
    head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept, normaliser_bn, entropy_bn, logits = saved
    cut = plan.cut
    # The kernels multiply the logits twice. Of a part of the vocabulary a chunk of them is small, and
    # written once; in float32 reading it takes less than a product. Where parts travel, libtpu makes
    # an all-reduce of the scattered gradient of a chunk, and not of a kernel's.
    is_in_chunks = cut.is_spread and head.is_exact(x_bnd)
    body_of_gradients = "chunked" if is_in_chunks else plan.body

    def gradients(cut, local, x, fields, kept, logits=None):
        columns = local.vocab_size
        return BODIES[body_of_gradients].gradients(
            local, x, fields.local(lambda ids: cut.local_ids(ids, columns)),
            cut.local_kept(kept, columns), cut.local_size(plan.vocab_size, columns),
            logits, plan.chunk, plan.pulls_entropy,
        )

    def body(head, x, fields, kept, logits):
        if cut.parts > 1:
            return over_parts(head, x, fields, kept)
        local = cut.whole_width(head, x)
        if cut.is_spread:
            x_bar, weight_bar = over_pieces(local, x, fields, kept)
        else:
            x_bar, weight_bar = gradients(cut, local, x, fields, kept, logits)
            x_bar = cut.sum_over_vocabulary(x_bar)
        return x_bar, cut.sum_over_tokens(weight_bar, head).astype(head.weight.dtype)

    def over_parts(head, x, fields, kept):
        def part(total, i):
            here = dataclasses.replace(cut, index=i)
            x_bar, weight_bar = gradients(here, here.whole_width(head, x), x, fields, kept)
            weight_bar = cut.sum_over_tokens(weight_bar, head).astype(head.weight.dtype)
            return total + x_bar.astype(jnp.float32), weight_bar

        zeros = jnp.zeros(x.shape, jnp.float32)
        x_bar, parts_bar = jax.lax.scan(part, zeros, jnp.arange(cut.parts))
        weight_bar = jnp.moveaxis(parts_bar, 0, head.vocab_axis).reshape(head.weight.shape)
        return cut.sum_over_vocabulary(x_bar.astype(x.dtype)), weight_bar

    def over_pieces(local, x, fields, kept):
        def piece(total, tokens):
            x_bar, weight_bar = gradients(cut, local, *cut.gather_tokens(tokens))
            return total + weight_bar, cut.sum_over_vocabulary(x_bar)

        split, join = cut.pieces(fields.targets.shape)
        fields = Fields(*map(split, fields))._replace(temperature=split(fields.temperature, 1))
        zeros = jnp.zeros(local.weight.shape, jnp.float32)
        pieces = split(x), fields, split_kept(split, kept)
        weight_bar, x_bar = jax.lax.scan(piece, zeros, pieces)
        return join(x_bar), weight_bar

    g_entropy = cotangents.entropy if plan.pulls_entropy else jnp.zeros_like(cotangents.entropy)
    g_others = jnp.where(ids_bnk == ELSEWHERE, 0.0, cotangents.others)
    fields = Fields(
        targets_bn, temperature_bn, normaliser_bn, entropy_bn, cotangents.logp, g_entropy,
        ids_bnk, g_others,
    )
    token_spec, head_spec = PartitionSpec(cut.rows, cut.positions), cut.head_spec(head)
    x_bar, weight_bar = cut.run(
        body,
        (head_spec, *(token_spec,) * 3, PartitionSpec(None, cut.rows, cut.positions, cut.vocab)),
        (token_spec, head_spec),
        head, x_bnd, fields, kept, logits,
    )
    return dataclasses.replace(head, weight=weight_bar), x_bar, None, None, None, None


scores.defvjp(_forward, _backward)
