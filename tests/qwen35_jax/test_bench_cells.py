"""Cells on a real tiny engine, and how they are named and read."""

import dataclasses

import pytest

from qwen35_jax.bench import cells, checks, device_trace
from qwen35_jax.bench.cells import CellOptions, CellSpec, parse_spec, run_cell, size_of, suffixes
from qwen35_jax.bench.device_trace import DeviceEvent, DeviceTrace
from qwen35_jax.bench.loops import Load
from qwen35_jax.bench.records import parse_cell
from qwen35_jax.bench.workload import fixed
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.errors import UserInputError
from tests import engine_kit

COMMAND = "qwen35-bench ..."


def measure(engine, spec, **options):
    options = CellOptions(**({"warm_up_requests": 2, "check_rows": 2} | options))
    return run_cell(engine, engine_kit.MODEL, spec, size="tiny-4b", options=options, command=COMMAND)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("throughput:70x3:11", "offline/tiny-4b/70x3"),
        ("closed:20x4:c3:7", "closed/tiny-4b/c3/20x4"),
        ("open:20x3:qps200:6", "open/tiny-4b/qps200/20x3"),
    ],
)
def test_a_cell_of_each_kind(engine, text, name):
    spec = parse_spec(text)
    record = measure(engine, spec)
    number, output = len(spec.lengths.prompts), spec.lengths.outputs[0]
    assert record.cell == name + "@fp32"
    assert record.metrics["requests"] == number
    assert record.metrics["output_tokens"] == number * output
    assert record.metrics["input_tokens"] == number * spec.lengths.prompts[0]
    for metric in ("ttft_mean_ms", "tpot_mean_ms", "itl_p50_ms", "itl_p99_ms", "e2e_p99_ms", "output_tok_s"):
        assert record.metrics[metric] > 0
    assert record.metrics["total_tok_s"] > record.metrics["output_tok_s"]
    assert 0 < record.metrics["decode_padding"] < 1 and 0 < record.metrics["prefill_padding"] < 1
    assert "idle_share" not in record.metrics and record.checks["profile"] == "not asked for"  # a CPU
    assert record.checks["requests_answered"] == record.checks["requests_asked"] == number
    assert (record.checks["rows_compared"], record.checks["skipped"]) == (2, number - 2)
    assert record.checks["first_mismatch"] is None and record.checks["margin_allowed"] == 0.0
    assert record.checks["max_abs_delta_logprob"] < 1e-4
    assert record.checks["compiles_after_warmup"] == 0
    assert checks.failures(record.checks) == []
    settings = {"max_num_seqs": 8, "max_model_len": 512, "dtype": "float32", "load": spec.load.kind}
    assert settings.items() <= record.settings.items()
    assert record.command == COMMAND
    assert not engine.has_work


def test_steps_of_the_timed_run_only(engine):
    record = measure(engine, parse_spec("throughput:64x2:4"), warm_up_requests=4)
    # One step takes the four prompts, one decodes their second token; what warms up and compares is not counted.
    assert (record.metrics["steps_prefill"], record.metrics["steps_decode"]) == (1, 1)
    assert (record.metrics["prefill_padding"], record.metrics["decode_padding"]) == (0.0, 0.5)


def test_tokens_that_are_not_those_of_the_request_alone_fail_the_cell(engine, monkeypatch):
    compare = checks.compare_with_solo

    def with_an_error(engine, workload, answers, **options):
        answers[0].tokens[1] = (answers[0].tokens[1] + 1) % engine_kit.NUM_VALID
        return compare(engine, workload, answers, **options)

    monkeypatch.setattr(checks, "compare_with_solo", with_an_error)
    record = measure(engine, parse_spec("throughput:20x4:3"))
    assert record.checks["first_mismatch"]["token"] == 1
    assert record.faults() and checks.failures(record.checks)


def test_a_compile_after_warm_up_fails_the_cell(engine, monkeypatch):
    compare = checks.compare_with_solo

    def with_a_compile(engine, *arguments, **options):
        engine._compiles.count += 1
        return compare(engine, *arguments, **options)

    monkeypatch.setattr(checks, "compare_with_solo", with_a_compile)
    record = measure(engine, parse_spec("throughput:20x2:2"))
    assert record.checks["compiles_after_warmup"] == 1
    assert checks.failures(record.checks) == ["compiles_after_warmup = 1"]


def test_a_profiled_window_on_a_device_without_events_gives_no_idle_share(engine):
    record = measure(engine, parse_spec("throughput:20x8:8"), profile_seconds=0.05, check_rows=0)
    assert "idle_share" not in record.metrics
    assert record.checks["profile"] not in (cells.PROFILED, cells.UNFINISHED_PROFILE, cells.NO_PROFILE, "")
    assert record.checks["skipped"] == 8 and not engine.has_work


def test_the_profiled_window_is_a_run_of_its_own(engine, monkeypatch):
    submitted = []

    def profile(window):
        before = engine.scheduler.stats()
        window()
        submitted.append(before.prefilling + before.decoding + before.waiting)
        return DeviceTrace((DeviceEvent("a", "", "", 0, 30), DeviceEvent("b", "", "", 90, 10)))

    monkeypatch.setattr(device_trace, "profile", profile)
    record = measure(engine, parse_spec("throughput:20x12:8"), profile_seconds=0.01, check_rows=0)
    assert record.metrics["idle_share"] == pytest.approx(0.6) and record.checks["profile"] == "done"
    assert 0 < record.metrics["profile_s"] <= 0.01
    assert submitted[0] > 0  # it began in the middle of the load
    assert (record.metrics["requests"], record.checks["failed"]) == (8, 0)
    assert not engine.has_work


def test_a_profiler_that_fails_loses_no_figures(engine, monkeypatch):
    def profile(window):
        window()
        raise RuntimeError("the profiler left no file")

    monkeypatch.setattr(device_trace, "profile", profile)
    record = measure(engine, parse_spec("throughput:20x2:3"), profile_seconds=0.01, check_rows=0)
    assert "idle_share" not in record.metrics and record.metrics["requests"] == 3
    assert record.checks["profile"] == "the profiler left no file"
    assert not engine.has_work


def test_a_request_that_is_too_long_is_refused_before_anything_runs(engine):
    with pytest.raises(UserInputError, match="600 tokens .* exceeds max_model_len=512"):
        measure(engine, parse_spec("throughput:500x100:1"))
    assert not engine.has_work and engine.trace.records == type(engine.trace.records)()
    with pytest.raises(UserInputError, match="a size is needed"):
        run_cell(engine, engine_kit.MODEL, parse_spec("throughput:8x1:1"))


def test_memory_and_start_are_those_of_the_engine(engine):
    report = engine.start_report
    assert report.num_programs == engine.programs.number
    assert report.plan.num_seqs == engine.max_num_seqs and report.plan.num_pages == engine.scheduler.config.num_pages
    assert report.plan.total > report.plan.weights > 0
    assert report.scratch == engine.programs.scratch_bytes() > 0
    assert min(report.load_s, report.compile_s, report.warm_up_s) >= 0 and report.compile_s > 0
    metrics = cells.start_metrics(engine)
    assert metrics == {
        "load_s": report.load_s,
        "compile_s": report.compile_s,
        "warm_up_s": report.warm_up_s,
        "programs": report.num_programs,
        "programs_loaded": 0,
        "programs_compiled": report.num_programs,
        "planned_memory_gib": report.plan.total / 2**30,
        "planned_scratch_gib": report.plan.workspace / 2**30,
        "scratch_gib": report.scratch / 2**30,
    }  # a CPU does not say what memory was in use


def test_peak_memory_stands_beside_the_plan(engine, monkeypatch):
    peak = 3 * engine.start_report.plan.total

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": peak}

    monkeypatch.setattr(engine.programs, "device", Device())
    metrics = cells.start_metrics(engine)
    assert metrics["peak_memory_gib"] == peak / 2**30
    assert metrics["peak_over_plan"] == 3.0


# Names.


@pytest.mark.parametrize(
    ("text", "kind", "name", "number"),
    [
        ("throughput:1024x128", "throughput", "offline/4b/1024x128", 1024),
        ("throughput:lognormal", "throughput", "offline/4b/lognormal", 2000),
        ("throughput:lognormal:50", "throughput", "offline/4b/lognormal", 50),
        ("closed:1024x256:c1", "closed", "closed/4b/c1/1024x256", 16),
        ("closed:1024x256:64:c16", "closed", "closed/4b/c16/1024x256", 64),
        ("closed:1024x256:c64", "closed", "closed/4b/c64/1024x256", 512),
        ("open:1024x128:qps16", "open", "open/4b/qps16/1024x128", 256),
        (" open:1024x128:qps0.5:9 ", "open", "open/4b/qps0.5/1024x128", 9),
    ],
)
def test_cells_as_the_command_line_writes_them(text, kind, name, number):
    spec = parse_spec(text)
    assert spec.load.kind == kind
    assert spec.name("4b", EngineConfig()) == name
    assert len(spec.lengths.prompts) == number
    parse_cell(name)


def test_a_cell_of_a_file(tmp_path):
    path = tmp_path / "mix.jsonl"
    path.write_text('{"input_len": 3, "output_len": 4}\n' * 3)
    spec = parse_spec(f"throughput:{path}:2")
    assert spec.name("4b", EngineConfig()) == "offline/4b/mix" and len(spec.lengths.prompts) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("offline:1x1", "expected KIND:LENGTHS"),
        ("throughput", "expected KIND:LENGTHS"),
        ("throughput:1024", "lengths '1024'"),
        ("throughput:0x4", "input_len must be at least 1"),
        ("throughput:4x4:x", "invalid literal"),
        ("throughput:4x4:1:2", "number of requests is there twice"),
        ("throughput:4x4:0", "num_requests must be at least 1"),
        ("throughput:4x4:c2", "no concurrency"),
        ("closed:4x4", "has a concurrency"),
        ("closed:4x4:qps2", "has a concurrency"),
        ("open:4x4:qpsfast", "could not convert"),
        ("open:4x4:qpsinf", "rate must be a positive"),
        ("throughput:nowhere.jsonl", "cannot be read"),
    ],
)
def test_cells_that_are_none(text, message):
    with pytest.raises(UserInputError, match=message) as caught:
        parse_spec(text)
    assert repr(text) in str(caught.value)


def test_names_of_variants():
    assert suffixes(EngineConfig()) == suffixes(EngineConfig(dtype="bfloat16")) == ""
    config = EngineConfig(dtype="float32", state_dtype="bfloat16", decode_overlap="device")
    assert suffixes(config) == "@fp32@bf16state@device"
    name = CellSpec(Load("throughput"), fixed(1, 2, 3)).name("4b", config)
    assert parse_cell(name).suffixes == ("fp32", "bf16state", "device")
    others = EngineConfig(decode_overlap="stream", scheduler_policy="auto", decode_steps=8, kernels="reference")
    assert suffixes(others) == "@stream@policy-auto@steps8@reference"
    mixed = suffixes(EngineConfig(kernels="gdn_decode=triton, add_rms_norm=reference"))
    assert parse_cell(f"start/4b{mixed}").suffixes == ("gdn_decode-triton.add_rms_norm-reference",)


def test_the_name_of_a_model_by_its_dimensions():
    for name in ("0.8b", "4b", "27b", "tiny-4b"):
        config = dataclasses.replace(ModelConfig.preset(name), eos_token_ids=(), dtype="float32")
        assert size_of(config) == name
    assert size_of(ModelConfig.preset("4b", num_layers=4)) is None


def test_options_below_zero():
    with pytest.raises(UserInputError, match="check_rows must not be negative"):
        CellOptions(check_rows=-1)
