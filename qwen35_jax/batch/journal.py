"""A job's output file: records appended as rows finish, never lost, never doubled, resumable after any crash.

A record is one ``write`` of one line; it is on its way to the disk at once and on the disk (fsync) within seconds. A
line that a crash has torn is cut off when the job resumes, and its row runs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from qwen35_jax.batch.manifest import Manifest
from qwen35_jax.batch.records import CustomId, row_key
from qwen35_jax.batch.responses import dump_line
from qwen35_jax.errors import UserInputError

FSYNC_SECONDS = 5.0
DUPLICATE = "duplicate_custom_id"


def manifest_path(output: str) -> str:
    """Where the manifest of an output lies."""
    return f"{output}.manifest.json"


class KeyBook:
    """Gives every row of a job its key, and notices repeated custom_ids; about 100 bytes of memory a row."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def key(self, custom_id: CustomId, line: int) -> tuple[str, bool]:
        """The key of the next row, and whether its custom_id was there before (the key is then its line's)."""
        key = row_key(custom_id, line)
        packed = pack_key(key)
        if custom_id is not None and packed in self._seen:
            return row_key(None, line), True
        self._seen.add(packed)
        return key, False


class Done(NamedTuple):
    """A row that has its record.

    Attributes:
        digest: of the line that was answered.
        failed: whether the record is an error.
    """

    digest: str
    failed: bool


@dataclasses.dataclass
class OutputState:
    """What an output file holds.

    Attributes:
        done: packed key of every row with a record; about 200 bytes of memory a row.
        end: bytes of whole, readable records.
        torn: bytes after them.
        failed: number of error records.
    """

    done: dict[bytes, Done] = dataclasses.field(default_factory=dict)
    end: int = 0
    torn: int = 0
    failed: int = 0


def pack_key(key: str) -> bytes:
    """A key in 16 bytes."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def record_key(record: dict[str, Any]) -> str:
    """The key of the row that a record belongs to."""
    error = record.get("error")
    duplicate = isinstance(error, dict) and error.get("code") == DUPLICATE
    return row_key(None if duplicate else record["custom_id"], record["line"])


def read_output(path: str) -> OutputState:
    """Read an output file; the torn end of a crash is measured, not an error.

    Raises:
        UserInputError: the file is unreadable, or a line before its end is no record of a job.
    """
    state = OutputState()
    broken = None  # the first line that is no record
    refusal = "is not a record of a job; choose another output, or start again with --overwrite"
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                record = _read_record(raw)
                if record is None:
                    # A crash tears a line; it makes no other JSON object and no file of several lines without a record.
                    if _is_object(raw) or (broken is not None and state.end == 0):
                        raise UserInputError(f"cannot resume: line {broken or number} of {path} {refusal}")
                    broken = broken or number
                    state.torn += len(raw)
                    continue
                if broken is not None:
                    raise UserInputError(f"cannot resume: line {broken} of {path} {refusal}")
                state.end += len(raw)
                failed = record["error"] is not None
                state.failed += failed
                state.done[pack_key(record_key(record))] = Done(record["line_digest"], failed)
    except OSError as error:
        raise UserInputError(f"cannot read output {path}: {error.strerror or error}") from error
    return state


def _is_object(raw: bytes) -> bool:
    """Whether a line is a whole JSON object."""
    if not raw.endswith(b"\n"):
        return False
    try:
        return isinstance(json.loads(raw), dict)
    except (ValueError, RecursionError):
        return False


def _read_record(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= record.keys():
        return None
    if type(record.get("line")) is not int or not isinstance(record.get("line_digest"), str):
        return None
    return record


def check_output(path: str, *, overwrite: bool, inputs: Iterable[str] = ()) -> None:
    """Settle, without touching anything, that a job may write to ``path``.

    Args:
        path: the output.
        overwrite: whether an existing output may be thrown away.
        inputs: files that the job reads or writes elsewhere.

    Raises:
        UserInputError: it is "-", its directory is missing, it is no regular file, it is one of ``inputs`` (under this
            or another name) or where the command's own messages go, it cannot be read and written, or it is there and
            was not written by a job.
    """
    if path == "-":
        raise UserInputError("output -: answers go into a file, from which a job is resumed, not to standard output")
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise UserInputError(f"output {path}: the directory {parent} does not exist")
    if path.endswith(os.sep):
        raise UserInputError(f"output {path} is the name of a directory")
    manifest = manifest_path(path)
    try:
        os.lstat(f"{manifest}.tmp")  # the longest of the names
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise UserInputError(f"output {path} cannot be written: {error.strerror}") from error
    for other in inputs:
        for place in (path, manifest, f"{os.path.realpath(path)}.tmp", f"{manifest}.tmp"):
            if same_file(place, other):
                raise UserInputError(f"{place} would be written, but is the same file as {other}")
    if os.path.lexists(path):
        if not os.path.exists(path):
            raise UserInputError(f"output {path} is a symbolic link to a file that does not exist")
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserInputError(f"output {path} is not a regular file")
        for number, name in ((1, "standard output"), (2, "standard error")):
            if _is_open_at(number, path):
                raise UserInputError(f"output {path} is where this command's {name} goes: its messages would be in it")
        if not os.access(path, os.W_OK):
            raise UserInputError(f"output {path} cannot be written: permission denied")
        if not os.access(path, os.R_OK):
            raise UserInputError(f"output {path} cannot be read, which a resume needs: permission denied")
        if os.path.getsize(path) and not os.path.exists(manifest) and not overwrite:
            raise UserInputError(
                f"output {path} exists and was not written by this command (it has no {os.path.basename(manifest)} "
                f"beside it); choose another output, or replace it with --overwrite"
            )
    if not os.access(parent, os.W_OK):
        raise UserInputError(f"output {path}: the directory {parent} cannot be written: permission denied")


def same_file(first: str, second: str) -> bool:
    """Whether two paths name one file, through symbolic or hard links too; neither needs to exist."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


class Journal:
    """Appends records to a job's output; one process at a time.

    Args:
        path: the output, settled by :func:`check_output`.
        manifest: written beside it first.
        keep: what :func:`read_output` found; None starts an empty file, whatever was there.
        drop: keys whose records are taken out before anything is appended.
        fsync_seconds: longest time that a record is not yet on the disk while others follow.
        clock: seconds, for tests.

    Raises:
        UserInputError: another job is writing to the file, or it cannot be opened.
        OSError: it cannot be written to.
    """

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        *,
        keep: OutputState | None = None,
        drop: frozenset[bytes] = frozenset(),
        fsync_seconds: float = FSYNC_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.path = path
        self._fsync_seconds = fsync_seconds
        self._clock = clock
        self._synced = clock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserInputError(f"output {path} cannot be written: {error.strerror or error}") from error
        try:
            _lock(self._file, path)
            if not _is_open_at(self._file, path):
                raise UserInputError(f"output {path} was replaced while the job was starting")
            if keep is not None and os.fstat(self._file).st_size != keep.end + keep.torn:
                raise UserInputError(f"output {path} was changed while the job was starting")
            os.ftruncate(self._file, keep.end if keep else 0)
            if keep is None or keep.end == 0:  # after the old records are gone: they must never meet a new manifest
                manifest.write(manifest_path(path))
            if drop:
                self._take_out(drop)
            os.fsync(self._file)
            _sync_directory(path)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        data = dump_line(record)
        try:
            while data:  # one call, unless the disk is full or a signal cuts it short
                data = data[os.write(self._file, data) :]
            now = self._clock()
            if now - self._synced >= self._fsync_seconds:
                os.fsync(self._file)
                self._synced = now
        except OSError as error:  # which file: the disk of another one may have room
            raise OSError(error.errno, error.strerror, self.path) from error

    def close(self) -> None:
        """Put everything on the disk and let go of the file."""
        if self._file >= 0:
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take_out(self, drop: frozenset[bytes]) -> None:
        """Rewrite the file without some records: into a file beside it, which then takes its name."""
        target = os.path.realpath(self.path)  # a symbolic link stays one
        temporary = f"{target}.tmp"
        with open(self.path, "rb") as old, open(temporary, "wb") as new:
            for raw in old:
                record = _read_record(raw)
                if record is None or pack_key(record_key(record)) not in drop:
                    new.write(raw)
            new.flush()
            os.fsync(new.fileno())
        os.chmod(temporary, stat.S_IMODE(os.fstat(self._file).st_mode))
        os.replace(temporary, target)
        file = os.open(target, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        _lock(file, self.path)
        os.close(self._file)
        self._file = file


def probe_lock(path: str) -> None:
    """Say at once, before a model is loaded, that another job is writing to ``path``.

    Raises:
        UserInputError: it is.
    """
    with contextlib.suppress(FileNotFoundError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _lock(file, path)
        finally:
            os.close(file)


def _is_open_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:  # gone, or (of standard output) closed
        return False


def _lock(file: int, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise UserInputError(f"another job is writing to output {path}") from error
        # A file system without locks: two jobs on one output are then the user's to avoid.


def _sync_directory(path: str) -> None:
    """Make the file's name durable as well as its content."""
    with contextlib.suppress(OSError):
        directory = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def iter_records(path: str) -> Iterator[dict[str, Any]]:
    """The whole records of an output, in the order in which they were written."""
    with open(path, "rb") as file:
        for raw in file:
            record = _read_record(raw)
            if record is not None:
                yield record
