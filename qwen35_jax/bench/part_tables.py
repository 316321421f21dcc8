"""Tables of steps by their parts, beside the floors of the parts that have one, as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from qwen35_jax.bench import floors
from qwen35_jax.bench.device_trace import PARTS
from qwen35_jax.bench.known import Known, part_floors_ms, size_order
from qwen35_jax.bench.markdown import NO_FIGURE, join, measured, number, percent, table
from qwen35_jax.bench.records import Record, parse_cell
from qwen35_jax.config import ModelConfig

LAUNCHES = {"gdn_layer": "a GDN layer", "attention_layer": "an attention layer", "other": "outside of layers"}
"""What a record counts launches of, in words."""

_WORDS = {"gemm": "without a name"}
_INDENT = "&nbsp;&nbsp;"
_SAMPLING = PARTS["sampling"]
_OWN_ROW = {*PARTS["GDN"], *PARTS["attention"], "add_rms_norm", "swiglu"}


@dataclasses.dataclass(frozen=True)
class Column:
    """A step of a table.

    Attributes:
        title: over it.
        record: of the step.
        floors: of its parts and of the "step", milliseconds.
    """

    title: str
    record: Record
    floors: Mapping[str, float]

    @property
    def parts(self) -> Mapping[str, float]:
        """Milliseconds by part."""
        return self.record.metrics["parts"]

    def sum_of(self, names: Sequence[str]) -> float | None:
        """Milliseconds of some parts together; None where the step has none of them."""
        found = [self.parts[name] for name in names if name in self.parts]
        return sum(found) if found else None

    def floor(self, part: str) -> float | None:
        """Floor of a part; None where it has none, and of an activation that the product before it contains.

        What is left of that part then are the last tokens of the last layer, next to nothing.
        """
        floor = self.floors.get(part)
        fused = part == "swiglu" and floor is not None and self.parts.get(part, 0.0) < floor / 2
        return None if fused else floor

    @property
    def twice_ms(self) -> float:
        """What the parts count twice, since kernels ran beside each other."""
        return max(0.0, sum(self.parts.values()) - self.record.metrics.get("busy_ms", sum(self.parts.values())))


def milliseconds(value: float | None) -> str:
    """A time; a short one with a digit more."""
    return f"{value:.3f}" if value and abs(value) < 0.1 else number(value)


def step_ms(record: Record) -> float:
    """Milliseconds of a step."""
    return record.metrics["step_ms"]


def part_table(columns: Sequence[Column]) -> str:
    """A row a part, in milliseconds, with rows for floors and shares under the parts that have one.

    What the rows of parts and idle add up to, less what they count twice, is the row of the step.
    """
    rows: list[list[str]] = []

    def line(words: str, values: Sequence[float | None], word: Callable[[float | None], str] = milliseconds) -> None:
        rows.append([words, *(word(value) for value in values)])

    def floor_lines(part: str, times: Sequence[float | None]) -> None:
        least = [column.floor(part) for column in columns]
        if any(least):
            line(f"{_INDENT}floor", least)
            shares = [low / ms if low and ms else None for low, ms in zip(least, times, strict=True)]
            line(f"{_INDENT}floor / ours", shares, percent)

    def block(part: str, words: str, names: Sequence[str]) -> None:
        times = [column.sum_of(names) for column in columns]
        if any(ms is not None for ms in times):
            line(words, times)
            floor_lines(part, times)

    block("GEMMs", "**GEMMs**", PARTS["GEMMs"])
    for part in PARTS["GEMMs"]:
        block("", f"{_INDENT}{_WORDS.get(part, f'`{part}`')}", (part,))
    for part in [*PARTS["GDN"], *PARTS["attention"], "add_rms_norm", "swiglu"]:
        block(part, f"**`{part}`**", (part,))
    block("", "**sampling**", _SAMPLING)
    named = {*PARTS["GEMMs"], *_OWN_ROW, *_SAMPLING}
    found = dict.fromkeys(part for column in columns for part in column.parts if part not in named)
    block("", "**glue, copies**", [*found])
    line("**idle**", [column.record.metrics.get("idle_ms") for column in columns])
    if any(column.twice_ms > 0.005 * step_ms(column.record) for column in columns):
        line("counted twice", [-column.twice_ms or 0.0 for column in columns])
    times = [step_ms(column.record) for column in columns]
    line("**step**", times)
    floor_lines("step", times)
    return table(["ms", *(column.title for column in columns)], rows)


def launches(columns: Sequence[Column]) -> str:
    """Kernels and copies of a layer of each kind and outside of them, as a sentence."""
    said = []
    for name, words in LAUNCHES.items():
        counts = [(column.record.metrics.get("launches") or {}).get(name) for column in columns]
        if any(count is not None for count in counts):
            said.append(f"{words} {' / '.join(NO_FIGURE if n is None else f'{round(n, 1):g}' for n in counts)}")
    return f"Launches: {', '.join(said)}." if said else ""


def clocks(columns: Sequence[Column]) -> str:
    """Clock of the multiprocessors in the timed and in the profiled steps, as a sentence; empty where none is known."""
    said = []
    for column in columns:
        found = column.record.metrics.get("clocks") or {}
        if any("sm_clock_mhz" in figures for figures in found.values()):
            pair = " / ".join(number(found.get(when, {}).get("sm_clock_mhz")) for when in ("timed", "profiled"))
            said.append(f"{pair} ({column.title})")
    return f"SM clock while timed / profiled, MHz: {', '.join(said)}." if said else ""


def product_rates(columns: Sequence[Column]) -> str:
    """Operations a second of a prefill's products, with what could be part of them, as a sentence.

    The operations are those of :func:`~qwen35_jax.bench.floors.prefill_floor_s`, 2 a parameter and token; the time is
    that of the products, the MLP's activation, and the residual sums with their norms.
    """
    said = []
    for column in columns:
        cell = parse_cell(column.record.cell)
        if cell.kind != "prefill" or not column.floors or cell.load is None:
            continue
        ms = column.sum_of([*PARTS["GEMMs"], "swiglu", "add_rms_norm"])
        if ms:
            operations = 2 * floors.prompt_parameters(ModelConfig.preset(cell.subject)) * cell.load
            said.append(f"{number(operations / ms / 1e9)} ({column.title})")
    words = "Products with the activation between them, residual sums and norms, TFLOP/s"
    return f"{words}: {', '.join(said)}." if said else ""


def sources(columns: Sequence[Column], results: str) -> str:
    """Commit and file of the columns, as a sentence."""
    grouped: dict[str, list[str]] = {}
    for column in columns:
        grouped.setdefault(measured(column.record, results), []).append(column.title)
    if len(grouped) == 1:
        return f"{next(iter(grouped))}."
    return "; ".join(f"{', '.join(titles)}: {where}" for where, titles in grouped.items()) + "."


def columns_of(known: Known, kind: str) -> dict[str, list[Column]]:
    """The steps that were profiled, by size, smallest first."""
    sizes: dict[str, list[Column]] = {}
    for cell in known.cells(kind):
        if record := known.profiled(cell):
            parsed = parse_cell(cell)
            what = ("row" if parsed.load == 1 else "rows") if kind == "decode" else "tokens"
            load = f"{parsed.load:,.0f} {what}"
            title = " ".join([load, *(f"@{suffix}" for suffix in parsed.suffixes)])
            sizes.setdefault(parsed.subject, []).append(Column(title, record, part_floors_ms(record)))
    return dict(sorted(sizes.items(), key=lambda item: size_order(item[0])))


def parts_section(kind: str) -> Callable[[Known, str], str]:
    """A table a size."""

    def section(known: Known, results: str) -> str:
        sizes = columns_of(known, kind)
        blocks = [
            join(
                f"**{size.upper()}**, {sources(columns, results)}",
                part_table(columns),
                product_rates(columns),
                launches(columns),
                clocks(columns),
            )
            for size, columns in sizes.items()
        ]
        return join(*blocks) or "Not measured yet."

    return section


decode_parts_section = parts_section("decode")
prefill_parts_section = parts_section("prefill")
