"""Single steps of an engine, measured: its own compiled programs on sequences laid out by hand.

A load (:func:`decode_load`, :func:`prefill_load`) names a program of the engine and fills its host fields: distinct
slots and pages in shuffled order, as they are after many requests have come and gone. :func:`measure` dispatches it
again and again, each dispatch taking the donated state of the one before, waits once at the end, and divides. Nothing
is subtracted: packing the fields, their transfer, the call and the results' copy to the host are in the time, as they
are in the engine's; planning the step and handing out tokens are not.

Positions stay where they are: every decode step of a load reads exactly ``context`` tokens and writes the last of them
anew, so that a figure belongs to one context. The recurrent state moves on from step to step; a prefill starts over.

The pools are filled with numbers that depend on the sequence and the place in it alone. The same sequence can so be
compared between loads of another size, and the first and the last sequence of every load are twins, whose results must
be the same (:func:`check_step`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qwen35_jax import sampling
from qwen35_jax.bench.clocks import Clocks, reader
from qwen35_jax.bench.device_trace import DeviceTrace, kernel_list, profile, scopes_of
from qwen35_jax.cache import PAGE_SIZE, Cache, pages_for
from qwen35_jax.engine import Engine
from qwen35_jax.errors import UserInputError
from qwen35_jax.packing import LiveRequest, decode_values, prefill_values
from qwen35_jax.programs import ProgramSet, fetch, free_device_state, init_device_state
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.steps import DeviceState, ProgramKey, ProgramKind, ResultRows, Variant
from schedulers import Chunk, DecodeRow
from schedulers.buckets import BucketLadder

SETTLE = 16
"""Steps under the profiler before those of the trace: as many as a timed chain has."""
_LAYOUT_SEED = 0
_MAX_CHAIN = 24  # dispatches in a row: beyond 32 under way the runtime makes the host wait


@dataclasses.dataclass(frozen=True)
class StepLoad:
    """A step laid out by hand.

    Attributes:
        key: the program.
        fields: makes its host fields, as the engine does for every step.
        slots: slot of each sequence.
        pages: pages of each sequence.
        identities: which random sequence each is; twins share theirs.
        tokens: tokens that one dispatch advances: rows of a decode, prompt tokens of a prefill.
        context: tokens that a decode row attends to; 0 for prefill.
        lengths: of the prompts; empty for decode.
        start: tokens of the only prompt that are in the cache before: a chunk of a long prompt.
    """

    key: ProgramKey
    fields: Callable[[], dict[str, np.ndarray]]
    slots: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    identities: tuple[int, ...]
    tokens: int
    context: int = 0
    lengths: tuple[int, ...] = ()
    start: int = 0

    @property
    def twins(self) -> tuple[int, int] | None:
        """Two sequences that are the same, or None."""
        last = len(self.identities) - 1
        return (0, last) if last > 0 and self.identities[last] == self.identities[0] else None


@dataclasses.dataclass(frozen=True)
class StepTime:
    """How long a step takes.

    Attributes:
        step_ms: median over the repeats of (time of a chain / its dispatches).
        dispatch_ms: median time that the host spent on one dispatch. Near ``step_ms``, the host is what limits.
        spread: (slowest - fastest) / median of the repeats.
        dispatches: of a chain.
        repeats: chains.
        clocks: of the device during the chains, see :attr:`~qwen35_jax.bench.clocks.Clocks.figures`.
    """

    step_ms: float
    dispatch_ms: float
    spread: float
    dispatches: int
    repeats: int
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """What one step from freshly filled pools gave.

    Attributes:
        rows: sequences.
        finite: those with finite logits.
        tokens: their tokens ``int32 [N]``.
        digest: what the last GDN layer's convolution took in for each sequence's last token, ``float32 [N, Cc]``: it
            has been through every layer before, so a difference anywhere shows.
        logprobs: of the tokens ``float32 [N]``; None in the greedy variant.
        twin_delta: largest absolute difference between the twins' digests; None without twins.
        twin_logprob_delta: between their logprobs; None without twins or logprobs.
        twin_tokens: tokens of the twins, or None.
    """

    rows: int
    finite: int
    tokens: np.ndarray
    digest: np.ndarray
    logprobs: np.ndarray | None
    twin_delta: float | None
    twin_logprob_delta: float | None
    twin_tokens: tuple[int, int] | None

    def against(self, other: StepCheck, load: StepLoad, other_load: StepLoad) -> dict[str, Any]:
        """The sequences that both loads have, compared: their number, equal tokens, distance of the digests.

        The distance is relative to the root mean square of ``other``'s digest. Loads of another size run through other
        tilings of the same products, which round differently: it is as large as rounding, not 0.
        """
        mine, theirs = ({n: i for i, n in reversed([*enumerate(x.identities)])} for x in (load, other_load))
        both = [(mine[n], theirs[n]) for n in mine if n in theirs]
        a, b = (np.asarray(index) for index in zip(*both, strict=True))
        scale = float(np.sqrt(np.mean(np.square(other.digest[b]))))
        return {
            "rows_compared": len(both),
            "equal_tokens": int(np.sum(self.tokens[a] == other.tokens[b])),
            "max_relative_delta": float(np.max(np.abs(self.digest[a] - other.digest[b]))) / scale,
        }


# --- laying out a step ------------------------------------------------------------------------------------------------


def decode_bucket_key(ladder: BucketLadder, rows: int, context: int, variant: Variant = "greedy") -> ProgramKey:
    """The program that an engine with this ladder runs for ``rows`` rows at ``context`` tokens."""
    return ProgramKey("decode", ladder.pick("decode", rows=rows, width=pages_for(context)), 1, variant)


def prefill_bucket_key(ladder: BucketLadder, lengths: Sequence[int], variant: Variant = "greedy") -> ProgramKey:
    """The program that an engine with this ladder runs for prompts of these lengths in one step."""
    bucket = ladder.pick("prefill", tokens=sum(lengths), requests=len(lengths), width=pages_for(max(lengths)))
    return ProgramKey("prefill", bucket, 1, variant)


def decode_load(engine: Engine, rows: int, context: int, variant: Variant = "greedy") -> StepLoad:
    """``rows`` sequences of ``context`` tokens, the newest of which is being computed.

    Raises:
        UserInputError: no compiled program of the engine takes them, or its pools are too small.
    """
    _require_positive(rows=rows, context=context)
    key = _compiled_key(engine.programs, "decode", variant, rows=rows, width=pages_for(context))
    slots, pages = _places(engine.programs, (pages_for(context),) * rows)
    decode_rows = [DecodeRow(f"row-{i}", slots[i], context - 1, 1, pages[i]) for i in range(rows)]
    return StepLoad(
        key,
        lambda: decode_values(decode_rows, key.bucket),
        slots,
        pages,
        _with_twin(rows),
        tokens=rows,
        context=context,
    )


def prefill_load(engine: Engine, lengths: Sequence[int], variant: Variant = "greedy") -> StepLoad:
    """Whole prompts of these lengths, packed into one step. First and last are twins if they have one length.

    Raises:
        UserInputError: no compiled program of the engine takes them, or its pools are too small.
    """
    lengths = tuple(lengths)
    _require_positive(prompts=len(lengths), **{f"lengths[{i}]": length for i, length in enumerate(lengths)})
    wanted = {"tokens": sum(lengths), "requests": len(lengths), "width": pages_for(max(lengths))}
    key = _compiled_key(engine.programs, "prefill", variant, **wanted)
    slots, pages = _places(engine.programs, tuple(map(pages_for, lengths)))
    twins = len(lengths) > 1 and lengths[0] == lengths[-1]
    identities = _with_twin(len(lengths)) if twins else tuple(range(len(lengths)))
    requests = [_prompt(engine, i, identities[i], length) for i, length in enumerate(lengths)]
    chunks = [
        Chunk(f"prompt-{i}", slots[i], 0, length, first=True, last=True, pages=pages[i])
        for i, length in enumerate(lengths)
    ]
    return StepLoad(
        key,
        lambda: prefill_values(chunks, requests, key.bucket),
        slots,
        pages,
        identities,
        tokens=sum(lengths),
        lengths=lengths,
    )


def chunk_loads(engine: Engine, tokens: int, chunk: int, variant: Variant = "greedy") -> tuple[StepLoad, ...]:
    """One long prompt in chunks, a step each, to be run in their order; the prompt is that of ``prefill_load``.

    Args:
        engine: its pools hold the whole prompt.
        tokens: of the prompt.
        chunk: most tokens of a step, a multiple of 64.
        variant: of the sampler.

    Raises:
        UserInputError: no compiled program of the engine takes them, or its pools are too small.
    """
    _require_positive(tokens=tokens, chunk=chunk)
    if chunk % PAGE_SIZE:
        raise UserInputError(f"chunks must be multiples of {PAGE_SIZE} tokens, got {chunk}")
    slots, pages = _places(engine.programs, (pages_for(tokens),))
    request = _prompt(engine, 0, 0, tokens)

    def load(start: int, length: int) -> StepLoad:
        key = _compiled_key(engine.programs, "prefill", variant, tokens=length, requests=1, width=len(pages[0]))
        ends = {"first": start == 0, "last": start + length == tokens}
        part = Chunk(request.request_id, slots[0], start, length, pages=pages[0], **ends)
        return StepLoad(
            key,
            lambda: prefill_values([part], [request], key.bucket),
            slots,
            pages,
            (0,),
            tokens=length,
            lengths=(length,),
            start=start,
        )

    return tuple(load(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk))


def _prompt(engine: Engine, number: int, identity: int, length: int) -> LiveRequest:
    """A greedy request with a prompt that depends on identity and length alone."""
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    words = sampling.row_words(params, sampling.request_key(0, 0, 0), ())
    rng = np.random.default_rng([_LAYOUT_SEED, 2, identity])
    prompt = rng.integers(engine.num_valid, size=length, dtype=np.int32)
    return LiveRequest(f"prompt-{number}", prompt, params, words, max_tokens=1)


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserInputError(f"{name} must be at least 1, got {value}")


def _with_twin(number: int) -> tuple[int, ...]:
    """Sequences 0, 1, ..., the last being the first once more."""
    return (*range(number - 1), 0) if number > 1 else (0,)


def _compiled_key(
    programs: ProgramSet,
    kind: ProgramKind,
    variant: Variant,
    *,
    width: int,
    tokens: int = 0,
    requests: int = 0,
    rows: int = 0,
) -> ProgramKey:
    """The smallest compiled program that holds the step: the one that the engine would run, if it was compiled."""
    wanted = (tokens, requests, rows, width)
    fitting = [
        key
        for key in programs.keys
        if (key.kind, key.variant, key.steps) == (kind, variant, 1)
        and all(have >= want for have, want in zip(key.bucket, wanted, strict=True))
    ]
    if not fitting:
        raise UserInputError(
            f"no compiled {variant} {kind} program holds {tokens} tokens, {requests} prompts, {rows} rows and "
            f"{width} pages a sequence (compiled: {', '.join(map(str, programs.keys))})"
        )
    return min(fitting, key=lambda key: key.bucket)


def _places(programs: ProgramSet, counts: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """A slot and so many pages for each sequence, all distinct and in shuffled order; never the null ones."""
    num_slots, num_pages = programs.shapes.cache.state.shape[1] - 1, programs.shapes.cache.kv.shape[1] - 1
    for name, needed, there in (("slots", len(counts), num_slots), ("pages", sum(counts), num_pages)):
        if needed > there:
            raise UserInputError(f"the step needs {needed} {name}, the engine's pools have {there}")
    rng = np.random.default_rng([_LAYOUT_SEED, 0])
    slots = 1 + rng.permutation(num_slots)[: len(counts)]
    pages = np.split(1 + rng.permutation(num_pages)[: sum(counts)], np.cumsum(counts)[:-1])
    return tuple(slots.tolist()), tuple(tuple(own.tolist()) for own in pages)


# --- the state --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_state(engine: Engine) -> Iterator[list[DeviceState]]:
    """Lends the engine's pools to a measurement as a list of one; what is in it at the end is the engine's again.

    Freed slots and pages may hold anything, so an idle engine does not mind. If a dispatch fails, its pools are gone
    with it and the engine gets new ones.

    Raises:
        UserInputError: the engine has work.
    """
    if engine.has_work:
        raise UserInputError("steps are measured on an idle engine; this one has requests")
    lent = [engine._state]
    try:
        yield lent
    except BaseException:
        free_device_state(lent[0])
        lent[0] = init_device_state(engine.programs.shapes, engine.programs.device)
        raise
    finally:
        engine._state = lent[0]


def fill_pools(engine: Engine, load: StepLoad) -> None:
    """Fill the engine's pools with the sequences of a load, and everything else with other finite numbers."""
    programs = engine.programs
    shapes = programs.shapes
    slot_seeds = np.arange(shapes.cache.state.shape[1], dtype=np.uint32) + np.uint32(1 << 20)
    page_seeds = np.arange(shapes.cache.kv.shape[1], dtype=np.uint32) + np.uint32(1 << 28)
    tokens = np.zeros(shapes.last_token.shape, np.int32)
    for slot, pages, identity in zip(load.slots, load.pages, load.identities, strict=True):
        slot_seeds[slot] = identity
        page_seeds[list(pages)] = (identity << 16) + np.arange(len(pages))
        tokens[slot] = np.random.default_rng([_LAYOUT_SEED, 1, identity]).integers(engine.num_valid)
    with own_state(engine) as lent:
        free_device_state(lent[0])
        lent[0] = _random_state(shapes, *(programs.put(x) for x in (slot_seeds, page_seeds, tokens)))
        jax.block_until_ready(lent[0])


@functools.partial(jax.jit, static_argnums=0)
def _random_state(
    shapes: DeviceState, slot_seeds: jax.Array, page_seeds: jax.Array, last_token: jax.Array
) -> DeviceState:
    cache = Cache(
        kv=_noise(shapes.cache.kv, page_seeds, 1.0, 1),
        conv=_noise(shapes.cache.conv, slot_seeds, 1.0, 2),
        state=_noise(shapes.cache.state, slot_seeds, 0.05, 3),
    )
    num_slots, vocab = shapes.sampler.records.shape
    return DeviceState(cache, sampling.init_state(num_slots, vocab), last_token)


def _noise(spec: jax.Array | jax.ShapeDtypeStruct, seeds: jax.Array, scale: float, salt: int) -> jax.Array:
    """Uniform numbers of standard deviation ``scale``; those at index n of axis 1 depend on ``seeds[n]`` alone.

    Memory of zeros would read as fast, but products of zeros draw less power, and a device that is not warm is faster.
    """
    x = jnp.full(spec.shape, np.uint32(salt * 0x9E3779B1 & 0xFFFFFFFF))
    stride = 1
    for axis in reversed(range(len(spec.shape))):
        if axis != 1:
            x += lax.broadcasted_iota(jnp.uint32, spec.shape, axis) * np.uint32(stride & 0xFFFFFFFF)
            stride *= spec.shape[axis]
    for constant in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * np.uint32(constant)
        x ^= lax.broadcast_in_dim(seeds, spec.shape, (1,)) * np.uint32(0x9E3779B9)
    x = (x ^ (x >> 15)) * np.uint32(0x2C1B3C6D)
    x ^= x >> 13
    unit = lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32) * np.float32(2.0**-31)  # [-1, 1)
    return (unit * np.float32(scale * math.sqrt(3.0))).astype(spec.dtype)


# --- running it -------------------------------------------------------------------------------------------------------


def _chain(engine: Engine, load: StepLoad, lent: list[DeviceState], dispatches: int) -> tuple[float, list[float]]:
    """Dispatch a load several times and wait: seconds in all, and those that the host spent on each dispatch."""
    host = []
    started = time.perf_counter()
    for _ in range(dispatches):
        before = time.perf_counter()
        lent[0], results = engine.programs.run(load.key, lent[0], load.fields())
        results.copy_to_host_async()
        host.append(time.perf_counter() - before)
    jax.block_until_ready((lent[0], results))
    return time.perf_counter() - started, host


def measure(engine: Engine, load: StepLoad, *, warm_up: int = 3, dispatches: int = 16, repeats: int = 5) -> StepTime:
    """Time the step of a load on pools as they are; see :func:`fill_pools`.

    Args:
        engine: idle; stays usable.
        load: what to run.
        warm_up: dispatches before the first chain.
        dispatches: of a chain.
        repeats: chains.
    """
    _require_positive(dispatches=dispatches, repeats=repeats)
    if dispatches > _MAX_CHAIN:
        raise UserInputError(f"dispatches must be at most {_MAX_CHAIN}, got {dispatches}")
    times, host = [], []
    with own_state(engine) as lent:
        if warm_up:
            _chain(engine, load, lent, warm_up)
        with Clocks(reader(engine.programs.device)) as clocks:
            for _ in range(repeats):
                seconds, spent = _chain(engine, load, lent, dispatches)
                times.append(seconds / dispatches)
                host += spent
    middle = statistics.median(times)
    return StepTime(
        step_ms=middle * 1e3,
        dispatch_ms=statistics.median(host) * 1e3,
        spread=(max(times) - min(times)) / middle,
        dispatches=dispatches,
        repeats=repeats,
        clocks=clocks.figures,
    )


def trace_step(
    engine: Engine, load: StepLoad, *, dispatches: int = 4, settle: int = SETTLE, directory: str | None = None
) -> DeviceTrace:
    """The step of a load under the profiler, in the state in which :func:`measure` times it; see :func:`fill_pools`.

    A device that has rested runs faster than one at its power limit, for longer than a few steps take, and it rests
    while the profiler starts. So the steps of the trace come after ``settle`` others that run under the profiler too
    and are cut off.

    Args:
        engine: idle; stays usable.
        load: what to run.
        dispatches: steps in the trace.
        settle: steps before them.
        directory: where the profiler's files stay, with all steps; None keeps none.
    """
    _require_positive(dispatches=dispatches)
    scopes = scopes_of(engine.programs.executable(load.key).as_text() or "")
    clocks = Clocks(reader(engine.programs.device), every_s=0.005)
    with own_state(engine) as lent:

        def steps() -> None:
            for left in range(settle, 0, -_MAX_CHAIN):
                _chain(engine, load, lent, min(left, _MAX_CHAIN))
            with clocks:
                _chain(engine, load, lent, dispatches)

        _chain(engine, load, lent, 1)
        trace = profile(steps, directory, scopes=scopes)
    return dataclasses.replace(trace.last_steps(dispatches, settle + dispatches), clocks=clocks.figures)


def kept_trace(engine: Engine, load: StepLoad, number: int, files: pathlib.Path | None) -> DeviceTrace:
    """:func:`trace_step` of something that has been timed, which a profiler that fails must not undo.

    Args:
        engine: idle; stays usable.
        load: what to run.
        number: steps in the trace.
        files: directory in which the profiler's files stay, and beside it, with ``.tsv`` behind its name, the list of
            kernels; None keeps nothing.

    Returns:
        The trace; where the profiler failed one without events, whose note says why.
    """
    try:
        trace = trace_step(engine, load, dispatches=number, directory=files and str(files))
    except RuntimeError as error:
        return DeviceTrace((), f"profiling failed: {error}")
    if files is not None and trace.events:
        files.with_name(f"{files.name}.tsv").write_text(kernel_list(trace, number), encoding="utf-8")
    return trace


def check_step(engine: Engine, load: StepLoad) -> StepCheck:
    """Fill the pools, run one step and read what it gave."""
    fill_pools(engine, load)
    with own_state(engine) as lent:
        lent[0], results = engine.programs.run(load.key, lent[0], load.fields())
        rows = ResultRows.unpack(fetch(results))
        digest = np.asarray(lent[0].cache.conv[-1, :, -1], np.float32)[list(load.slots)]
    number = len(load.slots)
    logprobs = None if rows.logprob is None else rows.logprob[:number]
    twins = load.twins
    if twins is None:
        twin_delta = twin_tokens = None
    else:
        twin_delta = float(np.max(np.abs(digest[twins[0]] - digest[twins[1]])))
        twin_tokens = (int(rows.tokens[twins[0]]), int(rows.tokens[twins[1]]))
    return StepCheck(
        rows=number,
        finite=int(np.sum(rows.finite[:number])),
        tokens=rows.tokens[:number],
        digest=digest,
        logprobs=logprobs,
        twin_delta=twin_delta,
        twin_logprob_delta=(
            None if twins is None or logprobs is None else float(abs(logprobs[twins[0]] - logprobs[twins[1]]))
        ),
        twin_tokens=twin_tokens,
    )


def decode_step(engine: Engine, rows: int, context: int, *, variant: Variant = "greedy", **how: int) -> StepTime:
    """Time one decode step of ``rows`` sequences of ``context`` tokens; ``how`` as in :func:`measure`."""
    load = decode_load(engine, rows, context, variant)
    fill_pools(engine, load)
    return measure(engine, load, **how)


def prefill_step(engine: Engine, lengths: Sequence[int], *, variant: Variant = "greedy", **how: int) -> StepTime:
    """Time one step of prompts of these lengths; ``how`` as in :func:`measure`."""
    load = prefill_load(engine, lengths, variant)
    fill_pools(engine, load)
    return measure(engine, load, **how)
