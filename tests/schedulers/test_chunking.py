import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.chunking import take_chunks
from tests.schedulers.helpers import row_ids, scheduler, spans, submit


@pytest.mark.parametrize(
    ("left", "budget", "requests", "lengths"),
    [
        ([100, 50], 256, 8, [100, 50]),  # both whole
        ([100, 300], 256, 8, [100, 128]),  # 156 left, cut down to the grid
        ([200, 100], 256, 8, [200]),  # 56 left: less than a grid cell, nobody overtakes
        ([200, 56, 1], 256, 8, [200, 56]),  # budget spent exactly
        ([1000], 256, 8, [256]),
        ([1, 1, 1], 256, 2, [1, 1]),  # requests of the largest bucket
        ([40], 40, 8, [40]),  # a budget off the grid that ends the prompt
        ([100], 63, 8, []),  # less than a cell
        ([100], 0, 8, []),
        ([], 256, 8, []),
        ([200, 100, 3], 256, 8, [200]),  # the small one behind does not bypass
    ],
)
def test_take_chunks(left, budget, requests, lengths):
    assert take_chunks(left, budget, requests) == lengths


@settings(max_examples=100, deadline=None)
@given(left=st.lists(st.integers(1, 700), max_size=10), budget=st.integers(0, 1024), requests=st.integers(0, 8))
def test_take_chunks_keeps_caps_grid_and_order(left, budget, requests):
    lengths = take_chunks(iter(left), budget, requests)
    assert sum(lengths) <= budget and len(lengths) <= requests
    for index, length in enumerate(lengths):
        assert 0 < length <= left[index]
        if length < left[index]:
            assert length % 64 == 0 and index == len(lengths) - 1
    if lengths and len(lengths) < min(len(left), requests) and lengths[-1] == left[len(lengths) - 1]:
        assert budget - sum(lengths) < min(64, left[len(lengths)])  # stopped only because nothing more could go in


def test_a_long_prompt_runs_in_grid_chunks_and_its_end_need_not_lie_on_it():
    sched = scheduler()
    submit(sched, ("a", 600, 4))
    plans = [sched.tick() for _ in range(3)]
    assert [spans(plan) for plan in plans] == [[("a", 0, 256)], [("a", 256, 256)], [("a", 512, 88)]]
    assert [(c.first, c.last) for plan in plans for c in plan.chunks] == [(True, False), (False, False), (False, True)]


def test_a_chunk_starts_on_the_grid_whatever_was_in_the_step():
    sched = scheduler()
    submit(sched, ("a", 100, 4), ("b", 300, 4))
    assert spans(sched.tick()) == [("a", 0, 100), ("b", 0, 128)]
    assert spans(sched.tick()) == [("b", 128, 172)]


def test_the_last_chunk_yields_the_first_token_in_the_same_step():
    sched = scheduler()
    submit(sched, ("a", 300, 3))
    assert not sched.tick().chunks[0].last
    assert sched.tick().chunks[0].last
    plans = [sched.tick() for _ in range(3)]
    # Two more tokens make three: the first came with the chunk. The first row feeds it at position 300.
    assert [[row.position for row in plan.rows] for plan in plans] == [[300], [301], []]


def test_a_first_chunk_of_one_token_is_a_prefill():
    sched = scheduler()
    submit(sched, ("a", 1, 3))
    plan = sched.tick()
    assert (plan.kind, plan.rows) == ("prefill", ())
    assert plan.chunks[0].first and plan.chunks[0].last and plan.chunks[0].length == 1


def test_a_second_chunk_of_one_token_is_a_prefill_that_continues():
    sched = scheduler()
    submit(sched, ("a", 257, 3))
    sched.tick()
    plan = sched.tick()
    assert spans(plan) == [("a", 256, 1)] and plan.kind == "prefill"
    assert not plan.chunks[0].first and plan.chunks[0].last


def test_many_short_prompts_are_limited_by_the_requests_of_the_largest_bucket():
    sched = scheduler(max_num_seqs=32, num_slots=33, max_num_batched_tokens=64)
    submit(sched, *((f"r{i}", 1, 2) for i in range(10)))
    plan = sched.tick()
    assert len(plan.chunks) == sched.ladder.max_requests == 4
    assert len(row_ids(sched.tick())) == 4


def test_many_short_prompts_take_a_token_rung_that_carries_them():
    sched = scheduler(max_num_seqs=32, num_slots=33)
    submit(sched, *((f"r{i}", 2, 2) for i in range(10)))
    plan = sched.tick()
    assert plan.prefill_tokens == 20
    assert plan.prefill_bucket.tokens == 256 and plan.prefill_bucket.requests == 16
