"""Whatever comes, in whatever order: nothing leaks, nothing is shared, nothing is lost.

The driver plays the engine: it reads results one dispatch late, ends rows by EOS, cancels, and lands or fails launches.
It keeps its own books from the plans alone and checks every plan against them.
"""

import dataclasses

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedulers import BucketLadder, Plan, Request, RequestRejected, Scheduler, SchedulerConfig, pages_for


@dataclasses.dataclass(frozen=True)
class Spec:
    """A request of the script; ``eos`` output tokens end it early, ``cancel`` is a tick."""

    arrival: int
    prompt_len: int
    max_tokens: int
    eos: int
    cancel: int | None


@dataclasses.dataclass(frozen=True)
class Script:
    config: SchedulerConfig
    specs: tuple[Spec, ...]
    late: bool
    flight_ticks: tuple[int, ...]  # how long each launch takes, cyclic
    failures: tuple[bool, ...]  # whether each launch fails, cyclic
    drain: int | None


@st.composite
def scripts(draw):
    overlap = draw(st.sampled_from(["off", "stream", "device"]))
    seqs = draw(st.integers(1, 5))
    extra = {}
    if overlap == "device":
        extra = {
            "staging_slots": draw(st.integers(2, 4)),
            "staging_pages": draw(st.integers(2, 9)),
            "max_chunks_in_flight": draw(st.integers(1, 2)),
        }
    config = SchedulerConfig(
        max_num_seqs=seqs,
        num_slots=seqs + 1 + draw(st.integers(0, 1)),
        max_num_batched_tokens=draw(st.sampled_from([64, 128, 256])),
        max_model_len=draw(st.sampled_from([256, 500])),
        num_pages=draw(st.integers(2, 16)),
        policy=draw(st.sampled_from(["off", "auto"])),
        overlap=overlap,
        decode_steps=draw(st.sampled_from([1, 8])),
        **extra,
    )
    spec = st.builds(
        Spec,
        arrival=st.integers(0, 12),
        prompt_len=st.one_of(st.integers(1, 5), st.sampled_from([63, 64, 65, 128, 129]), st.integers(1, 520)),
        max_tokens=st.integers(0, 24),
        eos=st.integers(1, 30),
        cancel=st.one_of(st.none(), st.none(), st.integers(0, 30)),
    )
    return Script(
        config=config,
        specs=tuple(draw(st.lists(spec, min_size=1, max_size=12))),
        late=draw(st.booleans()),
        flight_ticks=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))),
        failures=tuple(draw(st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=5))),
        drain=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 25))),
    )


class Driver:
    def __init__(self, script: Script):
        self.script = script
        self.config = script.config
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        ladder = BucketLadder.from_limits(
            **{name: getattr(self.config, name) for name in limits},
            unified=self.config.overlap == "stream",
            width_rungs=range(1, pages_for(self.config.max_model_len, 64) + 1),
        )
        self.sched = Scheduler(script.config, ladder)
        self.specs = {f"r{i}": spec for i, spec in enumerate(script.specs)}
        self.plans: list[Plan] = []
        self.submitted: list[str] = []  # accepted, in order
        self.started: list[str] = []  # by first chunk
        self.ended: dict[str, str] = {}
        self.prompt_done: dict[str, int] = {}
        self.planned: dict[str, int] = {}  # output tokens planned
        self.read: dict[str, int] = {}
        self.slots: dict[int, str] = {}
        self.pages: dict[int, str] = {}
        self.staging_slots: dict[int, str] = {}
        self.staging_pages: dict[int, str] = {}
        self.flights: dict[int, tuple[Plan, int]] = {}
        self.landed: set[str] = set()
        self.unread: Plan | None = None

    # The engine's part

    def run(self) -> "Driver":
        tick = 0
        while not self.over(tick):
            assert tick < 3000, f"no progress: {self.sched.stats()}"
            self.submit_and_cancel(tick)
            self.land(tick)
            in_flight, running = bool(self.flights), self.sched.running
            plan = self.sched.tick()
            assert not in_flight or self.sched.running == running, "admitted while a launch was in flight"
            self.check(plan, tick)
            self.plans.append(plan)
            before, self.unread = self.unread, plan
            self.collect(before)
            if not self.script.late or plan.kind in ("idle", "wait"):
                self.collect(self.unread)
                self.unread = None
            if plan.kind == "wait":
                self.report(min(self.flights))
            tick += 1
        self.check_end()
        return self

    def over(self, tick):
        last = max(spec.arrival for spec in self.specs.values())
        return tick > last and not self.sched.has_work and not self.unread

    def submit_and_cancel(self, tick):
        for request_id, spec in self.specs.items():
            if spec.arrival == tick:
                try:
                    self.sched.submit(Request(request_id, spec.prompt_len, spec.max_tokens))
                    self.submitted.append(request_id)
                except RequestRejected:
                    assert not self.can_ever_run(spec)
                    self.ended[request_id] = "rejected"
                else:
                    assert self.can_ever_run(spec)
            if spec.cancel is not None and max(spec.cancel, spec.arrival) == tick and self.alive(request_id):
                self.end(request_id, "cancelled")
        if self.script.drain == tick:
            alive = [request_id for request_id in self.submitted if self.alive(request_id)]
            held = self.sched.in_flight
            assert sorted(self.sched.drain()) == sorted(alive)
            for request_id in alive:
                self.ended[request_id] = "cancelled"
            if not held:
                for owners in (self.slots, self.pages, self.staging_slots, self.staging_pages):
                    owners.clear()
            else:
                in_flight = {c.request_id for plan, _ in self.flights.values() for c in plan.chunks}
                for owners in (self.slots, self.pages, self.staging_slots, self.staging_pages):
                    for key in [key for key, owner in owners.items() if owner not in in_flight]:
                        del owners[key]

    def can_ever_run(self, spec):
        lifetime = spec.prompt_len + spec.max_tokens
        fits = pages_for(lifetime, 64) < self.config.num_pages
        if self.config.overlap == "device":
            fits = fits and pages_for(spec.prompt_len, 64) < self.config.staging_pages
        return spec.max_tokens > 0 and lifetime <= self.config.max_model_len and fits

    def alive(self, request_id):
        return request_id in self.submitted and request_id not in self.ended

    def end(self, request_id, how):
        self.ended[request_id] = how
        released = self.sched.finish(request_id)
        in_flight = {c.request_id for plan, _ in self.flights.values() for c in plan.chunks}
        assert (released is None) == (request_id in in_flight)
        if released is not None:
            self.give_back(released)

    def give_back(self, released):
        for owners, keys in (
            (self.slots, [released.slot] if released.slot else []),
            (self.pages, released.pages),
            (self.staging_slots, [released.staging_slot] if released.staging_slot else []),
            (self.staging_pages, released.staging_pages),
        ):
            for key in keys:
                # A request that never reached a plan owns places that no plan has shown.
                assert owners.pop(key, released.request_id) == released.request_id
        for owners in (self.slots, self.pages, self.staging_slots, self.staging_pages):
            assert released.request_id not in owners.values(), "kept something"

    def land(self, tick):
        for handle, (_, due) in sorted(self.flights.items()):
            if due <= tick:
                self.report(handle)

    def report(self, handle):
        plan, _ = self.flights.pop(handle)
        fails = self.script.failures[handle % len(self.script.failures)]
        outcome = (self.sched.chunk_failed if fails else self.sched.chunk_done)(handle)
        alive = [c for c in plan.chunks if c.request_id not in self.ended]
        assert outcome.dropped == tuple(c.request_id for c in plan.chunks if c.request_id in self.ended)
        if fails:
            assert outcome.failed == tuple(c.request_id for c in alive)
            for chunk in alive:
                self.ended[chunk.request_id] = "failed"
        else:
            assert outcome.decoding == tuple(c.request_id for c in alive if c.last)
            for chunk in alive:
                if chunk.last:
                    del self.staging_slots[chunk.staging_slot]
                    for page in chunk.staging_pages:
                        del self.staging_pages[page]
                    self.landed.add(chunk.request_id)
        for released in outcome.released:
            self.give_back(released)
        for request_id in outcome.decoding:
            self.count(request_id, 1)

    def collect(self, plan):
        if plan is None:
            return
        if plan.handle is None:
            for chunk in plan.chunks:
                if chunk.last:
                    self.count(chunk.request_id, 1)
        for row in plan.rows:
            self.count(row.request_id, row.steps)

    def count(self, request_id, tokens):
        if request_id in self.ended:
            return
        spec = self.specs[request_id]
        self.read[request_id] = min(self.read.get(request_id, 0) + tokens, spec.eos, spec.max_tokens)
        if self.read[request_id] == min(spec.eos, spec.max_tokens):
            self.end(request_id, "done")

    # The books

    def own(self, owners, key, request_id, total):
        assert 0 < key < total, "null or out of range"
        assert owners.setdefault(key, request_id) == request_id, "shared"

    def check(self, plan: Plan, tick):
        config = self.config
        assert (
            plan.kind
            in {
                (False, False): ("idle", "wait"),
                (True, False): ("prefill",),
                (False, True): ("decode",),
                (True, True): ("unified",),
            }[bool(plan.chunks), bool(plan.rows)]
        )
        assert (plan.kind == "wait") <= bool(self.flights)
        assert plan.prefill_tokens <= config.max_num_batched_tokens
        assert len(plan.rows) <= config.max_num_seqs
        assert len(self.slots) <= config.max_num_seqs
        ids = [part.request_id for part in (*plan.chunks, *plan.rows)]
        assert len(set(ids)) == len(ids)
        for chunk in plan.chunks:
            self.check_chunk(chunk)
        for row in plan.rows:
            self.check_row(row, plan)
        if plan.chunks:
            bucket = plan.prefill_bucket or plan.bucket
            assert bucket.tokens >= plan.prefill_tokens and bucket.requests >= len(plan.chunks)
            assert bucket.width >= max(pages_for(c.start + c.length, 64) for c in plan.chunks)
        if plan.rows:
            bucket = plan.decode_bucket or plan.bucket
            assert bucket.rows >= len(plan.rows)
            assert bucket.width >= max(pages_for(r.position + r.steps, 64) for r in plan.rows)
            if plan.steps > 1:
                assert plan.kind == "decode" and not self.flights
        assert (plan.handle is not None) == (config.overlap == "device" and bool(plan.chunks))
        if plan.handle is not None:
            assert len(self.flights) < config.max_chunks_in_flight
            ticks = self.script.flight_ticks[plan.handle % len(self.script.flight_ticks)]
            due = max([tick + ticks, *(due for _, due in self.flights.values())])  # the device runs in order
            self.flights[plan.handle] = (plan, due)

    def check_chunk(self, chunk):
        request_id, spec = chunk.request_id, self.specs[chunk.request_id]
        assert request_id not in self.ended, "planned after its end"
        done = self.prompt_done.get(request_id, 0)
        assert chunk.start == done and chunk.start % 64 == 0 and chunk.length > 0
        assert chunk.first == (done == 0) and chunk.last == (done + chunk.length == spec.prompt_len)
        self.prompt_done[request_id] = done + chunk.length
        assert self.prompt_done[request_id] <= spec.prompt_len
        if chunk.first:
            self.started.append(request_id)
        if chunk.last:
            self.planned[request_id] = 1
        assert len(chunk.pages) == pages_for(spec.prompt_len + spec.max_tokens, 64)
        self.own(self.slots, chunk.slot, request_id, self.config.num_slots)
        for page in chunk.pages:
            self.own(self.pages, page, request_id, self.config.num_pages)
        if self.config.overlap == "device":
            assert len(chunk.staging_pages) == pages_for(spec.prompt_len, 64)
            self.own(self.staging_slots, chunk.staging_slot, request_id, self.config.staging_slots)
            for page in chunk.staging_pages:
                self.own(self.staging_pages, page, request_id, self.config.staging_pages)
        else:
            assert (chunk.staging_slot, chunk.staging_pages) == (0, ())

    def check_row(self, row, plan):
        request_id, spec = row.request_id, self.specs[row.request_id]
        assert request_id not in self.ended, "planned after its end"
        assert self.prompt_done[request_id] == spec.prompt_len
        assert self.config.overlap != "device" or request_id in self.landed
        assert 1 <= row.steps <= plan.steps
        assert row.position == spec.prompt_len + self.planned[request_id] - 1
        self.planned[request_id] += row.steps
        assert self.planned[request_id] <= spec.max_tokens
        assert self.slots[row.slot] == request_id
        assert all(self.pages[page] == request_id for page in row.pages)
        assert pages_for(row.position + row.steps, 64) <= len(row.pages)

    def check_end(self):
        assert sorted(self.ended) == sorted(self.specs), "a request never ended"
        order = [request_id for request_id in self.submitted if request_id in self.started]
        assert self.started == order, "not first come, first served"
        stats = self.sched.stats()
        assert (stats.waiting, stats.slots_used, stats.pages_used) == (0, 0, 0)
        assert (stats.staging_slots_used, stats.staging_pages_used, stats.chunks_in_flight) == (0, 0, 0)
        assert not (self.slots or self.pages or self.staging_slots or self.staging_pages or self.flights)
        for request_id, how in self.ended.items():
            if how == "done":
                spec = self.specs[request_id]
                assert self.prompt_done[request_id] == spec.prompt_len
                assert self.read[request_id] == min(spec.eos, spec.max_tokens)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_nothing_leaks_nothing_is_shared_nothing_is_lost(script):
    Driver(script).run()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_the_same_script_gives_the_same_plans(script):
    assert Driver(script).run().plans == Driver(script).run().plans
