"""One long prompt, computed in chunks: how long each takes over a growing prefix, and what it costs in memory.

The chunks are the engine's own prefill programs in its own order (:func:`~qwen35_jax.bench.steps.chunk_loads`). As in
the engine a chunk's results are read one dispatch late, so that the next one is under way: when they are there is when
that chunk has ended. Nothing else waits.

The same prompt in chunks of half the size goes through another program, with other tilings and other boundaries between
what is in the cache and what is not. The token after the prompt must be the same, or one that rounding explains by the
rule of :mod:`~qwen35_jax.bench.checks`.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from qwen35_jax.bench import cells, steps
from qwen35_jax.bench.checks import BF16_MARGIN
from qwen35_jax.bench.clocks import Clocks, reader
from qwen35_jax.bench.floors import chunk_floors_s
from qwen35_jax.bench.known import chunk_floors_ms
from qwen35_jax.bench.records import Record, make_record
from qwen35_jax.bench.steps import StepLoad
from qwen35_jax.cache import PAGE_SIZE, pages_for
from qwen35_jax.config import ModelConfig
from qwen35_jax.engine import Engine
from qwen35_jax.errors import UserInputError
from qwen35_jax.programs import fetch
from qwen35_jax.steps import ProgramKey, ResultRows, Variant
from schedulers import BucketLadder

log = logging.getLogger(__name__)

STANDARD_CHUNK = 8192
"""Chunks of this size make the cell without a suffix."""
FLAT = 0.01
"""Growth of the peak of memory from the first chunk to the last that still counts as none."""


@dataclasses.dataclass(frozen=True)
class Times:
    """One run over the prompt.

    Attributes:
        seconds: from the first dispatch to the end of the last chunk.
        chunk_ms: from the end of the chunk before (of the first: from its dispatch) to the end of each.
    """

    seconds: float
    chunk_ms: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class End:
    """What the last chunk gave.

    Attributes:
        rows: its results; entry 0 is the prompt's.
        state: of the last GDN layer, which the whole prompt has gone into ``float32 [Hv, Dv, Dk]``.
        peaks: most bytes that the device ever held, before the first chunk and after each; empty where it does not say.
    """

    rows: ResultRows
    state: np.ndarray
    peaks: tuple[int, ...]


def check_chunk(chunk: int) -> int:
    """Size of the chunks of the other way: half, on the grid.

    Raises:
        UserInputError: the chunks are the smallest there are: nothing smaller could be compared with them.
    """
    if chunk < 2 * PAGE_SIZE:
        raise UserInputError(
            f"a long prompt in chunks of {chunk} tokens has no smaller ones to be compared with: "
            f"--max_num_batched_tokens must be at least {2 * PAGE_SIZE}"
        )
    return chunk // 2 // PAGE_SIZE * PAGE_SIZE


def keys_of(ladder: BucketLadder, tokens: int, chunk: int, variant: Variant) -> tuple[ProgramKey, ...]:
    """The programs that a measurement needs: those of the timed chunks, and of the other way with log probabilities."""
    keys = []
    for size, of in ((chunk, variant), (check_chunk(chunk), "full")):
        for length in filter(None, (min(size, tokens), tokens % size)):
            bucket = ladder.pick("prefill", tokens=length, requests=1, width=pages_for(tokens))
            keys.append(ProgramKey("prefill", bucket, 1, of))  # type: ignore[arg-type]
    return tuple(dict.fromkeys(keys))


def run_once(engine: Engine, loads: Sequence[StepLoad]) -> Times:
    """Run all chunks on pools as they are, and note when each has ended."""
    ends: list[float] = []
    before: jax.Array | None = None
    with steps.own_state(engine) as lent:
        started = time.perf_counter()
        for load in loads:
            lent[0], results = engine.programs.run(load.key, lent[0], load.fields())
            results.copy_to_host_async()
            if before is not None:
                before.block_until_ready()
                ends.append(time.perf_counter())
            before = results
        jax.block_until_ready((lent[0], before))
        ends.append(time.perf_counter())
    return Times(ends[-1] - started, tuple(np.diff(ends, prepend=started) * 1e3))


def run_and_look(engine: Engine, loads: Sequence[StepLoad]) -> End:
    """Fill the pools, run all chunks, waiting for each, and read memory and results."""
    device = engine.programs.device

    def peak() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    steps.fill_pools(engine, loads[0])
    peaks = [peak()]
    with steps.own_state(engine) as lent:
        for load in loads:
            lent[0], results = engine.programs.run(load.key, lent[0], load.fields())
            jax.block_until_ready((lent[0], results))
            peaks.append(peak())
        rows = ResultRows.unpack(fetch(results))
        state = np.asarray(lent[0].cache.state[-1, loads[0].slots[0]], np.float32)
    return End(rows, state, tuple(seen for seen in peaks if seen is not None))


def compare(end: End, other: End, margin: float) -> dict[str, Any]:
    """The end of the timed chunks' run against that of the other way, which has log probabilities.

    Returns:
        ``equal_tokens`` (0 or 1), ``margin_at_difference`` (by how much the other way prefers its own token; 0.0 if it
        is the same one; a lower bound where it does not list the other), ``margin_allowed``, ``relative_delta_state``
        (norm of the difference over the norm of the other way's), ``abs_delta_logprob`` where both have them, and
        ``first_mismatch``, None where ``margin`` explains what differs.
    """
    token, theirs = int(end.rows.tokens[0]), int(other.rows.tokens[0])
    assert other.rows.logprob is not None and other.rows.top_ids is not None and other.rows.top_logprobs is not None
    own, top = float(other.rows.logprob[0]), other.rows.top_logprobs[0]
    listed = np.flatnonzero(other.rows.top_ids[0] == token)
    gap = 0.0 if token == theirs else own - float(top[listed[0]] if listed.size else top[-1])
    finite = bool(end.rows.finite[0]) and bool(other.rows.finite[0])
    found: dict[str, Any] = {
        "rows": 1,
        "finite_rows": int(end.rows.finite[0]),
        "equal_tokens": int(token == theirs),
        "margin_at_difference": gap if finite else None,
        "margin_allowed": margin,
        "relative_delta_state": (
            float(np.linalg.norm(end.state - other.state) / np.linalg.norm(other.state)) if finite else None
        ),
        "first_mismatch": None,
    }
    if end.rows.logprob is not None and finite:
        found["abs_delta_logprob"] = abs(float(end.rows.logprob[0]) - own)
    if not finite:
        found["first_mismatch"] = {"what": "logits that are not finite"}
    elif token != theirs and (not listed.size or margin == 0 or gap > margin):
        found["first_mismatch"] = {"what": "token after the prompt", "tokens": [token, theirs], "margin": gap}
    return found


def memory_metrics(peaks: Sequence[int]) -> dict[str, Any]:
    """Peaks in GiB before the first chunk, after it and at the end, and how much they grew after the first."""
    if not peaks:
        return {}
    before, first, last = (peaks[at] / 2**30 for at in (0, 1, -1))
    growth = last / first - 1
    return {
        "peak_before_gib": before,
        "peak_first_chunk_gib": first,
        "peak_end_gib": last,
        "memory_growth": growth,
        "memory_flat": growth <= FLAT,
    }


def measure(
    engine: Engine,
    model: ModelConfig,
    size: str,
    tokens: int,
    *,
    variant: Variant = "greedy",
    repeats: int = 3,
    with_floor: bool = True,
) -> Record:
    """Measure the cell ``long/<size>/<tokens>``.

    Args:
        engine: idle, with the programs of :func:`keys_of`; its ``max_num_batched_tokens`` is the size of the chunks.
        model: its numbers.
        size: the model's name in the cell.
        tokens: of the prompt.
        variant: of the timed chunks' sampler.
        repeats: timed runs; the median counts, and the chunks' times are those of that run.
        with_floor: whether the device is the one whose ceilings are known.

    Raises:
        UserInputError: a program is missing, the pools are too small, the engine has work, or its chunks are too small
            (see :func:`check_chunk`).
    """
    chunk = engine.scheduler.config.max_num_batched_tokens
    if repeats < 1 or tokens <= chunk:
        raise UserInputError(f"a long prompt has more than one chunk of {chunk} tokens and at least one repeat")
    loads = steps.chunk_loads(engine, tokens, chunk, variant)
    others = steps.chunk_loads(engine, tokens, check_chunk(chunk), "full")
    end = run_and_look(engine, loads)  # first, so that memory is that of this way alone; it warms the device as well
    compiles = engine.compiles_after_warmup
    with Clocks(reader(engine.programs.device)) as clocks:
        runs = [run_once(engine, loads) for _ in range(repeats)]
    compiles = engine.compiles_after_warmup - compiles
    seconds = [run.seconds for run in runs]
    middle = sorted(runs, key=lambda run: run.seconds)[(repeats - 1) // 2]
    exact = engine.programs.shapes.cache.kv.dtype == np.float32
    checks = {
        "compared_with": f"chunks of {check_chunk(chunk)} tokens ({others[-1].key})",
        **compare(end, run_and_look(engine, others), 0.0 if exact else BF16_MARGIN),
        "compiles_after_warmup": compiles,
    }
    chunks = [(load.start, load.tokens) for load in loads]
    metrics: dict[str, Any] = {
        "tok_s": tokens / middle.seconds,
        "seconds": middle.seconds,
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
        "chunk_ms": middle.chunk_ms,
        **memory_metrics(end.peaks),
    }
    if with_floor:
        floor = sum(chunk_floors_s(model, chunks))
        metrics |= {"floor_ms": floor * 1e3, "floor_share": floor / middle.seconds}
    if clocks.figures:
        metrics["clocks"] = {"timed": clocks.figures}
    settings = {
        "program": str(loads[0].key),
        "variant": variant,
        "repeats": repeats,
        "chunks": chunks,
    }
    suffix = cells.suffixes(engine.config, variant) + ("" if chunk == STANDARD_CHUNK else f"@chunk{chunk}")
    return make_record(
        f"long/{size}/{tokens}{suffix}",
        metrics,
        settings=cells.settings_of(engine, settings),
        checks=checks,
        device=engine.programs.device,
    )


def describe(record: Record) -> str:
    """A record in words: the whole prompt, its chunks, and the parts of the last one."""
    metrics = record.metrics
    floor = f", floor {metrics['floor_ms'] * 1e-3:.3f} s" if "floor_ms" in metrics else ""
    lines = [
        f"{record.cell}: {metrics['seconds']:.3f} s, {metrics['tok_s']:,.0f} tokens/s{floor} "
        f"({record.settings['program']}; spread {metrics['spread']:.1%})"
    ]
    if "memory_growth" in metrics:
        before, first, last = (metrics[f"peak_{when}_gib"] for when in ("before", "first_chunk", "end"))
        lines.append(
            f"  peak of memory: {before:.2f} GiB before, {first:.2f} after the first chunk, {last:.2f} at the end"
        )
    lines.append(f"  {'prefix':>8} {'tokens':>7} {'ms':>9} {'floor':>9}")
    floors = chunk_floors_ms(record) or (None,) * len(metrics["chunk_ms"])
    for (start, length), ms, least in zip(record.settings["chunks"], metrics["chunk_ms"], floors, strict=True):
        lines.append(f"  {start:>8} {length:>7} {ms:>9.3f} {'' if least is None else f'{least:9.3f}':>9}")
    if last := metrics.get("last_chunk"):
        lines.append(f"  of the last chunk, ms: {', '.join(f'{part} {ms:.3f}' for part, ms in last['parts'].items())}")
    return "\n".join(lines)


def profiled(
    engine: Engine,
    record: Record,
    number: int,
    variant: Variant = "greedy",
    *,
    files: pathlib.Path | None = None,
) -> Record:
    """A record with the parts of its last chunk, as those of a step; without them where the profiler saw no kernels.

    Args:
        engine: the one that was measured, idle.
        record: of :func:`measure`.
        number: times that the last chunk runs under the profiler.
        variant: as for :func:`measure`.
        files: see :func:`~qwen35_jax.bench.steps.kept_trace`.
    """
    chunks = record.settings["chunks"]
    load = steps.chunk_loads(engine, sum(length for _, length in chunks), chunks[0][1], variant)[-1]
    steps.fill_pools(engine, load)
    trace = steps.kept_trace(engine, load, number, files)
    if not trace.events:
        log.warning("%s: no parts of the last chunk: %s", record.cell, trace.note)
        return record
    busy_ms, step_ms = trace.busy_s * 1e3 / number, record.metrics["chunk_ms"][-1]
    last: dict[str, Any] = {
        "step_ms": step_ms,
        "busy_ms": busy_ms,
        "idle_ms": step_ms - busy_ms,
        "parts": {part: time.seconds * 1e3 / number for part, time in trace.by_part().items()},
    }
    metrics = {**record.metrics, "last_chunk": last}
    if trace.clocks:
        metrics["clocks"] = {**record.metrics.get("clocks", {}), "profiled": dict(trace.clocks)}
    settings = {**record.settings, "profiled_steps": number, "profiled_after": steps.SETTLE}
    return dataclasses.replace(record, metrics=metrics, settings=settings)
