import itertools

import numpy as np
import pytest

from jaxrl_tis.endpoint.text import Sent, Shown, cut, offsets, settled, utf8


@pytest.mark.parametrize("text, stops, expected", [
    ("abcd", (), "abcd"), ("abcd", ("x",), "abcd"), ("abcd", ("c",), "ab"),
    ("abcd", ("cd", "b"), "a"), ("abab", ("ab",), ""),
])
def test_cut(text, stops, expected):
    assert cut(text, stops) == expected


@pytest.mark.parametrize("floor, expected", [(1, ""), (2, "ab"), (3, "ab"), (6, "ababab")])
def test_a_stop_string_cuts_only_where_it_ends_beyond_the_floor(floor, expected):
    assert cut("ababab", ("ab",), floor) == settled("ababab", ("ab",), floor) == expected


@pytest.mark.parametrize("text, stops, expected", [
    ("abc", (), "abc"),
    ("abc", ("cd",), "ab"),  # c may begin a stop
    ("aaa", ("aab",), "a"),  # aa may
    ("xab", ("abc", "b!"), "x"),  # both are begun, one earlier
    ("abc", ("b",), "a"), ("aaab", ("ab",), "aa"),
    ("ab\ufffd", (), "ab"), ("\ufffd\ufffd", (), ""), ("a\ufffdb", (), "a\ufffdb"),
    ("ab\ufffd", ("bc",), "a"),
])
def test_settled(text, stops, expected):
    assert settled(text, stops) == expected


def test_what_is_settled_only_grows_and_begins_the_finished_text():
    """All texts of 6 letters of two, shown letter by letter, and past the stop as a scheduler that
    draws ahead does."""
    stops, seen = ("aab", "bb"), set()
    for letters in itertools.product("ab", repeat=6):
        whole = "".join(letters)
        end = next((n for n in range(7) if any(s in whole[:n] for s in stops)), 6)
        finished, shown = cut(whole[:end], stops), ""
        for count in range(7):
            now = settled(whole[:count], stops)
            assert now.startswith(shown) and finished.startswith(now)
            shown = now
        seen.add(finished)
    assert len(seen) > 5


def test_a_character_is_shown_once_all_its_bytes_are_there():
    text = "a\u00e9\u20ac\U0001f600!"
    data = text.encode()
    shown = [settled(data[:n].decode("utf-8", "replace"), ()) for n in range(len(data) + 1)]
    assert shown == [text[:n] for n in (0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5)]


def test_what_is_shown_while_tokens_come_is_what_is_settled_of_all():
    decode = lambda ids: bytes(ids.tolist()).decode("utf-8", "replace")
    data, other = (np.frombuffer(t.encode(), np.uint8) for t in ("a\u00e9\u20ac!b", "a\u20acxyz"))
    shown = Shown(("!b",), decode)
    # The second sequence has lost its pages and starts again.
    counts = []
    for tokens in [data[:n] for n in (1, 2, 4, 7, 8)] + [other[:n] for n in (2, 5, 7)]:
        text, kept = shown.of(tokens)
        assert text == settled(decode(tokens), ("!b",))
        assert kept.tolist() == tokens[: len(kept)].tolist()
        counts.append(len(kept))
    # The record may end at any of the tokens that came with the stop string.
    assert counts == [1, 2, 4, 7, 7, 2, 5, 7]


def test_a_stream_sends_everything_once():
    sent = Sent()
    ids = lambda *tokens: np.array(tokens, np.int32)
    assert sent.rest("a", ids(5, 6), False) == ("a", [5, 6])
    assert sent.rest("a", ids(5, 6), False) == ("", [])
    assert sent.rest("", ids(5), False) == ("", [])  # the sequence starts again
    assert sent.rest("abc", ids(5, 6, 7), False) == ("bc", [7])
    assert sent.rest("abcd", ids(5, 6, 7, 8), True) == ("d", [8])


@pytest.mark.parametrize("text, tokens, has_ended", [
    ("ab", [5, 7, 8], False),  # another token
    ("xb", [5, 6], False),  # another text
    ("ab", [5], True), ("a", [5, 6], True),  # the record lacks what was sent
])
def test_a_stream_does_not_go_on_with_another_sequence(text, tokens, has_ended):
    sent = Sent()
    sent.rest("ab", np.array([5, 6]), False)
    with pytest.raises(RuntimeError, match="started again and differs from the tokens already sent"):
        sent.rest(text, np.array(tokens), has_ended)


def test_where_tokens_begin_when_one_is_a_part_of_a_character():
    data = "a\u00e9\u20ac!".encode()
    decode = lambda ids: bytes(ids.tolist()).decode("utf-8", "replace")
    assert offsets(np.frombuffer(data, np.uint8), decode) == [0, 1, 1, 2, 2, 2, 3]


def test_bytes_of_a_token():
    assert utf8("a\u20ac") == [0x61, 0xE2, 0x82, 0xAC] and utf8("") == []
    assert utf8("a\ufffd") is None
