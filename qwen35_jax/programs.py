"""The set of compiled programs of one device.

Everything is compiled ahead of the first request (:meth:`ProgramSet.compile`), so that no shape, option or dtype can
cause a compile later; :class:`CompileCounter` is the proof.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from qwen35_jax import sampling
from qwen35_jax.cache import Cache
from qwen35_jax.steps import DeviceState, ProgramKey, StepSpec, layout_of, make_step
from qwen35_jax.transfer import make_extract, make_fill, make_merge, transfer_bytes

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
            packed = tuple(self._struct((words,), jnp.int32) for words in self._layouts[key.kind, key.bucket].pieces)
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
            data = self._struct((transfer_bytes(self.shapes, width),), jnp.uint8)
            jobs["merge", width] = (
                f"merge W={width}",
                lambda w=width, d=data, p=places: jax.jit(make_merge(self.shapes, w), donate_argnums=0).lower(
                    state, d, p
                ),
            )
        value, places = self._struct((), jnp.float32), self._struct((1 + self._fill_width,), jnp.int32)
        jobs["fill"] = ("fill", lambda: jax.jit(make_fill(), donate_argnums=0).lower(state, value, places))
        return jobs

    @property
    def number(self) -> int:
        """Executables in all, transfers included."""
        return len(self.keys) + len(self._extract_widths) + len(self._merge_widths) + 1

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
            compiled = lower().compile(compiler_options=compiler_options(key, self.device.platform))
            return key, name, compiled, time.perf_counter() - started

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
        for width in self._extract_widths:
            self.extract(state, width, 0, ()).block_until_ready()
        for width in self._merge_widths:
            if transfer_bytes(self.shapes, width) <= _WARM_TRANSFER_BYTES:
                data = self.put(np.zeros(transfer_bytes(self.shapes, width), np.uint8))
                state = self.merge(state, width, data, 0, ())
        return self.fill(state, 0.0, 0, ())

    def memory(self) -> dict[str, Any]:
        """XLA's memory analysis of every compiled program, by name."""
        return {str(key): compiled.memory_analysis() for key, compiled in self._compiled.items()}

    def scratch_bytes(self) -> int:
        """The most scratch that any compiled program takes, beside its arguments and results."""
        return max(analysis.temp_size_in_bytes for analysis in self.memory().values())

    def executable(self, key: Any) -> jax.stages.Compiled:
        """The compiled executable of a key (for inspection by tests and profilers)."""
        return self._compiled[key]

    def put(self, arrays: np.ndarray | tuple[np.ndarray, ...]) -> Any:
        """Host data (an array or a tuple of arrays) becomes device data here and nowhere else."""
        return jax.device_put(arrays, self._sharding)

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
            state = self._compiled["fill"](state, self.put(np.asarray(value, np.float32)), places)
        return state


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
