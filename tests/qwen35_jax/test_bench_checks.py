"""Comparisons of a timed run with runs after it, on answers made by hand."""

import dataclasses

import pytest

from qwen35_jax.bench.checks import compare, failures, rows_to_check
from qwen35_jax.bench.loops import Answer
from tests.qwen35_jax.fakes import TokenLogprob


def answer(tokens, logprobs=None, tops=None):
    """An answer whose token i has logprob -0.5 and stands before token + 100 (logprob -0.6) unless said otherwise."""
    logprobs = logprobs or [-0.5] * len(tokens)
    tops = tops or [((t, p, 1), (t + 100, p - 0.1, 2)) for t, p in zip(tokens, logprobs, strict=True)]
    return Answer(list(tokens), [TokenLogprob(t, p, 1, top) for t, p, top in zip(tokens, logprobs, tops, strict=True)])


SOLO = answer([1, 2, 3, 4])


def checks(timed, *, margin, solo=SOLO, together=SOLO):
    return compare({7: Answer(list(timed))}, {7: solo}, {7: together}, margin=margin)


@pytest.mark.parametrize("margin", [0.0, 0.25])
def test_equal_tokens(margin):
    found = checks([1, 2, 3, 4], margin=margin)
    assert found == {
        "rows_compared": 1,
        "tokens_compared": 4,
        "rows_differing": 0,
        "agreeing_prefix_share": 1.0,
        "max_margin_at_difference": 0.0,
        "margin_allowed": margin,
        "max_abs_delta_logprob": 0.0,
        "first_mismatch": None,
    }
    assert failures(found) == []


def test_another_token_within_the_margin_is_a_difference_and_no_mismatch():
    found = checks([1, 2, 103, 9], margin=0.25)
    assert (found["rows_differing"], found["agreeing_prefix_share"], found["tokens_compared"]) == (1, 0.5, 3)
    assert found["max_margin_at_difference"] == pytest.approx(0.1)
    assert found["first_mismatch"] is None and failures(found) == []


@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_one_beyond_it_is_a_mismatch_and_in_float32_every_one_is(margin):
    found = checks([1, 2, 103, 9], margin=margin)
    assert found["first_mismatch"] == {"request": 7, "token": 2, "margin": pytest.approx(0.1)}
    assert "request 7 differs from the same request alone at output token 2" in failures(found)[0]


def test_a_token_that_the_run_alone_does_not_list_is_a_mismatch():
    found = checks([1, 55, 3, 4], margin=0.25)
    assert found["first_mismatch"] == {"request": 7, "token": 1, "margin": pytest.approx(0.1)}  # a lower bound


def test_an_exact_tie_is_a_mismatch_in_float32_alone():
    tie = answer([1], tops=[((1, -0.5, 1), (5, -0.5, 1))])
    assert checks([5], margin=0.0, solo=tie, together=tie)["first_mismatch"] is not None
    assert checks([5], margin=0.25, solo=tie, together=tie)["first_mismatch"] is None


def test_an_answer_that_ends_early_is_a_mismatch():
    found = checks([1, 2], margin=0.25)
    assert found["first_mismatch"] == {"request": 7, "token": 2, "margin": 0.0}


def test_logprobs_are_compared_up_to_the_first_difference_of_their_runs():
    together = answer([1, 2, 9, 4], logprobs=[-0.5, -0.53, -7.0, -9.0])
    assert checks([1, 2, 3, 4], margin=0.25, together=together)["max_abs_delta_logprob"] == pytest.approx(0.03)


def test_the_earliest_mismatch_of_several_rows_is_named():
    timed = {0: Answer([1, 2, 3, 50]), 1: Answer([1, 51, 3, 4]), 2: Answer([1, 2, 3, 4])}
    found = compare(timed, dict.fromkeys(timed, SOLO), dict.fromkeys(timed, SOLO), margin=0.25)
    assert found["first_mismatch"]["request"] == 1
    assert (found["rows_compared"], found["rows_differing"]) == (3, 2)
    assert found["agreeing_prefix_share"] == pytest.approx((0.75 + 0.25 + 1) / 3)


def test_rows_are_spread_over_the_workload():
    assert rows_to_check(100, 4) == (0, 33, 66, 99)
    assert rows_to_check(2, 4) == (0, 1)
    assert rows_to_check(5, 0) == ()


def test_what_makes_figures_worthless():
    good = {"failed": 0, "compiles_after_warmup": 0, "first_mismatch": None}
    assert failures(good) == []
    assert failures(good | {"compiles_after_warmup": 2}) == ["compiles_after_warmup = 2"]
    assert failures(good | {"failed": 1, "first_error": "x"}) == ["failed = 1", "the first error: x"]


def test_the_twin_of_the_fakes_is_like_the_engine_s_own():
    from qwen35_jax.engine import TokenLogprob as Real

    assert [f.name for f in dataclasses.fields(Real)] == [f.name for f in dataclasses.fields(TokenLogprob)]
