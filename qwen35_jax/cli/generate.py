"""``qwen35-generate``: answer every line of a JSONL file."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from qwen35_jax.cli.common import EXIT_FAILED, CommandLine, run_command, run_with_flags
from qwen35_jax.errors import UserInputError

if TYPE_CHECKING:
    from qwen35_jax.llm import LLM

_USAGE = "qwen35-generate --model=DIR --input=IN.jsonl --output=OUT.jsonl [--flag=value ...]"
_DESCRIPTION = """
Answers every line of IN.jsonl with the model in DIR and appends one record a line to OUT.jsonl as the answers finish
(each names its line and its custom_id; the order is that of finishing).

A line is an OpenAI batch request
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 100}}
or plain
  {"custom_id": "b", "prompt": "Once upon", "temperature": 0.7}      (or "messages", or "prompt_token_ids")
A line that cannot run gets a record with an error; the others go on.

Run the same command again to resume a job that was interrupted, by a signal or a crash: rows with a record are not run
again. The output is refused if it was begun with another model, other sampling defaults or other rows.

Exit codes: 0 every line has its record (the summary says how many failed); 1 the run broke off, and can be resumed;
2 something in the command line or the files is wrong, and nothing was written; 130 or 143 interrupted by a signal, and
can be resumed.
"""


def command_line() -> CommandLine:
    """The flags of this command."""
    line = CommandLine(_USAGE, _DESCRIPTION)
    line.group("Job")
    line.define("str", "model", None, "Directory of the model: a Hugging Face checkpoint or a converted one.")
    line.define("str", "input", None, "JSONL file to read.")
    line.define("str", "output", None, "JSONL file to append to; OUT.jsonl.manifest.json is written beside it.")
    line.define("bool", "overwrite", False, "Throw an existing output away instead of resuming it.")
    line.define("bool", "rerun_failed", False, "On a resume, run rows again whose record is an error.")
    line.define("bool", "rerun_changed", False, "On a resume, run rows again whose line has changed.")
    line.define("str", "trace_output", None, "JSONL file for one record a step: its kind, sizes and duration.")
    line.define_sampling()
    line.define_engine()
    return line


def main(argv: Sequence[str], *, make_llm: Callable[..., LLM] | None = None) -> int:
    """Run the command.

    Args:
        argv: the program's name and its flags.
        make_llm: stands in for :class:`~qwen35_jax.llm.LLM`, for tests.

    Returns:
        The exit code.
    """
    return run_with_flags(command_line(), argv, lambda line: _run(line, make_llm))


def run() -> NoReturn:
    """Entry point of the console command."""
    run_command(main)


def _run(line: CommandLine, make_llm: Callable[..., LLM] | None) -> int:
    line.require("model", "input", "output")

    # Everything that can be wrong is looked at before the model is loaded, and before anything is written.
    from qwen35_jax.batch.job import BatchJob, JobSpec
    from qwen35_jax.batch.manifest import Manifest
    from qwen35_jax.config import ModelConfig
    from qwen35_jax.llm import default_sampling_params, engine_config
    from qwen35_jax.progress import Progress

    config = engine_config(line.engine_options())
    ModelConfig.from_hf(line.model)
    sampling = line.sampling(default_sampling_params(line.model))
    switches = line.chat_template_switches()
    traced = (line.trace_output,) if line.trace_output else ()
    spec = JobSpec(
        input=line.input,
        output=line.output,
        model_name=os.path.basename(os.path.abspath(line.model)),
        sampling=sampling,
        chat_template_kwargs=switches,
        overwrite=line.overwrite,
        rerun_failed=line.rerun_failed,
        rerun_changed=line.rerun_changed,
        also_used=traced,
    )
    manifest = Manifest.of_job(line.model, config, sampling, switches, line.input)
    progress = Progress()
    with BatchJob(spec, manifest) as job:
        if traced:
            _check_trace(line.trace_output, line.input)
        if job.finished:
            print(f"nothing to do: every row has its record\n{job.summary().describe()}")
            return 0
        if job.resumes:
            progress.message(f"resuming {line.output}: {job.resumes} rows have their record")
        with _load(line.model, dataclasses.asdict(config), progress, make_llm) as llm:
            try:
                summary = job.run(llm, progress)
            except UserInputError:
                traced = ()
                raise
            except Exception as error:  # whatever broke the run: say so, and how to go on
                traceback.print_exc()
                reason = " ".join(str(error).split()) or type(error).__name__
                print(f"error: the job broke off: {reason}; run the same command again to resume", file=sys.stderr)
                return EXIT_FAILED
            finally:
                if traced:
                    _write_trace(line.trace_output, llm.engine, progress)
    print(summary.describe())
    if summary.interrupted is None:
        return 0
    return 128 + signal.Signals[summary.interrupted] if summary.interrupted.startswith("SIG") else EXIT_FAILED


def _load(model: str, options: dict[str, Any], progress: Any, make_llm: Callable[..., LLM] | None) -> LLM:
    if make_llm is not None:
        return make_llm(model, progress=progress, **options)
    from qwen35_jax.cache import MemoryPlanError
    from qwen35_jax.llm import LLM
    from qwen35_jax.text import TokenizerError

    try:
        return LLM(model, progress=progress, **options)
    except (MemoryPlanError, TokenizerError) as error:
        raise UserInputError(str(error)) from error


def _check_trace(path: str, input_path: str) -> None:
    from qwen35_jax.batch.journal import same_file

    if same_file(path, input_path):
        raise UserInputError(f"--trace_output {path} is the input")
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise UserInputError(f"--trace_output {path}: the directory {parent} does not exist")
    if os.path.isdir(path):
        raise UserInputError(f"--trace_output {path} is a directory")


def _write_trace(path: str, engine: Any, progress: Any) -> None:
    records = getattr(getattr(engine, "trace", None), "records", ())
    try:
        with open(path, "w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")
    except OSError as error:  # the answers are there: a job does not fail for its trace
        progress.message(f"warning: --trace_output {path} cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    run()
