"""One process of scripts/gpu_check.py: runs some sections on the device and writes what they found.

    python -m scripts.gpu_checks.worker TASK.json RESULT.json

Only the process that runs a task touches a device, so a crash, a hang or a full memory is the failure of its own
sections and of no other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.gpu_checks.report import Section


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        kind: "device", "kernels", "sampler", "goldens", "tasks", "overlap" (miniature, float32), "engine" or
            "engine_device".
        part: which part of a section, for people; empty when there is one.
        sections: names of the sections it fills, in order.
        limit_s: seconds after which it is killed.
        options: arguments of the kind.
    """

    kind: str
    part: str
    sections: tuple[str, ...]
    limit_s: float
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Results:
    """The sections of a task, written to its file after every change."""

    def __init__(self, path: Path):
        self._path = path
        self._ended: list[Section] = []
        self._open: Section | None = None

    def save(self) -> None:
        sections = [section.to_dict() for section in self._ended]
        if self._open is not None:
            self._open.end()
            sections.append(self._open.to_dict() | {"error": "it did not end", "passed": False})
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(sections))
        os.replace(temporary, self._path)

    def fill(self, name: str, part: str, body: Callable[[Section], None]) -> None:
        """Runs one section; whatever it raises is its failure."""
        section = self._open = Section(name, part, say=lambda text: print(text, flush=True))
        self.save()
        try:
            body(section)
        except Exception as error:
            traceback.print_exc()
            section.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
        section.end()
        self._open = None
        self._ended.append(section)
        self.save()


def run(task: Task, results: Results) -> None:
    options = task.options
    if task.kind in ("kernels", "sampler"):
        from scripts.gpu_checks import suites

        targets = suites.KERNEL_TESTS if task.kind == "kernels" else suites.SAMPLER_TESTS
        results.fill(
            task.kind, task.part, lambda s: suites.run_suite(s, targets, save=results.save, **options)
        )  # fmt: skip
    elif task.kind == "goldens":
        results.fill("goldens", task.part, lambda s: goldens(s, tuple(options["cases"])))
    elif task.kind == "tasks":
        from scripts.gpu_checks import rig
        from scripts.gpu_checks import tasks as demo_tasks

        rig.prepare()
        directory, count, rows = Path(options["directory"]), options["count"], options["rows"]
        results.fill(
            "tasks", task.part, lambda s: demo_tasks.tasks_section(s, directory, count=count, rows=rows)
        )  # fmt: skip
    elif task.kind == "overlap":
        from scripts.gpu_checks import answers, rig

        rig.prepare()
        results.fill(
            "overlap",
            task.part,
            lambda s: answers.overlap_float32(s, options["preset"], num_devices=answers.num_devices()),
        )
    elif task.kind in ("engine", "engine_device"):
        run_engine(task, results)
    else:
        raise ValueError(f"unknown kind of task {task.kind!r}")


def goldens(section: Section, cases: tuple[str, ...]) -> None:
    """The bars of tests/end_to_end/test_goldens.py: bfloat16, and float32 through the chosen kernels and references."""
    from tests import golden_kit

    bars = {
        "max": golden_kit.MAX_LOGPROB_ERROR,
        "mean": golden_kit.MEAN_LOGPROB_ERROR,
        "layers": golden_kit.MAX_LAYER_ERROR,
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for case in cases:
            rounded = golden_kit.bfloat16_distances(case, root)
            for found in rounded:
                where = f"{case} bfloat16 length {found.length}"
                section.at_most(f"{where}: mean / transformers'", found.mean_ratio, golden_kit.BF16_RATIO, quiet=True)
                section.at_most(f"{where}: p99 / transformers'", found.p99_ratio, golden_kit.BF16_RATIO, quiet=True)
            section.number(
                f"{case} bfloat16 / transformers' by length (bar {golden_kit.BF16_RATIO}): mean, p99",
                {found.length: [round(found.mean_ratio, 3), round(found.p99_ratio, 3)] for found in rounded},
            )
            for kernels in ("auto", "reference"):
                # Tying has no part in the trunk: prompts in pieces run once a member.
                for split in (False, True) if case.endswith("-untied") and kernels == "auto" else (False,):
                    where = f"{case} float32 {kernels}{' in pieces' if split else ''}"
                    exact = golden_kit.float32_distances(case, root, kernels=kernels, split=split)
                    figures = {
                        "max": [found.max_logprob for found in exact],
                        "mean": [found.mean_logprob for found in exact],
                        "layers": [found.max_layer for found in exact],
                    }
                    for name, values in figures.items():
                        for found, value in zip(exact, values, strict=True):
                            section.at_most(f"{where} length {found.length}: {name}", value, bars[name], quiet=True)
                    section.number(
                        f"{where}, worst length (bars {', '.join(f'{bar:.0e}' for bar in bars.values())})",
                        {name: max(values) for name, values in figures.items()},
                    )


def run_engine(task: Task, results: Results) -> None:
    """The sections that share one rig of the preset; a rig that cannot be made is the failure of each of them."""
    from qwen35_jax.config import ModelConfig
    from scripts.gpu_checks import answers, job, rig

    options = task.options
    overlap = "device" if task.kind == "engine_device" else "stream"
    shapes = rig.Shapes(**{name: _tupled(value) for name, value in options["shapes"].items()})
    rig.prepare()

    def make_rig(num_layers: int | None) -> rig.Rig:
        changes = {} if num_layers is None else {"num_layers": num_layers}
        return rig.Rig(ModelConfig.preset(options["preset"], **changes), "bfloat16", shapes, overlap=overlap)

    whole = once(lambda: make_rig(options["num_layers"]))
    batched = once(lambda: answers.Batched(whole(), options["rows"], options["exact"]))

    def run_job(section: Section) -> None:
        with tempfile.TemporaryDirectory() as folder:
            job.job(section, whole(), Path(folder), lines=options["job_lines"])

    def run_batching(section: Section) -> None:
        answers.batching(section, batched(), solo_rows=options["solo_rows"])
        cut = batched()
        if whole().config.num_layers > answers.GOLDEN_LAYERS:
            # As deep as the miniatures, as wide as the member: here the goldens' bar itself applies.
            cut = answers.Batched(make_rig(answers.GOLDEN_LAYERS), options["rows"], options["exact"])
            answers.batching(section, cut, solo_rows=options["solo_rows"])
        answers.large_steps(section, cut)

    bodies: dict[str, Callable[[Section], None]] = {
        # The first engine's peak is the process's so far: the job comes before everything else.
        "job": run_job,
        "batching": run_batching,
        "overlap": lambda s: answers.overlap_bfloat16(s, batched(), overlap),
        "nan": lambda s: answers.nan_containment(s, whole()),
    }
    for name in task.sections:
        results.fill(name, task.part, bodies[name])


def once[T](make: Callable[[], T]) -> Callable[[], T]:
    """``make``, called once: what it gave, or raised, is kept (making it again would take as long to fail)."""
    kept: list[T] = []
    failed: list[Exception] = []

    def get() -> T:
        if failed:
            raise failed[0]
        if not kept:
            try:
                kept.append(make())
            except Exception as error:
                failed.append(error)
                raise
        return kept[0]

    return get


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def main(argv: list[str]) -> int:
    task = Task(**json.loads(Path(argv[1]).read_text()))
    if task.kind == "device":
        import jax

        devices = jax.local_devices()
        found = {"kind": devices[0].device_kind, "count": len(devices), "platform": devices[0].platform}
        Path(argv[2]).write_text(json.dumps(found | {"jax": jax.__version__}))
        return 0
    if task.kind == "kernels":
        os.nice(5)  # many processes, which fill in beside the few that take longest
    run(task, Results(Path(argv[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
