"""The plan table, steps per dispatch, ends and cancellation without chunks in flight."""

import time

import pytest

from schedulers import Bucket, BucketLadder, Scheduler, UnknownRequest
from tests.schedulers.helpers import config, row_ids, scheduler, spans, start_decoding, submit

EMPTY = (0, 0, 0, 0)


def used(sched):
    stats = sched.stats()
    return (stats.slots_used, stats.pages_used, stats.staging_slots_used, stats.staging_pages_used)


def test_no_rows_no_chunk_is_idle():
    plan = scheduler().tick()
    assert (plan.kind, plan.trace_kind, plan.bucket) == ("idle", None, None)


@pytest.mark.parametrize("overlap", ["off", "stream", "device"])
def test_chunk_without_rows_is_prefill(overlap):
    sched = scheduler(overlap=overlap)
    submit(sched, ("a", 10, 4))
    plan = sched.tick()
    assert (plan.kind, plan.trace_kind) == ("prefill", "prefill")
    assert plan.bucket == plan.prefill_bucket == Bucket(64, 4, 0, 4)
    assert plan.decode_bucket is None


@pytest.mark.parametrize("overlap", ["off", "stream", "device"])
def test_rows_without_chunk_is_decode(overlap):
    sched = scheduler(overlap=overlap)
    start_decoding(sched, "a", 10, 9)
    plan = sched.tick()
    assert (plan.kind, plan.trace_kind, plan.handle) == ("decode", "decode", None)
    assert plan.bucket == plan.decode_bucket == Bucket(0, 0, 1, 4)


def both(overlap):
    sched = scheduler(overlap=overlap)
    start_decoding(sched, "a", 10, 9)
    submit(sched, ("b", 300, 4))
    return sched.tick()


def test_rows_and_chunk_overlap_off_are_two_programs_of_one_tick():
    plan = both("off")
    assert (plan.kind, plan.trace_kind, plan.bucket, plan.handle) == ("unified", "unified", None, None)
    assert plan.prefill_bucket == Bucket(256, 8, 0, 4) and plan.decode_bucket == Bucket(0, 0, 1, 4)


def test_rows_and_chunk_stream_are_one_program():
    plan = both("stream")
    assert (plan.kind, plan.trace_kind, plan.handle) == ("unified", "unified", None)
    assert plan.bucket == Bucket(256, 8, 1, 16)
    assert plan.prefill_bucket is None and plan.decode_bucket is None


def test_rows_and_chunk_device_launch_beside_decode():
    plan = both("device")
    assert (plan.kind, plan.trace_kind, plan.bucket) == ("unified", "overlap_launch", None)
    assert plan.handle is not None
    assert plan.prefill_bucket == Bucket(256, 8, 0, 4) and plan.decode_bucket == Bucket(0, 0, 1, 4)


def test_a_request_does_not_decode_in_the_step_that_ends_its_prompt():
    sched = scheduler()
    submit(sched, ("a", 10, 4))
    assert row_ids(sched.tick()) == []
    assert row_ids(sched.tick()) == ["a"]


def test_a_row_whose_last_token_is_scheduled_is_not_planned_and_keeps_its_memory():
    sched = scheduler()
    start_decoding(sched, "a", 10, 3)
    assert [row_ids(sched.tick()) for _ in range(3)] == [["a"], ["a"], []]
    assert used(sched) == (1, 1, 0, 0)
    assert sched.has_work and sched.tick().kind == "idle"  # its results have not been read
    assert sched.stats().finishing == 1
    assert sched.finish("a").slot == 1
    assert used(sched) == EMPTY and not sched.has_work


def test_max_tokens_one_is_done_with_the_prefill():
    sched = scheduler()
    submit(sched, ("a", 10, 1))
    assert sched.tick().kind == "prefill"
    assert sched.tick().kind == "idle" and sched.has_work
    sched.finish("a")
    assert used(sched) == EMPTY


def test_finish_may_come_while_a_later_step_is_already_dispatched():
    sched = scheduler()
    start_decoding(sched, "a", 10, 100)
    start_decoding(sched, "b", 10, 100)
    assert row_ids(sched.tick()) == ["a", "b"]
    assert row_ids(sched.tick()) == ["a", "b"]  # dispatched before the end of "a" in the step before is read
    sched.finish("a")
    assert row_ids(sched.tick()) == ["b"]
    assert used(sched)[0] == 1


def test_eight_steps_when_nothing_prefills():
    sched = scheduler(decode_steps=8)
    start_decoding(sched, "a", 10, 12)
    start_decoding(sched, "b", 20, 6)  # "a" made its second token meanwhile
    plan = sched.tick()
    assert (plan.kind, plan.steps) == ("decode", 8)
    assert [(row.position, row.steps) for row in plan.rows] == [(11, 8), (20, 5)]
    plan = sched.tick()
    assert (plan.steps, [(row.request_id, row.position, row.steps) for row in plan.rows]) == (8, [("a", 19, 2)])
    assert sched.tick().kind == "idle"


def test_one_step_when_no_row_has_more_than_one_token_left():
    sched = scheduler(decode_steps=8)
    start_decoding(sched, "a", 10, 2)
    plan = sched.tick()
    assert (plan.steps, plan.rows[0].steps) == (1, 1)


def test_one_step_while_a_prompt_is_queued():
    sched = scheduler(decode_steps=8, policy="auto")
    start_decoding(sched, "a", 10, 5)
    submit(sched, ("b", 10, 4))
    plan = sched.tick()  # the finishing window holds the prompt back
    assert (plan.kind, plan.steps) == ("decode", 1)


def test_one_step_in_a_unified_plan():
    sched = scheduler(decode_steps=8)
    start_decoding(sched, "a", 10, 50)
    submit(sched, ("b", 10, 4))
    plan = sched.tick()
    assert (plan.kind, plan.steps, plan.rows[0].steps) == ("unified", 1, 1)


def test_one_step_while_a_launch_is_in_flight():
    sched = scheduler(decode_steps=8, overlap="device")
    start_decoding(sched, "a", 10, 50)
    submit(sched, ("b", 10, 4))
    handle = sched.tick().handle
    plan = sched.tick()
    assert (plan.kind, plan.steps) == ("decode", 1)
    sched.chunk_done(handle)
    assert sched.tick().steps == 8


def test_the_table_width_covers_every_step_of_the_dispatch():
    sched = scheduler(decode_steps=8)
    start_decoding(sched, "a", 250, 20)  # the steps write positions 250 .. 257: a fifth page
    plan = sched.tick()
    assert plan.rows[0].position + plan.rows[0].steps == 258
    assert plan.bucket.width == 16


def test_the_table_width_covers_the_context_of_a_later_chunk():
    sched = scheduler()
    submit(sched, ("a", 300, 4))
    assert sched.tick().bucket.width == 4
    assert sched.tick().bucket.width == 16  # 44 tokens, but 300 tokens of context: five pages


@pytest.mark.parametrize(("row", "chunk"), [(10, 300), (300, 10)])
def test_the_table_width_of_a_unified_program_covers_rows_and_chunks(row, chunk):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024}
    ladder = BucketLadder.from_limits(**limits, unified=True, width_rungs=(1, 2, 4, 8))
    sched = Scheduler(config(overlap="stream", max_num_batched_tokens=512), ladder)
    start_decoding(sched, "row", row, 9)
    submit(sched, ("chunk", chunk, 9))
    plan = sched.tick()
    assert plan.kind == "unified" and plan.bucket.width == 8


def test_cancel_while_waiting_prefilling_and_decoding_frees_everything_at_once():
    sched = scheduler(max_num_seqs=2, num_slots=3)
    start_decoding(sched, "a", 10, 50)
    submit(sched, ("b", 600, 4), ("c", 10, 4))
    sched.tick()
    assert sched.waiting == 1 and sched.running == 2
    assert [sched.cancel(request_id).request_id for request_id in "cba"] == ["c", "b", "a"]
    assert used(sched) == EMPTY and not sched.has_work
    assert sched.tick().kind == "idle"


def test_a_cancelled_prompt_is_not_continued():
    sched = scheduler()
    submit(sched, ("a", 600, 4), ("b", 10, 4))
    sched.tick()
    sched.cancel("a")
    assert spans(sched.tick()) == [("b", 0, 10)]


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_an_unknown_id_is_named(end):
    sched = scheduler()
    with pytest.raises(UnknownRequest, match="'ghost' is not in the scheduler"):
        getattr(sched, end)("ghost")
    submit(sched, ("a", 10, 4))
    getattr(sched, end)("a")
    with pytest.raises(UnknownRequest, match="'a'"):
        getattr(sched, end)("a")


def test_drain_cancels_everything():
    sched = scheduler(max_num_seqs=2, num_slots=3)
    start_decoding(sched, "a", 10, 50)
    submit(sched, ("b", 600, 4), ("c", 10, 4))
    sched.tick()
    assert sched.drain() == ("a", "b", "c")
    assert used(sched) == EMPTY and not sched.has_work and sched.tick().kind == "idle"


def test_stats_publish_the_load():
    sched = scheduler(max_num_seqs=3, num_slots=4)
    start_decoding(sched, "a", 10, 50)
    start_decoding(sched, "b", 10, 2)
    submit(sched, ("c", 600, 40), ("d", 10, 4))
    sched.tick()
    stats = sched.stats()
    assert (stats.waiting, stats.prefilling, stats.decoding, stats.finishing) == (1, 1, 1, 1)
    assert (stats.slots_used, stats.slots_total, stats.pages_used, stats.pages_total) == (3, 3, 12, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlap": "both"}, "overlap 'both' is not supported"),
        ({"decode_steps": 4}, "decode_steps must be one of"),
        ({"page_size": 16}, "page_size must be 64"),
        ({"max_num_batched_tokens": 100}, "multiple of 64, got 100"),
        ({"max_num_batched_tokens": 0}, "multiple of 64, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"num_slots": 8}, "num_slots 8 must hold the null slot and max_num_seqs 8"),
        ({"overlap": "device", "staging_slots": 1}, "staging_slots must be at least 2"),
        ({"overlap": "device", "staging_pages": 0}, "staging_pages must be at least 2"),
        ({"overlap": "device", "max_chunks_in_flight": 0}, "max_chunks_in_flight must be at least 1"),
        ({"overlap": "stream", "staging_slots": 4}, "need overlap 'device', not 'stream'"),
        ({"max_chunks_in_flight": 2}, "need overlap 'device', not 'off'"),
    ],
)
def test_config_refuses_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_a_ladder_too_small_for_the_limits_is_refused():
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 1024}
    for name, axis in (("max_num_seqs", "rows"), ("max_num_batched_tokens", "tokens"), ("max_model_len", "width")):
        ladder = BucketLadder.from_limits(**(limits | {name: limits[name] // 2}))
        with pytest.raises(ValueError, match=f"largest {axis} rung"):
            Scheduler(config(), ladder)
    with pytest.raises(ValueError, match="'stream' needs unified"):
        Scheduler(config(overlap="stream"), BucketLadder.from_limits(**limits))


def test_planning_a_full_decode_step_is_cheap():
    sched = scheduler(max_num_seqs=256, num_slots=257, num_pages=2000, max_num_batched_tokens=4096)
    submit(sched, *((f"r{i}", 16, 300) for i in range(256)))
    while sched.stats().decoding < 256:
        sched.tick()
    best = min(_timed(sched.tick) for _ in range(30))
    assert best < 5e-3  # 0.4 ms measured on a busy core


def _timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
