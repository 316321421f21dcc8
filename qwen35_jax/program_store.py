"""Compiled programs on disk: a later start with the same everything loads them instead of tracing and compiling.

A file holds one executable of one device. Its name is a digest over all that decides what the executable is
(:func:`circumstances` and what :class:`~qwen35_jax.programs.ProgramSet` says about the program), so a file is never out
of date: what has changed has another name. A file that is not what it should be costs a compile, nothing else.

Loading an executable runs code from it: the directory must be as trusted as the program itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import platform
import re
import secrets
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

import pallas_kernels
import schedulers

log = logging.getLogger(__name__)

SUBDIRECTORY = "programs"
"""Where the files are, inside ``compilation_cache_dir``."""

_MAGIC = b"qwen35pr"
_VERSION = 1
_HEADER = struct.Struct("<8sI32sIQ")  # magic, version, key, bytes of the facts, bytes of the executable
_DIGEST_BYTES = 32  # behind the header: sha256 of the header and what follows, the facts (JSON) and the executable

_PACKAGES = tuple(pathlib.Path(file or "").parent for file in (__file__, pallas_kernels.__file__, schedulers.__file__))
_DISTRIBUTIONS = re.compile(r"(jax|flax|numpy|ml_dtypes|nvidia|triton).*\.dist-info", re.IGNORECASE)
# Settings that decide what is said, where caches are and which devices a process may have, never what a program is.
_NO_PART = re.compile(
    r"jax_(compilation_cache|persistent_cache|raise_persistent|enable_compilation_cache|explain_cache|log|dump|platforms?"
    r"|platform_name|\w+_visible_devices|traceback_filtering|debug_log|tracer_error|pprint|mtls|num_cpu_devices)"
)
_FLAGS = re.compile(r"XLA_(?!(PYTHON_)?CLIENT_)|MOSAIC_|TRITON_|NVIDIA_TF32|CUBLAS_|CUDNN_|TF_(?!CPP_)")


class NotAProgram(Exception):
    """A file that is not the program that it is named for; the message says why."""


@dataclasses.dataclass(frozen=True)
class Trees:
    """Structures of a program's arguments, keywords included, and of its results.

    They come from the running code: pickled, they would name our classes by import path.
    """

    arguments: jax.tree_util.PyTreeDef
    result: jax.tree_util.PyTreeDef


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        compiled: the executable.
        scratch: bytes that it takes beside arguments and results; found when it was compiled, for a backend need not
            know this of what it has loaded.
        kernels: which kernels were chosen for it, a line for each op; only tracing says so.
    """

    compiled: jax.stages.Compiled
    scratch: int
    kernels: tuple[str, ...] = ()


class ProgramStore:
    """The compiled programs in a directory.

    Any number of threads and processes may use one directory: files appear whole, and the same name means the same
    program whoever wrote it. Nothing here raises: a program that cannot be read or written is compiled, and one line
    says why.

    Args:
        directory: where the files are; made when the first is written.
        warn: told in one line what went wrong.
    """

    def __init__(self, directory: str | os.PathLike[str], warn: Callable[[str], None] = log.warning):
        self.directory = pathlib.Path(directory)
        self._warn = warn
        self._lock = threading.Lock()
        self._writes, self._said_unserializable = True, False

    def load(self, key: str, trees: Trees, device: jax.Device) -> Program | None:
        """The program of a key (:func:`digest`) on a device, or None where there is none."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"the compiled program {path} cannot be read ({error.strerror}); it is compiled anew")
            return None
        try:
            facts, payload = unwrap(key, data)
            compiled = serialize_executable.deserialize_and_load(
                payload, trees.arguments, trees.result, backend=device.client, execution_devices=[device]
            )
            return Program(compiled, int(facts["scratch"]), tuple(facts["kernels"]))
        except Exception as error:  # of the many kinds of a payload that is no executable here
            self.discard(key, str(error) or type(error).__name__)
            return None

    def save(self, key: str, trees: Trees, program: Program) -> None:
        """Write a program that has not run yet (one that has may not be serializable any more)."""
        if not self._writes:
            return
        try:
            payload, *found = serialize_executable.serialize(program.compiled)
            if found != [trees.arguments, trees.result]:
                raise ValueError("arguments or results have another structure than they should")
        except Exception as error:  # every backend has its own kinds
            with self._lock:
                said, self._said_unserializable = self._said_unserializable, True
            if not said:
                self._warn(f"compiled programs are not kept, here at least one cannot be: {_line(error)}")
            return
        path, temporary = self._path(key), None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
            temporary.write_bytes(wrap(key, {"scratch": program.scratch, "kernels": program.kernels}, payload))
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                _remove(temporary)
            with self._lock:
                said, self._writes = not self._writes, False
            if not said:
                self._warn(f"compiled programs are not kept: {self.directory} cannot be written ({error.strerror})")

    def discard(self, key: str, reason: str) -> None:
        """Remove a program that is of no use, and say so."""
        path = self._path(key)
        _remove(path)
        self._warn(f"the compiled program {path} is of no use ({_line(reason)}); it is removed and compiled anew")

    def _path(self, key: str) -> pathlib.Path:
        return self.directory / f"{key}.program"


def wrap(key: str, facts: Mapping[str, Any], payload: bytes) -> bytes:
    """What a file holds."""
    said = json.dumps(facts).encode()
    header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(key), len(said), len(payload))
    return b"".join((header, hashlib.sha256(header + said + payload).digest(), said, payload))


def unwrap(key: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    """The facts and the executable of a file.

    Raises:
        NotAProgram: the file is not whole, of another format, or of another program.
    """
    start = _HEADER.size + _DIGEST_BYTES
    if len(data) < start:
        raise NotAProgram("it is too short")
    magic, version, own_key, facts, payload = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise NotAProgram("it is no compiled program")
    if version != _VERSION:
        raise NotAProgram(f"its format is {version}, not {_VERSION}")
    if own_key.hex() != key:
        raise NotAProgram("it is another program")
    if len(data) != start + facts + payload:
        raise NotAProgram(f"it has {len(data)} bytes, not {start + facts + payload}")
    if hashlib.sha256(data[: _HEADER.size] + data[start:]).digest() != data[_HEADER.size : start]:
        raise NotAProgram("it is damaged")
    return json.loads(data[start : start + facts]), data[start + facts :]


def digest(ingredients: Mapping[str, Any]) -> str:
    """The key of a program: sha256 of what decides it, in hexadecimal; plain values, nested as one likes."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def circumstances(device: jax.Device) -> dict[str, Any]:
    """What decides every program of a device: the code, the versions, the device and the compiler's settings."""
    client = device.client
    # An executable holds the number of its device. The count is here because topology is part of what XLA compiles for.
    numbers = [device.id, client.device_count(), getattr(device, "core_count", None)]
    return {
        "sources": _sources(),
        "versions": _versions(),
        "device": [device.platform, device.device_kind, getattr(device, "compute_capability", None), *numbers],
        "platform_version": client.platform_version,
        "host": _host_processor() if device.platform == "cpu" else platform.machine(),
        "settings": {
            name: str(getattr(jax.config, name, value))  # the attribute knows what a context has set
            for name, value in jax.config.values.items()
            if not _NO_PART.match(name)
        },
        "flags": {name: value for name, value in os.environ.items() if _FLAGS.match(name)},
    }


@functools.cache
def _sources() -> str:
    return source_digest(*_PACKAGES)


def source_digest(*folders: pathlib.Path) -> str:
    """Digest of the code and the data files (kernel settings) of packages."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            total.update(json.dumps([name, hashlib.sha256(path.read_bytes()).hexdigest()]).encode())
    return total.hexdigest()


@functools.cache
def _versions() -> list[str]:
    """Versions of what compiles; libraries that XLA loads by themselves are found as installed distributions."""
    found = [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax, np)] + [sys.version]
    for folder in map(pathlib.Path, sys.path):
        if folder.is_dir():
            found += [path.name for path in folder.iterdir() if _DISTRIBUTIONS.fullmatch(path.name)]
    return sorted(set(found))


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


class CacheHits:
    """Tells whether a thread's last compile came from JAX's own cache, through ``jax.monitoring`` events."""

    _HIT = "/jax/compilation_cache/cache_hits"

    def __init__(self):
        self._threads: set[int] = set()
        jax.monitoring.register_event_listener(self._listen)

    def _listen(self, event: str, **_: Any) -> None:
        if event == self._HIT:
            self._threads.add(threading.get_ident())

    def take(self) -> bool:
        """Whether this thread had a hit since it last asked."""
        thread = threading.get_ident()
        had = thread in self._threads
        self._threads.discard(thread)
        return had

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_listener(self._listen)


def _remove(path: str | os.PathLike[str]) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # gone already, or not ours to remove


def _line(message: object) -> str:
    return " ".join(str(message).split())[:300]
