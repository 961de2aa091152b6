"""TPU kernels for the moments of softmax(head(x) / temperature) and for their gradients.

The grid has tiles of tokens and of the vocabulary, and a tile of logits exists only in VMEM. The
forward kernel and the kernel of x's gradient keep a tile of tokens and loop over the vocabulary.
The kernel of the weight's gradient keeps a tile of the vocabulary and loops over the tokens. Both
gradient kernels compute the logits again. The last tile of the vocabulary may read past the end of
the array.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_tis.kernels import narrow
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob_chunked import ELSEWHERE, EXCLUDED, Fields, Moments

TILE_BYTES = 4 * 2**20  # of a tile of tokens or vocabulary in its full width
LARGEST_TILE = 512
VMEM_BYTES = 56 * 2**20  # v5p has 64 MiB, v5e and v6e have 128


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes for hidden states [tokens, width] and a head; tokens are padded, a head is not."""

    tokens: int
    token_tile: int
    vocab: int
    vocab_tile: int
    width: int
    vocab_axis: int
    precision: jax.lax.Precision | None

    @classmethod
    def of(cls, head: Head, tokens: int) -> "Tiling":
        width = head.weight.shape[1 - head.vocab_axis]
        tile = LARGEST_TILE
        while tile > 128 and head.weight.dtype.itemsize * width * tile > TILE_BYTES:
            tile //= 2
        token_tile = min(tile, tokens + -tokens % 16)  # bfloat16 has 16 rows in a register
        return cls(
            tokens + -tokens % token_tile, token_tile, head.vocab_size, min(tile, head.vocab_size),
            width, head.vocab_axis, head.precision,
        )

    def rows(self, x_bn: jax.Array) -> jax.Array:
        """Returns [B,N,...] as [tokens,...], padded with zeros."""
        x = x_bn.reshape(x_bn.shape[0] * x_bn.shape[1], *x_bn.shape[2:])
        return jnp.pad(x, ((0, self.tokens - len(x)),) + ((0, 0),) * (x.ndim - 1))

    def columns(self, *fields_bn: jax.Array) -> jax.Array:
        """Returns fields [B,N] and [B,N,K] as one float32 array [tokens, fields]; token ids below
        2^24 stay exact."""
        fields = [f[..., None] if f.ndim == 2 else f for f in fields_bn]
        return jnp.concatenate([self.rows(f).astype(jnp.float32) for f in fields], axis=-1)

    def tokens_spec(self, width: int, axis: int) -> pl.BlockSpec:
        """Returns the BlockSpec of [tokens, width] with tiles along an axis of the grid."""
        return pl.BlockSpec((self.token_tile, width), lambda *ids: (ids[axis], 0))

    def weight_spec(self, axis: int) -> pl.BlockSpec:
        if self.vocab_axis == 0:
            return pl.BlockSpec((self.vocab_tile, self.width), lambda *ids: (ids[axis], 0))
        return pl.BlockSpec((self.width, self.vocab_tile), lambda *ids: (0, ids[axis]))

    def dot(self, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
        return jax.lax.dot_general(
            a, b, (((a_axis,), (b_axis,)), ((), ())),
            precision=self.precision, preferred_element_type=jnp.float32,
        )

    def logits(self, x: jax.Array, weight: jax.Array, inverse: jax.Array) -> jax.Array:
        return self.dot(x, weight, 1, 1 - self.vocab_axis) * inverse

    def ids(self, tile: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
        """Returns the token ids along the vocabulary axis of a tile."""
        return tile * self.vocab_tile + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def call(
        self, kernel, grid: tuple, in_specs, out_specs, out_shape, scratch_shapes=(), products=2
    ):
        """Calls a kernel that accumulates over the second axis of the grid. `products` is its
        number of matrix products of tokens, width and vocabulary."""
        size = self.tokens * self.vocab
        cost = pl.CostEstimate(
            flops=2 * products * size * self.width, transcendentals=size,
            bytes_accessed=4 * (self.tokens + self.vocab) * self.width,
        )
        return narrow.pallas_call(
            functools.partial(kernel, self),
            grid=grid, in_specs=in_specs, out_specs=out_specs, out_shape=out_shape,
            scratch_shapes=scratch_shapes, cost_estimate=cost, name="token_logprob",
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
        )


def moments(
    head, x_bnd, targets_bn, temperature_bn, ids_bnk, kept, size, chunk, with_entropy,
    with_collision,
):
    """Returns (Moments, None), as `logprob_chunked.moments` without kept sets."""
    del kept, chunk
    head, x_bnd = head.cast(x_bnd)
    t = Tiling.of(head, targets_bn.size)
    size_bn = jnp.full(targets_bn.shape, size)
    fields_tf = t.columns(targets_bn, 1 / temperature_bn, size_bn, ids_bnk)
    single = len(Moments._fields) - 1  # moments that are one number per token
    count = single + ids_bnk.shape[-1]
    found_tf = t.call(
        functools.partial(_moments_kernel, with_entropy, with_collision),
        (pl.cdiv(t.tokens, t.token_tile), pl.cdiv(t.vocab, t.vocab_tile)),
        [t.tokens_spec(fields_tf.shape[1], 0), t.tokens_spec(t.width, 0), t.weight_spec(1)],
        t.tokens_spec(count, 0),
        jax.ShapeDtypeStruct((t.tokens, count), jnp.float32),
        products=1,
    )(fields_tf, t.rows(x_bnd), head.weight)
    found_tf = found_tf[: targets_bn.size]
    moments = [found_tf[:, i].reshape(targets_bn.shape) for i in range(single)]
    return Moments._make([*moments, found_tf[:, single:].reshape(ids_bnk.shape)]), None


def _moments_kernel(with_entropy, with_collision, t, fields_ref, x_ref, w_ref, out_ref):
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        lane = jax.lax.broadcasted_iota(jnp.int32, out_ref.shape, 1)
        out_ref[...] = jnp.where(lane == 0, EXCLUDED, 0.0)

    targets, inverse, size = (fields_ref[:, i : i + 1] for i in range(3))
    logits = t.logits(x_ref[...], w_ref[...], inverse)
    ids = t.ids(tile, logits.shape, 1)
    logits = jnp.where(ids < size.astype(jnp.int32), logits, EXCLUDED)
    old_top, old_total = out_ref[:, 0:1], out_ref[:, 1:2]
    top = jnp.maximum(old_top, jnp.max(logits, axis=1, keepdims=True))
    down = old_top - top
    scale = jnp.exp(down)
    weights = jnp.exp(logits - top)
    add = lambda x: jnp.sum(x, axis=1, keepdims=True)
    out_ref[:, 0:1] = top
    out_ref[:, 1:2] = scale * old_total + add(weights)
    if with_entropy:
        old_dot = scale * (out_ref[:, 2:3] + down * old_total)
        out_ref[:, 2:3] = old_dot + add(weights * (logits - top))
    if with_collision:
        out_ref[:, 3:4] = scale * scale * out_ref[:, 3:4] + add(weights * weights)
    out_ref[:, 4:5] += add(jnp.where(ids == targets.astype(jnp.int32), logits, 0.0))
    if fields_ref.shape[1] > 3:
        others = fields_ref[:, 3:]
        at = lambda one: add(jnp.where(ids.astype(jnp.float32) == one, logits, 0.0))
        take = lambda found, one: jnp.where(others == one, at(one), found)
        out_ref[:, 5:] += _for_each(t, tile, others, take, jnp.zeros(others.shape, jnp.float32))


def _for_each(t, tile, wanted, f, total):
    """Folds total = f(total, ids [tokens, 1]) over the distinct ids [tokens, K] in a vocabulary
    tile.

    Each token's smallest id comes first. The number of calls is the largest number of ids of a
    token in the tile, seldom K, because K ids spread over hundreds of tiles. Tokens without a
    further id get an id of no tile. Ids are float32.
    """
    first = tile * t.vocab_tile
    is_here = (wanted >= first) & (wanted < first + t.vocab_tile)
    count = jnp.max(jnp.sum(is_here.astype(jnp.float32), axis=1, keepdims=True))

    def step(_, carry):
        last, total = carry
        rest = jnp.where(is_here & (wanted > last), wanted, float(ELSEWHERE))
        one = jnp.min(rest, axis=1, keepdims=True)
        return one, f(total, one)

    start = jnp.full((wanted.shape[0], 1), -1.0, jnp.float32)
    return jax.lax.fori_loop(0, count.astype(jnp.int32), step, (start, total))[1]


def gradients(head, x_bnd, fields: Fields, kept, size, logits, chunk, with_entropy):
    """Returns the gradients of x and, in float32, of the head's weight."""
    del kept, logits, chunk
    dtype, is_live = x_bnd.dtype, fields.is_live()
    x_bnd = jnp.where(is_live[..., None], x_bnd, 0)
    pulled = jnp.where(is_live[..., None], fields.g_others, 0)
    live = [jnp.where(is_live, f, 0) for f in fields[:-2]]
    fields = Fields._make([*live, fields.others, pulled])
    head, x_bnd = head.cast(x_bnd)
    t = Tiling.of(head, fields.targets.size)
    inverse = jnp.where(is_live, 1 / fields.temperature, 0)
    size_bn = jnp.full(inverse.shape, size)
    *single, others, g_others = fields._replace(temperature=inverse)
    fields_tf = t.columns(*single, size_bn, others, g_others)
    x_td = t.rows(x_bnd)
    grid = pl.cdiv(t.tokens, t.token_tile), pl.cdiv(t.vocab, t.vocab_tile)
    stored = jnp.float32 if dtype == jnp.float16 else dtype  # which no kernel of a TPU can store
    tokens_specs = lambda axis: [
        t.tokens_spec(fields_tf.shape[1], axis), t.tokens_spec(t.width, axis)
    ]
    x_bar = t.call(
        functools.partial(_x_kernel, with_entropy),
        grid,
        [*tokens_specs(0), t.weight_spec(1)],
        t.tokens_spec(t.width, 0),
        jax.ShapeDtypeStruct(x_td.shape, stored),
        [pltpu.VMEM((t.token_tile, t.width), jnp.float32)],
    )(fields_tf, x_td, head.weight)
    weight_bar = t.call(
        functools.partial(_weight_kernel, with_entropy),
        grid[::-1],
        [*tokens_specs(1), t.weight_spec(0)],
        t.weight_spec(0),
        jax.ShapeDtypeStruct(head.weight.shape, jnp.float32),
    )(fields_tf, x_td, head.weight)
    return x_bar[: fields.targets.size].reshape(x_bnd.shape).astype(dtype), weight_bar


def _logits_gradient(with_entropy, t, tile, fields_ref, x, weight):
    """Returns the gradient [tokens, vocabulary] of a tile's logits in the dtype of x."""
    count = len(Fields._fields) - 1  # the fields of one number per token, and size
    targets, inverse, normaliser, entropy, g_logp, g_entropy, size = (
        fields_ref[:, i : i + 1] for i in range(count)
    )
    num_others = (fields_ref.shape[1] - count) // 2
    logp = t.logits(x, weight, inverse) - normaliser
    # d logp / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy).
    factor = g_logp
    if num_others:
        factor = factor + jnp.sum(fields_ref[:, count + num_others :], axis=1, keepdims=True)
    if with_entropy:
        factor = factor + g_entropy * (logp + entropy)
    ids = t.ids(tile, logp.shape, 1)
    one_hot = jnp.where(ids == targets.astype(jnp.int32), g_logp, 0.0)
    if num_others:
        others = fields_ref[:, count : count + num_others]
        g_others = fields_ref[:, count + num_others :]

        def put(one_hot, one):
            g_one = jnp.sum(jnp.where(others == one, g_others, 0.0), axis=1, keepdims=True)
            return one_hot + jnp.where(ids.astype(jnp.float32) == one, g_one, 0.0)

        one_hot = _for_each(t, tile, others, put, one_hot)
    gradient = (one_hot - jnp.exp(logp) * factor) * inverse
    return jnp.where(ids < size.astype(jnp.int32), gradient, 0.0).astype(x.dtype)


def _x_kernel(with_entropy, t, fields_ref, x_ref, w_ref, x_bar_ref, sum_ref):
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    # What lies past the vocabulary's end may be NaN, and 0 * NaN is NaN.
    weight = w_ref[...]
    if t.vocab % t.vocab_tile:
        weight = jnp.where(t.ids(tile, weight.shape, t.vocab_axis) < t.vocab, weight, 0)
    gradient = _logits_gradient(with_entropy, t, tile, fields_ref, x_ref[...], weight)
    sum_ref[...] += t.dot(gradient, weight, 1, t.vocab_axis)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        x_bar_ref[...] = sum_ref[...].astype(x_bar_ref.dtype)


def _weight_kernel(with_entropy, t, fields_ref, x_ref, w_ref, weight_bar_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        weight_bar_ref[...] = jnp.zeros_like(weight_bar_ref)

    x = x_ref[...]
    gradient = _logits_gradient(with_entropy, t, pl.program_id(0), fields_ref, x, w_ref[...])
    pair = (gradient, x) if t.vocab_axis == 0 else (x, gradient)
    weight_bar_ref[...] += t.dot(*pair, 0, 0)
