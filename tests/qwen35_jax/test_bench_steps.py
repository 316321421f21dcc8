"""Single steps measured on a real engine, and the script that profiles them."""

import dataclasses
import sys
from unittest import mock

import jax
import numpy as np
import pytest

from qwen35_jax import loading
from qwen35_jax.bench import steps
from qwen35_jax.bench.device_trace import DeviceEvent, DeviceTrace
from qwen35_jax.bench.records import parse_cell, read_records
from qwen35_jax.cache import PAGE_SIZE
from qwen35_jax.errors import UserInputError
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.steps import ProgramKey
from schedulers import Bucket, BucketLadder
from scripts import profile_step
from tests.engine_kit import EOS, MODEL, NUM_VALID, OPTIONS, Job, drain, kit, run, submit_all

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
JOBS = [Job("a", tuple(range(20, 90)), GREEDY), Job("b", tuple(range(300, 310)), GREEDY)]
QUICK = {"warm_up": 1, "dispatches": 2, "repeats": 2}


# --- layout -----------------------------------------------------------------------------------------------------------


def test_decode_load(engine):
    load = steps.decode_load(engine, rows=5, context=2 * PAGE_SIZE + 1)
    assert load.key == ProgramKey("decode", Bucket(0, 0, 8, 8), 1, "greedy")
    pages = [page for own in load.pages for page in own]
    assert len(set(load.slots)) == 5 and 0 not in load.slots
    assert len(pages) == len(set(pages)) == 15 and 0 not in pages
    assert pages != sorted(pages) and list(load.slots) != sorted(load.slots)
    fields = load.fields()
    assert fields["positions"].tolist() == [2 * PAGE_SIZE] * 5 + [0] * 3  # the newest token's: it reads the context
    assert fields["steps"].tolist() == [1] * 5 + [0] * 3
    assert fields["decode_pages"][2, :3].tolist() == list(load.pages[2])
    assert load.identities == (0, 1, 2, 3, 0) and load.twins == (0, 4)
    assert steps.decode_load(engine, 1, 1).twins is None


def test_prefill_load(engine):
    load = steps.prefill_load(engine, (70, 3, 70))
    fields = load.fields()
    assert load.key.kind == "prefill" and load.tokens == 143
    assert fields["cu_seqlens"][:4].tolist() == [0, 70, 73, 143]
    assert fields["starts"].tolist() == [0] * len(fields["starts"])
    assert fields["sample"][:4].tolist() == [1, 1, 1, 0]
    assert [len(own) for own in load.pages] == [2, 1, 2]
    np.testing.assert_array_equal(fields["tokens"][:70], fields["tokens"][73:143])  # twins
    assert steps.prefill_load(engine, (70, 3)).twins is None
    assert load.tokens == sum(load.lengths)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda e: steps.decode_load(e, 9, 10), "no compiled greedy decode program"),
        (lambda e: steps.decode_load(e, 1, 8 * PAGE_SIZE + 1), "9 pages a sequence"),
        (lambda e: steps.decode_load(e, 0, 10), "rows must be at least 1"),
        (lambda e: steps.prefill_load(e, (200, 57)), "257 tokens"),
        (lambda e: steps.prefill_load(e, (5, 0)), r"lengths\[1\] must be at least 1"),
        (lambda e: steps.prefill_load(e, ()), "prompts must be at least 1"),
        (lambda e: steps.measure(e, steps.decode_load(e, 1, 1), dispatches=40), "at most 24"),
        (lambda e: steps.measure(e, steps.decode_load(e, 1, 1), repeats=0), "repeats must be at least 1"),
    ],
)
def test_impossible_loads_are_refused(engine, make, message):
    with pytest.raises(UserInputError, match=message):
        make(engine)


def test_pools_that_are_too_small_are_refused(engine):
    programs = engine.programs
    small = dataclasses.replace(OPTIONS)  # the kit's own pools hold every sequence at full length
    assert programs.shapes.cache.kv.shape[1] - 1 == small.max_num_seqs * small.max_model_len // PAGE_SIZE
    with pytest.raises(UserInputError, match="needs 65 pages, the engine's pools have 64"):
        steps._places(programs, (65,))
    with pytest.raises(UserInputError, match="needs 9 slots, the engine's pools have 8"):
        steps._places(programs, (1,) * 9)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_times_and_an_engine_that_stays_usable(engine):
    expected = run(kit("off").engine(), JOBS)
    decode = steps.decode_step(engine, 5, 100, **QUICK)
    prefill = steps.prefill_step(engine, (70, 3, 70), **QUICK)
    for time in (decode, prefill):
        assert 0 < time.dispatch_ms and 0 < time.step_ms and time.spread >= 0
        assert (time.dispatches, time.repeats) == (2, 2)
    submit_all(engine, JOBS)
    got = drain(engine)
    assert {name: got[name].tokens for name in got} == {name: expected[name].tokens for name in expected}


def test_a_busy_engine_is_refused(engine):
    load = steps.decode_load(engine, 1, 1)
    submit_all(engine, JOBS)
    for measure in (steps.measure, steps.trace_step, steps.check_step):
        with pytest.raises(UserInputError, match="idle"):
            measure(engine, load)


def test_the_host_time_is_that_of_the_calls(engine, monkeypatch):
    """A clock that stands still but for the calls: everything is the host's time."""
    clock = [0.0]
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock[0])
    load = steps.decode_load(engine, 1, 1)

    def fields():
        clock[0] += 0.25
        return load.fields()

    time = steps.measure(engine, dataclasses.replace(load, fields=fields), **QUICK)
    assert time.dispatch_ms == time.step_ms == pytest.approx(250)
    assert time.spread == 0


def test_a_failed_dispatch_leaves_fresh_pools(engine, monkeypatch):
    expected = run(kit("off").engine(), JOBS)

    def fail(key, state, fields):
        jax.tree.map(lambda leaf: leaf.delete(), state)
        raise jax.errors.JaxRuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "run", fail)
        with pytest.raises(jax.errors.JaxRuntimeError):
            steps.measure(engine, steps.decode_load(engine, 2, 10), **QUICK)
    submit_all(engine, JOBS)
    got = drain(engine)
    assert {name: got[name].tokens for name in got} == {name: expected[name].tokens for name in expected}


def test_trace_of_a_step_on_a_cpu(engine):
    trace = steps.trace_step(engine, steps.decode_load(engine, 2, 10), dispatches=1)
    assert trace.events or "no device events" in trace.note


def test_a_program_without_a_text_is_traced_all_the_same(engine, monkeypatch):
    load, asked = steps.decode_load(engine, 2, 10), []
    monkeypatch.setattr(steps, "profile", lambda function, directory, scopes: asked.append(scopes) or DeviceTrace(()))
    steps.trace_step(engine, load, dispatches=1)
    silent = mock.Mock(as_text=lambda: None)
    monkeypatch.setattr(engine.programs, "executable", lambda key: silent)
    steps.trace_step(engine, load, dispatches=1)
    assert asked[0] and asked[1] == {}


def test_steps_of_a_trace_come_after_others_that_are_not_in_it(engine, monkeypatch):
    """Three kernels a step: those of the last two of seven steps are left."""
    load, run, numbers, read = steps.decode_load(engine, 2, 10), engine.programs.run, [], []

    def counted(*arguments):
        numbers.append(len(numbers))
        return run(*arguments)

    def profile(function, directory, scopes):
        before = len(numbers)
        function()
        return DeviceTrace(
            tuple(DeviceEvent(f"{step}", "", "", 10 * step + i, 1) for step in numbers[before:] for i in range(3))
        )

    def reading():
        read.append(len(numbers))
        return 1700.0 + len(read), 600.0, True

    monkeypatch.setattr(engine.programs, "run", counted)
    monkeypatch.setattr(steps, "profile", profile)
    monkeypatch.setattr(steps, "reader", lambda device: reading)
    trace = steps.trace_step(engine, load, dispatches=2, settle=5)
    assert [event.name for event in trace.events] == ["6"] * 3 + ["7"] * 3 and numbers == [*range(8)]
    assert min(read) >= 6, "clocks are those of the steps that are kept"
    assert trace.clocks["sm_clock_mhz"] > 1700 and trace.clocks["power_capped_share"] == 1
    assert steps.measure(engine, load, **QUICK).clocks["power_w"] == 600


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["greedy", "full"])
def test_twins_agree_and_others_do_not(engine, variant):
    load = steps.decode_load(engine, 5, 100, variant)
    check = steps.check_step(engine, load)
    assert (check.rows, check.finite) == (5, 5)
    assert check.twin_delta == 0 and len(set(check.twin_tokens)) == 1
    assert check.twin_logprob_delta == (0 if variant == "full" else None)
    assert np.abs(check.digest[0] - check.digest[1]).max() > 1e-3
    # The comparison sees a sequence that is not its twin: pools filled for another, fields of this one.
    steps.fill_pools(engine, dataclasses.replace(load, identities=(0, 1, 2, 3, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "fill_pools", lambda engine, load: None)
        assert steps.check_step(engine, load).twin_delta > 1e-3


def test_a_sequence_is_the_same_in_another_load(engine):
    few, many = steps.decode_load(engine, 3, 100), steps.decode_load(engine, 8, 100)
    few_check, many_check = steps.check_step(engine, few), steps.check_step(engine, many)
    compared = few_check.against(many_check, few, many)
    assert compared == {"rows_compared": 2, "equal_tokens": 2, "max_relative_delta": 0.0}
    change = np.asarray(many.identities) == 1
    other = dataclasses.replace(
        many_check, digest=many_check.digest + change[:, None], tokens=many_check.tokens + change
    )
    compared = few_check.against(other, few, many)
    assert compared["equal_tokens"] == 1 and compared["max_relative_delta"] > 0.1


def test_the_context_is_read(engine):
    """Every page of the context counts, the first one too."""
    load = steps.decode_load(engine, 2, 3 * PAGE_SIZE, "full")
    logprobs = steps.check_step(engine, load).logprobs
    other = dataclasses.replace(load, pages=tuple((0, *own[1:]) for own in load.pages))
    steps.fill_pools(engine, other)  # the first pages hold something else
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "fill_pools", lambda engine, load: None)
        changed = steps.check_step(engine, load)
    assert (changed.logprobs != logprobs).all() and changed.finite == 2


def test_no_pool_holds_what_is_not_finite(engine):
    steps.fill_pools(engine, steps.prefill_load(engine, (70, 3, 70)))
    for leaf in engine._state.cache:
        values = np.asarray(leaf, np.float32)
        assert np.isfinite(values).all() and values.std() > 0.01


# --- the script -------------------------------------------------------------------------------------------------------


def test_an_engine_of_chosen_programs_only(monkeypatch):
    class Stop(Exception):
        pass

    def program_set(spec, device, params, shapes, keys, **_):
        raise Stop(keys)

    monkeypatch.setattr(loading, "ProgramSet", program_set)
    config = dataclasses.replace(OPTIONS, max_num_batched_tokens=512)
    with pytest.raises(Stop) as stopped:
        loading.build_engine(
            config,
            MODEL,
            lambda device, dtype: (),
            eos_ids=EOS,
            num_valid=NUM_VALID,
            choose=lambda ladder: [
                steps.decode_bucket_key(ladder, 3, 100),
                steps.prefill_bucket_key(ladder, (64, 100)),
            ],
        )
    (keys,) = stopped.value.args
    assert [(key.kind, key.variant) for key in keys] == [("decode", "greedy"), ("prefill", "greedy")]
    assert keys[0].bucket.rows >= 3 and keys[0].bucket.width >= 2 and keys[1].bucket.tokens >= 164


def test_steps_of_a_gpu_run_the_programs_of_their_own_size():
    """A prompt of 1,024 tokens is not padded to the largest bucket."""
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    ladder = BucketLadder.from_limits(**limits, preset="gpu")
    prefill = profile_step.parse_prefill("1x1024,4x1024,8x1024,ragged,1x8192", 8192)
    assert {name: steps.prefill_bucket_key(ladder, lengths).bucket.tokens for name, lengths in prefill.items()} == {
        "1x1024": 1024,
        "4x1024": 4096,
        "8x1024": 8192,
        "ragged": 8192,
        "1x8192": 8192,
    }
    assert [cell.name for cell in profile_step.cells_of("4b", (), prefill, "")] == [
        "prefill/4b/1024",
        "prefill/4b/4096",
        "prefill/4b/8192",
        "prefill/4b/8192@ragged",
        "prefill/4b/8192@1x8192",
    ]


def test_a_single_prompt_is_compared_with_a_step_that_begins_with_it(engine):
    model, quick = MODEL, {"repeats": 1, "dispatches": 1}
    cells = [profile_step.Cell(f"prefill/4b/{sum(n)}", lengths=n) for n in ((70,), (70, 70), (70, 70, 70), (64,))]
    found = [profile_step.measure(engine, model, cell, 1, "greedy", **quick) for cell in cells]
    assert found[0].solo is None and found[1].solo is not None
    checks = [profile_step.checks_of(step, found) for step in found]
    assert checks[0]["compared_with"] == "prefill/4b/210" and checks[0]["rows_compared"] == 1
    assert checks[0]["equal_tokens"] == 1 and checks[0]["max_relative_delta"] < 1e-4
    assert checks[1]["compared_with"] == "the first prompt alone"
    assert "compared_with" not in checks[3], "no other step begins with a prompt of 64 tokens"


def test_flags_become_cells():
    assert profile_step.parse_rows("8, 1,8") == (1, 8)
    prefill = profile_step.parse_prefill("2x1024,1x8192,ragged", 2048)
    assert prefill["2x1024"] == (1024, 1024) and prefill["1x8192"] == (8192,)
    assert sum(prefill["ragged"]) == 2048 and len(prefill["ragged"]) > 1 and min(prefill["ragged"]) > 0
    names = [cell.name for cell in profile_step.cells_of("4b", (1,), prefill, "@bf16state")]
    assert names == [
        "decode/4b/rows1@bf16state",
        "prefill/4b/2048@bf16state",
        "prefill/4b/8192@bf16state@1x8192",
        "prefill/4b/2048@bf16state@ragged",
    ]
    (far,) = profile_step.cells_of("4b", (1,), {}, "@full", 32768)
    assert far.name == "decode/4b/rows1@full@context32768" and parse_cell(far.name).load == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset=tiny-4b", "--decode_rows=1,x"], "--decode_rows must be positive numbers"),
        (["--preset=tiny-4b", "--prefill=8by4"], "--prefill must be words such as 8x1024"),
        (["--preset=tiny-4b", "--decode_rows=", "--prefill="], "nothing to measure"),
        (["--preset=tiny-4b", "--variant=best"], "--variant must be one of"),
        (["--preset=tiny-4b", "--context=0"], "--context"),
        (["--preset=tiny-4b", "--long_prompt=-1"], "--long_prompt"),
        (["--preset=tiny-4b", "--long_prompt=64", "--max_num_batched_tokens=64"], "max_num_batched_tokens=64, got 64"),
        (
            ["--preset=tiny-4b", "--long_prompt=640", "--max_num_batched_tokens=64"],
            "has no smaller ones",
        ),
        (["--preset=tiny-4b", "--long_prompt=9000", "--max_model_len=8999"], "fit into --max_model_len=8999, got 9000"),
        (["--preset=tiny-4b", "--trace_dir=t", "--profiled_steps=0"], "--trace_dir keeps what the profiler saw"),
        (["--preset=tiny-4b", "--max_model_len=256"], "--context must fit into --max_model_len=256, got 1100"),
        (["--preset=tiny-4b", "--repeats=0"], "--repeats"),
        (["--preset=tiny-4b", "--results=tests"], "--results=tests is a directory"),
        (["--preset=tiny-4b", "--results=README.md"], "README.md: not JSON"),
        (["--preset=tiny-4b", "--dispatches=0"], "--dispatches"),
        (["--preset=5b"], "5b"),
        ([], "--preset is needed"),
    ],
)
def test_wrong_flags_exit_with_2(flags, message, capsys, monkeypatch):
    monkeypatch.chdir(profile_step.__file__.removesuffix("scripts/profile_step.py"))
    monkeypatch.setattr(profile_step, "make_engine", None)  # it does not come to that
    assert profile_step.main(["profile_step.py", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_made(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(profile_step, "make_engine", lambda *_: pytest.fail("already under way"))
    assert profile_step.main(["profile_step.py", "--preset=tiny-4b", "--picture=p.png"]) == 2
    assert "pictures need matplotlib: pip install '.[bench]'" in capsys.readouterr().err


def test_script_writes_records_tables_and_a_picture(monkeypatch, tmp_path, capsys):
    """On the engine of the other tests, with a trace as a GPU would give."""
    events = (
        DeviceEvent("nvjet", "jit(step)/layer_0/mlp/gate_up/dot_general", "jit_step", 0, 3000, "Stream #1"),
        DeviceEvent("who knows", "", "", 4000, 1000, "Stream #1"),
    )
    monkeypatch.setattr(profile_step, "make_engine", lambda *_: kit("off").engine())
    monkeypatch.setattr(profile_step, "FLOOR_DEVICE", jax.devices()[0].device_kind)
    monkeypatch.setattr(steps, "trace_step", lambda *_, **__: DeviceTrace(events, skipped_lines={"XLA Ops": 7}))
    results, picture, traces = tmp_path / "r.json", tmp_path / "p.png", tmp_path / "traces"
    traces.mkdir()
    argv = ["profile_step.py", "--preset=tiny-4b", "--decode_rows=1,3", "--context=100", "--prefill=2x64"]
    argv += ["--repeats=1", "--dispatches=2", "--profiled_steps=2", f"--results={results}", f"--picture={picture}"]
    assert profile_step.main([*argv, f"--trace_dir={traces}"]) == 0
    decode, _, prefill = records = read_records(results)
    assert [record.cell for record in records] == [
        "decode/tiny-4b/rows1@context100",
        "decode/tiny-4b/rows3@context100",
        "prefill/tiny-4b/128@2x64",
    ]
    assert decode.metrics["parts"] == pytest.approx({"gate_up": 1.5e-3, "other": 0.5e-3})  # of one of two steps
    assert decode.metrics["busy_ms"] == pytest.approx(2e-3)
    assert decode.metrics["idle_ms"] == pytest.approx(decode.metrics["step_ms"] - 2e-3)
    assert decode.metrics["kernels"] == 1
    assert decode.metrics["floor_share"] == decode.metrics["floor_ms"] / decode.metrics["step_ms"] > 0
    assert decode.settings["context"] == 100 and prefill.settings["lengths"] == [64, 64]
    assert prefill.metrics["tok_s"] == pytest.approx(128 / prefill.metrics["step_ms"] * 1e3)
    assert decode.checks["compared_with"] == "decode/tiny-4b/rows3@context100" and decode.checks["rows_compared"] == 1
    assert prefill.checks["twin_max_abs_delta"] == 0 and prefill.checks["max_relative_delta"] < 1e-4
    assert all(record.checks["first_mismatch"] is None for record in records)
    out = capsys.readouterr().out
    for text in ("gate_up", "idle (step - kernels)", "other: who knows", "not counted: XLA Ops (7)"):
        assert text in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "gate_up\tjit(step)" in (traces / "decode-tiny-4b-rows1-context100.tsv").read_text()


def test_times_are_kept_when_the_profile_breaks_off(monkeypatch, tmp_path):
    """The first step has its profile, the second one's never ends: both times are in the file, once each."""
    event = DeviceEvent("nvjet", "jit(step)/layer_0/mlp/gate_up/dot_general", "jit_step", 0, 3000, "Stream #1")
    traces = [DeviceTrace((event,))]

    def trace(*_, **__):
        if not traces:
            raise KeyboardInterrupt
        return traces.pop()

    monkeypatch.setattr(profile_step, "make_engine", lambda *_: kit("off").engine())
    monkeypatch.setattr(steps, "trace_step", trace)
    results = tmp_path / "r.json"
    argv = ["profile_step.py", "--preset=tiny-4b", "--decode_rows=1,3", "--context=100", "--prefill="]
    argv += ["--repeats=1", "--dispatches=1", "--profiled_steps=1", f"--results={results}"]
    assert profile_step.main(argv) == 130
    first, second = read_records(results)
    assert [record.cell for record in (first, second)] == [f"decode/tiny-4b/rows{n}@context100" for n in (1, 3)]
    assert first.metrics["parts"] and first.settings["profiled_steps"] == 1
    assert second.metrics["step_ms"] > 0 and "parts" not in second.metrics and second.settings["profiled_steps"] == 0


def test_launches_are_printed_and_recorded(engine):
    kinds = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
    names = {"linear_attention": "gdn_decode", "full_attention": "kv_write"}
    order = [name for kind in kinds for name in ("nvjet", names[kind], "nvjet")] + ["nvjet"] * 5
    events = tuple(DeviceEvent(name, "", "", 10 * number, 5) for number, name in enumerate(order))
    load = steps.decode_load(engine, 2, 10)
    time, check = steps.StepTime(1.0, 0.1, 0.0, 1, 1), steps.check_step(engine, load)
    step = profile_step.Measured("decode/4b/rows2", load, time, check, None, None, DeviceTrace(events), 1, kinds)
    assert "launches: 3.0 a GDN layer, 3.0 an attention layer, 5.0 outside of layers" in profile_step.table(step, 1)
    record = profile_step.record_of(engine, step, [step], "greedy")
    assert record.metrics["launches"] == {"gdn_layer": 3, "attention_layer": 3, "other": 5}
    unknown = dataclasses.replace(step, layer_types=kinds[:2])
    assert "launches" not in profile_step.table(unknown, 1)
    assert "launches" not in profile_step.record_of(engine, unknown, [unknown], "greedy").metrics


def test_rows_that_fail_are_a_mismatch(engine):
    load = steps.decode_load(engine, 2, 10)
    check = dataclasses.replace(steps.check_step(engine, load), finite=1)
    time = steps.StepTime(1.0, 0.1, 0.0, 1, 1)
    step = profile_step.Measured("decode/4b/rows2", load, time, check, None, None)
    assert profile_step.checks_of(step, [step])["first_mismatch"]["rows"] == 1
    check = dataclasses.replace(check, finite=2, twin_tokens=(3, 4))
    step = dataclasses.replace(step, check=check)
    assert profile_step.checks_of(step, [step])["first_mismatch"] == {"what": "tokens of twins", "tokens": [3, 4]}
