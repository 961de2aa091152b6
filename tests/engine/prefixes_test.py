"""Pages that samples of one prompt share: who takes how many, and when they are free again."""

import dataclasses

import numpy as np
import pytest

from jaxrl_tis.engine.pages import Pages
from jaxrl_tis.engine.policies import FirstCome
from jaxrl_tis.engine.prefixes import Prefixes
from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.engine.wait_queue import WaitQueue
from tests import arithmetic

SIZE = 4


def sequence(id, length, drawn=()):
    """One that waits, after it drew some tokens."""
    prompt = np.arange(1, length + 1, dtype=np.int32)
    partial = None
    if drawn:
        ended = Sequence.of(arithmetic.request(id, prompt), 0, 0).trajectory("abort", "", 0)
        count = len(drawn)
        partial = dataclasses.replace(
            ended, tokens=np.array(drawn, np.int32), segment=np.zeros(count, np.int32)
        )
    s = Sequence.of(arithmetic.request(id, prompt, partial=partial), 0, 0)
    WaitQueue(FirstCome(), None, SIZE).add(s)
    return s


def books(pages=9, shards=1):
    pools = [Pages(pages) for _ in range(shards)]
    return pools, Prefixes(pools, SIZE)


@pytest.mark.parametrize("length, first, next", [(8, 2, 0), (4, 1, 0), (7, 3, 1), (1, 2, 1)])
def test_samples_share_full_pages_and_own_a_copy_of_the_last(length, first, next):
    (pages,), prefixes = books()
    a, b = sequence("a", length), sequence("b", length)
    assert prefixes.new_pages(a, 0) == first
    assert prefixes.shared(a, 0) == 0
    prefixes.join(a, 0)
    assert pages.used == first
    assert (prefixes.new_pages(b, 0), prefixes.shared(b, 0)) == (next, length)
    prefixes.join(b, 0)
    assert pages.used == first + next
    full = length // SIZE
    assert a.pages[:full] == b.pages[:full] and len(a.pages) == len(b.pages) == -(-length // SIZE)
    assert not set(a.pages[full:]) & set(b.pages[full:])


def test_sequences_that_drew_tokens_follow_the_full_pages_of_their_prompt():
    (pages,), prefixes = books(pages=20)
    a, b = sequence("a", 9, (50,)), sequence("b", 9, (51, 52, 53, 54))
    # 10 and 13 tokens: 2 pages of the prompt, then 1 and its copy, and 2 and a copy.
    assert (prefixes.new_pages(a, 0), prefixes.shared(a, 0)) == (4, 0)
    prefixes.join(a, 0)
    assert (prefixes.new_pages(b, 0), prefixes.shared(b, 0), pages.used) == (3, 8, 4)
    prefixes.join(b, 0)
    assert pages.used == 7 and a.pages[:2] == b.pages[:2] and len(b.pages) == 4
    assert prefixes.following() == [a, b]
    (base,) = prefixes.unfilled()
    assert base.tokens.tolist() == list(range(1, 9)) and not prefixes.reclaim(0, ())
    base.filled = 8
    assert [p.filled for p in prefixes.unfilled()] == [8, 8]
    for s in (a, b):
        prefixes.find(s.key, 0).waiters = []
        prefixes.drop(s.key)
    assert base.is_idle
    prefixes.forget()
    for s in (a, b):
        pages.release(s.pages)
    assert pages.used == 0


def test_a_sequence_takes_more_cached_pages_than_its_prompt_has_before_a_base():
    (pages,), prefixes = books(pages=30)
    drawn = (50, 51, 52, 53, 54, 55)
    ended, a, b = sequence("e", 9, drawn), sequence("a", 9, (60,)), sequence("b", 9, (*drawn, 56))
    ended.shard, ended.pages = 0, pages.allocate(4)
    # 15 tokens: three full pages, and the key of the last is not needed for them.
    assert prefixes.keep(ended) == dict(enumerate(ended.pages[:3])) and prefixes.keep(ended) == {}
    pages.release(ended.pages)
    assert (prefixes.cached(a, 0), prefixes.shared(a, 0)) == (8, 0)
    prefixes.join(a, 0)
    assert prefixes.shared(sequence("c", 9, (61,)), 0) == 8
    assert (prefixes.cached(b, 0), prefixes.shared(b, 0)) == (12, 0)
    # 16 tokens: the third page, which nobody holds, and the fourth.
    assert prefixes.new_pages(b, 0) == 2
    used = pages.used
    prefixes.join(b, 0)
    assert pages.used == used + 2 and b.pages[:3] == ended.pages[:3] and a.pages[:2] == b.pages[:2]
    assert prefixes.find(b.key, 0).filled == 12 and prefixes.following() == [a, b]


def test_found_pages_are_taken_where_nobody_holds_them():
    (pages,), prefixes = books()
    a, b, c = sequence("a", 9), sequence("b", 9), sequence("c", 10)
    prefixes.join(a, 0)
    prefix = prefixes.find(a.key, 0)
    prefixes.fill(prefix, 8)
    assert prefixes.cached(c, 0) == 0, "found before all of the prompt is filled"
    prefixes.fill(prefix, 1)
    prefix.waiters = []
    prefixes.drop(a.key)
    pages.release(a.pages)
    assert pages.used == 0
    for s, free, used in ((b, 4, 4), (c, 2, 6)):
        assert (prefixes.cached(s, 0), prefixes.new_pages(s, 0)) == (8, free)
        prefixes.join(s, 0)
        assert pages.used == used and prefixes.find(s.key, 0).filled == 8
    assert b.pages[:2] == c.pages[:2] and prefixes.following() == [b, c]


def test_a_prefix_is_filled_when_all_of_its_tokens_are():
    _, prefixes = books()
    prefixes.join(sequence("a", 5), 0)
    (prefix,) = prefixes.unfilled()
    prefix.filled = 4
    assert prefixes.unfilled() == [prefix] and not prefixes.filled()
    prefix.filled = 5
    assert prefixes.filled() == [prefix] and not prefixes.unfilled()
    prefix.waiters = []
    assert not prefixes.filled()


def test_a_prefix_goes_when_nobody_waits_for_it():
    (pages,), prefixes = books()
    a = sequence("a", 5)
    prefixes.join(a, 0)
    prefixes.drop(a.key)
    assert prefixes.find(a.key, 0) and not prefixes.reclaim(0, ())
    prefixes.find(a.key, 0).waiters = []
    assert not prefixes.reclaim(0, keep=(b"", a.key))
    assert prefixes.reclaim(0, ()) and prefixes.find(a.key, 0) is None
    assert pages.used == 2  # its own: the full one, still shared, and the copy
    pages.release(a.pages)
    assert pages.used == 0


def test_new_weights_fill_anew_what_somebody_waits_for():
    (pages,), prefixes = books()
    a, b = sequence("a", 4), sequence("b", 3)
    for s in (a, b):
        prefixes.join(s, 0)
        prefixes.find(s.key, 0).filled = s.length
    prefixes.find(b.key, 0).waiters = []
    prefixes.forget()
    assert prefixes.find(a.key, 0).filled == 0 and prefixes.find(b.key, 0) is None


def test_shards_have_prefixes_of_their_own():
    pools, prefixes = books(shards=2)
    a, b = sequence("a", 4), sequence("b", 4)
    prefixes.join(a, 0)
    assert prefixes.shared(b, 1) == 0
    prefixes.join(b, 1)
    assert [p.used for p in pools] == [1, 1] and (a.shard, b.shard) == (0, 1)
