"""The timing harness runs here on tiny specs and writes records of the right form."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math

import jax
import pytest

from pallas_kernels import bench, records
from pallas_kernels.ceilings import Ceilings
from pallas_kernels.spec import specs_of, tiny_specs_of

QUICK = ["--calls=2", "--dispatches=1", "--samples=2", "--copy-bytes=1048576"]


def test_calls_take_layers_in_turns_that_no_cache_holds():
    small, large = (specs_of("gdn_decode")[f"4b-rows{rows}"] for rows in (16, 256))
    cold = bench.with_cold_layers(small, 8)
    assert cold.num_layers == 7 and bench.with_cold_layers(small, 3).num_layers == 3, "layers of 41 MB"
    assert bench.with_cold_layers(large, 8).num_layers == 1, "larger than any cache"
    assert cold.compulsory_bytes() == small.compulsory_bytes(), "of a call"
    spec = dataclasses.replace(tiny_specs_of("gdn_decode")["tiny1-rows5"], num_layers=3)
    arguments, _ = bench._device_case(spec, 0)
    layers = [int(one["layer"]) for one in bench.separate_inputs(arguments, 4, spec.num_layers)]
    assert layers == [2, 1, 0, 2]
    without_pools = tiny_specs_of("add_rms_norm")["tiny1-rows5"]
    assert bench.with_cold_layers(without_pools, 8) == without_pools


def test_a_run_that_is_cut_keeps_what_it_has(tmp_path, monkeypatch):
    output, measured, good = tmp_path / "kernels.json", [], bench.measure

    def measure(ready, **how):
        if measured:
            raise KeyboardInterrupt
        measured.append(ready.spec.name)
        return good(ready, **how)

    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--tiny", "--op=kv_write", *QUICK, f"--output={output}"])
    assert [record["cell"] for record in json.loads(output.read_text())] == [f"kernel/kv_write/{measured[0]}"]


def test_records_are_appended_to_those_of_other_runs(tmp_path, capsys):
    output = tmp_path / "deep" / "kernels.json"
    for spec in ("tiny1-ragged", "tiny2-ragged"):
        arguments = ["--tiny", "--op=causal_conv", f"--spec={spec}", *QUICK, f"--output={output}"]
        assert bench.main(arguments) == 0
    cells = [record["cell"] for record in json.loads(output.read_text())]
    assert cells == ["kernel/causal_conv/tiny1-ragged", "kernel/causal_conv/tiny2-ragged"]
    settings = '[{"implementation": "triton", "device": "NVIDIA H200"}]'  # a list of something else
    for text, why in (("{", "is no JSON"), ("{}", "is no list of records"), (settings, "is no list of records")):
        output.write_text(text)
        with pytest.raises(SystemExit):  # before anything is measured
            bench.main(arguments)
        assert f"{output} {why}" in capsys.readouterr().err and output.read_text() == text
    for path, why in ((tmp_path, "is a directory"), (output / "x.json", "kernels.json is no directory")):
        with pytest.raises(SystemExit):
            bench.main([*arguments[:-1], f"--output={path}"])
        assert why in capsys.readouterr().err


def test_what_other_runs_add_meanwhile_stays(tmp_path, monkeypatch):
    output, good = str(tmp_path / "kernels.json"), bench.measure
    other = records.result("kernel/x/y", {"us": 1.0}, {}, {}, "another command", "abc")

    def measure(ready, **how):
        records.write_json(output, [*records.records_in(output), other])
        return good(ready, **how)

    monkeypatch.setattr(bench, "measure", measure)
    assert bench.main(["--tiny", "--op=kv_write", "--spec=tiny1-*", *QUICK, f"--output={output}"]) == 0
    cells = [record["cell"] for record in records.records_in(output)]
    own = ["kernel/kv_write/tiny1-ragged", "kernel/kv_write/tiny1-ragged@keys"]
    assert sorted(cells) == sorted([*own, other["cell"], other["cell"]])


def test_a_record_is_of_when_it_was_measured(tmp_path, monkeypatch):
    """Neither later writes nor commits that are made meanwhile change it."""
    output, commits, seen = tmp_path / "kernels.json", iter(["first", "second"]), []
    write = records.write_json

    def spy(path, value):
        seen.append([record["date"] for record in value])
        write(path, value)

    class Clock(datetime.datetime):
        hour = 0

        @classmethod
        def now(cls, tz=None):
            cls.hour += 1
            return datetime.datetime(2026, 1, 2, cls.hour, tzinfo=tz)

    monkeypatch.setattr(bench, "current_commit", lambda: next(commits))
    monkeypatch.setattr(records, "write_json", spy)
    monkeypatch.setattr(records.datetime, "datetime", Clock)
    flags = ["--tiny", "--op=kv_write", "--spec=tiny1-*", *QUICK, f"--output={output}"]
    assert bench.main(flags, peer=lambda spec: bench.Peer("another", 1.0)) == 0
    first, second = "2026-01-02T01:00:00+00:00", "2026-01-02T02:00:00+00:00"
    assert seen == [[first], [first, second], [first, second], [first, second]], "of two times and two peers"
    assert {record["commit"] for record in json.loads(output.read_text())} == {"first"}


def test_a_figure_that_is_not_finite_does_not_spoil_the_file(tmp_path, monkeypatch):
    """What a wrong kernel gives must not cost the records beside it: JSON has no NaN."""
    output, good = tmp_path / "kernels.json", bench.compare
    wrong = {"max_abs_delta": math.nan, "errors": {"output": math.inf}, "first_mismatch": ["output", 0]}
    monkeypatch.setattr(bench, "compare", lambda ready: good(ready) | wrong)
    assert bench.main(["--tiny", "--op=kv_write", "--spec=tiny1-ragged", *QUICK, f"--output={output}"]) == 1
    (record,) = json.loads(output.read_text(), parse_constant=pytest.fail)
    assert record["checks"]["max_abs_delta"] == "nan" and record["checks"]["errors"] == {"output": "inf"}
    assert record["checks"]["first_mismatch"] == ["output", 0]
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.write_json(str(output), [math.nan])


@pytest.mark.parametrize(
    ("flags", "cell"),
    [
        (["--dtype=bfloat16"], "kernel/causal_conv/tiny1-ragged"),  # what it is anyway
        (["--dtype=float32"], "kernel/causal_conv/tiny1-ragged@fp32"),
        (["--dtype=float32", "--implementation=reference"], "kernel/causal_conv/tiny1-ragged@fp32@reference"),
    ],
)
def test_what_was_asked_for_otherwise_is_another_cell(tmp_path, flags, cell):
    output = tmp_path / "kernels.json"
    assert bench.main(["--tiny", "--op=causal_conv", "--spec=tiny1-*", *flags, *QUICK, f"--output={output}"]) == 0
    (record,) = json.loads(output.read_text())
    assert record["cell"] == cell


def test_a_run_that_measures_nothing_fails(capsys):
    """Hopper's kernel takes no float32, there as anywhere: every spec is declined."""
    asked = ["--op=paged_prefill_attention", "--spec=tiny1-*", "--dtype=float32", "--implementation=mosaic_sm90"]
    assert bench.main(["--tiny", *asked, *QUICK]) == 1
    said = capsys.readouterr().err
    assert "paged_prefill_attention/tiny1-ragged: not measured" in said and "error: nothing was measured" in said


def test_a_peer_that_fails_costs_no_time_of_ours_and_no_other_peer(tmp_path, capsys):
    output = tmp_path / "kernels.json"

    def peer(spec):
        if spec.name == "tiny1-ragged":
            raise RuntimeError(f"no peer for {spec.name}")
        times = [record["metrics"]["us"] for record in json.loads(output.read_text())]
        assert len(times) == 2, "ours come first"
        return bench.Peer("another", 12.5)

    flags = ["--tiny", "--op=kv_write", "--spec=tiny1-*", *QUICK, f"--output={output}"]
    assert bench.main(flags, peer=peer) == 1
    first, second = json.loads(output.read_text())
    assert first["metrics"]["us"] > 0 and "peer_us" not in first["metrics"]
    assert second["metrics"]["peer_us"] == 12.5 and second["settings"]["peer"] == "another"
    told = capsys.readouterr()
    assert "the peer failed: RuntimeError: no peer for tiny1-ragged" in told.err and "another 12.5 us" in told.out


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_write_that_is_cut_leaves_the_file_as_it_was(tmp_path, monkeypatch, step):
    output = tmp_path / "kernels.json"
    records.write_json(str(output), [{"cell": "a"}])

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records.os, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            records.write_json(str(output), [{"cell": "a"}, {"cell": "b"}])
    assert json.loads(output.read_text()) == [{"cell": "a"}] and list(tmp_path.iterdir()) == [output]
    with pytest.raises(TypeError):
        records.write_json(str(output), [{"cell": object()}])
    assert json.loads(output.read_text()) == [{"cell": "a"}] and list(tmp_path.iterdir()) == [output]


def test_a_record(tmp_path, capsys):
    output = tmp_path / "kernels.json"
    arguments = [
        "--tiny",
        "--op=causal_conv",
        "--spec=tiny1-*",
        "--implementation=reference",
        *QUICK,
        f"--output={output}",
    ]
    assert bench.main(arguments) == 0
    (record,) = json.loads(output.read_text())
    assert record["cell"] == "kernel/causal_conv/tiny1-ragged@reference"
    assert record["device"] == jax.devices()[0].device_kind and record["device_count"] == 1
    assert record["jax"] == jax.__version__
    assert record["settings"]["implementation"] == "reference" and record["settings"]["calls"] == 2
    assert record["command"].endswith(f"--output={output}")
    metrics, checks = record["metrics"], record["checks"]
    assert metrics["us"] > 0
    moved = tiny_specs_of("causal_conv")["tiny1-ragged"].compulsory_bytes()
    assert math.isclose(metrics["tb_s"], moved / metrics["us"] / 1e6)
    assert metrics["share_of_ceiling"] > 0
    assert checks["rows_compared"] == 75 and checks["first_mismatch"] is None and checks["skipped"] == 0
    assert 0 < checks["max_relative_error"] < 2**-6  # bfloat16 against float32
    printed = capsys.readouterr().out
    assert "causal_conv" in printed and "tiny1-ragged" in printed and "reference" in printed


@pytest.mark.parametrize("op", ["paged_decode_attention", "gdn_decode"])
def test_calls_are_not_merged(op):
    """Attention updates no pool, the decode step reads its inputs anew: each call must still be in the program."""
    spec = tiny_specs_of(op)["tiny1-rows5"]
    arguments, options = bench._device_case(spec, 0)
    pools = tuple(arguments.pop(name) for name in spec.pools)
    products = []
    for calls in (1, 3):
        program = jax.jit(bench.chained(spec, "reference", options), donate_argnums=0)
        compiled = program.lower(pools, bench.separate_inputs(arguments, calls)).compile()
        products.append(compiled.as_text().count(" dot("))
    assert products[1] == 3 * products[0] > 0


def test_a_wrong_output_fails_the_run(monkeypatch, tmp_path):
    good = bench.compare

    def spoiled(ready):
        return good(ready) | {"first_mismatch": [3, 0]}

    monkeypatch.setattr(bench, "compare", spoiled)
    assert bench.main(["--tiny", "--op=kv_write", "--spec=tiny1-*", *QUICK]) == 1


def test_real_shapes_are_refused_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda _: pytest.fail("already under way"))
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit) as caught:
        bench.main(["--spec=4b-*"])
    assert caught.value.code == 2
    assert "needs a GPU, the backend is cpu (--tiny tries the command anywhere)" in capsys.readouterr().err


def test_no_spec_matches(capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["--spec=13b-*"])
    assert caught.value.code == 2
    assert "no spec matches --op=* --spec=13b-*" in capsys.readouterr().err


def test_a_pool_is_compared_as_well(monkeypatch):
    """An implementation with the right output and a wrong state is wrong."""
    spec = tiny_specs_of("gdn_decode")["tiny1-rows5"]
    arguments, _ = bench._device_case(spec, 0)
    ready = bench.prepare(spec, "reference", calls=1, rounds=1)()
    assert bench.compare(ready)["first_mismatch"] is None

    def spoiled(arguments):
        out, (conv, state) = ready.once(arguments)
        return out, (conv, state.at[0, arguments["slot_ids"][2], 1, 3, 5].add(0.5))

    found = bench.compare(dataclasses.replace(ready, once=spoiled))
    slot = int(arguments["slot_ids"][2])
    assert found["first_mismatch"] == ["state_pool", 0, slot, 1, 3, 5]
    assert found["errors"]["state_pool"] > found["bars"]["state_pool"]


@pytest.mark.parametrize("op", ["paged_decode_attention", "gdn_decode"])
def test_rounds_repeat_the_calls(op):
    """A loop of rounds does what as many programs in a row do."""
    spec = tiny_specs_of(op)["tiny1-rows5"]
    arguments, options = bench._device_case(spec, 0)
    pools = tuple(arguments.pop(name) for name in spec.pools)
    inputs = bench.separate_inputs(arguments, 2)
    out, after = jax.jit(bench.chained(spec, "reference", options, rounds=3))(pools, inputs)
    want, want_after = jax.jit(bench.chained(spec, "reference", options, rounds=1))(pools, inputs * 3)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), (out, after), (want, want_after)))


def test_rounds_fill_a_program():
    ceilings = Ceilings(4.26e12, 780e12, 0.0)
    specs = {name: spec for op in ("gdn_decode", "paged_prefill_attention") for name, spec in specs_of(op).items()}
    assert bench.rounds_for(specs["4b-1x16384"], 8, ceilings) == 1  # milliseconds a call
    assert 1 < bench.rounds_for(specs["4b-rows256"], 8, ceilings) < bench.rounds_for(specs["4b-rows16"], 8, ceilings)
    assert bench.rounds_for(specs["4b-rows1"], 8, ceilings) == 64


def test_the_null_slot_does_not_count():
    """Contents of the null slot are unspecified: the reference moves its tail on, kernels need not."""
    spec = tiny_specs_of("gdn_decode")["tiny1-rows5"]
    ready = bench.prepare(spec, "reference", calls=1, rounds=1)()
    assert not ready.arguments["slot_ids"].all(), "no padding row"

    def other(arguments):
        out, (conv, state) = ready.reference(arguments)
        return out, (conv.at[:, 0].set(7), state)

    assert bench.compare(dataclasses.replace(ready, once=other))["first_mismatch"] is None
