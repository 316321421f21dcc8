import math

import pytest

from schedulers import (
    StepRecord,
    StepTrace,
    check_mixed_load,
    itl_percentiles,
    padding_waste,
    stalled_decode_share,
)
from tests.schedulers.helpers import scheduler, start_decoding, submit


def traced(sched, trace, start, end):
    plan = sched.tick()
    return plan, trace.record(plan, start, end)


@pytest.mark.parametrize("overlap", ["off", "stream"])
def test_kinds_without_launches(overlap):
    sched, trace = scheduler(overlap=overlap), StepTrace()
    submit(sched, ("a", 100, 3))
    traced(sched, trace, 0.0, 1.0)
    submit(sched, ("b", 70, 3))
    traced(sched, trace, 1.0, 2.0)
    traced(sched, trace, 2.0, 3.0)
    assert [record.kind for record in trace.records] == ["prefill", "unified", "decode"]
    prefill, unified, decode = trace.records
    assert (prefill.prefill_tokens, prefill.prefill_requests, prefill.padded_tokens) == (100, 1, 128)
    assert (prefill.decode_rows, prefill.padded_rows) == (0, 0)
    assert (unified.prefill_tokens, unified.decode_rows, unified.padded_rows) == (70, 1, 1)
    assert unified.padded_tokens == (128 if overlap == "off" else 256)
    assert (decode.prefill_tokens, decode.padded_tokens, decode.decode_rows, decode.padded_rows) == (0, 0, 2, 2)
    assert (decode.time, decode.duration) == (3.0, 1.0)


def test_kinds_of_a_launch():
    sched, trace = scheduler(overlap="device"), StepTrace()
    start_decoding(sched, "a", 10, 5)
    submit(sched, ("b", 100, 3))
    launch, _ = traced(sched, trace, 0.0, 1.0)
    traced(sched, trace, 1.0, 2.0)
    sched.finish("a")
    traced(sched, trace, 2.0, 3.0)
    sched.chunk_done(launch.handle)
    trace.complete(launch.chunks, 0.0, 3.0)
    traced(sched, trace, 3.0, 4.0)
    kinds = [record.kind for record in trace.records]
    assert kinds == ["overlap_launch", "overlap_decode", "overlap_wait", "overlap_complete", "decode"]
    assert [record.prefill_tokens for record in trace.records] == [100, 0, 0, 0, 0]  # counted once
    assert trace.records[0].padded_tokens == 128
    # The first token came with the completion at 3.0, the next at 4.0.
    assert trace.records[-1].gaps == ((1.0, 1),)


def test_an_idle_tick_leaves_no_record():
    trace = StepTrace()
    assert trace.record(scheduler().tick(), 0.0, 1.0) is None
    assert not trace.records


def test_keep_bounds_the_records():
    sched, trace = scheduler(), StepTrace(keep=2)
    start_decoding(sched, "a", 10, 50)
    for step in range(5):
        traced(sched, trace, step, step + 1)
    assert [record.time for record in trace.records] == [4, 5]


def test_padding_waste():
    records = [
        StepRecord(1.0, "prefill", 1.0, prefill_tokens=96, padded_tokens=128),
        StepRecord(
            2.0, "unified", 1.0, prefill_tokens=64, padded_tokens=64, decode_rows=3, decode_tokens=3, padded_rows=4
        ),
        StepRecord(3.0, "decode", 1.0, decode_rows=2, decode_tokens=9, steps=8, padded_rows=2),
    ]
    waste = padding_waste(records)
    assert waste.prefill == pytest.approx(1 - 160 / 192)
    assert waste.decode == pytest.approx(1 - 12 / 20)
    assert padding_waste([]) == (0.0, 0.0)


def test_gaps_count_every_row_from_its_first_token():
    sched, trace = scheduler(), StepTrace()
    submit(sched, ("a", 100, 5))
    traced(sched, trace, 0.0, 1.0)
    traced(sched, trace, 1.0, 1.5)
    submit(sched, ("b", 100, 5))
    _, unified = traced(sched, trace, 1.5, 4.0)
    _, decode = traced(sched, trace, 4.0, 4.5)
    assert unified.gaps == ((2.5, 1),)  # "b" has its first token here, and no gap
    assert decode.gaps == ((0.5, 2),)


def test_a_row_that_ended_does_not_leave_a_gap_to_its_successor():
    sched, trace = scheduler(), StepTrace()
    start_decoding(sched, "a", 10, 50)
    traced(sched, trace, 0.0, 1.0)
    sched.finish("a")
    submit(sched, ("a", 10, 50))  # the same id once more, much later
    traced(sched, trace, 100.0, 101.0)
    _, decode = traced(sched, trace, 101.0, 102.0)
    assert decode.gaps == ((1.0, 1),)


def test_tokens_of_ended_requests_leave_no_gap():
    sched, trace = scheduler(), StepTrace()
    start_decoding(sched, "a", 10, 50)
    start_decoding(sched, "b", 10, 50)
    traced(sched, trace, 0.0, 1.0)
    _, record = traced(sched, trace, 1.0, 2.0)
    assert record.gaps == ((1.0, 2),)
    plan = sched.tick()
    assert trace.record(plan, 2.0, 3.0, dropped={"a"}).gaps == ((1.0, 1),)


def test_tokens_of_one_dispatch_are_one_update():
    sched, trace = scheduler(decode_steps=8), StepTrace()
    start_decoding(sched, "a", 10, 50)
    traced(sched, trace, 0.0, 1.0)
    _, record = traced(sched, trace, 1.0, 9.0)
    assert (record.steps, record.decode_tokens, record.gaps) == (8, 8, ((8.0, 1),))


def test_itl_percentiles_are_weighted_by_rows():
    records = [
        StepRecord(1.0, "decode", 1.0, gaps=((0.01, 98),)),
        StepRecord(2.0, "unified", 1.0, gaps=((0.05, 1), (0.5, 1))),
    ]
    assert itl_percentiles(records, (50, 98, 99, 100)) == (0.01, 0.01, 0.05, 0.5)
    assert itl_percentiles(records) == (0.01, 0.05)
    assert all(math.isnan(value) for value in itl_percentiles([]))


def test_stalled_decode_share():
    records = [
        StepRecord(1.0, "prefill", 1.0, prefill_tokens=64),  # nobody was decoding
        StepRecord(2.0, "unified", 1.0, prefill_tokens=64, decode_rows=1),
        StepRecord(3.0, "decode", 1.0, decode_rows=1),
        StepRecord(4.0, "overlap_launch", 1.0, prefill_tokens=64, decode_rows=1),  # beside decode
        StepRecord(5.0, "overlap_decode", 1.0, decode_rows=1),
        StepRecord(6.0, "overlap_complete", 1.0),
    ]
    assert stalled_decode_share(records) == 0.25
    assert stalled_decode_share([]) == 0.0


def test_mixed_load_needs_prefill_and_all_decoders_in_one_step():
    apart = [
        StepRecord(1.0, "decode", 1.0, decode_rows=8),
        StepRecord(2.0, "prefill", 1.0, prefill_tokens=64),
        StepRecord(3.0, "unified", 1.0, prefill_tokens=64, decode_rows=7),
    ]
    check = check_mixed_load(apart, 8)
    assert not check.valid and check.most_rows == 7 and "at most 7 of 8" in check.message
    together = [*apart, StepRecord(4.0, "unified", 1.0, prefill_tokens=1, decode_rows=8)]
    assert check_mixed_load(together, 8).valid
    launch = [*apart, StepRecord(4.0, "overlap_launch", 1.0, prefill_tokens=1, decode_rows=9)]
    assert check_mixed_load(launch, 8).valid
    without = check_mixed_load(apart[:1], 8)
    assert not without.valid and "no step had prefill tokens" in without.message
    with pytest.raises(ValueError, match="at least 1 background decoder"):
        check_mixed_load(apart, 0)
