"""A long prompt in chunks on a real engine: the same end as in one step, its times, its memory, its record."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from qwen35_jax.bench import long_prompt, steps
from qwen35_jax.bench.device_trace import DeviceEvent, DeviceTrace
from qwen35_jax.bench.long_prompt import End, compare, keys_of, memory_metrics, run_and_look, run_once
from qwen35_jax.bench.records import read_records
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.steps import ResultRows
from schedulers import BucketLadder
from scripts import profile_step
from tests.engine_kit import MODEL

GPU = {"max_num_seqs": 8, "max_num_batched_tokens": 8192, "max_model_len": 135_168}


def test_chunks_are_those_of_one_request(engine):
    loads = steps.chunk_loads(engine, 200, 64)
    assert [(load.start, load.tokens, load.lengths) for load in loads] == [
        (0, 64, (64,)),
        (64, 64, (64,)),
        (128, 64, (64,)),
        (192, 8, (8,)),
    ]
    fields = [load.fields() for load in loads]
    assert [(f["starts"][0], f["sample"][0], f["cu_seqlens"][1]) for f in fields] == [
        (0, 0, 64),
        (64, 0, 64),
        (128, 0, 64),
        (192, 1, 8),
    ]
    prompt = steps.prefill_load(engine, (200,)).fields()["tokens"][:200]
    packed = [f["tokens"][: load.tokens] for f, load in zip(fields, loads, strict=True)]
    np.testing.assert_array_equal(np.concatenate(packed), prompt)
    assert len({(load.slots, load.pages) for load in loads}) == 1 and len(loads[0].pages[0]) == 4


@pytest.mark.parametrize(
    ("tokens", "chunk", "message"),
    [
        (200, 65, "multiples of 64"),
        (0, 64, "tokens must be at least 1"),
        (513, 64, "9 pages"),
        (512, 320, "320 tokens"),
    ],
)
def test_impossible_chunks_are_refused(engine, tokens, chunk, message):
    with pytest.raises(UserInputError, match=message):
        steps.chunk_loads(engine, tokens, chunk)


def test_only_two_programs_are_needed():
    ladder = BucketLadder.from_limits(**GPU, preset="gpu")
    keys = [str(key) for key in keys_of(ladder, 131_072, 8192, "greedy")]
    assert keys == ["prefill T=8192 R=8 W=2112 greedy", "prefill T=4096 R=8 W=2112 full"]
    keys = [key.bucket.tokens for key in keys_of(ladder, 131_072 - 4096 - 64, 8192, "greedy")]
    assert keys == [8192, 4096, 4096], "a short last chunk has a program of its own, as in an engine"


def test_any_chunks_give_the_end_of_the_whole(engine):
    """In float32: the same token as one step over the whole prompt, and what it left behind."""
    whole = run_and_look(engine, steps.chunk_loads(engine, 250, 256, "full"))
    for chunk in (64, 128, 192):
        parts = run_and_look(engine, steps.chunk_loads(engine, 250, chunk))
        found = compare(parts, whole, margin=0.0)
        assert found["first_mismatch"] is None and found["equal_tokens"] == 1, chunk
        assert found["relative_delta_state"] < 1e-4 and found["margin_at_difference"] == 0
    wrong = steps.chunk_loads(engine, 250, 64)
    jump = [*wrong[:2], *wrong[3:]]  # a chunk is missing
    assert compare(run_and_look(engine, jump), whole, margin=0.0)["relative_delta_state"] > 1e-2


def end(token: int, finite: bool = True, top=((7, -1.0), (9, -1.25))) -> End:
    ids, logprobs = (np.asarray([column]) for column in zip(*top, strict=True))
    own = np.asarray([top[0][1]])
    rows = ResultRows(np.asarray([token]), np.asarray([finite]), own, np.asarray([1]), ids, logprobs)
    return End(rows, np.ones(4, np.float32), ())


@pytest.mark.parametrize(
    ("mine", "margin", "what", "gap"),
    [
        (end(7), 0.0, None, 0.0),
        (end(9), 0.75, None, 0.25),
        (end(9), 0.2, "token after the prompt", 0.25),
        (end(9), 0.0, "token after the prompt", 0.25),
        (end(3), 0.75, "token after the prompt", 0.25),  # not listed: at least so much
        (end(7, finite=False), 0.75, "logits that are not finite", None),
    ],
)
def test_a_token_that_rounding_does_not_explain_is_a_mismatch(mine, margin, what, gap):
    found = compare(mine, end(7), margin)
    mismatch = found["first_mismatch"]
    assert (mismatch and mismatch["what"]) == what and found["margin_at_difference"] == gap


def test_times_are_from_end_to_end(engine, monkeypatch):
    """A clock that moves by a quarter of a second whenever a chunk is laid out."""
    clock = [0.0]
    monkeypatch.setattr(long_prompt.time, "perf_counter", lambda: clock[0])

    def slow(load):
        def fields():
            clock[0] += 0.25
            return load.fields()

        return dataclasses.replace(load, fields=fields)

    times = run_once(engine, [slow(load) for load in steps.chunk_loads(engine, 250, 64)])
    assert times.seconds == 1.0 and sum(times.chunk_ms) == pytest.approx(1000)
    # The first chunk's end is seen once the second has been sent, and so on; nothing is left for the last one here.
    assert times.chunk_ms == pytest.approx((500, 250, 250, 0))


def test_memory_is_flat_or_not():
    flat = memory_metrics([4 << 30, 5 << 30, 5 << 30, (5 << 30) + (50 << 20)])
    assert (flat["peak_before_gib"], flat["peak_first_chunk_gib"]) == (4, 5)
    assert flat["memory_growth"] == pytest.approx(50 / 5120) and flat["memory_flat"]
    assert not memory_metrics([4 << 30, 5 << 30, 6 << 30])["memory_flat"]
    assert memory_metrics([]) == {}


def test_chunks_that_have_no_smaller_ones_are_refused(engine, monkeypatch):
    """The same chunks twice would be equal to themselves."""
    assert [long_prompt.check_chunk(chunk) for chunk in (128, 192, 8192)] == [64, 64, 4096]
    limits = dataclasses.replace(engine.scheduler.config, max_num_batched_tokens=64)
    monkeypatch.setattr(engine.scheduler, "config", limits)
    with pytest.raises(UserInputError, match="max_num_batched_tokens must be at least 128"):
        long_prompt.measure(engine, MODEL, "tiny-4b", 256)


def test_a_prompt_of_one_chunk_is_none(engine):
    with pytest.raises(UserInputError, match="more than one chunk of 256"):
        long_prompt.measure(engine, MODEL, "tiny-4b", 256)


def test_a_profile_that_failed_is_said(engine, monkeypatch, caplog):
    """The times stay; that the parts are missing is no secret."""
    record = long_prompt.measure(engine, MODEL, "tiny-4b", 500, variant="full", repeats=1)
    assert record.cell == "long/tiny-4b/500@fp32@full@chunk256", "another sampler is another cell"
    monkeypatch.setattr(steps, "trace_step", mock.Mock(side_effect=RuntimeError("no files")))
    assert long_prompt.profiled(engine, record, 1, "full") == record
    assert f"{record.cell}: no parts of the last chunk: profiling failed: no files" in caplog.text


def test_the_script_files_a_record(engine, monkeypatch, tmp_path, capsys):
    """On the engine of the other tests, with memory and a trace as a GPU would give."""
    events = (DeviceEvent("nvjet", "jit(step)/layer_0/mlp/gate_up/dot_general", "jit_step", 0, 3000, "Stream #1"),)
    peaks = iter([1 << 30, 2 << 30, 2 << 30])
    kind = jax.devices()[0].device_kind
    device = mock.Mock(device_kind=kind, platform="cpu", memory_stats=lambda: {"peak_bytes_in_use": next(peaks, 0)})
    asked = []
    monkeypatch.setattr(engine.programs, "device", device)
    monkeypatch.setattr(engine.programs, "put", lambda arrays: jax.device_put(arrays))
    monkeypatch.setattr(profile_step, "make_engine", lambda *arguments: asked.append(arguments) or engine)
    monkeypatch.setattr(profile_step, "FLOOR_DEVICE", kind)

    def trace_step(engine, load, *, dispatches, directory):
        traced.append((load.start, dispatches, directory))
        return DeviceTrace(events * dispatches, clocks={"sm_clock_mhz": 1700.0})

    monkeypatch.setattr(steps, "trace_step", trace_step)
    results, traces, traced = tmp_path / "r.json", tmp_path / "traces", []
    argv = ["profile_step.py", "--preset=tiny-4b", "--decode_rows=", "--prefill=", "--long_prompt=500"]
    argv += ["--repeats=3", "--max_num_batched_tokens=256"]
    argv += ["--profiled_steps=2", f"--results={results}", f"--trace_dir={traces}"]
    traces.mkdir()
    assert profile_step.main(argv) == 0
    name = "long-tiny-4b-500-fp32-chunk256"
    assert traced == [(256, 2, str(traces / name))], "the last chunk"
    assert (traces / f"{name}.tsv").read_text().count("gate_up\tjit(step)") == 1, "of one step"
    assert asked[0][2] == [] and asked[0][5] == 500
    (record,) = read_records(results)
    assert record.cell == "long/tiny-4b/500@fp32@chunk256"
    metrics, checks = record.metrics, record.checks
    assert record.settings["chunks"] == [[0, 256], [256, 244]] and len(metrics["chunk_ms"]) == 2
    assert metrics["tok_s"] == pytest.approx(500 / metrics["seconds"])
    assert sum(metrics["chunk_ms"]) == pytest.approx(metrics["seconds"] * 1e3)
    tiny = ModelConfig.preset("tiny-4b")
    floor = sum(long_prompt.chunk_floors_s(tiny, [(0, 256), (256, 244)])) * 1e3
    assert metrics["floor_ms"] == pytest.approx(floor)
    assert (metrics["peak_before_gib"], metrics["peak_first_chunk_gib"], metrics["peak_end_gib"]) == (1, 2, 2)
    assert metrics["memory_flat"]
    assert metrics["last_chunk"]["parts"] == pytest.approx({"gate_up": 3e-3})
    assert metrics["last_chunk"]["step_ms"] == metrics["chunk_ms"][-1]
    assert metrics["clocks"] == {"profiled": {"sm_clock_mhz": 1700.0}} and record.settings["profiled_steps"] == 2
    assert checks["equal_tokens"] == 1 and checks["first_mismatch"] is None and checks["margin_allowed"] == 0
    assert checks["compiles_after_warmup"] == 0 and "chunks of 128 tokens" in checks["compared_with"]
    assert record.faults() == ("measured on a CPU",)
    out = capsys.readouterr().out
    assert "peak of memory: 1.00 GiB before, 2.00 after the first chunk" in out and "gate_up" in out


def test_a_wrong_end_is_an_exit_code(engine, monkeypatch):
    right = long_prompt.run_and_look
    calls = []

    def wrong(engine, loads):
        found = right(engine, loads)
        calls.append(loads)
        if len(calls) == 1:
            tokens = found.rows.tokens + 1
            found = dataclasses.replace(found, rows=dataclasses.replace(found.rows, tokens=tokens))
        return found

    monkeypatch.setattr(long_prompt, "run_and_look", wrong)
    monkeypatch.setattr(profile_step, "make_engine", lambda *_: engine)
    argv = ["profile_step.py", "--preset=tiny-4b", "--decode_rows=", "--prefill=", "--long_prompt=500"]
    argv += ["--repeats=1", "--max_num_batched_tokens=256"]
    assert profile_step.main([*argv, "--profiled_steps=0"]) == 1
