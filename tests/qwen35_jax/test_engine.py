"""The engine on a tiny fp32 model: a request's answer is the same in any company, bucket and overlap mode."""

import copy
import dataclasses
import gc
import signal
import sys
import weakref

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from qwen35_jax import LLM, prefill_device
from qwen35_jax import engine as engine_module
from qwen35_jax.cache import tree_bytes
from qwen35_jax.engine import EngineError
from qwen35_jax.errors import UserInputError
from qwen35_jax.loading import create_engine
from qwen35_jax.programs import init_device_state
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.steps import ProgramKey
from qwen35_jax.transfer import in_transit_bytes, transfer_bytes, transfer_widths
from schedulers import RequestRejected
from tests.engine_kit import EOS, MODEL, NUM_VALID, Job, Result, assert_same, drain, kit, mixed_jobs, run, submit_all

MODES = ("off", "other_buckets", "stream", "device", "k8")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return mixed_jobs()


@pytest.fixture(scope="module")
def solo(jobs) -> dict[str, Result]:
    """The oracle: every request alone in a fresh engine, results read at once, nothing overlapped."""
    results = {}
    for job in jobs:
        results |= run(kit("off").engine(overlap_dispatch=False, max_num_seqs=1), [job])
    return results


def test_the_workload_says_something(solo):
    reasons = {result.ending[0] for result in solo.values()}
    assert reasons == {"stop", "length"}
    assert any(result.ending[1] is not None for result in solo.values()), "no request ended by a stop token id"
    assert len({tuple(result.tokens[:3]) for result in solo.values()}) > len(solo) - 3, "answers are all alike"


@pytest.mark.parametrize("mode", MODES)
def test_batched_equals_solo(mode, jobs, solo):
    assert_same(run(kit(mode).engine(), jobs), solo)


@pytest.mark.parametrize("mode", MODES)
def test_reversed_order_and_poisoned_memory_change_nothing(mode, jobs, solo):
    # Two slots for twelve requests: every slot and page is used again, after it was filled with NaN.
    engine = kit(mode).engine(max_num_seqs=2, debug_poison=True)
    assert_same(run(engine, jobs[::-1]), solo)


@pytest.mark.parametrize("mode", ("off", "stream", "device"))
def test_results_read_at_once_equal_results_read_late(mode, jobs, solo):
    assert_same(run(kit(mode).engine(overlap_dispatch=False, scheduler_policy="auto"), jobs), solo)


@pytest.mark.parametrize("mode", ("off", "stream", "device"))
def test_any_split_of_a_prompt(mode, jobs, solo):
    assert_same(run(kit(mode).engine(max_num_batched_tokens=64), jobs), solo)


def test_one_chunk_in_flight_equals_two(jobs, solo):
    engine = kit("device").engine(max_num_seqs=5, max_num_batched_tokens=64, async_chunks=1, debug_poison=True)
    assert_same(run(engine, jobs), solo)


def test_a_bf16_state_is_half_as_large_and_close(jobs):
    greedy = [dataclasses.replace(job, params=dataclasses.replace(GREEDY, logprobs=1)) for job in jobs]
    exact = run(kit("off").engine(), greedy)
    half = kit("bf16_state")
    assert half.programs.shapes.cache.state.dtype == "bfloat16"
    rounded = run(half.engine(debug_poison=True, max_num_seqs=2), greedy)
    errors = []
    for name, want in exact.items():
        for a, b in zip(rounded[name].logprobs, want.logprobs, strict=True):
            if a.token_id != b.token_id:
                break  # a near tie fell the other way: what follows answers another prefix
            errors.append(abs(a.logprob - b.logprob))
    assert len(errors) > 60
    # The state keeps 8 mantissa bits (4e-3 relative); the tiny model's logits are of order one.
    assert 0 < max(errors) < 0.05


def test_overlap_modes_really_overlap(jobs):
    kinds = {}
    for mode in ("off", "stream", "device"):
        engine = kit(mode).engine(max_num_batched_tokens=64)
        run(engine, jobs)
        kinds[mode] = {record.kind for record in engine.trace.records}
    assert "unified" in kinds["off"] and "unified" in kinds["stream"]
    assert {"overlap_launch", "overlap_complete"} <= kinds["device"]


def test_seeds_follow_the_request_not_its_place(jobs):
    sampled = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    prompt = jobs[3].prompt
    same = [Job(f"s{i}", prompt, sampled) for i in range(4)]
    first, second = run(kit("off").engine(), same), run(kit("off").engine(), same[::-1])
    assert_same(second, first)
    assert len({tuple(result.tokens) for result in first.values()}) == 4, "one seed gave several prompts the same noise"
    other_seed = run(kit("off").engine(seed=1), same)
    assert other_seed["s0"].tokens != first["s0"].tokens


def test_min_tokens_masks_eos_and_stop_ids(jobs):
    params = SamplingParams(temperature=1.0, max_tokens=12, min_tokens=6, stop_token_ids=tuple(range(60)))
    results = run(kit("off").engine(), [Job(f"m{i}", job.prompt, params) for i, job in enumerate(jobs)])
    banned = {*EOS, *params.stop_token_ids}
    for name, result in results.items():
        assert not banned & set(result.tokens[:6]), name
        assert len(result.tokens) >= 6


def test_padded_vocabulary_is_never_sampled(jobs):
    params = SamplingParams(temperature=50.0, max_tokens=40, ignore_eos=True)
    results = run(kit("off").engine(), [Job(f"p{i}", job.prompt, params) for i, job in enumerate(jobs)])
    tokens = [token for result in results.values() for token in result.tokens]
    assert len(tokens) == 480 and max(tokens) < NUM_VALID


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), GREEDY, "empty"),
        ((3, NUM_VALID), GREEDY, r"prompt_token_ids\[1\] is 500"),
        ((-1,), GREEDY, r"prompt_token_ids\[0\] is -1"),
        (tuple([1] * 512), SamplingParams(), "no room"),
        (tuple([1] * 500), dataclasses.replace(GREEDY, max_tokens=13), r"513.*512"),
        ((1,), SamplingParams(min_tokens=600), "min_tokens=600 is more than max_tokens=511"),
    ],
)
def test_bad_requests_are_rejected_with_numbers(prompt, params, message):
    engine = kit("off").engine()
    with pytest.raises(RequestRejected, match=message):
        engine.submit("bad", prompt, params, 0)
    assert not engine.has_work
    submit_all(engine, [Job("good", (1, 2, 3), GREEDY)])
    with pytest.raises(RequestRejected, match="in use"):
        engine.submit("good", (1,), GREEDY, 0)
    assert len(drain(engine)["good"].tokens) == 8
    engine.close()


def test_max_tokens_default_fills_the_room():
    engine = kit("off").engine()
    engine.submit("r", [1] * 505, SamplingParams(temperature=0.0, ignore_eos=True), 0)
    assert len(drain(engine)["r"].tokens) == 7
    engine.close()


@pytest.mark.parametrize("mode", ("off", "stream", "device"))
def test_a_row_with_nan_fails_alone(mode, jobs, solo):
    long = [dataclasses.replace(job, params=dataclasses.replace(GREEDY, max_tokens=30)) for job in jobs[:6]]
    expected = run(kit("off").engine(), long)
    engine = kit(mode).engine()
    submit_all(engine, long)
    poisoned = []

    def poison(results):
        if not poisoned and len(results.get("r3", Result()).tokens) >= 3:
            slot = engine.scheduler._decoding["r3"].slot
            engine._state = engine.programs.fill(engine._state, float("nan"), slot, ())
            poisoned.append(slot)

    results = drain(engine, after_step=poison)
    failed = results.pop("r3")
    assert failed.ending[0] == "error" and "non-finite" in failed.last.error
    assert failed.tokens == expected.pop("r3").tokens[: len(failed.tokens)]
    assert_same(results, expected)
    # The slot serves the next request as if nothing had been there.
    again = [Job(f"r{i}", job.prompt, job.params) for i, job in enumerate(jobs)]
    submit_all(engine, again)
    assert_same(drain(engine), solo)
    engine.close()


@pytest.mark.timeout(300)  # what it is about shows as a loop without an end
@pytest.mark.parametrize(
    ("mode", "call", "when", "number"),
    [
        ("off", "submit", 2, signal.SIGINT),
        ("off", "run", 2, signal.SIGINT),
        ("off", "fetch", 2, signal.SIGINT),
        ("device", "run", 2, signal.SIGINT),
        ("device", "fetch", 1, signal.SIGINT),  # of the first chunk
        ("device", "fetch", 1, signal.SIGTERM),
        ("device", "merge", 1, signal.SIGINT),
    ],
)
def test_a_signal_within_any_call_leaves_a_working_engine(mode, call, when, number, jobs, solo, monkeypatch, ctrl_c):
    engine = kit(mode).engine()
    llm = LLM.from_engine(engine, MODEL, None)
    owner = {"submit": engine.scheduler, "fetch": engine_module}.get(call, engine.programs)
    real, calls = getattr(owner, call), []

    def interrupted(*args):
        result = real(*args)
        calls.append(call)
        if len(calls) == when:
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(owner, call, interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as the commands and many scripts have it
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            llm.generate([job.prompt for job in jobs], [job.params for job in jobs], use_tqdm=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(calls) >= when and not engine.has_work
    requests = [llm.prepare_prompt(job.prompt, job.params, job.name, job.name) for job in jobs]
    outputs = {output.request_id: output for output in llm.stream(requests)}
    assert {name: output.error for name, output in outputs.items()} == dict.fromkeys(solo)
    for name, result in solo.items():
        assert outputs[name].outputs[0].token_ids == result.tokens, name
    llm.close()


@pytest.mark.parametrize("mode", ("off", "stream", "device"))
def test_abort_in_every_phase(mode, jobs):
    many = [dataclasses.replace(job, params=dataclasses.replace(GREEDY, max_tokens=30)) for job in jobs]
    expected = run(kit("off").engine(), many)
    engine = kit(mode).engine(max_num_seqs=4, max_num_batched_tokens=64)
    submit_all(engine, many)
    engine.abort("r11")  # waiting
    results: dict[str, Result] = {}
    steps = 0

    def abort_some(_):
        nonlocal steps
        steps += 1
        if steps == 1:
            engine.abort("r0")  # first chunk just dispatched (or in flight)
        if steps == 6:
            engine.abort("r1")
        engine.abort("never submitted")

    drain(engine, results, after_step=abort_some)
    engine.close()
    aborted = {name for name, result in results.items() if result.ending[0] == "abort"}
    assert {"r11", "r0"} <= aborted <= {"r11", "r0", "r1"}
    for name, result in results.items():
        if name not in aborted:
            assert result.tokens == expected[name].tokens, name


def test_stop_drops_later_tokens(jobs):
    engine = kit("off").engine()
    submit_all(engine, [dataclasses.replace(jobs[2], params=dataclasses.replace(GREEDY, max_tokens=30))])
    while not (outputs := engine.step()) or not outputs[0].token_ids:
        pass
    engine.stop("r2")
    assert drain(engine) == {}
    engine.close()


def fail_once(programs, when):
    """Make one dispatch of the programs raise as a device does; returns a function that undoes it."""
    real, calls = programs.run, []

    def run_or_fail(key, state, fields):
        calls.append(key)
        if len(calls) == when:
            raise JaxRuntimeError("INTERNAL: injected failure")
        return real(key, state, fields)

    programs.run = run_or_fail
    return lambda: programs.__dict__.pop("run")


def test_a_failed_dispatch_fails_what_ran_and_nothing_else(jobs, solo):
    engine = kit("off").engine(max_num_seqs=3)
    undo = fail_once(engine.programs, 5)
    try:
        submit_all(engine, jobs)
        results = drain(engine)
    finally:
        undo()
    failed = {name for name, result in results.items() if result.ending[0] == "error"}
    assert 1 <= len(failed) <= 3
    assert all("injected failure" in results[name].last.error for name in failed)
    assert_same(
        {name: result for name, result in results.items() if name not in failed},
        {name: result for name, result in solo.items() if name not in failed},
    )
    engine.close()


def test_a_device_that_keeps_failing_ends_the_engine(jobs):
    engine = kit("off").engine(max_num_seqs=2)

    def broken(*_):
        raise JaxRuntimeError("INTERNAL: injected failure")

    engine.programs.run = broken
    try:
        submit_all(engine, jobs)
        with pytest.raises(EngineError, match="3 dispatches in a row"):
            drain(engine)
    finally:
        engine.programs.__dict__.pop("run")
    engine.close()


class LostArray:
    """A result that the device never delivers: reading it raises, as an asynchronous failure does."""

    def copy_to_host_async(self):
        pass

    def is_ready(self):
        return True

    def block_until_ready(self):
        raise JaxRuntimeError("INTERNAL: injected failure")

    def __array__(self, *_args, **_kwargs):
        raise JaxRuntimeError("INTERNAL: injected failure")


def test_a_program_that_always_fails_ends_the_engine_though_others_succeed(jobs, monkeypatch):
    engine = kit("off").engine(max_num_seqs=2)
    real = engine.programs.run

    def run_without_decode(key, state, fields):
        state, results = real(key, state, fields)
        return state, LostArray() if key.kind == "decode" else results

    monkeypatch.setattr(engine.programs, "run", run_without_decode)
    submit_all(engine, [job for job in jobs if job.params.max_tokens > 1])
    with pytest.raises(EngineError, match="3 dispatches in a row"):
        drain(engine)
    engine.close()


def test_a_prefill_device_that_keeps_failing_ends_the_engine(jobs, monkeypatch):
    engine = kit("device").engine(max_num_seqs=1)

    def broken(*_):
        raise JaxRuntimeError("INTERNAL: injected failure")

    monkeypatch.setattr(engine.prefill_device.programs, "run", broken)
    submit_all(engine, jobs)
    with pytest.raises(EngineError, match="3 dispatches in a row"):
        drain(engine)
    engine.close()


def test_pools_are_given_back_before_they_are_made_anew(jobs, monkeypatch):
    """Two pairs of pools would not fit into a device whose memory the plan has given out."""
    for mode, module in (("off", engine_module), ("device", prefill_device)):
        engine = kit(mode).engine()
        owner = engine if mode == "off" else engine.prefill_device
        made = []

        def make(shapes, device, owner=owner, made=made):
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(owner._state))
            made.append(device)
            return init_device_state(shapes, device)

        monkeypatch.setattr(module, "init_device_state", make)
        undo = fail_once(owner.programs, 2)
        try:
            submit_all(engine, jobs)
            drain(engine)
        finally:
            undo()
        assert len(made) == 1
        engine.close()


def test_a_prompt_lost_on_its_way_fails_alone(jobs):
    long = [dataclasses.replace(job, params=dataclasses.replace(GREEDY, max_tokens=30)) for job in jobs[:4]]
    expected = run(kit("off").engine(), long)
    engine = kit("device").engine(max_num_batched_tokens=64)  # r3 fills a launch of its own
    submit_all(engine, long)
    lost = []

    def lose(_):
        for flight in engine.prefill_device.flights:
            if "r3" in flight.transfers and not lost:
                flight.transfers["r3"] = dataclasses.replace(flight.transfers["r3"], data=LostArray())
                lost.append(flight)

    results = drain(engine, after_step=lose)
    engine.close()
    assert lost and results.pop("r3").ending[0] == "error"
    assert_same(results, {name: expected[name] for name in results})


def test_an_id_is_in_use_until_its_last_output_is_handed_out(jobs):
    engine = kit("off").engine(overlap_dispatch=False)
    job = dataclasses.replace(jobs[0], params=GREEDY)
    submit_all(engine, [job])
    engine.abort("r0")
    with pytest.raises(RequestRejected, match="in use"):
        submit_all(engine, [job])
    assert drain(engine)["r0"].ending[0] == "abort"
    submit_all(engine, [job])
    assert len(drain(engine)["r0"].tokens) == 8
    engine.close()


def test_a_closed_engine_keeps_no_weights(jobs):
    own = copy.copy(kit("device"))
    own.programs, own.other = copy.copy(own.programs), copy.copy(own.other)
    held = [weakref.ref(own.programs), weakref.ref(own.other)]
    engine = own.engine()
    del own
    submit_all(engine, jobs[:3])
    drain(engine)
    engine.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None]


@pytest.mark.parametrize("when", (1, 3))
def test_a_failed_chunk_fails_its_own_requests(when, jobs, solo):
    engine = kit("device").engine(max_num_seqs=6)
    undo = fail_once(engine.prefill_device.programs, when)
    try:
        submit_all(engine, jobs)
        results = drain(engine)
    finally:
        undo()
    failed = {name for name, result in results.items() if result.ending[0] == "error"}
    assert failed and all("prefill device failed" in results[name].last.error for name in failed)
    assert_same(
        {name: result for name, result in results.items() if name not in failed},
        {name: result for name, result in solo.items() if name not in failed},
    )
    engine.close()


def test_close_with_work_under_way(jobs):
    for mode in ("off", "device"):
        engine = kit(mode).engine()
        submit_all(engine, jobs)
        for _ in range(3):
            engine.step()
        engine.close()
        assert engine.scheduler.stats().slots_used == 0
        assert not engine.has_work


def test_no_admission_while_a_chunk_is_in_flight(jobs):
    engine = kit("device").engine(max_num_seqs=2, max_num_batched_tokens=64, async_chunks=1)
    submit_all(engine, jobs)
    held = 0
    while engine.has_work:
        in_flight, waiting = engine.scheduler.in_flight, engine.scheduler.waiting
        engine.step()
        if in_flight and engine.scheduler.in_flight == in_flight:  # the same launch, before and after the tick
            held += 1
            assert engine.scheduler.waiting == waiting
    assert held, "no tick ever met a chunk in flight"
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_programs_update_the_pools_in_place(mode):
    for programs in filter(None, (kit(mode).programs, kit(mode).other)):
        kv_bytes, state_bytes = tree_bytes(programs.shapes.cache.kv), tree_bytes(programs.shapes.cache.state)
        for key in programs.executables():
            if isinstance(key, tuple) and key[0] == "extract":
                continue  # reads only
            memory = programs.executable(key).memory_analysis()
            assert memory.alias_size_in_bytes >= tree_bytes(programs.shapes), f"{key}: the state is not donated"
            text = programs.executable(key).as_text()
            for pool in programs.shapes.cache:
                shape = "f32[" + ",".join(map(str, pool.shape)) + "]"
                copies = [line for line in text.splitlines() if f"{shape}" in line and " copy(" in line]
                assert not copies, f"{key}: {copies[0]}"
            if programs is kit(mode).other:
                continue  # a staging pool is smaller than the activations of its chunks
            # Activations alone stay below these; a hidden copy of either pool would not.
            small = isinstance(key, ProgramKey) and key.kind == "decode"
            scratch = memory.temp_size_in_bytes
            assert scratch < (state_bytes if small else kv_bytes), f"{key}: {scratch} bytes of scratch"


def test_transfers_are_planned_and_never_twice_their_need():
    widths = transfer_widths(11)
    assert widths == (1, 2, 4, 8, 11)
    for pages in range(1, 12):
        assert min(w for w in widths if w >= pages) < 2 * pages
    device = kit("device")
    biggest = transfer_bytes(device.programs.shapes, 8)
    assert biggest < in_transit_bytes(tree_bytes(device.other.shapes), tree_bytes(device.other.shapes.cache.kv))


def test_compile_counter_sees_compiles():
    engine = kit("off").engine()
    jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32)).block_until_ready()
    assert engine.compiles_after_warmup >= 1
    engine.close()


def test_unknown_kernels_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UserInputError, match=r"kernels='mosaic_sm1'.*reference"):
        create_engine(str(tmp_path / "nothing here"), kernels="mosaic_sm1")
