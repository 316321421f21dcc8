"""Three kinds of load on an engine, each token time-stamped where the step that brought it returned.

- ``throughput``: everything is sent at the start. Requests enter the engine through a bounded window, as
  :class:`qwen35_jax.driver.Driver` feeds it, so that the engine does not grow with the job; they arrive, for TTFT and
  E2E latency, at the start.
- ``closed``: N clients with one request at a time; a client sends its next one when it has the last token of the one
  before. A request arrives when it is sent.
- ``open``: requests arrive at given times, whatever the engine does. One that falls due during a step is given to the
  engine after it, but its clock runs from when it was due. When nothing is left to do the loop sleeps until the next.

Requests are greedy and ignore EOS: each gives exactly the tokens it asks for.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from qwen35_jax.bench.metrics import RequestTiming
from qwen35_jax.bench.workload import Workload, poisson_arrivals
from qwen35_jax.errors import UserInputError
from qwen35_jax.sampling_params import SamplingParams
from schedulers.trace import StepRecord, padding_waste

if TYPE_CHECKING:
    from qwen35_jax.driver import EngineLike
    from qwen35_jax.engine import EngineOutput, TokenLogprob

LoadKind = Literal["throughput", "closed", "open"]
LOAD_KINDS: tuple[LoadKind, ...] = ("throughput", "closed", "open")

# As the driver feeds a job: prompt tokens between two steps, and requests once the engine has as many as it can run.
_FEED_TOKENS = 65536
_FEED_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        kind: see the top of this module.
        concurrency: clients of a closed loop.
        rate: requests a second of an open loop.
    """

    kind: LoadKind
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self):
        if self.kind not in LOAD_KINDS:
            raise UserInputError(f"unknown kind of load {self.kind!r} (one of {', '.join(LOAD_KINDS)})")
        if (self.concurrency is not None) != (self.kind == "closed"):
            raise UserInputError(f"a {self.kind} load has {'a' if self.kind == 'closed' else 'no'} concurrency")
        if (self.rate is not None) != (self.kind == "open"):
            raise UserInputError(f"a {self.kind} load has {'a' if self.kind == 'open' else 'no'} rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise UserInputError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise UserInputError(f"rate must be a positive number of requests a second, got {self.rate}")


@dataclasses.dataclass(slots=True)
class Answer:
    """What a request gave.

    Attributes:
        tokens: its tokens.
        logprobs: of each, if asked for.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)


class LoadRun:
    """One run of a workload under a load, step by step; :meth:`run` goes to its end.

    Args:
        engine: no one else may step it meanwhile.
        workload: the requests.
        load: how they come.
        prefix: of the engine's request ids, for runs that follow each other.
        keep: requests whose tokens are kept in :attr:`answers`.
        logprobs: of the kept requests, alternatives asked for with each token; None asks for none.
        on_end: called when a request has ended.
        clock: seconds.
        sleep: waits so many seconds.

    Attributes:
        timings: of every request that was sent, by its number.
        answers: of the kept ones.
        started: when the run began.
        ended: when the last token came.
        most_inside: most requests in the engine at once, queued ones too.
    """

    def __init__(
        self,
        engine: EngineLike,
        workload: Workload,
        load: Load,
        *,
        prefix: str = "",
        keep: Collection[int] = (),
        logprobs: int | None = None,
        on_end: Callable[[RequestTiming], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._engine, self._items, self._load = engine, workload.items, load
        self._prefix, self._logprobs, self._on_end = prefix, logprobs, on_end
        self._clock, self._sleep = clock, sleep
        self._due: Sequence[float] | None = None
        if load.rate is not None:
            self._due = poisson_arrivals(len(workload.items), load.rate, seed=workload.seed)
        # In an open loop nothing holds a request back.
        most = {"throughput": 2 * engine.max_num_seqs, "closed": load.concurrency, "open": None}[load.kind]
        self._most = most or len(workload.items)
        self._live: dict[str, RequestTiming] = {}
        self.timings: dict[int, RequestTiming] = {}
        self.answers = {index: Answer() for index in keep}
        self.started: float | None = None
        self.ended: float | None = None
        self.most_inside = 0

    @property
    def sent(self) -> int:
        """Requests that were given to the engine."""
        return len(self.timings)

    @property
    def duration(self) -> float:
        """Seconds from the start to the last token so far."""
        if self.started is None or self.ended is None:
            return 0.0
        return self.ended - self.started

    def run(self) -> LoadRun:
        """To the end; the engine is empty then."""
        while self.advance():
            pass
        self.drain()
        return self

    def advance(self) -> bool:
        """Send what is due and run a step, or sleep until something is due; False when every request has ended."""
        if self.started is None:
            self.started = self._clock()
        self._feed()
        if self._engine.has_work:
            self._take(self._engine.step())
        elif self._live:
            self._live.clear()  # the engine has lost them: the counts of the run say that they were not answered
        elif self._due is not None and self.sent < len(self._items):
            self._sleep(max(0.0, self.started + self._due[self.sent] - self._clock()))
        return bool(self._live) or self.sent < len(self._items)

    def drain(self) -> None:
        """Let dispatches under way come back."""
        while self._engine.has_work:
            self._engine.step()

    def give_up(self) -> None:
        """Abort what runs and leave the engine empty."""
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()
        self.drain()

    def _feed(self) -> None:
        assert self.started is not None
        fed_tokens = fed_rows = 0
        now = self._clock()
        while self.sent < len(self._items) and len(self._live) < self._most:
            arrival = now if self._load.kind == "closed" else self.started
            if self._due is not None:
                arrival += self._due[self.sent]
                if arrival > now:
                    break
            if self._load.kind == "throughput" and not self._has_room(fed_tokens, fed_rows):
                break
            fed_tokens, fed_rows = fed_tokens + len(self._items[self.sent].prompt), fed_rows + 1
            self._submit(arrival, now)

    def _has_room(self, fed_tokens: int, fed_rows: int) -> bool:
        if fed_tokens >= _FEED_TOKENS:
            return False
        return len(self._live) < self._engine.max_num_seqs or fed_rows < _FEED_ROWS

    def _submit(self, arrival: float, now: float) -> None:
        index = self.sent
        item = self._items[index]
        timing = RequestTiming(index, len(item.prompt), item.max_tokens, arrival, now)
        self.timings[index] = timing
        request_id = f"{self._prefix}{index}"
        logprobs = self._logprobs if index in self.answers else None
        params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True, logprobs=logprobs)
        try:
            # The engine makes an array of any sequence, arrays included.
            prompt: Any = item.prompt
            self._engine.submit(request_id, prompt, params, rng_id=index)
        except ValueError as error:
            self._end(timing, "error", str(error))
            return
        self._live[request_id] = timing
        self.most_inside = max(self.most_inside, len(self._live))

    def _take(self, outputs: Iterable[EngineOutput]) -> None:
        now = self._clock()
        for output in outputs:
            timing = self._live.get(output.request_id)
            if timing is None:
                continue  # of an earlier run that was given up
            if output.token_ids:
                timing.times.append(now)
                timing.counts.append(len(output.token_ids))
                self.ended = now
                if (answer := self.answers.get(timing.index)) is not None:
                    answer.tokens += output.token_ids
                    answer.logprobs += output.logprobs or []
            if output.finished:
                del self._live[output.request_id]
                self._end(timing, output.finish_reason, output.error)

    def _end(self, timing: RequestTiming, reason: str | None, error: str | None) -> None:
        timing.ended, timing.finish_reason, timing.error = True, reason, error
        if self._on_end is not None:
            self._on_end(timing)


def step_metrics(records: Iterable[StepRecord]) -> dict[str, float]:
    """What the steps of a run say: ``steps`` of each kind and the share of padding.

    Args:
        records: of ``engine.trace``.

    Returns:
        ``steps_<kind>``; ``prefill_padding`` (of prompt tokens) and ``decode_padding`` (of decode rows times steps):
        the shares of the programs' work that was padding; ``decode_rows_mean``: live rows of a step that decodes.
    """
    records = list(records)
    metrics: dict[str, float] = {}
    for record in records:
        name = f"steps_{record.kind}"
        metrics[name] = metrics.get(name, 0) + 1
    waste = padding_waste(records)
    metrics |= {"prefill_padding": waste.prefill, "decode_padding": waste.decode}
    rows = [record.decode_rows for record in records if record.decode_rows]
    if rows:
        metrics["decode_rows_mean"] = sum(rows) / len(rows)
    return metrics
