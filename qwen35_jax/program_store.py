"""Compiled programs on disk: a later start with the same everything loads them instead of tracing and compiling.

A file holds one executable of one device. Its name is a digest over all that decides what the executable is
(:mod:`qwen35_jax.program_key` and what :class:`~qwen35_jax.programs.ProgramSet` says about the program), so a file is
never out of date: what has changed has another name. A file that is not what it should be costs a compile, nothing
else.

Loading an executable runs code from it: the directory must be as trusted as the program itself.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from qwen35_jax import code_state
from qwen35_jax.program_file import NotAProgram, unwrap, wrap
from qwen35_jax.program_key import foreign_kernels

log = logging.getLogger(__name__)

SUBDIRECTORY = "programs"
"""Where the files are, inside ``compilation_cache_dir``."""

_STALE_S = 3600  # a temporary file of this age is what a killed process has left


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a program takes and gives, said by the running code and never by a file.

    Attributes:
        arguments: structure of the arguments, keywords included. Pickled, it would name our classes by import path.
        result: structure of the results.
        takes: shape, dtype and whether it is consumed, for every argument.
        gives: shape and dtype of every result.
    """

    arguments: jax.tree_util.PyTreeDef
    result: jax.tree_util.PyTreeDef
    takes: tuple[tuple[tuple[int, ...], str, bool], ...]
    gives: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> Signature:
        """The signature of an executable."""
        infos, arguments = jax.tree.flatten(compiled.args_info)
        results, result = jax.tree.flatten(compiled.out_info)
        takes = tuple((tuple(x.shape), np.dtype(x.dtype).name, x.donated) for x in infos)
        return cls(arguments, result, takes, tuple((tuple(x.shape), np.dtype(x.dtype).name) for x in results))


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
        unchanged: whether the code that this process has imported is still what is on disk.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        warn: Callable[[str], None] = log.warning,
        unchanged: Callable[[], bool] = code_state.unchanged,
    ):
        self.directory = pathlib.Path(directory)
        self._warn, self._unchanged = warn, unchanged
        self._lock = threading.Lock()
        self._bad: set[str] = set()  # keys that are not loaded again, for a file need not be ours to remove
        self._said: set[str] = set()
        self._writes, self._swept = True, False

    def load(self, key: str, signature: Signature, device: jax.Device) -> Program | None:
        """The program of a key (:func:`~qwen35_jax.program_key.digest`) on a device, or None where there is none."""
        path = self._path(key)
        if key in self._bad:
            return None
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, MemoryError) as error:
            self._warn(f"the compiled program {path} cannot be read ({_line(error)}); it is compiled anew")
            return None
        try:
            facts, payload = unwrap(key, data)
            compiled = serialize_executable.deserialize_and_load(
                payload, signature.arguments, signature.result, backend=device.client, execution_devices=[device]
            )
            _verify(compiled, facts, signature, device)
            return Program(compiled, facts["scratch"], tuple(facts["kernels"]))
        except NotAProgram as error:
            self.discard([key], str(error))
        except Exception as error:  # no memory, or whatever a backend has against a file that is whole
            self._bad.add(key)
            self._warn(f"the compiled program {path} cannot be loaded ({_line(error)}); it is compiled anew")
        return None

    def save(self, key: str, signature: Signature, program: Program) -> None:
        """Write a program that has not run yet (one that has may not be serializable any more)."""
        if not self._writes:
            return
        if not self._unchanged():
            self._writes = False
            self._warn_once("compiled programs are not kept: code or libraries have changed since this process started")
            return
        try:
            if Signature.of(program.compiled) != signature:
                raise ValueError("it takes or gives something else than it should")
            payload, *_ = serialize_executable.serialize(program.compiled)
        except Exception as error:  # every backend has its own kinds
            self._warn_once(f"not every compiled program is kept, at least one cannot be: {_line(error)}", "serialize")
            return
        temporary = self._path(key).with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            with open(temporary, "xb") as file:
                file.writelines(wrap(key, _facts(program), payload))
            os.replace(temporary, self._path(key))
            self._bad.discard(key)
        except (OSError, MemoryError) as error:
            _remove(temporary)
            self._writes = False
            self._warn_once(f"compiled programs are not kept: {self.directory} cannot be written ({_line(error)})")

    def discard(self, keys: Sequence[str], reason: str) -> None:
        """Remove programs that are of no use, say so in one line, and never load them again."""
        self._bad.update(keys)
        paths = [self._path(key) for key in keys]
        left = {path: failure for path in paths if (failure := _remove(path)) is not None}
        fate = "removed"
        if left:
            path, failure = next(iter(left.items()))
            fate = f"{len(left)} of them cannot be removed, {path.name} for one: {_line(failure)}"
        named = f"the compiled program {paths[0]}" if len(paths) == 1 else f"{len(paths)} programs of {self.directory}"
        self._warn(f"no use of {named} ({_line(reason)}); {fate}; compiled anew")

    def _path(self, key: str) -> pathlib.Path:
        return self.directory / f"{key}.program"

    def _warn_once(self, message: str, kind: str | None = None) -> None:
        with self._lock:
            said = (kind or message) in self._said
            self._said.add(kind or message)
        if not said:
            self._warn(message)

    def _sweep(self) -> None:
        """Remove what killed processes have left."""
        with self._lock:
            swept, self._swept = self._swept, True
        for path in () if swept else self.directory.glob("*.tmp"):
            try:
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
            except OSError:
                continue  # gone by itself, or not ours


def open_store(directory: str | os.PathLike[str], warn: Callable[[str], None] = log.warning) -> ProgramStore | None:
    """The store of a directory, or None (and a warning) where no key would tell what code a program is made of."""
    foreign = foreign_kernels()
    if code_state.AT_IMPORT.sources is None:
        reason = "no source files of the packages are found"
    elif code_state.IMPORTED_BEFORE:
        reason = f"{', '.join(code_state.IMPORTED_BEFORE)} imported before qwen35_jax could look at the files"
    elif foreign:
        reason = f"kernels from outside of the packages are registered: {', '.join(foreign)}"
    elif not code_state.unchanged():
        reason = "code or libraries have changed since this process started"
    else:
        return ProgramStore(directory, warn)
    warn(f"compiled programs are neither kept nor loaded: {reason}")
    return None


def stored_programs(directory: str | os.PathLike[str]) -> int:
    """How many programs the store of a directory has, of whatever code and model."""
    return sum(1 for _ in pathlib.Path(directory).glob("*.program"))


def _facts(program: Program) -> dict[str, Any]:
    (device,) = program.compiled.runtime_executable().local_devices()
    return {
        "scratch": program.scratch,
        "kernels": program.kernels,
        "aliased": _aliased(program.compiled),
        "device": [device.platform, device.device_kind, device.id],
    }


def _verify(compiled: jax.stages.Compiled, facts: Mapping[str, Any], signature: Signature, device: jax.Device) -> None:
    """Hold a loaded program to what the running code expects of it.

    Raises:
        NotAProgram: it takes, consumes or gives something else.
        ValueError: this backend has made something else of it than what was saved.
    """
    if facts["device"] != [device.platform, device.device_kind, device.id]:
        raise NotAProgram(f"it is of the device {facts['device']}")
    if Signature.of(compiled) != signature:
        raise NotAProgram("it takes, consumes or gives something else than it should")
    devices = compiled.runtime_executable().local_devices()
    if devices != [device]:
        raise ValueError(f"it would run on {devices}, not on {device}")
    saved, found = facts["aliased"], _aliased(compiled)
    if None not in (saved, found) and saved != found:
        raise ValueError(f"it would reuse {found} bytes of its arguments, not {saved}: pools would be copied")


def _aliased(compiled: jax.stages.Compiled) -> int | None:
    """Bytes of consumed arguments in which results are written; None where the backend does not say."""
    try:
        return int(compiled.memory_analysis().alias_size_in_bytes)
    except Exception:  # backends that do not know say so in many ways
        return None


def _remove(path: str | os.PathLike[str]) -> OSError | None:
    """Unlink a file; gives the reason if it is still there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _line(error: object) -> str:
    said = error.strerror if isinstance(error, OSError) else error
    return " ".join(str(said or "").split())[:300] or type(error).__name__
