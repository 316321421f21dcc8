"""Every op under compute-sanitizer: out-of-bounds accesses, races, uninitialised reads, misused barriers.

    python -m pallas_kernels.sanitize --output=benchmarks/sanitizer/kernels.json

A process for each op and tool runs the op's kernel on small poisoned workloads (:data:`MODELS`), several processes at
a time. Memory comes from the driver one array at a time instead of from XLA's pool, so that memcheck knows where each
array ends, and CUDA graphs are off. What is run is the implementation that is first among those that take the workload,
and, where "auto" leaves it to another kernel for the sake of speed, that one too; another one runs if it is named.

initcheck knows nothing of what the copy engine writes: outputs that left in whole tiles are uninitialised to it, and so
it complains of whoever copies them, XLA or the host. Such copies are counted by themselves; what kernels read counts.

The result is a table, and a JSON file that keeps for each op and tool the verdict (``clean``, ``errors``, ``no
verdict`` when tool and workloads did not all come to an end), the counts, and the first messages without host frames.
The file is written after every verdict and names what is ``to_come``: nothing, once the run has ended.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import pallas_kernels
from pallas_kernels import records, registry
from pallas_kernels.provenance import current_commit
from pallas_kernels.spec import Spec, tiny_specs_of

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MODELS = ("tiny2", "tiny3")
MOST_MESSAGES = 4
RAN = "ran "
"""How the line begins with which a child says what it ran."""

_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (?P<errors>\d+) error|RACECHECK SUMMARY: (?P<hazards>\d+) hazard)")
_RACES = re.compile(r"\((?P<errors>\d+) errors?, (?P<warnings>\d+) warnings?\)")
_COPIED = re.compile(r"Uninitialized access to \S+ on access by cudaMemcpy source")
_COPYING = re.compile(r"Host API memory access error at host access")
_NOISE = re.compile(r"Host Frame|Saved host backtrace|^\s*$|SUMMARY|COMPUTE-SANITIZER|\[0x[0-9a-f]+\]$")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one tool said of one op.

    Attributes:
        op: the op.
        tool: one of :data:`TOOLS`.
        ran: implementations by spec, with a plus between them; empty if the child did not get that far.
        verdict: "clean", "errors" or "no verdict".
        errors: number of errors, of racecheck those hazards that it calls errors.
        warnings: hazards that racecheck calls warnings.
        copies: complaints of initcheck about copies of what the copy engine wrote, which are no errors.
        messages: the first of them, or the end of the output where there is no verdict.
    """

    op: str
    tool: str
    ran: dict[str, str]
    verdict: str
    errors: int
    warnings: int
    messages: tuple[str, ...]
    copies: int = 0


def find_tool(name: str = "compute-sanitizer") -> str | None:
    """Path of compute-sanitizer: on PATH, or in the CUDA toolkit's usual places."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [os.path.join(home, "bin", name) for home in homes if home]
    return shutil.which(name) or next((place for place in places if os.access(place, os.X_OK)), None)


def kernels_of(op: str, arguments: dict[str, Any]) -> tuple[str, ...]:
    """The implementations to run: the best that takes this, and what "auto" leaves it to if that is another kernel."""
    left_to = registry.get_op(op).select(registry.AUTO, arguments).name
    best = _best_kernel(op, arguments)
    return (best,) if left_to in (best, registry.REFERENCE) else (best, left_to)


def _best_kernel(op: str, arguments: dict[str, Any]) -> str:
    for name, implementation in registry.get_op(op).implementations.items():
        try:
            implementation.supports(registry.current_target(), arguments)
        except registry.UnsupportedArguments:
            continue
        if name != registry.REFERENCE:
            return name
    return registry.REFERENCE


def workloads(op: str) -> list[Spec]:
    """What an op is run on."""
    return [spec for spec in tiny_specs_of(op).values() if spec.model.name in MODELS]


def run_op(op: str, implementation: str | None = None) -> None:
    """What a child does: run the op on its workloads and look at the results.

    Raises:
        FloatingPointError: an output is not finite.
    """
    for spec in workloads(op):
        case = spec.case(1, poison=True)
        arguments = {name: jax.device_put(array) for name, array in case.arguments.items()}
        names = (implementation,) if implementation else kernels_of(op, arguments | case.options)
        for name in names:
            results = getattr(pallas_kernels, op)(**arguments, **case.options, implementation=name)
            out = np.asarray(results[0] if isinstance(results, tuple) else results).astype(np.float32)
            if not np.isfinite(out).all():
                raise FloatingPointError(f"{op}/{spec.name}: an output of {name} is not finite")
        print(f"{RAN}{spec.name} {'+'.join(names)}", flush=True)


def read_verdict(op: str, tool: str, output: str, returncode: int, wanted: Sequence[str]) -> Verdict:
    """What the output of compute-sanitizer around a child says.

    Args:
        op: the op.
        tool: one of :data:`TOOLS`.
        output: what tool and child printed.
        returncode: of the tool.
        wanted: names of the workloads that the child was to run: zero errors of fewer are no verdict.
    """
    ran = dict(line.removeprefix(RAN).split() for line in output.splitlines() if line.startswith(RAN))
    marked = [line.removeprefix("=========").rstrip() for line in output.splitlines() if line.startswith("=========")]
    summary = next((match for line in reversed(marked) if (match := _SUMMARY.search(line))), None)
    copies = sum(bool(_COPIED.search(line)) for line in marked)
    errors = warnings = 0
    if summary is not None:
        errors = int(summary["errors"] or summary["hazards"])
        if summary["hazards"] and (races := _RACES.search(summary.string)):
            errors, warnings = int(races["errors"]), int(races["warnings"])
        errors -= copies
    if summary is None or not ran or (not errors and ran.keys() != set(wanted)):
        tail = [_without_paths(line) for line in output.splitlines() if line.strip()]
        reason = f"exit code {returncode}"
        return Verdict(op, tool, ran, "no verdict", 0, 0, (reason, *tail[-MOST_MESSAGES:]))
    lines = (line for line in marked if not (_NOISE.search(line) or _COPIED.search(line) or _COPYING.search(line)))
    messages = tuple(_without_paths(line).strip() for line in lines)[:MOST_MESSAGES]
    return Verdict(op, tool, ran, "errors" if errors else "clean", errors, warnings, messages, copies)


def _without_paths(line: str) -> str:
    """The line with every path reduced to its last part."""
    return re.sub(r"(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", line)


class Children:
    """The processes of a run, which end with it: each is the leader of a group that no signal to the run reaches."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start one, its output in one pipe.

        Raises:
            CancelledError: the run has ended.
        """
        with self._lock:
            if self._ended:
                raise concurrent.futures.CancelledError
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
            self._running.add(process)
            return process

    def forget(self, process: subprocess.Popen[str]) -> None:
        """It has ended, and been waited for."""
        with self._lock:
            self._running.discard(process)

    def end(self) -> None:
        """Kill all, and start no more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the tool and the program in it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended just now


def check(
    sanitizer: str, op: str, tool: str, implementation: str | None, timeout: float, children: Children
) -> Verdict:
    """Run one op under one tool.

    Raises:
        CancelledError: the run has ended.
    """
    child = [sys.executable, "-m", "pallas_kernels.sanitize", f"--child={op}"]
    child += [f"--implementation={implementation}"] if implementation else []
    # Calls of the CUDA API that fail are no faults of a kernel: XLA tries what a device can do.
    own = ["--report-api-errors=no"] if tool == "memcheck" else []
    # All of them: what copies are complained of must not be taken for errors.
    own += ["--print-limit=1000000" if tool == "initcheck" else "--print-limit=20"]
    command = [sanitizer, f"--tool={tool}", *own, *child]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": flags.strip(),
        "CUDA_MODULE_LOADING": "LAZY",
    }
    process = children.start(command, environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        output += f"\nstopped after {timeout:.0f} s"
    children.forget(process)
    return read_verdict(op, tool, output, process.returncode, [spec.name for spec in workloads(op)])


def table(verdicts: Sequence[Verdict]) -> str:
    """Ops down, tools across, then the messages."""
    tools = list(dict.fromkeys(verdict.tool for verdict in verdicts))
    found = {(verdict.op, verdict.tool): verdict for verdict in verdicts}

    def cell(verdict: Verdict) -> str:
        numbers = {"errors": verdict.errors, "warnings": verdict.warnings}
        return ", ".join(f"{number} {name}" for name, number in numbers.items() if number) or verdict.verdict

    rows = [["op", "implementation", *tools]]
    for op in dict.fromkeys(verdict.op for verdict in verdicts):
        of_op = [found[op, tool] for tool in tools]
        ran = dict.fromkeys(name for verdict in of_op for name in verdict.ran.values())
        rows.append([op, ", ".join(ran) or "-", *(cell(verdict) for verdict in of_op)])
    lines = records.aligned(rows)
    for verdict in verdicts:
        if verdict.messages:
            lines.append(f"{verdict.op}, {verdict.tool}:")
            lines += [f"    {message}" for message in verdict.messages]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if there were errors or no verdict, 2 if compute-sanitizer or a GPU is missing."""
    ops = [op.name for op in registry.all_ops()]
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(ops), help="ops with commas between them")
    parser.add_argument("--tools", default=",".join(TOOLS), help="tools with commas between them")
    parser.add_argument("--implementation", default=None, help="a name instead of what auto chooses")
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 2) // 2), help="at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one op under one tool")
    parser.add_argument("--output", default=None, help="JSON file to write, in the place of what is there")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        run_op(options.child, options.implementation)
        return 0
    wanted, tools = options.ops.split(","), options.tools.split(",")
    for flag, names, known in (("--ops", wanted, ops), ("--tools", tools, TOOLS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"{flag}: {unknown[0]!r} is none of {', '.join(known)}")
    if options.output and (why := records.unwritable(options.output)):
        parser.error(f"--output: {options.output} {why}")
    sanitizer = find_tool()
    if sanitizer is None:
        print("error: compute-sanitizer is neither on PATH nor in the CUDA toolkit (CUDA_HOME)", file=sys.stderr)
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the memory is the children's
    if jax.default_backend() != "gpu":
        print(f"error: needs a GPU, the backend is {jax.default_backend()}", file=sys.stderr)
        return 2
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    command = ["python", "-m", "pallas_kernels.sanitize", *(sys.argv[1:] if argv is None else argv)]
    about = records.result("", {}, {}, {}, shlex.join(command), current_commit())
    about = {name: about[name] for name in ("device", "commit", "jax", "command", "date")}
    about |= {"tool": _without_paths(version[-1]) if version else "unknown"}
    tools.sort(key=lambda tool: tool != "racecheck")  # the slowest first
    children, pool = Children(), concurrent.futures.ThreadPoolExecutor(options.processes)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        pending = {
            pool.submit(check, sanitizer, op, tool, options.implementation, options.timeout, children): (op, tool)
            for tool in tools
            for op in wanted
        }
        for _ in concurrent.futures.as_completed(pending):  # a run that is cut keeps what it has
            ended = [one for one in pending if one.done() and not one.exception()]
            runs = [dataclasses.asdict(one.result()) for one in ended]
            if options.output:
                to_come = [pair for one, pair in pending.items() if one not in ended]
                records.write_json(options.output, about | {"runs": runs, "to_come": to_come})
        verdicts = [future.result() for future in pending]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        children.end()
        signal.signal(signal.SIGTERM, before)
    print(table(verdicts))
    return 1 if any(verdict.verdict != "clean" for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
