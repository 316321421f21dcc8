"""How long a process takes from its start to the first token of a job."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Literal

import jax

from qwen35_jax.bench.loops import Load, LoadRun
from qwen35_jax.bench.workload import WorkItem, Workload
from qwen35_jax.errors import UserInputError
from qwen35_jax.program_store import SUBDIRECTORY, stored_programs

if TYPE_CHECKING:
    from qwen35_jax.engine import Engine
    from qwen35_jax.startup import StartReport

StartKind = Literal["cold", "warm"]


def process_age() -> float | None:
    """Seconds since this process was started, Python's own start included; None where the system does not say.

    The kernel counts a process's start in ticks since boot (``/proc/self/stat``, field 22), a hundred a second.
    """
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
        ticks = int(fields[19])  # field 22; the first after the name is field 3
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return age if age >= 0 else None


class CacheCounter:
    """Counts what JAX's persistent compilation cache had and what it lacked, through ``jax.monitoring`` events.

    Attributes:
        hits: programs that were read from the cache.
        misses: programs that were compiled and written to it.
    """

    _HIT = "/jax/compilation_cache/cache_hits"
    _MISS = "/jax/compilation_cache/cache_misses"

    def __init__(self):
        self.hits = self.misses = 0
        jax.monitoring.register_event_listener(self._listen)

    def _listen(self, event: str, **_: Any) -> None:
        self.hits += event == self._HIT
        self.misses += event == self._MISS

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_listener(self._listen)


def first_token_s(engine: Engine, item: WorkItem) -> float:
    """Run one prompt to its first token; returns the seconds from its submission."""
    first = Workload("first", (WorkItem(item.prompt, 1),))
    return LoadRun(engine, first, Load("throughput"), prefix="first-").run().duration


def check_start(kind: StartKind, compilation_cache_dir: str | None) -> None:
    """Refuse, before an engine is made, a start that cannot be of the kind that is asked for.

    Raises:
        UserInputError: a warm start without a directory of programs, or a cold one with programs in it.
    """
    if kind == "warm" and not compilation_cache_dir:
        raise UserInputError("--start_cell=warm needs --compilation_cache_dir, where an earlier start kept programs")
    if kind == "cold" and compilation_cache_dir:
        directory = os.path.join(compilation_cache_dir, SUBDIRECTORY)
        if number := stored_programs(directory):
            raise UserInputError(f"--start_cell=cold needs an empty store of programs; {directory} has {number}")


def start_failure(kind: StartKind, report: StartReport | None, cache: CacheCounter) -> str | None:
    """Why a start was not of the kind that its record claims, or None.

    A warm start loads every program of the engine from the store of compiled programs. A cold one loads none, and
    finds hardly any of the small ones in JAX's own cache (the same may be asked for twice in one start).
    """
    if report is None:
        return f"not known to be a {kind} start: the engine has no report of its start"
    if kind == "warm" and report.num_compiled:
        return f"not a warm start: {report.num_compiled} of {report.num_programs} programs were compiled"
    if kind == "cold" and report.num_loaded:
        return f"not a cold start: {report.num_loaded} of {report.num_programs} programs are from an earlier start"
    if kind == "cold" and cache.hits > cache.misses:
        return f"not a cold start: {cache.hits} programs came from the compilation cache"
    return None
