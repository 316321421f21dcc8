"""Settings of kernels that measured fastest, from data files: one a folder of an op, by device kind and shapes.

``pallas_kernels/<op>/tuned.json`` is a list of entries, written by ``python -m pallas_kernels.tune``::

    {"implementation": "triton", "device": "NVIDIA H200",
     "exact": {"group": 4, "dtype": "bfloat16"}, "sizes": {"programs": 256, "width": 16},
     "use": {"keys": 64, "warps": 4, "stages": 3, "programs": 528},
     "measured": {"spec": "4b-64x1k", "commit": "..."}}

An entry fits a call of its implementation on its kind of device if everything under ``exact`` is equal and no size is
more than :data:`REACH` times its own or less than one :data:`REACH`-th. Of those that fit, the closest in sizes counts
(sum of the logarithms of the ratios; of equals the first). Where none fits, the implementation's own default holds: so
on any other kind of device, and for shapes far from what was measured. Settings change time, and of results no more
than the order of their sums does.

The file is read when a kernel is traced; nothing is kept.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels import registry

REACH = 8.0
"""How many times larger or smaller than a measured size a size may be."""

type Key = tuple[Mapping[str, Any], Mapping[str, int]]
"""What of a call's shapes must be equal, and the sizes of which the closest count."""


class MalformedTuning(ValueError):
    """A data file, or an entry of it, is not what it should be; the message names file, entry and field."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a data file, see above."""

    implementation: str
    device: str
    exact: Mapping[str, Any]
    sizes: Mapping[str, int]
    use: Mapping[str, int]
    measured: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Tunable:
    """What ``pallas_kernels.tune`` needs to know of an implementation; ``<op>/tuning.py`` lists those of an op.

    Attributes:
        op: name of the op.
        implementation: its name in the registry; its function takes the settings as a keyword.
        default: arguments by name -> the settings without any data, a frozen dataclass.
        key: arguments by name -> what an entry is found by.
        steps: what to try. The values of a step are tried in all combinations, the fields of other steps being the best
            so far.
        possible: whether settings can run at all with these arguments (shared memory).
        keyword: name of the keyword.
    """

    op: str
    implementation: str
    default: Callable[[Mapping[str, Any]], Any]
    key: Callable[[Mapping[str, Any]], Key]
    steps: tuple[Mapping[str, tuple[int, ...]], ...]
    possible: Callable[[Any, Mapping[str, Any]], bool] = lambda settings, arguments: True
    keyword: str = "tiling"


def path_of(op: str) -> pathlib.Path:
    """The data file of an op, there or not."""
    return pathlib.Path(__file__).parent / op / "tuned.json"


def read(path: pathlib.Path) -> tuple[Entry, ...]:
    """The entries of a file, none if it is not there.

    Raises:
        MalformedTuning: no JSON, no list, a field missing, unknown, of another type, or a size below 1.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise MalformedTuning(f"{path.name} of {path.parent.name}: not JSON: {error}") from error
    where = f"{path.name} of {path.parent.name}"
    if not isinstance(values, list):
        raise MalformedTuning(f"{where}: must be a list of entries, is a {type(values).__name__}")
    return tuple(_entry(f"{where}: entry {index}", value) for index, value in enumerate(values))


def _entry(where: str, value: Any) -> Entry:
    if not isinstance(value, dict):
        raise MalformedTuning(f"{where}: must be an object, is a {type(value).__name__}")
    fields = {field.name for field in dataclasses.fields(Entry)}
    for name in sorted(fields ^ value.keys()):
        raise MalformedTuning(f"{where}: {'no' if name in fields else 'unknown'} field {name!r}")
    for name in ("implementation", "device"):
        if not isinstance(value[name], str) or not value[name]:
            raise MalformedTuning(f"{where}: {name} must be a name, is {value[name]!r}")
    for name in ("exact", "sizes", "use", "measured"):
        if not isinstance(value[name], dict):
            raise MalformedTuning(f"{where}: {name} must be an object, is {value[name]!r}")
    for name in ("sizes", "use"):
        for key, number in value[name].items():
            if name == "use" and isinstance(number, bool):
                continue
            if type(number) is not int or number < 1:
                what = "a positive integer" if name == "sizes" else "a positive integer, true or false"
                raise MalformedTuning(f"{where}: {name}.{key} must be {what}, is {number!r}")
    return Entry(**value)


def closest(entries: Sequence[Entry], implementation: str, device: str, key: Key) -> Entry | None:
    """The entry for a call, None if none fits."""
    exact, sizes = key
    found, best = None, math.inf
    for entry in entries:
        if (entry.implementation, entry.device, entry.exact) != (implementation, device, exact):
            continue
        if entry.sizes.keys() != sizes.keys():
            continue
        away = [abs(math.log2(sizes[name] / entry.sizes[name])) for name in sizes]
        if max(away, default=0.0) <= math.log2(REACH) and sum(away) < best:
            found, best = entry, sum(away)
    return found


def settings[T](default: T, op: str, implementation: str, key: Key, *, path: pathlib.Path | None = None) -> T:
    """Settings of a call that is being traced.

    Args:
        default: a frozen dataclass, what holds where no entry fits; an entry replaces the fields that it names.
        op: name of the op.
        implementation: name of the implementation.
        key: of the call.
        path: another data file than the op's.

    Raises:
        MalformedTuning: see :func:`read`; or the entry names no field of the settings, or has a value they refuse.
    """
    path = path or path_of(op)
    entry = closest(read(path), implementation, registry.current_target().device_kind, key)
    if entry is None:
        return default
    where = f"{path.name} of {path.parent.name}: {implementation}, use {entry.use}"
    for name, value in entry.use.items():
        if isinstance(value, bool) != isinstance(getattr(default, name, value), bool):
            raise MalformedTuning(f"{where}: {name} is {'a number' if isinstance(value, bool) else 'true or false'}")
    try:
        return dataclasses.replace(default, **entry.use)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise MalformedTuning(f"{where}: {error}") from error
