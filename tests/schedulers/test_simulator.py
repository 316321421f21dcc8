import random

import pytest

from schedulers import LinearCost, SimRequest, check_mixed_load, itl_percentiles, simulate, stalled_decode_share
from tests.schedulers.helpers import config

OVERLAPS = ["off", "stream", "device"]


def workload(count=60, gap=0.004, seed=0):
    rng = random.Random(seed)
    return [
        SimRequest(f"r{i}", i * gap, rng.randint(1, 600), limit := rng.randint(1, 60), rng.randint(1, limit))
        for i in range(count)
    ]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("policy", ["off", "auto"])
@pytest.mark.parametrize("late", [True, False])
def test_every_request_ends_with_its_own_length(overlap, policy, late):
    requests = workload()
    result = simulate(config(overlap=overlap, policy=policy, decode_steps=8), requests, late=late)
    assert not result.rejected and sorted(result.finish_order) == sorted(r.request_id for r in requests)
    for request in requests:
        times = result.requests[request.request_id]
        assert times.tokens == request.output_len
        assert request.arrival < times.first_token <= times.finish <= result.makespan
    stats = result.scheduler.stats()
    assert (stats.slots_used, stats.pages_used, stats.staging_slots_used, stats.staging_pages_used) == (0, 0, 0, 0)
    assert sum(record.prefill_tokens for record in result.trace.records) == sum(r.prompt_len for r in requests)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_two_runs_are_equal(overlap):
    runs = [simulate(config(overlap=overlap), workload()) for _ in range(2)]
    assert list(runs[0].trace.records) == list(runs[1].trace.records)
    assert runs[0].requests == runs[1].requests


def test_rejections_are_kept_with_their_message():
    result = simulate(config(), [SimRequest("long", 0.0, 5000, 4, 4), SimRequest("ok", 0.0, 10, 4, 4)])
    assert "model length" in result.rejected["long"] and result.finish_order == ["ok"]


def test_time_passes_to_the_next_arrival():
    cost = LinearCost(step=1.0, token=0.0, row=0.0)
    result = simulate(config(), [SimRequest("a", 0.0, 10, 2, 2), SimRequest("b", 50.0, 10, 1, 1)], cost)
    assert result.requests["a"].first_token == 1.0 and result.requests["a"].finish == 2.0
    assert result.requests["b"].first_token == 51.0 == result.makespan


def test_reading_late_costs_a_step_but_not_a_token():
    requests = [SimRequest("a", 0.0, 10, 50, 5)]  # ends by EOS, so one more step is already dispatched
    late, prompt = (simulate(config(), requests, late=late) for late in (True, False))
    assert late.requests["a"].tokens == prompt.requests["a"].tokens == 5
    assert len(late.trace.records) == len(prompt.trace.records) + 1


def mixed(overlap, policy="off"):
    background = [SimRequest(f"bg{i}", 0.0, 16, 400, 400) for i in range(4)]
    foreground = [SimRequest(f"fg{i}", 0.1 + 0.03 * i, 256, 8, 8) for i in range(20)]
    return simulate(config(overlap=overlap, policy=policy), background + foreground)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_mixed_load_is_one(overlap):
    assert check_mixed_load(mixed(overlap).trace.records, 4).valid


def test_device_overlap_stalls_no_decode_step():
    device, off = mixed("device").trace.records, mixed("off").trace.records
    assert stalled_decode_share(device) == 0.0 < stalled_decode_share(off)
    assert itl_percentiles(device)[1] < itl_percentiles(off)[1]
    kinds = {record.kind for record in device}
    assert kinds >= {"overlap_launch", "overlap_decode", "overlap_complete", "decode"}


def test_a_trickle_is_not_a_mixed_load():
    result = simulate(config(), [SimRequest(f"r{i}", 10.0 * i, 64, 4, 4) for i in range(5)])
    assert not check_mixed_load(result.trace.records, 2).valid
