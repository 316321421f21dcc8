"""Results files of the kernels' tools: lists of records, each with what it was measured on and by which command."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.provenance import current_commit


def result(
    cell: str, metrics: dict[str, Any], settings: dict[str, Any], checks: dict[str, Any], command: str
) -> dict[str, Any]:
    """A record of something that this process measured on the first device, now."""
    return {
        "cell": cell,
        "metrics": metrics,
        "device": jax.devices()[0].device_kind,
        "device_count": 1,
        "commit": current_commit(),
        "jax": jax.__version__,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "checks": checks,
    }


def records_in(path: str) -> list[dict[str, Any]]:
    """The records of a results file; none where there is no file.

    Raises:
        ValueError: the file is no list of records; the message names it.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} is no list of records")
    return records


def write_json(path: str, value: Any) -> None:
    """Write a file, replacing what is there: at any moment it is the old one or the new one, whole."""
    text = json.dumps(value, indent=1) + "\n"
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
