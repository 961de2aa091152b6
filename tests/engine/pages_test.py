import random

import numpy as np
import pytest

from jaxrl_tis.engine.pages import Pages, content_keys


def test_pages_are_lent_once_and_page_0_never():
    pages = Pages(5)
    assert (pages.free, pages.used, pages.peak) == (4, 0, 0)
    assert sorted(pages.allocate(3) + pages.allocate(1)) == [1, 2, 3, 4]
    assert (pages.free, pages.used, pages.peak) == (0, 4, 4)


def test_all_pages_are_lent_or_none():
    pages = Pages(4)
    assert pages.allocate(4) is None and pages.free == 3
    assert pages.allocate(0) == []
    assert len(pages.allocate(3)) == 3 and pages.allocate(1) is None


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back():
    pages = Pages(3)
    mine = pages.allocate(1)
    yours = pages.share(mine)
    assert yours == mine and yours is not mine and pages.used == 1
    pages.release(mine)
    assert pages.used == 1
    pages.release(yours)
    assert (pages.used, pages.free, pages.peak) == (0, 2, 1)


def test_a_page_given_back_is_lent_again():
    pages = Pages(2)
    first = pages.allocate(1)
    pages.release(first)
    assert pages.allocate(1) == first


def test_a_free_page_is_neither_shared_nor_released():
    pages = Pages(3)
    mine = pages.allocate(1)
    pages.release(mine)
    with pytest.raises(AssertionError, match="a free page is shared"):
        pages.share(mine)
    with pytest.raises(AssertionError, match="a free page is shared"):
        pages.share([0])
    with pytest.raises(AssertionError, match=f"page {mine[0]} is released twice"):
        pages.release(mine)


def test_a_key_is_of_a_full_page_and_of_all_before_it():
    keys = lambda *tokens: content_keys(np.array(tokens, np.int32), 2)
    assert keys(1) == [] and len(keys(1, 2, 3)) == 1 and len(set(keys(1, 2, 1, 2, 1, 2))) == 3
    assert keys(1, 2, 3, 4)[0] == keys(1, 2, 5)[0]
    assert keys(1, 2, 3, 4)[1] != keys(0, 2, 3, 4)[1] and keys(3, 4)[0] != keys(1, 2, 3, 4)[1]


def test_a_free_page_keeps_its_content_until_it_is_taken():
    pages = Pages(6)
    old, new = pages.allocate(2), pages.allocate(2)
    pages.keep(old, [b"a", b"b"])
    pages.keep(new, [b"c", b"a"])  # a is there already
    pages.release(old)
    pages.release(new)
    assert pages.free == 5 and pages.used == 0
    assert pages.found([b"a", b"b", b"x", b"c"]) == old and pages.found([b"c"]) == new[:1]
    assert pages.held(old) == 0
    assert pages.share(old[:1]) == old[:1] and (pages.held(old), pages.free) == (1, 4)
    # First those without content, then what was held least recently, the end before its beginning.
    assert set(pages.allocate(2)) == {5, new[1]} and pages.found([b"a", b"b"]) == old
    assert pages.allocate(1) == old[1:] and pages.found([b"a", b"b"]) == old[:1]
    assert pages.allocate(1) == new[:1] and not pages.found([b"c"]) and pages.free == 0


def test_the_last_page_of_a_prompt_is_reused_first():
    pages = Pages(4)
    prompt = pages.allocate(3)
    pages.keep(prompt, [b"a", b"b", b"c"])
    pages.release(prompt)
    assert pages.allocate(1) == prompt[2:] and pages.found([b"a", b"b", b"c"]) == prompt[:2]


def test_what_is_forgotten_is_not_found():
    pages = Pages(4)
    held, free = pages.allocate(1), pages.allocate(1)
    pages.keep(held + free, [b"a", b"b"])
    pages.release(free)
    pages.forget()
    assert not pages.found([b"a"]) and not pages.found([b"b"]) and pages.free == 2
    pages.release(held)
    assert sorted(pages.allocate(3)) == [1, 2, 3]


def test_random_holders_lose_no_page_and_find_what_was_written():
    """Holders take tokens' pages, found or fresh, write what they hold, and go."""
    for seed in range(30):
        rng = random.Random(seed)
        pages, holders, written, hits = Pages(rng.randint(5, 20)), [], {}, 0
        total = pages.free
        for _ in range(400):
            if rng.random() < 0.02:
                pages.forget()
            if holders and rng.random() < 0.5:
                pages.release(holders.pop(rng.randrange(len(holders))))
            else:
                tokens = np.array(rng.choices((0, 1), k=rng.randint(1, 12)), np.int32)
                keys = content_keys(tokens, 2)
                found = pages.found(keys)
                for page, key in zip(found, keys, strict=False):
                    assert written[page] == key, "what is found was overwritten"
                hits += len(found)
                if len(keys) - pages.held(found) > pages.free:
                    continue
                mine = pages.share(found) + pages.allocate(len(keys) - len(found))
                written |= dict(zip(mine, keys, strict=True))
                pages.keep(mine, keys)
                holders.append(mine)
            held = {page for holder in holders for page in holder}
            assert pages.used == len(held) and pages.free == total - len(held)
            order = pages.order
            assert len(set(order)) == len(order) == pages.free and not held & set(order)
        assert hits > 50
        for holder in holders:
            pages.release(holder)
        assert pages.free == total
