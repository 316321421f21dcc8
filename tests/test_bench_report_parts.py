"""Tables of the parts of steps: their floors, the rows that add up, the profile they are of."""

import pathlib

import pytest

from qwen35_jax.bench import floors, part_tables
from qwen35_jax.bench.known import load_known
from qwen35_jax.config import ModelConfig
from scripts import bench_report
from tests.report_kit import ROOT, add, empty_checkout, make, row, section


@pytest.fixture
def root(tmp_path) -> pathlib.Path:
    return empty_checkout(tmp_path)


PROFILED = {
    "step_ms": 8.0,
    "busy_ms": 7.0,
    "idle_ms": 1.0,
    "parts": {
        "in_proj": 1.5,
        "gemm": 1.0,
        "gdn_decode": 2.0,
        "paged_decode_attention": 1.0,
        "kv_write": 0.04,
        "add_rms_norm": 0.5,
        "swiglu": 0.26,
        "sampling": 0.3,
        "admit": 0.2,
        "copy_h2d": 0.15,
        "embed": 0.05,
    },
    "launches": {"gdn_layer": 10.02, "attention_layer": 12.5, "other": 17.1},
}


def test_the_parts_of_decode_steps_stand_beside_their_floors(root):
    add(root, "decode/4b/rows64", PROFILED, settings={"context": 1088})
    one = PROFILED | {"parts": {"down": 6.0, "gdn_decode": 1.2}, "launches": None}
    add(root, "decode/4b/rows1", one, "b.json", settings={"context": 1088}, date="2026-01-03T00:00:00+00:00")
    add(root, "decode/0.8b/rows8@bf16state", PROFILED)
    text = section(make(root), "decode_parts")
    small, text = text.split("**4B**")
    assert small.count("**0.8B**") == 1 and row(small, "ms")[1:] == ["8 rows @bf16state"]
    assert "1 row: `012345678`, [b.json](results/b.json); 64 rows: `012345678`, [2026-01-02-first.json]" in text
    assert row(text, "ms") == ["ms", "1 row", "64 rows"]
    assert row(text, "**GEMMs**")[1:] == ["6.00", "2.50"]
    assert row(text, "&nbsp;&nbsp;`in_proj`")[1:] == ["–", "1.50"]
    assert row(text, "&nbsp;&nbsp;without a name")[1:] == ["–", "1.00"]
    assert row(text, "**`gdn_decode`**")[1:] == ["1.20", "2.00"]
    assert row(text, "**`kv_write`**")[1:] == ["–", "0.040"]
    assert row(text, "**sampling**")[1:] == ["–", "0.50"] and row(text, "**glue, copies**")[1:] == ["–", "0.20"]
    assert row(text, "**idle**")[1:] == ["1.00", "1.00"] and row(text, "**step**")[1:] == ["8.00", "8.00"]
    lines = text.splitlines()
    floors = {lines[at - 1].split(" | ")[0][2:]: line for at, line in enumerate(lines) if "nbsp;floor |" in line}
    assert list(floors) == ["**GEMMs**", "**`gdn_decode`**", "**`paged_decode_attention`**", "**step**"]
    assert [line.split(" | ")[2].strip(" |") for line in floors.values()] == ["1.97", "1.51", "0.54", "4.02"]
    shares = [line.split(" | ")[2].strip(" |") for line in lines if "nbsp;floor / ours" in line]
    assert shares == ["79%", "76%", "54%", "50%"]
    # One row's parts are 7.2 ms in the 7 ms in which a kernel ran.
    assert row(text, "counted twice")[1:] == ["-0.20", "0.00"]
    assert "Launches: a GDN layer – / 10, an attention layer – / 12.5, outside of layers – / 17.1." in text


def test_the_parts_of_a_prefill_stand_beside_their_floors(root):
    metrics = {"tok_s": 81920.0, "step_ms": 100.0, "busy_ms": 97.0, "idle_ms": 3.0, "parts": {"gemm": 80.0}}
    metrics["parts"] |= {"gdn_prefill": 10.0, "causal_conv": 2.0, "gated_norm": 1.6, "swiglu": 3.4}
    add(root, "prefill/4b/8192", metrics, settings={"lengths": [1024] * 8})
    add(root, "prefill/4b/8192@ragged", metrics, device="NVIDIA A100", settings={"lengths": [8000, 192]})
    text = section(make(root), "prefill_parts")
    assert row(text, "ms")[1:] == ["8,192 tokens", "8,192 tokens @ragged"]
    floors = [line.split(" | ")[1:] for line in text.splitlines() if "nbsp;floor |" in line]
    assert floors == [[ms, "– |"] for ms in ("72.8", "1.23", "1.51", "1.13", "3.30", "72.8")], "none of another device"
    shares = [line.split(" | ")[1] for line in text.splitlines() if "nbsp;floor / ours" in line]
    assert shares == ["91%", "12%", "76%", "71%", "97%", "73%"]


def test_an_activation_inside_of_a_product_has_no_floor(root):
    """What the part has left are the last tokens' activations: a floor of all tokens would be a share of thousands."""
    metrics = {"tok_s": 81920.0, "step_ms": 100.0, "busy_ms": 97.0, "idle_ms": 3.0}
    for tokens, ms in ((1024, 0.49), (8192, 0.005)):
        parts = {"parts": {"gate_up": 35.0, "swiglu": ms}}
        add(root, f"prefill/4b/{tokens}", metrics | parts, settings={"lengths": [1024] * (tokens // 1024)})
    text = section(make(root), "prefill_parts")
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if "**`swiglu`**" in line)
    assert [line.split(" | ")[1:] for line in lines[at : at + 3]] == [
        ["0.49", "0.005 |"],
        ["0.41", "– |"],
        ["84%", "– |"],
    ]


def test_prefill_steps_stand_in_order_of_their_tokens(root):
    """The bar of one request is read in milliseconds; tables go by size, and a picture has what grows."""
    steps = {1024: (12.5, "4b-1024"), 4096: (52.0, "4b-4096"), 8192: (104.0, "4b-8192")}
    for tokens, (ms, file) in reversed(steps.items()):
        metrics = {"tok_s": tokens / ms * 1e3, "step_ms": ms, "busy_ms": ms - 0.5, "idle_ms": 0.5}
        metrics["parts"] = {"gemm": 0.75 * ms, "gdn_prefill": 0.125 * ms}
        clocks = {"timed": {"sm_clock_mhz": 1740}, "profiled": {"sm_clock_mhz": 1755}} if tokens == 1024 else {}
        how = {"settings": {"lengths": [1024] * (tokens // 1024)}}
        add(root, f"prefill/4b/{tokens}", metrics | {"clocks": clocks}, f"{file}.json", **how)
    add(root, "prefill/4b/8192@1x8192", {"tok_s": 7e4, "step_ms": 117.0}, settings={"lengths": [8192]})
    text = make(root, draw=True)
    rows = [line.split(" | ")[:4] for line in section(text, "prefill").splitlines() if "`prefill/" in line]
    assert rows == [
        ["| `prefill/4b/1024`", "12.5", "9.10", "81,920"],
        ["| `prefill/4b/4096`", "52.0", "36.4", "78,769"],
        ["| `prefill/4b/8192`", "104", "72.8", "78,769"],
        ["| `prefill/4b/8192@1x8192`", "117", "72.8", "70,000"],
    ]
    assert row(text, "`prefill/4b/1024`")[8] == "GEMMs 75%, GDN 12%"
    parts = section(text, "prefill_parts")
    assert row(parts, "ms")[1:] == ["1,024 tokens", "4,096 tokens", "8,192 tokens"]
    assert row(parts, "**step**")[1:] == ["12.5", "52.0", "104"]
    assert "SM clock while timed / profiled, MHz: 1,740 / 1,755 (1,024 tokens)." in parts
    assert "![prefill](pictures/prefill.png)" in section(text, "prefill")
    (panel,) = bench_report.prefill_panels(load_known(root / "benchmarks/results", root / "benchmarks/peers.json"))
    assert panel.series["ours"] == [(1024, 12.5), (4096, 52.0), (8192, 104.0)]
    assert panel.series["ours@1x8192"] == [(8192, 117.0)] and len(panel.series["floor"]) == 3


def test_parts_are_those_of_the_newest_good_profile(root):
    old, bad, bare = (f"2026-01-0{day}T00:00:00+00:00" for day in (3, 4, 5))
    add(root, "decode/4b/rows64", PROFILED | {"step_ms": 9.25}, date=old)
    wrong = {"checks": {"first_mismatch": {"row": 1}}}
    add(root, "decode/4b/rows64", PROFILED | {"step_ms": 123.25}, date=bad, **wrong)
    text = make(root)
    assert row(section(text, "decode_parts"), "**step**")[1] == "9.25"
    add(root, "decode/4b/rows64", {"step_ms": 8.5}, date=bare)
    text = make(root)
    assert row(text, "`decode/4b/rows64`")[1] == "8.50"
    assert row(section(text, "decode_parts"), "**step**")[1] == "9.25", "the newest has no parts"


def test_the_rows_of_parts_in_this_checkout_add_up_to_the_steps():
    known = load_known(ROOT / "benchmarks/results", ROOT / "benchmarks/peers.json")
    steps = [*part_tables.columns_of(known, "decode")["4b"], *part_tables.columns_of(known, "prefill")["4b"]]
    assert len(steps) >= 8
    for column in steps:
        total = sum(column.parts.values()) + column.record.metrics["idle_ms"] - column.twice_ms
        assert total == pytest.approx(part_tables.step_ms(column.record)), column.title
        if column.record.cell.startswith("decode/"):
            assert column.floors["step"] == pytest.approx(column.record.metrics["floor_ms"]), column.title


def test_rates_of_a_prefills_products_count_what_could_be_part_of_them(root):
    """4B has 3.467e9 parameters that each prompt token meets; 80 ms are theirs, 40 of attention are not."""
    parts = {"gate_up": 30.0, "gemm": 47.5, "swiglu": 0.5, "add_rms_norm": 2.0, "paged_prefill_attention": 40.0}
    profile = {"tok_s": 1e5, "step_ms": 120.0, "idle_ms": 0.0, "parts": parts}
    add(root, "prefill/4b/8192", profile)
    add(root, "decode/4b/rows64", PROFILED)
    text = make(root)
    assert floors.prompt_parameters(ModelConfig.preset("4b")) == 3_466_854_400
    rate = 2 * 3_466_854_400 * 8192 / 80e-3 / 1e12
    assert f"residual sums and norms, TFLOP/s: {rate:.0f} (8,192 tokens)." in section(text, "prefill_parts")
    assert "TFLOP/s" not in section(text, "decode_parts")


def test_check_sees_a_change_in_a_table_of_parts(root, capsys):
    add(root, "decode/4b/rows64", PROFILED)
    add(root, "prefill/4b/8192", {"tok_s": 1e5, "step_ms": 100.0, "idle_ms": 3.0, "parts": {"gdn_prefill": 10.5}})
    argv = ["bench_report.py", f"--root={root}", "--nopictures"]
    assert bench_report.main(argv) == 0
    (root / "benchmarks/pictures").mkdir()
    for name in ("decode", "step-4b"):
        (root / f"benchmarks/pictures/{name}.png").touch()
    assert bench_report.main([*argv, "--check"]) == 0
    path = root / "benchmarks/README.md"
    before = path.read_text()
    for old, new in (("| 0.50 |", "| 0.49 |"), ("| 10.5 |", "| 10.4 |"), ("a GDN layer 10,", "a GDN layer 9,")):
        assert old in before
        path.write_text(before.replace(old, new))
        assert bench_report.main([*argv, "--check"]) == 1
        assert new in capsys.readouterr().out
