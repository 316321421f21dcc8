"""What one tick decides: chunks to prefill, rows to decode, and the buckets of the programs that run them."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from schedulers.buckets import Bucket

PlanKind = Literal["idle", "prefill", "decode", "unified", "wait"]
TraceKind = Literal[
    "prefill", "unified", "decode", "overlap_launch", "overlap_decode", "overlap_complete", "overlap_wait"
]


class Chunk(NamedTuple):
    """Consecutive prompt tokens of one request.

    Attributes:
        request_id: the request.
        slot: its slot in the main state pool.
        start: first prompt token of the chunk, on the 64-token grid.
        length: tokens, at least 1.
        first: whether the chunk begins the prompt (the state starts from zeros: ``has_state`` is False). A first chunk
            of one token is still a prefill.
        last: whether it ends the prompt (and so yields the first output token).
        pages: main-pool pages of the request's whole lifetime, in position order.
        staging_slot: slot in the staging pool (``device`` overlap), else 0.
        staging_pages: staging-pool pages of the prompt, in position order (``device`` overlap), else empty.
    """

    request_id: str
    slot: int
    start: int
    length: int
    first: bool
    last: bool
    pages: tuple[int, ...]
    staging_slot: int = 0
    staging_pages: tuple[int, ...] = ()


class DecodeRow(NamedTuple):
    """One request in a decode step.

    Attributes:
        request_id: the request.
        slot: its slot in the main state pool.
        position: position of the input token, whose KV the first step writes.
        steps: tokens to produce in this dispatch, at least 1 and at most the plan's ``steps``.
        pages: main-pool pages of the request's whole lifetime, in position order.
    """

    request_id: str
    slot: int
    position: int
    steps: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One tick's work.

    - ``idle``: nothing to dispatch. If the scheduler still has work, rows wait for results that have not been read yet.
    - ``prefill``: run the chunks.
    - ``decode``: run ``steps`` decode steps. In ``device`` overlap a launch may be in flight beside them.
    - ``unified``: chunks and one decode step. Overlap ``off``: two programs, one after the other. ``stream``: one
      program. ``device``: launch the chunks on the prefill device and decode meanwhile.
    - ``wait``: ``device`` only; nothing to decode, wait for a launch in flight.

    Attributes:
        kind: see above.
        chunks: prompt parts in packing order.
        rows: decode rows.
        steps: decode steps of the dispatch, 1 or the configured number.
        bucket: bucket of a plan that is one program (prefill, decode, unified in ``stream``); else None.
        prefill_bucket: bucket of the prefill program where there is one by itself.
        decode_bucket: bucket of the decode program where there is one by itself.
        handle: id of the launch in ``device`` overlap, to be given to ``chunk_done`` or ``chunk_failed``; else None.
        trace_kind: kind of the step's trace record; None for idle.
    """

    kind: PlanKind
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[DecodeRow, ...] = ()
    steps: int = 1
    bucket: Bucket | None = None
    prefill_bucket: Bucket | None = None
    decode_bucket: Bucket | None = None
    handle: int | None = None
    trace_kind: TraceKind | None = None

    @property
    def prefill_tokens(self) -> int:
        """Real prompt tokens of the plan."""
        return sum(chunk.length for chunk in self.chunks)
