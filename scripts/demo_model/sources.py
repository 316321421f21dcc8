"""Where training gets its batches: the interface, a random source for trials, and reading ahead.

A source is made by ``Source(tokenizer_dir, seed, batch_size, seq_len, split=...)``, ``split`` being "train" or
"held_out", and has

* ``task_names``: what the numbers in ``tasks`` mean;
* ``batch(step)``, the same for the same arguments and step, a dict of numpy arrays ``[batch_size, seq_len]``:
  ``tokens`` int32; ``weights`` float32, the weight of predicting ``tokens[t]`` from what lies before it in its segment
  (1 on answers and text, little or 0 on what cannot be known; that of a segment's first token is ignored); ``segments``
  int32, equal for the tokens of an example, which lie side by side, and never coming back later in a row; ``tasks``
  int32, of which task a token is.

Segments may start anywhere: the model restarts its state, positions, convolution and attention there. What is left of
a row is one more segment of weight 0.
"""

from __future__ import annotations

import collections
import concurrent.futures
import importlib
import multiprocessing
import pathlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

type HostBatch = Mapping[str, np.ndarray]

FIELDS = ("tokens", "weights", "segments", "tasks")
SOURCES = {
    "tasks": ("scripts.demo_model.batches", "Batches"),
    "random": ("scripts.demo_model.sources", "RandomBatches"),
}


class BatchSource(Protocol):
    """See the module."""

    task_names: Sequence[str]

    def batch(self, step: int) -> HostBatch: ...


class RandomBatches:
    """Examples without a tokenizer: a random list of ids and its copy, or its reversal.

    Args:
        tokenizer_dir: not read.
        seed: of the examples.
        batch_size: rows.
        seq_len: tokens a row.
        split: "train" or "held_out": other examples.
        vocab_size: ids are below it.
    """

    task_names = ("copy", "reverse")

    def __init__(
        self,
        tokenizer_dir: pathlib.Path | None,
        seed: int,
        batch_size: int,
        seq_len: int,
        *,
        split: str = "train",
        vocab_size: int = 64,
    ):
        self._seed = [seed, ("train", "held_out").index(split)]
        self._shape = (batch_size, seq_len)
        self._vocab_size = vocab_size

    def batch(self, step: int) -> HostBatch:
        """The batch of a step."""
        rng = np.random.default_rng([*self._seed, step])
        out = {name: np.zeros(self._shape, np.float32 if name == "weights" else np.int32) for name in FIELDS}
        for row in range(self._shape[0]):
            start = number = 0
            while start < self._shape[1]:
                count, task = int(rng.integers(2, 9)), int(rng.integers(2))
                words = rng.integers(4, self._vocab_size, count)
                example = np.concatenate([[2 + task], words, [1], words[:: -1 if task else 1], [0]])
                end = start + len(example)
                if end <= self._shape[1]:
                    out["tokens"][row, start:end] = example
                    out["weights"][row, end - count - 1 : end] = 1
                    out["tasks"][row, start:end] = task
                out["segments"][row, start:] = number
                start, number = end, number + 1
        return out


def open_source(kind: str, **arguments: Any) -> BatchSource:
    """Makes a source by the name of its kind ("tasks" or "random")."""
    module, name = SOURCES[kind]
    return getattr(importlib.import_module(module), name)(**arguments)


_of_worker: BatchSource | None = None


def _start_worker(kind: str, arguments: dict[str, Any]) -> None:
    global _of_worker  # a worker process serves one source
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the leg, which still needs the batches under way
    _of_worker = open_source(kind, **arguments)


def _worker_batch(step: int) -> HostBatch:
    if _of_worker is None:
        raise RuntimeError("the worker has no source")
    return _of_worker.batch(step)


class Prefetcher:
    """Batches of consecutive steps, made ahead of their use.

    Args:
        kind: kind of the source.
        arguments: its arguments.
        first_step: where to begin.
        workers: processes that make batches; 0 makes them in a thread of this process.
        depth: batches made ahead.
    """

    def __init__(self, kind: str, arguments: dict[str, Any], first_step: int, *, workers: int = 0, depth: int = 4):
        if workers:
            # Fresh processes: a fork of one in which JAX runs threads may hang.
            self._pool: concurrent.futures.Executor = concurrent.futures.ProcessPoolExecutor(
                workers, multiprocessing.get_context("spawn"), _start_worker, (kind, arguments)
            )
            self._make = _worker_batch
        else:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "batches")
            self._make = open_source(kind, **arguments).batch
        self._next = first_step
        self._pending: collections.deque[concurrent.futures.Future[HostBatch]] = collections.deque()
        for _ in range(max(depth, workers)):
            self._submit()

    def _submit(self) -> None:
        self._pending.append(self._pool.submit(self._make, self._next))
        self._next += 1

    def __iter__(self) -> Iterator[HostBatch]:
        while True:
            batch = self._pending.popleft().result()
            self._submit()
            yield batch

    def close(self) -> None:
        """Ends the workers."""
        self._pool.shutdown(wait=True, cancel_futures=True)
