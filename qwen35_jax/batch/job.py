"""An offline job: every line of the input gets exactly one record in the output, whatever happens in between.

A :class:`BatchJob` is made, and everything about its files is settled, before a model is loaded; :meth:`BatchJob.run`
then feeds the model a bounded number of rows at a time and writes each record the moment its row finishes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from qwen35_jax.batch import journal as journals
from qwen35_jax.batch.journal import DUPLICATE, Journal, KeyBook, OutputState, check_output, pack_key
from qwen35_jax.batch.manifest import Manifest
from qwen35_jax.batch.reader import MAX_LINE_BYTES, Line, LineSource, read_ahead
from qwen35_jax.batch.records import BadRow, Row, identify, line_digest, parse_line, rng_id, row_key
from qwen35_jax.batch.responses import error_record, response_record
from qwen35_jax.errors import UserInputError
from qwen35_jax.llm import LLM
from qwen35_jax.outputs import RequestError, RequestOutput
from qwen35_jax.progress import Progress, RowProgress
from qwen35_jax.requests import GenerationRequest
from qwen35_jax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """What a job reads, writes and assumes.

    Attributes:
        input: path of the JSONL input; see :mod:`qwen35_jax.batch.records`.
        output: path of the JSONL output; see :mod:`qwen35_jax.batch.responses`.
        model_name: name of the model in the answers.
        sampling: options of rows that do not say.
        chat_template_kwargs: switches of chats that do not say.
        overwrite: throw an existing output away instead of resuming it.
        rerun_failed: on a resume, run rows again whose record is an error.
        rerun_changed: on a resume, run rows again whose line has changed; without it that is an error.
        also_used: other files that the command reads or writes; the output must be none of them.
    """

    input: str
    output: str
    model_name: str
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overwrite: bool = False
    rerun_failed: bool = False
    rerun_changed: bool = False
    also_used: tuple[str, ...] = ()


@dataclasses.dataclass
class Summary:
    """How a job ended.

    Attributes:
        output: path of the output.
        rows: rows of the input that were reached (all of them, unless interrupted).
        answered: rows answered in this run.
        failed: rows that got an error record in this run.
        resumed: rows that had their record from an earlier run.
        resumed_failed: those among them whose record is an error.
        prompt_tokens: of answered rows.
        completion_tokens: of answered rows.
        seconds: of this run, loading left out.
        interrupted: name of the signal that ended the job; None when it ran to its end.
        errors: number of error records of this run by code.
        first_error: the first of them, for people.
    """

    output: str
    rows: int = 0
    answered: int = 0
    failed: int = 0
    resumed: int = 0
    resumed_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    interrupted: str | None = None
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first_error: str | None = None

    @property
    def recorded(self) -> int:
        """Rows that have their record now."""
        return self.answered + self.failed + self.resumed

    def describe(self) -> str:
        """A few lines for people; the last one names the output."""
        rate = self.completion_tokens / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.answered} rows answered, {self.failed} failed, {self.resumed} had their record before"
            + (f" ({self.resumed_failed} of them an error)" if self.resumed_failed else "")
            + f"; {self.seconds:.1f} s",
            f"{self.prompt_tokens} prompt tokens, {self.completion_tokens} output tokens, {rate:.1f} output tokens/s",
        ]
        if self.errors:
            kinds = ", ".join(f"{number} {code}" for code, number in self.errors.most_common())
            lines.append(f"failed rows: {kinds}; first: {self.first_error}")
        if self.failed or self.resumed_failed:
            lines.append("failed rows have an error record; --rerun_failed runs them again")
        if self.interrupted:
            lines.append(
                f"interrupted by {self.interrupted}: {self.recorded} rows have their record; run the same command "
                f"again to do the rest"
            )
        lines.append(f"output: {self.output}")
        return "\n".join(lines)


class _Prepared(NamedTuple):
    """A row, and its request unless it cannot run or has its record already."""

    row: Row | BadRow
    request: GenerationRequest | None


class BatchJob:
    """One job, its files checked.

    Attributes:
        finished: every row of the input has its record already: nothing is left to run.

    Args:
        spec: what to do.
        manifest: what the answers depend on; an output that was begun under another one is not resumed.

    Raises:
        UserInputError: the input is unreadable, the output unusable, or begun with another model, other sampling
            defaults or other rows; the message says which. Nothing has been written then.
    """

    def __init__(self, spec: JobSpec, manifest: Manifest):
        self.spec = spec
        self.finished = False
        self._manifest = manifest
        self._source = LineSource(spec.input)
        try:
            check_output(spec.output, overwrite=spec.overwrite, inputs=(spec.input, *spec.also_used))
            journals.probe_lock(spec.output)
            self._before = OutputState() if spec.overwrite else self._earlier_run()
            self._drop = self._compare_rows(self._before)
        except BaseException:
            self._source.close()
            raise
        self._signals: list[str] = []
        self._told = 0

    @property
    def resumes(self) -> int:
        """Rows that will not run because they have their record."""
        return len(self._before.done)

    def close(self) -> None:
        """Let go of the input."""
        self._source.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # What an earlier run left.

    def _earlier_run(self) -> OutputState:
        """The records to keep."""
        output = self.spec.output
        if not os.path.exists(output):
            return OutputState()
        state = journals.read_output(output)
        if state.end == 0:
            return state
        changes = self._manifest.differences(Manifest.read(journals.manifest_path(output)))
        if changes:
            raise UserInputError(
                f"cannot resume {output}: it was begun with other settings: {'; '.join(changes[:5])}"
                + (f" and {len(changes) - 5} more" if len(changes) > 5 else "")
                + "; use the same ones, choose another output, or start again with --overwrite"
            )
        return state

    def _compare_rows(self, state: OutputState) -> frozenset[bytes]:
        """Match the records with the rows of the input; returns the keys whose records are to be dropped.

        Rows whose record is dropped leave ``state.done``.
        """
        if not state.done:
            return frozenset()
        book = KeyBook()
        changed, first, matched, rows = set(), "", 0, 0
        for index in range(len(self._source)):
            line = self._source[index]
            is_row, custom_id = (True, None) if line.too_long else identify(line.raw)
            if not is_row:
                continue
            rows += 1
            key, duplicate = book.key(custom_id, line.number)
            own = pack_key(key)
            keys = {own}
            if custom_id is not None and not duplicate:
                # What it had while its line could not be read, or while an earlier line had its custom_id.
                keys.add(pack_key(row_key(None, line.number)))
            for packed in sorted(keys):
                found = state.done.get(packed)
                if found is None:
                    continue
                matched += 1
                if packed != own or found.digest != line_digest(line.raw):
                    changed.add(packed)
                    first = first or _row_name(custom_id, line.number)
        hint = "choose another output, or start again with --overwrite"
        if matched < len(state.done):
            strangers = f"{len(state.done) - matched} of its {len(state.done)} records belong"
            raise UserInputError(
                f"cannot resume {self.spec.output}: {strangers} to no row of {self.spec.input} (it was begun with "
                f"{self._begun_with()}); {hint}"
            )
        if changed and not self.spec.rerun_changed:
            raise UserInputError(
                f"cannot resume {self.spec.output}: {len(changed)} rows of {self.spec.input} have changed since they "
                f"were answered (first: {first}); run them again with --rerun_changed, {hint}"
            )
        drop = frozenset(changed)
        if self.spec.rerun_failed:
            drop |= {key for key, done in state.done.items() if done.failed}
        for key in drop:
            state.failed -= state.done.pop(key).failed
        self.finished = len(state.done) == rows
        return drop

    def _begun_with(self) -> str:
        return Manifest.read(journals.manifest_path(self.spec.output)).input or "an unknown input"

    # Running.

    def summary(self) -> Summary:
        """How the job stands before it runs."""
        return Summary(self.spec.output, resumed=len(self._before.done), resumed_failed=self._before.failed)

    def run(self, llm: LLM, progress: Progress | None = None) -> Summary:
        """Answer all rows that have no record yet.

        SIGINT or SIGTERM lets the rows that have begun finish and ends the job; a second one ends it at once. Either
        way the output is whole and the same command resumes it.

        Args:
            llm: the model.
            progress: where to report; nowhere when None.

        Raises:
            UserInputError: the output was taken by another job meanwhile.
            OSError: the output cannot be written (a full disk).
            RuntimeError: the engine failed for good. Records written so far stay, and the job can be resumed.
        """
        summary = self.summary()
        bar = None if progress is None else progress.rows(len(self._source), done=summary.resumed)
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            if bar is not None:
                stack.callback(bar.close)
            keep = None if self.spec.overwrite else self._before
            journal = stack.enter_context(Journal(self.spec.output, self._manifest, keep=keep, drop=self._drop))
            stack.enter_context(self._caught_signals())
            prepared = stack.enter_context(read_ahead(self._source, lambda line: self._prepare(llm, line)))
            complete = self._run(llm, prepared, journal, summary, bar, progress)
            summary.seconds = time.monotonic() - begun
        if not complete:
            summary.interrupted = self._signals[0] if self._signals else "abort"
        elif summary.recorded != summary.rows:
            raise RuntimeError(f"{summary.rows} rows were read and {summary.recorded} have a record: this is a defect")
        return summary

    def _run(
        self,
        llm: LLM,
        prepared: Iterator[_Prepared | None],
        journal: Journal,
        summary: Summary,
        bar: RowProgress | None,
        progress: Progress | None,
    ) -> bool:
        """Run the rows; returns whether every row of the input has its record."""
        live: dict[str, Row] = {}
        unread = True

        def fail(row: Row | BadRow, code: str, message: str, param: str | None) -> None:
            journal.write(error_record(row, code, message, param))
            summary.failed += 1
            summary.errors[code] += 1
            summary.first_error = summary.first_error or f"{_row_name(row.custom_id, row.line)}: {message}"
            if bar is not None:
                bar.add(rows=1, failed=1)

        def requests() -> Iterator[GenerationRequest]:
            nonlocal unread
            book = KeyBook()
            done = self._before.done
            for item in prepared:
                if self._signals:
                    return
                if item is None:
                    continue
                row, request = item
                summary.rows += 1
                key, duplicate = book.key(row.custom_id, row.line)
                if pack_key(key) in done:
                    continue
                if duplicate:
                    fail(row, DUPLICATE, f"custom_id {row.custom_id!r} is that of an earlier line", "custom_id")
                elif isinstance(row, BadRow):
                    fail(row, row.code, row.message, row.param)
                else:
                    assert request is not None
                    live[request.request_id] = row
                    yield request
            unread = False

        def on_tokens(number: int) -> None:
            self._heed_signals(llm, progress)
            if bar is not None:
                bar.add(tokens=number)

        with contextlib.closing(llm.stream(requests(), on_tokens=on_tokens)) as outputs:
            for output in outputs:
                if output.finish_reason == "abort":  # no answer: the row stays to be done
                    continue
                row = live.pop(output.request_id)
                if output.error is not None:
                    fail(row, output.error_code or "engine_error", output.error, output.error_param)
                else:
                    self._record(llm, row, output, journal, summary)
                    if bar is not None:
                        bar.add(rows=1)
        return not unread and not live

    def _record(self, llm: LLM, row: Row, output: RequestOutput, journal: Journal, summary: Summary) -> None:
        created = int(time.time())
        journal.write(
            response_record(row, output, model=self.spec.model_name, created=created, tokenizer=llm.tokenizer)
        )
        summary.answered += 1
        summary.prompt_tokens += len(output.prompt_token_ids)
        summary.completion_tokens += len(output.outputs[0].token_ids)

    def _prepare(self, llm: LLM, line: Line) -> _Prepared | None:
        """Everything about a row that needs no other row; runs on the thread that reads ahead."""
        if line.too_long:
            message = f"the line has {line.length} bytes; at most {MAX_LINE_BYTES} are read"
            return _Prepared(BadRow(line.number, line_digest(line.raw), None, "line_too_long", message), None)
        row = parse_line(line.number, line.raw, self.spec.sampling, self.spec.chat_template_kwargs)
        if row is None:
            return None
        if isinstance(row, BadRow) or pack_key(row_key(row.custom_id, row.line)) in self._before.done:
            return _Prepared(row, None)
        name, identity = f"line-{row.line}", rng_id(row.custom_id, row.line)
        default_limit = row.limit_key is None
        try:
            if row.kind == "chat":
                request = llm.prepare_chat(
                    row.messages,
                    row.params,
                    name,
                    identity,
                    chat_template_kwargs=row.chat_template_kwargs,
                    tools=row.tools,
                    default_limit=default_limit,
                )
            else:
                request = llm.prepare_prompt(row.prompt, row.params, name, identity, default_limit=default_limit)
        except RequestError as error:
            param = row.path_of(error.param)
            return _Prepared(BadRow(row.line, row.digest, row.custom_id, error.code, str(error), param), None)
        return _Prepared(row, request)

    # Signals.

    @contextlib.contextmanager
    def _caught_signals(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM instead of dying; they are heeded between steps. A third one acts as usual."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: Any) -> None:
            self._signals.append(signal.Signals(number).name)
            if len(self._signals) >= 2:
                restore()

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            restore()

    def _heed_signals(self, llm: LLM, progress: Progress | None) -> None:
        if self._told == len(self._signals):
            return
        self._told = len(self._signals)
        if self._told == 1:
            llm.drain()
            text = f"{self._signals[0]}: finishing {llm.num_started} rows that have begun; once more to stop at once"
        else:
            llm.cancel()
            text = f"{self._signals[-1]}: stopping"
        if progress is not None:
            progress.message(text)


def _row_name(custom_id: str | int | None, line: int) -> str:
    return f"line {line}" if custom_id is None else f"line {line}, custom_id {custom_id!r}"
