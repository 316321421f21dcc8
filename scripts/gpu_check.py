"""Proves on a GPU that the engine gives the same answers through the kernels that run there: one command.

    python scripts/gpu_check.py --report=gpu_check.json

Each section prints its figures, every one with the bar that it is held to, and a line with the seconds it took and
those it may take. The exit code is 1 when a figure misses its bar or a section breaks, runs out of time or leaves no
figures; whatever was not checked is named. The sections:

  kernels   the conformance suite of pallas_kernels, several processes at once
  goldens   miniatures against the float64 oracle: bfloat16 no farther than 1.25 x transformers' own bfloat16, float32
            through the chosen kernels and through the references
  batching  a real-size model with random weights: rows in company, and prompts in steps of 2048 tokens, against the
            same tokens given to one row alone
  overlap   the overlap modes against off: float32 miniatures token for token, the real-size model in that distance
  job       300 lines of mixed options: each answered once, no compiles after warm-up, memory against the plan, resume
  nan       a row that turns into NaN fails alone, its neighbours keep every bit
  sampler   the sampler's tests
  tasks     the demo model on held-out examples: the recorded tokens in float32, as many right answers in bfloat16

It also runs without a GPU (JAX_PLATFORMS=cpu, --preset=tiny-4b), which only shows that the script works.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pallas_kernels.provenance import current_commit  # noqa: E402
from qwen35_jax.bench.records import own_command  # noqa: E402
from qwen35_jax.cli.common import CommandLine, names_in_order, run_command, run_with_flags  # noqa: E402
from qwen35_jax.errors import UserInputError  # noqa: E402
from qwen35_jax.presets import PRESETS  # noqa: E402
from scripts.gpu_checks.report import Section, added_up  # noqa: E402
from scripts.gpu_checks.worker import Task  # noqa: E402

SECTIONS = ("kernels", "goldens", "batching", "overlap", "job", "nan", "sampler", "tasks")
# Seconds a section may take on an H200 with 16 cores, compiling included; --time_scale stretches them.
BUDGETS = {
    "kernels": 420,
    "goldens": 300,
    "batching": 180,
    "overlap": 240,
    "job": 240,
    "nan": 60,
    "sampler": 180,
    "tasks": 150,
}
_SETUP_S = 240  # making the rig that the engine sections share
_ENGINE_SECTIONS = ("job", "batching", "overlap", "nan")  # in this order: the job's peak of memory must be the first
_MEMBERS = ("0.8b", "4b", "27b")
_TINY = ("tiny-0.8b", "tiny-4b", "tiny-27b")
DEMO_MODEL = "examples/demo-model"  # of the checkout, where workers run
_TAIL = 25  # lines of a broken worker's log that are shown


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        sections: names, in the order of :data:`SECTIONS`.
        preset: the model of the engine sections.
        num_layers: layers in place of the preset's.
        shapes: changes of their sizes.
        rows, solo_rows, job_lines, exact, demo_model, task_examples, task_rows: see the flags.
        kernel_filter: pytest's -k for the kernels.
        kernel_shards: processes that share the conformance suite.
        processes: at once.
        time_scale: stretches every budget.
        time_limit: seconds for everything.
    """

    sections: tuple[str, ...]
    preset: str = "4b"
    num_layers: int | None = None
    shapes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = 64
    solo_rows: int = 16
    job_lines: int = 300
    exact: bool = True
    demo_model: str = DEMO_MODEL
    task_examples: int = 200
    task_rows: int = 256
    kernel_filter: str = ""
    kernel_shards: int = 5
    processes: int = 6
    time_scale: float = 1.0
    time_limit: float = 540.0


@dataclasses.dataclass(frozen=True)
class Device:
    """What the processes run on."""

    kind: str
    count: int
    platform: str
    jax: str


def tasks_of(plan: Plan, device: Device) -> list[Task]:
    """The processes that a plan needs, those that take longest first."""

    def limit(*sections: str, setup: float = 0) -> float:
        return plan.time_scale * (sum(BUDGETS[name] for name in sections) + setup)

    chosen, tasks = set(plan.sections), []
    options = {
        "preset": plan.preset,
        "num_layers": plan.num_layers,
        "shapes": dict(plan.shapes),
        "rows": plan.rows,
        "solo_rows": plan.solo_rows,
        "job_lines": plan.job_lines,
        "exact": plan.exact,
    }
    engine = tuple(name for name in _ENGINE_SECTIONS if name in chosen)
    if engine:
        tasks.append(Task("engine", plan.preset, engine, limit(*engine, setup=_SETUP_S), options))
    if "overlap" in chosen and device.count > 1:
        part = f"{plan.preset} device"
        tasks.append(Task("engine_device", part, ("overlap",), limit("overlap", setup=_SETUP_S), options))
    if "kernels" in chosen:
        for shard in range(plan.kernel_shards):
            arguments = {"keyword": plan.kernel_filter, "shard": shard, "shards": plan.kernel_shards}
            part = f"{shard + 1} of {plan.kernel_shards}"
            tasks.append(Task("kernels", part, ("kernels",), limit("kernels"), arguments))
    if "tasks" in chosen:
        arguments = {"directory": plan.demo_model, "count": plan.task_examples, "rows": plan.task_rows}
        tasks.append(Task("tasks", "", ("tasks",), limit("tasks"), arguments))
    if "goldens" in chosen:
        for member in _MEMBERS:
            cases = [f"{member}-tied", f"{member}-untied"]
            tasks.append(Task("goldens", member, ("goldens",), limit("goldens"), {"cases": cases}))
    if "overlap" in chosen:
        tasks += [Task("overlap", name, ("overlap",), limit("overlap"), {"preset": name}) for name in _TINY]
    if "sampler" in chosen:
        tasks.append(Task("sampler", "", ("sampler",), limit("sampler")))
    return tasks


@dataclasses.dataclass
class Running:
    """A process under way."""

    task: Task
    process: subprocess.Popen
    result: Path
    log: Path
    started: float


def environment(platform: str) -> dict[str, str]:
    """Variables of the worker processes: several share a device, so none takes all of its memory."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    found["PYTHONUNBUFFERED"] = "1"
    found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # The oracles' products would each start a thread a core, in every process at once.
    for library in ("OPENBLAS", "OMP", "MKL"):
        found.setdefault(f"{library}_NUM_THREADS", "2")
    flags = found.get("XLA_FLAGS", "")
    if platform == "cpu":
        if "xla_force_host_platform_device_count" not in flags:
            flags += " --xla_force_host_platform_device_count=2"
    else:
        # As users compile: the tests' own setup would switch optimisation off.
        found.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "gpu-check"))
        if "xla_backend_optimization_level" not in flags:
            flags += " --xla_backend_optimization_level=3"
    found["XLA_FLAGS"] = flags.strip()
    return found


def variables_of(task: Task, variables: Mapping[str, str]) -> dict[str, str]:
    """Those of one worker.

    In the conformance suite XLA compiles nothing but references and small glue, hundreds of programs that run once: a
    search for the fastest product in each of them is most of the suite's time and changes no kernel.
    """
    found = dict(variables)
    if task.kind == "kernels" and "xla_gpu_autotune_level" not in found.get("XLA_FLAGS", ""):
        found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    return found


def start(task: Task, folder: Path, number: int, variables: Mapping[str, str]) -> Running:
    described, result, log = (folder / f"{number}.{suffix}" for suffix in ("task.json", "result.json", "log"))
    described.write_text(json.dumps(dataclasses.asdict(task)))
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.gpu_checks.worker", str(described), str(result)],
            cwd=ROOT,
            env=variables_of(task, variables),
            stderr=errors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Running(task, process, result, log, time.monotonic())


def kill(running: Running) -> None:
    """Ends a worker and what it has started."""
    try:
        os.killpg(running.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    running.process.wait()


def collect(running: Running, why: str | None) -> list[Section]:
    """What a process has found; a section that it does not answer for has failed.

    Args:
        running: a process that has ended.
        why: it was killed; None when it ended by itself.
    """
    code = running.process.returncode
    found = []
    if running.result.exists():
        found = [Section.from_dict(values) for values in json.loads(running.result.read_text())]
    reason = why or (f"its process ended with exit code {code}" if code else None)
    for section in found:
        if section.error == "it did not end":
            section.error = f"it did not end: {reason or 'its process ended before it'}"
    missing = [name for name in running.task.sections if name not in {section.name for section in found}]
    found += [Section(name, running.task.part, error=f"nothing came back: {reason}") for name in missing]
    if reason is not None and all(section.passed for section in found):
        found[-1].error = reason
    if any(not section.passed for section in found):
        tail = running.log.read_text(errors="replace").splitlines()[-_TAIL:]
        label = " ".join(filter(None, [running.task.kind, running.task.part]))
        print("\n".join(f"  {label} | {line}" for line in tail), flush=True)
    return found


def run_tasks(tasks: Sequence[Task], plan: Plan, variables: Mapping[str, str], deadline: float) -> list[Section]:
    """All tasks, so many processes at once; none outlives its limit or the deadline."""
    waiting, running, found = list(tasks), [], []
    with tempfile.TemporaryDirectory(prefix="gpu_check.") as name:
        folder, number = Path(name), 0
        try:
            while waiting or running:
                while waiting and len(running) < plan.processes:
                    running.append(start(waiting.pop(0), folder, number, variables))
                    number += 1
                time.sleep(0.2)
                for one in list(running):
                    now, why = time.monotonic(), None
                    if one.process.poll() is None:
                        if now > deadline:
                            why = f"the time limit of the whole run ({plan.time_limit:.0f} s) was over"
                        elif now - one.started > one.task.limit_s:
                            why = f"it was killed after its budget of {one.task.limit_s:.0f} s"
                        else:
                            continue
                        kill(one)
                    running.remove(one)
                    found += collect(one, why)
                if time.monotonic() > deadline and waiting:
                    reason = f"not begun within the time limit of the whole run ({plan.time_limit:.0f} s)"
                    found += [Section(name, task.part, error=reason) for task in waiting for name in task.sections]
                    waiting = []
        finally:
            for one in running:
                kill(one)
    return found


def probe(variables: Mapping[str, str]) -> Device:
    """The device, asked by a process of its own: this one must not hold any of its memory.

    Raises:
        UserInputError: JAX finds no device.
    """
    with tempfile.TemporaryDirectory(prefix="gpu_check.") as name:
        running = start(Task("device", "", (), 120), Path(name), 0, variables)
        try:
            running.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill(running)
        if running.process.returncode or not running.result.exists():
            lines = running.log.read_text(errors="replace").splitlines()
            raise UserInputError(f"JAX finds no device: {lines[-1] if lines else 'no answer within 120 s'}")
        return Device(**json.loads(running.result.read_text()))


def summarise(plan: Plan, device: Device, parts: Sequence[Section], seconds: float) -> dict[str, Any]:
    """The report: every section with its parts, and whether all of it passed."""
    sections: dict[str, Any] = {}
    for name in plan.sections:
        own = [part for part in parts if part.name == name]
        numbers = added_up(own)
        if name == "kernels" and own:
            own.append(suite_check(numbers, device, filtered=bool(plan.kernel_filter)))
        checks = [check for part in own for check in part.checks]
        sections[name] = {
            "passed": bool(own) and all(part.passed for part in own),
            "checks": len(checks),
            "checks_failed": sum(not check.passed for check in checks),
            "seconds": max((part.seconds for part in own), default=0.0),
            "budget_s": BUDGETS[name] * plan.time_scale,
            "skipped": sorted({f"{what}: {why}" for part in own for what, why in part.skipped}),
            "errors": [f"{part.label}: {part.error}" for part in own if part.error],
            "numbers": numbers,
            "parts": [part.to_dict() for part in own],
        }
    return {
        "passed": all(section["passed"] for section in sections.values()),
        "device": device.kind,
        "device_count": device.count,
        "platform": device.platform,
        "commit": current_commit(ROOT),
        "jax": device.jax,
        "command": own_command(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "seconds": round(seconds, 1),
        "plan": dataclasses.asdict(plan),
        "not_run": [name for name in SECTIONS if name not in plan.sections],
        "sections": sections,
    }


def suite_check(numbers: Mapping[str, Any], device: Device, *, filtered: bool) -> Section:
    """What only all shards together can show: tests did run, on a GPU those of its own kernels among them."""
    section = Section("kernels", "all shards")
    section.at_least("passed tests", numbers.get("passed", 0), 1)
    named = {name for name in numbers if name.startswith("passed with ")}
    own = named - {"passed with reference", "passed with none named"}
    if device.platform == "gpu" and not filtered:
        section.at_least("passed tests of Pallas kernels", sum(numbers[name] for name in own), 1)
    else:
        section.skip("that Pallas kernels were among them", "a filter was given" if filtered else "no GPU")
    return section


def print_summary(report: Mapping[str, Any]) -> None:
    print(f"\n{report['device']} x {report['device_count']}, jax {report['jax']}, commit {report['commit']}")
    for name, section in report["sections"].items():
        verdict = "passed" if section["passed"] else "FAILED"
        print(
            f"{name:<9} {verdict}  {section['checks'] - section['checks_failed']} of {section['checks']} figures "
            f"within their bars; {section['seconds']:.0f} s of {section['budget_s']:.0f} s"
        )
        for part in section["parts"]:
            for check in part["checks"]:
                if not check["passed"]:
                    print(f"    FAIL {check['name']}: {check['value']}, bar {check['relation']} {check['bar']}")
            for failure in part["numbers"].get("failures", []):
                print(f"    FAIL {failure}")
        for error in section["errors"]:
            print(f"    FAIL {error}")
        for skipped in section["skipped"]:
            print(f"    skipped {skipped}")
    if report["not_run"]:
        print(f"not run: {', '.join(report['not_run'])}")
    if report["platform"] == "cpu":
        print("run on a CPU: this says nothing about a GPU")
    print(f"{'PASSED' if report['passed'] else 'FAILED'} after {report['seconds']:.0f} s")


def command_line() -> CommandLine:
    line = CommandLine("gpu_check.py [--sections=a,b] [--report=FILE] [--flag=value ...]", __doc__ or "")
    line.group("What")
    line.define("str", "sections", ",".join(SECTIONS), "Sections to run, with commas between them.")
    line.define("str", "report", None, "JSON file for everything that was found.")
    line.define("str", "preset", "4b", f"Model of batching, overlap, job and nan: {', '.join(PRESETS)}.")
    line.define("int", "num_layers", None, "Layers in place of the preset's.")
    line.define("str", "kernel_filter", "", "pytest's -k for the kernels.")
    line.define("int", "rows", 64, "Rows of the batched run.")
    line.define("int", "solo_rows", 16, "Greedy rows of it that also run alone.")
    line.define("int", "job_lines", 300, "Lines of the job.")
    line.define("int", "max_num_seqs", 64, "Rows at once.")
    line.define("int", "max_model_len", 1024, "Longest prompt + output.")
    line.define("int", "max_num_batched_tokens", 512, "Prompt tokens a step.")
    line.define("bool", "exact", True, "Measure the model in float32 as well: the bar of more than four layers.")
    line.define("str", "demo_model", DEMO_MODEL, "Directory of the demo model, with its accuracy.json.")
    line.define("int", "task_examples", 200, "Held-out examples of each of its tasks.")
    line.define("int", "task_rows", 256, "Rows at once among them.")
    line.group("How")
    line.define("int", "processes", 6, "Processes at once; the device's memory is shared by them.")
    line.define("int", "kernel_shards", 5, "Processes that share the conformance suite.")
    line.define("float", "time_scale", 1.0, "Stretches every section's budget (a slower machine).")
    line.define("float", "time_limit", 540.0, "Seconds for everything; what still runs then has failed.")
    return line


def plan_of(line: CommandLine) -> Plan:
    """Raises: UserInputError: a section that does not exist, or a number out of range."""
    sections = names_in_order("sections", line.sections, SECTIONS)
    if line.preset not in PRESETS:
        raise UserInputError(f"--preset: {line.preset!r} is none of {', '.join(PRESETS)}")
    least = {
        "rows": 1,
        "solo_rows": 1,
        "job_lines": 20,
        "processes": 1,
        "kernel_shards": 1,
        "max_num_seqs": 4,
        "task_examples": 1,
        "task_rows": 4,
    }
    for name, bound in {**least, "max_model_len": 128, "max_num_batched_tokens": 64, "time_limit": 1}.items():
        if getattr(line, name) < bound:
            raise UserInputError(f"--{name} must be at least {bound}, got {getattr(line, name)}")
    if line.num_layers is not None and line.num_layers < 4:
        raise UserInputError(f"--num_layers must be at least 4 (one full-attention layer), got {line.num_layers}")
    rungs = sorted({1, *(rung for rung in (8,) if rung < line.max_num_seqs), line.max_num_seqs})
    return Plan(
        sections=sections,
        preset=line.preset,
        num_layers=line.num_layers,
        shapes={
            "max_num_seqs": line.max_num_seqs,
            "max_model_len": line.max_model_len,
            "max_num_batched_tokens": line.max_num_batched_tokens,
            "row_rungs": tuple(rungs),
        },
        rows=line.rows,
        solo_rows=line.solo_rows,
        job_lines=line.job_lines,
        exact=line.exact,
        demo_model=line.demo_model if line.demo_model == DEMO_MODEL else str(Path(line.demo_model).resolve()),
        task_examples=line.task_examples,
        task_rows=line.task_rows,
        kernel_filter=line.kernel_filter,
        kernel_shards=line.kernel_shards,
        processes=line.processes,
        time_scale=line.time_scale,
        time_limit=line.time_limit,
    )


def main(argv: Sequence[str], run: Callable[..., list[Section]] = run_tasks) -> int:
    """Run the command; ``run`` stands in for the processes, for tests. Returns the exit code."""
    begun = time.monotonic()
    return run_with_flags(command_line(), argv, lambda line: _run(line, run, begun))


def _run(line: CommandLine, run: Callable[..., list[Section]], begun: float) -> int:
    plan = plan_of(line)
    if line.report and not Path(line.report).resolve().parent.is_dir():
        raise UserInputError(f"--report: {Path(line.report).parent} is no directory")
    for name in ("kernels", "sampler"):
        if name in plan.sections and importlib.util.find_spec("pytest") is None:
            raise UserInputError(f"--sections: {name} runs tests, which need pytest: pip install '.[dev]'")
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    device = probe(environment("cpu" if on_cpu else "gpu"))
    if device.platform == "cpu" and not on_cpu:
        raise UserInputError("JAX finds no GPU here; JAX_PLATFORMS=cpu tries the script itself on a CPU")
    print(f"{device.kind} x {device.count} ({device.platform}), jax {device.jax}", flush=True)
    tasks = tasks_of(plan, device)
    parts = run(tasks, plan, environment(device.platform), begun + plan.time_limit)
    report = summarise(plan, device, parts, time.monotonic() - begun)
    print_summary(report)
    if line.report:
        Path(line.report).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        print(f"report: {line.report}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    run_command(main)
