"""A directory as a few files of limited size, and back: for taking a training run from one machine to another.

    python -m scripts.demo_model.transport split DIRECTORY PARTS_DIRECTORY
    python -m scripts.demo_model.transport join PARTS_DIRECTORY DIRECTORY

The parts are pieces of one tar, ``run.000`` and on, with ``run.json`` that names them and their digests; it is written
last, so parts without it, or that do not fit it, are an incomplete copy and are refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence

from qwen35_jax.cli.common import exit_code, run_command
from qwen35_jax.errors import UserInputError

PART_BYTES = 15 << 20
NAME = "run"
INDEX = f"{NAME}.json"


class _PartWriter(io.RawIOBase):
    """A file-like object whose bytes go to numbered files."""

    def __init__(self, directory: pathlib.Path, part_bytes: int):
        self._directory, self._part_bytes = directory, part_bytes
        self.parts: list[dict[str, object]] = []
        self._buffer = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self._buffer += data
        while len(self._buffer) >= self._part_bytes:
            self._flush_part(self._part_bytes)
        return len(data)

    def finish(self) -> None:
        if self._buffer:
            self._flush_part(len(self._buffer))

    def _flush_part(self, size: int) -> None:
        data, name = bytes(self._buffer[:size]), f"{NAME}.{len(self.parts):03d}"
        del self._buffer[:size]
        (self._directory / name).write_bytes(data)
        self.parts.append({"name": name, "bytes": size, "sha256": hashlib.sha256(data).hexdigest()})


def split(source: str | os.PathLike[str], target: str | os.PathLike[str], *, part_bytes: int = PART_BYTES) -> int:
    """Writes the files below ``source`` as parts into ``target``, replacing parts that are there.

    Hidden files (names that begin with a dot) at the top of ``source`` stay behind. Everything the parts hold depends
    on names and contents alone.

    Returns:
        The number of parts.

    Raises:
        UserInputError: ``source`` is not a directory.
    """
    source, target = pathlib.Path(source), pathlib.Path(target)
    if not source.is_dir():
        raise UserInputError(f"{str(source)!r} is not a directory")
    target.mkdir(parents=True, exist_ok=True)
    (target / INDEX).unlink(missing_ok=True)
    for old in target.glob(f"{NAME}.[0-9][0-9][0-9]"):
        old.unlink()
    writer = _PartWriter(target, part_bytes)
    with tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(source.rglob("*")):
            if not path.relative_to(source).parts[0].startswith("."):
                tar.add(path, str(path.relative_to(source)), recursive=False, filter=_plain)
    writer.finish()
    (target / INDEX).write_text(json.dumps({"parts": writer.parts}, indent=1) + "\n")
    return len(writer.parts)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def join(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Restores the directory that :func:`split` was given; ``target`` appears whole or not at all.

    Raises:
        UserInputError: a part is missing or differs, or ``target`` is there already and not empty.
    """
    source, target = pathlib.Path(source), pathlib.Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError(f"{str(target)!r} exists and is not an empty directory")
    try:
        index = json.loads((source / INDEX).read_text())
        parts = [(str(part["name"]), str(part["sha256"])) for part in index["parts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserInputError(f"{source / INDEX}: not the index of a split directory ({error})") from error
    data = []
    for name, digest in parts:
        path = source / pathlib.PurePath(name).name
        try:
            data.append(path.read_bytes())
        except OSError as error:
            raise UserInputError(f"{path}: {error.strerror}") from error
        if hashlib.sha256(data[-1]).hexdigest() != digest:
            raise UserInputError(f"{path}: its contents differ from what {INDEX} says")
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        partial.chmod(0o755)
        with tarfile.open(fileobj=io.BytesIO(b"".join(data)), mode="r") as tar:
            tar.extractall(partial, filter="data")
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def main(argv: Sequence[str]) -> int:
    if len(argv) != 4 or argv[1] not in ("split", "join"):
        print(__doc__, file=sys.stderr)
        return 2

    def run() -> int:
        (split if argv[1] == "split" else join)(argv[2], argv[3])
        return 0

    return exit_code(run)


if __name__ == "__main__":
    run_command(main)
