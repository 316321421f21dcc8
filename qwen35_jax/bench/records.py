"""Records of results files: one measured cell each, with where, when, how and at which commit it was measured.

A results file is a JSON list of records. History is kept: a new run extends its file or writes a new one, and whoever
shows figures takes the newest record of each cell (:func:`newest`). The cell's name says what was measured
(:func:`parse_cell`).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.provenance import DIRTY, UNKNOWN_COMMIT, current_commit
from pallas_kernels.records import unwritable, write_json
from qwen35_jax.errors import UserInputError

_CHECKOUT = Path(__file__).resolve().parent.parent.parent
_NAME = r"[a-z0-9][a-z0-9._-]*"
_COUNT = r"[1-9][0-9]*"
_RATE = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
_WORKLOAD = rf"({_COUNT}x{_COUNT}|[a-z][a-z0-9._-]*)"
# What follows kind and subject, part by part: (what it is, its pattern, its form in words).
_PARTS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "offline": (("workload", _WORKLOAD, "<in>x<out> or a name such as lognormal"),),
    "prefill": (("load", rf"({_COUNT})", "a number of tokens"),),
    "long": (("load", rf"({_COUNT})", "a number of tokens"),),
    "decode": (("load", rf"rows({_COUNT})", "rows<N>"),),
    "closed": (("load", rf"c({_COUNT})", "c<N>"), ("workload", _WORKLOAD, "<in>x<out> or a name")),
    "open": (("load", rf"qps({_RATE})", "qps<R>"), ("workload", _WORKLOAD, "<in>x<out> or a name")),
    "kernel": (("workload", rf"({_NAME})", "the name of a spec"),),
    "drift": (("workload", rf"({_NAME})", "the name of a spec and its gates"),),
    "product": (("workload", rf"({_NAME})", "the name of a product and its tokens"),),
    "start": (),
}


OF_OPS = ("kernel", "drift")
"""Kinds of cells whose subject is an operation; the others' is a size of the model."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """The parts of a cell's name.

    Attributes:
        kind: "offline", "prefill", "long", "decode", "closed", "open", "kernel", "drift", "product" or "start".
        subject: size of the model, or the op of a kernel or drift.
        load: tokens of a prefill or of a long prompt, rows of a decode step, clients of a closed loop, requests a
            second of an open one.
        workload: ``<in>x<out>`` or a name (offline, closed, open), the spec of a kernel, a product and its tokens;
            empty where there is none.
        lengths: prompt and output tokens, where the workload says them.
        suffixes: names of the variant, in the order of the cell.
    """

    kind: str
    subject: str
    load: float | None = None
    workload: str = ""
    lengths: tuple[int, int] | None = None
    suffixes: tuple[str, ...] = ()


def parse_cell(cell: str) -> Cell:
    """Take a cell's name apart: ``decode/4b/rows64@bf16state``, ``open/4b/qps16/1024x128``, ``start/9b``.

    Raises:
        ValueError: an unknown kind, a missing or stray part or one of another form; the message names it.
    """
    name, *suffixes = cell.split("@")
    for suffix in suffixes:
        if not re.fullmatch(_NAME, suffix):
            raise ValueError(f"cell {cell!r}: suffix {suffix!r} is not a lower-case name")
    if len(set(suffixes)) < len(suffixes):
        raise ValueError(f"cell {cell!r}: a suffix is there twice")
    kind, *parts = name.split("/")
    if kind not in _PARTS:
        raise ValueError(f"cell {cell!r}: unknown kind {kind!r} (known: {', '.join(_PARTS)})")
    subject = "op" if kind in OF_OPS else "size"
    expected = [(subject, rf"({_NAME})", f"the {subject}"), *_PARTS[kind]]
    if len(parts) != len(expected):
        forms = "/".join([kind, *(f"<{part}>" for part, _, _ in expected)])
        raise ValueError(f"cell {cell!r}: {len(parts)} parts after the kind, expected {len(expected)} ({forms})")
    fields: dict[str, str] = {}
    for text, (part, pattern, form) in zip(parts, expected, strict=True):
        match = re.fullmatch(pattern, text)
        if match is None:
            raise ValueError(f"cell {cell!r}: {part} {text!r} is not {form}")
        fields[part] = match[1]
    load = float(fields["load"]) if "load" in fields else None
    if load == 0:
        raise ValueError(f"cell {cell!r}: a rate of 0")
    workload = fields.get("workload", "")
    lengths = None
    if kind not in OF_OPS and re.fullmatch(rf"{_COUNT}x{_COUNT}", workload):
        n_in, n_out = workload.split("x")
        lengths = (int(n_in), int(n_out))
    return Cell(kind, fields[subject], load, workload, lengths, tuple(suffixes))


@dataclasses.dataclass(frozen=True)
class Record:
    """One measured cell.

    Attributes:
        cell: its name, see :func:`parse_cell`.
        metrics: the figures by name; JSON values, numbers finite.
        device: kind of the device ("NVIDIA H200").
        device_count: devices that the measured work ran on.
        commit: of the code, ending in "+dirty" when tracked files differed from it.
        jax: version.
        command: the whole command that gave the figures.
        date: ISO 8601 with an offset.
        settings: what shapes the figures: engine options, workload, repeats.
        checks: numbers of comparisons made in the same run.
        source: name of the file it was read from; not part of the record.
    """

    cell: str
    metrics: Mapping[str, Any]
    device: str
    device_count: int
    commit: str
    jax: str
    command: str
    date: str
    settings: Mapping[str, Any]
    checks: Mapping[str, Any]
    source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        parse_cell(self.cell)
        for name in ("device", "commit", "jax", "command", "date"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{self.cell}: {name} must be a text that is not empty, got {value!r}")
        if not isinstance(self.device_count, int) or isinstance(self.device_count, bool) or self.device_count < 1:
            raise ValueError(f"{self.cell}: device_count must be a positive integer, got {self.device_count!r}")
        for name in ("metrics", "settings", "checks"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ValueError(f"{self.cell}: {name} must be an object, got {value!r}")
            _require_json(f"{self.cell}: {name}", value)
        if not self.metrics:
            raise ValueError(f"{self.cell}: no metrics")
        try:
            when = self.when
        except ValueError:
            raise ValueError(f"{self.cell}: date {self.date!r} is not ISO 8601") from None
        if when.tzinfo is None:
            raise ValueError(f"{self.cell}: date {self.date!r} has no offset from UTC")

    @property
    def when(self) -> datetime.datetime:
        """The date."""
        return datetime.datetime.fromisoformat(self.date)

    @property
    def dirty(self) -> bool:
        """Whether no commit holds exactly the code that was measured."""
        return self.commit.endswith(DIRTY) or self.commit == UNKNOWN_COMMIT

    def faults(self) -> tuple[str, ...]:
        """Why the figures do not count, in words; empty when they do."""
        found = []
        if self.device.lower() == "cpu":
            found.append("measured on a CPU")
        if (mismatch := self.checks.get("first_mismatch")) is not None:
            found.append(f"wrong output: first mismatch {json.dumps(mismatch)}")
        for name in ("failed", "wrong_length", "compiles_after_warmup"):
            if self.checks.get(name):
                found.append(f"{name} = {self.checks[name]}")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of a results file."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["source"]
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Any, source: str = "") -> Record:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: a field is missing, unknown or of a wrong type; the message names it.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a record must be an object, got {type(values).__name__}")
        names = [field.name for field in dataclasses.fields(cls) if field.name != "source"]
        cell = values.get("cell", "a record without a cell")
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"{cell}: {missing[0]} is missing")
        if unknown := [name for name in values if name not in names]:
            raise ValueError(f"{cell}: unknown field {unknown[0]!r}")
        if not isinstance(cell, str):
            raise ValueError(f"cell must be a text, got {cell!r}")
        return cls(**values, source=source)


def _require_json(where: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: key {key!r} is not a text")
            _require_json(f"{where}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_json(f"{where}[{index}]", item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: not a finite number")
    elif not (value is None or isinstance(value, bool | int | str)):
        raise ValueError(f"{where} is a {type(value).__name__}: not a JSON value")


def make_record(
    cell: str,
    metrics: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    checks: Mapping[str, Any],
    command: str | None = None,
    device: jax.Device | str | None = None,
    device_count: int = 1,
) -> Record:
    """A record of something measured by this process, now.

    Args:
        cell: name of the cell.
        metrics: the figures; numpy and JAX scalars become plain numbers.
        settings: what shapes them.
        checks: numbers of the comparisons made in this run.
        command: the whole command; None takes this process's.
        device: what it ran on; None takes JAX's first device.
        device_count: how many of them.

    Raises:
        ValueError: a wrong name of the cell, a figure that is not finite, or something that JSON cannot hold.
    """
    kind = device if isinstance(device, str) else (device or jax.devices()[0]).device_kind
    return Record(
        cell=cell,
        metrics=_plain(metrics),
        device=kind,
        device_count=device_count,
        commit=own_commit(),
        jax=jax.__version__,
        command=own_command() if command is None else command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        settings=_plain(settings),
        checks=_plain(checks),
    )


def _plain(value: Any) -> Any:
    """Mappings and sequences as dict and list, array scalars as numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


@functools.cache
def own_commit() -> str:
    """The commit of the code that this process runs: as it was when this was first called, whatever follows it.

    Commands that measure for minutes call it when they begin.
    """
    return current_commit()


def own_command() -> str:
    """The command line of this process, without the directories of this machine around its program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = Path(sys.argv[0])
    if spec is not None:
        head = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif program.suffix == ".py":
        path = program.resolve()
        head = ["python", str(path.relative_to(_CHECKOUT)) if path.is_relative_to(_CHECKOUT) else program.name]
    else:
        head = [program.name]
    return shlex.join([*head, *sys.argv[1:]])


def check_results(path: str | os.PathLike[str]) -> None:
    """Refuse a file that records cannot be appended to, before anything is measured for it.

    Raises:
        UserInputError: it is there and no results file, or cannot be written; the message names it.
    """
    if why := unwritable(path):
        raise UserInputError(f"--results={path} {why}")
    if Path(path).exists():
        read_records(path)


def append_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Write records to a results file, after those it has; the file is replaced whole, so that a crash cannot tear it.

    Raises:
        UserInputError: the file is there and is not a results file, or cannot be written.
    """
    path = Path(path)
    _write(path, [*(read_records(path) if path.exists() else []), *records])


def replace_record(path: str | os.PathLike[str], before: Record, after: Record) -> None:
    """Write a record in the place of one that the file has; at the end where it does not have it (any more).

    Raises:
        UserInputError: as :func:`append_records`.
    """
    path = Path(path)
    records = read_records(path) if path.exists() else []
    if before in records:
        records[records.index(before)] = after
    else:
        records.append(after)
    _write(path, records)


def _write(path: Path, records: Sequence[Record]) -> None:
    try:
        write_json(path, [record.to_dict() for record in records])
    except OSError as error:
        raise UserInputError(f"{path}: cannot write results: {error.strerror or error}") from error


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Records of a results file in its order, or of every ``*.json`` of a directory, by name of the file.

    Raises:
        UserInputError: a file that cannot be read or holds something else; the message names file, record and field.
    """
    path = Path(path)
    if path.is_dir():
        return [record for file in sorted(path.glob("*.json")) for record in read_records(file)]
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserInputError(f"{path}: cannot read results: {error.strerror or error}") from error
    except ValueError as error:
        raise UserInputError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, list):
        raise UserInputError(f"{path}: a results file is a list of records, this is a {type(values).__name__}")
    records = []
    for index, item in enumerate(values):
        try:
            records.append(Record.from_dict(item, source=path.name))
        except ValueError as error:
            raise UserInputError(f"{path}: record {index}: {error}") from error
    return records


def newest(records: Sequence[Record]) -> dict[str, Record]:
    """The newest record of each cell by its date (the later in the sequence of equal ones), in order of the names."""
    found: dict[str, Record] = {}
    for record in records:
        if record.cell not in found or record.when >= found[record.cell].when:
            found[record.cell] = record
    return dict(sorted(found.items()))
