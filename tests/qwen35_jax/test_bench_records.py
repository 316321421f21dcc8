"""Records of results files: names of cells, what is refused, files that grow, commits, the newest record."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from pallas_kernels import bench as kernel_bench
from pallas_kernels import records as kernel_records
from pallas_kernels.ceilings import Ceilings
from pallas_kernels.provenance import COMMIT_VARIABLE
from pallas_kernels.spec import tiny_specs_of
from qwen35_jax.bench import records
from qwen35_jax.bench.records import (
    Cell,
    Record,
    append_records,
    make_record,
    newest,
    parse_cell,
    read_records,
    replace_record,
)
from qwen35_jax.errors import UserInputError


def record(cell="decode/4b/rows8", **fields) -> Record:
    values = {
        "metrics": {"step_ms": 1.5},
        "device": "NVIDIA H200",
        "device_count": 1,
        "commit": "c" * 40,
        "jax": "0.11.2",
        "command": "python x.py",
        "date": "2026-01-02T03:04:05+00:00",
        "settings": {},
        "checks": {"first_mismatch": None},
    }
    return Record(cell=cell, **{**values, **fields})


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("offline/4b/1024x128", Cell("offline", "4b", None, "1024x128", (1024, 128))),
        ("offline/0.8b/lognormal@dp2", Cell("offline", "0.8b", None, "lognormal", None, ("dp2",))),
        ("prefill/4b/8192", Cell("prefill", "4b", 8192.0)),
        ("long/4b/131072@chunk4096", Cell("long", "4b", 131072.0, suffixes=("chunk4096",))),
        ("decode/9b/rows64@bf16state@tp2", Cell("decode", "9b", 64.0, suffixes=("bf16state", "tp2"))),
        ("closed/4b/c8/1024x256", Cell("closed", "4b", 8.0, "1024x256", (1024, 256))),
        ("open/4b/qps0.5/lognormal", Cell("open", "4b", 0.5, "lognormal")),
        ("kernel/gdn_decode/4b-rows64", Cell("kernel", "gdn_decode", None, "4b-rows64")),
        ("kernel/gdn_prefill/4b-8x1024", Cell("kernel", "gdn_prefill", None, "4b-8x1024")),
        ("drift/gdn_decode/4b-rows64-none", Cell("drift", "gdn_decode", None, "4b-rows64-none")),
        ("product/4b/square-8192@zeros", Cell("product", "4b", None, "square-8192", suffixes=("zeros",))),
        ("start/tiny-4b", Cell("start", "tiny-4b")),
    ],
)
def test_cells_are_taken_apart(name, cell):
    assert parse_cell(name) == cell


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("speed/4b", "unknown kind 'speed'"),
        ("start", "0 parts after the kind, expected 1 (start/<size>)"),
        ("prefill/4b/8192/again", "3 parts after the kind, expected 2"),
        ("decode/4b/64", "load '64' is not rows<N>"),
        ("decode/4b/rows0", "load 'rows0' is not rows<N>"),
        ("closed/4b/8/1024x256", "load '8' is not c<N>"),
        ("open/4b/qps0/1024x128", "a rate of 0"),
        ("offline/4b/1024x0", "workload '1024x0' is not <in>x<out>"),
        ("offline//1024x128", "size '' is not the size"),
        ("kernel/GDN/4b", "op 'GDN' is not the op"),
        ("start/4b@", "suffix '' is not a lower-case name"),
        ("start/4b@tp2@tp2", "a suffix is there twice"),
    ],
)
def test_a_wrong_cell_is_named(name, words):
    with pytest.raises(ValueError) as caught:
        parse_cell(name)
    assert words in str(caught.value) and repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metrics": {"step_ms": float("nan")}}, "metrics.step_ms is nan"),
        ({"metrics": {}}, "no metrics"),
        ({"settings": {"parts": [1, {"a": {1, 2}}]}}, "settings.parts[1].a is a set"),
        ({"checks": None}, "checks must be an object"),
        ({"device_count": 0}, "device_count must be a positive integer"),
        ({"commit": ""}, "commit must be a text"),
        ({"date": "yesterday"}, "date 'yesterday' is not ISO 8601"),
        ({"date": "2026-01-02T03:04:05"}, "has no offset"),
        ({"cell": "decode/4b/8"}, "is not rows<N>"),
    ],
)
def test_a_wrong_record_is_named(fields, words):
    with pytest.raises(ValueError) as caught:
        record(**fields)
    assert words in str(caught.value)


@pytest.fixture
def fresh_commit():
    """This process has not looked for its commit yet, and will not have afterwards."""
    records.own_commit.cache_clear()
    yield
    records.own_commit.cache_clear()


def test_make_record_says_where_and_how(monkeypatch, fresh_commit):
    monkeypatch.setenv(COMMIT_VARIABLE, "abc+dirty")
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/qwen35-bench", "throughput", "--results=a b.json"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    made = make_record(
        "start/4b", {"cold_s": np.float32(1.5)}, settings={"sizes": (1, np.int64(2))}, checks={"skipped": 0}
    )
    assert made.metrics == {"cold_s": 1.5} and made.settings == {"sizes": [1, 2]}
    assert made.command == "qwen35-bench throughput '--results=a b.json'"
    assert made.commit == "abc+dirty" and made.dirty
    assert record(commit="unknown").dirty and not record(commit="abc").dirty
    assert (made.device, made.device_count) == ("cpu", 1) and made.faults() == ("measured on a CPU",)
    assert made.when.tzinfo is not None
    json.dumps(made.to_dict(), allow_nan=False)


def test_what_is_committed_during_a_run_is_not_what_it_measured(monkeypatch, fresh_commit):
    monkeypatch.setenv(COMMIT_VARIABLE, "before")
    records.own_commit()  # as commands do before an engine is made
    monkeypatch.setenv(COMMIT_VARIABLE, "after")
    assert make_record("start/4b", {"cold_s": 1.0}, settings={}, checks={}).commit == "before"


def test_a_file_that_cannot_be_extended_is_refused_beforehand(tmp_path):
    records.check_results(tmp_path / "new" / "deep" / "r.json")
    assert not (tmp_path / "new").exists(), "nothing is made"
    file = tmp_path / "r.json"
    append_records(file, [record()])
    records.check_results(file)
    for path, why in ((tmp_path, "is a directory, it must be a file"), (file / "x.json", "r.json is no directory")):
        with pytest.raises(UserInputError, match=why):
            records.check_results(path)
    file.write_text("{")
    with pytest.raises(UserInputError, match="not JSON"):
        records.check_results(file)


def test_the_command_of_a_script_or_module_names_no_machine(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(records._CHECKOUT / "scripts" / "profile_step.py"), "--rows=8"])
    assert records.own_command() == "python scripts/profile_step.py --rows=8"
    monkeypatch.setattr(main, "__spec__", type("Spec", (), {"name": "pallas_kernels.bench"}))
    assert records.own_command() == "python -m pallas_kernels.bench --rows=8"


def test_files_grow_and_come_back(tmp_path):
    path = tmp_path / "results" / "2026-01-02-first.json"
    append_records(path, [record()])
    append_records(path, [record("start/4b", metrics={"cold_s": 9.0, "programs": None})])
    got = read_records(path)
    assert got == [record(), record("start/4b", metrics={"cold_s": 9.0, "programs": None})]
    assert {item.source for item in got} == {path.name}
    append_records(tmp_path / "results" / "2026-01-01-other.json", [record("start/9b")])
    assert [item.cell for item in read_records(path.parent)] == ["start/9b", "decode/4b/rows8", "start/4b"]
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "2026-01-01-other.json",
        "2026-01-02-first.json",
    ], "temporary files are left behind"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("{}", "a results file is a list"),
        ("[1]", "record 0: a record must be an object"),
        ('[{"cell": "start/4b"}]', "record 0: start/4b: metrics is missing"),
        (json.dumps([record().to_dict() | {"speed": 1}]), "unknown field 'speed'"),
        (json.dumps([record().to_dict(), record().to_dict() | {"cell": "decode/4b/8"}]), "record 1: cell"),
    ],
)
def test_a_wrong_file_is_named_and_left_alone(tmp_path, text, words):
    path = tmp_path / "results.json"
    path.write_text(text)
    for call in (lambda: read_records(path), lambda: append_records(path, [record()])):
        with pytest.raises(UserInputError) as caught:
            call()
        assert str(path) in str(caught.value) and words in str(caught.value)
    assert path.read_text() == text


def test_a_record_takes_the_place_of_another(tmp_path):
    path = tmp_path / "results.json"
    first, second = record("start/4b"), record("start/9b")
    fuller = dataclasses.replace(first, metrics={**first.metrics, "more": 1.5})
    append_records(path, [first, second])
    replace_record(path, first, fuller)
    assert read_records(path) == [fuller, second]
    replace_record(path, first, fuller)  # somebody took it out of the file
    assert read_records(path) == [fuller, second, fuller]
    replace_record(tmp_path / "new.json", first, fuller)
    assert read_records(tmp_path / "new.json") == [fuller]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserInputError, match="nothing.json: cannot read results"):
        read_records(tmp_path / "nothing.json")


def test_the_newest_record_counts_whatever_the_offset():
    early = record(date="2026-01-02T03:00:00+00:00")
    late = record(date="2026-01-02T01:00:00-04:00", metrics={"step_ms": 1.0})
    other = record("decode/4b/rows1")
    assert newest([late, early, other]) == {"decode/4b/rows1": other, "decode/4b/rows8": late}
    same = dataclasses.replace(late, metrics={"step_ms": 0.5})
    assert newest([late, same])["decode/4b/rows8"].metrics["step_ms"] == 0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"checks": {"first_mismatch": [3, 1]}}, "first mismatch [3, 1]"),
        ({"checks": {"first_mismatch": None, "failed": 2}}, "failed = 2"),
        ({"checks": {"compiles_after_warmup": 1}}, "compiles_after_warmup = 1"),
        ({"device": "cpu"}, "measured on a CPU"),
    ],
)
def test_figures_that_do_not_count_say_why(fields, words):
    assert words in " ".join(record(**fields).faults())
    assert record().faults() == ()


def test_records_of_the_kernel_harness_have_the_same_schema(tmp_path):
    spec = next(iter(tiny_specs_of("kv_write").values()))
    checks = {"rows_compared": 3, "max_abs_delta": 0.0, "first_mismatch": None, "skipped": 0}
    measurement = kernel_bench.Measurement(spec, "reference", 10.0, 0.1, checks)
    made = kernel_bench.record(measurement, Ceilings(1e12, None, 1e12), {"calls": 8}, "a command", "abc")
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps([made]))
    (got,) = read_records(path)
    assert got.to_dict() == made and parse_cell(got.cell).subject == "kv_write"
    assert list(made) == list(kernel_records.FIELDS) == list(got.to_dict()), "one schema"
    kernel_records.ResultsFile(str(path)).keep([made | {"cell": f"{made['cell']}@fp32@mosaic_sm90"}])
    first, second = read_records(path)
    assert first == got and parse_cell(second.cell).suffixes == ("fp32", "mosaic_sm90")
