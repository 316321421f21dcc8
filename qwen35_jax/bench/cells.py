"""One measured cell: a workload under a load on an engine, from the timed run to its record.

The order of a cell: a few requests to warm up (every program has been compiled and run when the engine was made; this
touches the host's side), the timed run, then everything that would disturb it: the comparison with requests run alone,
and a profiled window of the same load. The record is handed over before that window, which may not end well, and given
back with the window's figures after it; its check ``profile`` says which of the two it is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qwen35_jax.bench import checks as checking
from qwen35_jax.bench import workload as workloads
from qwen35_jax.bench.loops import LOAD_KINDS, Load, LoadRun, step_metrics
from qwen35_jax.bench.metrics import RequestTiming, latency_metrics
from qwen35_jax.bench.records import Record, make_record
from qwen35_jax.bench.workload import Lengths, WorkItem, Workload
from qwen35_jax.errors import UserInputError
from qwen35_jax.presets import PRESETS
from qwen35_jax.progress import ProgressFn, silent

if TYPE_CHECKING:
    from qwen35_jax.config import EngineConfig, ModelConfig
    from qwen35_jax.engine import Engine
    from qwen35_jax.steps import Variant

OPEN_REQUESTS = 256
THROUGHPUT_REQUESTS = 1024
PROFILE_SECONDS = 2.0
NO_PROFILE, UNFINISHED_PROFILE, PROFILED = "not asked for", "not finished", "done"
"""The check ``profile`` of a record; another text says why there are no figures of a profile that was tried."""

_WARM_UP_TOKENS = 16
_REPORT_SECONDS = 1.0  # between two reports of progress
# Options that say nothing about what was measured, or only where it was.
_NO_SETTING = frozenset({"compilation_cache_dir", "skip_tokenizer_init"})


@dataclasses.dataclass(frozen=True)
class CellSpec:
    """What to measure.

    Attributes:
        load: how requests come.
        lengths: their lengths.
    """

    load: Load
    lengths: Lengths

    def name(self, size: str, config: EngineConfig) -> str:
        """The cell's name for a model's size and an engine's options."""
        match self.load.kind:
            case "throughput":
                name = f"offline/{size}/{self.lengths.name}"
            case "closed":
                name = f"closed/{size}/c{self.load.concurrency}/{self.lengths.name}"
            case "open":
                name = f"open/{size}/qps{self.load.rate:.10g}/{self.lengths.name}"
        return name + suffixes(config)


@dataclasses.dataclass(frozen=True)
class CellOptions:
    """What is done around the timed run.

    Attributes:
        warm_up_requests: requests that precede it.
        check_rows: requests that are run again alone.
        check_margin: see :mod:`qwen35_jax.bench.checks`; None takes 0 for float32 and the default for bfloat16.
        profile_seconds: length of the profiled window, 0 for none; None takes the default on a GPU and none elsewhere.
    """

    warm_up_requests: int = 8
    check_rows: int = 4
    check_margin: float | None = None
    profile_seconds: float | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < float("inf"):
                raise UserInputError(f"{field.name} must not be negative, got {value}")


def default_requests(load: Load) -> int:
    """Requests of a run that does not say: eight for each client, and enough for a mean where there are few."""
    if load.concurrency is not None:
        return max(16, 8 * load.concurrency)
    return OPEN_REQUESTS if load.kind == "open" else THROUGHPUT_REQUESTS


def parse_spec(text: str, *, seed: int = 0) -> CellSpec:
    """A cell as the command line writes it: kind, lengths, then in any order clients or rate and number of requests.

    ``throughput:1024x128:512``, ``throughput:lognormal``, ``closed:1024x256:c8``, ``open:1024x128:qps16:256``,
    ``throughput:lengths.jsonl``.

    Raises:
        UserInputError: it cannot be read; the message names the part.
    """
    kind, *parts = text.strip().split(":")
    if kind not in LOAD_KINDS or not parts:
        raise UserInputError(f"cell {text!r}: expected KIND:LENGTHS[:...] with a kind of {', '.join(LOAD_KINDS)}")
    lengths, *rest = parts
    concurrency = rate = number = None
    try:
        for part in rest:
            if part.startswith("qps"):
                rate = _once("rate", rate, float(part.removeprefix("qps")))
            elif part.startswith("c"):
                concurrency = _once("concurrency", concurrency, int(part.removeprefix("c")))
            else:
                number = _once("number of requests", number, int(part))
        load = Load(kind, concurrency, rate)
        return CellSpec(load, _lengths(lengths, number, load, seed))
    except ValueError as error:  # a UserInputError too
        raise UserInputError(f"cell {text!r}: {error}") from error


def _once[T](name: str, before: T | None, value: T) -> T:
    if before is not None:
        raise ValueError(f"the {name} is there twice")
    return value


def _lengths(text: str, number: int | None, load: Load, seed: int) -> Lengths:
    if text == "lognormal":
        return workloads.lognormal(workloads.LOGNORMAL_REQUESTS if number is None else number, seed=seed)
    if text.endswith(".jsonl"):
        return workloads.from_file(text, number, seed=seed)
    n_in, _, n_out = text.partition("x")
    if not (n_in.isdecimal() and n_out.isdecimal()):
        raise ValueError(f"lengths {text!r}: expected <in>x<out>, lognormal or a .jsonl file")
    return workloads.fixed(default_requests(load) if number is None else number, int(n_in), int(n_out), seed=seed)


def size_of(model_config: ModelConfig) -> str | None:
    """The family's name for a model of these dimensions; None for another."""
    for name, config in PRESETS.items():
        if (
            (config.hidden_size, config.intermediate_size, config.layer_types, config.vocab_size)
            == (
                model_config.hidden_size,
                model_config.intermediate_size,
                model_config.layer_types,
                model_config.vocab_size,
            )
            and config.attention.num_heads == model_config.attention.num_heads
            and config.gdn.num_v_heads == model_config.gdn.num_v_heads
        ):
            return name
    return None


def suffixes(config: EngineConfig, variant: Variant = "greedy") -> str:
    """The variants of an engine's options that cells name; ``variant`` is the sampler of single steps."""
    found = ""
    if config.dtype == "float32":
        found += "@fp32"
    if config.state_dtype == "bfloat16":
        found += "@bf16state"
    if config.decode_overlap != "off":
        found += f"@{config.decode_overlap}"
    if config.scheduler_policy != "off":
        found += f"@policy-{config.scheduler_policy}"
    if config.decode_steps != 1:
        found += f"@steps{config.decode_steps}"
    if config.kernels != "auto":  # of op=name,op=name a name without their signs
        found += f"@{config.kernels.replace(' ', '').replace('=', '-').replace(',', '.')}"
    return found + ("" if variant == "greedy" else f"@{variant}")


def settings_of(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a record: the engine's options as they are in force, and ``options`` of the run."""
    config = dataclasses.asdict(engine.config)
    settings = {name: value for name, value in config.items() if name not in _NO_SETTING and value is not None}
    limits = engine.scheduler.config
    settings |= {
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "num_kv_pages": limits.num_pages - 1,
    }
    return settings | dict(options)


def start_metrics(engine: Engine) -> dict[str, Any]:
    """Seconds of the engine's start, its programs, and the memory at its peak beside the plan's."""
    metrics: dict[str, Any] = {}
    report = engine.start_report
    if report is not None:
        metrics |= {
            "load_s": report.load_s,
            "compile_s": report.compile_s,
            "warm_up_s": report.warm_up_s,
            "programs": report.num_programs,
            "programs_loaded": report.num_loaded,
            "programs_compiled": report.num_compiled,
            "planned_memory_gib": report.plan.total / 2**30,
            "planned_scratch_gib": report.plan.workspace / 2**30,
            "scratch_gib": report.scratch / 2**30,
        }
    # The most that this process ever held, loading and compiling included; a CPU does not say.
    peak = (engine.programs.device.memory_stats() or {}).get("peak_bytes_in_use")
    if peak is not None:
        metrics["peak_memory_gib"] = peak / 2**30
        if report is not None:
            metrics["peak_over_plan"] = peak / report.plan.total
    return metrics


def run_cell(
    engine: Engine,
    model_config: ModelConfig,
    spec: CellSpec,
    *,
    size: str | None = None,
    options: CellOptions | None = None,
    progress: ProgressFn = silent,
    command: str | None = None,
    measured: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Measure a cell.

    Args:
        engine: warm and idle; it is left idle.
        model_config: its model.
        spec: what to measure.
        size: the model's name in the cell; None looks it up among the presets.
        options: what is done around the timed run.
        progress: told of every stage.
        command: for the record; None takes this process's.
        measured: told of the record as it is before a window is profiled; without a window it is not called.

    Returns:
        The record. Its checks say whether the figures count: see :func:`qwen35_jax.bench.checks.failures`.

    Raises:
        UserInputError: a request is too long for the engine, or the model has no name.
    """
    options = options or CellOptions()
    size = size or size_of(model_config)
    if size is None:
        raise UserInputError("the model has the dimensions of no preset: a size is needed to name the cell")
    if spec.lengths.longest > engine.max_model_len:
        raise UserInputError(
            f"a request of {spec.lengths.longest} tokens (prompt and output) exceeds "
            f"max_model_len={engine.max_model_len}"
        )
    cell = spec.name(size, engine.config)
    workload = spec.lengths.fill(engine.num_valid)
    compiles = engine.compiles_after_warmup
    _warm_up(engine, workload, options.warm_up_requests)

    rows = checking.rows_to_check(len(workload.items), options.check_rows)
    engine.trace.records.clear()
    run = LoadRun(
        engine, workload, spec.load, keep=rows, on_end=_reporter(progress, f"{cell}: timed run", len(workload.items))
    ).run()
    metrics = latency_metrics(run.timings.values(), run.duration) | step_metrics(engine.trace.records)

    checks = checking.request_checks(len(workload.items), run.timings)
    exact = engine.config.activation_dtype(model_config) == "float32"
    margin = options.check_margin
    if margin is None:
        margin = 0.0 if exact else checking.BF16_MARGIN
    if rows and not checks["failed"]:
        progress(f"{cell}: comparing", 0, 1, f"{len(rows)} requests alone and in company")
        company = min(run.most_inside, engine.max_num_seqs)
        checks |= checking.compare_with_solo(engine, workload, run.answers, company=company, margin=margin)
        progress(f"{cell}: comparing", 1, 1)
    checks["skipped"] = len(workload.items) - checks.get("rows_compared", 0)
    metrics |= start_metrics(engine)
    checks["compiles_after_warmup"] = engine.compiles_after_warmup - compiles
    seconds = options.profile_seconds
    if seconds is None:
        seconds = PROFILE_SECONDS if engine.programs.device.platform == "gpu" else 0.0
    checks["profile"] = UNFINISHED_PROFILE if seconds else NO_PROFILE

    settings = settings_of(
        engine,
        {
            "load": spec.load.kind,
            "lengths": spec.lengths.name,
            "num_requests": len(workload.items),
            "workload_seed": workload.seed,
            **({} if spec.load.concurrency is None else {"concurrency": spec.load.concurrency}),
            **({} if spec.load.rate is None else {"rate": spec.load.rate}),
            "warm_up_requests": options.warm_up_requests,
        },
    )
    record = make_record(
        cell,
        metrics,
        settings=settings,
        checks=checks,
        command=command,
        device=engine.programs.device,
        device_count=1 if engine.prefill_device is None else 2,
    )
    if not seconds:
        return record
    measured(record)
    figures, ended = _profile(engine, workload, spec.load, min(seconds, run.duration / 2), run.duration, progress, cell)
    after = {"compiles_after_warmup": engine.compiles_after_warmup - compiles, "profile": ended}
    return dataclasses.replace(record, metrics={**record.metrics, **figures}, checks={**record.checks, **after})


def _warm_up(engine: Engine, workload: Workload, number: int) -> None:
    items = tuple(WorkItem(i.prompt, min(i.max_tokens, _WARM_UP_TOKENS)) for i in workload.items[:number])
    if items:
        LoadRun(engine, Workload(workload.name, items), Load("throughput"), prefix="warm-").run()


def _reporter(progress: ProgressFn, stage: str, total: int) -> Callable[[RequestTiming], None]:
    """Reports ended requests, seldom: the timed run pays for it."""
    done, last = 0, float("-inf")
    progress(stage, 0, total)

    def ended(timing: RequestTiming) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if done == total or now - last >= _REPORT_SECONDS:
            last = now
            progress(stage, done, total)

    return ended


def _profile(
    engine: Engine,
    workload: Workload,
    load: Load,
    seconds: float,
    duration: float,
    progress: ProgressFn,
    cell: str,
) -> tuple[dict[str, Any], str]:
    """The share of a window of the same load in which the device had nothing to do, and how the profile ended.

    The window lies in the middle of the run. Under the profiler CUDA graphs are taken apart and the host is slower, so
    the share is an upper bound for the timed run. In an open loop the engine also idles for want of requests.
    """
    from qwen35_jax.bench.device_trace import profile

    stage = f"{cell}: profiling"
    progress(stage, 0, 1, f"{seconds:.1f} s")
    run = LoadRun(engine, workload, load, prefix="profile-")
    _run_for(run, (duration - seconds) / 2)

    def window() -> None:
        _run_for(run, seconds)
        run.give_up()  # waits for the last dispatch

    note = ""
    share = None
    try:
        trace = profile(window)
        share, note = trace.idle_share, trace.note
    except RuntimeError as error:  # the timed run is measured: a profiler that fails does not undo it
        run.give_up()
        note = str(error)
    progress(stage, 1, 1, note)
    if share is None:
        return {}, note or "no idle share"
    return {"idle_share": share, "profile_s": seconds}, PROFILED


def _run_for(run: LoadRun, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until and run.advance():
        pass


def table(records: Sequence[Record]) -> str:
    """The figures of records side by side: a line a metric, a column a cell."""
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    columns = [["", *(record.cell for record in records)]]
    columns += [[name, *(_shown(record.metrics.get(name)) for record in records)] for name in names]
    widths = [max(len(row[at]) for row in columns) for at in range(len(records) + 1)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in columns
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
