import pytest

from schedulers import Request, RequestRejected
from tests.schedulers.helpers import row_ids, scheduler, spans, submit


def rejection(sched, prompt_len, max_tokens):
    with pytest.raises(RequestRejected) as caught:
        sched.submit(Request("bad", prompt_len, max_tokens))
    return str(caught.value)


def test_context_rejection_has_both_numbers():
    message = rejection(scheduler(), 1000, 25)
    assert "1000 tokens + max_tokens 25 = 1025" in message and "model length of 1024" in message


def test_a_lifetime_of_exactly_the_model_length_is_accepted():
    sched = scheduler()
    submit(sched, ("a", 1000, 24))
    assert spans(sched.tick()) == [("a", 0, 256)]


def test_page_rejection_has_both_numbers():
    message = rejection(scheduler(num_pages=11), 600, 100)
    assert "needs 11 KV pages of 64 tokens" in message and "the pool has 10" in message


def test_a_request_of_exactly_the_pool_is_accepted():
    sched = scheduler(num_pages=11)
    submit(sched, ("a", 600, 40))
    assert len(sched.tick().chunks[0].pages) == 10


def test_the_context_check_comes_before_the_page_check():
    assert "model length" in rejection(scheduler(num_pages=3), 2000, 100)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_zero_is_rejected(max_tokens):
    assert f"max_tokens is {max_tokens}" in rejection(scheduler(), 10, max_tokens)


def test_an_empty_prompt_is_rejected():
    assert "prompt has 0 tokens" in rejection(scheduler(), 0, 10)


def test_staging_rejection_has_both_numbers():
    message = rejection(scheduler(overlap="device", staging_pages=5), 257, 4)
    assert "needs 5 staging pages" in message and "the staging pool has 4" in message


def test_a_live_id_is_rejected_and_free_again_after_its_end():
    sched = scheduler()
    submit(sched, ("a", 10, 4))
    with pytest.raises(RequestRejected, match="'a' is already in the scheduler"):
        submit(sched, ("a", 20, 4))
    sched.finish("a")
    submit(sched, ("a", 20, 4))
    assert spans(sched.tick()) == [("a", 0, 20)]


def test_a_rejected_request_does_not_block_those_behind_it():
    sched = scheduler()
    submit(sched, ("a", 10, 4))
    rejection(sched, 5000, 4)
    submit(sched, ("b", 10, 4))
    assert spans(sched.tick()) == [("a", 0, 10), ("b", 0, 10)]
    assert sched.waiting == 0


def test_the_whole_lifetime_is_reserved_at_admission():
    sched = scheduler()
    submit(sched, ("a", 65, 64))  # 129 tokens: three pages
    plan = sched.tick()
    assert len(plan.chunks[0].pages) == 3 and sched.stats().pages_used == 3
    for _ in range(63):
        plan = sched.tick()
        assert len(plan.rows[0].pages) == 3 and plan.rows[0].position // 64 < 3
    assert sched.stats().pages_used == 3


def test_admission_is_in_arrival_order_and_nobody_bypasses_the_front():
    sched = scheduler(num_pages=11)
    submit(sched, ("big", 400, 112), ("bigger", 500, 100), ("tiny", 1, 1))  # 8, 10 and 1 of 10 pages
    assert spans(sched.tick()) == [("big", 0, 256)]
    assert (sched.running, sched.waiting) == (1, 2)
    sched.finish("big")
    assert spans(sched.tick()) == [("bigger", 0, 256)]
    assert sched.waiting == 1
    sched.finish("bigger")
    assert spans(sched.tick()) == [("tiny", 0, 1)]


def test_a_cancelled_front_lets_the_next_in():
    sched = scheduler(num_pages=11)
    submit(sched, ("big", 400, 112), ("bigger", 500, 100), ("tiny", 1, 1))
    sched.tick()
    released = sched.cancel("bigger")
    assert released is not None and (released.slot, released.pages) == (0, ())
    assert ("tiny", 0, 1) in spans(sched.tick())


def test_slots_cap_decoding_plus_prefilling():
    sched = scheduler(max_num_seqs=2, num_slots=3)
    submit(sched, ("a", 10, 4), ("b", 600, 4), ("c", 10, 4))
    for _ in range(3):
        sched.tick()
        assert (sched.running, sched.waiting) == (2, 1)


def test_max_num_seqs_caps_even_when_slots_are_left():
    sched = scheduler(max_num_seqs=2, num_slots=9)
    submit(sched, *((f"r{i}", 10, 4) for i in range(5)))
    assert len(sched.tick().chunks) == 2
    assert (sched.running, sched.waiting) == (2, 3)


def test_null_slot_and_null_page_are_never_in_a_plan():
    sched = scheduler()
    submit(sched, *((f"r{i}", 100, 400) for i in range(8)))
    plan = sched.tick()
    while not plan.rows:
        plan = sched.tick()
    for part in (*plan.chunks, *plan.rows):
        assert part.slot != 0 and 0 not in part.pages


def test_freed_slots_and_pages_are_given_out_at_the_next_tick():
    sched = scheduler(max_num_seqs=1, num_slots=2)
    submit(sched, ("a", 10, 4), ("b", 10, 4))
    sched.tick()
    assert row_ids(sched.tick()) == ["a"]
    released = sched.finish("a")
    plan = sched.tick()
    assert spans(plan) == [("b", 0, 10)]
    assert released is not None
    assert plan.chunks[0].slot == released.slot and plan.chunks[0].pages == released.pages
