"""Latency and throughput against numbers computed by hand."""

import pytest

from qwen35_jax.bench.metrics import RequestTiming, latency_metrics


def timing(
    index=0, *, arrival=0.0, submitted=None, times=(), counts=None, inputs=10, asked=None, reason="length", error=None
):
    counts = list(counts or [1] * len(times))
    return RequestTiming(
        index,
        inputs,
        sum(counts) if asked is None else asked,
        arrival,
        arrival if submitted is None else submitted,
        list(times),
        counts,
        True,
        reason,
        error,
    )


def test_one_request():
    metrics = latency_metrics([timing(arrival=1.0, submitted=1.25, times=(1.5, 1.7, 2.1, 2.2))], 4.0)
    assert metrics == pytest.approx(
        {
            "duration_s": 4.0,
            "requests": 1,
            "input_tokens": 10,
            "output_tokens": 4,
            "requests_s": 0.25,
            "output_tok_s": 1.0,
            "total_tok_s": 3.5,
            "ttft_mean_ms": 500.0,
            "ttft_p50_ms": 500.0,
            "ttft_p99_ms": 500.0,
            "tpot_mean_ms": 700 / 3,
            "tpot_p50_ms": 700 / 3,
            "tpot_p99_ms": 700 / 3,
            "itl_mean_ms": 700 / 3,
            "itl_p50_ms": 200.0,
            "itl_p99_ms": 200 + 0.98 * 200,  # between the second and the third of 100, 200, 400
            "e2e_mean_ms": 1200.0,
            "e2e_p50_ms": 1200.0,
            "e2e_p99_ms": 1200.0,
            "submit_lag_mean_ms": 250.0,
            "submit_lag_p99_ms": 250.0,
        }
    )


def test_tpot_is_a_mean_over_requests_and_itl_over_gaps():
    short = timing(0, times=(1.0, 2.0))  # one gap of a second
    long = timing(1, times=(1.0, 1.1, 1.2, 1.3, 1.4))  # four of a tenth
    metrics = latency_metrics([short, long], 2.0)
    assert metrics["tpot_mean_ms"] == pytest.approx((1000 + 100) / 2)
    assert metrics["itl_mean_ms"] == pytest.approx(1400 / 5)
    assert metrics["output_tok_s"] == pytest.approx(7 / 2)
    assert metrics["total_tok_s"] == pytest.approx(27 / 2)


def test_tokens_that_arrive_together_are_one_gap():
    metrics = latency_metrics([timing(times=(1.0, 1.8, 2.6), counts=(1, 8, 8))], 2.6)
    assert metrics["itl_p50_ms"] == pytest.approx(800)
    assert metrics["itl_mean_ms"] == pytest.approx(800)
    assert metrics["tpot_mean_ms"] == pytest.approx(1600 / 16)


def test_a_single_token_has_no_tpot_and_no_itl():
    metrics = latency_metrics([timing(times=(0.5,))], 0.5)
    assert not {name for name in metrics if name.startswith(("tpot", "itl"))}
    assert metrics["ttft_mean_ms"] == metrics["e2e_mean_ms"] == pytest.approx(500)
    both = latency_metrics([timing(0, times=(0.5,)), timing(1, times=(0.5, 0.75))], 0.75)
    assert both["tpot_mean_ms"] == pytest.approx(250)


def test_requests_that_did_not_end_well_do_not_count():
    good = timing(0, times=(1.0, 2.0))
    short = timing(1, times=(1.0,), asked=2)
    failed = timing(2, times=(1.0, 1.5), reason="error", error="non-finite")
    never = timing(3, asked=2, reason="error", error="rejected")
    running = RequestTiming(4, 10, 2, 0.0, 0.0, [1.0], [1])
    metrics = latency_metrics([good, short, failed, never, running], 2.0)
    assert (metrics["requests"], metrics["output_tokens"], metrics["input_tokens"]) == (1, 2, 10)
    assert metrics["ttft_p99_ms"] == pytest.approx(1000)


def test_nothing_measured():
    assert latency_metrics([], 0.0) == {"duration_s": 0.0, "requests": 0, "input_tokens": 0, "output_tokens": 0}
