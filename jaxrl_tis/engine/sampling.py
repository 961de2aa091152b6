"""Sampling: temperature, top-k, top-p and min-p per row, and sampling with a key per token.

The order is: penalties and bias on the logits (see penalties.Penalties), temperature, top-k, top-p,
min-p. Each filter acts on the result of the filter before. The vocabulary may be split over a mesh
axis; then devices exchange a few numbers per row. No filter sorts: the edge of the kept set is found
bit by bit, with one count or sum of the row per bit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_tis.engine import capture
from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.protocol import Array, Draw
from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.engine.shards import WHOLE, Shards, chosen
from jaxrl_tis.kernels import tiles
from jaxrl_tis.sharding import Layout

BLOCK = 128
KEY_BITS = 31  # of a float32 without its sign
MAX_INT = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """The SamplingParams of B rows as arrays [B]."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    alpha: Array

    @classmethod
    def of(cls, params: list[SamplingParams]) -> "SamplingRows":
        column = lambda name, dtype: np.array([getattr(p, name) for p in params], dtype)
        return cls(
            column("temperature", np.float32), column("top_k", np.int32),
            column("top_p", np.float32), column("min_p", np.float32), column("alpha", np.float32),
        )


def _scaled(logits_bv: jax.Array, rows: SamplingRows, shards: Shards = WHOLE) -> jax.Array:
    """Returns (logits - their maximum) / temperature; the temperature of greedy rows is 1."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    logits_bv = logits_bv.astype(jnp.float32)
    top_b1 = shards.max(jnp.max(logits_bv, axis=-1, keepdims=True))
    scale = tiles.scaled if shards.is_invariant else jnp.divide
    return scale(logits_bv - top_b1, temperature[:, None])


def _largest(is_low: Callable[[jax.Array], jax.Array], shape: tuple) -> jax.Array:
    """Finds the largest int32 >= 0 for which is_low holds, by binary search. is_low holds at 0 and is
    monotone."""

    def try_bit(i, low):
        trial = low | (1 << (KEY_BITS - 1 - i))
        return jnp.where(is_low(trial), trial, low)

    return jax.lax.fori_loop(0, KEY_BITS, try_bit, jnp.zeros(shape, jnp.int32))


def _keys(scaled_bv: jax.Array) -> jax.Array:
    """Returns integers >= 0 in the order of probability, most likely token first: the bits of
    |scaled|."""
    return jax.lax.bitcast_convert_type(jnp.abs(scaled_bv), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Support:
    """The tokens with positive probability in each row, as bounds [B,1]: keys below `edge`, and keys
    equal to `edge` with an id below `cut`; of these, tokens at least `min_p` times as likely as the
    most likely one."""

    edge: jax.Array
    cut: jax.Array
    min_p: jax.Array


def _filtered(scaled_bv: jax.Array, rows: SamplingRows, shards: Shards) -> Support:
    """Returns the support after top-k, top-p and min-p; ties go to the lower token id.

    Top-k and top-p keep the tokens before an edge, and as many ties at the edge as still fit. The
    nearer of the two edges counts.
    """
    key_bv, raw_bv = _keys(scaled_bv), jnp.exp(scaled_bv)
    add = lambda x_bv: shards.sum(jnp.sum(x_bv, axis=-1, keepdims=True))
    count = lambda is_in_bv: add(is_in_bv.astype(jnp.int32))
    mass = lambda is_in_bv: shards.totals(jnp.where(is_in_bv, raw_bv, 0.0))[0][:, None]
    weight = lambda key: jnp.exp(-jax.lax.bitcast_convert_type(key, jnp.float32))
    shape, all_tokens = (len(scaled_bv), 1), scaled_bv.shape[1] * shards.count
    top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]

    top_k = jnp.where(top_k == 0, all_tokens + 1, top_k)
    k_edge = _largest(lambda edge: count(key_bv < edge) < top_k, shape)
    k_ties = jnp.minimum(top_k - count(key_bv < k_edge), count(key_bv == k_edge))
    edge_mass = jnp.where(k_ties > 0, k_ties * weight(k_edge), 0.0)
    kept_mass = mass(key_bv < k_edge) + edge_mass

    needed = jnp.where(top_p >= 1, jnp.inf, top_p * kept_mass)
    p_edge = _largest(lambda edge: mass(key_bv < edge) < needed, shape)
    p_ties = jnp.ceil((needed - mass(key_bv < p_edge)) / weight(p_edge))
    p_ties = jnp.clip(p_ties, 1, all_tokens).astype(jnp.int32)

    edge = jnp.minimum(k_edge, p_edge)
    fits = lambda ties, its_edge: jnp.where(its_edge == edge, ties, all_tokens)
    ties = jnp.minimum(fits(k_ties, k_edge), fits(p_ties, p_edge))
    is_tie_bv, id_1v = key_bv == edge, shards.ids(scaled_bv.shape[1])
    cut = _largest(lambda cut: count(is_tie_bv & (id_1v < cut)) <= ties, shape)
    return Support(edge, cut, min_p)


def _support(scaled_bv, rows: SamplingRows, any_filtered, any_greedy, shards=WHOLE) -> Support:
    """Returns the support of every row. Filters and the search for the maximum run only if a row on
    any device needs them, so all devices take the same branch."""
    column = lambda value: jnp.full((len(scaled_bv), 1), value)
    everything = Support(column(MAX_INT), column(MAX_INT), column(0.0))
    is_filtered, is_greedy = _is_filtered(rows)[:, None], (rows.temperature <= 0)[:, None]
    choose = lambda is_new, new, old: jax.tree.map(
        lambda n, o: jnp.where(is_new, n, o), new, old
    )

    def filtered(support):
        return choose(is_filtered, _filtered(scaled_bv, rows, shards), support)

    def greedy(support):
        id_1v = shards.ids(scaled_bv.shape[1])
        best = jnp.min(jnp.where(scaled_bv == 0, id_1v, MAX_INT - 1), axis=-1, keepdims=True)
        return choose(is_greedy, Support(column(0), shards.min(best) + 1, column(0.0)), support)

    same = lambda support: support
    support = jax.lax.cond(any_filtered, filtered, same, everything)
    return jax.lax.cond(any_greedy, greedy, same, support)


def _weights(scaled_bv: jax.Array, support: Support, id_1v: jax.Array) -> jax.Array:
    """Returns exp(scaled) [B,V] inside the support, and 0 outside."""
    key_bv, raw_bv = _keys(scaled_bv), jnp.exp(scaled_bv)
    is_out = (key_bv > support.edge) | ((key_bv == support.edge) & (id_1v >= support.cut))
    return jnp.where(is_out | (raw_bv < support.min_p), 0.0, raw_bv)


def _is_filtered(rows: SamplingRows) -> jax.Array:
    is_any = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    return is_any & (rows.temperature > 0)


def _asked(rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """Returns whether any row is filtered, and whether any is greedy."""
    return jnp.any(_is_filtered(rows)), jnp.any(rows.temperature <= 0)


def distribution(
    logits_bv: jax.Array, rows: SamplingRows | SamplingParams, penalties: Penalties | None = None
) -> jax.Array:
    """Returns the log-probs [B,V] of the sampling distribution; -inf outside the support. A single
    SamplingParams applies to all rows; `penalties` are the penalties of these rows."""
    if isinstance(rows, SamplingParams):
        rows = SamplingRows.of([rows] * len(logits_bv))
    scaled_bv = _scaled(logits_bv if penalties is None else penalties.apply(logits_bv, WHOLE), rows)
    support = _support(scaled_bv, rows, *_asked(rows))
    weights_bv = _weights(scaled_bv, support, WHOLE.ids(scaled_bv.shape[1]))
    total_b1 = jnp.sum(weights_bv, axis=-1, keepdims=True)
    return jnp.where(weights_bv > 0, scaled_bv - jnp.log(total_b1), -jnp.inf)


def _target(u_b: jax.Array, total_b: jax.Array) -> jax.Array:
    return jnp.minimum(u_b * total_b, jnp.nextafter(total_b, 0.0))


def _blocks(weights_bv: jax.Array, shards: Shards) -> tuple[jax.Array, jax.Array | int]:
    """Returns (this device's weights on the block grid of the whole vocabulary [B,n,BLOCK], zeros
    outside its part; the index of its first block)."""
    b, v = weights_bv.shape
    if shards.count == 1 or v % BLOCK == 0:
        blocks = jnp.pad(weights_bv, ((0, 0), (0, -v % BLOCK))).reshape(b, -1, BLOCK)
        return blocks, shards.index * (v // BLOCK)
    n = (v + BLOCK - 2) // BLOCK + 1
    first, shift = jnp.divmod(shards.index * v, BLOCK)
    grid = jax.lax.dynamic_update_slice_in_dim(
        jnp.zeros((b, n * BLOCK), weights_bv.dtype), weights_bv, shift, axis=1
    )
    return grid.reshape(b, n, BLOCK), first


def _is_reached(weights_bn, cumulative_bn, target_b, has_last_b1=True) -> jax.Array:
    """Returns [B,n] bool: the weight is positive and the cumulative weight exceeds the target. The
    last positive weight is always True, because the cumulative sum may round to less there than at
    the end."""
    place_1n = jnp.arange(weights_bn.shape[1])[None]
    is_possible = weights_bn > 0
    last_b1 = jnp.max(jnp.where(is_possible, place_1n, -1), axis=-1, keepdims=True)
    is_last = (place_1n == last_b1) & has_last_b1
    return is_possible & ((cumulative_bn > target_b[:, None]) | is_last)


def _draw(weights_bv: jax.Array, u_b2: jax.Array, shards: Shards = WHOLE) -> jax.Array:
    """Samples token ids [B] by inverse CDF in two levels, blocks and tokens within the block, with one
    uniform number for each. A token of weight zero is never sampled."""
    blocks, first = _blocks(weights_bv, shards)
    if shards.is_invariant:
        block_b = _draw_invariant_block(weights_bv, u_b2[:, 0], shards)
    else:
        sums_bn, width = jnp.sum(blocks, axis=-1), weights_bv.shape[1]
        block_b = _draw_block(sums_bn, first, u_b2[:, 0], width, shards)
    own_b = block_b - first
    within = chosen(blocks, jnp.clip(own_b, 0, blocks.shape[1] - 1))
    is_here_b = (own_b >= 0) & (own_b < blocks.shape[1])
    within = shards.sum(jnp.where(is_here_b[:, None], within, 0.0))
    cumulative = jnp.cumsum(within, axis=-1)
    target = _target(u_b2[:, 1], cumulative[:, -1])
    index = jnp.argmax(_is_reached(within, cumulative, target), axis=-1)
    return (block_b * BLOCK + index).astype(jnp.int32)


def _draw_block(sums_bn, first, u_b, width: int, shards: Shards) -> jax.Array:
    """Returns the index [B] of the first block with a cumulative weight above u times the total; 0 if
    the weights are NaN. The last block of a part includes its pieces in the parts that follow."""
    cumulative = jnp.cumsum(sums_bn, axis=-1)
    total_b = cumulative[:, -1]
    has_last_b1: Any = True
    if shards.count > 1:
        pieces = shards.gather(jnp.stack([total_b, sums_bn[:, 0]]))
        ends = [jnp.zeros_like(u_b)]
        for part_b in pieces[:, 0]:
            ends.append(ends[-1] + part_b)
        total_b, cumulative = ends[-1], cumulative + jnp.stack(ends)[shards.index][:, None]
        part = jnp.arange(shards.count)
        is_later = (part > shards.index)[:, None]
        has_last_b1 = ~jnp.any(is_later & (pieces[:, 0] > 0), axis=0)[:, None]
        last = ((shards.index + 1) * width - 1) // BLOCK
        is_rest = is_later & (part * width // BLOCK == last)[:, None]
        rest_b = jnp.sum(jnp.where(is_rest, pieces[:, 1], 0.0), axis=0)
        is_last_1n = (first + jnp.arange(sums_bn.shape[1]) == last)[None]
        cumulative = cumulative + jnp.where(is_last_1n, rest_b[:, None], 0.0)
    is_found = _is_reached(sums_bn, cumulative, _target(u_b, total_b), has_last_b1)
    block_b = jnp.where(jnp.any(is_found, axis=-1), first + jnp.argmax(is_found, axis=-1), MAX_INT)
    block_b = shards.min(block_b)
    return jnp.where(block_b == MAX_INT, 0, block_b)


def _draw_invariant_block(weights_bv: jax.Array, u_b: jax.Array, shards: Shards) -> jax.Array:
    """Samples the block as `_draw_block` does, from the sums of all blocks on each device. Every part
    holds whole runs of COLUMNS tokens, and a block has several runs."""
    b, run = len(u_b), tiles.COLUMNS
    if shards.count == 1:
        weights_bv = tiles.fill(weights_bv, 1, tiles.VOCAB_UNIT)
    runs = shards.gather(tiles.tree_sum(weights_bv.reshape(b, -1, run)))
    sums_bn = tiles.tree_sum(jnp.moveaxis(runs, 0, 1).reshape(b, -1, BLOCK // run))
    cumulative = jnp.cumsum(sums_bn, axis=-1)
    target_b = _target(u_b, cumulative[:, -1])
    return jnp.argmax(_is_reached(sums_bn, cumulative, target_b), axis=-1)


def row_keys(seeds_b: jax.Array, requests_b: jax.Array) -> jax.Array:
    """Returns the raw key data [B,2] of fold_in(key(seed), request) for uint32 seeds and request
    hashes."""
    key = lambda seed, request: jax.random.fold_in(jax.random.key(seed), request)
    return jax.random.key_data(jax.vmap(key)(seeds_b, requests_b))


def sample(
    logits_bv: jax.Array, rows: SamplingRows, keys_b2: jax.Array, positions_b: jax.Array,
    layout: Layout | None = None, *, penalties: Penalties | None = None, top_n: int = 0,
    num_kept: int = 0, numerics: str = "fast", student_bv: jax.Array | None = None,
) -> Draw:
    """Samples one token per row with the key fold_in(fold_in(seed, request), position).

    Args:
      logits_bv: [B,V] float32.
      keys_b2: [B,2] uint32 from `row_keys`.
      positions_b: [B] int32 absolute position of the token to be sampled.
      layout: splits the rows and the vocabulary over a mesh; None: one device.
      penalties: change the logits; None: no penalties.
      top_n: number of likeliest tokens to record.
      num_kept: record supports of at most this many tokens.
      numerics: "invariant" samples and scores the same on every mesh, bit by bit.
      student_bv: [B,V] the policy's own logits, where `logits_bv` has those of a teacher in it.
    """
    shards, is_invariant = Shards.of(layout), numerics == "invariant"
    if is_invariant and shards.count > 1:
        fill = functools.partial(tiles.fill, axis=1, multiple=tiles.VOCAB_UNIT)
        logits_bv, student_bv = jax.tree.map(
            functools.partial(fill, value=-jnp.inf), (logits_bv, student_bv)
        )
        penalties = None if penalties is None else penalties.filled(fill)
    draw: Callable[..., Draw] = functools.partial(
        _sample_tiles if is_invariant else _sample, shards=shards, top_n=top_n, num_kept=num_kept
    )
    if layout is not None and layout.mesh.size > 1:
        by_row, whole = layout.sharding(("batch",)).spec, PartitionSpec()
        logits_spec = layout.sharding(("batch", "vocab")).spec
        changes = whole if penalties is None else penalties.specs(layout)
        of_student = None if student_bv is None else logits_spec
        specs = (logits_spec, of_student), changes, by_row, by_row, by_row, whole, whole
        draw = layout.shard(draw, specs, by_row)
    return draw((logits_bv, student_bv), penalties, rows, keys_b2, positions_b, *_asked(rows))


def _sample_tiles(
    logits, penalties, rows, keys_b2, positions_b, *asked, shards, **recorded
) -> Draw:
    shards = dataclasses.replace(shards, is_invariant=True)
    tile = lambda *arrays: _sample(*arrays, *asked, shards=shards, **recorded)
    return tiles.by_rows(tile, logits, penalties, rows, keys_b2, positions_b)


def _sample(
    logits, penalties, rows: SamplingRows, keys_b2, positions_b, any_filtered, any_greedy, *,
    shards: Shards, top_n: int, num_kept: int,
) -> Draw:
    logits_bv, student_bv = logits
    raw_bv = scaled_bv = _scaled(logits_bv, rows, shards)
    if student_bv is not None:
        raw_bv = _scaled(student_bv, rows, shards)
    if penalties is not None:
        scaled_bv = _scaled(penalties.apply(logits_bv, shards), rows, shards)
    support = _support(scaled_bv, rows, any_filtered, any_greedy, shards)
    weights_bv = _weights(scaled_bv, support, shards.ids(scaled_bv.shape[1]))
    fold = lambda k, position: jax.random.uniform(
        jax.random.fold_in(jax.random.wrap_key_data(k), position), (2,)
    )
    token = _draw(weights_bv, jax.vmap(fold)(keys_b2, positions_b), shards)
    # entropy = log(total) - sum(w * scaled) / total; a weight of 0 may stand beside a scaled -inf.
    total, raw_total, moment = shards.totals(
        weights_bv, jnp.exp(raw_bv), jnp.where(weights_bv > 0, weights_bv * scaled_bv, 0.0)
    )
    scaled, raw = shards.at(scaled_bv, token), shards.at(raw_bv, token)
    top_ids = top_logps = None
    if top_n:
        # What is subtracted from the whole vocabulary XLA may fuse with the scaling.
        possible_bv = jnp.where(weights_bv > 0, scaled_bv, -jnp.inf)
        top_ids, top_bn = capture.top(possible_bv, top_n, shards)
        top_logps = jnp.where(top_ids < 0, -jnp.inf, top_bn - jnp.log(total)[:, None])
    kept = capture.support(weights_bv > 0, num_kept, shards) if num_kept else None
    logp_student = None
    if student_bv is not None:
        # The learner normalises over a recorded support, and else over the vocabulary.
        [mass] = shards.totals(jnp.where(weights_bv > 0, jnp.exp(raw_bv), 0.0))
        is_kept = False if kept is None else jnp.any(kept >= 0, axis=-1)
        logp_student = (raw - jnp.log(jnp.where(is_kept, mass, raw_total)))[:, None]
    return Draw(
        tokens=token,
        logp_behav=scaled - jnp.log(total),
        logp_raw=raw - jnp.log(raw_total),
        entropy=jnp.log(total) - moment / total,
        top_ids=top_ids,
        top_logps=top_logps,
        kept=kept,
        logp_student=logp_student,
    )
