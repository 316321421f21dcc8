import pytest

from schedulers import PagePool, SlotPool, pages_for


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_for_rounds_up(tokens, pages):
    assert pages_for(tokens, 64) == pages


def test_null_page_is_never_given():
    pool = PagePool(6)
    assert pool.total == 5
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="1 pages asked, 0 free of 5"):
        pool.allocate(1)


def test_null_slot_is_never_given():
    pool = SlotPool(4)
    assert sorted(pool.acquire() for _ in range(pool.total)) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="none free of 3"):
        pool.acquire()


def test_pages_come_back_once():
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert (pool.used, pool.free) == (2, 1)
    pool.release(pages)
    assert (pool.used, pool.free) == (0, 3)
    for page in (pages[0], 0, 4, -1):
        with pytest.raises(RuntimeError, match=f"page {page} is given back"):
            pool.release([page])


def test_slots_come_back_once():
    pool = SlotPool(4)
    slot = pool.acquire()
    pool.release(slot)
    assert (pool.used, pool.free) == (0, 3)
    for wrong in (slot, 0, 4, -1):
        with pytest.raises(RuntimeError, match=f"slot {wrong} is given back"):
            pool.release(wrong)


def test_a_failed_allocation_takes_nothing():
    pool = PagePool(4)
    with pytest.raises(RuntimeError):
        pool.allocate(4)
    assert pool.free == 3


@pytest.mark.parametrize("pool", [PagePool, SlotPool])
def test_a_pool_of_the_null_entry_alone_is_refused(pool):
    with pytest.raises(ValueError, match="at least 2"):
        pool(1)
