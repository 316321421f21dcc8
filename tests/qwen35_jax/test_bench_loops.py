"""The three kinds of load on a fake engine under a fake clock."""

import numpy as np
import pytest

from qwen35_jax.bench.checks import request_checks
from qwen35_jax.bench.loops import Load, LoadRun, step_metrics
from qwen35_jax.bench.workload import WorkItem, Workload, fixed, poisson_arrivals
from qwen35_jax.errors import UserInputError
from schedulers.trace import StepRecord
from tests.qwen35_jax.fakes import BROKEN, FakeEngine

STEP = 0.1  # seconds of a step of the fake engine


class Clock:
    """Time passes only in steps of the engine and in sleep."""

    def __init__(self):
        self.now = 100.0
        self.sleeps = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds

    def step(self, engine):
        self.now += STEP


class WatchedEngine(FakeEngine):
    """Remembers when each request was submitted."""

    def __init__(self, clock, **options):
        super().__init__(on_step=clock.step, **options)
        self.clock = clock
        self.times = {}

    def submit(self, request_id, *arguments, **options):
        self.times[request_id] = self.clock()
        super().submit(request_id, *arguments, **options)


def load_run(workload, load, **options):
    keep = options.pop("keep", ())
    clock = Clock()
    engine = WatchedEngine(clock, **options)
    return LoadRun(engine, workload, load, keep=keep, clock=clock, sleep=clock.sleep), engine, clock


def work(number, inputs=3, outputs=4):
    return fixed(number, inputs, outputs).fill(7)  # ids that mean nothing to the fake engine


def test_throughput_sends_everything_at_the_start_through_a_bounded_window():
    run, engine, _ = load_run(work(50), Load("throughput"), max_num_seqs=4)
    run.run()
    assert engine.most_inside == run.most_inside == 8
    assert [name for name, _, _ in engine.submitted] == [str(i) for i in range(50)]
    assert {timing.arrival for timing in run.timings.values()} == {run.started}
    assert all(timing.good and timing.output_tokens == 4 for timing in run.timings.values())
    assert run.duration == pytest.approx(-(-50 // 4) * 4 * STEP)  # four at a time, four steps each
    # The last ones waited for all before them, and that is in their time to first token.
    assert run.timings[49].ttft == pytest.approx(12 * 4 * STEP + STEP)
    assert run.timings[0].ttft == pytest.approx(STEP)


def test_throughput_reads_no_more_between_two_steps_than_a_job_does():
    run, engine, _ = load_run(work(500, outputs=9), Load("throughput"), max_num_seqs=100)
    sent = []
    for _ in range(5):
        run.advance()
        sent.append(run.sent)
    assert sent == [100, 132, 164, 196, 200]  # as many as run at once, then 32 a step up to the window
    big = Workload("big", tuple(WorkItem(np.zeros(40_000, np.int32), 1) for _ in range(9)))
    run, engine, _ = load_run(big, Load("throughput"), max_num_seqs=100, max_model_len=50_000)
    run.advance()
    assert run.sent == 2  # 65,536 prompt tokens and the request that passed them


@pytest.mark.parametrize("clients", [1, 3, 7])
def test_a_closed_loop_never_has_more_requests_than_clients(clients):
    inside = []
    run, engine, _ = load_run(work(20), Load("closed", concurrency=clients), max_num_seqs=4)
    while run.advance():
        inside.append(len(engine._live))
    assert run.most_inside == engine.most_inside == clients
    assert len(run.timings) == 20 and all(timing.good for timing in run.timings.values())
    assert max(inside) <= clients


def test_a_client_sends_the_next_request_when_it_has_the_last_token():
    run, engine, _ = load_run(work(6), Load("closed", concurrency=1))
    run.run()
    timings = list(run.timings.values())
    for before, after in zip(timings, timings[1:], strict=False):
        assert after.arrival == after.submitted == before.times[-1]
    assert timings[3].ttft == pytest.approx(STEP)
    assert run.duration == pytest.approx(6 * 4 * STEP)


def test_an_open_loop_submits_nothing_before_its_time_and_counts_from_it():
    workload = work(30)
    run, engine, clock = load_run(workload, Load("open", rate=4.0), max_num_seqs=100)
    run.run()
    due = [run.started + offset for offset in poisson_arrivals(30, 4.0, seed=workload.seed)]
    assert len(run.timings) == 30
    for index, timing in run.timings.items():
        assert timing.arrival == due[index]
        assert engine.times[str(index)] == timing.submitted
        assert -1e-9 <= timing.submitted - timing.arrival < STEP + 1e-9  # at most a step late
        assert timing.times[0] - timing.submitted == pytest.approx(STEP)
    assert [name for name, _, _ in engine.submitted] == [str(i) for i in range(30)]
    assert all(timing.good for timing in run.timings.values())


def test_an_idle_open_loop_sleeps_until_the_next_arrival():
    run, engine, clock = load_run(work(5, outputs=1), Load("open", rate=0.01))
    run.run()
    offsets = poisson_arrivals(5, 0.01)
    waits = np.diff(offsets, prepend=0.0)
    waits[1:] -= STEP  # the step that answered the one before
    assert clock.sleeps == pytest.approx(waits.tolist())
    assert engine.steps == 5  # no step without work
    assert run.duration == pytest.approx(offsets[-1] + STEP)


def test_an_open_loop_does_not_wait_for_answers():
    run, engine, _ = load_run(work(40), Load("open", rate=1000.0), max_num_seqs=2)
    run.run()
    assert engine.most_inside > 30


def test_several_tokens_of_a_step_are_one_update():
    run, _, _ = load_run(work(1, outputs=10), Load("throughput"), tokens_per_step=4, keep=(0,))
    run.run()
    assert run.timings[0].counts == [4, 4, 2]
    assert len(run.answers[0].tokens) == 10
    assert run.timings[0].gaps == pytest.approx([STEP, STEP])


def test_requests_are_greedy_and_ignore_eos():
    run, engine, _ = load_run(work(3, outputs=9), Load("throughput"), keep=(1,))
    run.run()
    assert all(
        (p.temperature, p.ignore_eos, p.max_tokens, p.logprobs) == (0.0, True, 9, None) for *_, p in engine.submitted
    )
    assert set(run.answers) == {1}


def test_refused_and_failed_requests_are_counted():
    items = (
        WorkItem(np.array([1, 2], np.int32), 3),
        WorkItem(np.array([1, BROKEN], np.int32), 3),  # two tokens, then an error
        WorkItem(np.zeros(80, np.int32), 3),  # refused
        WorkItem(np.array([5], np.int32), 3),
    )
    ended = []
    clock = Clock()
    run = LoadRun(
        WatchedEngine(clock), Workload("x", items), Load("closed", concurrency=2), clock=clock, on_end=ended.append
    ).run()
    assert sorted(timing.index for timing in ended) == [0, 1, 2, 3]
    checks = request_checks(4, run.timings)
    assert checks == {
        "requests_asked": 4,
        "requests_answered": 4,
        "wrong_length": 0,
        "failed": 2,
        "first_error": checks["first_error"],
    }
    assert {run.timings[1].error, run.timings[2].error} == {"non-finite logits at position 2", "too long"}


def test_a_wrong_length_is_a_failure():
    # An engine that lets EOS end an output although it should not.
    clock = Clock()
    engine = WatchedEngine(clock)
    run = LoadRun(engine, work(2, outputs=8), Load("throughput"), clock=clock)
    run.advance()
    outputs = engine.step()  # a step whose tokens nobody sees
    engine.stop("1")
    engine._out.append(type(outputs[0])("1", finished=True, finish_reason="stop"))
    run.run()
    checks = request_checks(2, run.timings)
    assert (checks["failed"], checks["wrong_length"], checks["requests_answered"]) == (2, 2, 2)


def test_a_request_that_the_engine_loses_is_a_failure():
    clock = Clock()
    engine = WatchedEngine(clock)
    run = LoadRun(engine, work(3), Load("throughput"), clock=clock)
    run.advance()
    engine.stop("1")
    checks = request_checks(3, run.run().timings)
    assert (checks["failed"], checks["requests_answered"]) == (1, 2)


def test_a_run_that_is_given_up_leaves_the_engine_empty():
    run, engine, _ = load_run(work(30), Load("throughput"))
    run.advance()
    run.give_up()
    assert not engine.has_work
    checks = request_checks(30, run.timings)
    assert checks["failed"] == 30 and checks["requests_answered"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "batch"}, "unknown kind of load 'batch'"),
        ({"kind": "closed"}, "a closed load has a concurrency"),
        ({"kind": "open"}, "a open load has a rate"),
        ({"kind": "throughput", "rate": 2.0}, "a throughput load has no rate"),
        ({"kind": "closed", "concurrency": 0}, "concurrency must be at least 1"),
        ({"kind": "open", "rate": -2.0}, "rate must be a positive"),
    ],
)
def test_loads_that_are_none(options, message):
    with pytest.raises(UserInputError, match=message):
        Load(**options)


def test_what_steps_say():
    records = [
        StepRecord(0.0, "prefill", 1.0, prefill_tokens=96, padded_tokens=128),
        StepRecord(0.0, "decode", 1.0, decode_rows=3, decode_tokens=3, padded_rows=4),
        StepRecord(0.0, "decode", 1.0, decode_rows=1, decode_tokens=8, steps=8, padded_rows=1),
    ]
    assert step_metrics(records) == pytest.approx(
        {
            "steps_prefill": 1,
            "steps_decode": 2,
            "prefill_padding": 0.25,
            "decode_padding": 1 / 12,
            "decode_rows_mean": 2.0,
        }
    )
    assert step_metrics([]) == {"prefill_padding": 0.0, "decode_padding": 0.0}
