"""Fixed-shape programs: what a bucket computes, and the set of compiled executables of one device.

A program is named by (kind, bucket, steps, variant). It takes the flat parameter tuple, the donated
:class:`DeviceState` and ONE packed ``int32`` vector with everything the host has to say about the step; it returns
the new state and ONE packed ``int32`` result array. Everything is compiled ahead of the first request
(:meth:`ProgramSet.compile`), so that no shape, option or dtype can cause a compile later.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from qwen35_jax import sampling
from qwen35_jax.cache import PAGE_SIZE, Cache, cache_shapes
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import DecodeInputs, PrefillInputs
from qwen35_jax.params import ParamPack
from schedulers import Bucket

ProgramKind = Literal["prefill", "decode", "unified"]
Variant = Literal["greedy", "full"]
VARIANTS: tuple[Variant, ...] = ("greedy", "full")
TOP_LOGPROBS = 20
_RESULT_HEAD = 4  # token, finite, logprob, rank


class DeviceState(NamedTuple):
    """Everything a program reads and writes on its device; donated at every dispatch.

    Attributes:
        cache: KV pages and recurrent-state slots.
        sampler: per-slot sampler records.
        last_token: ``int32[S]``, the newest token of each slot: what the next decode step reads, so that sampled
            tokens need not visit the host.
    """

    cache: Cache
    sampler: sampling.SamplerState
    last_token: jax.Array


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """Name of a program: its kind, bucket, decode steps per dispatch and sampler variant."""

    kind: ProgramKind
    bucket: Bucket
    steps: int
    variant: Variant

    def __str__(self) -> str:
        b = self.bucket
        parts = [f"T={b.tokens} R={b.requests}"] if self.kind != "decode" else []
        parts += [f"B={b.rows}"] if self.kind != "prefill" else []
        parts += [f"W={b.width}"] + ([f"k={self.steps}"] if self.steps > 1 else [])
        return f"{self.kind} {' '.join(parts)} {self.variant}"


class HostLayout:
    """Named int32 fields laid end to end in one vector: one transfer a dispatch instead of a dozen."""

    def __init__(self, fields: Mapping[str, tuple[int, ...]]):
        self.fields = dict(fields)
        self.size = sum(math.prod(shape) for shape in self.fields.values())

    def pack(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Lay ``values`` (one array a field, exact shapes) into a fresh ``int32[size]``."""
        out = np.empty(self.size, np.int32)
        offset = 0
        for name, shape in self.fields.items():
            value = values[name]
            if value.shape != shape:
                raise ValueError(f"host field {name!r} has shape {value.shape}, the program wants {shape}")
            count = math.prod(shape)
            out[offset : offset + count] = value.reshape(-1)
            offset += count
        return out

    def unpack(self, vector: jax.Array) -> dict[str, jax.Array]:
        """Static slices of the vector, inside a trace."""
        out, offset = {}, 0
        for name, shape in self.fields.items():
            count = math.prod(shape)
            out[name] = vector[offset : offset + count].reshape(shape)
            offset += count
        return out


def prefill_fields(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Host fields of the prefill half of a program."""
    return {
        "tokens": (bucket.tokens,),
        "cu_seqlens": (bucket.requests + 1,),
        "prefill_slots": (bucket.requests,),
        "starts": (bucket.requests,),  # tokens of the request already in the cache
        "sample": (bucket.requests,),  # 1 where this chunk ends the prompt
        "sampler_rows": (bucket.requests, sampling.ROW_WORDS),
        "prefill_pages": (bucket.requests, bucket.width),
    }


def decode_fields(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Host fields of the decode half of a program."""
    return {
        "decode_slots": (bucket.rows,),
        "positions": (bucket.rows,),  # where the input token is written
        "steps": (bucket.rows,),  # steps this row takes part in; 0 for padding
        "decode_pages": (bucket.rows, bucket.width),
    }


def layout_of(kind: ProgramKind, bucket: Bucket) -> HostLayout:
    """The packed vector of a program kind."""
    fields: dict[str, tuple[int, ...]] = {}
    if kind != "decode":
        fields |= prefill_fields(bucket)
    if kind != "prefill":
        fields |= decode_fields(bucket)
    return HostLayout(fields)


def result_columns(variant: Variant) -> int:
    """Columns of a result row: token, finite, and in the full variant logprob, rank and the top 20."""
    return 2 if variant == "greedy" else _RESULT_HEAD + 2 * TOP_LOGPROBS


def _result_rows(out: sampling.SampleOutput, variant: Variant) -> jax.Array:
    """Pack a sampler's output as int32 rows, floats bitcast."""
    head = [out.tokens, out.finite.astype(jnp.int32)]
    if variant == "greedy":
        return jnp.stack(head, axis=-1)

    def bits(x):
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    head = jnp.stack([*head, bits(out.logprob), out.rank], axis=-1)
    return jnp.concatenate([head, out.top_ids, bits(out.top_logprobs)], axis=-1)


@dataclasses.dataclass(frozen=True)
class ResultRows:
    """Results of a dispatch on the host, one entry a row (numpy).

    Attributes:
        tokens: ``int32[N]``.
        finite: ``bool[N]``, False where the row's logits were not finite.
        logprob: ``float32[N]`` or None in the greedy variant.
        rank: ``int32[N]`` or None.
        top_ids: ``int32[N, 20]`` or None.
        top_logprobs: ``float32[N, 20]`` or None.
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprob: np.ndarray | None = None
    rank: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    @classmethod
    def unpack(cls, rows: np.ndarray) -> ResultRows:
        """Read the packed ``int32[N, columns]`` array of a program."""
        tokens, finite = rows[:, 0], rows[:, 1] != 0
        if rows.shape[1] == result_columns("greedy"):
            return cls(tokens, finite)
        top = _RESULT_HEAD + TOP_LOGPROBS
        return cls(
            tokens,
            finite,
            logprob=np.ascontiguousarray(rows[:, 2]).view(np.float32),
            rank=rows[:, 3],
            top_ids=rows[:, _RESULT_HEAD:top],
            top_logprobs=np.ascontiguousarray(rows[:, top:]).view(np.float32),
        )


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What all programs of a model share, static in every trace.

    Attributes:
        pack: merges the flat parameter tuple into the module, inside the trace.
        num_valid: ids below this are real; the padded rest of the vocabulary is masked.
    """

    pack: ParamPack
    num_valid: int


def _token_places(page_table: jax.Array, owner: jax.Array, position: jax.Array, valid: jax.Array):
    """Page id and offset of every token; the null page for padding."""
    page = page_table[owner, jnp.where(valid, position // PAGE_SIZE, 0)]
    return jnp.where(valid, page, 0), jnp.where(valid, position % PAGE_SIZE, 0)


def _prefill_inputs(fields: Mapping[str, jax.Array], bucket: Bucket) -> tuple[PrefillInputs, jax.Array]:
    """Prefill inputs of the model, and the request index of every token (pads belong to the last one)."""
    cu, starts = fields["cu_seqlens"], fields["starts"]
    index = jnp.arange(bucket.tokens, dtype=jnp.int32)
    owner = jnp.clip(jnp.searchsorted(cu, index, side="right").astype(jnp.int32) - 1, 0, bucket.requests - 1)
    valid = index < cu[-1]
    position = jnp.where(valid, starts[owner] + index - cu[owner], 0)
    page_ids, page_offsets = _token_places(fields["prefill_pages"], owner, position, valid)
    lengths = cu[1:] - cu[:-1]
    inputs = PrefillInputs(
        tokens=fields["tokens"],
        positions=position,
        page_ids=page_ids,
        page_offsets=page_offsets,
        cu_seqlens=cu,
        slot_ids=fields["prefill_slots"],
        has_state=starts > 0,
        page_table=fields["prefill_pages"],
        kv_lens=jnp.where(lengths > 0, starts + lengths, 0),
    )
    return inputs, jnp.where(valid, owner, bucket.requests - 1)


def _decode_inputs(fields: Mapping[str, jax.Array], bucket: Bucket, last_token: jax.Array, step) -> DecodeInputs:
    """Decode inputs of the model at ``step`` of a dispatch; rows past their steps turn into padding."""
    active = step < fields["steps"]
    slots = jnp.where(active, fields["decode_slots"], 0)
    position = jnp.where(active, fields["positions"] + step, 0)
    rows = jnp.arange(bucket.rows, dtype=jnp.int32)
    page_ids, page_offsets = _token_places(fields["decode_pages"], rows, position, active)
    return DecodeInputs(
        tokens=jnp.where(active, last_token[slots], 0),
        positions=position,
        page_ids=page_ids,
        page_offsets=page_offsets,
        slot_ids=slots,
        page_table=fields["decode_pages"],
        kv_lens=jnp.where(active, position + 1, 0),
    )


def make_step(spec: StepSpec, key: ProgramKey) -> Callable[..., tuple[DeviceState, jax.Array]]:
    """The pure function of one program: ``(params, state, packed) -> (state, results int32[N, columns])``.

    Result rows: the R prefill requests first (where the kind has them), then the B decode rows, step by step.
    """
    layout, bucket = layout_of(key.kind, key.bucket), key.bucket
    with_prefill, with_decode = key.kind != "decode", key.kind != "prefill"
    if key.steps > 1 and with_prefill:
        raise ValueError(f"several steps a dispatch exist for decode programs only, not for {key}")

    def draw(model, state: DeviceState, hidden, slots, active):
        out, sampler = sampling.sample(
            state.sampler, model.logits(hidden), slots, active, variant=key.variant, num_valid=spec.num_valid
        )
        # Rows that do not sample write to the null slot, so that no real slot's token is touched.
        last_token = state.last_token.at[jnp.where(active, slots, 0)].set(out.tokens)
        return state._replace(sampler=sampler, last_token=last_token), _result_rows(out, key.variant)

    def step(params, state: DeviceState, packed):
        model = spec.pack.unpack(params)
        fields = layout.unpack(packed)
        prefill = decode = None
        if with_prefill:
            prefill, owner = _prefill_inputs(fields, bucket)
            slots, starts = fields["prefill_slots"], fields["starts"]
            with jax.named_scope("admit"):
                sampler = sampling.admit(state.sampler, slots, fields["sampler_rows"], starts == 0)
                if key.variant == "full":
                    valid = jnp.arange(bucket.tokens) < fields["cu_seqlens"][-1]
                    sampler = sampling.record_prompt(sampler, fields["tokens"], jnp.where(valid, slots[owner], 0))
                state = state._replace(sampler=sampler)

        if key.kind == "decode":

            def body(carry: DeviceState, index):
                inputs = _decode_inputs(fields, bucket, carry.last_token, index)
                out = model.forward(None, inputs, carry.cache)
                carry = carry._replace(cache=out.cache)
                return draw(model, carry, out.decode_hidden, inputs.slot_ids, index < fields["steps"])

            if key.steps == 1:
                return body(state, jnp.int32(0))
            state, rows = jax.lax.scan(body, state, jnp.arange(key.steps, dtype=jnp.int32))
            return state, rows.reshape(-1, rows.shape[-1])

        if with_decode:
            decode = _decode_inputs(fields, bucket, state.last_token, 0)
        out = model.forward(prefill, decode, state.cache)
        state = state._replace(cache=out.cache)
        hidden, row_slots, active = out.prefill_hidden, fields["prefill_slots"], fields["sample"] > 0
        if decode is not None:
            hidden = jnp.concatenate([hidden, out.decode_hidden])
            row_slots = jnp.concatenate([row_slots, decode.slot_ids])
            active = jnp.concatenate([active, fields["steps"] > 0])
        return draw(model, state, hidden, row_slots, active)

    return step


def init_device_state(shapes: DeviceState, device: jax.Device) -> DeviceState:
    """Allocate a device's pools and records on the device itself."""
    with jax.default_device(device):
        cache = Cache(*(jnp.zeros(s.shape, s.dtype, device=device) for s in shapes.cache))
        num_slots, vocab = shapes.sampler.records.shape
        sampler = jax.tree.map(lambda x: jax.device_put(x, device), sampling.init_state(num_slots, vocab))
        last_token = jnp.zeros(shapes.last_token.shape, jnp.int32, device=device)
    return DeviceState(cache, sampler, last_token)


def device_state_shapes(
    config: ModelConfig, num_pages: int, num_slots: int, dtype: jnp.dtype, state_dtype: jnp.dtype
) -> DeviceState:
    """Shapes of a device's state; ``num_pages`` and ``num_slots`` include the null ones."""
    return DeviceState(
        cache=cache_shapes(config, num_pages, num_slots, dtype, state_dtype),
        sampler=jax.eval_shape(lambda: sampling.init_state(num_slots, config.vocab_size)),
        last_token=jax.ShapeDtypeStruct((num_slots,), jnp.int32),  # type: ignore[arg-type]
    )


# --- moving one request between pools ----------------------------------------------------------------------------


def _row_structs(shapes: DeviceState, width: int) -> list[jax.ShapeDtypeStruct]:
    kv = shapes.cache.kv
    leaves = [((kv.shape[0], width, *kv.shape[2:]), kv.dtype)]
    leaves += [((x.shape[0], *x.shape[2:]), x.dtype) for x in (shapes.cache.conv, shapes.cache.state)]
    leaves += [(x.shape[1:], x.dtype) for x in (*shapes.sampler, shapes.last_token)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]


def _to_bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _from_bytes(data: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    itemsize = jnp.dtype(like.dtype).itemsize
    shape = like.shape if itemsize == 1 else (*like.shape, itemsize)
    return jax.lax.bitcast_convert_type(data.reshape(shape), like.dtype)


def make_extract(shapes: DeviceState, width: int) -> Callable[[DeviceState, jax.Array], jax.Array]:
    """``(state, int32[1 + width]) -> uint8[n]``: a slot, its records and its pages as ONE array.

    One array because forty separate ones cost 1.4 ms of host time to move where one costs a tenth of it.
    """

    def extract(state: DeviceState, places: jax.Array) -> jax.Array:
        slot, pages = places[0], places[1:]
        parts = [state.cache.kv[:, pages], state.cache.conv[:, slot], state.cache.state[:, slot]]
        parts += [x[slot] for x in (*state.sampler, state.last_token)]
        return jnp.concatenate([_to_bytes(part) for part in parts])

    return extract


def make_merge(shapes: DeviceState, width: int) -> Callable[[DeviceState, jax.Array, jax.Array], DeviceState]:
    """``(state, uint8[n], int32[1 + width]) -> state``: write an extracted request into a slot and pages.

    Entries of ``places`` past the request's pages are 0: they land in the null page.
    """
    structs = _row_structs(shapes, width)

    def merge(state: DeviceState, data: jax.Array, places: jax.Array) -> DeviceState:
        slot, pages = places[0], places[1:]
        parts, offset = [], 0
        for struct in structs:
            count = math.prod(struct.shape) * jnp.dtype(struct.dtype).itemsize
            parts.append(_from_bytes(data[offset : offset + count], struct))
            offset += count
        kv, conv, recurrent, *records = parts
        cache = Cache(
            kv=state.cache.kv.at[:, pages].set(kv),
            conv=state.cache.conv.at[:, slot].set(conv),
            state=state.cache.state.at[:, slot].set(recurrent),
        )
        *sampler, last_token = (
            x.at[slot].set(value) for x, value in zip((*state.sampler, state.last_token), records, strict=True)
        )
        return DeviceState(cache, sampling.SamplerState(*sampler), last_token)

    return merge


def make_fill() -> Callable[[DeviceState, jax.Array, jax.Array], DeviceState]:
    """``(state, float32 value, int32[1 + width]) -> state``: overwrite a slot and pages with one value.

    Zero scrubs what a failed row left behind; NaN poisons freed memory in debug mode.
    """

    def fill(state: DeviceState, value: jax.Array, places: jax.Array) -> DeviceState:
        slot, pages = places[0], places[1:]
        kv, conv, recurrent = state.cache
        return state._replace(
            cache=Cache(
                kv=kv.at[:, pages].set(value.astype(kv.dtype)),
                conv=conv.at[:, slot].set(value.astype(conv.dtype)),
                state=recurrent.at[:, slot].set(value.astype(recurrent.dtype)),
            )
        )

    return fill


# --- the set of programs of one device ----------------------------------------------------------------------------


class ProgramSet:
    """All programs of one device, compiled ahead.

    Args:
        spec: the model's parameter pack and vocabulary limit.
        device: where the programs run.
        params: flat parameter tuple on that device.
        shapes: shapes of the device's state.
        keys: every program that may be asked for.
        transfer_widths: page-table widths for which extract / merge programs are made.
        fill_width: pages that one fill call can overwrite.
    """

    def __init__(
        self,
        spec: StepSpec,
        device: jax.Device,
        params: tuple[jax.Array, ...],
        shapes: DeviceState,
        keys: tuple[ProgramKey, ...],
        *,
        extract_widths: tuple[int, ...] = (),
        merge_widths: tuple[int, ...] = (),
        fill_width: int = 1,
    ):
        self.device, self.params, self.shapes, self.keys = device, params, shapes, keys
        self._spec = spec
        self._sharding = SingleDeviceSharding(device)
        self._extract_widths, self._merge_widths, self._fill_width = extract_widths, merge_widths, fill_width
        self._layouts = {(key.kind, key.bucket): layout_of(key.kind, key.bucket) for key in keys}
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    def _struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def _jobs(self) -> dict[Any, tuple[str, Callable[[], jax.stages.Lowered]]]:
        """Name and lowering of every executable, in the order in which they are compiled."""
        params = tuple(self._struct(x.shape, x.dtype) for x in self.params)
        state = jax.tree.map(lambda x: self._struct(x.shape, x.dtype), self.shapes)

        def step_job(key: ProgramKey):
            packed = self._struct((self._layouts[key.kind, key.bucket].size,), jnp.int32)
            return lambda: jax.jit(make_step(self._spec, key), donate_argnums=1).lower(params, state, packed)

        jobs: dict[Any, tuple[str, Callable[[], jax.stages.Lowered]]] = {}
        for key in self.keys:
            jobs[key] = (str(key), step_job(key))
        for width in self._extract_widths:
            places = self._struct((1 + width,), jnp.int32)
            jobs["extract", width] = (
                f"extract W={width}",
                lambda w=width, p=places: jax.jit(make_extract(self.shapes, w)).lower(state, p),
            )
        for width in self._merge_widths:
            places = self._struct((1 + width,), jnp.int32)
            size = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in _row_structs(self.shapes, width))
            data = self._struct((size,), jnp.uint8)
            jobs["merge", width] = (
                f"merge W={width}",
                lambda w=width, d=data, p=places: jax.jit(make_merge(self.shapes, w), donate_argnums=0).lower(
                    state, d, p
                ),
            )
        value, places = self._struct((), jnp.float32), self._struct((1 + self._fill_width,), jnp.int32)
        jobs["fill"] = ("fill", lambda: jax.jit(make_fill(), donate_argnums=0).lower(state, value, places))
        return jobs

    def compile(self, progress: Callable[[int, int, str, float], None] | None = None, threads: int = 2) -> None:
        """Trace, lower and compile every program.

        Args:
            progress: called as ``progress(done, total, name, seconds)`` after each program.
            threads: compiles at once; tracing holds the interpreter lock, XLA's part does not.
        """
        jobs = self._jobs()

        def build(item):
            key, (name, lower) = item
            started = time.perf_counter()
            return key, name, lower().compile(), time.perf_counter() - started

        with concurrent.futures.ThreadPoolExecutor(max_workers=threads) as pool:
            futures = [pool.submit(build, item) for item in jobs.items()]
            try:
                for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                    key, name, compiled, seconds = future.result()
                    self._compiled[key] = compiled
                    if progress is not None:
                        progress(done, len(jobs), name, seconds)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def warm_up(self, state: DeviceState) -> DeviceState:
        """Run every program once on padding alone, so that nothing is loaded or tuned at the first request.

        Decode programs first, then prefill programs by growing size: the order in which the peak of memory is
        reached latest.
        """
        order = {"decode": 0, "unified": 1, "prefill": 2}
        for key in sorted(self.keys, key=lambda k: (order[k.kind], k.bucket.tokens, k.bucket.rows)):
            layout = self._layouts[key.kind, key.bucket]
            state, results = self.run(key, state, {n: np.zeros(s, np.int32) for n, s in layout.fields.items()})
            results.block_until_ready()
        return self.fill(state, 0.0, 0, ())

    def memory(self) -> dict[str, Any]:
        """XLA's memory analysis of every compiled program, by name."""
        return {str(key): compiled.memory_analysis() for key, compiled in self._compiled.items()}

    def executable(self, key: Any) -> jax.stages.Compiled:
        """The compiled executable of a key (for inspection by tests and profilers)."""
        return self._compiled[key]

    def put(self, array: np.ndarray) -> jax.Array:
        """Host data becomes device data here and nowhere else."""
        return jax.device_put(array, self._sharding)

    def run(self, key: ProgramKey, state: DeviceState, fields: Mapping[str, np.ndarray]):
        """Dispatch a program; returns ``(state, results)`` without waiting. ``state`` is consumed."""
        compiled = self._compiled.get(key)
        if compiled is None:
            raise KeyError(f"program {key} was not compiled ahead; the ladder and the plan disagree")
        packed = self.put(self._layouts[key.kind, key.bucket].pack(fields))
        return compiled(self.params, state, packed)

    def _places(self, width: int, slot: int, pages: tuple[int, ...]) -> jax.Array:
        places = np.zeros(1 + width, np.int32)
        places[0] = slot
        places[1 : 1 + len(pages)] = pages
        return self.put(places)

    def extract(self, state: DeviceState, width: int, slot: int, pages: tuple[int, ...]) -> jax.Array:
        """A request's slot, records and pages as one ``uint8`` array on this device."""
        return self._compiled["extract", width](state, self._places(width, slot, pages))

    def merge(self, state: DeviceState, width: int, data: jax.Array, slot: int, pages: tuple[int, ...]) -> DeviceState:
        """Write an extracted request into this device's pools; ``state`` is consumed."""
        return self._compiled["merge", width](state, data, self._places(width, slot, pages))

    def fill(self, state: DeviceState, value: float, slot: int, pages: tuple[int, ...]) -> DeviceState:
        """Overwrite a slot and pages with ``value``; ``state`` is consumed."""
        for start in range(0, max(1, len(pages)), self._fill_width):
            part = pages[start : start + self._fill_width]
            places = self._places(self._fill_width, slot, part)
            state = self._compiled["fill"](state, self.put(np.float32(value)), places)
        return state


def fetch(results: jax.Array) -> np.ndarray:
    """Device data becomes host data here and nowhere else (waits for the dispatch)."""
    return np.asarray(results)


class CompileCounter:
    """Counts backend compiles in this process through ``jax.monitoring`` events."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == self._EVENT:
            self.count += 1
            self.seconds += duration

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
