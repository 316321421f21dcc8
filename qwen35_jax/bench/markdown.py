"""The words of reports: figures, shares, where a record is from, tables; all as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pallas_kernels.provenance import DIRTY, UNKNOWN_COMMIT
from qwen35_jax.bench.known import FLOOR_DEVICE
from qwen35_jax.bench.records import Record

NO_FIGURE = "–"


def number(value: Any) -> str:
    """A figure with about three digits, or a range of two."""
    if value is None:
        return NO_FIGURE
    if isinstance(value, list | tuple):
        return "-".join(number(item) for item in value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share."""
    return NO_FIGURE if value is None else f"{value:.0%}"


def commit_of(record: Record) -> str:
    """The commit of a record."""
    if record.commit == UNKNOWN_COMMIT:
        return "**no commit**"
    return f"`{record.commit.removesuffix(DIRTY)[:9]}`" + (" **+ uncommitted changes**" if record.dirty else "")


def measured(record: Record | None, results: str) -> str:
    """Commit and file of a record; ``results`` is the path of the results as the document sees it."""
    if record is None:
        return "not measured"
    where = "" if record.device == FLOOR_DEVICE else f"{record.device}, "
    many = "" if record.device_count == 1 else f"{record.device_count} devices, "
    return f"{where}{many}{commit_of(record)}, [{record.source}]({results}/{record.source})"


def invalid(record: Record) -> str:
    """What stands in place of figures that do not count."""
    return "**invalid**: " + "; ".join(record.faults()).replace("|", "/")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are not aligned."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def join(*parts: str) -> str:
    """Paragraphs, without those that are empty."""
    return "\n\n".join(part for part in parts if part)
