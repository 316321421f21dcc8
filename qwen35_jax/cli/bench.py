"""``qwen35-bench``: throughput and latency of a model on this machine, one record a cell."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from qwen35_jax.cli.common import EXIT_FAILED, CommandLine, run_command, run_with_flags
from qwen35_jax.errors import UserInputError

if TYPE_CHECKING:
    from qwen35_jax.bench.cells import CellOptions, CellSpec
    from qwen35_jax.bench.records import Record
    from qwen35_jax.config import EngineConfig, ModelConfig
    from qwen35_jax.engine import Engine

_IMPORTED = time.perf_counter()  # stands in for the start of the process where the system does not say it
_KINDS = ("throughput", "closed", "open")
_USAGE = "qwen35-bench throughput|closed|open (--preset=SIZE | --model=DIR) [--flag=value ...]"
_DESCRIPTION = """
Measures a model under load and prints one JSON record for each cell on stdout; progress and a table go to stderr.

  qwen35-bench throughput --preset=4b --input_len=1024 --output_len=128    everything is sent at once
  qwen35-bench throughput --preset=4b --lengths=lognormal                  2,000 requests of many lengths
  qwen35-bench closed --preset=4b --concurrency=1,8,16                     so many clients, one request each at a time
  qwen35-bench open --preset=4b --rate=16,32                               Poisson arrivals, requests a second

Several concurrencies or rates are several cells on one engine, and so are the cells of --cells, of any kinds:

  qwen35-bench --preset=4b --cells=throughput:1024x128:1024,closed:1024x256:c8,open:1024x128:qps16:256

(KIND:LENGTHS, then clients cN or rate qpsR and the number of requests.) --preset takes random weights. Requests have
random prompts, are greedy and ignore EOS, so that each gives exactly its output length. Metrics are those of
`vllm bench serve`, without HTTP and text; qwen35_jax/bench/metrics.py defines them.

After the timed run a few requests are run again alone and compared, and a window of the same load is profiled (on a
GPU). A record goes to --results before that window, and again with its figures in the same place. Exit codes: 0 every
cell is measured; 1 a cell's checks failed (it is printed, and not written to --results) or the run broke off; 2
something in the command line or the files is wrong; 130 interrupted.
"""


def command_line() -> CommandLine:
    """The flags of this command."""
    line = CommandLine(_USAGE, _DESCRIPTION)
    line.group("Model")
    line.define("str", "preset", None, "A member of the family by name, with random weights: 0.8b, 2b, 4b, 9b, 27b ...")
    line.define("str", "model", None, "Directory of a model, instead.")
    line.define("str", "size", None, "What cells call the model; the default is the preset of its dimensions.")
    line.group("Load")
    line.define("str", "cells", None, "Cells of any kinds, comma-separated, in place of throughput, closed or open.")
    line.define("str", "lengths", "fixed", "fixed (--input_len, --output_len), lognormal, or a JSONL file.")
    line.define("int", "input_len", 1024, "Prompt tokens of a request.")
    line.define("int", "output_len", 128, "Output tokens of a request.")
    line.define(
        "int",
        "num_requests",
        None,
        "Requests of a cell [throughput 1024, lognormal 2000, closed 8 a client, open 256].",
    )
    line.define("str", "concurrency", None, "Clients of a closed loop; several, comma-separated, are several cells.")
    line.define("str", "rate", None, "Requests a second of an open loop; several, comma-separated, are several cells.")
    line.define("int", "workload_seed", 0, "Seed of lengths, prompts and arrival times.")
    line.group("Measuring")
    line.define("str", "results", None, "Results file (a JSON list) to which the records are added.")
    line.define("str", "start_cell", None, "Also measure this process's start to its first token, as cold or warm.")
    line.define("int", "warm_up_requests", 8, "Requests before each timed run.")
    line.define("int", "check_rows", 4, "Requests that are run again alone after it and compared.")
    line.define("float", "check_margin", None, "Margin in nats that explains another token [float32 0, bfloat16 0.75].")
    line.define("float", "profile_seconds", None, "Profiled window for the device's idle share, 0 for none [GPU 2].")
    line.define_engine()
    return line


def main(argv: Sequence[str], *, make_engine: Callable[..., Engine] | None = None) -> int:
    """Run the command.

    Args:
        argv: the program's name, the kind of load and flags.
        make_engine: stands in for :func:`~qwen35_jax.loading.create_engine`'s first result, for tests.

    Returns:
        The exit code.
    """
    program, *words = argv
    kind = words.pop(0) if words and not words[0].startswith("-") else None

    def body(line: CommandLine) -> int:
        try:
            return _run(line, kind, make_engine)
        except UserInputError:
            raise
        except Exception as error:  # whatever broke the run: what was measured before is printed and written
            traceback.print_exc()
            print(f"error: the run broke off: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
            return EXIT_FAILED

    return run_with_flags(command_line(), [program, *words], body)


def run() -> NoReturn:
    """Entry point of the console command."""
    run_command(main)


def _run(line: CommandLine, kind: str | None, make_engine: Callable[..., Engine] | None) -> int:
    # Everything that can be wrong is looked at before the engine is made.
    from qwen35_jax.bench.cells import CellOptions
    from qwen35_jax.bench.records import check_results, own_commit
    from qwen35_jax.bench.start import CacheCounter, check_start
    from qwen35_jax.llm import engine_config
    from qwen35_jax.progress import Progress

    specs = _specs(line, kind)
    options = CellOptions(line.warm_up_requests, line.check_rows, line.check_margin, line.profile_seconds)
    model_config, size = _model(line)
    if line.start_cell not in (None, "cold", "warm"):
        raise UserInputError(f"--start_cell must be cold or warm, got {line.start_cell!r}")
    if line.results:
        check_results(line.results)
    own_commit()
    config = engine_config(_engine_options(line, specs))
    if line.start_cell is not None:
        check_start(line.start_cell, config.compilation_cache_dir)
    for spec in specs:
        spec.name(size, config)

    progress = Progress()
    cache = CacheCounter()
    with _model_dir(line.model, model_config) as directory:
        engine = (make_engine or _make_engine)(directory, config, progress)
    with contextlib.closing(engine):
        return _Session(engine, model_config, size, options, line.results, progress).run(specs, line.start_cell, cache)


def _specs(line: CommandLine, kind: str | None) -> list[CellSpec]:
    """The cells of a command line.

    Raises:
        UserInputError: no kind of load, an unknown one, a flag that does not belong to it, or a wrong value.
    """
    from qwen35_jax.bench.cells import CellSpec, default_requests, parse_spec
    from qwen35_jax.bench.loops import Load
    from qwen35_jax.bench.workload import LOGNORMAL_REQUESTS, fixed, from_file, lognormal

    given = {name: flag for name in ("concurrency", "rate") if (flag := getattr(line, name)) is not None}
    if line.cells is not None:
        if kind is not None or given:
            raise UserInputError("--cells says kind, concurrency and rate of every cell: none may be given beside it")
        return [parse_spec(text, seed=line.workload_seed) for text in line.cells.split(",")]
    if kind not in _KINDS:
        found = "needed first" if kind is None else f"not {kind!r}"
        raise UserInputError(f"a kind of load is {found}: throughput, closed or open (see --help)")
    wanted = {"closed": "concurrency", "open": "rate"}.get(kind)
    for name in given:
        if name != wanted:
            raise UserInputError(f"--{name} does not belong to {kind!r}")
    if wanted is not None and wanted not in given:
        raise UserInputError(f"--{wanted} is needed for {kind!r}")
    match kind:
        case "closed":
            loads = [Load("closed", concurrency=n) for n in _numbers("concurrency", line.concurrency, int)]
        case "open":
            loads = [Load("open", rate=r) for r in _numbers("rate", line.rate, float)]
        case _:
            loads = [Load("throughput")]
    specs = []
    for load in loads:
        number, seed = line.num_requests, line.workload_seed
        if line.lengths == "fixed":
            number = default_requests(load) if number is None else number
            lengths = fixed(number, line.input_len, line.output_len, seed=seed)
        elif line.lengths == "lognormal":
            lengths = lognormal(LOGNORMAL_REQUESTS if number is None else number, seed=seed)
        else:
            lengths = from_file(line.lengths, number, seed=seed)
        specs.append(CellSpec(load, lengths))
    return specs


def _numbers[T](name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UserInputError(f"--{name} must be a number or several, comma-separated, got {text!r}") from error


def _model(line: CommandLine) -> tuple[ModelConfig, str]:
    """The model's configuration and what cells call it."""
    from qwen35_jax.bench.cells import size_of
    from qwen35_jax.config import ModelConfig

    if (line.preset is None) == (line.model is None):
        raise UserInputError("either --preset or --model is needed (see --help)")
    if line.preset is not None:
        config, name = ModelConfig.preset(line.preset), line.preset.lower()
    else:
        config = ModelConfig.from_hf(line.model)
        name = size_of(config) or os.path.basename(os.path.abspath(line.model)).lower()
    size = line.size or name
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", size):
        raise UserInputError(f"--size is needed: {size!r} cannot be in the name of a cell (lower-case letters, digits)")
    return config, size


def _engine_options(line: CommandLine, specs: Sequence[CellSpec]) -> dict[str, Any]:
    """The engine's options: token ids only, and a context for the longest request unless another is asked for."""
    options = line.engine_options() | {"skip_tokenizer_init": True}
    if line.preset is not None:
        options["load_format"] = "random"
    longest = max(spec.lengths.longest for spec in specs)
    if options["max_model_len"] is None:
        options["max_model_len"] = -(-longest // 64) * 64
    elif options["max_model_len"] < longest:
        raise UserInputError(
            f"--max_model_len={options['max_model_len']} is less than the longest request, {longest} tokens"
        )
    return options


@contextlib.contextmanager
def _model_dir(model: str | None, config: ModelConfig) -> Iterator[str]:
    """A directory that describes the model: its own, or for a preset one with a ``config.json`` and no more."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="qwen35-bench-") as directory:
        with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config.to_hf(), file)
        yield directory


def _make_engine(directory: str, config: EngineConfig, progress: Any) -> Engine:
    from qwen35_jax.cache import MemoryPlanError
    from qwen35_jax.loading import create_engine

    try:
        return create_engine(directory, progress=progress, **dataclasses.asdict(config))[0]
    except MemoryPlanError as error:
        raise UserInputError(str(error)) from error


class _Session:
    """Measures cells on one engine and gives their records out."""

    def __init__(
        self,
        engine: Engine,
        model_config: ModelConfig,
        size: str,
        options: CellOptions,
        results: str | None,
        progress: Any,
    ):
        self._engine, self._model_config, self._size, self._options = engine, model_config, size, options
        self._results, self._progress = results, progress
        self._failed = False

    def run(self, specs: Sequence[CellSpec], start: Any, cache: Any) -> int:
        from qwen35_jax.bench.cells import table

        records = []
        if start is not None:
            records.append(self._start(specs[0], start, cache))
        cache.close()
        for spec in specs:
            records.append(self._measure(spec))
        print(table(records), file=sys.stderr)
        return EXIT_FAILED if self._failed else 0

    def _measure(self, spec: CellSpec) -> Record:
        from qwen35_jax.bench.cells import run_cell
        from qwen35_jax.bench.checks import failures

        early: list[Record] = []  # the record before its window is profiled

        def measured(record: Record) -> None:
            early.append(record)
            self._write(record, failures(record.checks))

        try:
            record = run_cell(
                self._engine,
                self._model_config,
                spec,
                size=self._size,
                options=self._options,
                progress=self._progress,
                measured=measured,
            )
        except BaseException:
            for record in early:  # what became of the profile undoes nothing
                self._print(record, failures(record.checks))
            raise
        self._print(record, failures(record.checks))
        self._write(record, failures(record.checks), *early)
        return record

    def _start(self, spec: CellSpec, kind: Any, cache: Any) -> Record:
        from qwen35_jax.bench.cells import settings_of, start_metrics, suffixes
        from qwen35_jax.bench.records import make_record
        from qwen35_jax.bench.start import first_token_s, process_age, start_failure

        first = first_token_s(self._engine, spec.lengths.fill(self._engine.num_valid).items[0])
        age = process_age()
        since_import = time.perf_counter() - _IMPORTED
        plausible = age is not None and age >= since_import
        record = make_record(
            f"start/{self._size}" + suffixes(self._engine.config),
            {
                f"{kind}_s": age if plausible else since_import,
                **start_metrics(self._engine),
                "first_token_s": first,
                "cache_hits": cache.hits,
                "cache_misses": cache.misses,
            },
            settings=settings_of(
                self._engine, {"start": kind, "clock_from": "process start" if plausible else "import of the command"}
            ),
            checks={"compiles_after_warmup": self._engine.compiles_after_warmup},
            device=self._engine.programs.device,
        )
        failure = start_failure(kind, self._engine.start_report, cache)
        self._print(record, [failure] if failure else [])
        self._write(record, [failure] if failure else [])
        return record

    def _write(self, record: Record, failures: Sequence[str], early: Record | None = None) -> None:
        """Write a record if its checks hold, in the place of its early form if there is one."""
        from qwen35_jax.bench.records import append_records, replace_record

        if not self._results or failures:
            return
        if early is None:
            append_records(self._results, [record])
        else:
            replace_record(self._results, early, record)

    def _print(self, record: Record, failures: Sequence[str]) -> None:
        print(json.dumps(record.to_dict(), allow_nan=False), flush=True)
        for failure in failures:
            self._failed = True
            self._progress.message(f"{record.cell}: FAILED: {failure}")


if __name__ == "__main__":
    run()
