"""Log-probabilities of given tokens and two moments of their distributions, without the logits.

The output head, the softmax and the gather are one operation, so [tokens, vocabulary] is never
stored: on TPU a Pallas kernel walks tiles of both (`logprob_pallas`), elsewhere chunks of positions
go through XLA (`logprob_chunked`). Either gives, for the vocabulary of one device, the same few
numbers per token (`Moments`). A vocabulary that is cut over mesh axes needs those combined over
them, and in the backward pass the gradient of x summed; the logits never leave a device.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_tis.kernels import logprob_chunked, logprob_invariant, logprob_pallas, tiles
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob_chunked import ELSEWHERE, Fields, Kept, Moments
from jaxrl_tis.sharding import Layout

BODIES = {
    "chunked": logprob_chunked, "pallas": logprob_pallas, "invariant": logprob_invariant,
}


class Scores(NamedTuple):
    """What is said of each token, [B,N] float32, and of others in its place.

    Attributes:
      logp: log-probability of the token, in nats.
      entropy: of the distribution that it was drawn from, in nats; zeros when not asked for.
      collision: sum of the squared probabilities, the chance that two draws agree; without
        gradient; zeros when not asked for.
      others: [B,N,K] log-probabilities of the K ids asked for, in nats; 0 where an id is negative.
    """

    logp: jax.Array
    entropy: jax.Array
    collision: jax.Array
    others: jax.Array


@dataclasses.dataclass(frozen=True)
class Cut:
    """Over which mesh axes rows, positions, the vocabulary and the width are cut; none without a
    mesh. Rows, positions and a vocabulary that these do not divide are filled up, never where they
    are stored."""

    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()

    @classmethod
    def of(cls, layout: Layout | None) -> "Cut":
        if layout is None or layout.mesh.size == 1:
            return cls()

        def axes(name):
            (entry,) = layout.sharding((name,)).spec
            return (entry,) if isinstance(entry, str) else tuple(entry or ())

        # A vocabulary that `sharding.layout` stores whole is shared out here all the same.
        vocab = axes("vocab") or axes("mlp")
        cut = cls(layout.mesh, axes("batch"), axes("length"), vocab, axes("embed"))
        if not set(cut.width) <= set(cut.tokens):
            raise ValueError(f"the width is cut over {cut.width}, tokens only over {cut.tokens}")
        return cut

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.rows + self.positions

    def count(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def fill(self, x: jax.Array, value: float = 0) -> jax.Array:
        """Fills [B,N,...] up to multiples of what the mesh cuts rows and positions into."""
        if self.mesh is None:
            return x
        missing = -x.shape[0] % self.count(self.rows), -x.shape[1] % self.count(self.positions)
        width = tuple((0, n) for n in missing) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, width, constant_values=value)

    def fill_head(self, head: Head, numerics: str = "fast") -> Head:
        """Gives the head as many columns on each device; the last ones, of zeros, are no tokens."""
        count = self.count(self.vocab) if self.vocab else 1
        unit = tiles.VOCAB_UNIT if count > 1 and numerics == "invariant" else count
        return dataclasses.replace(head, weight=tiles.fill(head.weight, head.vocab_axis, unit))

    def head_spec(self, head: Head) -> PartitionSpec:
        cuts = (self.vocab, self.width)
        return PartitionSpec(*(cuts if head.vocab_axis == 0 else cuts[::-1]))

    def run(self, body, in_specs: tuple, out_specs: Any, *inputs) -> Any:
        """Runs `body` on every device of the mesh, or as it is without a mesh."""
        if self.mesh is None:
            return body(*inputs)
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*inputs)

    def whole_width(self, head: Head, x: jax.Array) -> Head:
        """Returns this device's vocabulary in the compute dtype, with its width gathered."""
        weight = head.cast(x)[0].weight
        if self.width:
            axis = 1 - head.vocab_axis
            weight = jax.lax.all_gather(weight, self.width, axis=axis, tiled=True)
        return dataclasses.replace(head, weight=weight)

    def sum_over_tokens(self, weight_bar: jax.Array, width_axis: int) -> jax.Array:
        """Sums the head's gradient over all devices' tokens; a device keeps its own width."""
        if self.width:
            weight_bar = jax.lax.psum_scatter(
                weight_bar, self.width, scatter_dimension=width_axis, tiled=True
            )
        rest = tuple(a for a in self.tokens if a not in self.width)
        return jax.lax.psum(weight_bar, rest) if rest else weight_bar

    def local_size(self, vocab_size: int, columns: int) -> jax.Array | int:
        """Returns how many of this device's columns are tokens."""
        if not self.vocab or columns * self.count(self.vocab) == vocab_size:
            return columns
        return jnp.clip(vocab_size - jax.lax.axis_index(self.vocab) * columns, 0, columns)

    def local_ids(self, ids: jax.Array, columns: int) -> jax.Array:
        """Counts token ids from the first of this device's; those of other devices become
        ELSEWHERE."""
        if not self.vocab:
            return ids
        local = ids - jax.lax.axis_index(self.vocab) * columns
        return jnp.where((local >= 0) & (local < columns), local, ELSEWHERE)

    def local_kept(self, kept: Kept | None, columns: int) -> Kept | None:
        if kept is None:
            return None
        return kept._replace(ids_bnk=self.local_ids(kept.ids_bnk, columns))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How scores are computed: by which body, over how many tokens of the vocabulary, and with
    which arguments of `token_logprob`."""

    body: str
    cut: Cut
    vocab_size: int
    chunk: int
    with_entropy: bool
    with_collision: bool
    pulls_entropy: bool


def token_logprob(
    head: Head,
    x_bnd: jax.Array,
    targets_bn: jax.Array,
    temperature_bn: jax.Array,
    chunk: int,
    *,
    with_entropy: bool = False,
    with_collision: bool = False,
    pulls_entropy: bool = True,
    kept: Kept | None = None,
    ids_bnk: jax.Array | None = None,
    layout: Layout | None = None,
    numerics: str = "fast",
) -> Scores:
    """Computes the log-softmax of head(x) / temperature at the targets, and moments of that
    distribution.

    Differentiable in x and the head's weight through `logp`, `entropy` and `others`, in reverse mode
    only.
    The backward pass computes the logits again and saves one normaliser and one entropy per token
    (a single chunk outside TPU keeps its logits). Temporaries are per-token numbers, one block of
    logits ([chunk, V]; a tile in VMEM on TPU), the head in the compute dtype where it is stored in
    another one or cut in its width, and its float32 gradient (outside TPU also a chunk's share of
    it). A token without cotangent adds exactly nothing to any gradient, whatever its hidden state,
    NaN included.

    Args:
      head: the output head; the compute dtype is x's, or float32 if `head.highest`.
      x_bnd: [B,N,D] hidden states; targets_bn: [B,N] int32 tokens that they predict.
      temperature_bn: [B,N] positive; gets no gradient.
      chunk: positions per chunk outside TPU, summed over the rows of a device.
      pulls_entropy: whether a gradient flows through `entropy`; without, the backward pass is that
        of `logp` alone.
      kept: sets that the distributions are restricted to; chunked on every platform.
      ids_bnk: [B,N,K] int32 tokens of which the log-probabilities are wanted, too, of the kept set
        if there is one; negative ones are none.
      layout: `sharding.Layout` of a mesh; rows and positions are cut over its axes for "batch" and
        "length", the head over those for "vocab" (whatever the vocabulary's size) and "embed".
        None is one device.
      numerics: "invariant" gives the sampler's bits on every platform, see tiles.py.
    """
    b, n = targets_bn.shape
    cut = Cut.of(layout)
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
        found = run("invariant")(*inputs, kept)
    elif kept is None:
        found = jax.lax.platform_dependent(
            *inputs, None, tpu=run("pallas"), default=run("chunked")
        )
    else:
        found = run("chunked")(*inputs, kept)
    return Scores(*(s[:b, :n] for s in found))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scores(
    plan: Plan,
    head: Head,
    x_bnd: jax.Array,
    targets_bn: jax.Array,
    temperature_bn: jax.Array,
    ids_bnk: jax.Array,
    kept: Kept | None,
) -> Scores:
    """Computes `token_logprob` as planned, for rows, positions and a head that the mesh divides;
    an id of no token is ELSEWHERE."""
    return _forward(plan, head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept)[0]


def _forward(plan, head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept):
    cut = plan.cut

    def body(head, x, targets, temperature, ids, kept):
        head = cut.whole_width(head, x)
        columns = head.vocab_size
        inputs = (
            head, x, cut.local_ids(targets, columns), temperature, cut.local_ids(ids, columns),
            cut.local_kept(kept, columns), cut.local_size(plan.vocab_size, columns),
            plan.chunk, plan.with_entropy, plan.with_collision,
        )
        if plan.body == "invariant":
            count = cut.count(cut.vocab) if cut.vocab else 1
            found, normaliser = logprob_invariant.finished(*inputs, cut.vocab, count)
            found, logits = Scores(*found), None
        else:
            found, logits = BODIES[plan.body].moments(*inputs)
            found, normaliser = _finish(_combine(found, cut.vocab), plan)
        others = jnp.where(ids == ELSEWHERE, 0.0, found.others)
        return found._replace(others=others), normaliser, logits

    token_spec = PartitionSpec(cut.rows, cut.positions)
    found, normaliser, logits = cut.run(
        body,
        (cut.head_spec(head), *(token_spec,) * 5),
        (token_spec, token_spec, PartitionSpec(None, cut.rows, cut.positions, cut.vocab)),
        head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept,
    )
    inputs = head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept
    return found, (*inputs, normaliser, found.entropy, logits)


def _combine(m: Moments, axes: tuple[str, ...]) -> Moments:
    """Computes the moments over the whole vocabulary from those over the parts on devices along the
    axes."""
    if not axes:
        return m
    top = jax.lax.pmax(m.top, axes)
    down = m.top - top
    scale = jnp.exp(down)
    dot = scale * (m.dot + down * m.total)
    parts = scale * m.total, dot, scale**2 * m.squares, m.target, m.others
    return Moments(top, *jax.lax.psum(parts, axes))


def _finish(m: Moments, plan: Plan) -> tuple[Scores, jax.Array]:
    """Returns (scores, normaliser)."""
    normaliser = m.top + jnp.log(m.total)
    zeros = jnp.zeros_like(normaliser)
    entropy = jnp.log(m.total) - m.dot / m.total if plan.with_entropy else zeros
    collision = m.squares / m.total**2 if plan.with_collision else zeros
    others = m.others - normaliser[..., None]
    return Scores(m.target - normaliser, entropy, collision, others), normaliser


def _backward(plan, saved, cotangents: Scores):
    head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept, normaliser_bn, entropy_bn, logits = saved
    cut = plan.cut

    def body(head, x, fields, kept, logits):
        local = cut.whole_width(head, x)
        columns = local.vocab_size
        x_bar, weight_bar = BODIES[plan.body].gradients(
            local, x, fields.local(lambda ids: cut.local_ids(ids, columns)),
            cut.local_kept(kept, columns), cut.local_size(plan.vocab_size, columns),
            logits, plan.chunk, plan.pulls_entropy,
        )
        x_bar = jax.lax.psum(x_bar, cut.vocab) if cut.vocab else x_bar
        weight_bar = cut.sum_over_tokens(weight_bar, 1 - head.vocab_axis)
        return x_bar, weight_bar.astype(head.weight.dtype)

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
