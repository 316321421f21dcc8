"""What is known of every cell: our records, the figures of other systems, the floors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen35_jax.bench import floors
from qwen35_jax.bench.records import OF_OPS, Cell, Record, parse_cell, read_records
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.presets import PRESETS

FLOOR_DEVICE = "NVIDIA H200"
"""The device whose ceilings the floors use."""
DEFAULT_CONTEXT = 1088
"""Tokens of context of a decode cell whose record does not say otherwise."""
DEFAULT_ROWS = 256
"""Rows of an offline cell whose record does not say otherwise."""

MAIN_METRIC = {
    "offline": "output_tok_s",
    "prefill": "tok_s",
    "long": "tok_s",
    "decode": "step_ms",
    "closed": "tpot_mean_ms",
    "open": "tpot_mean_ms",
    "start": "cold_s",  # or warm_s: a record has one of them
    "kernel": "us",
    "drift": "state_error",
    "product": "tflop_s",
}
STARTS = {"cold_s": "nothing cached", "warm_s": "compiled programs cached"}
"""The ways to start, by metric."""


@dataclasses.dataclass(frozen=True)
class PeerFigure:
    """What another system needed for a cell."""

    peer: str
    metrics: Mapping[str, Any]
    conditions: str


@dataclasses.dataclass(frozen=True)
class Peers:
    """Figures of other systems, the first of each system and cell being the one that tables show."""

    provenance: Mapping[str, str]
    labels: Mapping[str, str]
    cells: Mapping[str, tuple[PeerFigure, ...]]


@dataclasses.dataclass(frozen=True)
class Known:
    """All that tables are made of.

    Attributes:
        series: records by cell and main metric, oldest first.
        peers: what others needed.
    """

    series: Mapping[tuple[str, str], tuple[Record, ...]]
    peers: Peers

    def cells(self, kind: str) -> list[str]:
        """Cells of a kind that we or a peer have a figure of, by size, load and variant."""
        names = {*(cell for cell, _ in self.series), *self.peers.cells}
        return sorted((cell for cell in names if parse_cell(cell).kind == kind), key=cell_order)

    def record(self, cell: str, metric: str | None = None) -> Record | None:
        """The newest record of a cell (of a start: by which metric), whether its figures count or not."""
        records = self.series.get((cell, metric or MAIN_METRIC[parse_cell(cell).kind]))
        return records[-1] if records else None

    def newest(self) -> list[Record]:
        """The newest record of every cell, and of both ways to start."""
        keys = sorted(self.series, key=lambda key: (parse_cell(key[0]).kind, cell_order(key[0]), key[1]))
        return [self.series[key][-1] for key in keys]

    def valid(self, cell: str, metric: str | None = None) -> Record | None:
        """The newest record of a cell, unless its figures do not count."""
        record = self.record(cell, metric)
        return None if record is None or record.faults() else record

    def beside(self, record: Record, cell: str) -> Record | None:
        """What to explain a record by: another cell's newest valid record of the same commit, or that cell's newest."""
        own = (record.commit, record.device, record.device_count)
        same = self._newest(cell, lambda other: (other.commit, other.device, other.device_count) == own)
        return same or self.valid(cell)

    def peer(self, cell: str, peer: str) -> PeerFigure | None:
        """A peer's figure, if it is of the device that ours is of."""
        record = self.record(cell)
        if record is not None and (record.device, record.device_count) != (self.peers.provenance["device"], 1):
            return None
        return next((figure for figure in self.peers.cells.get(cell, ()) if figure.peer == peer), None)

    def floor(self, cell: str) -> tuple[float, float | None] | None:
        """Floor in the unit of the cell's main metric; of an offline job also the one with perfect overlap."""
        parsed, record = parse_cell(cell), self.record(cell)
        if not _has_floor(parsed, record):
            return None
        config, settings = ModelConfig.preset(parsed.subject), record.settings if record else {}
        state = _state_dtype(parsed, record)
        if parsed.kind == "decode" and parsed.load is not None:
            context = settings.get("context", DEFAULT_CONTEXT)
            return floors.decode_step_floor_s(config, int(parsed.load), context, state_dtype=state) * 1e3, None
        if parsed.kind == "prefill" and parsed.load is not None:
            return parsed.load / floors.prefill_floor_s(config, parsed.load), None
        if parsed.kind == "long" and record is not None and (chunks := chunk_floors_ms(record)):
            return parsed.load / sum(chunks) * 1e3, None
        if parsed.kind == "offline" and (lengths := _mean_lengths(parsed, record)):
            rows = settings.get("max_num_seqs", DEFAULT_ROWS)
            floor = floors.offline_floor(config, *lengths, rows, state_dtype=state)
            return floor.in_turns_tok_s, floor.overlapped_tok_s
        return None

    def profiled(self, cell: str) -> Record | None:
        """The newest record of a step whose figures count and that says the times of its parts."""
        return self._newest(cell, lambda record: bool(record.metrics.get("parts")))

    def _newest(self, cell: str, wanted: Callable[[Record], bool]) -> Record | None:
        """The newest record of a cell whose figures count and that is wanted."""
        records = self.series.get((cell, MAIN_METRIC[parse_cell(cell).kind]), ())
        return next((record for record in reversed(records) if not record.faults() and wanted(record)), None)


def part_floors_ms(record: Record) -> dict[str, float]:
    """Floors of the parts of a decode step or prefill, and of the "step", in milliseconds; empty where it has none."""
    parsed = parse_cell(record.cell)
    if parsed.load is None or not _has_floor(parsed, record):
        return {}
    config, state = ModelConfig.preset(parsed.subject), _state_dtype(parsed, record)
    if parsed.kind == "decode":
        context = record.settings.get("context", DEFAULT_CONTEXT)
        found = floors.decode_part_floors_s(config, int(parsed.load), context, state_dtype=state)
        found["step"] = sum(found.values())
    elif lengths := record.settings.get("lengths"):
        found = floors.prefill_part_floors_s(config, lengths, state_dtype=state)
    else:
        found = {"GEMMs": floors.prefill_floor_s(config, parsed.load)}
    found.setdefault("step", found["GEMMs"])
    return {part: seconds * 1e3 for part, seconds in found.items()}


def chunk_floors_ms(record: Record) -> tuple[float, ...]:
    """Floors of the chunks of a long prompt, in milliseconds; empty where it has none."""
    parsed = parse_cell(record.cell)
    if not _has_floor(parsed, record):
        return ()
    chunks = record.settings.get("chunks", ())
    return tuple(seconds * 1e3 for seconds in floors.chunk_floors_s(ModelConfig.preset(parsed.subject), chunks))


def _has_floor(cell: Cell, record: Record | None) -> bool:
    if cell.subject not in PRESETS or "fp32" in cell.suffixes:
        return False
    return record is None or (record.device, record.device_count) == (FLOOR_DEVICE, 1)


def _state_dtype(cell: Cell, record: Record | None) -> str:
    settings = record.settings if record else {}
    return "bfloat16" if "bf16state" in cell.suffixes else settings.get("state_dtype", "float32")


def _mean_lengths(cell: Cell, record: Record | None) -> tuple[float, float] | None:
    if cell.lengths is not None:
        return cell.lengths
    if record is None or not all(record.metrics.get(name) for name in ("requests", "input_tokens", "output_tokens")):
        return None
    requests = record.metrics["requests"]
    return record.metrics["input_tokens"] / requests, record.metrics["output_tokens"] / requests


def size_order(subject: str) -> tuple[float, str]:
    """Sorts sizes of models, unknown ones last."""
    return (floors.layer_parameters(PRESETS[subject]) if subject in PRESETS else float("inf"), subject)


def cell_order(cell: str) -> tuple[Any, ...]:
    """Sorts cells of one kind: by op, size, load, variant."""
    parsed = parse_cell(cell)
    if parsed.kind in OF_OPS:
        size, _, rest = parsed.workload.partition("-")
        numbers = tuple(map(int, re.findall(r"\d+", rest)))
        return (parsed.subject, size_order(size), rest.rstrip("0123456789"), numbers, parsed.suffixes)
    return (size_order(parsed.subject), parsed.workload, parsed.load or 0, parsed.suffixes)


def load_peers(path: Path) -> Peers:
    """Reads peers.json.

    Raises:
        UserInputError: it cannot be read, or a cell, peer or figure in it is wrong; the message names it.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        labels = dict(values["peers"])
        cells = {}
        for cell, figures in values["cells"].items():
            parse_cell(cell)
            for figure in figures:
                if figure["peer"] not in labels:
                    raise ValueError(f"{cell}: unknown peer {figure['peer']!r}")
            cells[cell] = tuple(PeerFigure(f["peer"], dict(f["metrics"]), f.get("conditions", "")) for f in figures)
        provenance = {name: values["provenance"][name] for name in ("device", "measured", "versions", "conditions")}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserInputError(f"{path}: {error}") from error
    except KeyError as error:
        raise UserInputError(f"{path}: {error} is missing") from error
    return Peers(provenance, labels, cells)


def load_known(results: Path, peers: Path) -> Known:
    """Everything that tables are made of.

    Args:
        results: directory of results files; absent, nothing has been measured.
        peers: the file of the peers' figures.

    Raises:
        UserInputError: see :func:`load_peers` and :func:`~qwen35_jax.bench.records.read_records`.
    """
    records = read_records(results) if results.is_dir() else []
    series: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.when):
        kind = parse_cell(record.cell).kind
        for metric in STARTS if kind == "start" else (MAIN_METRIC[kind],):
            if metric not in record.metrics and kind == "start":
                continue
            if metric not in record.metrics:
                raise UserInputError(f"{results / record.source}: {record.cell} has no metric {metric!r}")
            series.setdefault((record.cell, metric), []).append(record)
    return Known({key: tuple(found) for key, found in series.items()}, load_peers(peers))
