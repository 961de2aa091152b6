"""The jitted programs of an engine: pure functions of a Spec, serving parameters and a DecodeState.

Shapes: r prefill row, b slot, t token, p page of a slot, g drafted token, m = b * t, n stop id,
d embed, v vocab. A data shard holds an equal part of r and of b.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis.engine import cache, fusion, sampling
from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.protocol import Draw, ResultTokens
from jaxrl_tis.engine.records import MAX_STOP_IDS, SamplingParams
from jaxrl_tis.engine.sampling import SamplingRows
from jaxrl_tis.engine.shards import chosen
from jaxrl_tis.engine.spec import Spec
from jaxrl_tis.engine.state import DecodeState, Slots
from jaxrl_tis.fields import DRAWN, route_dtype
from jaxrl_tis.kernels.logprob import token_logprob
from jaxrl_tis.models import moe, transformer
from jaxrl_tis.sharding import Layout

LOGPROB_CHUNK = 256  # prompt positions with logits in memory at a time


class Programs:
    """The compiled programs of one Spec. Each donates the state that it takes.

    Attributes:
      shardings: where the arrays of a DecodeState are, in its tree.
      init: () -> state of free slots.
      prefill: (params, state, tokens_rt, starts_r, lengths_r, table_rp, number of blocks) ->
        (state, routes_rtlk or None).
      prefill_scored: (params, state, tokens_rt, starts_r, lengths_r, table_rp, targets_rt, temperature)
        -> (state, logp_rt, routes_rtlk or None).
      insert: (state, arrays of `Engine.insert`) -> state.
      generate: (params, state, table_bp, shift_b) -> (state, ResultTokens).
      verify: (params, state, drafts_bg, counts_b, table_bp, shift_b) -> (state, ResultTokens).
      draft: (params, keys and values, slots, table_bp, shift_b) -> (keys and values, drafts_bg, counts_b);
        the slots are another engine's and stay.
    """

    def __init__(self, spec: Spec):
        bind = lambda program, *args: functools.partial(program, spec, *args)
        options: dict[str, Any] = dict(compiler_options=spec.program.compiler_options)
        rows, row = spec.layout.sharding(("batch", None)), spec.layout.sharding(("batch",))
        self.empty_state = bind(_empty_state)
        self.shardings = _shardings(spec)
        self.init = jax.jit(self.empty_state, out_shardings=self.shardings)
        self.prefill = jax.jit(
            bind(_prefill_rows), in_shardings=(None, None, rows, row, row, rows, None),
            donate_argnums=(1,), **options,
        )
        self.prefill_scored = jax.jit(
            bind(_prefill_scored_rows), in_shardings=(None, None, rows, row, row, rows, rows, None),
            donate_argnums=(1,), **options,
        )
        self.insert = jax.jit(bind(_insert_rows, self.shardings.cache), donate_argnums=(0,))
        self.generate = jax.jit(bind(_decode), donate_argnums=(1,), **options)
        self.verify = jax.jit(bind(_decode_drafts), donate_argnums=(1,), **options)
        self.draft = jax.jit(bind(_draft), donate_argnums=(1,), **options)


# State


def _empty_state(spec: Spec) -> DecodeState:
    b, config = spec.config.slots, spec.config
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    params = [SamplingParams()] * b
    penalties = None
    if spec.num_penalised:
        penalties = Penalties.of(params).seen(
            zeros((b, 0)), zeros(b), zeros(b), spec.num_penalised, spec.layout
        )
    pages = functools.partial(
        cache.empty, pages=spec.shards * spec.num_pages, size=config.page_size,
        dtype=config.cache_dtype, unrolled=config.unroll,
    )
    kv = pages(spec.model)
    if spec.teacher is not None:
        kv = fusion.Pair(kv, pages(spec.teacher))
    slots = Slots(
        zeros(b), zeros(b), zeros(b), zeros(b), jnp.zeros((b, 2), jnp.uint32),
        jnp.full((b, MAX_STOP_IDS), -1, jnp.int32),
        *jax.tree.map(jnp.asarray, (SamplingRows.of(params), penalties)),
    )
    return DecodeState(kv, slots)


def _shardings(spec: Spec) -> DecodeState:
    """Cuts slots and pages over the data axes, key/value heads over the tensor axis, and the positions
    of each page over the context axis."""
    state = jax.eval_shape(functools.partial(_empty_state, spec))
    of_slots = lambda x: ("batch",) + (None,) * (x.ndim - 1)
    sharding = spec.layout.sharding
    slots = jax.tree.map(lambda x: sharding(of_slots(x)), state.slots)
    if spec.num_penalised:
        slots = dataclasses.replace(slots, penalties=Penalties.places(sharding))
    place = lambda path, x: sharding(cache.axes(path, x))
    return DecodeState(jax.tree_util.tree_map_with_path(place, state.cache), slots)


# Prefill


def _prefill_rows(spec: Spec, params, state, *arrays_and_blocks) -> tuple:
    """Prefills the first blocks of the rows of each shard."""
    *arrays, blocks = arrays_and_blocks
    size = spec.block_rows(arrays[0].shape[1])
    if size == spec.config.prefill_batch // spec.shards:
        state, _, routes = _forward_rows(spec, params, state, *arrays)
        return state, _replicated(spec.layout, routes)
    by_shard = lambda x: x.reshape(spec.shards, -1, *x.shape[1:])

    def block(i, x):
        rows = jax.lax.dynamic_slice_in_dim(by_shard(x), i * size, size, axis=1)
        return rows.reshape(-1, *x.shape[1:])

    def fill(i, carry):
        state, routes = carry
        state, _, new = _forward_rows(spec, params, state, *[block(i, x) for x in arrays])
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(
            by_shard(x), by_shard(new), i * size, axis=1
        ).reshape(x.shape)
        return state, jax.tree.map(put, routes, new)

    carry = state, _empty_routes(spec, *arrays[0].shape)
    state, routes = jax.lax.fori_loop(0, blocks, fill, carry)
    return state, _replicated(spec.layout, routes)


def _prefill_scored_rows(spec: Spec, params, state, *rows_and_targets):
    """Prefills all rows and returns (state, log-probs of the targets [R,T], routes)."""
    *rows, targets_rt, temperature = rows_and_targets
    state, x_rtd, routes = _forward_rows(spec, params, state, *rows)
    head, x_rtd = transformer.output_head(fusion.of_policy(params), spec.program, x_rtd)
    logp_rt = token_logprob(
        head, x_rtd, targets_rt, jnp.full(targets_rt.shape, temperature), LOGPROB_CHUNK,
        layout=spec.layout, numerics=spec.program.numerics,
    ).logp
    return state, *_replicated(spec.layout, (logp_rt, routes))


def _forward_rows(spec: Spec, params, state, tokens_rt, starts_r, lengths_r, table_rp):
    """Returns (state with the keys of the rows written, their hidden states [R,T,D], routes)."""
    positions_rt = starts_r[:, None] + jnp.arange(tokens_rt.shape[1])[None]
    attend = cache.fill(starts_r, lengths_r, table_rp, spec.layout, spec.program.numerics)
    x_rtd, _, kv, routed = _hidden(spec, params, tokens_rt, positions_rt, attend, state.cache)
    return DecodeState(kv, state.slots), x_rtd, _routes(spec, routed)


def _hidden(spec: Spec, params, tokens_bt, positions_bt, attend, kv) -> tuple:
    """Returns (hidden states of the policy, those of the teacher or None, caches, the policy's
    routes)."""
    rows = spec.program, tokens_bt, positions_bt, attend
    if not isinstance(params, fusion.Pair):
        x_btd, kv, routed = transformer.hidden(params, spec.model, *rows, kv, asked=_asked(spec))
        return x_btd, None, kv, routed
    assert spec.teacher is not None
    x_btd, own, routed = transformer.hidden(
        params.student, spec.model, *rows, kv.student, asked=_asked(spec)
    )
    theirs_btd, theirs, _ = transformer.hidden(params.teacher, spec.teacher, *rows, kv.teacher)
    return x_btd, theirs_btd, fusion.Pair(own, theirs), routed


# Routes


def _asked(spec: Spec) -> moe.Asked:
    return moe.Asked(routes=spec.config.record_routes)


def _routes(spec: Spec, routed: moe.Routed | None) -> jax.Array | None:
    """Returns the routes [B,T,L,k] of a forward pass as they are recorded; None if none are."""
    if routed is None:
        return None
    return jnp.moveaxis(routed.ids, 0, 2).astype(route_dtype(spec.model.experts.num_experts))


def _empty_routes(spec: Spec, *lead: int) -> jax.Array | None:
    if not spec.config.record_routes:
        return None
    return jnp.zeros((*lead, *spec.route_shape), route_dtype(spec.model.experts.num_experts))


# Insert


def _insert_rows(
    spec: Spec, pools, state, new, seeds_b, hashes_b, sources_b, targets_b, is_new_b, seen
) -> DecodeState:
    """Writes the slots where `is_new_b`, and copies page sources_b to page targets_b of each slot.

    `seen` is (tokens [B,T], prompt lengths [B], lengths [B]): the tokens that penalties count.
    """
    if not isinstance(state.cache, fusion.Pair):
        pools = fusion.of_policy(pools)
    new = dataclasses.replace(new, key=sampling.row_keys(seeds_b, hashes_b))
    if spec.num_penalised:
        penalties = new.penalties.seen(*seen, spec.num_penalised, spec.layout)
        new = dataclasses.replace(new, penalties=penalties)

    def choose(old, fresh):
        return jnp.where(is_new_b.reshape((-1,) + (1,) * (old.ndim - 1)), fresh, old)

    slots = jax.tree.map(choose, state.slots, new)
    return DecodeState(_copy_pages(spec.layout, pools, state.cache, sources_b, targets_b), slots)


def _copy_pages(layout: Layout, pools, kv, sources_b, targets_b):
    """Copies pages on every device, for the slots that it holds."""
    pools = jax.tree.map(lambda sharding: sharding.spec, pools)
    slots = layout.sharding(("batch",)).spec
    is_pool = lambda x: isinstance(x, (cache.KV, cache.StackedKV))
    copy = lambda kv, sources, targets: jax.tree.map(
        lambda pool: pool.copy(sources, targets), kv, is_leaf=is_pool
    )
    return layout.shard(copy, (pools, slots, slots), pools)(kv, sources_b, targets_b)


# Generate


def _decode(spec: Spec, params, state: DecodeState, table_bp, shift_b):
    """Samples `steps` tokens for each slot, or fewer once all slots have finished."""
    b, steps = spec.config.slots, spec.config.steps
    nothing = jnp.zeros((b, 0), jnp.int32), jnp.zeros(b, jnp.int32)

    def running(carry):
        i, state, _ = carry
        return (i < steps) & jnp.any(state.slots.remaining > 0)

    def body(carry):
        i, state, rows = carry
        state, row = _pass(spec, params, state, *nothing, table_bp, shift_b)
        write = lambda buffer, new: buffer.at[i].set(new[:, 0])
        return i + 1, state, jax.tree.map(write, rows, row)

    _, state, rows = jax.lax.while_loop(running, body, (0, state, _empty_draws(spec)))
    return state, _result(spec.layout, state, *rows)


def _decode_drafts(spec: Spec, params, state, drafts_bg, counts_b, table_bp, shift_b):
    """Samples the tokens after the last one and after each drafted one, in one forward pass."""
    state, rows = _pass(spec, params, state, drafts_bg, counts_b, table_bp, shift_b)
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
    return state, _result(spec.layout, state, *rows)


def _draft(spec: Spec, params, kv, slots: Slots, table_bp, shift_b):
    """Samples a draft of steps - 1 tokens after the last token of each slot. The last step writes the key of
    the last drafted token alone."""
    state, drawn = _decode(spec, params, DecodeState(kv, slots), table_bp, shift_b)
    drafts_bg, counts_b = drawn.tokens[:-1].T, drawn.valid[:-1].sum(axis=0, dtype=jnp.int32)
    return state.cache, *_replicated(spec.layout, (drafts_bg, counts_b))


def _result(
    layout: Layout, state: DecodeState, drawn: Draw, valid, routes, mass_kbgp
) -> ResultTokens:
    fields = {name: getattr(drawn, name) for name in DRAWN} | {"routes": routes}
    if mass_kbgp is not None:
        fields["page_mass"] = jnp.sum(jnp.where(valid[..., None, None], mass_kbgp, 0), axis=0)
    return _replicated(
        layout, ResultTokens(valid=valid, remaining=state.slots.remaining, **fields)
    )


def _replicated(layout: Layout, result: Any) -> Any:
    """Puts a result whole onto every device if the schedulers of several processes read it."""
    if not layout.is_shared:
        return result
    return jax.lax.with_sharding_constraint(result, layout.replicated())


def _empty_draws(spec: Spec) -> tuple[Draw, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns zeros in the shape of the results of a whole call: (sampled tokens with their
    fields, which of them are valid, routes, attention to pages)."""
    shape, widths = (spec.config.steps, spec.config.slots), spec.widths

    def zeros(field):
        width = (widths[field.width],) if field.width else ()
        return None if 0 in width else jnp.zeros((*shape, *width), field.dtype)

    drawn = Draw(**{name: zeros(f) for name, f in DRAWN.items()})
    of_pages = *shape, spec.config.page_groups, spec.config.pages_per_slot
    mass = jnp.zeros(of_pages) if spec.config.weighs_pages else None
    return drawn, jnp.zeros(shape, bool), _empty_routes(spec, *shape), mass


def _pass(spec: Spec, params, state: DecodeState, drafts_bg, counts_b, table_bp, shift_b):
    """Samples a token after the last one and after each drafted one, T = g + 1 in all.

    A sampled token is valid as long as the draft before it equals the sampled tokens.

    Returns: (state, (sampled tokens [B,T] as a Draw, is_valid [B,T], routes of the inputs, their
      attention [B,T,G,P] to each page or None)).
    """
    slots, config, numerics = state.slots, spec.config, spec.program.numerics
    width = drafts_bg.shape[1] + 1
    step_t, is_running = jnp.arange(width)[None], slots.remaining > 0
    limit_b = jnp.where(is_running, jnp.minimum(counts_b + 1, slots.remaining), 0)
    is_live_bt = step_t < limit_b[:, None]
    tokens_bt = jnp.concatenate([slots.token[:, None], drafts_bg], axis=1)
    position_bt = slots.position[:, None] + step_t
    index_bt = jnp.where(is_live_bt, position_bt - shift_b[:, None], 0)
    is_written_bt = is_live_bt & (position_bt >= slots.cached[:, None])
    attend = cache.append(
        index_bt, is_written_bt, table_bp, spec.layout, numerics, config.weighs_pages
    )
    caches, mass_btgp = state.cache, None
    groups, layers = config.page_groups, range(spec.model.num_layers)
    group_l = [transformer.group_of(i, groups, len(layers)) for i in layers]
    if config.weighs_pages:
        table_bgp = table_bp.reshape(config.slots, groups, -1)
        caches = tuple((kv, table_bgp[:, g]) for g, kv in zip(group_l, caches, strict=True))
    x_btd, theirs_btd, kv, routed = _hidden(spec, params, tokens_bt, position_bt, attend, caches)
    if config.weighs_pages:
        kv, masses = zip(*kv, strict=True)
        of_group = lambda g: sum(m for own, m in zip(group_l, masses, strict=True) if own == g)
        mass_btgp = jnp.stack([of_group(g) for g in range(groups)], axis=2)
    rows = lambda x: x.reshape(-1, *x.shape[2:])
    each = lambda x: jnp.repeat(x, width, axis=0)
    sampling_m, student_mv = jax.tree.map(each, slots.rows), None
    logits_mv = transformer.head_logits(fusion.of_policy(params), spec.program, rows(x_btd))
    logits_mv = spec.inject(logits_mv, rows(position_bt + 1))
    if spec.teacher is not None:
        student_mv = logits_mv
    if isinstance(params, fusion.Pair):
        teacher_mv = transformer.head_logits(params.teacher, spec.program, rows(theirs_btd))
        logits_mv = fusion.fused(logits_mv, teacher_mv, sampling_m.alpha)
    penalties_m = _penalties_along(spec.layout, slots.penalties, drafts_bg, is_live_bt)
    drawn_m = sampling.sample(
        logits_mv, sampling_m, each(slots.key), rows(position_bt + 1), spec.layout,
        penalties=penalties_m, top_n=config.top_n, num_kept=config.num_kept, numerics=numerics,
        student_bv=student_mv,
    )
    if spec.num_logits:
        logits_mv = sampling.distribution(logits_mv, sampling_m, penalties_m)
        drawn_m = dataclasses.replace(drawn_m, logits=logits_mv)
    drawn = jax.tree.map(lambda x: x.reshape(config.slots, width, *x.shape[1:]), drawn_m)
    slots, is_valid_bt = _advance(spec.layout, slots, drawn.tokens, drafts_bg, is_live_bt)
    return DecodeState(kv, slots), (drawn, is_valid_bt, _routes(spec, routed), mass_btgp)


def _penalties_along(layout: Layout, penalties: Penalties | None, drafts_bg, is_live_bt):
    """Returns the penalties of the rows [B*T] of a pass, updated after each token of the draft."""
    if penalties is None:
        return None
    along = [penalties]
    for t in range(drafts_bg.shape[1]):
        along.append(along[-1].draw(drafts_bg[:, t], is_live_bt[:, t + 1], layout))
    rows = lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:])
    return jax.tree.map(rows, *along)


def _advance(
    layout: Layout, slots: Slots, drawn_bt, drafts_bg, is_live_bt
) -> tuple[Slots, jax.Array]:
    """Advances the slots past the valid sampled tokens. Returns (slots, is_valid [B,T]): tokens are
    valid up to the first one that is a stop id or differs from the draft."""
    is_stop_bt = jnp.any(drawn_bt[..., None] == slots.stop_ids[:, None], axis=-1)
    goes_on_bg = (drawn_bt[:, :-1] == drafts_bg) & ~is_stop_bt[:, :-1] & is_live_bt[:, 1:]
    goes_on_bg = jnp.cumprod(goes_on_bg, axis=1, dtype=jnp.int32).astype(bool)
    is_valid_bt = jnp.concatenate([is_live_bt[:, :1], goes_on_bg], axis=1)
    count_b = jnp.sum(is_valid_bt, axis=1)
    last = lambda x_bt: chosen(x_bt, jnp.maximum(count_b - 1, 0)) if x_bt.shape[1] > 1 else x_bt[:, 0]
    is_ended = last(is_stop_bt) | (count_b == 0)
    remaining = jnp.where(is_ended, 0, slots.remaining - count_b)
    penalties = slots.penalties
    if penalties is not None:
        for t in range(drawn_bt.shape[1]):
            penalties = penalties.draw(drawn_bt[:, t], is_valid_bt[:, t], layout)
    slots = dataclasses.replace(
        slots,
        penalties=penalties,
        token=jnp.where(count_b > 0, last(drawn_bt), slots.token),
        position=slots.position + jnp.where(remaining > 0, count_b, 0),
        remaining=remaining,
    )
    return slots, is_valid_bt
