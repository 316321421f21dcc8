"""scripts/bench_products.py: cells, checks and records."""

from __future__ import annotations

import pytest

from qwen35_jax.bench import products
from qwen35_jax.bench.clocks import Clocks
from qwen35_jax.bench.products import Rate
from qwen35_jax.bench.records import parse_cell, read_records
from qwen35_jax.config import ModelConfig
from scripts import bench_products
from scripts.bench_products import Cell, cells_of, main

QUICK = ("--pause=0", "--settle=0", "--samples=1", "--tokens=16")


@pytest.fixture
def rates(monkeypatch):
    """Nothing is timed: every program has the same rates."""
    rate = Rate(
        8e14, 6.9e14, 0.01, {"sm_clock_mhz": 1500.0, "power_w": 691.6, "power_capped_share": 1.0, "readings": 9}
    )
    monkeypatch.setattr(products, "measure", lambda *_: rate)


def test_cells_have_the_compilers_beside_ours_and_names_that_records_take():
    config = ModelConfig.preset("4b")
    names = [cell.full_name("4b", 8192) for cell in cells_of(products.names_of(config))]
    assert names == [
        "product/4b/in_proj-8192",
        "product/4b/qkv_proj-8192",
        "product/4b/out_proj-8192",
        "product/4b/gate_up-8192",
        "product/4b/gate_up-8192@reference",
        "product/4b/down-8192",
        "product/4b/chain-8192",
        "product/4b/chain-8192@reference",
        "product/4b/square-8192",
        "product/4b/square-8192@zeros",
    ]
    assert {parse_cell(name).kind for name in names} == {"product"}


def test_a_run_files_every_cell_with_its_check(tmp_path, rates, capsys):
    path = tmp_path / "r.json"
    asked = "--products=gate_up,square,chain"
    assert main(["bench_products.py", "--preset=tiny-4b", asked, f"--results={path}", *QUICK]) == 0
    found = {record.cell: record for record in read_records(path)}
    assert list(found) == [cell.full_name("tiny-4b", 16) for cell in cells_of(("gate_up", "chain", "square"))]
    record = found["product/tiny-4b/chain-16"]
    assert record.metrics["tflop_s"] == pytest.approx(690) and record.metrics["clocks"]["power_w"] == 691.6
    assert record.checks == {"relative_difference": 0.0, "first_mismatch": None}, "a CPU has the reference alone"
    assert record.settings["tokens"] == 16 and record.settings["kernels"] == "auto" and record.settings["samples"] == 1
    assert found["product/tiny-4b/chain-16@reference"].checks == {}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu, 16 tokens"
    assert lines[2].split() == ["product/tiny-4b/gate_up-16", "690.0", "800.0", "1.0%", "1500", "692", "100%"]


def test_a_kernel_that_is_wrong_makes_its_record_invalid(tmp_path, rates, monkeypatch):
    monkeypatch.setattr(products, "difference", lambda *_: 0.02)
    path = tmp_path / "r.json"
    command = ["bench_products.py", "--preset=tiny-4b", "--products=gate_up,chain", f"--results={path}", *QUICK]
    assert main(command) == 1
    wrong = {record.cell: record.checks.get("first_mismatch") for record in read_records(path)}
    assert wrong["product/tiny-4b/gate_up-16"] == "0.02 from the reference, allowed 0.01"
    assert wrong["product/tiny-4b/chain-16"] is None, "a chain of layers may be so far"


def test_an_output_that_is_no_number_is_wrong(tmp_path, rates, monkeypatch):
    monkeypatch.setattr(products, "difference", lambda *_: float("nan"))
    path = tmp_path / "r.json"
    assert main(["bench_products.py", "--preset=tiny-4b", "--products=gate_up", f"--results={path}", *QUICK]) == 1
    checks = read_records(path)[0].checks
    assert checks == {"relative_difference": None, "first_mismatch": "nan from the reference, allowed 0.01"}


def test_a_device_that_does_not_tell_its_clock(rates):
    with Clocks(None) as clocks:
        pass
    shown = bench_products.table([("a", Rate(1e12, 2e12, 0.5, clocks.figures))])
    assert shown.splitlines()[1].split() == ["a", "2.0", "1.0", "50.0%", "-", "-", "-"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--preset=5b",), "no model '5b'"),
        (("--products=middle",), "'middle' is none of in_proj"),
        (("--tokens=0",), "--tokens must be a number of at least 1, got 0"),
        (("--samples=0",), "--samples must be a number of at least 1, got 0"),
        (("--pause=-1",), "--pause must be a number of at least 0, got -1"),
        (("--pause=inf",), "--pause must be a number of at least 0, got inf"),
        (("--settle=inf",), "--settle must be a number of at least 0, got inf"),
        (("--settle=nan",), "--settle must be a number of at least 0, got nan"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags, said, capsys):
    assert main(["bench_products.py", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_results_file_that_cannot_be_extended_is_refused_first(tmp_path, capsys):
    (tmp_path / "r.json").write_text("{}")
    assert main(["bench_products.py", f"--results={tmp_path / 'r.json'}"]) == 2
    assert "r.json" in capsys.readouterr().err


def test_kernels_reach_the_programs():
    config, cell = ModelConfig.preset("tiny-4b"), Cell("gate_up", kernels="nothing")
    with pytest.raises(Exception, match="nothing"):
        bench_products.make(cell, config, 16).run()
