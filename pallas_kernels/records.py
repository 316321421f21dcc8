"""Results of the kernels' tools: files of records, each with what it was measured on and by which command; tables."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

FIELDS = ("cell", "metrics", "device", "device_count", "commit", "jax", "command", "date", "settings", "checks")
"""What a record says, in this order."""

DTYPE_SUFFIXES: Mapping[str, str] = {"float32": "@fp32", "bfloat16": "@bf16", "float16": "@fp16"}
"""How the name of a cell says a dtype that is not the usual one of its workload."""


def result(
    cell: str,
    metrics: Mapping[str, Any],
    settings: Mapping[str, Any],
    checks: Mapping[str, Any],
    command: str,
    commit: str,
) -> dict[str, Any]:
    """A record of something that this process measured on the first device, now.

    Args:
        cell: what was measured.
        metrics: the figures.
        settings: what shapes them.
        checks: numbers of the comparisons made in this run.
        command: the whole command that gave them.
        commit: of the code, taken when the run began: what is committed meanwhile is not what runs.

    Returns:
        The fields of :data:`FIELDS`, all JSON values: a number that is not finite, as a wrong kernel's error may be, is
        the text "nan", "inf" or "-inf", since JSON has no such numbers.
    """
    return {
        "cell": cell,
        "metrics": _plain(metrics),
        "device": jax.devices()[0].device_kind,
        "device_count": 1,
        "commit": commit,
        "jax": jax.__version__,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": _plain(settings),
        "checks": _plain(checks),
    }


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose rows, the header among them, have columns of one width each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def variant(*, dtype: str | None, implementation: str | None) -> str:
    """Suffix of a cell whose workload ran otherwise than a run without flags would: empty, or beginning with "@".

    Args:
        dtype: another than the workload's, or None.
        implementation: the one asked for by name, or None: "auto" has no name.
    """
    found = DTYPE_SUFFIXES[dtype] if dtype else ""
    return found + (f"@{implementation}" if implementation else "")


class ResultsFile:
    """A results file that a run extends as it goes: a run that is cut keeps what it has.

    What is in the file stays, what other runs add meanwhile too: it is read anew before each write. (Two writes at the
    very same moment are not told apart: the later one wins.)

    Args:
        path: of the file; None keeps nothing.

    Raises:
        ValueError: the file is no list of records, or cannot be written; the message names it.
    """

    def __init__(self, path: str | None):
        self._path, self._own = path, list[dict[str, Any]]()
        if path is not None:
            if why := unwritable(path):
                raise ValueError(f"{path} {why}")
            records_in(path)

    def keep(self, own: Sequence[dict[str, Any]]) -> None:
        """Write this run's records in the place of those that it has written before.

        Raises:
            ValueError: the file is no list of records any more.
        """
        if self._path is not None:
            others = [record for record in records_in(self._path) if record not in self._own]
            write_json(self._path, [*others, *own])
            self._own = json.loads(json.dumps(own))  # as they will be read: lists instead of tuples


def unwritable(path: str | os.PathLike[str]) -> str:
    """Why a file cannot be written there, in words; empty if it can. To be asked before anything is measured."""
    path = Path(path)
    if path.is_dir():
        return "is a directory, it must be a file"
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        return f"cannot be written: {folder.name} is no directory"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"cannot be written: no permission in {folder.name}"


def records_in(path: str) -> list[dict[str, Any]]:
    """The records of a results file; none where there is no file.

    Raises:
        ValueError: the file is no list of records, or cannot be read; the message names it.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(records, list) or not all(
        isinstance(record, dict) and record.keys() == set(FIELDS) for record in records
    ):
        raise ValueError(f"{path} is no list of records")
    return records


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a file, replacing what is there: at any moment it is the old one or the new one, whole.

    Raises:
        OSError: it cannot be written.
        ValueError: a number is not finite.
    """
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
