import pytest

from jaxrl_tis.engine.pages import Pages


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
