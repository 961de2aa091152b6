"""Routes on the host, on an engine made of arithmetic: every row of a record is that of the first
pass over its token. `routes_model_test.py` has a real model, `scheduler_fuzz_test.py` any order of
events. The test of each known mistake of capturing routes:

| mistake | test |
|---|---|
| prompt rows are zeros, or another layer's or row's | `test_a_page_remembers_its_part_of_a_call` |
| the token between two turns has no row, the second part is shifted by one | `test_a_resumed_record_keeps_the_rows_that_it_had` |
| padding has a route | `test_padding_and_what_was_there_before_are_in_no_record` |
| rows behind the last valid one are repeated after a chunk | `test_every_chunk_of_a_prompt_has_its_own_rows` |
| the last prompt token has no row where nothing is decoded after it | `test_a_record_of_one_token_has_all_rows_of_its_prompt` |
| a prompt longer than the buffer | `test_every_chunk_of_a_prompt_has_its_own_rows` |
| rows of the page's former owner | `test_a_page_that_is_used_again_has_the_rows_of_its_new_tokens` |
| preemption drops the rows, or adds them twice | `test_a_sequence_that_loses_its_pages_keeps_its_rows` |
| an asynchronous scheduler records what is not computed yet | `test_records_are_the_same_if_tokens_are_read_late` |
| a token has two rows, or two tokens one | `rollouts/record_check_test.py`: `routes` |
| a continued rollout loses the rows of its first part | `test_a_resumed_record_keeps_the_rows_that_it_had` |
| a second pass over a token replaces or shifts its rows | `test_the_first_pass_decides_and_later_ones_are_counted` |
"""

import dataclasses
import types

import jax
import numpy as np
import pytest

from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.policies import LongestFirst
from jaxrl_tis.engine.protocol import Chunk
from jaxrl_tis.engine.routes import Block, PageRoutes, SequenceRoutes
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.rollouts import serialize
from tests import arithmetic
from tests.arithmetic import alone, assert_first_routes, assert_replays, request

# Pages, by hand: routes of one layer and one expert are written as their number.


def rows(*numbers):
    return np.array(numbers, np.uint8)[:, None, None]


def numbers(routes):
    return routes[:, 0, 0].tolist()


def test_a_page_remembers_its_part_of_a_call():
    result = np.arange(24, dtype=np.uint8).reshape(3, 8, 1, 1)  # [R,T,l,k]
    pages = PageRoutes(shards=2, size=4)
    # Positions 4 to 10 of a sequence in row 2, and a page of the other shard in row 0.
    chunks = [Chunk(0, np.zeros(7), 4, [9, 7, 5]), Chunk(1, np.zeros(4), 0, [7])]
    pages.write(chunks, [2, 0], result)
    first, second = pages.of(0, [7, 5])
    assert numbers(first.read(4)) == [16, 17, 18, 19]
    assert numbers(second.read(4))[:3] == [20, 21, 22]
    assert [numbers(b.read(4)) for b in pages.of(1, [7])] == [[0, 1, 2, 3]]
    with pytest.raises(KeyError):
        pages.of(0, [9])  # nothing wrote it
    result[:] = 99
    assert numbers(first.read(4)) == [16, 17, 18, 19], "read once and copied"


def test_who_has_a_block_keeps_it_when_its_page_is_written_again():
    pages = PageRoutes(shards=1, size=2)
    chunk = Chunk(0, np.zeros(2), 0, [3])
    pages.write([chunk], [0], np.full((1, 2, 1, 1), 5, np.uint8))
    (old,) = pages.of(0, [3])
    pages.write([chunk], [0], np.full((1, 2, 1, 1), 6, np.uint8))
    (new,) = pages.of(0, [3])
    assert numbers(old.read(2)) == [5, 5] and numbers(new.read(2)) == [6, 6]


def test_unread_blocks_are_those_since_the_last_time():
    pages, log = PageRoutes(shards=1, size=2), []

    class Result:
        def __array__(self, dtype=None, copy=None):
            log.append(1)
            return np.zeros((1, 4, 1, 1), np.uint8)

    pages.write([Chunk(0, np.zeros(4), 0, [3, 4])], [0], Result())
    unread = pages.pop_unread()
    assert len(unread) == 2 and pages.pop_unread() == [] and not log
    pages.read(unread)
    pages.read(unread)
    assert len(log) == 2
    pages.forget()
    with pytest.raises(KeyError):
        pages.of(0, [3])


def sequence_routes(begun=(), again=(0, 0)):
    return SequenceRoutes(2, rows(*begun), np.array(again, np.int32))


def blocks(*values):
    """Blocks of pages of two."""
    return [Block(lambda: rows(*values), start) for start in range(0, len(values), 2)]


def joined(routes, most=99):
    found, again = routes.joined(most)
    assert again.dtype == np.int32
    return numbers(found), again.tolist()


def test_the_first_pass_decides_and_later_ones_are_counted():
    routes = sequence_routes()
    assert joined(routes) == ([], [0, 0])
    routes.filled(blocks(1, 2, 3, 99), 3)  # the last page is not full
    assert joined(routes) == ([], [0, 0]), "no token was sampled after the pass"
    routes.sampled(2, rows(3, 4))  # the last prompt token again, and a first sampled one
    assert joined(routes) == ([1, 2, 3, 4], [1, 0])
    routes.filled(blocks(1, 7, 3, 8, 5, 99), 5)  # its pages were lost and built again
    routes.sampled(4, rows(6, 9))
    # 4 tokens again, of which 2 differ; then token 4, that the prefill read first.
    assert joined(routes) == ([1, 2, 3, 4, 5, 9], [1 + 4 + 1, 2 + 1])
    assert joined(routes, 5) == ([1, 2, 3, 4, 5], [6, 3])
    assert joined(routes, 2) == ([1, 2], [2, 1]), "of the tokens of the record alone"


def test_a_prefill_counts_if_a_token_is_sampled_after_it():
    routes = sequence_routes()
    routes.filled(blocks(1, 2), 2)
    routes.filled(blocks(3, 4), 2)  # after it lost its pages, under other weights
    routes.sampled(1, rows(4))
    assert joined(routes) == ([3, 4], [1, 0])


def test_other_sets_are_counted_by_layer_and_the_order_does_not_count():
    route = lambda *layers: np.array([layers], np.uint8)
    routes = SequenceRoutes(2, route((1, 2), (3, 4), (5, 6)), np.array((30, 7), np.int32))
    routes.sampled(0, route((2, 1), (3, 5), (5, 6)))
    found, again = routes.joined(9)
    np.testing.assert_array_equal(found, route((1, 2), (3, 4), (5, 6)))
    assert again.tolist() == [33, 8]


def test_what_starts_again_has_what_its_request_has():
    routes = sequence_routes(begun=(1, 2, 3), again=(5, 4))
    routes.filled(blocks(1, 2, 3, 4), 4)
    routes.sampled(3, rows(4, 5))
    assert joined(routes) == ([1, 2, 3, 4, 5], [5 + 3 + 1, 4])
    routes.restart()
    assert joined(routes) == ([1, 2, 3], [5, 4])


def test_a_token_without_a_pass_is_no_record():
    routes = sequence_routes(begun=(1, 2))
    routes.sampled(3, rows(4))
    with pytest.raises(AssertionError, match="no pass over token 2"):
        routes.joined(9)


def test_a_sequence_keeps_its_own_rows_and_not_those_of_all_slots():
    call, routes = np.zeros((2, 500, 1, 1), np.uint8), sequence_routes()
    routes.sampled(0, call[:, 3])
    call[:] = 9
    assert joined(routes) == ([0, 0], [0, 0])


@pytest.mark.parametrize("experts, dtype", [(2, "uint8"), (256, "uint8"), (257, "uint16")])
def test_the_dtype_holds_every_expert(experts, dtype):
    engine = types.SimpleNamespace(route_shape=(3, 2), num_experts=experts, page_size=4)
    found, _ = SequenceRoutes.of(None, engine).joined(9)
    assert found.dtype == dtype and found.shape == (0, 3, 2)
    engine.route_shape = (0, 0)
    assert SequenceRoutes.of(None, engine) is None


# The scheduler


class Run:
    """A scheduler with routes, of which every record is checked when it comes back."""

    def __init__(self, requests=(), is_read_late=False, options=None, **sizes):
        sizes = dict(route_shape=(2, 2)) | sizes
        self.engine = arithmetic.Engine(is_read_late=is_read_late, **sizes)
        self.scheduler = Scheduler(
            self.engine, 0, async_scheduling=is_read_late, decode=arithmetic.text_of, **options or {}
        )
        self.requests, self.added_at, self.found = {}, {}, {}
        self.version = 0
        for r in requests:
            self.add(r)

    def add(self, r):
        self.scheduler.add(r)
        self.requests[r.id], self.added_at[r.id] = r, len(self.engine.passes)

    def take(self, trajectories):
        for t in trajectories:
            r = self.requests[t.id]
            assert_replays(t, r)
            assert_first_routes(t, self.engine.passes[self.added_at[t.id] :], r.partial)
            self.found[t.id] = t
        return trajectories

    def step(self, times=1):
        return [t for _ in range(times) for t in self.take(self.scheduler.step())]

    def update(self):
        self.version += 1
        self.scheduler.set_params(self.version, self.version)

    def pause(self, mode):
        return self.take(self.scheduler.pause(mode))

    def resume(self):
        """Aborts all and adds what came back again, through JSON."""
        for t in self.pause("abort"):
            partial = serialize.read_trajectory(serialize.trajectory_text(t))
            self.add(dataclasses.replace(self.requests[t.id], partial=partial))

    def drain(self):
        self.take(arithmetic.drain(self.scheduler))
        return self.found


def prompt_rows(tokens, weights=0, shape=(2, 2)):
    """The rows of a prompt that is filled under these weights."""
    positions = np.arange(len(tokens))
    sums = np.cumsum(arithmetic.key(np.array(tokens), positions, weights))
    return arithmetic.routed(sums, positions, weights, shape)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 17])
def test_a_group_shares_the_rows_of_its_prompt(length):
    prompt = np.arange(length) + 2
    group = [request(f"g{i}", prompt, seed=i, max_tokens=1 + i) for i in range(4)]
    run = Run(group)
    for t in run.drain().values():
        assert t.routes.shape == (length + len(t.tokens) - 1, 2, 2) and t.routes.dtype == np.uint8
        np.testing.assert_array_equal(t.routes[:length], prompt_rows(prompt))
        # Decode reads the last prompt token again, in two layers.
        assert t.rerouted.tolist() == [2, 0] and t.rerouted.dtype == np.int32
    assert run.scheduler.stats.shared > 0
    assert len({t.routes[length:].tobytes() for t in run.found.values()}) == 4, "no row repeats"


def test_rows_by_hand():
    # Keys of the prompt (1, 2): 1 and 4. Position 2 is drawn from 5 + 6 = 11, whose key is 33.
    (t,) = Run([request("a", (1, 2), max_tokens=2)]).drain().values()
    assert t.tokens[0] == 11
    # sum * 7919 + position * 131: 7919, 39595 + 131, 38 * 7919 + 262, and 1009 more in layer 1.
    mixed = np.array([[n, n + 1009] for n in (7919, 39726, 301184)])
    steps = 1 + mixed // 251 % 250
    expected = np.stack([mixed % 251, (mixed + steps) % 251], axis=-1)
    np.testing.assert_array_equal(t.routes, expected)


def test_a_record_of_one_token_has_all_rows_of_its_prompt():
    for length in (1, 4, 5):
        (t,) = Run([request("a", range(length), max_tokens=1)]).drain().values()
        np.testing.assert_array_equal(t.routes, prompt_rows(range(length)))


@pytest.mark.parametrize("length", [16, 17, 30])
def test_every_chunk_of_a_prompt_has_its_own_rows(length):
    long = request("long", np.arange(length), max_tokens=3)
    run = Run([request("short", max_tokens=9)], slots=2, steps=1, prefill_chunk=4,
              options=dict(prefill_calls=1))
    run.step()
    run.add(long)
    run.drain()
    assert len(run.engine.prefilled) == 1 + -(-length // 4)
    np.testing.assert_array_equal(run.found["long"].routes[:length], prompt_rows(range(length)))


def test_a_prompt_that_finds_pages_has_the_rows_of_who_filled_them():
    run = Run([request("first", range(9), max_tokens=2)])
    run.drain()
    run.add(request("second", [*range(8), 20, 21], max_tokens=2))
    run.drain()
    assert run.scheduler.stats.cached == 8 and run.engine.prefilled[-1] == [(8, (20, 21))]
    np.testing.assert_array_equal(
        run.found["second"].routes[:10], prompt_rows([*range(8), 20, 21])
    )


def test_prompts_that_come_together_adopt_pages_with_their_rows():
    alike = [request(f"r{i}", [*range(8), i], max_tokens=2) for i in range(3)]
    run = Run(alike, prefill_batch=1, prefill_chunk=4)
    run.drain()
    assert run.scheduler.stats.cached == 16
    for i in range(3):
        np.testing.assert_array_equal(run.found[f"r{i}"].routes[:9], prompt_rows([*range(8), i]))


def test_a_page_that_is_used_again_has_the_rows_of_its_new_tokens():
    run = Run(slots=1, max_length=12, num_pages=5)
    for i in range(6):
        run.add(request(f"r{i}", (i, 9, 8, 7, i + 1, 3), max_tokens=3))
        run.drain()
        np.testing.assert_array_equal(
            run.found[f"r{i}"].routes[:6], prompt_rows((i, 9, 8, 7, i + 1, 3))
        )


def test_padding_and_what_was_there_before_are_in_no_record():
    """A padded row, and one of a slot that drew nothing, has one expert twice."""
    requests = [request(f"r{i}", range(1 + i), seed=i, max_tokens=1 + 3 * i) for i in range(6)]
    for t in Run(requests, steps=3).drain().values():
        assert (t.routes[..., 0] != t.routes[..., 1]).all()


def test_rejected_drafts_leave_no_rows():
    group = [request(f"g{i}", seed=i % 2, max_tokens=20) for i in range(6)]
    run = Run(group, slots=2, options=dict(drafts=Drafts(2, 7, 1000)))
    run.drain()
    stats = run.scheduler.stats
    assert stats.drafted > stats.accepted > 0
    assert all(len(t.routes) == 3 + 20 - 1 for t in run.found.values())


def test_a_sequence_that_loses_its_pages_keeps_its_rows():
    requests = [request(id, (1, 2, i), max_tokens=20) for i, id in enumerate("abc")]
    few = dict(slots=3, steps=4, max_length=24)
    run, enough = Run(requests, num_pages=10, **few), Run(requests, **few)
    run.drain()
    assert run.scheduler.stats.preempted == 3
    for id, t in enough.drain().items():
        np.testing.assert_array_equal(run.found[id].routes, t.routes)
    # Once more all tokens that it had, the last one twice: the prefill that read it first decides.
    again = {id: t.rerouted.tolist() for id, t in run.found.items()}
    assert again["a"] == [2, 0] and again["c"][0] > again["b"][0] > 20
    assert again["b"][1] == again["c"][1] == 0


def test_a_sequence_that_made_way_goes_on_where_it_was():
    requests = [request(f"r{i}", (i,), seed=i, max_tokens=12) for i in range(4)]
    run = Run(requests, slots=2, options=dict(preempt_after=3, policy=LongestFirst()))
    for t in run.drain().values():
        assert t.rerouted.tolist() == [2, 0]
    inserted = [id for call in run.engine.inserted for id in call.values()]
    assert max(map(inserted.count, inserted)) > 1


def test_rows_are_of_the_weights_that_read_the_token():
    run = Run([request("a", max_tokens=6)], steps=1)
    run.step(2)
    run.pause("in_place")
    run.update()
    (t,) = run.drain().values()
    assert t.version.tolist() == [0, 0, 1, 1, 1, 1] and t.rerouted.tolist() == [2, 0]
    old = Run([request("a", max_tokens=6)], steps=1).drain()["a"]
    # The token at position 3 was read by weights 0, the one at position 4 by weights 1.
    np.testing.assert_array_equal(t.routes[:4], old.routes[:4])
    assert (t.routes[4] != old.routes[4]).any()


@pytest.mark.parametrize("is_read_late", [False, True])
def test_a_second_reading_under_new_weights_is_counted_and_changes_no_row(is_read_late):
    run = Run([request("a", max_tokens=6)], is_read_late, steps=1)
    run.step(3)
    run.update()
    run.pause("retract")
    (t,) = run.drain().values()
    count = int((t.version == 0).sum())
    old = Run([request("a", max_tokens=6)], steps=1).drain()["a"]
    np.testing.assert_array_equal(t.routes[: 3 + count - 1], old.routes[: 3 + count - 1])
    # The last prompt token, then all that had rows, then the last sampled one, in two layers.
    assert t.rerouted.tolist() == [2 * (1 + 3 + count - 1 + 1), 2 * (3 + count - 1)]


def test_a_resumed_record_keeps_the_rows_that_it_had():
    run = Run([request(id, range(n), seed=n, max_tokens=9) for id, n in dict(a=3, b=4).items()])
    for _ in range(3):
        run.step()
        before = dict(run.found)
        run.resume()
        for id, t in run.found.items():
            assert len(t.routes) == len(t.prompt) + len(t.tokens) - 1
            if id in before:
                np.testing.assert_array_equal(
                    t.routes[: len(before[id].routes)], before[id].routes
                )
                assert (t.rerouted > before[id].rerouted).all()
        run.update()
    assert all(len(t.tokens) == 9 for t in run.drain().values())


def test_a_record_without_tokens_has_no_rows_and_nothing_is_kept_of_it():
    run = Run([request("a", max_tokens=2), request("b", max_tokens=2)], slots=1)
    run.step(0)
    run.resume()
    assert run.found["b"].routes.shape == (0, 2, 2) and run.found["b"].rerouted.tolist() == [0, 0]
    run.drain()


@pytest.mark.parametrize("change, words", [
    (dict(routes=np.zeros((4, 2, 3), np.uint8)), r"routes of \(2, 3\) .*this engine \(2, 2\)"),
    (dict(routes=np.zeros((0, 0, 0), np.uint8)), r"routes of \(0, 0\) .*this engine \(2, 2\)"),
    (dict(routes=np.zeros((3, 2, 2), np.uint8)), "routes of 3 tokens and needs 4; start it again"),
    (dict(routes=np.zeros((0, 2, 2), np.uint8)), "routes of 0 tokens and needs 4; start it again"),
])
def test_a_partial_record_of_other_routes_is_refused(change, words):
    run = Run([request("a", max_tokens=6)], steps=2)
    run.step()
    (t,) = run.pause("abort")
    assert len(t.routes) == 4
    with pytest.raises(ValueError, match=words):
        run.add(request("a", max_tokens=6, partial=dataclasses.replace(t, **change)))


def test_routes_are_no_part_of_a_record_unless_recorded():
    run = Run([request("a", max_tokens=6)], route_shape=(0, 0))
    run.step()
    (t,) = run.scheduler.pause("abort")
    assert t.routes.shape == (0, 0, 0) and t.rerouted.shape == (0,)
    routed = Run([request("a", max_tokens=6)])
    routed.step()
    (partial,) = routed.pause("abort")
    with pytest.raises(ValueError, match=r"routes of \(2, 2\) .*this engine \(0, 0\)"):
        run.scheduler.add(request("a", max_tokens=6, partial=partial))


@pytest.mark.parametrize("is_read_late", [False, True])
def test_a_record_that_a_stop_string_cuts_has_a_row_of_its_last_token(is_read_late):
    tokens, _ = alone(request("a", max_tokens=9))
    text = arithmetic.text_of(tokens)
    # It ends within a call of 4, whose other tokens were drawn after the last one was read.
    cut = Run([request("a", max_tokens=9, stop_strings=(text[1:3],))], is_read_late, steps=4)
    (t,) = cut.drain().values()
    assert t.tokens.tolist() == tokens[:3] and len(t.routes) == 3 + 3
    assert t.rerouted.tolist() == [2, 0]
    # Here it ends with the last token that may be drawn, which nothing reads.
    whole = Run([request("a", max_tokens=3, stop_strings=(text[1:3],))], is_read_late, steps=4)
    (last,) = whole.drain().values()
    assert last.stop_reason == "stop" and len(last.routes) == 3 + 2
    np.testing.assert_array_equal(t.routes[:5], last.routes)


def test_what_starts_again_after_evictions_has_rows_of_its_second_life():
    requests = [request(f"r{i}", range(8 + i), seed=i, max_tokens=20) for i in range(3)]
    run = Run(requests, steps=2, options=dict(retention=KVEviction(1, 2)))
    run.step(5)
    assert run.scheduler.stats.evicted > 2
    run.update()
    run.pause("retract")
    run.step(2)
    run.update()
    run.drain()
    for t in run.found.values():
        assert set(t.version) == {1, 2} and len(t.evict_step), "it began again under weights 1"
        assert t.rerouted.tolist() == [2, 0]
        np.testing.assert_array_equal(
            t.routes[: len(t.prompt)], prompt_rows(t.prompt.tolist(), weights=1)
        )


def test_shards_have_their_own_pages_of_the_same_number():
    requests = [request(f"r{i}", (i, 5, 5, 5, 5, i), seed=i, max_tokens=5) for i in range(8)]
    run = Run(requests, slots=4, shards=2, prefill_batch=4)
    run.drain()
    for i in range(8):
        np.testing.assert_array_equal(
            run.found[f"r{i}"].routes[:6], prompt_rows((i, 5, 5, 5, 5, i))
        )


def test_a_scheduler_at_rest_keeps_no_rows():
    run = Run([request("a", range(8), max_tokens=2)])
    run.drain()
    run.scheduler.release_cache()
    with pytest.raises(KeyError):
        run.scheduler._routes.of(0, [1])
    run.add(request("b", range(8), max_tokens=2))
    run.drain()
    np.testing.assert_array_equal(run.found["b"].routes[:8], prompt_rows(range(8)))


def test_prompts_that_wait_are_filled_and_routed_anew_under_new_weights():
    run = Run([request("short", max_tokens=9)], slots=2, steps=1, prefill_chunk=4,
              options=dict(prefill_calls=1))
    run.step()
    run.add(request("long", np.arange(12), max_tokens=2))
    run.step()
    run.update()
    run.drain()
    np.testing.assert_array_equal(
        run.found["long"].routes[:12], prompt_rows(range(12), weights=1)
    )
    # Found pages are of the weights that wait for them.
    run.add(request("later", np.arange(12), max_tokens=2))
    run.drain()
    np.testing.assert_array_equal(
        run.found["later"].routes[:12], prompt_rows(range(12), weights=1)
    )


def test_a_prompt_that_loses_its_pages_before_its_first_token_has_the_rows_of_its_second_prefill():
    # A call of 8 tokens needs two more pages of `a` and of `b`, and admission leaves one to each.
    requests = [request(id, (1, 2, i), max_tokens=28) for i, id in enumerate("ab")]
    run = Run(requests, slots=3, steps=8, max_length=32, num_pages=11)
    run.step()
    run.add(request("c", (9, 8, 7), max_tokens=2))
    prefills = lambda: [c for call in run.engine.prefilled for c in call if c[1] == (9, 8, 7)]
    run.step()
    assert len(prefills()) == run.scheduler.stats.preempted == 1
    run.update()
    run.drain()
    assert len(prefills()) > 1 and run.found["c"].version.tolist() == [1, 1]
    np.testing.assert_array_equal(run.found["c"].routes[:3], prompt_rows((9, 8, 7), weights=1))


# Tokens that are read late


def test_records_are_the_same_if_tokens_are_read_late():
    requests = [request(f"r{i}", np.arange(1 + i % 9), seed=i, max_tokens=1 + 5 * i % 13,
                        stop_ids=(7 * i % 23,), stop_strings=((), ("ab", "q"))[i % 2])
                for i in range(24)]
    found = [Run(requests, late, steps=3, num_pages=14).drain() for late in (False, True)]
    for id, t in found[0].items():
        for field in dataclasses.fields(t):
            np.testing.assert_array_equal(
                getattr(found[1][id], field.name), getattr(t, field.name), f"{id} {field.name}"
            )


def test_rows_of_a_prefill_are_read_with_the_call_after_it():
    """Or the host would wait for the prefill that it has just sent off."""
    log = []

    class Unread:
        def __init__(self, array, name):
            self._array, self._name = array, name

        def __array__(self, dtype=None, copy=None):
            if f"read {self._name}" not in log:
                log.append(f"read {self._name}")
            return self._array

    class Engine(arithmetic.Engine):
        def prefill(self, *args):
            state, result = super().prefill(*args)
            name = f"prefill {len(self.prefilled)}"
            log.append(name)
            return state, dataclasses.replace(result, routes=Unread(result.routes, name))

        def generate(self, *args):
            state, result = super().generate(*args)
            name = f"call {sum(x.startswith('call') for x in log) + 1}"
            log.append(name)
            return state, jax.tree.map(lambda x: Unread(x, name), result)

    engine = Engine(slots=2, steps=1, is_read_late=True, route_shape=(2, 2))
    scheduler = Scheduler(engine, 0, async_scheduling=True)
    scheduler.add(request("a", max_tokens=3))
    scheduler.step()
    scheduler.add(request("b", (7, 8), max_tokens=3))
    scheduler.step()
    scheduler.step()
    assert log == [
        "prefill 1", "call 1", "prefill 2", "call 2", "read call 1", "read prefill 1",
        "call 3", "read call 2", "read prefill 2",
    ]
