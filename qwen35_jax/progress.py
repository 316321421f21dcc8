"""Progress on stderr: a bar on a terminal, plain lines everywhere else (log files, CI, pipes).

A stage is reported by calling ``progress(stage, done, total)``: loading a tensor, compiling a bucket, answering a row.
Anything that takes long takes such a callable, so that no part of a run is silent for minutes.

A stream that cannot be written to any more (the reader of a pipe is gone, the disk of a log is full) ends the
reports, never the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

ProgressFn = Callable[..., None]
"""``(stage: str, done: int, total: int, note: str = "") -> None``; see :class:`Progress`."""


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """A :data:`ProgressFn` that says nothing."""


class Progress:
    """Reports stages and, with tokens per second, the rows of a run.

    Args:
        stream: where to write; stderr when None.
        terminal: draw bars (True) or print lines (False); None asks the stream whether it is a terminal.
        interval: least seconds between two plain lines of one stage. The first and the last are always printed.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream: Any = _LastingStream(stream or sys.stderr)
        self._terminal = _is_terminal(self._stream) if terminal is None else terminal
        self._interval = interval
        self._clock = clock
        self._bar = None
        self._stage = ""
        self._started = self._ended = clock()
        self._last_line = 0.0

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Report that ``done`` of ``total`` parts of ``stage`` are finished; ``note`` follows on the same line.

        A call with another stage ends the stage before it; ``done == total`` ends this one.
        """
        if stage != self._stage:
            self.close()
            # A stage that first reports when a part is done began when the stage before it ended.
            self._started = self._ended if done else self._clock()
            self._stage, self._last_line = stage, float("-inf")
        if self._terminal:
            self._draw(stage, done, total, note)
        else:
            self._print(stage, done, total, note)
        if done >= total:
            self.close()

    def rows(self, total: int, stage: str = "answering", *, done: int = 0) -> RowProgress:
        """Progress over ``total`` rows, ``done`` of which were there before."""
        self.close()
        self._ended = self._clock()
        return RowProgress(self, stage, total, done, self._clock)

    def message(self, text: str) -> None:
        """Print one line without breaking a bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the stage that is shown, if any."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._stage:
            self._stage, self._ended = "", self._clock()

    def _draw(self, stage: str, done: int, total: int, note: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=stage, file=self._stream, dynamic_ncols=True, initial=done)
        self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def _print(self, stage: str, done: int, total: int, note: str) -> None:
        now = self._clock()
        if done < total and now - self._last_line < self._interval:
            return
        self._last_line = now
        tail = f", {note}" if note else ""
        print(f"{stage}: {done} of {total}, {now - self._started:.0f} s{tail}", file=self._stream, flush=True)


class RowProgress:
    """Progress of a run over rows, with the rate of output tokens; made by :meth:`Progress.rows`."""

    def __init__(self, progress: Progress, stage: str, total: int, done: int, clock: Callable[[], float]):
        self._progress = progress
        self._stage = stage
        self._total = total
        self._done = done
        self._failed = 0
        self._tokens = 0
        self._clock = clock
        self._started = clock()

    def add(self, *, rows: int = 0, tokens: int = 0, failed: int = 0) -> None:
        """Count finished rows, output tokens and failed rows."""
        self._done += rows
        self._tokens += tokens
        self._failed += failed
        seconds = max(self._clock() - self._started, 1e-9)
        note = f"{self._tokens / seconds:.1f} tokens/s"
        if self._failed:
            note += f", {self._failed} failed"
        self._progress(self._stage, self._done, self._total, note)

    def close(self) -> None:
        """End the bar, whatever is left."""
        self._progress.close()


class _LastingStream:
    """A stream that drops what cannot be written; an error inside tqdm would leave tqdm's lock taken for good."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                return self._stream.write(text)
            except OSError:
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except OSError:
                self._gone = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a stream without the method, or a closed one
        return False
