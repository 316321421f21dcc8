"""The set of compiled programs of one device.

Everything is compiled ahead of the first request (:meth:`ProgramSet.compile`), or loaded from what an earlier start has
kept, so that no shape, option or dtype can cause a compile later; :class:`CompileCounter` is the proof.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pallas_kernels import registry
from qwen35_jax import runtime, sampling
from qwen35_jax.cache import Cache
from qwen35_jax.program_key import circumstances, digest
from qwen35_jax.program_store import Program, ProgramStore, Signature
from qwen35_jax.steps import DeviceState, ProgramKey, StepSpec, layout_of, make_step, result_shape
from qwen35_jax.transfer import make_extract, make_fill, make_merge, transfer_bytes

log = logging.getLogger(__name__)

# From so many tokens on the library's products win; trying generated ones as well is most of the time of a compile.
_LIBRARY_PRODUCTS = 512
_COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
_WARM_TRANSFER_BYTES = 256 << 20  # larger merges are not run at warm-up: their data would have to come from the host


def init_device_state(shapes: DeviceState, device: jax.Device) -> DeviceState:
    """Allocate a device's pools and records on the device itself."""
    with jax.default_device(device):
        cache = Cache(*(jnp.zeros(s.shape, s.dtype, device=device) for s in shapes.cache))
        num_slots, vocab = shapes.sampler.records.shape
        sampler = jax.tree.map(lambda x: jax.device_put(x, device), sampling.init_state(num_slots, vocab))
        last_token = jnp.zeros(shapes.last_token.shape, jnp.int32, device=device)
    return DeviceState(cache, sampler, last_token)


def free_device_state(state: DeviceState) -> None:
    """Give a device's pools and records back, as far as a dispatch has not taken them already."""
    for leaf in jax.tree.leaves(state):
        leaf.delete()


@dataclasses.dataclass(frozen=True)
class Job:
    """A program that is to be had.

    Attributes:
        name: for whoever reads the log.
        function: what it computes.
        arguments: its arguments, as shapes.
        donated: which of them it consumes.
        result: its result, as shapes.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    result: Any

    def trace(self) -> jax.stages.Traced:
        """The function in JAX's terms."""
        return jax.jit(self.function, donate_argnums=self.donated).trace(*self.arguments)

    @property
    def signature(self) -> Signature:
        """What the executable takes, consumes and gives."""
        donated = [i in self.donated for i, part in enumerate(self.arguments) for _ in jax.tree.leaves(part)]
        takes = [_typed(x) for x in jax.tree.leaves(self.arguments)]
        return Signature(
            jax.tree.structure((self.arguments, {})),
            jax.tree.structure(self.result),
            tuple((*typed, consumed) for typed, consumed in zip(takes, donated, strict=True)),
            tuple(_typed(x) for x in jax.tree.leaves(self.result)),
        )


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
        self._programs: dict[Any, Program] = {}
        self._loaded: dict[Any, str] = {}  # those from the store, with their names there

    def _struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def jobs(self) -> dict[Any, Job]:
        """Every executable in the order in which they are lowered: those that take longest to compile first.

        The order is fixed, so that names and numbers that JAX gives inside of programs are the same in every process.
        """
        params = tuple(self._struct(x.shape, x.dtype) for x in self.params)
        state = jax.tree.map(lambda x: self._struct(x.shape, x.dtype), self.shapes)

        def places(width: int) -> jax.ShapeDtypeStruct:
            return self._struct((1 + width,), jnp.int32)

        jobs: dict[Any, Job] = {}
        for key in sorted(self.keys, key=_compile_time, reverse=True):
            packed = tuple(self._struct((words,), jnp.int32) for words in self._layouts[key.kind, key.bucket].pieces)
            step, results = make_step(self._spec, key), self._struct(result_shape(key), jnp.int32)
            jobs[key] = Job(str(key), step, (params, state, packed), (1,), (state, results))
        for width in self._extract_widths:
            extract = make_extract(self.shapes, width)
            data = self._struct((transfer_bytes(self.shapes, width),), jnp.uint8)
            jobs["extract", width] = Job(f"extract W={width}", extract, (state, places(width)), (), data)
        for width in self._merge_widths:
            data = self._struct((transfer_bytes(self.shapes, width),), jnp.uint8)
            merge = make_merge(self.shapes, width)
            jobs["merge", width] = Job(f"merge W={width}", merge, (state, data, places(width)), (0,), state)
        fill = (state, self._struct((), jnp.float32), places(self._fill_width))
        jobs["fill"] = Job("fill", make_fill(), fill, (0,), state)
        return jobs

    def ingredients(self, key: Any, job: Job) -> dict[str, Any]:
        """What decides a program's executable, as plain values: what its key in a :class:`ProgramStore` is made of."""
        pack = self._spec.pack
        leaves = [[leaf.name, leaf.paths, leaf.stacked, *_typed(leaf.spec)] for leaf in pack.leaves]
        return self._circumstances | {
            "program": [repr(key), job.name, job.donated],
            "arguments": [_typed(x) for x in jax.tree.leaves(job.arguments)],
            "options": compiler_options(key, self.device.platform),
            "model": dataclasses.asdict(pack.config),
            "parameters": [str(pack.dtype), leaves],
            "kernels": pack.kernels,
            "num_valid": self._spec.num_valid,
            "state": [_typed(x) for x in jax.tree.leaves(self.shapes)],
        }

    @functools.cached_property
    def _circumstances(self) -> dict[str, Any]:
        return circumstances(self.device)

    @property
    def number(self) -> int:
        """Executables in all, transfers included."""
        return len(self.keys) + len(self._extract_widths) + len(self._merge_widths) + 1

    def compile(
        self,
        progress: Callable[[int, int, str], None] | None = None,
        threads: int = 2,
        store: ProgramStore | None = None,
    ) -> None:
        """Load every program that is not there yet from the store, or trace, lower and compile it.

        One thread traces and lowers in a fixed order, which the interpreter's lock would make one at a time anyway;
        others compile what it has lowered. Threads that race would make texts of programs that no later process has,
        and JAX's own cache goes by the text. With a store that cache is out of use meanwhile: what it supplies cannot
        be serialized on every backend, so that a file that is missing would never come back.

        Args:
            progress: called as ``progress(done, total, note)`` after each program that is compiled.
            threads: programs that are loaded or compiled at once; XLA's part does not hold the interpreter's lock.
            store: programs of earlier starts; gets those that are compiled now.
        """
        jobs = {key: job for key, job in self.jobs().items() if key not in self._programs}
        total = self.number

        def report(note: str) -> None:
            if progress is not None:
                progress(len(self._programs), total, note)

        own_cache = contextlib.nullcontext() if store is None else runtime.without_compilation_cache()
        with own_cache, concurrent.futures.ThreadPoolExecutor(max_workers=threads) as pool:
            pending: set[concurrent.futures.Future] = set()

            def collect(timeout: float | None) -> None:
                done, rest = concurrent.futures.wait(pending, timeout, concurrent.futures.FIRST_COMPLETED)
                pending.intersection_update(rest)
                for future in done:
                    key, program, seconds = future.result()
                    self._programs[key] = program
                    report(f"bucket {jobs[key].name} took {seconds:.1f} s")

            try:
                names: dict[Any, str] = {}
                if store is not None:
                    names = {key: digest(self.ingredients(key, job)) for key, job in jobs.items()}
                    self._load(jobs, names, store, pool)
                    if self._loaded:
                        report(f"{len(self._loaded)} are kept from an earlier start")
                for key, job in jobs.items():
                    if key in self._programs:
                        continue
                    started = time.perf_counter()
                    lowered = job.trace().lower()
                    spent = time.perf_counter() - started
                    pending.add(pool.submit(self._build, key, job, lowered, spent, store, names.get(key)))
                    collect(0)
                while pending:
                    collect(None)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _load(
        self,
        jobs: Mapping[Any, Job],
        names: Mapping[Any, str],
        store: ProgramStore,
        pool: concurrent.futures.Executor,
    ) -> None:
        loads = {key: pool.submit(store.load, names[key], job.signature, self.device) for key, job in jobs.items()}
        found = {key: load.result() for key, load in loads.items()}
        self._programs |= {key: program for key, program in found.items() if program is not None}
        self._loaded |= {key: names[key] for key in found if found[key] is not None}
        for line in sorted({line for key in self._loaded for line in self._programs[key].kernels}):
            log.info("%s, in programs kept from an earlier start", line)

    def _build(
        self,
        key: Any,
        job: Job,
        lowered: jax.stages.Lowered,
        spent: float,
        store: ProgramStore | None,
        name: str | None,
    ) -> tuple[Any, Program, float]:
        started = time.perf_counter()
        compiled = lowered.compile(compiler_options=compiler_options(key, self.device.platform))
        program = Program(compiled, compiled.memory_analysis().temp_size_in_bytes, self._kernels())
        if store is not None and name is not None:
            store.save(name, job.signature, program)
        return key, program, spent + time.perf_counter() - started

    def _kernels(self) -> tuple[str, ...]:
        """Choices of kernels so far; what another program has traced is not traced again, so none has its own."""
        return tuple(
            f"{op.name}: {asked} -> {chosen}"
            for op in registry.all_ops()
            for asked, chosen, target in op.choices
            if asked == registry.implementation_of(self._spec.pack.kernels, op.name)
            and target.device_kind == self.device.device_kind
        )

    @property
    def num_loaded(self) -> int:
        """Executables that came from the store."""
        return len(self._loaded)

    def discard_loaded(self, store: ProgramStore, reason: str) -> None:
        """Forget every program that came from the store, there as well; :meth:`compile` makes them anew."""
        for key in self._loaded:
            del self._programs[key]
        store.discard(list(self._loaded.values()), reason)
        self._loaded.clear()

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
        for width in self._extract_widths:
            self.extract(state, width, 0, ()).block_until_ready()
        for width in self._merge_widths:
            if transfer_bytes(self.shapes, width) <= _WARM_TRANSFER_BYTES:
                data = self.put(np.zeros(transfer_bytes(self.shapes, width), np.uint8))
                state = self.merge(state, width, data, 0, ())
        return self.fill(state, 0.0, 0, ())

    def scratch_bytes(self) -> int:
        """The most scratch that any compiled program takes, beside its arguments and results."""
        return max(program.scratch for program in self._programs.values())

    def executables(self) -> dict[Any, jax.stages.Compiled]:
        """Every compiled executable by key (for inspection by tests and profilers)."""
        return {key: program.compiled for key, program in self._programs.items()}

    def executable(self, key: Any) -> jax.stages.Compiled:
        """The compiled executable of a key."""
        return self._programs[key].compiled

    def put(self, arrays: np.ndarray | tuple[np.ndarray, ...]) -> Any:
        """Host data (an array or a tuple of arrays) becomes device data here and nowhere else."""
        return jax.device_put(arrays, self._sharding)

    def run(self, key: ProgramKey, state: DeviceState, fields: Mapping[str, np.ndarray]):
        """Dispatch a program; returns ``(state, results)`` without waiting. ``state`` is consumed."""
        program = self._programs.get(key)
        if program is None:
            raise KeyError(f"program {key} was not compiled ahead; the ladder and the plan disagree")
        packed = self.put(self._layouts[key.kind, key.bucket].pack(fields))
        return program.compiled(self.params, state, packed)

    def _places(self, width: int, slot: int, pages: tuple[int, ...]) -> jax.Array:
        places = np.zeros(1 + width, np.int32)
        places[0] = slot
        places[1 : 1 + len(pages)] = pages
        return self.put(places)

    def extract(self, state: DeviceState, width: int, slot: int, pages: tuple[int, ...]) -> jax.Array:
        """A request's slot, records and pages as one ``uint8`` array on this device."""
        return self._programs["extract", width].compiled(state, self._places(width, slot, pages))

    def merge(self, state: DeviceState, width: int, data: jax.Array, slot: int, pages: tuple[int, ...]) -> DeviceState:
        """Write an extracted request into this device's pools; ``state`` is consumed."""
        return self._programs["merge", width].compiled(state, data, self._places(width, slot, pages))

    def fill(self, state: DeviceState, value: float, slot: int, pages: tuple[int, ...]) -> DeviceState:
        """Overwrite a slot and pages with ``value``; ``state`` is consumed."""
        for start in range(0, max(1, len(pages)), self._fill_width):
            part = pages[start : start + self._fill_width]
            places = self._places(self._fill_width, slot, part)
            state = self._programs["fill"].compiled(state, self.put(np.asarray(value, np.float32)), places)
        return state


def _compile_time(key: ProgramKey) -> tuple[Any, ...]:
    """Orders programs by how long they are believed to take."""
    bucket = key.bucket
    return (bucket.tokens, bucket.rows, key.steps, bucket.requests, bucket.width, key.variant == "full", key.kind)


def _typed(x: Any) -> tuple[tuple[int, ...], str]:
    return tuple(x.shape), np.dtype(x.dtype).name


def compiler_options(key: Any, platform: str) -> dict[str, Any]:
    """What XLA is told about one program, beside its defaults; nothing outside of GPUs.

    Args:
        key: a :class:`ProgramKey`, or the key of a transfer program.
        platform: "gpu" or "cpu".
    """
    if platform != "gpu":
        return {}
    options: dict[str, Any] = {
        # The pools fill the memory on purpose. XLA would take that for a program that must be made to fit, and spend
        # its time on trading recomputation for memory.
        "xla_gpu_memory_limit_slop_factor": 1000,
        # The sampler's branches become part of the CUDA graph: read by the host, their predicates would make it wait
        # for the step before it can send the next.
        "xla_gpu_enable_command_buffer": _COMMAND_BUFFER,
    }
    if isinstance(key, ProgramKey) and key.bucket.tokens >= _LIBRARY_PRODUCTS:
        options["xla_gpu_enable_triton_gemm"] = False
    return options


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

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == self._EVENT:
            self.count += 1
            self.seconds += duration_secs

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
