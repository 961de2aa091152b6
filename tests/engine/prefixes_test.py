"""Pages that samples of one prompt share: who takes how many, and when they are free again."""

import pytest

from jaxrl_tis.engine.pages import Pages
from jaxrl_tis.engine.prefixes import Prefixes
from jaxrl_tis.engine.sequences import Sequence
from tests import arithmetic

SIZE = 4


def sequence(id, length):
    request = arithmetic.request(id, prompt=range(1, length + 1))
    s = Sequence.of(request, order=0, admitted_after=0)
    s.key = s.tokens().tobytes()
    return s


def books(pages=9, shards=1):
    pools = [Pages(pages) for _ in range(shards)]
    return pools, Prefixes(pools, SIZE)


@pytest.mark.parametrize("length, first, next", [(8, 2, 0), (4, 1, 0), (7, 3, 1), (1, 2, 1)])
def test_samples_share_full_pages_and_own_a_copy_of_the_last(length, first, next):
    (pages,), prefixes = books()
    a, b = sequence("a", length), sequence("b", length)
    assert prefixes.new_pages(a, 0) == first
    assert prefixes.join(a, 0) == 0 and pages.used == first
    assert prefixes.new_pages(b, 0) == next
    assert prefixes.join(b, 0) == length and pages.used == first + next
    full = length // SIZE
    assert a.pages[:full] == b.pages[:full] and len(a.pages) == len(b.pages) == -(-length // SIZE)
    assert not set(a.pages[full:]) & set(b.pages[full:])


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
    assert prefixes.find(a.key, 0) and not prefixes.reclaim(0, None)
    prefixes.find(a.key, 0).waiters = []
    assert not prefixes.reclaim(0, keep=a.key)
    assert prefixes.reclaim(0, None) and prefixes.find(a.key, 0) is None
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
    assert (prefixes.join(a, 0), prefixes.join(b, 1)) == (0, 0)
    assert [p.used for p in pools] == [1, 1] and (a.shard, b.shard) == (0, 1)
