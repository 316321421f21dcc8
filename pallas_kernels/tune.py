"""Find the fastest settings of a kernel on this device, and write them to its data file.

    python -m pallas_kernels.tune --op=paged_decode_attention --spec='4b-*'

For each spec the settings of :class:`pallas_kernels.tuned.Tunable` are tried: compiled in parallel threads, compared
with the float32 reference, timed as :mod:`pallas_kernels.bench` times, one after another. What does not compile or is
wrong is out. The default stays unless another is faster by more than ``--margin``. Specs that an entry cannot tell
apart (their shapes are the same, their lengths are not) get one that is best for all that the run has measured. Entries
of other devices and shapes in the file are kept. An op joins with a ``tuning.py`` that lists its ``TUNABLES``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import bench, distance, registry, tuned
from pallas_kernels.provenance import current_commit
from pallas_kernels.spec import Spec, specs_of, tiny_specs_of
from pallas_kernels.tuned import Entry, Tunable


@dataclasses.dataclass(frozen=True)
class Tried:
    """Settings that were tried.

    Attributes:
        settings: the settings.
        microseconds: time of a call; None if it did not come to that.
        spread: of the samples.
        error: largest relative error of the output.
        fault: why it is out; empty if it is not.
    """

    settings: Any
    microseconds: float | None = None
    spread: float = 0.0
    error: float = 0.0
    fault: str = ""


def tunables_of(op: str) -> tuple[Tunable, ...]:
    """What can be tuned of an op; nothing if it has no ``tuning.py``."""
    name = f"pallas_kernels.{op}.tuning"
    return importlib.import_module(name).TUNABLES if importlib.util.find_spec(name) else ()


def combinations(settings: Any, step: dict[str, tuple[int, ...]]) -> list[Any]:
    """The settings with every combination of a step's values."""
    return [
        dataclasses.replace(settings, **dict(zip(step, values, strict=True)))
        for values in itertools.product(*step.values())
    ]


class Workload:
    """A spec on the device, to try settings of an implementation on.

    Args:
        tunable: the implementation.
        spec: the workload.
        calls: calls of a round.
        rounds: rounds of a program.
        interpret: whether the kernels are to be interpreted: where there is no GPU.

    Raises:
        UnsupportedArguments: the implementation does not take the spec.
    """

    def __init__(self, tunable: Tunable, spec: Spec, *, calls: int, rounds: int, interpret: bool = False):
        self._tunable, self._spec, self._calls, self._rounds = tunable, spec, calls, rounds
        self._arguments, self._options = bench._device_case(spec, seed=0)
        self._registered = registry.get_op(spec.op).implementations[tunable.implementation]
        self.arguments = self._arguments | self._options
        if interpret:
            function = functools.partial(self._registered.function, interpret=True)
            self._registered = dataclasses.replace(self._registered, function=function)
        else:
            self._registered.supports(registry.current_target(), self.arguments)
        pools = {name: self._arguments[name] for name in spec.pools}
        inputs = {name: array for name, array in self._arguments.items() if name not in pools}
        self._inputs = bench.separate_inputs(inputs, calls, spec.num_layers)
        yardstick = jax.jit(bench._op(spec, registry.REFERENCE, self._options))
        self._own = yardstick(self._arguments)
        self._exact = yardstick(distance.in_float32(self._arguments))

    def candidate(self, settings: Any) -> registry.Implementation:
        """The implementation with settings."""
        function = functools.partial(self._registered.function, **{self._tunable.keyword: settings})
        return dataclasses.replace(self._registered, function=function)

    def lower(self, settings: Any) -> tuple[Any, Any]:
        """The program to time and the one to compare."""
        candidate, spec, options = self.candidate(settings), self._spec, self._options
        pools = tuple(self._arguments[name] for name in spec.pools)
        timed = jax.jit(bench.chained(spec, candidate, options, self._rounds), donate_argnums=0)
        once = jax.jit(bench._op(spec, candidate, options))
        return timed.lower(pools, self._inputs), once.lower(self._arguments)

    def measure(self, settings: Any, programs: tuple[Any, Any], **how: int) -> Tried:
        """Compare and time compiled settings."""
        pools = {name: self._arguments[name] + 0 for name in self._spec.pools}  # these are used up
        name = self._registered.name
        timed, once = programs
        calls = self._calls * self._rounds
        ready = bench.Prepared(
            self._spec,
            name,
            self._arguments | pools,
            timed,
            self._inputs,
            calls,
            once,
            reference=lambda _: self._own,
            exact=lambda _: self._exact,
        )
        found = bench.measure(ready, **how)
        wrong = found.checks["first_mismatch"]
        fault = f"wrong: {found.checks['errors']}" if wrong else ""
        return Tried(settings, found.microseconds, found.spread, found.checks["max_relative_error"], fault)


def try_all(work: Workload, wanted: Sequence[Any], threads: concurrent.futures.Executor, **how: int) -> list[Tried]:
    """Try settings: all are compiled before the first is timed."""
    waiting: list[tuple[Any, list[concurrent.futures.Future] | str]] = []
    for settings in wanted:
        try:
            waiting.append((settings, [threads.submit(program.compile) for program in work.lower(settings)]))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            waiting.append((settings, _first_line(error)))
    compiled: list[tuple[Any, Any]] = []
    for settings, programs in waiting:
        try:
            if not isinstance(programs, str):
                programs = tuple(program.result() for program in programs)
        except (ValueError, RuntimeError) as error:
            programs = _first_line(error)
        compiled.append((settings, programs))
    return [
        Tried(settings, fault=programs) if isinstance(programs, str) else work.measure(settings, programs, **how)
        for settings, programs in compiled
    ]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def best_of_all(default: Any, runs: Sequence[Sequence[Tried]], margin: float) -> Any:
    """The settings that are best for a spec, or for several together, whose times count as multiples of their fastest.

    Args:
        default: the settings without any data, which every spec has tried.
        runs: what every spec has tried, something right among it.
        margin: share by which others must beat the default.

    Raises:
        RuntimeError: no settings are right for all.
    """
    times = []
    for tried in runs:
        right = {one.settings: one.microseconds for one in tried if not one.fault}
        fastest = min(right.values())
        times.append({settings: microseconds / fastest for settings, microseconds in right.items()})
    common = [settings for settings in times[0] if all(settings in found for found in times)]
    if not common:
        raise RuntimeError("no settings that were tried for all specs of these shapes are right for all")
    means = {settings: sum(found[settings] for found in times) / len(times) for settings in common}
    best = min(common, key=lambda settings: means[settings])
    stays = default in means and means[best] > (1 - margin) * means[default]
    return default if stays else best


def tune(
    tunable: Tunable, work: Workload, threads: concurrent.futures.Executor, margin: float, **how: int
) -> tuple[Any, list[Tried]]:
    """The best settings of a workload, and all that were tried.

    Raises:
        RuntimeError: nothing that was tried is right.
    """
    default = tunable.default(work.arguments)
    best, tried = default, {}
    for step in tunable.steps:
        wanted = [s for s in combinations(best, dict(step)) if s not in tried and tunable.possible(s, work.arguments)]
        wanted = ([default] if default not in (*tried, *wanted) else []) + wanted
        tried |= {one.settings: one for one in try_all(work, wanted, threads, **how)}
        if all(one.fault for one in tried.values()):
            raise RuntimeError(f"no settings are right: {'; '.join(one.fault for one in tried.values())[:1000]}")
        best = best_of_all(default, [list(tried.values())], margin)
    return best, list(tried.values())


def table(default: Any, best: Any, tried: Sequence[Tried], top: int) -> str:
    """The fastest, the default, and what is out."""
    right = sorted((one for one in tried if not one.fault), key=lambda one: one.microseconds)
    shown = right[:top] + [one for one in right[top:] if one.settings in (default, best)]
    lines = []
    for one in shown:
        marks = [word for word, which in (("default", default), ("chosen", best)) if one.settings == which]
        lines.append(
            f"    {one.microseconds:10.2f} us  spread {one.spread:4.0%}  error {one.error:.1e}  {_words(one.settings)}"
            + (f"  <- {', '.join(marks)}" if marks else "")
        )
    lines += [f"    out: {_words(one.settings)}: {one.fault}" for one in tried if one.fault]
    return "\n".join(lines)


def _words(settings: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(settings).items())


def merged(entries: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Old entries with those of the same implementation, device and shapes replaced, in a steady order."""
    found = {_identity(entry): entry for entry in (*entries, *new)}
    return [found[key] for key in sorted(found)]


def _identity(entry: Entry) -> tuple[str, ...]:
    sizes = {name: f"{size:012d}" for name, size in entry.sizes.items()}  # in the order of the numbers
    return entry.implementation, entry.device, json.dumps(entry.exact, sort_keys=True), json.dumps(sizes)


def write(path: pathlib.Path, entries: Sequence[Entry]) -> None:
    """Write a data file, an entry a line."""
    lines = ",\n".join(" " + json.dumps(dataclasses.asdict(entry)) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if of some spec nothing was right."""
    known = {op.name: tunables_of(op.name) for op in registry.all_ops()}
    names = [op for op, found in known.items() if found]
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="*", help=f"pattern over {', '.join(names)}")
    parser.add_argument("--implementation", default="*", help="pattern over the tunable ones")
    parser.add_argument("--spec", default="4b-*", help="pattern over spec names")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny specs, interpreted: to try this program without a GPU"
    )
    parser.add_argument("--calls", type=int, default=4, help="calls of a round, each with inputs of its own")
    parser.add_argument("--dispatches", type=int, default=2, help="programs a sample")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--margin", type=float, default=0.01, help="share by which another must beat the default")
    parser.add_argument("--top", type=int, default=4, help="how many settings of a spec to print")
    parser.add_argument("--directory", default=None, help="write <op>/tuned.json there instead of into the package")
    options = parser.parse_args(argv)
    chosen = [
        (tunable, spec)
        for op in names
        if fnmatch.fnmatch(op, options.op)
        for tunable in known[op]
        if fnmatch.fnmatch(tunable.implementation, options.implementation)
        for name, spec in (tiny_specs_of(op) if options.tiny else specs_of(op)).items()
        if fnmatch.fnmatch(name, options.spec)
    ]
    if not chosen:
        parser.error(
            f"nothing matches --op={options.op} --implementation={options.implementation} --spec={options.spec}"
        )
    ceilings = bench.measure_ceilings(1 << (20 if options.tiny else 28))
    device, commit, failed = jax.devices()[0].device_kind, current_commit(), False
    same: dict[tuple[str, ...], list[tuple[str, list[Tried]]]] = {}  # specs of one entry
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for tunable, spec in chosen:
            name = f"{spec.op}/{tunable.implementation}/{spec.name}"
            spec = spec if options.tiny else bench.with_cold_layers(spec, options.calls)
            rounds = 1 if options.tiny else bench.rounds_for(spec, options.calls, ceilings)
            try:
                work = Workload(tunable, spec, calls=options.calls, rounds=rounds, interpret=options.tiny)
            except registry.UnsupportedArguments as refusal:
                print(f"{name}: not tuned: {refusal}", file=sys.stderr)
                continue
            how = {"dispatches": options.dispatches, "samples": options.samples}
            try:
                best, tried = tune(tunable, work, threads, options.margin, **how)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed = True
                continue
            print(f"{name}:\n{table(tunable.default(work.arguments), best, tried, options.top)}", flush=True)
            exact, sizes = tunable.key(work.arguments)
            entry = Entry(tunable.implementation, device, dict(exact), dict(sizes), {}, {})
            specs = same.setdefault((spec.op, *_identity(entry)), [])
            specs.append((spec.name, tried))
            try:
                best = best_of_all(tunable.default(work.arguments), [tried for _, tried in specs], options.margin)
            except RuntimeError as error:
                print(f"{name}: {error}; the entry stays as it is", file=sys.stderr)
                specs.pop()
                failed = True
                continue
            if len(specs) > 1:
                print(f"    for {' and '.join(spec for spec, _ in specs)}: {_words(best)}", flush=True)
            measured = {"spec": ", ".join(spec for spec, _ in specs), "commit": commit}
            entry = dataclasses.replace(entry, use=dataclasses.asdict(best), measured=measured)
            # At once: a run that is cut short keeps what it has found.
            path = (
                pathlib.Path(options.directory, spec.op, "tuned.json") if options.directory else tuned.path_of(spec.op)
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, merged(tuned.read(path), [entry]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
