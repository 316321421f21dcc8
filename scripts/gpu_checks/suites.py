"""Sections that are test suites run on the device: pytest inside the worker, counted by a plugin."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from scripts.gpu_checks.report import Section

KERNEL_TESTS = ("tests/pallas_kernels",)
SAMPLER_TESTS = ("tests/qwen35_jax/test_sampling.py",)


def assign(groups: Sequence[str], shards: int) -> list[int]:
    """The shard of each item, given the group it belongs to.

    Items of a group share compiled programs, so a group stays together unless it is larger than a fair share; the
    largest go first, each to the shard with the least.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    fair = max(1, -(-len(groups) // shards))
    pieces = [items[start : start + fair] for items in members.values() for start in range(0, len(items), fair)]
    loads, found = [0] * shards, [0] * len(groups)
    for piece in sorted(pieces, key=len, reverse=True):
        shard = loads.index(min(loads))
        loads[shard] += len(piece)
        for index in piece:
            found[index] = shard
    return found


def implementation_of(item: pytest.Item) -> str:
    """The kernel implementation that a test was parametrised with; empty where it was not."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("implementation", "") if callspec else ""
    return found if isinstance(found, str) else ""


class Counter:
    """Pytest plugin: keeps one shard of the tests, and counts what became of them.

    Args:
        shard: of this process.
        shards: in all.
        on_result: called after every test.
    """

    def __init__(self, shard: int, shards: int, on_result: Callable[[], None]):
        self._shard, self._shards, self._on_result = shard, shards, on_result
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.implementations: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self.seconds: dict[str, float] = {}
        self._tested_with: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        # An implementation shares its programs over the tests of a function.
        groups = [f"{item.nodeid.partition('[')[0]} {implementation_of(item)}" for item in items]
        shards = assign(groups, self._shards)
        kept = [item for item, shard in zip(items, shards, strict=True) if shard == self._shard]
        others = [item for item, shard in zip(items, shards, strict=True) if shard != self._shard]
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = kept
        self._tested_with = {item.nodeid: implementation_of(item) for item in kept}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["error"] += 1
            self.failures.append(f"{report.nodeid}: {_last_line(report)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:  # in the call, or while setting up or tearing down
            self.outcomes["failed" if report.when == "call" else "error"] += 1
            self.failures.append(f"{report.nodeid}: {_last_line(report)}")
        elif report.skipped:
            self.outcomes["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.outcomes["passed"] += 1
            self.implementations[self._tested_with.get(report.nodeid) or "none named"] += 1
        if report.when == "teardown":
            self._on_result()


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return (lines or str(report.longrepr).splitlines() or ["?"])[0].removeprefix("E").strip()[:300]


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def run_suite(
    section: Section,
    targets: Sequence[str],
    *,
    keyword: str = "",
    shard: int = 0,
    shards: int = 1,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Run tests in this process and put their counts into the section.

    Args:
        section: what to fill.
        targets: files and folders.
        keyword: pytest's ``-k``.
        shard: of this process.
        shards: in all; the tests are spread over them.
        save: called after every test, so that a process that is killed leaves what it has found.
    """

    def tell() -> None:
        for name in ("passed", "failed", "error", "skipped"):
            section.numbers[name] = counter.outcomes[name]
        for name, count in counter.implementations.items():
            section.numbers[f"passed with {name}"] = count
        section.numbers["skip reasons"] = dict(counter.reasons)
        slowest = sorted(counter.seconds.items(), key=lambda pair: -pair[1])[:3]
        section.numbers["slowest, s"] = {name.rpartition("/")[2]: round(seconds, 1) for name, seconds in slowest}
        section.numbers["failures"] = list(counter.failures)
        save()

    counter = Counter(shard, shards, tell)
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "not host", *(["-k", keyword] if keyword else []), *targets]
    with _stdout_to_stderr():  # pytest's own account belongs into the log
        code = pytest.main(arguments, plugins=[counter])
    tell()
    for what, number in counter.reasons.items():
        section.skip(f"{number} tests", what)
    for failure in counter.failures:
        section.say(f"{section.label}: FAIL {failure}")
    empty = code == pytest.ExitCode.NO_TESTS_COLLECTED and shards > 1
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not empty:
        section.fail(f"pytest ended with exit code {int(code)} ({pytest.ExitCode(code).name})")
    section.number("passed", counter.outcomes["passed"])
    section.equal("failed tests", counter.outcomes["failed"] + counter.outcomes["error"], 0)
