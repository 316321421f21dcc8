"""Measures everything again on a GPU, one command after the other, and files it under benchmarks/: one command.

    python scripts/measure_all.py --presets=4b --time_limit=1800
    python scripts/measure_all.py --parts=kernels,peers --dry_run

Nothing runs beside a measurement: each command is a process of its own that has the device for itself, and appends to
the results files what it has as soon as it has it. One that takes longer than its limit is killed, and one whose limit
no longer fits into --time_limit is left out; both are named at the end, and the exit code is then 1. The parts:

  start     a job of 1,024 requests from the start of the process, nothing cached; its programs serve the next two
  steps     single decode and prefill steps, timed and profiled
  load      a start with cached programs, clients in a closed loop, arrivals in an open one
  long      a prefill step of one prompt, and 131,072 tokens in chunks
  kernels   every operation on the preset's shapes, a process each
  products  the products of a prefill, after a pause and for as long as a job goes on
  peers     the operations that other libraries have, beside them in one run (flash-linear-attention, cuDNN)
  drift     a bfloat16 recurrent state over 2,000 steps
  sanitize  every operation under compute-sanitizer
  check     scripts/gpu_check.py, all of it

Afterwards scripts/bench_report.py makes the tables and pictures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pallas_kernels import registry  # noqa: E402
from pallas_kernels.spec import REAL_MODELS  # noqa: E402
from qwen35_jax.cli.common import CommandLine, names_in_order, run_command, run_with_flags  # noqa: E402
from qwen35_jax.errors import UserInputError  # noqa: E402
from qwen35_jax.presets import PRESETS  # noqa: E402
from scripts.gpu_check import environment, probe  # noqa: E402

PARTS = ("start", "steps", "load", "long", "kernels", "products", "peers", "drift", "sanitize", "check")
DEFAULT_PARTS = ("start", "steps", "load", "long", "kernels", "products")
OF_REAL_MODELS = ("kernels", "peers", "drift")  # their shapes are those of the family's members
PEER_OPS = ("paged_prefill_attention", "gdn_prefill")
_GRACE_S = 5.0  # between asking a process to end and ending it
_ENGINE = ("--max_model_len=4096",)


@dataclasses.dataclass(frozen=True)
class Step:
    """A command to run.

    Attributes:
        name: part, preset and operation, for people.
        arguments: of the Python interpreter, from the root of the checkout.
        limit_s: seconds on an H200 with 16 cores after which it is killed.
        files: what it writes.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    files: tuple[str, ...]

    @property
    def command(self) -> str:
        """The step as a line of a shell."""
        return shlex.join(["python", *self.arguments])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        step: the step.
        verdict: "done", or what went wrong.
        seconds: it took; 0 if it was not begun.
    """

    step: Step
    verdict: str
    seconds: float

    @property
    def done(self) -> bool:
        """Whether it ended by itself, with nothing wrong."""
        return self.verdict == "done"


def steps_of(parts: Sequence[str], presets: Sequence[str], folder: str, now: datetime.datetime) -> list[Step]:
    """The commands for some parts and presets, in the order in which they run.

    Args:
        parts: of :data:`PARTS`.
        presets: names of models.
        folder: where results and reports go, relative to the root of the checkout.
        now: names the files (its date) and the directory of compiled programs, which must be new.
    """
    day, steps = f"{now:%Y-%m-%d}", []
    for preset in presets:
        results, kernels = f"{folder}/results/{day}-{preset}.json", f"{folder}/results/{day}-kernels-{preset}.json"
        programs = (f"--compilation_cache_dir=out/programs/{now:%Y%m%dT%H%M%S}-{preset}",)
        model, into = (f"--preset={preset}",), (f"--results={results}",)
        bench = ("-m", "qwen35_jax.cli.bench")
        profile = ("scripts/profile_step.py", *model)
        if "start" in parts:
            job = ("throughput", "--input_len=1024", "--output_len=128", "--num_requests=1024", "--start_cell=cold")
            arguments = (*bench, job[0], *model, *_ENGINE, *job[1:], *programs, *into)
            steps.append(Step(f"start {preset}", arguments, 240, (results,)))
        if "steps" in parts:
            rows = ("--decode_rows=1,8,16,64,128,256", "--prefill=1x1024,4x1024,8x1024,ragged")
            steps.append(Step(f"steps {preset}", (*profile, *_ENGINE, *rows, *programs, *into), 180, (results,)))
        if "load" in parts:
            # A warm start is only claimed when every program is loaded: without the part `start` there are none.
            warm = ("--start_cell=warm",) if "start" in parts else ()
            cells = ("--cells=closed:1024x256:c8:32,open:1024x128:qps16:160",)
            arguments = (*bench, *cells, *model, *_ENGINE, *warm, *programs, *into)
            steps.append(Step(f"load {preset}", arguments, 240, (results,)))
        if "long" in parts:
            sizes = ("--max_model_len=135168", "--max_num_seqs=8", "--num_kv_pages=2112")
            prompts = ("--decode_rows=", "--prefill=1x8192", "--long_prompt=131072", "--repeats=3")
            long = f"{folder}/results/{day}-long-{preset}.json"
            steps.append(Step(f"long {preset}", (*profile, *prompts, *sizes, f"--results={long}"), 180, (long,)))
        if "kernels" in parts:
            for op in registry.all_ops():
                arguments = ("-m", "pallas_kernels.bench", f"--op={op.name}", f"--spec={preset}-*")
                steps.append(Step(f"kernels {preset} {op.name}", (*arguments, f"--output={kernels}"), 120, (kernels,)))
        if "products" in parts:
            products = f"{folder}/results/{day}-products-{preset}.json"
            arguments = ("scripts/bench_products.py", *model, f"--results={products}")
            steps.append(Step(f"products {preset}", arguments, 180, (products,)))
        if "peers" in parts:
            for name in PEER_OPS:
                arguments = ("scripts/bench_peers.py", f"--op={name}", f"--spec={preset}-*")
                steps.append(Step(f"peers {preset} {name}", (*arguments, f"--output={kernels}"), 150, (kernels,)))
        if "drift" in parts:
            drift = f"{folder}/results/{day}-drift-{preset}.json"
            sizes = (f"--model={preset}", "--rows=64", "--steps=2000")
            arguments = ("-m", "pallas_kernels.gdn_decode.drift", *sizes, f"--output={drift}")
            steps.append(Step(f"drift {preset}", arguments, 180, (drift,)))
    if "sanitize" in parts:
        output = f"{folder}/sanitizer/{day}-kernels.json"
        arguments = ("-m", "pallas_kernels.sanitize", "--timeout=400", f"--output={output}")
        steps.append(Step("sanitize", arguments, 480, (output,)))
    if "check" in parts:
        report, limit = f"{folder}/gpu_check/{day}-whole.json", 540
        scale = ("--kernel_shards=11", "--processes=20", "--time_scale=1.6", f"--time_limit={limit}")
        steps.append(Step("check", ("scripts/gpu_check.py", *scale, f"--report={report}"), limit + 30, (report,)))
    return steps


def run_step(step: Step, root: Path = ROOT) -> str:
    """Run a step to its end or its limit; what it prints is shown as it comes.

    Returns:
        "done", or what went wrong.
    """
    variables = os.environ | {"PYTHONUNBUFFERED": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *step.arguments], cwd=root, env=variables, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(timeout=step.limit_s)
    except subprocess.TimeoutExpired:
        return f"killed after its limit of {step.limit_s:.0f} s"
    finally:
        _end(process)
    return "done" if code == 0 else f"exit code {code}"


def _end(process: subprocess.Popen) -> None:
    """End a step and whatever it has started: the next one must have the device for itself."""
    for sign, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=wait_s)


def run_steps(
    steps: Sequence[Step],
    deadline: float,
    run: Callable[[Step], str] = run_step,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run what fits before ``deadline`` (of ``clock``), one after the other; a failure does not stop the others."""
    outcomes = []
    for number, step in enumerate(steps, 1):
        begun = clock()
        if begun + step.limit_s > deadline:
            left = max(0.0, deadline - begun)
            verdict = f"not begun: it may take {step.limit_s:.0f} s, and {left:.0f} s were left"
        else:
            limit = f"at most {step.limit_s:.0f} s"
            print(f"\n[{number} of {len(steps)}] {step.name}, {limit}: {step.command}", flush=True)
            verdict = run(step)
        outcomes.append(Outcome(step, verdict, clock() - begun))
        if not outcomes[-1].done:
            print(f"{step.name}: {verdict}", file=sys.stderr, flush=True)
    return outcomes


def summary(outcomes: Sequence[Outcome], root: Path = ROOT) -> str:
    """A line a step, then the files that are there."""
    width = max(len(one.step.name) for one in outcomes)
    lines = [f"{one.step.name:<{width}}  {one.seconds:>6.0f} s  {one.verdict}" for one in outcomes]
    files = dict.fromkeys(file for one in outcomes for file in one.step.files)
    lines += ["", *(file for file in files if (root / file).exists())]
    return "\n".join(lines)


def command_line() -> CommandLine:
    line = CommandLine("measure_all.py [--parts=a,b] [--presets=a,b] [--flag=value ...]", __doc__ or "")
    line.group("What")
    line.define("str", "parts", ",".join(DEFAULT_PARTS), "Parts to measure, with commas between them.")
    line.define("str", "presets", "4b", f"Models, with commas between them: {', '.join(PRESETS)}.")
    line.group("How")
    line.define("str", "folder", "benchmarks", "Where results and reports go, relative to the checkout.")
    line.define("float", "time_limit", 3600.0, "Seconds for everything.")
    line.define("float", "time_scale", 1.0, "Stretches the limit of every command (a slower machine).")
    line.define("bool", "dry_run", False, "Print the commands and their limits, and run nothing.")
    return line


def main(argv: Sequence[str], run: Callable[[Step], str] = run_step) -> int:
    """Run the command; ``run`` stands in for the processes, for tests. Returns the exit code."""
    begun = time.monotonic()
    return run_with_flags(command_line(), argv, lambda line: _run(line, run, begun))


def _run(line: CommandLine, run: Callable[[Step], str], begun: float) -> int:
    for name in ("time_limit", "time_scale"):
        if not getattr(line, name) > 0:
            raise UserInputError(f"--{name} must be positive, got {getattr(line, name)}")
    parts = names_in_order("parts", line.parts, PARTS)
    presets = names_in_order("presets", line.presets, tuple(PRESETS))
    for part in (name for name in parts if name in OF_REAL_MODELS):
        if unknown := [name for name in presets if name not in REAL_MODELS]:
            raise UserInputError(f"--presets: {unknown[0]} has no part {part}, only {', '.join(REAL_MODELS)} have")
    steps = [
        dataclasses.replace(step, limit_s=step.limit_s * line.time_scale)
        for step in steps_of(parts, presets, line.folder, datetime.datetime.now(datetime.UTC))
    ]
    if line.dry_run:
        print("\n".join(f"# {step.name}, at most {step.limit_s:.0f} s\n{step.command}" for step in steps))
        return 0
    if probe(environment("gpu")).platform != "gpu":
        raise UserInputError("JAX finds no GPU here, and figures of a CPU are none (--dry_run says what would run)")
    for kind in ("results", "sanitizer", "gpu_check"):
        (ROOT / line.folder / kind).mkdir(parents=True, exist_ok=True)
    outcomes = run_steps(steps, begun + line.time_limit, run)
    print(f"\n{summary(outcomes)}")
    if all(one.done for one in outcomes):
        print("tables and pictures: python scripts/bench_report.py")
        return 0
    return 1


if __name__ == "__main__":
    run_command(main)
