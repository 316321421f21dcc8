"""A checkout made of its reports alone, for tests of the tables and pictures: documents, peers, records."""

from __future__ import annotations

import pathlib
import re
import shutil

from qwen35_jax.bench.records import Record, append_records
from scripts import bench_report

ROOT = pathlib.Path(__file__).parent.parent
NAMES = sorted(bench_report.DOCUMENTS["benchmarks/README.md"])


def empty_checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkout without records: documents with empty sections and the real figures of the peers."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks/peers.json", tmp_path / "benchmarks")
    (tmp_path / "README.md").write_text("# Front\n\n<!-- bench:begin summary -->\n<!-- bench:end -->\n\nafter\n")
    blocks = "\n".join(f"## {name}\n<!-- bench:begin {name} -->\nold words\n<!-- bench:end -->\n" for name in NAMES)
    (tmp_path / "benchmarks/README.md").write_text("# Benchmarks\n\n" + blocks)
    return tmp_path


def add(root: pathlib.Path, cell: str, metrics: dict, file: str = "2026-01-02-first.json", **fields) -> None:
    values = {
        "device": "NVIDIA H200",
        "device_count": 1,
        "commit": "0123456789abcdef",
        "jax": "0.11.2",
        "command": "a command",
        "date": "2026-01-02T03:04:05+00:00",
        "settings": {},
        "checks": {"first_mismatch": None},
    }
    append_records(root / "benchmarks/results" / file, [Record(cell=cell, metrics=metrics, **{**values, **fields})])


def make(root: pathlib.Path, *, draw: bool = False) -> str:
    bench_report.report(root, check=False, draw=draw)
    return (root / "benchmarks/README.md").read_text()


def row(text: str, start: str) -> list[str]:
    """Columns of the first table line that begins so."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [column.strip() for column in line.strip("|").split(" | ")]


def section(text: str, name: str) -> str:
    return re.search(rf"bench:begin {name} -->(.*?)<!-- bench:end", text, re.DOTALL)[1]
