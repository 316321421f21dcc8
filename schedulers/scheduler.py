"""The scheduler: who runs in the next step, with which slot, pages and program shape."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schedulers.admission import admit_in_order, check_request
from schedulers.buckets import BucketLadder
from schedulers.budget import check_policy, choose_prefill_budget
from schedulers.chunking import CHUNK_GRID, take_chunks
from schedulers.page_pool import PagePool, pages_for
from schedulers.plan import Chunk, DecodeRow, Plan
from schedulers.request import Released, Request, RequestRejected, SequenceState, UnknownRequest
from schedulers.slot_pool import SlotPool

OVERLAPS = ("off", "stream", "device")
DECODE_STEPS = (1, 8)


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies of a scheduler.

    Attributes:
        max_num_seqs: most requests that hold a slot at once (decoding + prefilling + in flight).
        max_num_batched_tokens: hard cap on prefill tokens of a step, a multiple of 64; decode rows are not counted.
        max_model_len: longest prompt + output.
        num_pages: size P of the KV pool's page axis, the null page included.
        num_slots: size S of the state pool's slot axis, the null slot included.
        page_size: tokens of a page; 64, which is also the chunk grid.
        policy: "off" or "auto".
        overlap: "off", "stream" or "device".
        decode_steps: 1 or 8 decode steps a dispatch when nothing is being prefilled.
        max_chunks_in_flight: most launches in flight (``device``).
        staging_slots: size of the staging pool's slot axis, the null slot included (``device``, else 0).
        staging_pages: size of the staging pool's page axis, the null page included (``device``, else 0).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    num_slots: int
    page_size: int = CHUNK_GRID
    policy: str = "off"
    overlap: str = "off"
    decode_steps: int = 1
    max_chunks_in_flight: int = 1
    staging_slots: int = 0
    staging_pages: int = 0

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.overlap not in OVERLAPS:
            raise ValueError(f"overlap {self.overlap!r} is not supported; choose one of {', '.join(OVERLAPS)}")
        if self.decode_steps not in DECODE_STEPS:
            raise ValueError(f"decode_steps must be one of {DECODE_STEPS}, got {self.decode_steps}")
        if self.page_size != CHUNK_GRID:
            raise ValueError(f"page_size must be {CHUNK_GRID}, the chunk grid, got {self.page_size}")
        if self.max_num_batched_tokens < 1 or self.max_num_batched_tokens % CHUNK_GRID:
            raise ValueError(
                f"max_num_batched_tokens must be a positive multiple of {CHUNK_GRID}, got {self.max_num_batched_tokens}"
            )
        for name, least in (("max_num_seqs", 1), ("max_model_len", 2), ("num_pages", 2), ("max_chunks_in_flight", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.num_slots < self.max_num_seqs + 1:
            raise ValueError(
                f"num_slots {self.num_slots} must hold the null slot and max_num_seqs {self.max_num_seqs} requests"
            )
        if self.overlap == "device":
            for name in ("staging_slots", "staging_pages"):
                if getattr(self, name) < 2:
                    raise ValueError(f"{name} must be at least 2 with overlap 'device', got {getattr(self, name)}")
        elif self.staging_slots or self.staging_pages or self.max_chunks_in_flight != 1:
            raise ValueError(
                f"staging_slots, staging_pages and max_chunks_in_flight need overlap 'device', not {self.overlap!r}"
            )

    def ladder(self, preset: str = "normal") -> BucketLadder:
        """The bucket ladder of these limits."""
        return BucketLadder.from_limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            unified=self.overlap == "stream",
            preset=preset,
        )


class LaunchOutcome(NamedTuple):
    """What the end of a launch means for its requests.

    Attributes:
        decoding: requests whose prompt is now complete; their first output token came with this launch.
        prefilling: requests with more prompt to come.
        failed: requests ended by a failed launch; the engine reports their error.
        dropped: requests that had been cancelled or finished meanwhile; their results are not wanted.
        released: what left the scheduler now (a failed or dropped request in another launch stays until that ends).
    """

    decoding: tuple[str, ...] = ()
    prefilling: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    released: tuple[Released, ...] = ()


class Stats(NamedTuple):
    """Load of a scheduler.

    Attributes:
        waiting: requests submitted and not admitted.
        prefilling: admitted, some of the prompt not yet scheduled or in flight.
        decoding: rows that still produce tokens.
        finishing: rows whose last token is scheduled and not yet reported.
        chunks_in_flight: launches in flight (``device``).
        slots_used: state slots owned.
        slots_total: state slots that requests can own.
        pages_used: KV pages owned.
        pages_total: KV pages that requests can own.
        staging_slots_used: staging slots owned.
        staging_pages_used: staging pages owned.
    """

    waiting: int
    prefilling: int
    decoding: int
    finishing: int
    chunks_in_flight: int
    slots_used: int
    slots_total: int
    pages_used: int
    pages_total: int
    staging_slots_used: int
    staging_pages_used: int


class Scheduler:
    """Plans one step a tick.

    Results are read later than they are planned, so :meth:`tick` advances what is *scheduled* at once and never waits:
    a row may appear in plans made before its :meth:`finish`, and a row whose scheduled tokens reach max_tokens is no
    longer planned but keeps its slot and pages until then. What :meth:`finish` frees may be given out at the next tick:
    the device runs dispatches in order, so the new owner's writes come after the old one's.

    In ``device`` overlap a launch runs out of that order on another device, in staging slots and pages of its own, so a
    request that leaves while it is in a launch keeps all it has until :meth:`chunk_done` or :meth:`chunk_failed`.
    """

    def __init__(self, config: SchedulerConfig, ladder: BucketLadder | None = None):
        """Start with empty pools.

        Args:
            config: limits and policies.
            ladder: program shapes; None takes ``config.ladder()``.

        Raises:
            ValueError: the ladder cannot hold a step that the limits allow.
        """
        self.config = config
        self.ladder = ladder or config.ladder()
        _check_ladder(self.ladder, config)
        self._max_requests = self.ladder.max_requests
        self._pages = PagePool(config.num_pages)
        self._slots = SlotPool(config.num_slots)
        self._device = config.overlap == "device"
        self._staging_pages = PagePool(config.staging_pages) if self._device else None
        self._staging_slots = SlotPool(config.staging_slots) if self._device else None
        self._live: dict[str, SequenceState] = {}
        self._waiting: dict[str, SequenceState] = {}
        self._prefilling: dict[str, SequenceState] = {}  # prompt tokens left to schedule, FIFO
        self._decoding: dict[str, SequenceState] = {}
        self._flights: dict[int, tuple[Chunk, ...]] = {}
        self._next_handle = 1

    # Requests in and out

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRejected: it can never run here, or its id is in use; nothing behind it is held up.
        """
        if request.request_id in self._live:
            raise RequestRejected(f"request {request.request_id!r} is already in the scheduler")
        check_request(
            request,
            max_model_len=self.config.max_model_len,
            total_pages=self._pages.total,
            staging_pages=self._staging_pages.total if self._staging_pages else None,
            page_size=self.config.page_size,
        )
        seq = SequenceState(request)
        self._live[request.request_id] = seq
        self._waiting[request.request_id] = seq

    def finish(self, request_id: str) -> Released | None:
        """End a request whose end the engine has read (stop, length, error) and free what it holds.

        Returns:
            What was freed; None if the request is in a launch in flight and leaves when that ends.

        Raises:
            UnknownRequest: no such request.
        """
        seq = self._live.get(request_id)
        if seq is None or seq.doomed:
            raise UnknownRequest(request_id)
        self._waiting.pop(request_id, None)
        self._prefilling.pop(request_id, None)
        self._decoding.pop(request_id, None)
        if seq.flights:
            seq.doomed = True
            return None
        return self._release(seq)

    def cancel(self, request_id: str) -> Released | None:
        """End a request from outside, whatever its phase; the same as :meth:`finish`."""
        return self.finish(request_id)

    def drain(self) -> tuple[str, ...]:
        """Cancel every request (shutdown); launches in flight still have to be reported.

        Returns:
            The ids cancelled, in arrival order.
        """
        ids = tuple(request_id for request_id, seq in self._live.items() if not seq.doomed)
        for request_id in ids:
            self.finish(request_id)
        return ids

    # Launches in flight

    def chunk_done(self, handle: int) -> LaunchOutcome:
        """Report a launch that succeeded, after its prompts' state was moved out of staging.

        Raises:
            ValueError: no such launch in flight.
        """
        return self._land(handle, failed=False)

    def chunk_failed(self, handle: int) -> LaunchOutcome:
        """Report a launch that failed: its own requests end, everything else goes on.

        Raises:
            ValueError: no such launch in flight.
        """
        return self._land(handle, failed=True)

    def _land(self, handle: int, failed: bool) -> LaunchOutcome:
        chunks = self._flights.pop(handle, None)
        if chunks is None:
            raise ValueError(f"chunk launch {handle} is not in flight")
        decoding, prefilling, ended, dropped, released = [], [], [], [], []
        for chunk in chunks:
            seq = self._live[chunk.request_id]
            seq.flights -= 1
            if seq.doomed:
                dropped.append(chunk.request_id)
            elif failed:
                seq.doomed = True
                self._prefilling.pop(chunk.request_id, None)
                ended.append(chunk.request_id)
            elif chunk.last:
                self._release_staging(seq)
                self._enter_decode(seq)
                decoding.append(chunk.request_id)
            else:
                prefilling.append(chunk.request_id)
            if seq.doomed and not seq.flights:
                released.append(self._release(seq))
        return LaunchOutcome(tuple(decoding), tuple(prefilling), tuple(ended), tuple(dropped), tuple(released))

    # The step

    def tick(self) -> Plan:
        """Plan the next step and count it as scheduled."""
        if not self._flights:
            self._admit()
        active = [seq for seq in self._decoding.values() if seq.tokens_left > 0]
        lengths = self._choose_chunks(active)
        # A launch in flight or a prompt in the queue makes the next steps short, so that it is noticed soon.
        alone = not lengths and not self._prefilling and not self._flights
        steps = self.config.decode_steps if alone and any(seq.tokens_left > 1 for seq in active) else 1
        rows = tuple(self._schedule_row(seq, steps) for seq in active)
        front = tuple(itertools.islice(self._prefilling.values(), len(lengths)))
        chunks = tuple(self._schedule_chunk(seq, length) for seq, length in zip(front, lengths, strict=True))
        return self._plan(chunks, rows, steps)

    def _admit(self) -> None:
        admitted = admit_in_order(
            self._waiting,
            running=self.running,
            max_num_seqs=self.config.max_num_seqs,
            pages=self._pages,
            slots=self._slots,
            page_size=self.config.page_size,
        )
        for seq in admitted:
            self._prefilling[seq.request.request_id] = seq

    def _choose_chunks(self, active: Sequence[SequenceState]) -> list[int]:
        """Chunk lengths for the front of the prefill queue."""
        if not self._prefilling or len(self._flights) >= self.config.max_chunks_in_flight:
            return []
        budget = choose_prefill_budget(
            self.config.policy,
            self.config.max_num_batched_tokens,
            [seq.tokens_left for seq in active],
            [seq.prompt_left for seq in self._prefilling.values()],
            overlap=self.config.overlap != "off",
        )
        return take_chunks(self._startable(), budget, self._max_requests)

    def _startable(self) -> Iterator[int]:
        """Prompt tokens left of the requests at the front of the queue for which the staging pools have room.

        With nothing in flight only the front may hold staging and everything else is free, and no prompt larger than
        the staging pool is ever accepted: so the front always fits and the queue moves.
        """
        slots = pages = 0
        if self._staging_slots and self._staging_pages:
            slots, pages = self._staging_slots.free, self._staging_pages.free
        for seq in self._prefilling.values():
            if self._device and not seq.staging_slot:
                slots -= 1
                pages -= pages_for(seq.request.prompt_len, self.config.page_size)
                if slots < 0 or pages < 0:
                    return
            yield seq.prompt_left

    def _schedule_chunk(self, seq: SequenceState, length: int) -> Chunk:
        request = seq.request
        if self._staging_slots and self._staging_pages and not seq.staging_slot:
            seq.staging_slot = self._staging_slots.acquire()
            seq.staging_pages = self._staging_pages.allocate(pages_for(request.prompt_len, self.config.page_size))
        start = seq.prefilled
        seq.prefilled += length
        last = seq.prompt_left == 0
        chunk = Chunk(
            request_id=request.request_id,
            slot=seq.slot,
            start=start,
            length=length,
            first=start == 0,
            last=last,
            pages=seq.pages,
            staging_slot=seq.staging_slot,
            staging_pages=seq.staging_pages,
        )
        if last:
            del self._prefilling[request.request_id]
        if self._device:
            seq.flights += 1
        elif last:
            self._enter_decode(seq)
        return chunk

    def _schedule_row(self, seq: SequenceState, steps: int) -> DecodeRow:
        request = seq.request
        row = DecodeRow(
            request_id=request.request_id,
            slot=seq.slot,
            position=request.prompt_len + seq.scheduled - 1,
            steps=min(steps, seq.tokens_left),
            pages=seq.pages,
        )
        seq.scheduled += row.steps
        return row

    def _enter_decode(self, seq: SequenceState) -> None:
        seq.phase = "decode"
        seq.scheduled = 1
        self._decoding[seq.request.request_id] = seq

    def _plan(self, chunks: tuple[Chunk, ...], rows: tuple[DecodeRow, ...], steps: int) -> Plan:
        in_flight = bool(self._flights)
        if not chunks and not rows:
            return Plan("wait", trace_kind="overlap_wait") if in_flight else Plan("idle")
        page = self.config.page_size
        prefill = decode = None
        width = max((pages_for(chunk.start + chunk.length, page) for chunk in chunks), default=1)
        row_width = max((pages_for(row.position + row.steps, page) for row in rows), default=1)
        tokens = sum(chunk.length for chunk in chunks)
        if chunks and rows and self.config.overlap == "stream":
            bucket = self.ladder.pick(
                "unified", tokens=tokens, requests=len(chunks), rows=len(rows), width=max(width, row_width)
            )
            return Plan("unified", chunks, rows, steps, bucket=bucket, trace_kind="unified")
        if chunks:
            prefill = self.ladder.pick("prefill", tokens=tokens, requests=len(chunks), width=width)
        if rows:
            decode = self.ladder.pick("decode", rows=len(rows), width=row_width)
        handle = None
        if chunks and self._device:
            handle = self._next_handle
            self._next_handle += 1
            self._flights[handle] = chunks
        if chunks and rows:
            return Plan(
                "unified",
                chunks,
                rows,
                steps,
                prefill_bucket=prefill,
                decode_bucket=decode,
                handle=handle,
                trace_kind="overlap_launch" if self._device else "unified",
            )
        if chunks:
            trace_kind = "overlap_launch" if in_flight else "prefill"
            return Plan("prefill", chunks, bucket=prefill, prefill_bucket=prefill, handle=handle, trace_kind=trace_kind)
        trace_kind = "overlap_decode" if in_flight else "decode"
        return Plan("decode", (), rows, steps, bucket=decode, decode_bucket=decode, trace_kind=trace_kind)

    # What it holds

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended (rows that wait for their results and launches in flight included)."""
        return bool(self._live)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self._slots.used

    @property
    def waiting(self) -> int:
        """Requests submitted and not yet admitted."""
        return len(self._waiting)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Handles of the launches in flight, oldest first."""
        return tuple(self._flights)

    def stats(self) -> Stats:
        """The load right now."""
        decoding = sum(seq.tokens_left > 0 for seq in self._decoding.values())
        return Stats(
            waiting=len(self._waiting),
            prefilling=self.running - len(self._decoding),
            decoding=decoding,
            finishing=len(self._decoding) - decoding,
            chunks_in_flight=len(self._flights),
            slots_used=self._slots.used,
            slots_total=self._slots.total,
            pages_used=self._pages.used,
            pages_total=self._pages.total,
            staging_slots_used=self._staging_slots.used if self._staging_slots else 0,
            staging_pages_used=self._staging_pages.used if self._staging_pages else 0,
        )

    # Release

    def _release_staging(self, seq: SequenceState) -> None:
        if self._staging_slots and self._staging_pages and seq.staging_slot:
            self._staging_slots.release(seq.staging_slot)
            self._staging_pages.release(seq.staging_pages)
            seq.staging_slot, seq.staging_pages = 0, ()

    def _release(self, seq: SequenceState) -> Released:
        released = Released(seq.request.request_id, seq.slot, seq.pages, seq.staging_slot, seq.staging_pages)
        self._release_staging(seq)
        if seq.slot:
            self._slots.release(seq.slot)
            self._pages.release(seq.pages)
        del self._live[seq.request.request_id]
        return released


def _check_ladder(ladder: BucketLadder, config: SchedulerConfig) -> None:
    """Every step that the limits allow must have a bucket."""
    needs: list[tuple[str, int, int]] = [
        ("tokens", ladder.max_tokens, config.max_num_batched_tokens),
        ("rows", ladder.max_rows, config.max_num_seqs),
        ("width", ladder.max_width, pages_for(config.max_model_len, config.page_size)),
    ]
    for axis, largest, needed in needs:
        if largest < needed:
            raise ValueError(f"bucket ladder: the largest {axis} rung is {largest}, the limits need {needed}")
    if config.overlap == "stream" and not ladder.unified_axes:
        raise ValueError("bucket ladder: overlap 'stream' needs unified programs")
