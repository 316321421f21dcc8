"""One timing harness for every op, implementation and spec.

    python -m pallas_kernels.bench --op=gdn_decode --spec='4b-*' --output=benchmarks/results/kernels.json

A figure is the time of one call inside a compiled program: calls are chained (each waits for the one before, pools are
donated and updated in place), many to a program and several programs to a sample, so neither dispatch nor a copy
of a pool is in it; calls take the layers of the pools in turns, so that they find these in memory, as a model does.
Beside it stand the bytes and operations that any implementation must spend (:mod:`spec`), the ceilings of the device,
and the distance of output and pools from the float32 reference on the same arguments, computed in the same run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from pallas_kernels import distance, records, registry
from pallas_kernels.ceilings import COLD_BYTES, Ceilings, measure_ceilings
from pallas_kernels.provenance import current_commit
from pallas_kernels.spec import Case, Spec, specs_of, tiny_specs_of

_PROGRAM_S = 4e-3  # a timed program should take so long at the least: several times what its dispatch takes
_SHORTEST_CALL_S = 5e-6  # an op is a launch or two
_MOST_ROUNDS = 64


class Peer(NamedTuple):
    """Another library's function for the work of a spec.

    Attributes:
        name: of it.
        microseconds: of a call, in this run.
        gated: the same where the op also gates its output and the function does not: with the gate as another kernel.
    """

    name: str
    microseconds: float
    gated: float | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One measured spec.

    Attributes:
        spec: the workload.
        implementation: name of the implementation that ran.
        microseconds: median time of a call.
        spread: (slowest - fastest) / median over the samples.
        checks: distance from the float32 reference.
        peer: another library's function for the same work.
    """

    spec: Spec
    implementation: str
    microseconds: float
    spread: float
    checks: dict[str, Any]
    peer: Peer | None = None

    @property
    def bytes_per_s(self) -> float:
        """Compulsory bytes over time."""
        return self.spec.compulsory_bytes() / self.microseconds * 1e6

    @property
    def flops_per_s(self) -> float:
        """Operations over time."""
        return self.spec.flops() / self.microseconds * 1e6

    def share(self, ceilings: Ceilings) -> float | None:
        """Share of the ceiling that bounds the op, None where that ceiling is unknown."""
        if self.spec.bound == "bytes":
            return self.bytes_per_s / ceilings.bytes_per_s
        return self.flops_per_s / ceilings.flops_per_s if ceilings.flops_per_s else None


def _device_case(spec: Spec, seed: int) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    case: Case = spec.case(seed)
    return {name: jnp.asarray(array) for name, array in case.arguments.items()}, case.options


def _op(
    spec: Spec, implementation: str | registry.Implementation, options: dict[str, Any]
) -> Callable[[dict], tuple[jax.Array, tuple]]:
    """The op as a function of its arguments, returning (output, updated pools).

    An implementation given itself instead of its name (one with settings of its own) need not be registered.
    """
    if isinstance(implementation, registry.Implementation):
        function = jax.jit(functools.partial(implementation.function, **options))
    else:
        function = functools.partial(getattr(pallas_kernels, spec.op), **options, implementation=implementation)

    def run(arguments):
        results = function(**arguments)
        results = results if isinstance(results, tuple) else (results,)
        return results[0], results[len(results) - len(spec.pools) :]

    return run


def chained(spec: Spec, implementation: str | registry.Implementation, options: dict[str, Any], rounds: int = 1):
    """A program of several calls in a row: ``(pools, inputs of each call) -> (output, pools)``; donate the pools.

    Each call has inputs of its own (else the compiler would merge what the calls have in common) and waits for the
    one before it: through the pools, or, where an op updates none, through its output, which stands for one of the next
    one's arguments or, where none has its shape, holds them back by a barrier. Behind a barrier the compiler drops what
    nobody uses, and with it the call: so such a program adds a number of every output up, a small kernel a round, and
    returns that sum beside the output. The calls are repeated ``rounds`` times in a loop of static length, which costs
    the host nothing: a program so lasts longer than its dispatch. A barrier keeps what the calls share with the round
    before in the loop.
    """
    run = _op(spec, implementation, options)
    by_barrier = not spec.pools and spec.chained is None

    def one_round(out, pools: tuple[jax.Array, ...], inputs: Sequence[dict[str, jax.Array]]):
        for arguments in inputs:
            if out is not None and not spec.pools:
                arguments = arguments | {spec.chained: out}
            out, pools = run(arguments | dict(zip(spec.pools, pools, strict=True)))
        return out, pools

    def one_round_by_barriers(found, pools: tuple[()], inputs: Sequence[dict[str, jax.Array]]):
        out, total = found or (None, jnp.float32(0))
        for arguments in inputs:
            if out is not None:
                arguments, out = lax.optimization_barrier((arguments, out))
                total += out.ravel()[0].astype(jnp.float32)
            out, _ = run(arguments)
        return (out, total), pools

    a_round = one_round_by_barriers if by_barrier else one_round

    def another(_, carry):
        out, pools, inputs = lax.optimization_barrier(carry)
        return (*a_round(out, pools, inputs), inputs)

    def program(pools: tuple[jax.Array, ...], inputs: Sequence[dict[str, jax.Array]]):
        out, pools = a_round(None, pools, inputs)
        if rounds > 1:
            out, pools, _ = lax.fori_loop(1, rounds, another, (out, pools, inputs))
        return out, pools

    return program


def with_cold_layers(spec: Spec, calls: int) -> Spec:
    """The spec with so many layers of its pools, up to one a call, that they do not fit into the L2 cache.

    A layer of a model finds its state and its keys in memory: a chain of calls on one layer of a few rows would find
    them in the cache, and be faster than memory allows.
    """
    case = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, spec.case().arguments))
    one_layer = sum(
        array.size // array.shape[0] * array.dtype.itemsize for name, array in case.items() if name.endswith("_pool")
    )
    if not one_layer:
        return spec  # the op works on no layer of a pool
    return dataclasses.replace(spec, num_layers=max(spec.num_layers, min(calls, -(-COLD_BYTES // one_layer))))


def separate_inputs(arguments: dict[str, jax.Array], calls: int, layers: int = 1) -> list[dict[str, jax.Array]]:
    """Copies of the arguments, one a call; a pool that is only read is shared (it may be gigabytes).

    Args:
        arguments: of a call.
        calls: how many.
        layers: of the pools; calls take them in turns, from the one of the arguments on downwards.
    """
    shared = {name: array for name, array in arguments.items() if name.endswith("_pool")}
    own = {name: array for name, array in arguments.items() if name not in shared}
    inputs = [shared | jax.tree.map(jnp.copy, own) for _ in range(calls)]
    if "layer" in arguments:
        for number, one in enumerate(inputs):
            one["layer"] = (arguments["layer"] - number) % layers
    return inputs


def rounds_for(spec: Spec, calls: int, ceilings: Ceilings) -> int:
    """Rounds that make a program last a few milliseconds, from what a call must take: its host time must not count."""
    floor = max(
        spec.compulsory_bytes() / ceilings.bytes_per_s,
        spec.flops() / ceilings.flops_per_s if ceilings.flops_per_s else 0.0,
        _SHORTEST_CALL_S,
    )
    return max(1, min(_MOST_ROUNDS, round(_PROGRAM_S / (floor * calls))))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A spec with its data on the device and its programs compiled.

    Attributes:
        spec: the workload.
        implementation: the name of what runs.
        arguments: of a call, pools included.
        timed: the chained program.
        timed_inputs: its inputs, pools left out.
        calls: that one run of it makes.
        once: one call of the implementation.
        reference: one call of the reference, in the spec's dtype.
        exact: one call of the reference, on the same numbers in float32.
    """

    spec: Spec
    implementation: str
    arguments: dict[str, jax.Array]
    timed: Callable
    timed_inputs: list[dict[str, jax.Array]]
    calls: int
    once: Callable
    reference: Callable
    exact: Callable


def prepare(
    spec: Spec,
    implementation: str,
    *,
    calls: int,
    rounds: int,
    case: tuple[dict[str, jax.Array], dict[str, Any]] | None = None,
    compiling: Callable[[Callable], Any] | None = None,
) -> Callable[[], Prepared]:
    """Traces a spec's programs; what is returned waits until they are compiled.

    Args:
        spec: the workload.
        implementation: "auto" or a name.
        calls: calls of a round.
        rounds: of a program.
        case: its arguments, on the device, and options; None makes them.
        compiling: starts a function somewhere and returns a function that gives its result; None runs it at once.

    Raises:
        UnsupportedArguments: the implementation does not take the spec.
    """
    start = compiling or (lambda compile_it: functools.partial(lambda result: result, compile_it()))
    arguments, options = case or _device_case(spec, seed=0)
    chosen = registry.get_op(spec.op).select(implementation, arguments | options).name
    pools = tuple(arguments[name] for name in spec.pools)
    inputs = {name: array for name, array in arguments.items() if name not in spec.pools}
    inputs = separate_inputs(inputs, calls, spec.num_layers)
    one = _op(spec, chosen, options)
    yardstick = _op(spec, registry.REFERENCE, options)
    programs = (
        jax.jit(chained(spec, chosen, options, rounds), donate_argnums=0).lower(pools, inputs),
        jax.jit(one).lower(arguments),
        jax.jit(yardstick).lower(arguments),
        jax.jit(yardstick).lower(jax.eval_shape(distance.in_float32, arguments)),
    )
    waiting = [start(program.compile) for program in programs]

    def ready() -> Prepared:
        timed, once, reference, exact = (wait() for wait in waiting)
        return Prepared(spec, chosen, arguments, timed, inputs, calls * rounds, once, reference, exact)

    return ready


def measure(ready: Prepared, *, dispatches: int = 8, samples: int = 5) -> Measurement:
    """Compare with the reference, then time.

    Args:
        ready: what to run; its pools are used up.
        dispatches: programs a sample.
        samples: samples; the median counts.
    """
    checks = compare(ready)
    pools = tuple(ready.arguments.pop(name) for name in ready.spec.pools)
    out, pools = ready.timed(pools, ready.timed_inputs)
    jax.block_until_ready(out)
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(dispatches):
            out, pools = ready.timed(pools, ready.timed_inputs)
        jax.block_until_ready((out, pools))
        times.append((time.perf_counter() - start) / (dispatches * ready.calls))
    middle = statistics.median(times)
    spread = (max(times) - min(times)) / middle
    return Measurement(ready.spec, ready.implementation, middle * 1e6, spread, checks)


def compare(ready: Prepared) -> dict[str, Any]:
    """Distance of output and updated pools from the float32 reference on the same numbers, see :mod:`distance`."""
    own = (distance.without_null(function(ready.arguments)) for function in (ready.once, ready.reference))
    exact = distance.without_null(ready.exact(distance.in_float32(ready.arguments)))
    return distance.checks(ready.spec.pools, *own, exact)


def record(
    measurement: Measurement,
    ceilings: Ceilings,
    settings: dict[str, Any],
    command: str,
    commit: str,
    variant: str = "",
) -> dict[str, Any]:
    """A result record of the project's results files, of something measured just now.

    Args:
        measurement: without its peer, see :func:`with_peer`.
        ceilings: of the device.
        settings: of the run.
        command: of the run.
        commit: of the code.
        variant: suffix of the cell, see :func:`pallas_kernels.records.variant`.
    """
    spec = measurement.spec
    metrics: dict[str, Any] = {"us": measurement.microseconds, "spread": measurement.spread}
    if spec.bound == "bytes":
        metrics["tb_s"] = measurement.bytes_per_s / 1e12
    else:
        metrics["tflop_s"] = measurement.flops_per_s / 1e12
    metrics["share_of_ceiling"] = measurement.share(ceilings)
    metrics["measured_copy_tb_s"] = ceilings.measured_bytes_per_s / 1e12
    settings = {
        "implementation": measurement.implementation,
        "dtype": spec.dtype,
        "layers": spec.num_layers,
        **settings,
    }
    cell = f"kernel/{spec.op}/{spec.name}{variant}"
    return records.result(cell, metrics, settings, measurement.checks, command, commit)


def with_peer(record: dict[str, Any], peer: Peer) -> dict[str, Any]:
    """A record that also says what another library took; its date stays that of our own time."""
    metrics, settings = record["metrics"] | {"peer_us": peer.microseconds}, {"peer": peer.name} | record["settings"]
    if peer.gated is not None:
        metrics["peer_gated_us"] = peer.gated
    return record | {"metrics": metrics, "settings": settings}


def _told(peer: Peer | None) -> str:
    if peer is None:
        return ""
    gated = "" if peer.gated is None else f", {peer.gated:.1f} with the gate"
    return f"{peer.name} {peer.microseconds:.1f} us{gated}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(measurements: Sequence[Measurement], ceilings: Ceilings) -> str:
    """The measurements as text."""
    header = ("op", "spec", "implementation", "us", "spread", "TB/s", "TFLOP/s", "share", "rel. error", "peer")
    rows = [header]
    for item in measurements:
        share = item.share(ceilings)
        rows.append(
            (
                item.spec.op,
                item.spec.name,
                item.implementation,
                f"{item.microseconds:.1f}",
                f"{item.spread:.0%}",
                f"{item.bytes_per_s / 1e12:.3f}",
                f"{item.flops_per_s / 1e12:.2f}",
                "-" if share is None else f"{share:.2f}",
                f"{item.checks['max_relative_error']:.1e}" + (" WRONG" if item.checks["first_mismatch"] else ""),
                _told(item.peer),
            )
        )
    return "\n".join(records.aligned(rows))


def main(
    argv: Sequence[str] | None = None,
    *,
    program: str = "python -m pallas_kernels.bench",
    peer: Callable[[Spec], Peer | None] | None = None,
    check: Callable[[Sequence[Spec]], None] | None = None,
) -> int:
    """Command line; returns 1 if an output was wrong, a peer failed, or no spec could be measured.

    Args:
        argv: the flags; None takes the process's own.
        program: what was called, for the records.
        peer: another library's function for a spec, timed, or None where there is none. Peers come after all of our own
            times, which neither their failures nor what they leave on the device can touch.
        check: called with the chosen specs before anything is compiled; raises what makes the run pointless.
    """
    ops = [op.name for op in registry.all_ops()]
    parser = argparse.ArgumentParser(prog=program, description="Time the kernels.")
    parser.add_argument("--op", default="*", help=f"pattern over {', '.join(ops)}")
    parser.add_argument("--spec", default="4b-*", help="pattern over spec names")
    parser.add_argument("--tiny", action="store_true", help="tiny specs only, all of them unless --spec is given")
    parser.add_argument(
        "--implementation", default=registry.AUTO, help="by name, which then is in the name of the cell"
    )
    parser.add_argument(
        "--dtype",
        default=None,
        choices=list(records.DTYPE_SUFFIXES),
        help="of activations, instead of the spec's; if it is another, the name of the cell says so",
    )
    parser.add_argument("--calls", type=int, default=8, help="calls of a round, each with inputs of its own")
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds a program; 0: so many that its dispatch is hidden"
    )
    parser.add_argument("--dispatches", type=int, default=8, help="programs a sample")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--copy-bytes", type=int, default=1 << 30, help="size of the copy that measures the memory")
    parser.add_argument("--output", default=None, help="JSON file to append the records to")
    options = parser.parse_args(argv)
    pattern = "*" if options.tiny and options.spec == parser.get_default("spec") else options.spec
    chosen = [
        spec
        for op in ops
        if fnmatch.fnmatch(op, options.op)
        for name, spec in (tiny_specs_of(op) if options.tiny else specs_of(op)).items()
        if fnmatch.fnmatch(name, pattern)
    ]
    if not chosen:
        parser.error(f"no spec matches --op={options.op} --spec={pattern}")
    if jax.default_backend() != "gpu" and not options.tiny:
        parser.error(f"needs a GPU, the backend is {jax.default_backend()} (--tiny tries the command anywhere)")
    if check is not None:
        check(chosen)
    try:
        kept = records.ResultsFile(options.output)
    except ValueError as error:
        parser.error(f"--output: {error}")
    commit = current_commit()
    command = f"{program} {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()
    ceilings = measure_ceilings(options.copy_bytes)
    settings = {"calls": options.calls, "dispatches": options.dispatches, "samples": options.samples}
    measurements: list[Measurement] = []
    own: list[dict[str, Any]] = []
    named = None if options.implementation == registry.AUTO else options.implementation

    # All is compiled before anything is timed: trying products on the device while another program is being timed
    # would disturb it.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        usual = {(spec.op, spec.name): spec.dtype for spec in chosen}
        if options.dtype:
            chosen = [dataclasses.replace(spec, dtype=options.dtype) for spec in chosen]
        if not options.tiny:
            chosen = [with_cold_layers(spec, options.calls) for spec in chosen]
        waiting, cases = [], [threads.submit(_device_case, spec, 0) for spec in chosen]
        for number, (spec, case) in enumerate(zip(chosen, cases, strict=True), 1):
            _say(f"tracing {number} of {len(chosen)}: {spec.op}/{spec.name}")
            rounds = options.rounds or rounds_for(spec, options.calls, ceilings)
            try:
                waiting.append(
                    prepare(
                        spec,
                        options.implementation,
                        calls=options.calls,
                        rounds=rounds,
                        case=case.result(),
                        compiling=lambda compile_it: threads.submit(compile_it).result,
                    )
                )
            except registry.UnsupportedArguments as refusal:
                _say(f"{spec.op}/{spec.name}: not measured: {refusal}")
        del case, cases  # what has been timed frees its data
        _say(f"compiling {4 * len(waiting)} programs")
        prepared = [ready() for ready in waiting]
    while prepared:
        ready = prepared.pop(0)  # its data is freed with it
        _say(f"timing {ready.spec.op}/{ready.spec.name}, {len(prepared)} to come")
        spec = ready.spec
        measurements.append(measure(ready, dispatches=options.dispatches, samples=options.samples))
        other = spec.dtype if spec.dtype != usual[spec.op, spec.name] else None
        variant = records.variant(dtype=other, implementation=named)
        own.append(record(measurements[-1], ceilings, settings, command, commit, variant))
        kept.keep(own)
    broken = False
    for number, item in enumerate(measurements if peer is not None else ()):
        _say(f"{item.spec.op}/{item.spec.name}: the peer")
        try:
            found = peer(item.spec)
        except Exception as error:  # another library's, of any kind: the next one may be all right
            _say(f"{item.spec.op}/{item.spec.name}: the peer failed: {type(error).__name__}: {error}")
            broken = True
            continue
        if found is not None:
            measurements[number], own[number] = dataclasses.replace(item, peer=found), with_peer(own[number], found)
            kept.keep(own)
    if not measurements:
        _say("error: nothing was measured")
        return 1
    print(f"{jax.devices()[0].device_kind}: copy {ceilings.measured_bytes_per_s / 1e12:.3f} TB/s in this run")
    print(table(measurements, ceilings))
    return 1 if broken or any(item.checks["first_mismatch"] for item in measurements) else 0


if __name__ == "__main__":
    sys.exit(main())
