"""Latency and throughput of a run from the times at which its tokens reached the host.

The definitions are those of ``vllm bench serve``, so that figures can be put side by side. For one request, with
``arrival`` the moment at which its client sent it, and an *update* everything that one step of the engine handed out
of it (one token, or with ``decode_steps=8`` up to eight):

- TTFT, time to first token: first update - arrival. Waiting for a place in the engine is part of it.
- E2E latency: last update - arrival.
- TPOT, time per output token: (E2E latency - TTFT) / (output tokens - 1); a request of one output token has none.
- ITL, inter-token latency: the gaps between consecutive updates, of all requests together. A streaming client sees
  updates, not tokens, and so the tool counts them: tokens that arrive together are one gap, not a gap and zeros. With
  ``decode_steps=8`` ITL is therefore up to eight times TPOT: it says how long a reader waits, TPOT how fast tokens
  come.

Over the run, with its duration from the start to the last update of any request: requests, output tokens and all
tokens (prompt and output) of the requests that ended well, by that duration. Percentiles are numpy's, interpolated
linearly.

Two differences lie in what is measured, not in how: nothing is sent over HTTP or turned into text, and the times are
taken where ``Engine.step`` returns, which with ``overlap_dispatch`` is one dispatch after the device was done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

PERCENTILES = (50, 99)


@dataclasses.dataclass(slots=True)
class RequestTiming:
    """One request of a run; times are seconds of the run's clock.

    Attributes:
        index: which request of the workload.
        input_tokens: tokens of its prompt.
        asked_tokens: output tokens asked for.
        arrival: when its client sent it (see :mod:`qwen35_jax.bench.loops` for each kind of load).
        submitted: when the engine was given it; later than ``arrival`` by up to a step, or by the time in the queue.
        times: when each update came.
        counts: tokens of each update.
        ended: whether it has ended.
        finish_reason: why it ended.
        error: what went wrong.
    """

    index: int
    input_tokens: int
    asked_tokens: int
    arrival: float
    submitted: float
    times: list[float] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False
    finish_reason: str | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens received."""
        return sum(self.counts)

    @property
    def good(self) -> bool:
        """Whether it ended with exactly the tokens it asked for."""
        return self.finish_reason == "length" and self.error is None and self.output_tokens == self.asked_tokens

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.times[0] - self.arrival

    @property
    def e2e(self) -> float:
        """Time from arrival to the last token."""
        return self.times[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        tokens = self.output_tokens
        return (self.e2e - self.ttft) / (tokens - 1) if tokens > 1 else None

    @property
    def gaps(self) -> Sequence[float]:
        """Seconds between consecutive updates."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def latency_metrics(timings: Iterable[RequestTiming], duration: float) -> dict[str, float]:
    """The figures of a run by name; definitions are at the top of this module.

    Args:
        timings: its requests; only those that ended well count.
        duration: seconds from its start to the last token of any request.

    Returns:
        ``duration_s``, ``requests``, ``input_tokens``, ``output_tokens``, ``requests_s``, ``output_tok_s``,
        ``total_tok_s``; ``{ttft,tpot,itl,e2e}_{mean,p50,p99}_ms`` where there is any to take the mean of;
        ``submit_lag_{mean,p99}_ms``: from arrival to submission.
    """
    good = [timing for timing in timings if timing.good]
    inputs, outputs = sum(t.input_tokens for t in good), sum(t.output_tokens for t in good)
    metrics: dict[str, float] = {
        "duration_s": duration,
        "requests": len(good),
        "input_tokens": inputs,
        "output_tokens": outputs,
    }
    if duration > 0:
        metrics["requests_s"] = len(good) / duration
        metrics["output_tok_s"] = outputs / duration
        metrics["total_tok_s"] = (inputs + outputs) / duration
    samples = {
        "ttft": [t.ttft for t in good],
        "tpot": [tpot for t in good if (tpot := t.tpot) is not None],
        "itl": [gap for t in good for gap in t.gaps],
        "e2e": [t.e2e for t in good],
    }
    for name, values in samples.items():
        metrics |= _summary(name, values)
    metrics |= _summary("submit_lag", [t.submitted - t.arrival for t in good], (99,))
    return metrics


def _summary(name: str, seconds: Sequence[float], percentiles: Sequence[int] = PERCENTILES) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1e3
    found = {f"{name}_p{percent}_ms": float(np.percentile(values, percent)) for percent in percentiles}
    return {f"{name}_mean_ms": float(values.mean()), **found}
