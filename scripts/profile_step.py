"""Where the time of single steps goes: an engine's own programs, timed, then profiled.

    python scripts/profile_step.py --preset=4b --results=benchmarks/results/steps.json --picture=steps.png

Random weights are made on the device, and of the engine's programs only those are compiled that the steps need. Each
step is timed without the profiler, then run under it: a table gives the kernels' time by part of the model, the time in
which nothing ran (the measured step less its kernels), the launches a layer, and the floor. One record a step goes to
--results: cells ``decode/<size>/rows<N>`` (--context=1100) and ``prefill/<size>/<tokens>`` (prompts of 1024 tokens), of
the greedy sampler. What is otherwise is in a suffix.

    python scripts/profile_step.py --preset=4b --decode_rows= --prefill= --long_prompt=131072 \\
        --max_model_len=135168 --max_num_seqs=8 --num_kv_pages=2112

A long prompt in chunks of --max_num_batched_tokens is the cell ``long/<size>/<tokens>``: the whole of it, each chunk
beside its floor, the peak of memory, and the token that follows compared with that of chunks of half the size. It wants
few sequences: the page table of every step has --max_num_seqs rows as wide as --max_model_len.
"""

import contextlib
import dataclasses
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qwen35_jax import runtime
from qwen35_jax.bench import cells, floors, long_prompt, pictures, steps
from qwen35_jax.bench.device_trace import GROUP_OF, DeviceTrace, Launches, launches_of
from qwen35_jax.bench.known import FLOOR_DEVICE
from qwen35_jax.bench.pictures import StepBar, step_bar
from qwen35_jax.bench.records import (
    Record,
    append_records,
    check_results,
    make_record,
    own_commit,
    replace_record,
)
from qwen35_jax.bench.steps import StepCheck, StepLoad, StepTime
from qwen35_jax.bench.workload import lognormal
from qwen35_jax.cache import MemoryPlanError
from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.engine import Engine
from qwen35_jax.errors import UserInputError
from qwen35_jax.loading import build_engine
from qwen35_jax.presets import PRESETS
from qwen35_jax.progress import Progress
from qwen35_jax.steps import VARIANTS, Variant
from qwen35_jax.weights import random_params
from schedulers import BucketLadder, BucketOverflow

STANDARD_PROMPT = 1024  # prompts of this length make the cell without a suffix
STANDARD_CONTEXT = 1100  # and decode rows of this context


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step to measure.

    Attributes:
        name: without the size's variants, ``decode/4b/rows8``.
        rows: of a decode step, or 0.
        lengths: prompts of a prefill step, or none.
    """

    name: str
    rows: int = 0
    lengths: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a cell.

    Attributes:
        cell: its name.
        load: what ran.
        time: without the profiler.
        check: what it gave.
        solo: a prefill's first prompt alone, in the smallest program that holds it, and what that gave; None for decode
            and for a single prompt.
        floor_ms: None on another device than the one whose ceilings are known.
        trace: under the profiler; None when that was not wanted.
        traced: steps in the trace.
        layer_types: of the model.
    """

    cell: str
    load: StepLoad
    time: StepTime
    check: StepCheck
    solo: tuple[StepLoad, StepCheck] | None
    floor_ms: float | None
    trace: DeviceTrace | None = None
    traced: int = 0
    layer_types: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, tuple[float, float, tuple[tuple[str, float], ...]]]:
        """Milliseconds, kernels and (kernel, milliseconds) of one step by part; empty without device events."""
        if self.trace is None:
            return {}
        return {
            part: (
                time.seconds * 1e3 / self.traced,
                time.kernels / self.traced,
                tuple((name, seconds * 1e3 / self.traced) for name, seconds in time.names.items()),
            )
            for part, time in self.trace.by_part().items()
        }

    @property
    def launches(self) -> Launches | None:
        """Launches by kind of layer; None without a trace, or where the trace does not tell."""
        if self.trace is None:
            return None
        kind = "decode" if self.load.context else "prefill"
        return launches_of(self.trace.events, kind, self.layer_types, self.traced)

    @property
    def busy_ms(self) -> float | None:
        """Milliseconds of a step in which a kernel ran."""
        return self.trace.busy_s * 1e3 / self.traced if self.trace is not None and self.trace.events else None

    @property
    def idle_ms(self) -> float | None:
        """The measured step less its kernels; below 0 if the profiler slowed the kernels down."""
        return None if self.busy_ms is None else self.time.step_ms - self.busy_ms


def parse_rows(text: str) -> tuple[int, ...]:
    """Raises: UserInputError: not a list of positive numbers."""
    values = [word.strip() for word in text.split(",") if word.strip()]
    if any(not re.fullmatch("[1-9][0-9]*", value) for value in values):
        raise UserInputError(f"--decode_rows must be positive numbers with commas between them, got {text!r}")
    return tuple(sorted({int(value) for value in values}))


def parse_prefill(text: str, ragged_tokens: int) -> dict[str, tuple[int, ...]]:
    """Prompt lengths by name of the step: ``8x1024`` is eight prompts, ``ragged`` the lognormal lengths.

    Raises:
        UserInputError: another form.
    """
    found = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word == "ragged":
            found[word] = ragged_lengths(ragged_tokens)
        elif match := re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", word):
            found[word] = (int(match[2]),) * int(match[1])
        else:
            raise UserInputError(f"--prefill must be words such as 8x1024 or ragged, got {word!r}")
    return found


def ragged_lengths(tokens: int) -> tuple[int, ...]:
    """Prompts of the lognormal workload in its order until there are so many tokens; the last one is cut."""
    lengths = lognormal().prompts
    ends = np.minimum(np.cumsum(lengths), tokens)
    count = int(np.searchsorted(ends, tokens)) + 1
    return tuple(np.diff(ends[:count], prepend=0).tolist())


def cells_of(
    size: str,
    rows: Sequence[int],
    prefill: Mapping[str, tuple[int, ...]],
    suffix: str,
    context: int = STANDARD_CONTEXT,
) -> list[Cell]:
    """The steps of a run."""
    far = "" if context == STANDARD_CONTEXT else f"@context{context}"
    found = [Cell(f"decode/{size}/rows{n}{suffix}{far}", rows=n) for n in rows]
    for name, lengths in prefill.items():
        own = "" if set(lengths) == {STANDARD_PROMPT} else f"@{name}"
        found.append(Cell(f"prefill/{size}/{sum(lengths)}{suffix}{own}", lengths=lengths))
    return found


def check_long_prompt(tokens: int, config: EngineConfig) -> None:
    """Refuse a long prompt that cannot be measured, before an engine is made for it; 0 is none.

    Raises:
        UserInputError: names the flags.
    """
    if tokens and tokens <= config.max_num_batched_tokens:
        raise UserInputError(
            f"--long_prompt must be more than one chunk of --max_num_batched_tokens={config.max_num_batched_tokens}, "
            f"got {tokens}"
        )
    if tokens:
        long_prompt.check_chunk(config.max_num_batched_tokens)
    if config.max_model_len is not None and tokens > config.max_model_len:
        raise UserInputError(f"--long_prompt must fit into --max_model_len={config.max_model_len}, got {tokens}")


def make_engine(
    preset: str, config: EngineConfig, wanted: Sequence[Cell], context: int, variant: Variant, long_tokens: int = 0
) -> Engine:
    """An engine with random weights and no programs but those that the steps and a long prompt need."""
    model = ModelConfig.preset(preset)
    runtime.prepare(config.gpu_memory_utilization, config.compilation_cache_dir)

    def choose(ladder: BucketLadder):
        keys = [
            steps.decode_bucket_key(ladder, cell.rows, context, variant)
            if cell.rows
            else steps.prefill_bucket_key(ladder, cell.lengths, variant)
            for cell in wanted
        ]
        if long_tokens:
            keys += long_prompt.keys_of(ladder, long_tokens, config.max_num_batched_tokens, variant)
        return list(dict.fromkeys(keys))

    with contextlib.closing(Progress()) as progress:
        return build_engine(
            config,
            model,
            lambda device, dtype: random_params(model, dtype=dtype, seed=config.seed, device=device),
            eos_ids=model.eos_token_ids,
            num_valid=model.vocab_size,
            progress=progress,
            choose=choose,
        )


def measure(
    engine: Engine,
    model: ModelConfig,
    cell: Cell,
    context: int,
    variant: Variant,
    *,
    repeats: int,
    dispatches: int,
) -> Measured:
    """Check and time one step."""
    solo = None
    if cell.rows:
        load = steps.decode_load(engine, cell.rows, context, variant)
    else:
        load = steps.prefill_load(engine, cell.lengths, variant)
        if len(cell.lengths) > 1:
            alone = steps.prefill_load(engine, cell.lengths[:1], variant)
            solo = alone, steps.check_step(engine, alone)
    check = steps.check_step(engine, load)
    time = steps.measure(engine, load, dispatches=dispatches, repeats=repeats)
    floor = None
    if engine.programs.device.device_kind == FLOOR_DEVICE:
        if cell.rows:
            floor = floors.decode_step_floor_s(model, cell.rows, context, state_dtype=engine.config.state_dtype)
        else:
            floor = floors.prefill_floor_s(model, load.tokens)
    floor_ms = None if floor is None else floor * 1e3
    return Measured(cell.name, load, time, check, solo, floor_ms, layer_types=tuple(model.layer_types))


def profiled(engine: Engine, step: Measured, number: int, directory: pathlib.Path | None) -> Measured:
    """The step with a trace of so many of it; ``directory`` keeps the profiler's files and a list of kernels."""
    trace = steps.kept_trace(engine, step.load, number, files_of(directory, step.cell))
    return dataclasses.replace(step, trace=trace, traced=number)


def files_of(directory: pathlib.Path | None, cell: str) -> pathlib.Path | None:
    """Where the profiler's files of a cell stay, None if nowhere; with ``.tsv`` behind it, its list of kernels."""
    return None if directory is None else directory / re.sub("[/@]", "-", cell)


def checks_of(measured: Measured, others: Sequence[Measured]) -> dict[str, Any]:
    """What a record says about the results: finite rows, twins, and the same sequences in another step.

    That is the largest other decode step, for a prefill its first prompt alone, and for a single prompt the largest
    other prefill that begins with it.
    """
    check, load = measured.check, measured.load
    found: dict[str, Any] = {"rows": check.rows, "finite_rows": check.finite, "first_mismatch": None}
    if check.finite < check.rows:
        found["first_mismatch"] = {"what": "logits that are not finite", "rows": check.rows - check.finite}
    if check.twin_tokens is not None:
        found |= {"twin_max_abs_delta": check.twin_delta, "twin_tokens_equal": len(set(check.twin_tokens)) == 1}
        if check.twin_logprob_delta is not None:
            found["twin_max_abs_delta_logprob"] = check.twin_logprob_delta
        if len(set(check.twin_tokens)) > 1 and found["first_mismatch"] is None:
            found["first_mismatch"] = {"what": "tokens of twins", "tokens": list(check.twin_tokens)}
    # The sequences that begin alike: all decode rows of one context, or prompts of the first one's length.
    alike = [
        other
        for other in others
        if (other.load.context, other.load.lengths[:1]) == (load.context, load.lengths[:1]) and other is not measured
    ]
    other, name = measured.solo, "the first prompt alone"
    if other is None and alike:
        largest = max(alike, key=lambda other: other.check.rows)
        other, name = (largest.load, largest.check), largest.cell
    if other is not None:
        compared = check.against(other[1], load, other[0])
        found |= {"compared_with": name, **compared, "skipped": check.rows - compared["rows_compared"]}
    return found


def record_of(engine: Engine, measured: Measured, others: Sequence[Measured], variant: Variant) -> Record:
    """The record of a step."""
    time, load = measured.time, measured.load
    metrics: dict[str, Any] = {
        "tok_s": load.tokens / time.step_ms * 1e3,
        "step_ms": time.step_ms,
        "dispatch_ms": time.dispatch_ms,
        "spread": time.spread,
    }
    if measured.floor_ms is not None:
        metrics |= {"floor_ms": measured.floor_ms, "floor_share": measured.floor_ms / time.step_ms}
    if measured.busy_ms is not None:
        assert measured.trace is not None
        metrics |= {
            "busy_ms": measured.busy_ms,
            "idle_ms": measured.idle_ms,
            "profiled_idle_share": measured.trace.idle_share,
            "kernels": sum(kernels for _, kernels, _ in measured.parts.values()),
            "parts": {part: ms for part, (ms, _, _) in measured.parts.items()},
        }
        if measured.launches is not None:
            metrics["launches"] = dataclasses.asdict(measured.launches)
    clocks = {"timed": time.clocks, "profiled": measured.trace.clocks if measured.trace is not None else {}}
    if any(clocks.values()):
        metrics["clocks"] = {when: figures for when, figures in clocks.items() if figures}
    settings = {
        "program": str(load.key),
        "variant": variant,
        "dispatches": time.dispatches,
        "repeats": time.repeats,
        "profiled_steps": measured.traced,
        **({"profiled_after": steps.SETTLE} if measured.traced else {}),
        **({"context": load.context} if load.context else {"lengths": list(load.lengths)}),
    }
    return make_record(
        measured.cell,
        metrics,
        settings=cells.settings_of(engine, settings),
        checks=checks_of(measured, others),
        device=engine.programs.device,
    )


def table(measured: Measured, top: int) -> str:
    """Parts of a step, longest first, then its longest kernels."""
    time = measured.time
    floor = "" if measured.floor_ms is None else f", floor {measured.floor_ms:.3f} ms"
    lines = [
        f"{measured.cell}: {time.step_ms:.3f} ms a step{floor} ({measured.load.key}; host {time.dispatch_ms:.3f} ms a "
        f"dispatch, spread {time.spread:.1%})"
    ]
    if measured.trace is None:
        return lines[0]
    if measured.busy_ms is None or measured.idle_ms is None:
        return f"{lines[0]}\n  {measured.trace.note}"
    lines.append(f"  {'part':<26} {'group':<10} {'ms':>9} {'share':>7} {'kernels':>8}")
    rows = [(part, GROUP_OF.get(part, "other"), ms, kernels) for part, (ms, kernels, _) in measured.parts.items()]
    for part, group, ms, kernels in [*rows, ("idle (step - kernels)", "", measured.idle_ms, None)]:
        count = "" if kernels is None else f"{kernels:.1f}"
        lines.append(f"  {part:<26} {group:<10} {ms:>9.3f} {ms / time.step_ms:>7.1%} {count:>8}")
    if (launches := measured.launches) is not None:
        lines.append(
            f"  launches: {launches.gdn_layer:.1f} a GDN layer, {launches.attention_layer:.1f} an attention layer, "
            f"{launches.other:.1f} outside of layers"
        )
    overlapped = sum(ms for _, _, ms, _ in rows) - measured.busy_ms
    if overlapped > 0.01 * measured.busy_ms:
        lines.append(f"  kernels ran beside each other for {overlapped:.3f} ms, which the parts count twice")
    kernels = [(ms, part, name) for part, (_, _, names) in measured.parts.items() for name, ms in names]
    lines += [f"    {ms:>9.3f} ms  {part:<24} {name[:90]}" for ms, part, name in sorted(kernels, reverse=True)[:top]]
    unknown = measured.parts.get("other")
    if unknown:
        lines.append(f"  other: {', '.join(name[:60] for name, _ in unknown[2][:20])}")
    if measured.trace.skipped_lines:
        skipped = ", ".join(f"{name} ({events})" for name, events in measured.trace.skipped_lines.items())
        lines.append(f"  lines of the profile that were not counted: {skipped}")
    return "\n".join(lines)


def bar_of(measured: Measured) -> StepBar:
    """The step as a bar of a picture."""
    parts = {part: ms for part, (ms, *_) in measured.parts.items()}
    return step_bar(measured.cell, measured.time.step_ms, parts, measured.idle_ms, measured.floor_ms)


def flags() -> CommandLine:
    line = CommandLine("profile_step.py --preset=NAME [--flag=value ...]", __doc__ or "")
    line.group("Steps")
    line.define("str", "preset", None, f"One of {', '.join(PRESETS)}.")
    line.define("str", "decode_rows", "1,8,16,64,128,256", "Rows of the decode steps; empty for none.")
    line.define("int", "context", STANDARD_CONTEXT, "Tokens that each decode row attends to.")
    line.define("str", "prefill", "8x1024", "Prefill steps: <prompts>x<tokens> or ragged; empty for none.")
    line.define("int", "long_prompt", 0, "Tokens of a long prompt, in chunks of --max_num_batched_tokens; 0 for none.")
    line.define("str", "variant", "greedy", f"Sampler variant of the programs: {', '.join(VARIANTS)}; rows are greedy.")
    line.define("int", "repeats", 5, "Chains of dispatches that are timed; the median counts.")
    line.define("int", "dispatches", 16, "Dispatches of a chain.")
    line.define("int", "profiled_steps", 4, "Steps under the profiler; 0 leaves it out.")
    line.group("Output")
    line.define("str", "results", None, "Results file to append the records to.")
    line.define("str", "picture", None, "PNG to draw.")
    line.define("str", "trace_dir", None, "Directory that keeps the profiler's files and lists of kernels, one a cell.")
    line.define("int", "top", 12, "Longest kernels to print for each step.")
    line.define_engine()
    return line


def _run(line: CommandLine) -> int:
    """Measure what the flags ask for, print tables, write files; 1 if a step's output was wrong."""
    line.require("preset")
    if line.variant not in VARIANTS:
        raise UserInputError(f"--variant must be one of {', '.join(VARIANTS)}, got {line.variant!r}")
    if line.profiled_steps < 0 or line.context < 1 or line.long_prompt < 0:
        raise UserInputError("--profiled_steps and --long_prompt must not be negative and --context at least 1")
    if line.trace_dir and not line.profiled_steps:
        raise UserInputError("--trace_dir keeps what the profiler saw, and --profiled_steps=0 leaves that out")
    if line.repeats < 1 or line.dispatches < 1:
        raise UserInputError(f"--repeats and --dispatches must be at least 1, got {line.repeats} and {line.dispatches}")
    options = line.engine_options() | {"load_format": "random", "skip_tokenizer_init": True}
    config = EngineConfig(**options).validate()
    check_long_prompt(line.long_prompt, config)
    model = ModelConfig.preset(line.preset)
    prefill = parse_prefill(line.prefill, min(8192, config.max_num_batched_tokens))
    suffix = cells.suffixes(config, line.variant)
    wanted = cells_of(line.preset.lower(), parse_rows(line.decode_rows), prefill, suffix, line.context)
    if not wanted and not line.long_prompt:
        raise UserInputError("nothing to measure: --decode_rows and --prefill are both empty, --long_prompt is 0")
    if line.decode_rows and config.max_model_len is not None and line.context > config.max_model_len:
        raise UserInputError(f"--context must fit into --max_model_len={config.max_model_len}, got {line.context}")
    if line.picture:
        pictures.check()
    if line.results:
        check_results(line.results)
    own_commit()
    engine = make_engine(line.preset, config, wanted, line.context, line.variant, line.long_prompt)
    found = []
    for cell in wanted:
        how = {"repeats": line.repeats, "dispatches": line.dispatches}
        found.append(measure(engine, model, cell, line.context, line.variant, **how))
        print(f"{cell.name}: {found[-1].time.step_ms:.3f} ms a step", file=sys.stderr, flush=True)
    whole = None
    if line.long_prompt:
        how = {"variant": line.variant, "repeats": line.repeats}
        with_floor = engine.programs.device.device_kind == FLOOR_DEVICE
        whole = long_prompt.measure(engine, model, line.preset.lower(), line.long_prompt, with_floor=with_floor, **how)
    records = [record_of(engine, step, found, line.variant) for step in found] + ([whole] if whole is not None else [])
    if line.results:  # what became of the profile undoes nothing
        append_records(line.results, records)

    def finished(number: int, record: Record) -> None:
        if line.results:
            replace_record(line.results, records[number], record)
        records[number] = record

    # Only now: a profiler that has been on once may leave the process slower.
    directory = pathlib.Path(line.trace_dir) if line.trace_dir else None
    if line.profiled_steps:
        for number, step in enumerate(found):
            found[number] = profiled(engine, step, line.profiled_steps, directory)
            finished(number, record_of(engine, found[number], found, line.variant))
    print("\n\n".join(table(step, line.top) for step in found))
    if whole is not None:
        if line.profiled_steps:
            files = files_of(directory, whole.cell)
            whole = long_prompt.profiled(engine, whole, line.profiled_steps, line.variant, files=files)
            finished(len(found), whole)
        print(long_prompt.describe(whole))
    for record in records:
        print(f"{record.cell}: {dict(record.checks)}")
    if line.picture and found:
        title = f"{line.preset} on {engine.programs.device.device_kind}"
        pictures.draw_steps(pathlib.Path(line.picture), title, [bar_of(step) for step in found])
    engine.close()
    return 1 if any(record.checks["first_mismatch"] for record in records) else 0


def main(argv: Sequence[str]) -> int:
    return run_with_flags(flags(), argv, _run, MemoryPlanError, BucketOverflow)


if __name__ == "__main__":
    run_command(main)
