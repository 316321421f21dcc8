"""Requests as the scheduler sees them: lengths and ids, never tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

Phase = Literal["waiting", "prefill", "decode"]


class RequestRejected(ValueError):
    """A request that can never run here; the message carries what it needs and what there is."""


class UnknownRequest(KeyError):
    """A request id that the scheduler does not hold (never submitted, or already ended)."""

    def __str__(self) -> str:
        return f"request {self.args[0]!r} is not in the scheduler"


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    Attributes:
        request_id: unique among the requests that have not ended.
        prompt_len: prompt tokens, at least 1.
        max_tokens: most tokens to generate, at least 1.
    """

    request_id: str
    prompt_len: int
    max_tokens: int

    @property
    def lifetime(self) -> int:
        """Tokens of the longest form that the request may reach: prompt + max_tokens."""
        return self.prompt_len + self.max_tokens


class Released(NamedTuple):
    """What a request gave back when it left the scheduler.

    Attributes:
        request_id: the request.
        slot: its state slot; 0 if it never had one.
        pages: its KV pages; empty if it never had any.
        staging_slot: its slot in the staging pool; 0 if it held none.
        staging_pages: its pages in the staging pool.
    """

    request_id: str
    slot: int
    pages: tuple[int, ...]
    staging_slot: int
    staging_pages: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class SequenceState:
    """The scheduler's own record of a live request.

    All counters say what has been *scheduled*: results are read later than they are planned, so nothing here waits for
    them.

    Attributes:
        request: the request.
        phase: waiting (holds nothing), prefill (admitted, prompt not wholly scheduled or still in flight), decode.
        slot: state slot, 0 while waiting.
        pages: KV pages of the whole lifetime, empty while waiting.
        staging_slot: slot in the staging pool, 0 if none is held.
        staging_pages: pages in the staging pool, those of the prompt.
        prefilled: prompt tokens scheduled so far.
        scheduled: output tokens scheduled so far; the last prefill chunk brings the first.
        flights: launched chunks that still run beside decode and contain this request.
        doomed: cancelled, finished or failed while in flight; leaves when ``flights`` is 0.
    """

    request: Request
    phase: Phase = "waiting"
    slot: int = 0
    pages: tuple[int, ...] = ()
    staging_slot: int = 0
    staging_pages: tuple[int, ...] = ()
    prefilled: int = 0
    scheduled: int = 0
    flights: int = 0
    doomed: bool = False

    @property
    def prompt_left(self) -> int:
        """Prompt tokens not yet scheduled."""
        return self.request.prompt_len - self.prefilled

    @property
    def tokens_left(self) -> int:
        """Output tokens not yet scheduled; at 0 the row is no longer planned and waits for its results."""
        return self.request.max_tokens - self.scheduled
