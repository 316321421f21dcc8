"""What a timed run answered, compared with the same requests run alone.

Rows in company and rows alone go through other matrix shapes, for which the GPU's library picks other kernels, which
round differently: in bfloat16 the logits differ in their last bits, and where two tokens are almost equally probable
the greedy choice may differ, after which the texts have nothing to do with each other. So:

- the tokens of the timed run are compared with those of a run alone up to the first difference;
- at a difference the run alone says by how much it prefers its own token (the margin, a difference of two of its log
  probabilities). In float32 any difference is a mismatch; in bfloat16 one whose margin rounding does not explain is;
- the log probabilities of the tokens of the common prefix are compared with those of a second run in company. The timed
  run reports none: asking for them would make it run other programs than the ones that are to be timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen35_jax.bench.loops import Answer, Load, LoadRun
from qwen35_jax.bench.metrics import RequestTiming
from qwen35_jax.bench.workload import Workload

if TYPE_CHECKING:
    from qwen35_jax.driver import EngineLike

BF16_MARGIN = 0.75
"""Nats by which a run alone may prefer its own token where a bfloat16 run in company chose another.

A margin is the difference of two log probabilities, each of which may lie as far off as those of deep models with
random weights do: ``scripts/gpu_check.py --sections=batching`` measures how far.
"""

_LOGPROBS = 20


def request_checks(number: int, timings: Mapping[int, RequestTiming]) -> dict[str, Any]:
    """Whether every request was answered, well and at full length.

    Args:
        number: requests of the workload.
        timings: of those that were sent.

    Returns:
        ``requests_asked``, ``requests_answered`` (ended, however), ``wrong_length`` (ended without an error and without
        exactly the tokens asked for), ``failed`` (not answered, an error, or a wrong length) and, if any failed,
        ``first_error``.
    """
    ended = [timing for timing in timings.values() if timing.ended]
    checks: dict[str, Any] = {
        "requests_asked": number,
        "requests_answered": len(ended),
        "wrong_length": sum(timing.error is None and not timing.good for timing in ended),
        "failed": number - sum(timing.good for timing in ended),
    }
    errors = [timing.error for timing in ended if timing.error is not None]
    if errors:
        checks["first_error"] = errors[0]
    return checks


def rows_to_check(number: int, wanted: int) -> tuple[int, ...]:
    """``wanted`` requests of ``number``, evenly spaced."""
    return tuple(np.unique(np.linspace(0, number - 1, min(wanted, number)).astype(int)).tolist())


def compare_with_solo(
    engine: EngineLike,
    workload: Workload,
    answers: Mapping[int, Answer],
    *,
    company: int,
    margin: float,
) -> dict[str, Any]:
    """Run requests of a timed run again, alone and in company, and compare.

    Args:
        engine: idle.
        workload: what the timed run ran.
        answers: its tokens, of the requests to compare.
        company: requests that run at once in the run in company.
        margin: largest margin that rounding explains; 0 for float32.

    Returns:
        See :func:`compare`.
    """
    together = _in_company(engine, workload, tuple(answers), company)
    alone = {}
    for index in answers:
        single = Workload(workload.name, (workload.items[index],))
        run = LoadRun(engine, single, Load("throughput"), prefix=f"alone-{index}-", keep=(0,), logprobs=_LOGPROBS)
        alone[index] = run.run().answers[0]
    return compare(answers, alone, together, margin=margin)


def _in_company(engine: EngineLike, workload: Workload, rows: Sequence[int], company: int) -> dict[int, Answer]:
    """The rows with log probabilities, others of the workload beside them until the rows are done."""
    others = [index for index in range(len(workload.items)) if index not in set(rows)]
    order = [*rows, *others][: max(company, len(rows))]
    part = Workload(workload.name, tuple(workload.items[index] for index in order))
    left = set(range(len(rows)))
    run = LoadRun(
        engine,
        part,
        Load("throughput"),
        prefix="company-",
        keep=range(len(rows)),
        logprobs=_LOGPROBS,
        on_end=lambda timing: left.discard(timing.index),
    )
    while left and run.advance():
        pass
    run.give_up()
    return {index: run.answers[at] for at, index in enumerate(rows)}


@dataclasses.dataclass(frozen=True)
class _Difference:
    request: int
    token: int
    margin: float
    listed: bool  # whether the run alone had the other token among its most probable ones


def compare(
    timed: Mapping[int, Answer], alone: Mapping[int, Answer], together: Mapping[int, Answer], *, margin: float
) -> dict[str, Any]:
    """Compare the answers of a timed run with those of the runs after it.

    Args:
        timed: tokens of the timed run, by request.
        alone: tokens and log probabilities of the same requests run alone.
        together: the same of a run in company.
        margin: largest margin that rounding explains.

    Returns:
        ``rows_compared``; ``tokens_compared`` (of the common prefixes, and the first difference of each row);
        ``rows_differing``; ``agreeing_prefix_share`` (mean over rows); ``max_margin_at_difference`` (0.0 without one; a
        lower bound where the run alone did not list the other token); ``margin_allowed``; ``max_abs_delta_logprob`` of
        alone against together over their common prefixes; ``first_mismatch``: request, token and margin of the earliest
        difference that ``margin`` does not explain, or None.
    """
    differences, shares, compared, delta = [], [], 0, 0.0
    for index, answer in timed.items():
        solo = alone[index]
        common = _common_prefix(answer.tokens, solo.tokens)
        length = max(len(answer.tokens), len(solo.tokens))
        shares.append(common / length if length else 1.0)
        compared += min(common + 1, length)
        if common < length:
            differences.append(_difference(index, common, answer, solo))
        other = together[index]
        pairs = zip(solo.logprobs, other.logprobs, strict=False)
        for (a, b), _ in zip(pairs, range(_common_prefix(solo.tokens, other.tokens)), strict=False):
            delta = max(delta, abs(a.logprob - b.logprob))
    wrong = [found for found in differences if not found.listed or found.margin > margin or margin == 0]
    first = min(wrong, key=lambda found: found.token, default=None)
    return {
        "rows_compared": len(timed),
        "tokens_compared": compared,
        "rows_differing": len(differences),
        "agreeing_prefix_share": float(np.mean(shares)) if shares else None,
        "max_margin_at_difference": max((found.margin for found in differences), default=0.0),
        "margin_allowed": margin,
        "max_abs_delta_logprob": delta if timed else None,
        "first_mismatch": first and {"request": first.request, "token": first.token, "margin": first.margin},
    }


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _difference(index: int, at: int, timed: Answer, solo: Answer) -> _Difference:
    if at >= len(timed.tokens) or at >= len(solo.logprobs):
        return _Difference(index, at, 0.0, listed=False)  # one of them ended early: no rounding does that
    entry = solo.logprobs[at]
    for token, logprob, _ in entry.top:
        if token == timed.tokens[at]:
            return _Difference(index, at, entry.logprob - logprob, listed=True)
    least = entry.top[-1][1] if entry.top else entry.logprob
    return _Difference(index, at, entry.logprob - least, listed=False)


def failures(checks: Mapping[str, Any]) -> list[str]:
    """What in a record's checks makes its figures worthless, in words."""
    found = [f"{name} = {checks[name]}" for name in ("failed", "compiles_after_warmup") if checks.get(name)]
    if "first_error" in checks:
        found.append(f"the first error: {checks['first_error']}")
    mismatch = checks.get("first_mismatch")
    if mismatch is not None:
        found.append(
            f"request {mismatch['request']} differs from the same request alone at output token {mismatch['token']}, "
            f"by a margin of {mismatch['margin']:.3g} (allowed {checks['margin_allowed']:.3g})"
        )
    return found
