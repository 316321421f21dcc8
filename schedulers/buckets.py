"""The ladder of program shapes: every step is padded up to the smallest bucket that holds it."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

from schedulers.page_pool import pages_for

BucketKind = Literal["prefill", "decode", "unified"]

TOKENS_PER_REQUEST = 16
"""A token rung T carries up to T / 16 requests, so that a step of many short prompts fits without a rung of its own."""


def requests_of(tokens: int, max_num_seqs: int) -> int:
    """Most prefill requests of a step with up to ``tokens`` prompt tokens."""
    return min(max_num_seqs, max(1, tokens // TOKENS_PER_REQUEST))


class BucketOverflow(ValueError):
    """A step larger than the largest bucket; the message names the axis and both numbers."""


class Bucket(NamedTuple):
    """Shape of one program.

    Attributes:
        tokens: T, packed prefill tokens; 0 in a decode program.
        requests: R, prefill requests; 0 in a decode program.
        rows: B, decode rows; 0 in a prefill program.
        width: W, columns of the page tables.
    """

    tokens: int
    requests: int
    rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class Axes:
    """The rungs of one program kind; its buckets are their product.

    Attributes:
        tokens: T rungs, ascending; empty for decode.
        requests: the R that belongs to each T, non-decreasing.
        rows: B rungs, ascending; empty for prefill.
        widths: W rungs, ascending.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    rows: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "widths"):
            rungs = getattr(self, name)
            if any(rung < 1 for rung in rungs) or any(a >= b for a, b in zip(rungs, rungs[1:], strict=False)):
                raise ValueError(f"bucket rungs of {name} must be positive and ascending, got {rungs}")
        if len(self.tokens) != len(self.requests) or list(self.requests) != sorted(self.requests):
            raise ValueError(f"each token rung needs its requests, non-decreasing: {self.tokens} / {self.requests}")
        if not self.widths:
            raise ValueError("bucket rungs of widths are empty")

    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket, smallest first."""
        packed = tuple(zip(self.tokens, self.requests, strict=True)) or ((0, 0),)
        return tuple(
            Bucket(tokens, requests, rows, width)
            for tokens, requests in packed
            for rows in self.rows or (0,)
            for width in self.widths
        )


@dataclasses.dataclass(frozen=True)
class _Preset:
    """Growth factors from rung to rung, and the first rung, of an axis."""

    tokens: int
    rows: int
    widths: int
    first_width: int


_PRESETS = {
    "normal": _Preset(tokens=2, rows=2, widths=4, first_width=4),
    "coarse": _Preset(tokens=4, rows=4, widths=16, first_width=16),
}
PRESETS = (*_PRESETS, "small", "gpu")


@dataclasses.dataclass(frozen=True)
class BucketLadder:
    """All program shapes of an engine, chosen once from its limits.

    Attributes:
        prefill_axes: rungs of the prefill programs.
        decode_axes: rungs of the decode programs.
        unified_axes: rungs of the unified programs, None when there are none.
    """

    prefill_axes: Axes
    decode_axes: Axes
    unified_axes: Axes | None = None

    @classmethod
    def from_limits(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        page_size: int = 64,
        unified: bool = False,
        preset: str = "normal",
        token_rungs: Iterable[int] | None = None,
        row_rungs: Iterable[int] | None = None,
        width_rungs: Iterable[int] | None = None,
    ) -> BucketLadder:
        """Choose the rungs.

        ======  ============================  =========================  ==============
        preset  T                             B                          W
        ======  ============================  =========================  ==============
        normal  64, x2                        1, x2                      4, x4
        coarse  64, x4                        1, x4                      16, x16
        small   at most two: about 1/8, cap   at most two: 1/8, cap      at most two
        gpu     128, 512, then x2             1, 16, 64, then x2         64, x8
        ======  ============================  =========================  ==============

        The caps themselves are always rungs. R is tied to T: ``min(max_num_seqs, max(1, T // 16))``. Unified programs
        take the coarse rungs ("small" stays small), since they are a product of four axes.

        "gpu" is for kernels that skip what is not there: a wide page table or a row of padding costs them next to
        nothing, a padded token costs its share of every matrix product. So tokens and many rows are fine, few rows
        coarse, prefill programs have one width, and unified ones two rungs of tokens and rows (an eighth, a quarter
        of the cap) and one width.

        Args:
            max_num_seqs: cap of rows and of prefill requests.
            max_num_batched_tokens: cap of prefill tokens.
            max_model_len: longest prompt + output; its pages are the cap of the width.
            page_size: tokens of a page.
            unified: whether unified programs are wanted (``stream`` overlap).
            preset: "normal", "coarse", "small" or "gpu".
            token_rungs: T rungs in place of the preset's, for every kind; the cap is added.
            row_rungs: the same for B.
            width_rungs: the same for W.

        Raises:
            ValueError: a limit below 1, an unknown preset, or a rung beyond its cap.
        """
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
            ("page_size", page_size),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if preset not in PRESETS:
            raise ValueError(f"bucket preset {preset!r} is unknown; choose one of {', '.join(PRESETS)}")
        caps = (max_num_batched_tokens, max_num_seqs, pages_for(max_model_len, page_size))
        given = (token_rungs, row_rungs, width_rungs)

        def chosen(kind: BucketKind) -> Axes:
            tokens, rows, widths = _rungs(preset, kind, caps, given)
            requests = tuple(requests_of(rung, max_num_seqs) for rung in tokens)
            packed = ((), ()) if kind == "decode" else (tokens, requests)
            return Axes(*packed, () if kind == "prefill" else rows, widths)

        return cls(chosen("prefill"), chosen("decode"), chosen("unified") if unified else None)

    @property
    def prefill(self) -> tuple[Bucket, ...]:
        """Buckets of the prefill programs."""
        return self.prefill_axes.buckets()

    @property
    def decode(self) -> tuple[Bucket, ...]:
        """Buckets of the decode programs."""
        return self.decode_axes.buckets()

    @property
    def unified(self) -> tuple[Bucket, ...]:
        """Buckets of the unified programs; empty when there are none."""
        return self.unified_axes.buckets() if self.unified_axes else ()

    @property
    def max_requests(self) -> int:
        """Most prefill requests that any step may carry."""
        return min(axes.requests[-1] for axes in (self.prefill_axes, self.unified_axes) if axes)

    @property
    def max_tokens(self) -> int:
        """Most prefill tokens that any step may carry."""
        return min(axes.tokens[-1] for axes in (self.prefill_axes, self.unified_axes) if axes)

    @property
    def max_rows(self) -> int:
        """Most decode rows that any step may carry."""
        return min(axes.rows[-1] for axes in (self.decode_axes, self.unified_axes) if axes)

    @property
    def max_width(self) -> int:
        """Widest page table that any step may carry."""
        return min(axes.widths[-1] for axes in (self.prefill_axes, self.decode_axes, self.unified_axes) if axes)

    def axes(self, kind: BucketKind) -> Axes:
        """Rungs of one kind.

        Raises:
            ValueError: an unknown kind, or unified where the ladder has none.
        """
        if kind == "prefill":
            return self.prefill_axes
        if kind == "decode":
            return self.decode_axes
        if kind == "unified" and self.unified_axes:
            return self.unified_axes
        raise ValueError(f"the bucket ladder has no {kind!r} programs")

    def pick(self, kind: BucketKind, *, tokens: int = 0, requests: int = 0, rows: int = 0, width: int = 1) -> Bucket:
        """The smallest bucket that holds a step.

        Args:
            kind: program kind; axes that it does not have must be 0.
            tokens: prefill tokens.
            requests: prefill requests.
            rows: decode rows.
            width: pages of the longest request.

        Raises:
            BucketOverflow: nothing fits; names the axis, the number asked and the largest there is.
        """
        axes = self.axes(kind)
        t = max(_rung(kind, "tokens", axes.tokens, tokens), _rung(kind, "requests", axes.requests, requests))
        b = _rung(kind, "rows", axes.rows, rows)
        w = _rung(kind, "width", axes.widths, width)
        return Bucket(
            tokens=axes.tokens[t] if axes.tokens else 0,
            requests=axes.requests[t] if axes.tokens else 0,
            rows=axes.rows[b] if axes.rows else 0,
            width=axes.widths[w],
        )

    def describe(self) -> str:
        """A table for the log: each rung, the smallest load that lands on it, and the padding of that worst case."""
        counts = {"prefill": len(self.prefill), "decode": len(self.decode), "unified": len(self.unified)}
        parts = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        lines = [f"bucket ladder: {sum(counts.values())} shapes ({parts})"]
        lines.append(f"{'kind':<8} {'axis':<9} {'rung':>6} {'from':>6} {'worst padding':>14}")
        for kind, count in counts.items():
            if not count:
                continue
            axes = self.axes(kind)  # type: ignore[arg-type]
            for name, rungs in (
                ("tokens", axes.tokens),
                ("requests", axes.requests),
                ("rows", axes.rows),
                ("width", axes.widths),
            ):
                previous = 0
                for rung in rungs:
                    if rung == previous:
                        continue
                    least = previous + 1
                    lines.append(f"{kind:<8} {name:<9} {rung:>6} {least:>6} {1 - least / rung:>14.1%}")
                    previous = rung
        return "\n".join(lines)


def _rung(kind: str, axis: str, rungs: tuple[int, ...], value: int) -> int:
    """Index of the first rung that holds ``value``; 0 when nothing is asked."""
    if value < 0:
        raise BucketOverflow(f"{kind} step: {value} {axis} is negative")
    if value == 0:
        return 0
    index = bisect.bisect_left(rungs, value)
    if index == len(rungs):
        largest = rungs[-1] if rungs else 0
        raise BucketOverflow(f"{kind} step: {value} {axis} exceed the largest bucket, which has {largest}")
    return index


def _geometric(first: int, factor: int, cap: int) -> tuple[int, ...]:
    """``first``, ``first * factor``, ... below ``cap``, then ``cap`` itself."""
    rungs = []
    rung = first
    while rung < cap:
        rungs.append(rung)
        rung *= factor
    return (*rungs, cap)


def _two(least: int, cap: int) -> tuple[int, ...]:
    """The cap and the power of two at or below an eighth of it, but at least ``least``."""
    return _below(least, 1 << max(0, (cap // 8).bit_length() - 1), cap)


def _below(least: int, low: int, cap: int) -> tuple[int, ...]:
    """``low`` (at least ``least``) and the cap."""
    low = max(least, low)
    return (low, cap) if low < cap else (cap,)


def _spread(first: tuple[int, ...], doubled: int, cap: int) -> tuple[int, ...]:
    """The first rungs, then powers of two times ``doubled``, as far as they are below the cap; then the cap."""
    return (*(rung for rung in first if rung < cap), *_geometric(doubled, 2, cap))


def _given(name: str, rungs: Iterable[int], cap: int) -> tuple[int, ...]:
    chosen = sorted({*rungs, cap})
    if chosen[0] < 1 or chosen[-1] > cap:
        raise ValueError(f"{name} must lie between 1 and the cap {cap}, got {chosen}")
    return tuple(chosen)


def _rungs(
    preset: str, kind: BucketKind, caps: tuple[int, int, int], given: tuple[Iterable[int] | None, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """T, B and W rungs of a preset for one kind of program, each replaced where given."""
    max_tokens, max_rows, max_width = caps
    if preset == "small":
        chosen = (_two(64, max_tokens), _two(1, max_rows), _two(1, max_width))
    elif preset == "gpu":
        widths = _geometric(64, 8, max_width) if kind == "decode" else (max_width,)
        if kind == "unified":
            chosen = (_below(512, max_tokens // 8, max_tokens), _below(64, max_rows // 4, max_rows), widths)
        else:
            chosen = (_spread((128,), 512, max_tokens), _spread((1, 16), 64, max_rows), widths)
    else:
        growth = _PRESETS["coarse" if kind == "unified" else preset]
        chosen = (
            _geometric(64, growth.tokens, max_tokens),
            _geometric(1, growth.rows, max_rows),
            _geometric(growth.first_width, growth.widths, max_width),
        )
    names = ("token_rungs", "row_rungs", "width_rungs")
    tokens, rows, widths = (
        rungs if own is None else _given(name, own, cap)
        for rungs, own, name, cap in zip(chosen, given, names, caps, strict=True)
    )
    return tokens, rows, widths
