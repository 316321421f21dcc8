"""What decides a compiled program: the parts of its key in a :class:`~qwen35_jax.program_store.ProgramStore`.

What is left out here would be loaded although it has changed, so everything that might have part is taken in: a start
that compiles without need is better than a wrong program.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
import jaxlib
import numpy as np

from pallas_kernels import registry
from qwen35_jax import code_state

# Settings that decide what is said, where caches are and which devices a process may have, never what a program is.
_NO_PART = re.compile(
    r"jax_(compilation_cache|persistent_cache|raise_persistent|enable_compilation_cache|explain_cache|log|dump|platforms?"
    r"|platform_name|\w+_visible_devices|traceback_filtering|debug_log|tracer_error|pprint|mtls|num_cpu_devices)"
)
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def digest(ingredients: Mapping[str, Any]) -> str:
    """The key of a program: sha256 of what decides it, in hexadecimal; plain values, nested as one likes."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def circumstances(device: jax.Device) -> dict[str, Any]:
    """What decides every program of a device: the code, the versions, the device and the compiler's settings."""
    client = device.client
    # An executable holds the number of its device. The count is here because topology is part of what XLA compiles for.
    numbers = [device.id, client.device_count(), getattr(device, "core_count", None)]
    return {
        "sources": code_state.AT_IMPORT.sources,
        "versions": [*_versions(), *code_state.AT_IMPORT.installed],
        "device": [device.platform, device.device_kind, getattr(device, "compute_capability", None), *numbers],
        "platform_version": client.platform_version,
        "driver": "" if device.platform == "cpu" else _driver(),
        "host": _host_processor() if device.platform == "cpu" else platform.machine(),
        "settings": {
            name: str(getattr(jax.config, name, value))  # the attribute knows what a context has set
            for name, value in jax.config.values.items()
            if not _NO_PART.match(name)
        },
        # XLA may have read either: programs of a process that changed them are of no use to one that did not.
        "flags": [code_state.FLAGS_AT_IMPORT, code_state.compiler_flags()],
        "kernel_table": kernel_table(),
    }


def kernel_table() -> list[Any]:
    """Every op's implementations, best first, and the target for which a trace would choose among them now."""
    table = [
        [op.name, [[impl.name, impl.priority, _module(impl.function)] for impl in op.implementations.values()]]
        for op in registry.all_ops()
    ]
    return [*table, dataclasses.astuple(registry.current_target())]


def foreign_kernels() -> list[str]:
    """Implementations with code outside of the project's packages, of which no digest tells."""
    return [
        f"{op.name}={impl.name}"
        for op in registry.all_ops()
        for impl in op.implementations.values()
        if not (_is_ours(impl.function) and _is_ours(impl.supports))
    ]


def _plain(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _module(function: Callable[..., Any]) -> str:
    return getattr(_plain(function), "__module__", None) or type(_plain(function)).__module__


def _is_ours(function: Callable[..., Any]) -> bool:
    plain = _plain(function)
    try:
        file = pathlib.Path(inspect.getfile(plain if hasattr(plain, "__code__") else type(plain))).resolve()
    except TypeError:  # something without a file
        return False
    return any(file.is_relative_to(folder.resolve()) for folder in code_state.FOLDERS)


def _versions() -> list[str]:
    """Versions of what this process runs, whatever is installed by now."""
    return [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax, np)] + [sys.version]


def _driver() -> str:
    """The GPU driver, which has the last word on machine code; empty where the system does not say."""
    try:
        return _DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""


@functools.cache
def _host_processor() -> list[str]:
    """A CPU's programs are made of the instructions that this one has."""
    found = {platform.machine(), platform.processor()}
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""  # not Linux: what Python knows has to do
    found.update(re.findall(r"(?m)^(?:model name|flags|Features|CPU part)\s*:.*$", text))
    return sorted(found)
