"""The loop between requests and an engine: feed as there is room, turn tokens into text, hand out what is finished.

Both :class:`qwen35_jax.LLM` and the batch job run on :class:`Driver`; they differ only in where requests come from and
where outputs go.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from qwen35_jax.interrupts import held_signals
from qwen35_jax.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from qwen35_jax.requests import GenerationRequest
from qwen35_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qwen35_jax.engine import EngineOutput, TokenLogprob
    from qwen35_jax.text import Tokenizer


class EngineLike(Protocol):
    """What the driver needs of :class:`qwen35_jax.engine.Engine`."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Most sequences admitted at once."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        ...

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        rng_id: str | int,
        sample_index: int = 0,
    ) -> None:
        """Queue a request; raises a ValueError that says why when it can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """Give a request up."""
        ...

    def stop(self, request_id: str) -> None:
        """End a request whose text is complete; later tokens are dropped."""
        ...

    def step(self) -> list[EngineOutput]:
        """Run one step."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class Driver:
    """Runs requests through an engine, a bounded number of them at a time.

    Args:
        engine: the engine; no one else may step it while :meth:`run` is active.
        tokenizer: turns ids into text; None leaves texts empty.
        window: most requests inside the engine, running and queued; None takes twice what it runs at once, so that
            admission always has a choice.
        feed_tokens: prompt tokens read from the source between two steps (at least one request is), so that the first
            step does not wait for a long read-ahead.
        feed_rows: requests read between two steps once the engine has as many as it runs at once: the device does not
            wait for the queue behind them.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer | None,
        *,
        window: int | None = None,
        feed_tokens: int = 65536,
        feed_rows: int = 32,
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._window = window or 2 * engine.max_num_seqs
        self._feed_tokens = feed_tokens
        self._feed_rows = feed_rows
        self._live: dict[str, _Live] = {}
        self._aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._abort_later: set[str] = set()
        self._draining = False
        self._cancelled = False
        self.decoded_token: Callable[[int], str | None] = functools.lru_cache(65536)(self._decode_one)

    @property
    def num_started(self) -> int:
        """Requests in the engine that have given at least one token."""
        return sum(live.first_token is not None for live in self._live.values())

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask for requests to end with finish_reason "abort"; safe from other threads and from signal handlers.

        Requests that the source has not given yet are aborted when it does; ids that never come are forgotten at the
        end of the run.
        """
        for request_id in request_ids:
            self._aborts.put(request_id)

    def drain(self) -> None:
        """Take no more requests and drop those without a token; what has begun is finished. Safe in signal handlers.

        Requests that were dropped, or never read from the source, give no output.
        """
        self._draining = True

    def cancel(self) -> None:
        """Give everything up at the next step; nothing more is yielded. Safe in signal handlers."""
        self._cancelled = True

    def run(
        self,
        requests: Iterable[GenerationRequest | RequestOutput],
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Run all requests and yield each output once, in the order in which they finish.

        Closing the iterator gives up what is still running.

        Args:
            requests: read lazily, as the engine has room. A :class:`RequestOutput` among them (a request that failed
                before it got here) is passed through.
            on_tokens: called with the number of new tokens after each step.

        Raises:
            Exception: whatever the engine's ``step`` raises, with a note that names the requests in flight.
        """
        source = iter(requests)
        exhausted = False
        failed = False
        self._draining = self._cancelled = False
        self._forget_aborts()  # of a request that an earlier run had finished: its name may have come back
        try:
            while not self._cancelled:
                yield from self._take_aborts()
                fed_tokens = fed_rows = 0
                while not (exhausted or self._draining) and self._has_room(fed_tokens, fed_rows):
                    item = next(source, None)
                    if item is None:
                        exhausted = True
                    elif isinstance(item, RequestOutput):
                        yield item
                    else:
                        fed_tokens, fed_rows = fed_tokens + len(item.prompt_token_ids), fed_rows + 1
                        output = self._submit(item)
                        if output is not None:
                            yield output
                if self._draining:
                    self._drop_unstarted()
                if not self._live:
                    if exhausted or self._draining:
                        return
                    continue
                try:
                    with held_signals():
                        steps = self._engine.step()
                except Exception as error:
                    failed = True
                    error.add_note(f"requests in flight: {_some(list(self._live))}")
                    raise
                if on_tokens is not None:
                    on_tokens(sum(len(step.token_ids) for step in steps))
                for step in steps:
                    output = self._advance(step)
                    if output is not None:
                        yield output
        finally:
            self._give_up(step=not failed)

    def _has_room(self, fed_tokens: int, fed_rows: int) -> bool:
        """Whether to read one more request before the next step."""
        inside = len(self._live)
        if inside >= self._window or fed_tokens >= self._feed_tokens:
            return False
        return inside < self._engine.max_num_seqs or fed_rows < self._feed_rows

    def _submit(self, request: GenerationRequest) -> RequestOutput | None:
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        live = _Live(request, self._tokenizer)
        self._live[request.request_id] = live
        if request.request_id in self._abort_later:
            return self._finish(live, "abort")
        try:
            with held_signals():
                self._engine.submit(
                    request.request_id, request.prompt_token_ids, request.params, request.rng_id, sample_index=0
                )
        except ValueError as error:
            return self._finish(live, "error", error=str(error), code="rejected")
        return None

    def _take_aborts(self) -> Iterator[RequestOutput]:
        while not self._aborts.empty():
            request_id = self._aborts.get()
            live = self._live.get(request_id)
            if live is None:
                self._abort_later.add(request_id)
            else:
                with held_signals():
                    self._engine.abort(request_id)
                yield self._finish(live, "abort")

    def _advance(self, step: EngineOutput) -> RequestOutput | None:
        live = self._live.get(step.request_id)
        if live is None:  # tokens of a request that stopped or was aborted a dispatch ago
            return None
        hit = live.add(step)
        if hit is not None:
            if not step.finished:
                with held_signals():
                    self._engine.stop(step.request_id)
            return self._finish(live, "stop", stop_reason=hit)
        if not step.finished:
            return None
        if step.error is not None:
            return self._finish(live, "error", error=step.error, code="engine_error")
        return self._finish(live, step.finish_reason or "stop", stop_reason=step.stop_reason)

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        code: str | None = None,
    ) -> RequestOutput:
        del self._live[live.request.request_id]
        return live.output(reason, stop_reason, error, code, self.decoded_token)

    def _drop_unstarted(self) -> None:
        for request_id in [name for name, live in self._live.items() if live.first_token is None]:
            with held_signals():
                self._engine.abort(request_id)
            del self._live[request_id]

    def _give_up(self, *, step: bool) -> None:
        """Leave the engine empty: abort what runs, and let dispatches in flight come back."""
        with held_signals():
            for request_id in self._live:
                with contextlib.suppress(*(() if step else (Exception,))):  # a broken engine must not hide why it broke
                    self._engine.abort(request_id)
            self._live.clear()
            while step and self._engine.has_work:
                self._engine.step()
            self._forget_aborts()

    def _forget_aborts(self) -> None:
        self._abort_later.clear()
        while not self._aborts.empty():
            self._aborts.get()

    def _decode_one(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class _Live:
    """A request inside the engine: its tokens, text and logprobs so far."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None):
        self.request = request
        self.first_token: float | None = None
        self._submitted = time.monotonic()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = None
        if tokenizer is not None:
            from qwen35_jax.text import TextStream

            params = request.params
            self._text = TextStream(
                tokenizer,
                stop=params.stop,
                skip_special_tokens=params.skip_special_tokens,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def add(self, step: EngineOutput) -> str | None:
        """Take new tokens; returns the stop string that they complete, if any."""
        if step.token_ids and self.first_token is None:
            self.first_token = time.monotonic()
        self._token_ids.extend(step.token_ids)
        if step.logprobs is not None:
            self._logprobs.extend(step.logprobs)
        if self._text is None or not self.request.params.stop:
            # Without stop strings the text is made once, at the end: the least host time a token.
            return None
        hit = self._text.push(step.token_ids, ends_with_stop_token=step.finished and step.finish_reason == "stop")
        if hit is not None:
            kept = self._text.num_tokens_kept
            del self._token_ids[kept:]
            del self._logprobs[kept:]
        return hit

    def output(
        self,
        reason: FinishReason,
        stop_reason: int | str | None,
        error: str | None,
        code: str | None,
        decoded_token: Callable[[int], str | None],
    ) -> RequestOutput:
        """Everything so far as the request's answer."""
        request = self.request
        completion = CompletionOutput(token_ids=self._token_ids, finish_reason=reason, stop_reason=stop_reason)
        if request.params.logprobs is not None:
            number = request.params.logprobs
            completion.logprobs = [_logprob_dict(entry, number, decoded_token) for entry in self._logprobs]
            completion.cumulative_logprob = sum(entry.logprob for entry in self._logprobs)
        if self._text is not None:
            if not request.params.stop:
                self._text.push(self._token_ids, ends_with_stop_token=reason == "stop")
            self._text.finish()
            completion.text = self._text.text
            if self._text.stop_hit is not None and error is None:
                completion.finish_reason, completion.stop_reason = "stop", self._text.stop_hit
            if request.chat:
                from qwen35_jax.text import split_reasoning, starts_inside_reasoning

                inside = starts_inside_reasoning(request.prompt)
                completion.reasoning, completion.content = split_reasoning(completion.text, inside)
        return RequestOutput(
            request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            error=error,
            error_code=code,
            metrics=RequestMetrics(self._submitted, self.first_token, time.monotonic()),
        )


def _logprob_dict(entry: TokenLogprob, number: int, decoded_token: Callable[[int], str | None]) -> dict[int, Logprob]:
    """The sampled token first, then the ``number`` most probable ones."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, decoded_token(entry.token_id))}
    for token_id, logprob, rank in entry.top[:number]:
        if token_id not in found:
            found[token_id] = Logprob(logprob, rank, decoded_token(token_id))
    return found


def _some(names: Sequence[Any], most: int = 8) -> str:
    """The first few names and how many more there are."""
    shown = ", ".join(str(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
