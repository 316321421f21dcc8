"""Every mode of the engine, in one place: whatever registers here must give the same greedy tokens as the plain path.

``tests/end_to_end/test_tasks.py`` runs them all over real text, ``scripts/gpu_check.py`` those that its programs serve.
A feature that changes how requests are run adds its modes here, and programs of its own if no others serve it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qwen35_jax.config import EngineConfig
from qwen35_jax.engine import Engine
from qwen35_jax.errors import UserInputError
from schedulers.budget import choose_prefill_budget
from schedulers.chunking import take_chunks
from tests.engine_kit import Choice, Kit

MAX_MODEL_LEN = 4096

type Shows = Callable[[Engine, Kit], bool]


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a set of compiled programs is made of; several modes share one.

    Attributes:
        options: of the engine that they are compiled for, in float32. Pages are few enough that requests wait for them.
        ladder: rungs of tokens, rows and widths, as ``BucketLadder.from_limits`` takes them.
        devices: needed.
    """

    options: EngineConfig
    ladder: Mapping[str, Sequence[int]]
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to run an engine.

    Attributes:
        name: of the mode.
        programs: which set of programs it takes.
        changes: options in place of those that the programs were compiled for.
        shows: whether an engine that has run, made of that kit, did run in this mode.
        long: whether the prompts of thousands of tokens run in it as well (they take seconds).
        every: takes one of so many prompts: for modes that do one after the other.
    """

    name: str
    programs: str
    changes: Mapping[str, Any]
    shows: Shows
    long: bool = False
    every: int = 1

    @property
    def options(self) -> EngineConfig:
        """All options of the mode."""
        return dataclasses.replace(PROGRAMS[self.programs].options, **self.changes).validate()


PROGRAMS: dict[str, Programs] = {}
MODES: dict[str, Mode] = {}


def register(
    name: str,
    programs: str,
    *,
    shows: Shows,
    long: bool = False,
    every: int = 1,
    **changes: Any,
) -> None:
    """Adds a mode; see :class:`Mode`.

    Raises:
        ValueError: the name is taken.
    """
    if name in MODES:
        raise ValueError(f"mode {name!r} is registered twice")
    MODES[name] = Mode(name, programs, changes, shows, long, every)


def accepted(field: str) -> tuple[Any, ...]:
    """The values of an option that an engine accepts, as far as they can be asked for.

    Args:
        field: one of ``OPTIONS_WITH_MODES``.
    """
    if field in _TRIED:
        return tuple(value for value in _TRIED[field] if _accepts(field, value))
    try:
        EngineConfig(**{field: "no such value"}).validate()
    except UserInputError as error:
        named = re.search(r"must be one of (.*), got", str(error))
        if named:
            return tuple(named[1].split(", "))
    raise ValueError(f"{field}: cannot tell which values are accepted")


_TRIED: Mapping[str, tuple[Any, ...]] = {
    "decode_steps": (1, 2, 4, 8, 16),
    "enable_prefix_caching": (False, True),
    "batch_invariant": (False, True),
    "overlap_dispatch": (False, True),
    "debug_poison": (False, True),
    "tensor_parallel_size": (1, 2),
    "data_parallel_size": (1, 2),
}
OPTIONS_WITH_MODES = ("decode_overlap", "scheduler_policy", *_TRIED)
"""Options whose every accepted value must have a mode."""


def _accepts(field: str, value: Any) -> bool:
    try:
        EngineConfig(**{field: value}).validate()
    except UserInputError:
        return False
    return True


def missing() -> Iterator[tuple[str, Any]]:
    """Values of options that an engine accepts and no mode has."""
    for field in OPTIONS_WITH_MODES:
        covered = {getattr(mode.options, field) for mode in MODES.values()}
        yield from ((field, value) for value in accepted(field) if value not in covered)


# What shows that a mode was one: the engine after its run, and its kit with dispatches and choices.


def all_of(*shows: Shows) -> Shows:
    """All of them."""
    return lambda engine, kit: all(one(engine, kit) for one in shows)


def mixed(engine: Engine, kit: Kit) -> bool:
    """Prompts and decode rows went through one program."""
    return kit.dispatched["unified"] > 0


def apart(engine: Engine, kit: Kit) -> bool:
    """They never did, and rows were decoded together."""
    together = any(record.decode_rows > 2 for record in engine.trace.records)
    return together and kit.dispatched["unified"] == kit.dispatched["other prefill"] == 0


def at_once(engine: Engine, kit: Kit) -> bool:
    """No dispatch was made before the results of the one before it were read."""
    steps = list(engine.trace.records)
    return len(steps) > 1 and all(
        after.time - after.duration >= before.time for before, after in itertools.pairwise(steps)
    )


def late(engine: Engine, kit: Kit) -> bool:
    """Dispatches were made while the one before was under way."""
    return not at_once(engine, kit)


def auto_budget(engine: Engine, kit: Kit) -> bool:
    """Every step took the prompt tokens that policy auto asks for, not always the same, and off would take others."""
    limits, most = engine.scheduler.config, engine.scheduler.ladder.max_requests

    def budget(policy: str, choice: Choice) -> int:
        overlap = limits.overlap != "off"
        return choose_prefill_budget(policy, limits.max_num_batched_tokens, choice.active, choice.prompts, overlap)

    def taken(policy: str) -> list[tuple[int, ...]]:
        return [tuple(take_chunks(choice.prompts, budget(policy, choice), most)) for choice in kit.choices]

    changed = len({budget("auto", choice) for choice in kit.choices}) > 1
    return changed and [choice.lengths for choice in kit.choices] == taken("auto") != taken("off")


def overlapped(engine: Engine, kit: Kit) -> bool:
    """Prompts were read on the other device, and there alone."""
    return kit.dispatched["other prefill"] > 0 and kit.dispatched["prefill"] == kit.dispatched["unified"] == 0


def several_steps(engine: Engine, kit: Kit) -> bool:
    """Dispatches of several decode steps."""
    return any(record.steps > 1 for record in engine.trace.records)


def overlapped_steps(engine: Engine, kit: Kit) -> bool:
    """Prompts on the other device, several decode steps a dispatch."""
    return overlapped(engine, kit) and several_steps(engine, kit)


def few_rows(engine: Engine, kit: Kit) -> bool:
    """As many rows at once as the mode has slots, and no more."""
    return max(record.decode_rows for record in engine.trace.records) == engine.max_num_seqs


def small_chunks(engine: Engine, kit: Kit) -> bool:
    """No step took more than 64 prompt tokens."""
    return max(record.prefill_tokens for record in engine.trace.records) <= 64


_FLOAT32 = EngineConfig(
    dtype="float32",
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    num_kv_pages=96,
    skip_tokenizer_init=True,
)

PROGRAMS["main"] = Programs(
    dataclasses.replace(_FLOAT32, decode_overlap="stream", decode_steps=8),
    {"token_rungs": [256], "row_rungs": [8], "width_rungs": [64]},
)
PROGRAMS["other buckets"] = Programs(
    dataclasses.replace(_FLOAT32, max_model_len=1024, max_num_seqs=3, max_num_batched_tokens=64),
    {"token_rungs": [64], "row_rungs": [3], "width_rungs": [16]},
)
PROGRAMS["device"] = Programs(
    dataclasses.replace(_FLOAT32, decode_overlap="device", decode_steps=8, max_num_batched_tokens=128, async_chunks=2),
    {"token_rungs": [128], "row_rungs": [8], "width_rungs": [64]},
    devices=2,
)

_OFF: dict[str, Any] = {"decode_overlap": "off", "decode_steps": 1}
_STREAM: dict[str, Any] = {"decode_overlap": "stream", "decode_steps": 1}
# Where a step has room for two of the short prompts, the policies differ however many rows there are.
_AUTO: dict[str, Any] = {"scheduler_policy": "auto", "max_num_batched_tokens": 128}

register("off", "main", **_OFF, shows=all_of(apart, late), long=True)
register("stream", "main", **_STREAM, shows=mixed, long=True)
register("stream auto", "main", **_STREAM, **_AUTO, shows=all_of(mixed, auto_budget), every=2)
register("device", "device", decode_steps=1, async_chunks=1, shows=overlapped)
register("results at once", "main", **_OFF, overlap_dispatch=False, shows=all_of(apart, at_once), every=2)
register("auto", "main", **_OFF, **_AUTO, shows=all_of(apart, late, auto_budget), every=2)
register("stream small budget", "main", **_STREAM, max_num_batched_tokens=64, shows=small_chunks, every=2)
register("8 steps", "main", decode_overlap="off", decode_steps=8, shows=several_steps, every=2)
register("stream 8 steps auto", "main", scheduler_policy="auto", shows=several_steps, every=2)
register("two slots poison", "main", **_STREAM, max_num_seqs=2, debug_poison=True, shows=few_rows, every=2)
register("one at a time", "main", **_OFF, max_num_seqs=1, debug_poison=True, shows=few_rows, every=3)
register("other buckets", "other buckets", shows=apart, every=2)
register("device 8 steps", "device", scheduler_policy="auto", debug_poison=True, shows=overlapped_steps, every=2)
