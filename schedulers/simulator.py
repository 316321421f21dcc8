"""Runs a scheduler against a cost function instead of a device: deterministic, for tests and studies of policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from schedulers.buckets import BucketLadder
from schedulers.plan import Chunk, Plan
from schedulers.request import Request, RequestRejected
from schedulers.scheduler import Scheduler, SchedulerConfig
from schedulers.trace import StepTrace


class SimRequest(NamedTuple):
    """A request of a simulated workload.

    Attributes:
        request_id: unique id.
        arrival: seconds.
        prompt_len: prompt tokens.
        max_tokens: limit of output tokens.
        output_len: output tokens it really makes (EOS on the last), at least 1; cut to ``max_tokens``.
    """

    request_id: str
    arrival: float
    prompt_len: int
    max_tokens: int
    output_len: int


class StepCost(Protocol):
    """Seconds of each program of a plan."""

    def prefill(self, plan: Plan) -> float:
        """The prefill program of the plan."""
        ...

    def decode(self, plan: Plan) -> float:
        """The decode program of the plan, all its steps."""
        ...

    def fused(self, plan: Plan) -> float:
        """The one program of a unified plan in ``stream`` overlap."""
        ...


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """Seconds linear in the padded sizes.

    Attributes:
        step: every step.
        token: every padded prefill token.
        row: every padded decode row.
        context: every token of context that a decode row reads.
    """

    step: float = 5e-3
    token: float = 2e-5
    row: float = 1e-5
    context: float = 0.0

    def prefill(self, plan: Plan) -> float:
        """The prefill program of the plan."""
        bucket = plan.prefill_bucket or plan.bucket
        return self.step + self.token * (bucket.tokens if bucket else 0)

    def decode(self, plan: Plan) -> float:
        """The decode program of the plan, all its steps."""
        return plan.steps * (self.step + self._rows(plan))

    def fused(self, plan: Plan) -> float:
        """The one program of a unified plan: one pass over the weights for both kinds of token."""
        return self.prefill(plan) + self._rows(plan)

    def _rows(self, plan: Plan) -> float:
        bucket = plan.decode_bucket or plan.bucket
        context = sum(row.position + 1 for row in plan.rows)
        return self.row * (bucket.rows if bucket else 0) + self.context * context


@dataclasses.dataclass(slots=True)
class RequestTimes:
    """What happened to a request.

    Attributes:
        arrival: seconds.
        first_token: when its first token was read, None before.
        finish: when its last token was read, None before.
        tokens: output tokens read.
    """

    arrival: float
    first_token: float | None = None
    finish: float | None = None
    tokens: int = 0


@dataclasses.dataclass
class SimResult:
    """Outcome of a simulation.

    Attributes:
        trace: step records.
        requests: every accepted request's times, by id.
        rejected: message of every rejected request, by id.
        finish_order: ids in the order of their ends.
        makespan: seconds until the last result.
        scheduler: the drained scheduler.
    """

    trace: StepTrace
    requests: dict[str, RequestTimes]
    rejected: dict[str, str]
    finish_order: list[str]
    makespan: float
    scheduler: Scheduler


class _Dispatch(NamedTuple):
    plan: Plan
    start: float
    end: float


class _Simulation:
    """One run: a host clock, the time at which each device is free, and what has been dispatched and not read."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[SimRequest], cost: StepCost, late: bool):
        self.scheduler = scheduler
        self.cost = cost
        self.late = late
        self.arrivals = sorted(requests, key=lambda request: request.arrival)  # stable: ties stay in the given order
        self.next_arrival = 0
        self.output_len = {r.request_id: max(1, min(r.output_len, r.max_tokens)) for r in requests}
        self.now = 0.0
        self.decode_free = 0.0
        self.prefill_free = 0.0
        self.unread: _Dispatch | None = None
        self.flights: dict[int, _Dispatch] = {}
        self.result = SimResult(StepTrace(), {}, {}, [], 0.0, scheduler)

    def run(self) -> SimResult:
        while True:
            self.submit_arrived()
            self.land()
            plan = self.scheduler.tick()
            if plan.kind in ("idle", "wait"):
                if not self.pass_time(plan):
                    break
                continue
            before, self.unread = self.unread, self.dispatch(plan)
            if before:
                self.read(before)
            if not self.late:
                self.read_rest()
        self.result.makespan = self.now
        return self.result

    def submit_arrived(self) -> None:
        while self.next_arrival < len(self.arrivals) and self.arrivals[self.next_arrival].arrival <= self.now:
            request = self.arrivals[self.next_arrival]
            self.next_arrival += 1
            try:
                self.scheduler.submit(Request(request.request_id, request.prompt_len, request.max_tokens))
            except RequestRejected as rejected:
                self.result.rejected[request.request_id] = str(rejected)
            else:
                self.result.requests[request.request_id] = RequestTimes(request.arrival)

    def pass_time(self, plan: Plan) -> bool:
        """Nothing to dispatch: read what is outstanding, else wait for a launch, else for an arrival."""
        if self.unread:
            self.read_rest()
        elif plan.kind == "wait":
            start = self.now
            self.now = max(self.now, min(flight.end for flight in self.flights.values()))
            self.result.trace.record(plan, start, self.now)
        elif self.next_arrival < len(self.arrivals):
            self.now = max(self.now, self.arrivals[self.next_arrival].arrival)
        elif self.scheduler.has_work:
            raise RuntimeError(f"the scheduler is stuck: {self.scheduler.stats()}")
        else:
            return False
        return True

    def dispatch(self, plan: Plan) -> _Dispatch:
        """Queue the plan's programs behind what each device already has."""
        if plan.handle is not None:
            start = max(self.now, self.prefill_free)
            self.prefill_free = start + self.cost.prefill(plan)
            self.flights[plan.handle] = _Dispatch(plan, start, self.prefill_free)
            seconds = self.cost.decode(plan) if plan.rows else 0.0
        elif plan.chunks and plan.rows:
            fused = plan.bucket is not None
            seconds = self.cost.fused(plan) if fused else self.cost.prefill(plan) + self.cost.decode(plan)
        else:
            seconds = self.cost.prefill(plan) if plan.chunks else self.cost.decode(plan)
        start = max(self.now, self.decode_free)
        self.decode_free = start + seconds
        return _Dispatch(plan, start, self.decode_free)

    def land(self) -> None:
        """Poll the launches in flight."""
        for handle, flight in sorted(self.flights.items()):
            if flight.end <= self.now:
                del self.flights[handle]
                self.scheduler.chunk_done(handle)
                self.result.trace.complete(flight.plan.chunks, flight.start, self.now)
                self.first_tokens(flight.plan.chunks, self.now)

    def read_rest(self) -> None:
        if self.unread:
            unread, self.unread = self.unread, None
            self.read(unread)

    def read(self, dispatch: _Dispatch) -> None:
        plan = dispatch.plan
        self.now = max(self.now, dispatch.end)
        ended = {row.request_id for row in plan.rows if self.result.requests[row.request_id].finish is not None}
        self.result.trace.record(plan, dispatch.start, dispatch.end, dropped=ended)
        if plan.handle is None:
            self.first_tokens(plan.chunks, dispatch.end)
        for row in plan.rows:
            self.emit(row.request_id, row.steps, dispatch.end)

    def first_tokens(self, chunks: Sequence[Chunk], time: float) -> None:
        for chunk in chunks:
            if chunk.last:
                self.result.requests[chunk.request_id].first_token = time
                self.emit(chunk.request_id, 1, time)

    def emit(self, request_id: str, count: int, time: float) -> None:
        times = self.result.requests[request_id]
        if times.finish is not None:  # planned before its end was read
            return
        times.tokens = min(times.tokens + count, self.output_len[request_id])
        if times.tokens == self.output_len[request_id]:
            times.finish = time
            self.result.finish_order.append(request_id)
            self.scheduler.finish(request_id)


def simulate(
    config: SchedulerConfig,
    requests: Sequence[SimRequest],
    cost: StepCost | None = None,
    *,
    ladder: BucketLadder | None = None,
    late: bool = True,
) -> SimResult:
    """Serve a workload.

    Args:
        config: scheduler configuration, every overlap mode.
        requests: the workload, unique ids.
        cost: seconds of each program; None takes :class:`LinearCost`.
        ladder: program shapes; None takes the configuration's.
        late: read results one dispatch late, as the engine does.

    Raises:
        RuntimeError: the scheduler holds work that it never plans.
    """
    return _Simulation(Scheduler(config, ladder), requests, cost or LinearCost(), late).run()
