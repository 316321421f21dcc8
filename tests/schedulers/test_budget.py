"""One test for each line of the budget table."""

import pytest

from schedulers import choose_prefill_budget
from tests.schedulers.helpers import config, row_ids, scheduler, spans, start_decoding, submit


def budget(policy="auto", base=256, active=(100,), prefilling=(500,), overlap=False):
    return choose_prefill_budget(policy, base, active, prefilling, overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_off_gives_base_always(overlap):
    assert budget(policy="off", overlap=overlap) == 256
    assert budget(policy="off", active=(1,), prefilling=(10,), overlap=overlap) == 256


def test_auto_with_nothing_decoding_gives_base():
    assert budget(active=(), prefilling=(10, 500)) == 256


def test_auto_with_nothing_prefilling_gives_base():
    assert budget(active=(1,), prefilling=()) == 256


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_auto_overlap_off_defers_in_the_finishing_window(left):
    assert budget(active=(100, left, 100)) == 0


def test_auto_five_tokens_left_is_outside_the_window():
    assert budget(active=(100, 5)) == 256


def test_auto_overlap_on_skips_the_finishing_window():
    assert budget(active=(4,), prefilling=(100,), overlap=True) == 100


def test_auto_is_capped_by_the_front_prompt():
    assert budget(prefilling=(70, 500)) == 70


def test_auto_is_capped_by_base():
    assert budget(prefilling=(257, 3)) == 256


@pytest.mark.parametrize("policy", ["slo", "throughput", "AUTO", ""])
def test_policies_not_built_are_refused_by_name(policy):
    with pytest.raises(ValueError, match=f"'{policy}' is not supported"):
        budget(policy=policy)
    with pytest.raises(ValueError, match=f"'{policy}' is not supported"):
        config(policy=policy)


def four_left(overlap):
    """A scheduler with one row that has four tokens left and a prompt of 100 in the queue."""
    sched = scheduler(policy="auto", overlap=overlap)
    start_decoding(sched, "row", 10, 5)
    submit(sched, ("next", 100, 8), ("after", 100, 8))
    return sched


@pytest.mark.parametrize("overlap", ["stream", "device"])
def test_four_tokens_left_overlap_on_gives_the_unified_plan(overlap):
    plan = four_left(overlap).tick()
    assert plan.kind == "unified"
    assert spans(plan) == [("next", 0, 100)]
    assert row_ids(plan) == ["row"]


def test_four_tokens_left_overlap_off_gives_a_decode_only_plan():
    sched = four_left("off")
    for _ in range(4):
        plan = sched.tick()
        assert (plan.kind, spans(plan), row_ids(plan), plan.steps) == ("decode", [], ["row"], 1)
    plan = sched.tick()  # the row's last token is scheduled: nothing decodes and the base budget is back
    assert (plan.kind, spans(plan)) == ("prefill", [("next", 0, 100), ("after", 0, 100)])


def test_auto_takes_only_the_front_prompt_where_off_packs():
    for policy, expected in (("auto", [("b", 0, 70)]), ("off", [("b", 0, 70), ("c", 0, 50)])):
        sched = scheduler(policy=policy)
        start_decoding(sched, "a", 10, 100)
        submit(sched, ("b", 70, 8), ("c", 50, 8))
        assert spans(sched.tick()) == expected
