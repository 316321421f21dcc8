"""Named implementations of an op, and the choice between them.

Every op of this package has one table: name -> implementation. A caller asks for ``"auto"`` or for a name.

* A *named* implementation either runs or raises :class:`UnsupportedArguments`; it never falls back to another one.
* ``"auto"`` takes the accepting implementation with the highest priority that is meant for such arguments, logs which
  (once per distinct choice), and :func:`describe` lists the choices made so far.
* A name that does not exist raises :class:`UnknownImplementation`, which lists the names that do.

The choice is made while tracing, from shapes, dtypes and the target device alone, so it costs nothing at run time.
"""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax

AUTO = "auto"
REFERENCE = "reference"

_log = logging.getLogger(__name__)


class UnsupportedArguments(ValueError):
    """An implementation does not take these arguments (shape, dtype, option or device).

    The one exception type for "not my arguments": capability checks raise it, ``"auto"`` skips to the next candidate
    when it sees it, and a caller that named the implementation receives it.
    """


class UnknownImplementation(ValueError):
    """No implementation of that name is registered; the message lists the names that are."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The device a call will run on.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        device_kind: the device's own name, such as "NVIDIA H200".
        compute_capability: "9.0" and the like where the device tells it, else None.
    """

    platform: str
    device_kind: str
    compute_capability: str | None = None


def current_target() -> Target:
    """Device that a computation traced now is meant for.

    Looks first at the abstract mesh (lowering for a device that is not here), then at ``jax_default_device``, then at
    the first device of the default backend.
    """
    abstract_device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract_device is not None:
        platform = getattr(abstract_device, "platform", None) or jax.default_backend()
        return Target(_platform_family(platform), abstract_device.device_kind)
    device = jax.config.jax_default_device
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is None:
        device = jax.devices()[0]
    return Target(
        _platform_family(device.platform), device.device_kind, getattr(device, "compute_capability", None) or None
    )


def _platform_family(platform: str) -> str:
    return "gpu" if platform in ("gpu", "cuda", "rocm") else platform


Supports = Callable[[Target, Mapping[str, Any]], None]


def _supports_anything(target: Target, arguments: Mapping[str, Any]) -> None:
    del target, arguments


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation:
    """One way to compute an op.

    Attributes:
        op: name of the op.
        name: name of the implementation.
        function: takes the op's arguments (keyword options included) and returns its results.
        supports: called with the target and the arguments by name; raises :class:`UnsupportedArguments` to decline.
            Arguments may be tracers: look at shape and dtype only.
        auto_supports: called in the same way, by "auto" alone: so it leaves arguments to another one that is faster
            there, and who names this one gets it.
        priority: "auto" prefers higher numbers. The reference has 0; below 0 means "never chosen by auto".
    """

    op: str
    name: str
    function: Callable[..., Any]
    supports: Supports
    priority: int
    auto_supports: Supports = _supports_anything


class Op:
    """The implementations of one op. Created once per op, at import."""

    def __init__(self, name: str):
        self.name = name
        self._implementations: dict[str, Implementation] = {}
        self._choices: dict[tuple[str, str, Target], None] = {}  # an ordered set: (asked for, chosen, target)

    def register(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        priority: int,
        supports: Supports = _supports_anything,
        auto_supports: Supports = _supports_anything,
    ) -> Implementation:
        """Add an implementation, see :class:`Implementation`.

        Raises:
            ValueError: the name is reserved or taken.
        """
        if name == AUTO:
            raise ValueError(f"{self.name}: {AUTO!r} is reserved, an implementation cannot have that name")
        if name in self._implementations:
            raise ValueError(f"{self.name}: an implementation named {name!r} is already registered")
        implementation = Implementation(self.name, name, function, supports, priority, auto_supports)
        self._implementations[name] = implementation
        return implementation

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        """All implementations by name, best first (a read-only view)."""
        ordered = sorted(self._implementations.values(), key=lambda impl: -impl.priority)
        return types.MappingProxyType({impl.name: impl for impl in ordered})

    @property
    def choices(self) -> tuple[tuple[str, str, Target], ...]:
        """Distinct (asked for, chosen, target) triples that were selected so far in this process."""
        return tuple(self._choices)

    def select(
        self, implementation: str, arguments: Mapping[str, Any], *, target: Target | None = None
    ) -> Implementation:
        """Choose the implementation of a call.

        Args:
            implementation: "auto" or a registered name.
            arguments: the call's arguments by name.
            target: device; None means :func:`current_target`.

        Raises:
            UnknownImplementation: no such name.
            UnsupportedArguments: the named implementation declines, or none accepts.
        """
        target = current_target() if target is None else target
        table = self.implementations
        refusals: dict[str, str] = {}
        if implementation == AUTO:
            chosen = None
            for candidate in table.values():
                if candidate.priority < 0:
                    continue
                try:
                    candidate.supports(target, arguments)
                    candidate.auto_supports(target, arguments)
                except UnsupportedArguments as refusal:
                    refusals[candidate.name] = str(refusal)
                    continue
                chosen = candidate
                break
            if chosen is None:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items()) or "none is registered"
                raise UnsupportedArguments(
                    f"{self.name}: no implementation takes these arguments on {target}: {reasons}"
                )
        elif implementation in table:
            chosen = table[implementation]
            try:
                chosen.supports(target, arguments)
            except UnsupportedArguments as refusal:
                raise UnsupportedArguments(f"{self.name}: implementation {implementation!r}: {refusal}") from refusal
        else:
            known = ", ".join(repr(name) for name in (AUTO, *table))
            raise UnknownImplementation(f"{self.name}: unknown implementation {implementation!r}; known: {known}")
        self._record(implementation, chosen, target, refusals)
        return chosen

    def _record(self, asked: str, chosen: Implementation, target: Target, refusals: Mapping[str, str]) -> None:
        choice = (asked, chosen.name, target)
        if choice in self._choices:
            return
        self._choices[choice] = None
        declined = "".join(f"; {name} declined: {reason}" for name, reason in refusals.items())
        _log.info(
            "%s: %s -> %s on %s (%s)%s", self.name, asked, chosen.name, target.platform, target.device_kind, declined
        )

    def describe(self) -> str:
        """One line: the implementations, best first, and the choices made so far."""
        names = ", ".join(
            f"{impl.name} (priority {impl.priority})" if impl.priority >= 0 else f"{impl.name} (by name only)"
            for impl in self.implementations.values()
        )
        chosen = ", ".join(f"{asked} -> {name} on {target.device_kind}" for asked, name, target in self._choices)
        return f"{self.name}: {names}; chosen so far: {chosen or 'nothing'}"


_OPS: dict[str, Op] = {}


def define_op(name: str) -> Op:
    """Create the table of a new op (each op's ``api.py`` does this once, at import)."""
    if name in _OPS:
        raise ValueError(f"op {name!r} is already defined")
    _OPS[name] = Op(name)
    return _OPS[name]


def get_op(name: str) -> Op:
    """Table of an op by name.

    Raises:
        KeyError: no such op; the message lists the ops.
    """
    try:
        return _OPS[name]
    except KeyError:
        raise KeyError(f"unknown op {name!r}; known: {', '.join(sorted(_OPS))}") from None


def all_ops() -> tuple[Op, ...]:
    """Every op, by name."""
    return tuple(_OPS[name] for name in sorted(_OPS))


def implementation_of(kernels: str, op: str) -> str:
    """What a choice of kernels says about one op.

    Args:
        kernels: a name for every op, or ``op=name`` pairs with commas between them, other ops being "auto".
        op: the op.
    """
    if "=" not in kernels:
        return kernels
    pairs = dict(part.split("=", 1) for part in kernels.split(","))
    return pairs.get(op, AUTO)


def check_choice(kernels: str) -> None:
    """Refuse a choice of kernels (see :func:`implementation_of`) that names what is not there.

    Raises:
        UnknownImplementation: a part that is no ``op=name``, an unknown op, an op named twice, an unknown name; the
            message says which.
    """
    asked: dict[str, str] = {}
    if "=" in kernels:
        for part in kernels.split(","):
            op, equals, name = part.partition("=")
            if not equals or op not in _OPS:
                raise UnknownImplementation(f"{part!r} is not op=name; the ops are {', '.join(sorted(_OPS))}")
            if op in asked:
                raise UnknownImplementation(f"{op} is named twice")
            asked[op] = name
    else:
        asked = dict.fromkeys(sorted(_OPS), kernels)
    for op, name in asked.items():
        if name != AUTO and name not in _OPS[op].implementations:
            known = ", ".join((AUTO, *_OPS[op].implementations))
            raise UnknownImplementation(f"{op} has no such implementation as {name!r} (it has {known})")


def describe() -> str:
    """A line for each op: its implementations and which of them were chosen so far."""
    return "\n".join(op.describe() for op in all_ops())
