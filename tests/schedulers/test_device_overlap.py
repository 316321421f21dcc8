"""The life of a launch on the prefill device: launch, poll, land, fail, cancel, drain."""

import pytest

from schedulers import RequestRejected, UnknownRequest
from tests.schedulers.helpers import row_ids, scheduler, spans, start_decoding, submit


def used(sched):
    stats = sched.stats()
    return (stats.slots_used, stats.pages_used, stats.staging_slots_used, stats.staging_pages_used)


def launched(*requests, **changes):
    """A scheduler with "row" decoding and the requests launched beside it."""
    sched = scheduler(overlap="device", **changes)
    start_decoding(sched, "row", 10, 200)
    submit(sched, *requests)
    plan = sched.tick()
    assert plan.kind == "unified" and plan.handle is not None
    return sched, plan


def test_while_in_flight_plans_are_decode_only():
    sched, plan = launched(("a", 600, 4))
    assert sched.in_flight == (plan.handle,)
    for _ in range(3):
        beside = sched.tick()
        assert (beside.kind, beside.trace_kind, beside.chunks) == ("decode", "overlap_decode", ())
        assert row_ids(beside) == ["row"]


def test_nothing_is_admitted_while_in_flight():
    sched, plan = launched(("a", 100, 4))
    submit(sched, ("b", 10, 4))
    for _ in range(2):
        sched.tick()
        assert (sched.running, sched.waiting) == (2, 1)
    sched.chunk_done(plan.handle)
    assert spans(sched.tick()) == [("b", 0, 10)]
    assert sched.waiting == 0


def test_with_nothing_to_decode_the_plan_is_wait():
    sched = scheduler(overlap="device")
    submit(sched, ("a", 600, 4))
    first = sched.tick()
    assert (first.kind, first.trace_kind) == ("prefill", "prefill")
    plan = sched.tick()
    assert (plan.kind, plan.trace_kind, plan.chunks, plan.rows) == ("wait", "overlap_wait", (), ())
    sched.chunk_done(first.handle)
    assert spans(sched.tick()) == [("a", 256, 256)]


def test_a_request_decodes_only_after_its_last_chunk_has_landed():
    sched, plan = launched(("a", 100, 4))
    assert plan.chunks[0].last
    assert row_ids(sched.tick()) == ["row"]
    assert sched.chunk_done(plan.handle).decoding == ("a",)
    after = sched.tick()
    assert row_ids(after) == ["row", "a"]
    assert after.rows[1].position == 100


def test_a_landed_chunk_that_does_not_end_its_prompt_goes_on():
    sched, plan = launched(("a", 300, 4))
    outcome = sched.chunk_done(plan.handle)
    assert (outcome.prefilling, outcome.decoding, outcome.released) == (("a",), (), ())
    assert spans(sched.tick()) == [("a", 256, 44)]


def test_a_request_keeps_one_staging_place_from_first_to_last_chunk():
    sched, plan = launched(("a", 600, 40))
    places, mains = [], []
    for _ in range(3):
        chunk = plan.chunks[0]
        places.append((chunk.staging_slot, chunk.staging_pages))
        mains.append((chunk.slot, chunk.pages))
        assert used(sched)[2:] == (1, 10)  # the prompt's pages, not the lifetime's
        sched.chunk_done(plan.handle)
        plan = sched.tick()
    assert len(set(places)) == len(set(mains)) == 1
    assert places[0][0] != 0 and 0 not in places[0][1] and len(places[0][1]) == 10
    assert used(sched)[2:] == (0, 0)


def test_staging_is_released_when_the_last_chunk_is_done_and_not_before():
    sched, plan = launched(("a", 100, 4))
    assert used(sched)[2:] == (1, 2)
    sched.tick()
    assert used(sched)[2:] == (1, 2)
    sched.chunk_done(plan.handle)
    assert used(sched)[2:] == (0, 0)


def test_a_launch_stops_where_staging_slots_run_out():
    sched, plan = launched(("a", 10, 4), ("b", 10, 4), ("c", 10, 4), staging_slots=3)
    assert spans(plan) == [("a", 0, 10), ("b", 0, 10)]
    sched.chunk_done(plan.handle)
    assert spans(sched.tick()) == [("c", 0, 10)]


def test_a_launch_stops_where_staging_pages_run_out_and_nobody_overtakes():
    sched, plan = launched(("a", 64, 4), ("b", 192, 4), ("c", 1, 4), staging_pages=4)
    assert spans(plan) == [("a", 0, 64)]
    sched.chunk_done(plan.handle)
    assert spans(sched.tick()) == [("b", 0, 192)]


def test_a_request_of_the_whole_staging_pool_runs():
    sched, plan = launched(("a", 256, 4), staging_pages=5)
    assert spans(plan) == [("a", 0, 256)]
    with pytest.raises(RequestRejected, match="5 staging pages"):
        submit(sched, ("b", 257, 4))


def test_a_failed_launch_fails_its_own_requests_only():
    sched, plan = launched(("a", 100, 4), ("b", 300, 4))
    outcome = sched.chunk_failed(plan.handle)
    assert outcome.failed == ("a", "b") and outcome.decoding == ()
    assert [released.request_id for released in outcome.released] == ["a", "b"]
    assert used(sched) == (1, 4, 0, 0)
    plan = sched.tick()
    assert (plan.kind, row_ids(plan)) == ("decode", ["row"])
    with pytest.raises(UnknownRequest):
        sched.finish("a")


def test_a_failed_launch_does_not_touch_the_queue_behind_it():
    sched, plan = launched(("a", 256, 4), ("b", 10, 4))
    assert spans(plan) == [("a", 0, 256)]
    sched.chunk_failed(plan.handle)
    assert spans(sched.tick()) == [("b", 0, 10)]


@pytest.mark.parametrize("end", ["cancel", "finish"])
@pytest.mark.parametrize("report", ["chunk_done", "chunk_failed"])
def test_the_end_of_a_request_in_flight_is_deferred(end, report):
    sched, plan = launched(("a", 100, 4), ("b", 10, 4))
    before = used(sched)
    assert getattr(sched, end)("a") is None
    assert used(sched) == before
    with pytest.raises(UnknownRequest):
        sched.cancel("a")
    with pytest.raises(RequestRejected, match="already in the scheduler"):
        submit(sched, ("a", 10, 4))
    assert row_ids(sched.tick()) == ["row"]
    outcome = getattr(sched, report)(plan.handle)
    assert outcome.dropped == ("a",) and "a" not in outcome.decoding + outcome.failed
    assert outcome.released[0].request_id == "a"
    assert outcome.released[0].staging_slot == plan.chunks[0].staging_slot
    assert "a" not in row_ids(sched.tick())
    submit(sched, ("a", 10, 4))


def test_a_prompt_cancelled_between_two_launches_is_freed_at_once():
    sched, plan = launched(("a", 600, 4))
    sched.chunk_done(plan.handle)
    released = sched.cancel("a")
    assert released is not None and released.staging_slot == plan.chunks[0].staging_slot
    assert used(sched) == (1, 4, 0, 0)


def test_a_cancelled_prompt_in_flight_is_not_continued():
    sched, plan = launched(("a", 600, 4))
    sched.cancel("a")
    sched.chunk_done(plan.handle)
    assert used(sched) == (1, 4, 0, 0)
    assert sched.tick().chunks == ()


def test_drain_waits_for_what_is_in_flight():
    sched, plan = launched(("a", 100, 4), ("b", 10, 4))
    submit(sched, ("c", 10, 4))
    assert sched.drain() == ("row", "a", "b", "c")
    assert sched.has_work and used(sched)[0] == 2  # "a" and "b" keep their places
    assert sched.tick().kind == "wait"
    outcome = sched.chunk_done(plan.handle)
    assert outcome.dropped == ("a", "b") and len(outcome.released) == 2
    assert not sched.has_work and used(sched) == (0, 0, 0, 0)
    assert sched.tick().kind == "idle"


def test_a_handle_is_reported_once():
    sched, plan = launched(("a", 100, 4))
    sched.chunk_done(plan.handle)
    for report in (sched.chunk_done, sched.chunk_failed):
        with pytest.raises(ValueError, match=f"launch {plan.handle} is not in flight"):
            report(plan.handle)


def test_one_launch_in_flight_by_default():
    sched, _ = launched(("a", 600, 4))
    assert [sched.tick().chunks for _ in range(2)] == [(), ()]
    assert len(sched.in_flight) == 1


def test_two_launches_in_flight_where_allowed_and_still_no_admission():
    sched, first = launched(("a", 1000, 4), max_chunks_in_flight=2)
    submit(sched, ("late", 10, 4))
    second = sched.tick()
    assert (second.kind, second.trace_kind, spans(second)) == ("unified", "overlap_launch", [("a", 256, 256)])
    assert sched.in_flight == (first.handle, second.handle)
    assert sched.tick().kind == "decode"
    sched.chunk_done(first.handle)
    third = sched.tick()
    assert spans(third) == [("a", 512, 256)] and sched.waiting == 1
    assert sched.in_flight == (second.handle, third.handle)


def test_a_request_in_two_launches_leaves_with_the_second():
    sched, first = launched(("a", 600, 4), max_chunks_in_flight=2)
    second = sched.tick()
    outcome = sched.chunk_failed(first.handle)
    assert outcome.failed == ("a",) and outcome.released == ()
    assert used(sched)[2:] == (1, 10)
    assert sched.tick().chunks == ()  # a failed prompt is not continued
    outcome = sched.chunk_done(second.handle)
    assert outcome.dropped == ("a",) and outcome.failed == () and len(outcome.released) == 1
    assert used(sched) == (1, 4, 0, 0)


def test_max_tokens_one_waits_for_its_results_after_landing():
    sched, plan = launched(("a", 100, 1))
    assert sched.chunk_done(plan.handle).decoding == ("a",)
    assert row_ids(sched.tick()) == ["row"]
    sched.finish("a")
    assert used(sched) == (1, 4, 0, 0)
