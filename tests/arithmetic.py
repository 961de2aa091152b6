"""An engine made of arithmetic, and the tokens it must draw.

Its pages hold what a real cache holds in essence: which token at which position was written there
by which weights. A token is drawn from the sum of all that is read in the pages of its table, so
sharing, copying, eviction or freeing of the wrong page makes another token.
"""

import dataclasses

import numpy as np

from jaxrl_tis.engine.protocol import Prefilled, ResultTokens
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler

VOCAB = 23
PRECISION = 2**20  # sums are recorded in float32 modulo this
GARBAGE = 123_457  # what an unwritten position holds
EXPERTS = 251  # a prime, so that a step of any size goes round them all


def key(token, position, weights):
    """What `weights` write for a token at a position."""
    return (position + 1) * token + 7 * weights


def drawn(total, request, position, weights):
    """(token, logp) at a position, from the sum of the keys before it."""
    total = int(total) + 5 * request.seed + 3 * position + 11 * weights
    return total % VOCAB, float(-(total % PRECISION))


def attention(query, position):
    """What the query at a position gives to the key at another one."""
    return (7 * query + 13 * position) % 11


def routed(totals, positions, weights, shape, num_experts=EXPERTS):
    """The experts [n,L,k] of tokens, from the sums of all keys up to each token's own."""
    layers, chosen = shape
    mixed = np.asarray(totals, np.int64) * 7919 + np.asarray(positions) * 131 + weights * 17
    mixed = np.abs(mixed[:, None, None] + 1009 * np.arange(layers)[:, None])
    steps = 1 + mixed // num_experts % (num_experts - 1)
    ids = (mixed + steps * np.arange(chosen)) % num_experts
    return ids.astype("uint8" if num_experts <= 256 else "uint16")


def request(id, prompt=(1, 2, 3), seed=0, partial=None, **sampling):
    prompt = np.array(prompt, np.int32)
    return Request(id, prompt, seed, SamplingParams(**sampling), partial)


def alone(request, weights=0):
    """(tokens, stop_reason) of a request that runs alone under one set of weights."""
    history, tokens = list(request.prompt), []
    while len(tokens) < request.sampling.max_tokens:
        total = sum(key(token, s, weights) for s, token in enumerate(history))
        token, _ = drawn(total, request, len(history), weights)
        history.append(token)
        tokens.append(token)
        if token in request.sampling.stop_ids:
            return tokens, "stop"
    return tokens, "length"


def text_of(tokens):
    return "".join(chr(ord("a") + token) for token in tokens)


def assert_replays(trajectory, request):
    """The record has the tokens and log-probs that follow from its own versions, segments and
    evict_step.

    When a segment begins all positions so far are written by the weights of kv_version; the key
    of a token drawn in it is written when the next one is drawn, by the weights that draw that.
    So have its routes: a prefill decides those of a new segment's tokens that had none, and the
    pass that draws a token that of the token before. Given tokens are read by the prefill of the
    segment after them. The last token of a turn may have been read before, behind a stop string.
    """
    t, start = trajectory, len(trajectory.prompt)
    history = np.concatenate([t.prompt, t.tokens])
    evict_step = t.evict_step if len(t.evict_step) else np.full(len(history), 2**31 - 1)
    writers, out, routes, known = np.zeros(len(history), np.int64), [], [], 0
    for i in np.flatnonzero(t.mask):
        position = start + i
        if is_filled := i == 0 or t.segment[i] != t.segment[i - 1]:
            writers[:position] = t.kv_version[i]
        else:
            writers[position - 1] = t.version[i]
        s = np.flatnonzero(position - 1 < evict_step[:position])
        keys = key(history[s].astype(np.int64), s, writers[s])
        out.append(drawn(keys.sum(), request, position, int(t.version[i])))
        if t.routes.shape[1]:
            new, known = slice(known - position, None), position
            by = t.kv_version[i] if is_filled else t.version[i]
            totals = np.cumsum(keys)[new]
            routes.append(routed(totals, s[new], int(by), t.routes.shape[1:], experts_of(t)))
    assert t.tokens[t.mask].tolist() == [token for token, _ in out], t.id
    np.testing.assert_array_equal(t.logp_behav[t.mask], [logp for _, logp in out])
    if routes:
        routes = np.concatenate(routes)
        is_stopped = t.stop_reason == "stop" or t.num_given > 0
        assert len(t.routes) - len(routes) in (0, int(is_stopped)), t.id
        is_end = np.zeros(len(history), bool)  # of a turn with another after it
        is_end[start:-1] = t.mask[:-1] & ~t.mask[1:]
        is_sure = ~is_end[: len(routes)]
        np.testing.assert_array_equal(t.routes[: len(routes)][is_sure], routes[is_sure], t.id)


def experts_of(trajectory):
    return EXPERTS if trajectory.routes.dtype == np.uint8 else 257


def assert_first_routes(trajectory, passes, partial=None):
    """The record has the routes of the first pass over each token, of these of its request since it
    was added, and counts what later ones chose."""
    begun = lambda: ([], np.zeros(2, int)) if partial is None else (
        list(partial.routes), np.array(partial.rerouted)
    )
    most = len(trajectory.prompt) + len(trajectory.tokens)
    rows, again = begun()
    for id, is_prefill, start, routes in passes:
        if id != trajectory.id:
            continue
        if is_prefill and len(routes) <= len(rows):
            rows, again = begun()  # it started again
        for position, route in enumerate(routes, start):
            if position >= len(rows):
                rows.append(route)
                assert len(rows) == position + 1
            elif position < most:
                is_other = [set(old) != set(new) for old, new in zip(rows[position], route, strict=True)]
                again += len(is_other), sum(is_other)
    if trajectory.stop_reason == "abort" and len(rows) >= most:
        rows, again = begun()  # it would have started again
    np.testing.assert_array_equal(trajectory.routes, np.reshape(
        rows[:most], (-1, *trajectory.routes.shape[1:])
    ), trajectory.id)
    assert trajectory.rerouted.tolist() == again.tolist(), trajectory.id


@dataclasses.dataclass
class Slot:
    request: Request
    token: int
    position: int
    remaining: int
    cached: int
    is_filled: bool = False  # and no token was drawn since


@dataclasses.dataclass
class State:
    keys: np.ndarray
    positions: np.ndarray
    routes: np.ndarray  # of the pass that wrote the key
    slots: list
    ended: set  # slots that finished in the last call: who has not read it may not know
    is_consumed: bool = False


class Engine:
    """Parameters are an integer. A state is dead once it is passed on, as a donated one is.

    `passes` has what routers did in the order of the calls, (id, whether a prefill, position of the
    first token, routes [n,L,k]): of a filled sequence as its own pages have it once it decodes, and
    of every pass that draws a token.
    """

    max_stop_ids = 2
    vocab_size = 1000
    num_penalised = top_n = num_kept = num_teachers = 0
    num_logits = 2
    quant_id = "arithmetic"

    def __init__(
        self, slots=3, steps=2, shards=1, max_length=40, page_size=4, num_pages=None,
        prefill_batch=2, prefill_chunk=8, is_read_late=False, route_shape=(0, 0),
        num_experts=EXPERTS, weighs_pages=False,
    ):
        self.weighs_pages = weighs_pages
        self.route_shape, self.num_experts = route_shape, num_experts if any(route_shape) else 0
        self.passes = []
        self.slots, self.steps, self.shards, self.max_length = slots, steps, shards, max_length
        self.page_size, self.prefill_batch = page_size, prefill_batch
        self.prefill_chunk, self.is_read_late = prefill_chunk, is_read_late
        per_slot = -(-max_length // page_size)
        self.num_pages = num_pages or slots // shards * per_slot + 2
        self.prefilled = []  # of each call: (start, tokens) of its chunks
        self.inserted = []  # of each call: {slot: id}
        self.verified = []  # of each call: tokens drafted in each slot
        self.reads = {}  # (id, position of the query) -> positions it read

    def bucket(self, length):
        return 4 if length <= 4 else self.prefill_chunk

    def init_state(self):
        shape = (self.shards, self.num_pages, self.page_size)
        keys, positions = np.full(shape, GARBAGE), np.full(shape, -1)
        return State(keys, positions, self._no_routes(*shape), [None] * self.slots, set())

    def _no_routes(self, *lead):
        """Rows that nobody wrote: one expert for all."""
        dtype = "uint8" if self.num_experts <= 256 else "uint16"
        return np.zeros((*lead, *self.route_shape), dtype)

    def _routed(self, totals, positions, weights):
        return routed(totals, positions, weights, self.route_shape, self.num_experts)

    def prefill(self, params, state, chunks):
        state = self._use(state)
        self.prefilled.append([(chunk.start, tuple(chunk.tokens.tolist())) for chunk in chunks])
        rows = [chunk.shard for chunk in chunks]
        assert max(map(rows.count, rows)) <= self.prefill_batch // self.shards
        assert len({self.bucket(len(chunk.tokens)) for chunk in chunks}) == 1
        for chunk in chunks:
            assert 0 < len(chunk.tokens) <= self.prefill_chunk
            assert chunk.start % self.page_size == 0, "a chunk begins a page"
            self._write(
                state, chunk.shard, chunk.pages,
                chunk.start + np.arange(len(chunk.tokens)), chunk.tokens, params,
            )
        routes = {}
        if any(self.route_shape):
            # The chunks of a shard from its last row to its first.
            taken = [rows[i + 1 :].count(shard) for i, shard in enumerate(rows)]
            per_shard = self.prefill_batch // self.shards
            rows = [(shard + 1) * per_shard - 1 - n for shard, n in zip(rows, taken, strict=True)]
            routes = dict(rows=rows, routes=self._route_chunks(params, state, chunks, rows))
        if chunks[0].targets is None:
            return state, Prefilled(**routes)
        scores = [self._scores(params, state, chunk) for chunk in chunks]
        return state, Prefilled(scores, **routes)

    def _route_chunks(self, weights, state, chunks, rows):
        """The routes [R,T,L,k] of a call, which also stay in the pages."""
        length = self.bucket(max(len(chunk.tokens) for chunk in chunks))
        out = self._no_routes(self.prefill_batch, length)
        for row, chunk in zip(rows, chunks, strict=True):
            end = chunk.start + len(chunk.tokens)
            positions = np.arange(chunk.start, end)
            read = state.keys[chunk.shard, np.array(chunk.pages)].reshape(-1)[:end]
            new = self._routed(np.cumsum(read)[chunk.start :], positions, weights)
            pages = np.array(chunk.pages)[positions // self.page_size]
            state.routes[chunk.shard, pages, positions % self.page_size] = new
            out[row, : len(new)] = new
        return out

    def _scores(self, weights, state, chunk):
        """Minus the sum of all keys up to each token, less its target."""
        end = chunk.start + len(chunk.tokens)
        read = state.keys[chunk.shard, np.array(chunk.pages)].reshape(-1)[:end]
        targets = np.zeros(len(chunk.tokens), int)
        targets[: len(chunk.targets)] = chunk.targets
        return -(np.cumsum(read)[chunk.start :] + targets).astype(np.float32)

    def _write(self, state, shard, pages, positions, tokens, weights):
        pages, offsets = np.array(pages)[positions // self.page_size], positions % self.page_size
        assert (pages > 0).all(), "page 0 belongs to nobody"
        state.keys[shard, pages, offsets] = key(tokens.astype(np.int64), positions, weights)
        state.positions[shard, pages, offsets] = positions

    def insert(self, state, rows):
        state = self._use(state)
        self.inserted.append({slot: row.request.id for slot, row in rows.items()})
        for slot, row in rows.items():
            source, target = row.copy
            shard = slot * self.shards // self.slots
            for pool in (state.keys, state.positions, state.routes):
                pool[shard, target] = pool[shard, source]
            state.slots[slot] = Slot(
                row.request, int(row.tokens[-1]), len(row.tokens) - 1, row.remaining, row.cached,
                is_filled=row.cached == len(row.tokens),
            )
        return state

    def release(self, state, slots):
        state = self._use(state)
        for slot in slots:
            state.slots[slot] = None
        return state

    def generate(self, params, state, table, shift):
        state = self._use(state)
        shape = (self.steps, self.slots)
        tokens, logp = np.full(shape, -9), np.full(shape, np.nan)
        valid, remaining = np.zeros(shape, bool), np.zeros(self.slots, int)
        routes = self._no_routes(*shape)
        mass = np.zeros((self.slots, len(table[0])), np.float32)
        late, state.ended = state.ended, set()
        for b in range(self.slots):
            if state.slots[b] is None:
                is_late = self.is_read_late and b in late
                is_clear = not table[b].any() and not shift[b]
                assert is_clear or is_late, f"slot {b} is free, its table is not"
                continue
            for k in range(self.steps):
                if state.slots[b].remaining:
                    drawn_bk = self._draw(params, state, b, table[b], int(shift[b]))
                    tokens[k, b], logp[k, b], routes[k, b] = drawn_bk
                    valid[k, b] = True
                    query = state.slots[b].position - 1
                    for i, position in enumerate(self.reads[state.slots[b].request.id, query]):
                        mass[b, i // self.page_size] += attention(query, position)
            remaining[b] = state.slots[b].remaining
            if not remaining[b]:
                state.slots[b] = None
                state.ended.add(b)
        logits = np.stack([logp, logp - 0.5], axis=-1)  # a vocabulary of two
        return state, ResultTokens(
            tokens, logp, logp - 0.5, -logp, logits, valid=valid, remaining=remaining,
            routes=routes if any(self.route_shape) else None,
            page_mass=mass[:, None] if self.weighs_pages else None,
        )

    def verify(self, params, state, drafts, counts, table, shift):
        state = self._use(state)
        width = drafts.shape[1] + 1
        out = np.full((width, self.slots), -9), np.full((width, self.slots), np.nan)
        valid, remaining = np.zeros((width, self.slots), bool), np.zeros(self.slots, int)
        routes = self._no_routes(width, self.slots)
        self.verified.append(counts.tolist())
        for b, slot in enumerate(state.slots):
            if slot is None:
                assert not table[b].any() and not counts[b], f"slot {b} is free"
                continue
            assert counts[b] < slot.remaining, "a draft beyond the last token"
            guessed = drafts[b, : counts[b]]
            for t, token in enumerate(guessed, 1):  # all keys are written before one is read
                self._write_one(params, state, b, table[b], token, slot.position + t, int(shift[b]))
            for t in range(counts[b] + 1):
                drawn_tb = self._draw(params, state, b, table[b], int(shift[b]))
                out[0][t, b], out[1][t, b], routes[t, b] = drawn_tb
                valid[t, b] = True
                if not slot.remaining or t < counts[b] and slot.token != guessed[t]:
                    break
            remaining[b] = slot.remaining
            if not slot.remaining:
                state.slots[b] = None
        tokens, logp = out
        logits = np.stack([logp, logp - 0.5], axis=-1)
        return state, ResultTokens(
            tokens, logp, logp - 0.5, -logp, logits, valid=valid, remaining=remaining,
            routes=routes if any(self.route_shape) else None,
        )

    def _write_one(self, weights, state, b, pages, token, position, shift):
        page, offset = divmod(position - shift, self.page_size)
        assert pages[page] > 0, "page 0 belongs to nobody"
        at = b * self.shards // self.slots, pages[page], offset
        state.keys[at], state.positions[at] = key(int(token), position, weights), position

    def _draw(self, weights, state, b, pages, shift):
        slot, shard = state.slots[b], b * self.shards // self.slots
        index = slot.position - shift
        if is_new := slot.position >= slot.cached:
            self._write_one(weights, state, b, pages, slot.token, slot.position, shift)
        read = pages[: index // self.page_size + 1]
        seen = lambda pool: pool[shard, read].reshape(-1)[: index + 1]
        self.reads[slot.request.id, slot.position] = seen(state.positions).tolist()
        total = seen(state.keys).sum()
        route = self._no_routes(1)
        if any(self.route_shape):
            route = self._routed([total], [slot.position], weights)
            if slot.is_filled:
                rows = state.routes[shard, read].reshape(-1, *self.route_shape)[: index + 1]
                self.passes.append((slot.request.id, True, 0, rows))
                slot.is_filled = False
            if is_new:  # as its key
                offset = index % self.page_size
                state.routes[shard, pages[index // self.page_size], offset] = route[0]
            self.passes.append((slot.request.id, False, slot.position, route))
        token, logp = drawn(total, slot.request, slot.position + 1, weights)
        slot.token, slot.position = token, slot.position + 1
        slot.remaining = 0 if token in slot.request.sampling.stop_ids else slot.remaining - 1
        return token, logp, route[0]

    def non_finite(self, params, tokens):
        return f"weights {params} break after {tokens.tolist()}"

    def _use(self, state):
        assert not state.is_consumed, "a donated state was used again"
        state.is_consumed = True
        return dataclasses.replace(state, is_consumed=False)


class Overflowing(Engine):
    """The log-probs of requests whose id begins with "bad" are not finite from their third token on."""

    def _draw(self, weights, state, b, *args):
        token, logp, route = super()._draw(weights, state, b, *args)
        request, position = state.slots[b].request, state.slots[b].position
        is_bad = request.id.startswith("bad") and position >= len(request.prompt) + 2
        return token, float("nan") if is_bad else logp, route


def drain(scheduler, limit=1000):
    """Trajectories of all that is pending; fails instead of running for ever."""
    out = []
    for _ in range(limit):
        if not scheduler.pending:
            assert all(pages.used == 0 for pages in scheduler.pages), "pages are lost"
            return out
        out += scheduler.step()
    raise AssertionError(f"{scheduler.pending} requests never ended")


def started(engine, requests, **options):
    scheduler = Scheduler(engine, 0, **options)
    for r in requests:
        scheduler.add(r)
    return scheduler


def being_filled(length, max_tokens):
    """(scheduler, its engine, `short`, which decodes since one step, `long`, a prompt of this
    length that is filled in chunks of 4 beside it, none of them yet)."""
    engine = Engine(slots=2, steps=1, prefill_chunk=4)
    short = request("short", max_tokens=9)
    long = request("long", np.arange(length), max_tokens=max_tokens)
    scheduler = started(engine, [short], prefill_calls=1)
    scheduler.step()
    scheduler.add(long)
    return scheduler, engine, short, long


def assert_as_alone(trajectories, requests, weights=0):
    assert sorted(t.id for t in trajectories) == sorted(r.id for r in requests)
    by_id = {r.id: r for r in requests}
    for t in trajectories:
        assert (t.tokens.tolist(), t.stop_reason) == alone(by_id[t.id], weights), t.id
