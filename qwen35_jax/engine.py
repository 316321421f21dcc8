"""The step loop: plan -> pack -> dispatch -> collect one dispatch late -> commit.

One :meth:`Engine.step` asks the scheduler for a plan, dispatches its programs without waiting, and only then reads the
results of the dispatch before: while the device works on step n + 1, the host turns step n into tokens. Sampled tokens
stay on the device (``DeviceState.last_token``) and feed the next dispatch, so nothing waits for the host; a row that
turns out to have ended is simply dropped from results that were already under way. With ``overlap_dispatch=False``
the same pieces run without the lag: the oracle of the tests.

In ``device`` overlap prefill programs run on another device with a staging pool of their own
(:mod:`qwen35_jax.prefill_device`); finished prompts are merged into the decode device's pools.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from qwen35_jax.config import EngineConfig
from qwen35_jax.packing import LiveRequest, decode_values, prefill_values, variant_of
from qwen35_jax.prefill_device import Flight, PrefillDevice
from qwen35_jax.programs import CompileCounter, ProgramSet, fetch, free_device_state, init_device_state
from qwen35_jax.sampling import request_key, row_words
from qwen35_jax.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from qwen35_jax.startup import StartReport
from qwen35_jax.steps import DeviceState, ProgramKey, ProgramKind, ResultRows
from schedulers import Bucket, Chunk, DecodeRow, Plan, Released, Request, RequestRejected, Scheduler
from schedulers.trace import StepTrace

__all__ = ["Engine", "EngineError", "EngineOutput", "RequestRejected", "TokenLogprob"]

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "abort", "error"]
_TRACE_RECORDS = 200_000  # steps remembered: a night's job must not grow with its length
_MAX_FAILURES = 3  # failed dispatches, with no request ended well between them, that make the engine give up


class EngineError(RuntimeError):
    """The device failed again and again; the message names the last failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a generated token.

    Attributes:
        token_id: the token.
        logprob: log-softmax of the unmodified logits over real ids.
        rank: 1 for the most probable.
        top: the most probable ids as ``(id, logprob, rank)``, as many as the request asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float, int], ...]


@dataclasses.dataclass(slots=True)
class EngineOutput:
    """What one step brought a request.

    Attributes:
        request_id: the request.
        token_ids: new tokens (the stop token included).
        logprobs: one entry a token if the request asked for logprobs, else None.
        finished: whether this is the request's last output.
        finish_reason: "stop", "length", "abort" or "error" once finished.
        stop_reason: the stop_token_id that ended it; None for EOS.
        error: what went wrong, with finish_reason "error".
    """

    request_id: str
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclasses.dataclass(slots=True)
class _Ticket:
    """A plan whose results are under way.

    Attributes:
        plan: the plan.
        started: ``time.perf_counter()`` of its dispatch.
        parts: for each program that runs it, its results and which request owns which result rows, in order.
    """

    plan: Plan
    started: float
    parts: list[tuple[jax.Array, list[tuple[LiveRequest, list[int]]]]] = dataclasses.field(default_factory=list)


class Engine:
    """Runs requests on one model; not thread-safe.

    Args:
        config: the engine's options (``max_model_len`` and ``max_num_seqs`` as the memory plan left them are in
            ``scheduler.config``).
        scheduler: decides every step.
        programs: compiled programs of the main (decode) device.
        state: the main device's pools and records.
        eos_ids: ids that end an output unless ``ignore_eos``.
        num_valid: prompt ids must be below this.
        prefill_device: the other device of ``device`` overlap.
        compiles: counter that was started before warm-up.
        start_report: how it was made, for whoever measures.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        programs: ProgramSet,
        state: DeviceState,
        *,
        eos_ids: Sequence[int],
        num_valid: int,
        prefill_device: PrefillDevice | None = None,
        compiles: CompileCounter | None = None,
        start_report: StartReport | None = None,
    ):
        self.config = config
        self.start_report = start_report
        self.trace = StepTrace(keep=_TRACE_RECORDS)
        self._scheduler = scheduler
        self._programs = programs
        self._state = state
        self._eos = frozenset(eos_ids)
        self._eos_ids = tuple(eos_ids)
        self._num_valid = num_valid
        self._prefill_device = prefill_device
        self._compiles = compiles
        self._warm_compiles = compiles.count if compiles else 0
        self._live: dict[str, LiveRequest] = {}
        self._pending: deque[_Ticket] = deque()
        self._outputs: dict[str, EngineOutput] = {}
        self._failures = 0

    # --- requests in and out --------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        return self._scheduler.config.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences admitted at once."""
        return self._scheduler.config.max_num_seqs

    @property
    def num_valid(self) -> int:
        """Prompt ids are below this."""
        return self._num_valid

    @property
    def has_work(self) -> bool:
        """Whether anything is queued, running, under way or not yet handed out."""
        return bool(self._scheduler.has_work or self._pending or self._outputs)

    @property
    def compiles_after_warmup(self) -> int:
        """Backend compiles in this process since the engine was ready; 0 is the contract."""
        return self._compiles.count - self._warm_compiles if self._compiles else 0

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler (read only for callers)."""
        return self._scheduler

    @property
    def programs(self) -> ProgramSet:
        """The main device's programs (for inspection by tests and profilers)."""
        return self._programs

    @property
    def prefill_device(self) -> PrefillDevice | None:
        """The other side of ``device`` overlap."""
        return self._prefill_device

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        rng_id: str | int,
        sample_index: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among the requests whose last output has not been handed out.
            prompt_token_ids: at least one id of the real vocabulary.
            params: options; ``max_tokens`` None takes min(4096, room left).
            rng_id: stable identity that the random bits derive from, beside the seed.
            sample_index: number of the sample of this prompt.

        Raises:
            RequestRejected: empty prompt, ids outside the vocabulary, or a request that can never fit.
        """
        if request_id in self._live or request_id in self._outputs:
            raise RequestRejected(f"request id {request_id!r} is in use")
        prompt = np.asarray(prompt_token_ids, np.int64)
        if prompt.size == 0:
            raise RequestRejected("the prompt is empty: at least one token is needed")
        bad = (prompt < 0) | (prompt >= self._num_valid)
        if bad.any():
            at = int(np.argmax(bad))
            raise RequestRejected(
                f"prompt_token_ids[{at}] is {prompt[at]}, outside of the vocabulary 0..{self._num_valid - 1}"
            )
        room = self.max_model_len - prompt.size
        max_tokens = params.max_tokens
        if max_tokens is None:
            if room < 1:
                raise RequestRejected(
                    f"the prompt has {prompt.size} tokens, which leaves no room for output: max_model_len is "
                    f"{self.max_model_len}"
                )
            max_tokens = min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room)
        if params.min_tokens > max_tokens:
            raise RequestRejected(f"min_tokens={params.min_tokens} is more than max_tokens={max_tokens}")
        seed = params.seed if params.seed is not None else self.config.seed
        words = row_words(params, request_key(seed, rng_id, sample_index), self._eos_ids)
        self._scheduler.submit(Request(request_id, int(prompt.size), max_tokens))
        self._live[request_id] = LiveRequest(request_id, prompt.astype(np.int32), params, words, max_tokens)

    def abort(self, request_id: str) -> None:
        """Give a request up: its last output has finish_reason "abort". Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is not None:
            self._finish(live, "abort")

    def stop(self, request_id: str) -> None:
        """End a request whose text is complete (a stop string); nothing more is reported. Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is not None:
            self._finish(live, "stop")
            self._outputs.pop(request_id, None)

    def close(self) -> None:
        """Abort everything, wait for what is under way, and give pools and weights back; nothing runs after this."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._outputs.clear()
        while self._pending:
            for results, _ in self._pending.popleft().parts:
                self._wait_quietly(results)
        if self._prefill_device is not None:
            for flight in self._prefill_device.flights:
                self._wait_quietly(flight.results)
                self._scheduler.chunk_failed(flight.handle)
            self._prefill_device.close()
            self._prefill_device = None
        free_device_state(self._state)
        del self._programs  # they hold the weights, which another engine of this process may want the room of
        if self._compiles is not None:
            self._compiles.close()

    @staticmethod
    def _wait_quietly(results: jax.Array) -> None:
        try:
            results.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            log.warning("a dispatch failed while shutting down: %s", error)

    # --- the loop -------------------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it, or the one before it, brought."""
        if self._prefill_device is not None:
            self._land_chunks(wait=False)
        plan = self._scheduler.tick()
        self._dispatch(plan)
        under_way = 1 if self.config.overlap_dispatch and plan.rows + plan.chunks else 0
        self._collect(under_way)
        if plan.kind == "wait":
            started = time.perf_counter()
            self._land_chunks(wait=True)
            self.trace.record(plan, started, time.perf_counter())
        outputs, self._outputs = list(self._outputs.values()), {}
        return outputs

    def _dispatch(self, plan: Plan) -> None:
        """Pack the plan and start its programs; nothing here waits for a device."""
        if not plan.chunks and not plan.rows:
            return
        ticket = _Ticket(plan, time.perf_counter())
        self._pending.append(ticket)
        if plan.handle is not None:
            self._launch(plan)
        elif plan.prefill_bucket is not None:
            self._run("prefill", plan.prefill_bucket, ticket, plan.chunks, ())
        if plan.decode_bucket is not None:
            self._run("decode", plan.decode_bucket, ticket, (), plan.rows)
        elif plan.chunks and plan.rows:
            assert plan.bucket is not None
            self._run("unified", plan.bucket, ticket, plan.chunks, plan.rows)

    def _run(
        self, kind: ProgramKind, bucket: Bucket, ticket: _Ticket, chunks: Sequence[Chunk], rows: Sequence[DecodeRow]
    ) -> None:
        """Start one program on the main device."""
        # The other program of this plan may just have failed and taken rows of this one with it.
        rows = [row for row in rows if row.request_id in self._live]
        prefilled = [self._live[chunk.request_id] for chunk in chunks]
        decoded = [self._live[row.request_id] for row in rows]
        if not prefilled and not decoded:
            return
        values: dict[str, np.ndarray] = {}
        owners = [(live, [i]) for i, live in enumerate(prefilled) if chunks[i].last]
        if chunks:
            values |= prefill_values(chunks, prefilled, bucket)
        if kind != "prefill":
            values |= decode_values(rows, bucket)
            first = bucket.requests if chunks else 0
            for i, (row, live) in enumerate(zip(rows, decoded, strict=True)):
                owners.append((live, [first + step * bucket.rows + i for step in range(row.steps)]))
        steps = ticket.plan.steps if kind == "decode" else 1
        key = ProgramKey(kind, bucket, steps, variant_of((*prefilled, *decoded)))
        for live in (*prefilled, *decoded):
            live.on_device = True
        try:
            self._state, results = self._programs.run(key, self._state, values)
            results.copy_to_host_async()
        except jax.errors.JaxRuntimeError as error:
            self._fail_running(error, str(key))
            return
        ticket.parts.append((results, owners))

    def _collect(self, under_way: int) -> None:
        """Read the results of every dispatch but the newest ``under_way``."""
        while len(self._pending) > under_way:
            ticket = self._pending.popleft()
            dropped = {row.request_id for row in ticket.plan.rows if row.request_id not in self._live}
            for results, owners in ticket.parts:
                try:
                    rows = ResultRows.unpack(fetch(results))
                except jax.errors.JaxRuntimeError as error:
                    self._fail_running(error, ticket.plan.kind)
                    return
                for live, indices in owners:
                    self._commit(live, rows, indices)
            self.trace.record(ticket.plan, ticket.started, time.perf_counter(), dropped)

    def _commit(self, live: LiveRequest, rows: ResultRows, indices: Sequence[int]) -> None:
        """Take a request's new tokens, up to the one that ends it."""
        for index in indices:
            if live.finished:
                return  # it had ended when this result was asked for, or an earlier one has just ended it
            if not rows.finite[index]:
                message = (
                    f"the model gave non-finite logits for output token {live.generated} "
                    f"(position {len(live.prompt) + live.generated - 1}); this request alone was stopped"
                )
                log.error("request %s: %s", live.request_id, message)
                self._finish(live, "error", error=message, scrub=True)
                return
            token = int(rows.tokens[index])
            output = self._output(live)
            output.token_ids.append(token)
            live.generated += 1
            if output.logprobs is not None:
                output.logprobs.append(_token_logprob(rows, index, live.params.logprobs or 0))
            if not live.params.ignore_eos and token in self._eos:
                self._finish(live, "stop")
            elif token in live.stop_token_ids:
                self._finish(live, "stop", stop_reason=token)
            elif live.generated >= live.max_tokens:
                self._finish(live, "length")
            if live.finished:
                self._failures = 0  # results that arrive are no proof: another program may fail every time

    # --- endings --------------------------------------------------------------------------------------------------

    def _output(self, live: LiveRequest) -> EngineOutput:
        output = self._outputs.get(live.request_id)
        if output is None:
            logprobs = None if live.params.logprobs is None else []
            output = self._outputs[live.request_id] = EngineOutput(live.request_id, logprobs=logprobs)
        return output

    def _finish(
        self,
        live: LiveRequest,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        scrub: bool = False,
    ) -> None:
        """End a request: report it, and free its slot and pages for the next tick.

        Args:
            live: the request.
            reason: its finish_reason.
            stop_reason: the stop token id.
            error: what went wrong.
            scrub: overwrite what it leaves behind with zeros.
        """
        self._report_end(live, reason, stop_reason, error)
        released = self._scheduler.finish(live.request_id)
        if released is not None:
            self._clean(released, scrub)

    def _report_end(
        self, live: LiveRequest, reason: FinishReason, stop_reason: int | str | None, error: str | None
    ) -> None:
        """Make the end of a request its last output; what it holds in the scheduler is the caller's."""
        live.finished = True
        del self._live[live.request_id]
        output = self._output(live)
        output.finished, output.finish_reason, output.stop_reason, output.error = True, reason, stop_reason, error

    def _clean(self, released: Released, scrub: bool = False) -> None:
        """Overwrite freed slots and pages: with zeros after a bad row, with NaN in debug mode."""
        if released.slot and (scrub or self.config.debug_poison):
            value = float("nan") if self.config.debug_poison else 0.0
            self._state = self._programs.fill(self._state, value, released.slot, released.pages)

    def _fail_running(self, error: Exception, what: str) -> None:
        """A dispatch failed: its donated pools are gone, so what ran in them fails; queued requests go on."""
        self._pending.clear()
        running = [live for live in self._live.values() if live.on_device]
        names = ", ".join(live.request_id for live in running[:8]) + (" ..." if len(running) > 8 else "")
        log.error("dispatch of %s failed with %d requests in flight (%s): %s", what, len(running), names, error)
        self._count_failure(error)
        free_device_state(self._state)  # not donated if the dispatch never began; there is no room for both
        self._state = init_device_state(self._programs.shapes, self._programs.device)
        for live in running:
            self._finish(live, "error", error=f"the device failed while this request ran ({what}): {error}")

    def _count_failure(self, error: Exception) -> None:
        """Give up when nothing works any more: the rows of a job must not all end with the device's error."""
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            raise EngineError(
                f"{self._failures} dispatches in a row failed, and no request ended in between; the last: {error}"
            ) from error

    # --- chunks on the prefill device -----------------------------------------------------------------------------

    def _launch(self, plan: Plan) -> None:
        """Start a plan's chunks on the prefill device."""
        assert self._prefill_device is not None and plan.handle is not None and plan.prefill_bucket is not None
        chunks = [self._live[chunk.request_id] for chunk in plan.chunks]
        try:
            self._prefill_device.launch(plan.handle, plan.chunks, chunks, plan.prefill_bucket, self._programs.device)
        except jax.errors.JaxRuntimeError as error:
            self._chunk_failed(plan.handle, error)

    def _land_chunks(self, *, wait: bool) -> None:
        """Finish the chunks in flight whose results are ready, oldest first; with ``wait`` at least one."""
        device = self._prefill_device
        assert device is not None
        while device.flights and (wait or device.flights[0].ready):
            wait = False
            flight = device.flights.popleft()
            try:
                rows = ResultRows.unpack(fetch(flight.results))
                for transfer in flight.transfers.values():
                    transfer.data.block_until_ready()  # merged unseen, a failed one would take the main pools with it
            except jax.errors.JaxRuntimeError as error:
                device.reset(flight)
                self._chunk_failed(flight.handle, error)
                continue
            self._merge_and_commit(flight, rows)

    def _merge_and_commit(self, flight: Flight, rows: ResultRows) -> None:
        """Move finished prompts into the main pools and take their first tokens."""
        outcome = self._scheduler.chunk_done(flight.handle)
        for released in outcome.released:
            self._clean(released)
        wanted = [(index, chunk, live) for index, (chunk, live) in enumerate(flight.members) if not live.finished]
        for index, chunk, live in wanted:
            if not chunk.last:
                continue
            self._commit(live, rows, [index])
            if live.finished:
                continue  # its first token ended it: there is nothing to decode
            transfer = flight.transfers[chunk.request_id]
            pages = chunk.pages[: transfer.num_pages]
            live.on_device = True
            try:
                self._state = self._programs.merge(self._state, transfer.width, transfer.data, chunk.slot, pages)
            except jax.errors.JaxRuntimeError as error:
                self._fail_running(error, f"merge of a prompt of {transfer.num_pages} pages")
        self.trace.complete([chunk for _, chunk, _ in wanted], flight.started, time.perf_counter())

    def _chunk_failed(self, handle: int, error: Exception) -> None:
        """A launch failed: its own requests end with the error, decoding goes on."""
        outcome = self._scheduler.chunk_failed(handle)
        log.error("prefill chunk %d failed (%s): %s", handle, ", ".join(outcome.failed), error)
        for released in outcome.released:
            self._clean(released)
        for request_id in outcome.failed:
            message = f"the prefill device failed while this prompt was processed: {error}"
            self._report_end(self._live[request_id], "error", None, message)
        self._count_failure(error)


def _token_logprob(rows: ResultRows, index: int, number: int) -> TokenLogprob:
    assert rows.logprob is not None and rows.rank is not None
    assert rows.top_ids is not None and rows.top_logprobs is not None
    top = zip(rows.top_ids[index, :number].tolist(), rows.top_logprobs[index, :number].tolist(), strict=True)
    return TokenLogprob(
        token_id=int(rows.tokens[index]),
        logprob=float(rows.logprob[index]),
        rank=int(rows.rank[index]),
        top=tuple((token, logprob, rank) for rank, (token, logprob) in enumerate(top, 1)),
    )
