"""One record a step, and the figures computed from the records: padding waste, inter-token latency, stalled decode."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from schedulers.plan import Chunk, Plan, TraceKind


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it ran.

    Attributes:
        time: when its results were there, in seconds of the caller's clock.
        kind: plan kind, or the event of an overlapped chunk's life.
        duration: seconds from its dispatch to its results (of a launch that decodes beside it: the decode part).
        prefill_tokens: real prompt tokens; those of a launch are counted where it is launched.
        prefill_requests: requests they belong to.
        decode_rows: real decode rows.
        decode_tokens: output tokens those rows were to produce.
        steps: decode steps of the dispatch.
        padded_tokens: T of the program; 0 if it has no prefill part.
        padded_requests: R of the program; 0 if it has no prefill part.
        padded_rows: B of the program; 0 if it has no decode part.
        gaps: pairs (seconds since a row's previous update, number of rows with that gap). Tokens of one dispatch arrive
            together and are one update, so several steps a dispatch do not flatter the latency.
    """

    time: float
    kind: TraceKind
    duration: float
    prefill_tokens: int = 0
    prefill_requests: int = 0
    decode_rows: int = 0
    decode_tokens: int = 0
    steps: int = 1
    padded_tokens: int = 0
    padded_requests: int = 0
    padded_rows: int = 0
    gaps: tuple[tuple[float, int], ...] = ()


class StepTrace:
    """Collects the records of a run in the order in which steps complete.

    Attributes:
        records: the records, oldest first.
    """

    def __init__(self, keep: int | None = None):
        """Args: keep: most records to hold, the oldest are dropped first; None holds all."""
        self.records: collections.deque[StepRecord] = collections.deque(maxlen=keep)
        # Time of each live row's latest token. Every row that can decode is in every decode plan, so whoever is missing
        # from one has ended and is forgotten: nothing grows with the number of requests served.
        self._latest: dict[str, float] = {}

    def record(self, plan: Plan, start: float, end: float, dropped: Collection[str] = ()) -> StepRecord | None:
        """Add a plan that has run.

        Args:
            plan: the plan; an idle one leaves no record.
            start: when it was dispatched.
            end: when its results were there.
            dropped: requests that had ended before, whose tokens of this step nobody sees.
        """
        if plan.trace_kind is None:
            return None
        gaps: collections.Counter[float] = collections.Counter()
        if plan.rows:
            before, self._latest = self._latest, {}
            for row in plan.rows:
                if row.request_id in dropped:
                    continue
                self._latest[row.request_id] = end
                if row.request_id in before:
                    gaps[end - before[row.request_id]] += 1
        if plan.handle is None:
            self._first_tokens((chunk.request_id for chunk in plan.chunks if chunk.last), end)
        prefill = plan.prefill_bucket or (plan.bucket if plan.chunks else None)
        decode = plan.decode_bucket or (plan.bucket if plan.rows else None)
        record = StepRecord(
            time=end,
            kind=plan.trace_kind,
            duration=end - start,
            prefill_tokens=plan.prefill_tokens,
            prefill_requests=len(plan.chunks),
            decode_rows=len(plan.rows),
            decode_tokens=sum(row.steps for row in plan.rows),
            steps=plan.steps,
            padded_tokens=prefill.tokens if prefill else 0,
            padded_requests=prefill.requests if prefill else 0,
            padded_rows=decode.rows if decode else 0,
            gaps=tuple(sorted(gaps.items())),
        )
        self.records.append(record)
        return record

    def complete(self, chunks: Sequence[Chunk], start: float, end: float) -> StepRecord:
        """Add the completion of a launch (``device`` overlap); its tokens were counted where it was launched.

        Args:
            chunks: the chunks of the launch that produced a result anybody wants.
            start: when it was launched.
            end: when its completion was seen.
        """
        self._first_tokens((chunk.request_id for chunk in chunks if chunk.last), end)
        record = StepRecord(time=end, kind="overlap_complete", duration=end - start)
        self.records.append(record)
        return record

    def _first_tokens(self, request_ids: Iterable[str], end: float) -> None:
        for request_id in request_ids:
            self._latest[request_id] = end


class PaddingWaste(NamedTuple):
    """Share of the padded work that was padding, 0.0 where there was none.

    Attributes:
        prefill: of prefill tokens.
        decode: of decode rows times steps.
    """

    prefill: float
    decode: float


def padding_waste(records: Iterable[StepRecord]) -> PaddingWaste:
    """Padding over all programs run."""
    tokens = padded_tokens = row_steps = padded_row_steps = 0
    for record in records:
        tokens += record.prefill_tokens
        padded_tokens += record.padded_tokens
        row_steps += record.decode_tokens
        padded_row_steps += record.padded_rows * record.steps
    return PaddingWaste(
        prefill=1 - tokens / padded_tokens if padded_tokens else 0.0,
        decode=1 - row_steps / padded_row_steps if padded_row_steps else 0.0,
    )


def itl_percentiles(records: Iterable[StepRecord], percents: Sequence[float] = (50, 99)) -> tuple[float, ...]:
    """Inter-token latency percentiles in seconds over every row and update (nearest rank, no interpolation).

    Args:
        records: step records.
        percents: percentiles, each in (0, 100].

    Returns:
        One value a percentile; NaN when no row had two updates.
    """
    total: collections.Counter[float] = collections.Counter()
    for record in records:
        for gap, count in record.gaps:
            total[gap] += count
    if not total:
        return (float("nan"),) * len(percents)
    gaps = np.array(sorted(total))
    ranks = np.cumsum([total[gap] for gap in sorted(total)])
    wanted = np.ceil(np.asarray(percents) / 100 * ranks[-1] - 1e-9)
    return tuple(float(gap) for gap in gaps[np.searchsorted(ranks, np.maximum(wanted, 1))])


def stalled_decode_share(records: Iterable[StepRecord]) -> float:
    """Share of the decode dispatches whose rows waited for prefill tokens in the same step.

    A launch of ``device`` overlap runs beside decode and stalls nothing.
    """
    decode = stalled = 0
    for record in records:
        if record.decode_rows:
            decode += 1
            stalled += record.kind == "unified" and record.prefill_tokens > 0
    return stalled / decode if decode else 0.0


class MixedLoad(NamedTuple):
    """Whether a benchmark of mixed load measured what it claims.

    Attributes:
        valid: some step had prefill tokens and all background decoders at once.
        decoders: the background decoders there should be.
        most_rows: most decode rows that any step with prefill tokens had.
        message: the finding in words.
    """

    valid: bool
    decoders: int
    most_rows: int
    message: str


def check_mixed_load(records: Iterable[StepRecord], decoders: int) -> MixedLoad:
    """Check that prefill really met the background decoders.

    Args:
        records: step records of the measured part.
        decoders: background requests that should decode throughout, at least 1.

    Raises:
        ValueError: ``decoders`` is below 1.
    """
    if decoders < 1:
        raise ValueError(f"a mixed load has at least 1 background decoder, got {decoders}")
    rows = [record.decode_rows for record in records if record.prefill_tokens]
    most = max(rows, default=0)
    if not rows:
        message = "not a mixed load: no step had prefill tokens"
    elif most < decoders:
        message = f"not a mixed load: steps with prefill tokens had at most {most} of {decoders} background decoders"
    else:
        message = f"mixed load: prefill tokens met {most} decode rows ({decoders} background decoders)"
    return MixedLoad(most >= decoders, decoders, most, message)
