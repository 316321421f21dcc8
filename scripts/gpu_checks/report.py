"""What a section found: figures, each beside its bar, and whatever was not checked, by name."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Number = int | float | str


@dataclasses.dataclass(frozen=True)
class Check:
    """A figure that must keep to its bar.

    Attributes:
        name: what was measured.
        value: the figure.
        relation: "<=", ">=" or "==".
        bar: what it is held to.
        passed: whether it holds; NaN never does.
    """

    name: str
    value: Number
    relation: str
    bar: Number
    passed: bool

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.value)} {self.relation} {_shown(self.bar)}"


@dataclasses.dataclass
class Section:
    """One section's findings, or those of a part of it that ran in a process of its own.

    Attributes:
        name: of the section.
        part: of the part; empty when there is one.
        checks: figures with bars.
        numbers: figures without.
        skipped: (what, why) of everything that was left out.
        error: what broke it off.
        seconds: it took.
        say: where each finding is told as it is made.
    """

    name: str
    part: str = ""
    checks: list[Check] = dataclasses.field(default_factory=list)
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    say: Callable[[str], None] = dataclasses.field(default=lambda text: None, repr=False, compare=False)
    _started: float = dataclasses.field(default_factory=time.monotonic, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Something was checked, all of it held, and nothing broke."""
        return self.error is None and bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def label(self) -> str:
        return f"{self.name} [{self.part}]" if self.part else self.name

    def _check(self, name: str, value: Number, relation: str, bar: Number, passed: bool, quiet: bool = False) -> None:
        check = Check(name, value, relation, bar, bool(passed))
        self.checks.append(check)
        if not (passed and quiet):
            self.say(f"{self.label}: {'ok  ' if passed else 'FAIL'} {check}")

    def at_most(self, name: str, value: float, bar: float, *, quiet: bool = False) -> None:
        """A figure that may be as large as its bar; with ``quiet`` told only when it is larger."""
        self._check(name, value, "<=", bar, value <= bar, quiet)

    def at_least(self, name: str, value: float, bar: float) -> None:
        self._check(name, value, ">=", bar, value >= bar)

    def equal(self, name: str, value: Number, bar: Number, *, quiet: bool = False) -> None:
        self._check(name, value, "==", bar, value == bar, quiet)

    def number(self, name: str, value: Any) -> None:
        self.numbers[name] = value
        self.say(f"{self.label}:      {name}: {_shown(value)}")

    def skip(self, what: str, why: str) -> None:
        self.skipped.append((what, why))
        self.say(f"{self.label}: SKIP {what}: {why}")

    def fail(self, error: str) -> None:
        self.error = error
        self.say(f"{self.label}: FAIL {error}")

    def end(self) -> None:
        self.seconds = round(time.monotonic() - self._started, 1)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object; figures that are not finite become words."""
        return {
            "name": self.name,
            "part": self.part,
            "passed": self.passed,
            "seconds": self.seconds,
            "error": self.error,
            "checks": [plain(dataclasses.asdict(check)) for check in self.checks],
            "numbers": plain(self.numbers),
            "skipped": [list(pair) for pair in self.skipped],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Section:
        return cls(
            name=values["name"],
            part=values["part"],
            checks=[Check(**check) for check in values["checks"]],
            numbers=dict(values["numbers"]),
            skipped=[(what, why) for what, why in values["skipped"]],
            error=values["error"],
            seconds=values["seconds"],
        )


def plain(value: Any) -> Any:
    """As JSON holds it: numpy scalars as numbers, figures that are not finite as words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def added_up(parts: Iterable[Section]) -> dict[str, Any]:
    """Numbers of all parts; counts that several of them have are added up."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.numbers.items():
            if isinstance(value, int) and isinstance(found.get(name), int):
                found[name] += value
            else:
                found[name if name not in found else f"{name} [{part.part}]"] = value
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value) or "none"
    return str(value)
