import numpy as np

from jaxrl_tis.engine.pages import content_keys
from jaxrl_tis.engine.protocol import ResultTokens
from jaxrl_tis.engine.records import NEVER, Trajectory
from jaxrl_tis.engine.sequences import Drawn, Sequence
from tests.arithmetic import request


def result(first, steps=3, slots=2):
    """Tokens first, first + 1, .. in slot 0 and 100 more in slot 1."""
    tokens = first + np.arange(steps)[:, None] + 100 * np.arange(slots)
    floats = -tokens.astype(np.float32)
    valid = np.ones(tokens.shape, bool)
    return ResultTokens(
        tokens, floats, floats - 1, floats - 2, floats[..., None], valid=valid,
        remaining=np.zeros(slots),
    )


def sequence(r=None):
    s = Sequence.of(r or request("a", (1, 2), seed=5), order=3, admitted_after=2)
    s.pieces = [Drawn(result(10), 1, 2, 7, 6, 0), Drawn(result(20), 0, 3, 8, 6, 1)]
    s.count = 5
    return s


def test_what_was_drawn_is_cut_out_of_the_calls():
    s = sequence()
    assert s.field("tokens").tolist() == [110, 111, 20, 21, 22]
    assert s.tokens().tolist() == [1, 2, 110, 111, 20, 21, 22]
    assert s.field("version").tolist() == [7, 7, 8, 8, 8]
    assert s.field("kv_version").tolist() == [6] * 5
    assert s.field("segment").tolist() == [0, 0, 1, 1, 1]
    assert (s.length, s.remaining) == (7, 11)


def test_what_was_read_grows_with_what_is_drawn():
    s = sequence()
    assert s.field("version").tolist() == [7, 7, 8, 8, 8] and len(s.tokens()) == 7
    s.pieces.append(Drawn(result(30), 0, 1, 9, 6, 1))
    assert s.field("tokens").tolist() == [110, 111, 20, 21, 22, 30]
    assert s.field("version").tolist() == [7, 7, 8, 8, 8, 9]
    s.count += 1
    assert s.keys_of_pages(2) == content_keys(s.tokens(), 2) and len(s.keys_of_pages(2)) == 4
    s.shift = 4
    s.forget()
    assert s.tokens().tolist() == [1, 2] and s.keys_of_pages(2) == content_keys(s.tokens(), 2)
    s.pieces.append(Drawn(result(40), 0, 1, 9, 6, 1))
    assert s.field("tokens").tolist() == [40]


def test_drafts_stand_on_the_tokens_that_they_were_compared_with():
    """A call of the drafter of version 4: three of three tokens verified and two accepted; then two of
    which one was verified, and a call without drafts. The record of the first call's tokens alone, a
    record that goes on, and one without a draft."""
    s = Sequence.of(request("a", (1, 2)), 0, 0)
    s.pieces = [Drawn(result(10), 1, 3, 7, 6, 0, 4, 3, 2), Drawn(result(20), 0, 2, 8, 6, 0, 5, 1, 1)]
    s.count = 5
    t = s.trajectory("abort", "", 5)
    assert t.drafter_version.tolist() == [4, 4, 4, 5, -1] and t.drafter_version.dtype == np.int32
    assert t.accepted.tolist() == [True, True, False, True, False] and t.accepted.dtype == bool
    assert s.trajectory("stop", "", 2).drafter_version.tolist() == [4, 4]
    again = Sequence.of(request("a", (1, 2), partial=t), 0, 0)
    again.pieces.append(Drawn(result(30), 0, 2, 9, 6, 1, 5, 0, 0))
    assert again.trajectory("stop", "", 7).drafter_version.tolist() == [4, 4, 4, 5, -1, -1, -1]
    plain = sequence()
    assert [len(x) for x in (plain.trajectory("stop", "", 5).drafter_version, t.tokens)] == [0, 5]
    later = Sequence.of(request("a", (1, 2), partial=plain.trajectory("abort", "", 5)), 0, 0)
    later.pieces.append(Drawn(result(30), 0, 1, 9, 6, 1, 5, 1, 1))
    t = later.trajectory("stop", "", 6)
    assert t.drafter_version.tolist() == [-1] * 5 + [5] and t.accepted.tolist() == [False] * 5 + [True]
    # n-grams, of no version
    plain.pieces.append(Drawn(result(30), 0, 1, 9, 6, 1, -1, 1, 1))
    t = plain.trajectory("stop", "", 6)
    assert not len(t.drafter_version) and not len(t.accepted)


def test_the_record_holds_the_first_tokens_alone():
    t = sequence().trajectory("stop", "w8", 3)
    assert (t.tokens.tolist(), t.stop_reason, t.quant_id) == ([110, 111, 20], "stop", "w8")
    assert t.logp_behav.tolist() == [-110, -111, -20] and t.entropy.tolist() == [-112, -113, -22]
    assert t.logits.shape == (3, 1) and t.mask.tolist() == [True] * 3
    assert t.evict_step.shape == (0,) and t.seed == 5


def test_a_request_without_tokens_has_an_empty_record_which_is_no_partial():
    t = Sequence.of(request("a"), 0, 0).trajectory("abort", "", 0)
    assert t.tokens.shape == (0,) and t.tokens.dtype == np.int32 and t.logits.shape == (0, 0)
    s = Sequence.of(request("a", partial=t), 0, 0)
    s.filled(version=3)
    s.pieces.append(Drawn(result(10), 0, 2, 3, 3, s.segment))
    assert s.field("logits").shape == (2, 1) and s.field("segment").tolist() == [0, 0]


def test_a_resumed_request_has_the_tokens_and_the_segment_of_its_partial():
    r = request("a", (1, 2), partial=sequence().trajectory("abort", "", 5))
    s = Sequence.of(r, order=9, admitted_after=4)
    assert (s.order, s.admitted_after, s.count, s.segment, s.key) == (9, 4, 5, 1, b"")
    assert s.field("logits")[:, 0].tolist() == [-110, -111, -20, -21, -22]
    assert s.field("kept").shape == (5, 0) and s.field("kept").dtype == np.int32
    s.filled(version=9)
    s.pieces.append(Drawn(result(30), 0, 1, 9, s.kv_version, s.segment))
    t = s.trajectory("length", "", 6)
    assert t.tokens.tolist() == [110, 111, 20, 21, 22, 30]
    assert t.segment.tolist() == [0, 0, 1, 1, 1, 2] and t.kv_version.tolist() == [6] * 5 + [9]
    assert isinstance(s.pieces[0], Trajectory)


def test_evicted_pages_are_unseen_from_the_last_token_on():
    s = sequence()
    s.pages, s.page_numbers = [31, 32, 33, 34], [0, 1, 2, 3]
    assert s.evict([1], size=2, capacity=9) == [32]
    # Position 6 is the next query.
    assert (s.pages, s.page_numbers, s.shift) == ([31, 33, 34], [0, 2, 3], 2)
    s.count += 1
    assert s.evict([1], size=2, capacity=9) == [33] and s.shift == 4
    assert s.evict_step[:, 0].tolist() == [NEVER] * 2 + [6, 6, 7, 7] + [NEVER] * 3
    recorded = s.trajectory("abort", "", 6).evict_step
    assert recorded.tolist() == [NEVER] * 2 + [6, 6, 7, 7] + [NEVER] * 2
    # Groups of layers keep other pages, and each page is free once the last group has evicted it.
    s = sequence()
    s.pages, s.page_numbers = [31, 32, 33, 34], [0, 1, 2, 3]
    s.page_mass = np.array([[9, 1, 2, 3], [9, 3, 1, 2]])
    lightest = lambda: [s.lightest(group, 1, s.width) for group in range(2)]
    assert s.evict(lightest(), size=2, capacity=9) == [] and (s.width, s.shift) == (3, 2)
    assert [s.kept(0), s.kept(1)] == [[0, 2, 3], [0, 1, 3]] and s.pages == [31, 32, 33, 34]
    s.count += 1
    s.weigh(np.array([[0, 0, 0, 0], [0, 0, 4, 0]]))
    assert s.evict(lightest(), size=2, capacity=9) == [32, 33] and (s.pages, s.width) == ([31, 34], 2)
    assert s.kept(0) == s.kept(1) == [0, 1] and s.page_numbers == [0, 3]
    assert s.trajectory("abort", "", 6).evict_step[2:6].tolist() == [[6, 7], [6, 7], [7, 6], [7, 6]]


def test_only_a_sequence_that_saw_evicted_keys_starts_again():
    s = sequence()
    s.page_mass = np.ones((1, 3))
    s.forget()
    assert s.page_mass.size == 3, "its tokens and what they attended to stay"
    assert s.count == 5 and len(s.pieces) == 2
    s.pages, s.page_numbers, s.segment = [31, 32], [0, 1], 1
    s.evict([0], size=2, capacity=9)
    assert s.page_mass.size == 2
    s.forget()
    assert (s.count, s.pieces, s.shift, s.evict_step, s.segment) == (0, [], 0, None, 0)
    assert not s.page_mass.size


def test_a_resumed_sequence_starts_again_from_its_partial():
    r = request("a", (1, 2), partial=sequence().trajectory("abort", "", 5))
    s = Sequence.of(r, 0, 0)
    s.filled(version=9)
    s.pieces.append(Drawn(result(30), 0, 1, 9, s.kv_version, s.segment))
    s.count, s.pages, s.page_numbers = 6, [31, 32, 33], [0, 1, 2]
    s.evict([0], size=2, capacity=9)
    s.forget()
    assert (s.count, s.pieces, s.segment, s.shift) == (5, [r.partial], 1, 0)
