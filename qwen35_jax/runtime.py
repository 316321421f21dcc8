"""The one place that touches the environment and asks the backend about devices and memory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from qwen35_jax.errors import UserInputError

log = logging.getLogger(__name__)

JAX_SUBDIRECTORY = "jax"
"""Where JAX's own cache is, inside ``compilation_cache_dir``: it has the small programs outside of an engine's set."""

_CACHE_SETTING = threading.Lock()
_GPU_RESERVE = 0.02  # share of the allocator's arena left for fragmentation
_CPU_SHARE = 0.5  # share of the host's free memory that pools may plan with: the job's own data lives there too


def visible_devices() -> tuple[str, ...]:
    """Numbers or names of the GPUs that CUDA shows this process, in its order; empty where it shows all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def prepare(gpu_memory_utilization: float, compilation_cache_dir: str | None) -> None:
    """Set up the backend: allocator arena, text of programs and JAX's own persistent cache, in a folder of its own.

    The arena's size can only be set before the backend starts; a process that already uses a GPU keeps its own. Where
    the directory is there and that folder cannot be made in it (it is read-only), JAX's cache stays as it is, with a
    warning.

    Raises:
        UserInputError: the directory is none and cannot be made, or JAX makes numbers of 64 bits.
    """
    if jax.config.jax_enable_x64:
        raise UserInputError(
            "JAX makes numbers of 64 bits in this process (JAX_ENABLE_X64, jax_enable_x64), and the engine's programs "
            "are for 32 bits: leave that off"
        )
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{gpu_memory_utilization:.3f}")
    # A kernel's text holds the locations of its operations, and JAX's cache goes by the text. Python's stack of a trace
    # depends on which program came first to a function that several share.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    if compilation_cache_dir:
        jax_cache = os.path.join(compilation_cache_dir, JAX_SUBDIRECTORY)
        try:
            os.makedirs(jax_cache, exist_ok=True)
        except OSError as error:
            if not os.path.isdir(compilation_cache_dir):
                raise UserInputError(
                    f"compilation_cache_dir {compilation_cache_dir!r} cannot be a directory: {error.strerror}"
                ) from error
            log.warning("%s cannot be made (%s): JAX's own cache stays as it is", jax_cache, error.strerror)
            return
        jax.config.update("jax_compilation_cache_dir", jax_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """JAX's persistent cache is out of use in this process while the context is open, whoever has set it up.

    One thread at a time: another that came in between would take the setting for what it should be afterwards.
    """
    with _CACHE_SETTING:
        directory = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()  # JAX looks at the setting once, then keeps what it has opened
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", directory)
            compilation_cache.reset_cache()


def devices() -> list[jax.Device]:
    """This process's devices, in order."""
    return jax.local_devices()


def memory_limit(device: jax.Device, gpu_memory_utilization: float) -> int:
    """Bytes the memory plan may use on ``device``."""
    if device.platform == "cpu":
        return int(_host_available() * _CPU_SHARE * gpu_memory_utilization)
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if not limit:
        raise RuntimeError(f"{device.device_kind} does not report its memory; the plan needs bytes_limit")
    in_use = stats.get("bytes_in_use", 0)
    if in_use:
        log.info("%s: %.1f MiB already in use by this process", device.device_kind, in_use / 2**20)
    return int((limit - in_use) * (1 - _GPU_RESERVE))


def _host_available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the physical size is the best there is
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compile_threads() -> int:
    """Compiles at once: as many as there are cores this process may use, at most eight."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
