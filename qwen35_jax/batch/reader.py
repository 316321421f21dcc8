"""Reading a job's input: lines by number, a bounded number of them ahead, whatever the size of the file.

The file is scanned once for line ends (8 bytes are kept for a line); lines are then read, parsed and tokenised ahead of
the engine by grain, on a thread of their own and in order.
"""

from __future__ import annotations

import array
import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from qwen35_jax.errors import UserInputError

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is an error record: no prompt is that long, and the file is probably not JSONL."""

_SCAN_BYTES = 4 * 1024 * 1024

_NOT_TEXT = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xfd7zXZ\x00": "compressed with xz",
    # Its whole mark: text that begins with the first letters of it is a bad line, no more.
    **{b"BZh%d1AY&SY" % level: "compressed with bzip2" for level in range(1, 10)},
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 or UTF-32",
    b"\xfe\xff": "UTF-16",
    b"\x00\x00\xfe\xff": "UTF-32",
}
"""How files begin that hold no line of JSON in UTF-8: one message instead of an error for whatever is between two
newlines."""


class Line(NamedTuple):
    """One line of the file.

    Attributes:
        number: from 1.
        raw: its bytes without the newline; of a line over :data:`MAX_LINE_BYTES`, only the beginning.
        length: bytes of the whole line.
    """

    number: int
    raw: bytes
    length: int

    @property
    def too_long(self) -> bool:
        """Whether only the beginning was read."""
        return self.length > MAX_LINE_BYTES


class LineSource:
    r"""Random access to the lines of a file; a line ends at ``\n`` and nowhere else.

    A grain ``RandomAccessDataSource``. Lines without a byte are left out (and still counted by :attr:`Line.number`).
    Reading a line that is no longer there raises an OSError: half a line must not pass for a bad row.

    Args:
        path: a regular file.

    Raises:
        UserInputError: it cannot be read, is no regular file, is compressed or in another encoding than UTF-8.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        self._file = open_input(self._path)
        self._starts = array.array("q")
        self._numbers = array.array("q")
        self._lengths = array.array("q")
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise UserInputError(f"cannot read {self._path}: {error.strerror or error}") from error

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Line:
        length = self._lengths[index]
        wanted = min(length, MAX_LINE_BYTES + 1)
        raw = os.pread(self._file, wanted, self._starts[index])
        if len(raw) < wanted:
            raise OSError(f"input {self._path} has become shorter since the job began: line {self._numbers[index]}")
        return Line(self._numbers[index], raw, length)

    def __repr__(self) -> str:
        return f"LineSource({self._path!r})"

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _scan(self) -> None:
        begin, number, offset = 0, 0, 0  # start of the current line, lines before it, bytes read
        while chunk := os.pread(self._file, _SCAN_BYTES, offset):
            for end in (np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + offset).tolist():
                number += 1
                self._add(number, begin, end)
                begin = end + 1
            offset += len(chunk)
        self._add(number + 1, begin, offset)

    def _add(self, number: int, begin: int, end: int) -> None:
        if end > begin:
            self._starts.append(begin)
            self._numbers.append(number)
            self._lengths.append(end - begin)


def open_input(path: str) -> int:
    """Open a job's input; returns the file descriptor.

    Raises:
        UserInputError: it is missing, unreadable, no regular file, or begins like a file that is no JSONL.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UserInputError(f"cannot read input {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        kind = "a directory" if os.path.isdir(path) else "not a regular file (it is read more than once)"
        raise UserInputError(f"cannot read input {path}: it is {kind}")
    begin = os.pread(file, max(map(len, _NOT_TEXT)), 0)
    for mark, kind in _NOT_TEXT.items():
        if begin.startswith(mark):
            os.close(file)
            raise UserInputError(f"cannot read input {path}: it is {kind}; a plain JSONL file in UTF-8 is needed")
    return file


@contextlib.contextmanager
def read_ahead[T](source: LineSource, transform: Callable[[Line], T], *, ahead: int = 64) -> Iterator[Iterator[T]]:
    """Iterate over ``transform(line)`` of every line in order, computed up to ``ahead`` lines ahead on a thread.

    ``transform`` returns None for lines to be left out. Leaving the context ends the thread.
    """
    import grain  # takes seconds to import

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
    rows = iter(grain.MapDataset.source(source).map(transform).to_iter_dataset(options))
    try:
        yield rows
    finally:
        rows.close()
