"""The report of measured figures: what tables say, what counts, and that documents are what the results say."""

import json
import pathlib
import re

import pytest

from qwen35_jax.bench.known import load_known, load_peers
from qwen35_jax.errors import UserInputError
from scripts import bench_report
from tests.report_kit import ROOT, add, empty_checkout, make, row, section


@pytest.fixture
def root(tmp_path) -> pathlib.Path:
    return empty_checkout(tmp_path)


def test_the_documents_of_this_checkout_are_what_its_results_say():
    assert bench_report.report(ROOT, check=True, draw=False) == []


def test_without_records_there_are_peers_and_floors_and_no_figure(root):
    text = make(root, draw=True)
    assert row(text, "`decode/4b/rows64`") == ["`decode/4b/rows64`", "–", "6.22", "4.02", "–", "–", "not measured"]
    offline = row(text, "`offline/4b/1024x128`")
    assert offline[1:3] == ["–", "5,743"] and offline[5:8] == ["–"] * 3
    assert float(offline[3].replace(",", "")) == pytest.approx(8780, rel=0.005)
    assert "1024 rows, 16k tokens a step: `output_tok_s` 5,833" in text, "a peer's second figure is in the notes"
    assert "No figures have been recorded yet" in (root / "README.md").read_text()
    assert "old words" not in text and not (root / "benchmarks/pictures").exists()


def test_figures_stand_beside_vllm_and_the_floor(root):
    parts = {"in_proj": 2.0, "down": 2.5, "gdn_decode": 2.0, "sampling": 0.5}
    metrics = {"step_ms": 8.0, "idle_ms": 1.0, "parts": parts}
    add(root, "decode/4b/rows64", metrics, settings={"context": 1088})
    add(root, "prefill/4b/8192", {"tok_s": 54635.0})
    padding = {"prefill_padding": 0.031, "decode_padding": 0.002}
    add(root, "offline/4b/1024x128", {"output_tok_s": 4310.0, "idle_share": 0.05, **padding})
    text = make(root)
    where = "`012345678`, [2026-01-02-first.json](results/2026-01-02-first.json)"
    assert row(text, "`decode/4b/rows64`")[1:] == ["8.00", "6.22", "4.02", "50%", "GEMMs 56%, GDN 25%", where]
    assert row(text, "`prefill/4b/8192`")[1:8] == ["–", "72.8", "54,635", "75,000", "51,400", "112,494", "49%"]
    assert row(text, "`offline/4b/1024x128`")[5:9] == ["49%", "–", "5%", "3% / 0%"]
    # A request takes 29.7 ms: 18.7 of them are prefill at 54,635 tokens/s, 10.0 are 128 steps of 20 ms for 256 rows.
    add(root, "decode/4b/rows256", {"step_ms": 20.0})
    assert row(make(root), "`offline/4b/1024x128`")[6] == "prefill 63%, decode 34%"
    add(root, "decode/4b/rows256", {"step_ms": 10.0}, date="2026-01-03T03:04:05+00:00", commit="another")
    assert row(make(root), "`offline/4b/1024x128`")[6] == "prefill 63%, decode 34%", "by steps of its own commit"
    front = (root / "README.md").read_text()
    assert "| 4B | decode step of 64 rows: ms | 8.00 | 6.22 | 4.02 | 50% | GEMMs 56%, GDN 25% |" in front
    assert front.startswith("# Front\n") and front.endswith("\nafter\n"), "text around the markers stays"


def test_a_record_is_explained_by_what_counts_of_its_own_commit_or_else_by_the_newest(root):
    def known():
        return load_known(root / "benchmarks/results", root / "benchmarks/peers.json")

    def explained_by():
        job = known().valid("offline/4b/1024x128")
        found = known().beside(job, "decode/4b/rows256")
        return found and found.metrics["step_ms"]

    def step(ms, day, **fields):
        add(root, "decode/4b/rows256", {"step_ms": ms}, date=f"2026-01-{day:02}T03:04:05+00:00", **fields)

    add(root, "offline/4b/1024x128", {"output_tok_s": 4310.0})
    assert explained_by() is None
    step(20.0, 3, commit="another")
    assert explained_by() == 20, "where its commit has none"
    step(19.0, 4, checks={"first_mismatch": "token 3"})
    assert explained_by() is None, "nothing of its commit counts, and neither does the newest"
    step(18.0, 5)
    step(17.0, 6, device_count=2)
    step(16.0, 7, commit="another")
    assert explained_by() == 18


def test_the_front_page_says_which_figures_no_commit_has(root):
    add(root, "decode/4b/rows64", {"step_ms": 8.0}, commit="0123456789+dirty")
    add(root, "decode/4b/rows1", {"step_ms": 3.0}, commit="unknown")
    add(root, "decode/4b/rows256", {"step_ms": 20.0})
    make(root)
    front = (root / "README.md").read_text()
    commits = [line.split(" | ")[7] for line in front.splitlines() if "decode step" in line]
    assert commits == ["**no commit** |", "`012345678` **+ uncommitted changes** |", "`012345678` |"]


def test_the_front_page_says_what_the_peers_figures_are_of(root):
    add(root, "offline/4b/1024x128", {"output_tok_s": 6000.0})
    add(root, "start/4b", {"cold_s": 100.0})
    add(root, "start/4b", {"warm_s": 9.0})
    make(root)
    front = (root / "README.md").read_text()
    assert "| 4B | start to first token, nothing cached: s | 100 | 95-143 |" in front
    assert "| 4B | start to first token, compiled programs cached: s | 9.00 | – |" in front, "theirs are not of such"
    assert "- vLLM 0.25.0: 2048 requests, 1024 rows, 16k tokens a step: `output_tok_s` 5,833" in front
    assert "transformers" not in front


def test_the_floor_follows_the_record(root):
    add(root, "decode/4b/rows64", {"step_ms": 8.0}, settings={"context": 100_000})
    add(root, "decode/4b/rows64@bf16state", {"step_ms": 8.0}, settings={"context": 1088})
    add(root, "decode/4b/rows8@fp32", {"step_ms": 8.0})
    add(root, "offline/4b/lognormal", {"output_tok_s": 1.0, "requests": 2, "input_tokens": 2048, "output_tokens": 256})
    text = make(root)
    assert row(text, "`decode/4b/rows64`")[3] == "52.7"
    assert row(text, "`decode/4b/rows64@bf16state`")[3] == "3.27"
    assert row(text, "`decode/4b/rows8@fp32`")[3] == "–"
    assert row(text, "`offline/4b/lognormal`")[3] == row(text, "`offline/4b/1024x128`")[3]


def test_another_device_has_neither_peers_nor_floors(root):
    add(root, "decode/4b/rows64", {"step_ms": 8.0}, device="NVIDIA A100")
    add(root, "decode/4b/rows8", {"step_ms": 8.0}, device_count=2)
    text = make(root)
    assert row(text, "`decode/4b/rows64`")[1:5] == ["8.00", "–", "–", "–"]
    assert row(text, "`decode/4b/rows64`")[6].startswith("NVIDIA A100, `012345678`")
    assert row(text, "`decode/4b/rows8`")[2:5] == ["–"] * 3
    assert row(text, "`decode/4b/rows8`")[6].startswith("2 devices, ")


def test_only_the_newest_record_counts_and_the_others_are_history(root):
    add(root, "decode/4b/rows1", {"step_ms": 9.0}, "b.json", date="2026-01-03T00:00:00+00:00")
    add(root, "decode/4b/rows1", {"step_ms": 7.0}, "a.json", date="2026-02-03T00:00:00+00:00")
    add(root, "decode/4b/rows8", {"step_ms": 5.0})
    text = make(root, draw=True)
    assert row(text, "`decode/4b/rows1`")[1] == "7.00"
    rows = [line.split(" | ")[:4] for line in section(text, "history").splitlines() if "decode" in line]
    assert rows == [
        ["| `decode/4b/rows1`", "step_ms", "2026-01-03", "9.00"],
        ["| `decode/4b/rows1`", "step_ms", "2026-02-03", "7.00"],
    ]
    assert "![history](pictures/history.png)" in text


@pytest.mark.parametrize(
    ("cell", "metrics"),
    [
        ("decode/4b/rows1", {"step_ms": 123.25}),
        ("prefill/4b/8192", {"tok_s": 123.25}),
        ("offline/4b/1024x128", {"output_tok_s": 123.25}),
        ("long/4b/131072", {"tok_s": 123.25, "seconds": 123.25, "chunk_ms": [123.25]}),
        ("start/4b", {"cold_s": 123.25, "compile_s": 123.25, "peak_memory_gib": 123.25, "planned_memory_gib": 123.25}),
        ("closed/4b/c8/1024x256", {"tpot_mean_ms": 123.25, "ttft_mean_ms": 123.25}),
        ("kernel/gdn_decode/4b-rows64", {"us": 123.25, "tb_s": 123.25, "share_of_ceiling": 123.25}),
    ],
)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"checks": {"first_mismatch": {"request": 3, "token": 5}}}, 'first mismatch {"request": 3, "token": 5}'),
        ({"device": "cpu"}, "measured on a CPU"),
    ],
)
def test_figures_that_do_not_count_appear_nowhere(root, cell, metrics, fields, reason):
    add(root, cell, metrics, **fields)
    text = make(root, draw=True) + (root / "README.md").read_text()
    assert "**invalid**" in text and reason in text
    assert "123" not in text.replace("0123456789", "").replace("012345678", "")
    assert not (root / "benchmarks/pictures").exists()


def test_code_that_no_commit_holds_is_flagged(root):
    add(root, "decode/4b/rows1", {"step_ms": 9.0}, commit="0123456789abcdef+dirty")
    add(root, "decode/4b/rows8", {"step_ms": 9.0}, commit="unknown")
    text = make(root)
    assert "`012345678` **+ uncommitted changes**, [" in row(text, "`decode/4b/rows1`")[6]
    assert "**no commit**, [" in row(text, "`decode/4b/rows8`")[6]


def test_both_ways_to_start_are_kept(root):
    memory = {"peak_memory_gib": 99.0, "planned_memory_gib": 100.0}
    add(root, "start/4b", {"cold_s": 80.5, "compile_s": 61.0, "programs": 40, **memory})
    add(root, "start/4b", {"warm_s": 20.5, "compile_s": 5.0, "programs": 40}, date="2026-01-03T00:00:00+00:00")
    text = make(root)
    cold, warm = (line.split(" | ") for line in section(text, "start").splitlines() if "`start/4b` |" in line)
    assert cold[1:7] == ["nothing cached", "80.5", "61.0", "40", "95-143", "20"]
    assert warm[1:5] == ["compiled programs cached", "20.5", "5.00", "40"]
    assert row(section(text, "memory"), "`start/4b`")[1:4] == ["99.0", "100", "99.0%"]
    assert "No cell has been measured twice" in text
    front = (root / "README.md").read_text()
    assert "nothing cached: s | 80.5 | 95-143 |" in front and "programs cached: s | 20.5 |" in front


def test_kernels_and_latencies(root):
    add(
        root,
        "kernel/gdn_decode/4b-rows64@bf16state",
        {"us": 55.5, "tb_s": 2.5, "share_of_ceiling": 0.587, "spread": 0.02},
        settings={"implementation": "mosaic_sm90"},
    )
    add(root, "kernel/paged_prefill_attention/4b-2x4096", {"us": 999.5, "tflop_s": 275.2, "share_of_ceiling": None})
    add(root, "closed/4b/c8/1024x256", {"tpot_mean_ms": 5.5, "itl_p50_ms": 5.25, "itl_p99_ms": 7.75})
    text = make(root)
    kernel = row(text, "`gdn_decode/4b-rows64@bf16state`")
    assert kernel[1:7] == ["mosaic_sm90", "55.5", "2.50 TB/s", "59%", "2%", "–"]
    attention = row(text, "`paged_prefill_attention/4b-2x4096`")
    assert attention[3:5] == ["275 TFLOP/s", "–"] and "cuDNN 553 TFLOP/s; Mosaic" in attention[6]
    assert row(text, "`closed/4b/c8/1024x256`")[1:7] == ["ours", "5.50", "5.25", "7.75", "–", "–"]
    same_run = {"settings": {"implementation": "mosaic_sm90", "peer": "cuDNN, dense"}}
    add(root, "kernel/paged_prefill_attention/4b-2x4096", {"us": 400.0, "tflop_s": 600.0, "peer_us": 450.0}, **same_run)
    peers = row(make(root), "`paged_prefill_attention/4b-2x4096`")[6]
    assert peers.startswith("cuDNN, dense 450 us in the same run; ")


def test_products(root):
    assert "Not measured yet" in section(make(root), "products")
    clocks = {"sm_clock_mhz": 1485.0, "power_w": 690.2, "power_capped_share": 1.0, "readings": 9}
    metrics = {"tflop_s": 681.4, "first_tflop_s": 795.9, "spread": 0.013}
    add(root, "product/4b/square-8192", metrics | {"clocks": clocks})
    add(root, "product/4b/chain-8192", metrics)
    add(root, "product/4b/gate_up-8192", metrics, checks={"first_mismatch": "0.2 from the reference, allowed 0.01"})
    text = make(root)
    assert row(text, "`4b/square-8192`")[1:7] == ["681", "796", "1%", "1,485", "690", "100%"]
    assert row(text, "`4b/chain-8192`")[1:7] == ["681", "796", "1%", "–", "–", "–"], "a device that does not tell"
    wrong = row(text, "`4b/gate_up-8192`")
    assert wrong[1].startswith("**invalid**: wrong output") and wrong[2:7] == ["–"] * 5


def test_drift(root):
    names = ("state_error", "worst_head_error", "output_error", "float32_state_error", "float32_output_error")
    curves = {"bfloat16": {"state": [1e-3, 2e-3], "worst_head": [1e-3, 3e-3], "output": [4e-3, 5e-3]}}
    metrics = dict.fromkeys(names, 1.5e-3) | {"steps": [1, 2000], "curves": curves}
    add(root, "drift/gdn_decode/4b-rows64-none", metrics, settings={"steps": 2000})
    bad = {"checks": {"first_mismatch": [3, 0.5]}}
    add(root, "drift/gdn_decode/4b-rows64-initial", metrics, **bad)
    text = make(root, draw=True)
    assert row(text, "`gdn_decode/4b-rows64-none`")[1:7] == ["2000", *["1.5e-03"] * 5]
    assert "**invalid**: wrong output" in row(text, "`gdn_decode/4b-rows64-initial`")[1]
    assert "![drift](pictures/drift.png)" in section(text, "drift")
    (panel,) = bench_report.drift_panels(load_known(root / "benchmarks/results", root / "benchmarks/peers.json"))
    assert panel.series["bfloat16, output"] == [(1, 4e-3), (2000, 5e-3)]


LONG = {"tok_s": 32768.0, "seconds": 4.0, "chunk_ms": [150.0, 3850.0], "floor_ms": 2428.0}
LONG_CHUNKS = {"settings": {"chunks": [[0, 8192], [8192, 122880]]}}


def test_long_prompts_chunk_by_chunk(root):
    memory = {"peak_first_chunk_gib": 14.5, "peak_end_gib": 14.5}
    last = {"step_ms": 3850.0, "idle_ms": 0.0, "parts": {"paged_prefill_attention": 2310.0, "gemm": 1155.0}}
    add(root, "long/4b/131072", LONG | memory | {"last_chunk": last}, **LONG_CHUNKS)
    add(root, "long/4b/131072@chunk4096", LONG, device="NVIDIA A100", **LONG_CHUNKS)
    text = make(root, draw=True)
    found = row(text, "`long/4b/131072`")
    floor = 131072 / 2.4282  # 16 x 72.82 ms of products, 985 TFLOP of attention in seven layers
    assert found[1:3] == ["32,768", "4.00"] and float(found[3].replace(",", "")) == pytest.approx(floor, rel=1e-3)
    assert found[5:8] == ["61%", "attention 60%, GEMMs 30%", "14.5 / 14.5"]
    assert found[4] == "2.43" and row(text, "`long/4b/131072@chunk4096`")[3:6] == ["–"] * 3
    # 72.8 ms of products and 4.94 of attention; what the first chunk leaves of 1,165.1 and 1,263.1 ms.
    assert row(section(text, "long"), "0") == ["0", "8,192", "150", "77.8", "52%"]
    assert row(section(text, "long"), "8,192")[1:4] == ["122,880", "3,850", "2,350"]
    assert "![long](pictures/long.png)" in section(text, "long")
    assert "| 4B | prompt of 131072 tokens in chunks of 8192: tok/s | 32,768 |" in (root / "README.md").read_text()
    known = load_known(root / "benchmarks/results", root / "benchmarks/peers.json")
    panels = bench_report.long_panels(known)
    assert [panel.title for panel in panels] == ["4b/131072", "4b/131072@chunk4096"]
    assert panels[0].series["ours"] == [(0, 150.0), (8192, 3850.0)] and panels[1].series["floor"] == []
    argv = ["bench_report.py", f"--root={root}", "--check"]
    assert bench_report.main(argv) == 0


def test_the_roofline_has_rates_and_intensities_of_the_specs(root):
    add(root, "kernel/gdn_decode/4b-rows64", {"us": 100.0, "tb_s": 2.769})
    add(root, "kernel/gdn_decode/4b-rows64@bf16state", {"us": 50.0})
    add(root, "kernel/paged_prefill_attention/4b-2x4096", {"us": 500.0, "tflop_s": 549.9})
    add(root, "kernel/kv_write/4b-rows64", {"us": 5.0})
    add(root, "kernel/causal_conv/4b-no-such-spec", {"us": 5.0})
    add(root, "kernel/no_such_op/4b-rows64", {"us": 5.0})
    add(root, "kernel/gdn_decode/4b-rows1", {"us": 5.0}, device="NVIDIA A100")
    add(root, "kernel/gdn_decode/4b-rows16", {"us": 5.0}, checks={"first_mismatch": [1]})
    text = make(root, draw=True)
    dots = bench_report.roofline_dots(load_known(root / "benchmarks/results", root / "benchmarks/peers.json"))
    assert {op: [dot.label for dot in found] for op, found in dots.items()} == {
        "gdn_decode": ["4b-rows64", "4b-rows64@bf16state"],
        "paged_prefill_attention": ["4b-2x4096"],
    }
    first, attention = dots["gdn_decode"][0], dots["paged_prefill_attention"][0]
    assert first.rate / first.intensity == pytest.approx(2.769, rel=1e-3), "the record's bytes a second"
    assert attention.rate == pytest.approx(549.9, rel=1e-3)
    assert "![roofline](pictures/roofline.png)" in section(text, "kernels")
    assert "![roofline](benchmarks/pictures/roofline.png)" in (root / "README.md").read_text()
    path = root / "benchmarks/pictures/roofline.png"
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG") and len(before) > 5000
    make(root, draw=True)
    assert path.read_bytes() == before
    path.unlink()
    assert "roofline.png is missing" in "".join(bench_report.report(root, check=True, draw=False))


def test_making_it_again_changes_nothing_and_check_sees_every_change(root, capsys):
    add(root, "decode/4b/rows1", {"step_ms": 9.0})
    argv = ["bench_report.py", f"--root={root}"]
    assert bench_report.main([*argv, "--check"]) == 1
    assert "old words" in capsys.readouterr().out, "the difference is shown"
    assert bench_report.main(argv) == 0
    files = [root / "README.md", root / "benchmarks/README.md", root / "benchmarks/pictures/decode.png"]
    before = [path.read_bytes() for path in files]
    assert bench_report.main(argv) == 0 and [path.read_bytes() for path in files] == before
    assert bench_report.main([*argv, "--check"]) == 0

    files[1].write_text(files[1].read_text().replace("9.00", "8.00"))
    assert bench_report.main([*argv, "--check"]) == 1
    assert "9.00" in capsys.readouterr().out and "8.00" in files[1].read_text(), "check writes nothing"
    assert bench_report.main([*argv, "--nopictures"]) == 0
    files[2].unlink()
    assert bench_report.main([*argv, "--check"]) == 1
    assert "decode.png is missing" in capsys.readouterr().out


def test_pictures(root):
    for rows, ms in ((1, 3.5), (8, 3.75), (64, 6.0)):
        add(root, f"decode/4b/rows{rows}", {"step_ms": ms})
        add(root, f"decode/9b/rows{rows}", {"step_ms": 2 * ms})
    add(root, "decode/4b/rows64@bf16state", {"step_ms": 5.0})
    add(root, "offline/4b/1024x128", {"output_tok_s": 4310.0})
    add(root, "kernel/gdn_decode/4b-rows64", {"us": 55.5, "share_of_ceiling": 0.5})
    add(root, "kernel/kv_write/4b-rows64", {"us": 5.5, "share_of_ceiling": 0.25})
    parts = {"in_proj": 2.0, "down": 2.5, "gdn_decode": 2.0, "sampling": 0.5}
    add(root, "decode/4b/rows16", {"step_ms": 8.0, "idle_ms": 1.0, "parts": parts})
    text = make(root, draw=True)
    for name, where in (("decode", "decode"), ("step-4b", "decode"), ("offline", "offline"), ("kernels", "kernels")):
        assert f"![{name}](pictures/{name}.png)" in section(text, where)
        data = (root / f"benchmarks/pictures/{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
    assert "step-9b" not in text, "none of its steps was profiled"
    assert not (root / "benchmarks/pictures/history.png").exists()
    panels = bench_report.decode_panels(load_known(root / "benchmarks/results", root / "benchmarks/peers.json"))
    assert [panel.title for panel in panels] == ["4B decode step", "9B decode step"]
    assert panels[0].series["ours"] == [(1, 3.5), (8, 3.75), (16, 8.0), (64, 6.0)]
    assert panels[0].series["ours@bf16state"] == [(64, 5.0)]
    assert len(panels[0].series["vLLM"]) == 7 and panels[1].series["vLLM"] == []


def test_profiled_steps_are_decode_steps_and_prefills(root):
    profiled = {"step_ms": 8.0, "idle_ms": 1.0, "parts": {"down": 2.5}}
    add(root, "decode/4b/rows16", profiled)
    add(root, "decode/4b/rows64", {"step_ms": 8.0})
    add(root, "prefill/4b/8192", {"tok_s": 1e5, **profiled})
    found = bench_report.profiled_steps(load_known(root / "benchmarks/results", root / "benchmarks/peers.json"))
    assert {size: [record.cell for record in records] for size, records in found.items()} == {
        "4b": ["decode/4b/rows16", "prefill/4b/8192"]
    }


def test_without_matplotlib_the_extra_is_named(root, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    argv = ["bench_report.py", f"--root={root}"]
    assert bench_report.main(argv) == 0, "nothing to draw"
    add(root, "decode/4b/rows1", {"step_ms": 9.0})
    before = (root / "README.md").read_text()
    assert bench_report.main(argv) == 2
    assert "pip install '.[bench]'" in capsys.readouterr().err and (root / "README.md").read_text() == before
    assert bench_report.main([*argv, "--nopictures"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<!-- bench:begin offline -->", "", "without its bench:end"),
        ("<!-- bench:begin offline -->", "<!-- bench:begin offlime -->", "unknown section 'offlime'"),
        ("<!-- bench:begin offline -->", "<!-- bench:begin open -->", "'open' is there twice"),
        ("<!-- bench:begin offline -->\nold words\n<!-- bench:end -->", "", "no section 'offline'"),
        ("old words\n<!-- bench:end -->\n\n## offline", "## offline", "without its bench:end"),
    ],
)
def test_wrong_markers_are_named(root, old, new, words):
    path = root / "benchmarks/README.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserInputError, match=re.escape(words)) as caught:
        bench_report.report(root, check=False, draw=False)
    assert "benchmarks/README.md" in str(caught.value)


def test_a_record_without_its_figure_is_named(root):
    add(root, "decode/4b/rows1", {"tok_s": 9.0})
    with pytest.raises(UserInputError, match="first.json: decode/4b/rows1 has no metric 'step_ms'"):
        make(root)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v["cells"].update({"decode/4b/8": []}), "load '8' is not rows<N>"),
        (lambda v: v["cells"].update({"start/4b": [{"peer": "who", "metrics": {}}]}), "unknown peer 'who'"),
        (lambda v: v["provenance"].pop("device"), "'device' is missing"),
        (lambda v: v.pop("peers"), "'peers' is missing"),
    ],
)
def test_a_wrong_file_of_peers_is_named(root, change, words):
    path = root / "benchmarks/peers.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(UserInputError, match=re.escape(words)) as caught:
        load_peers(path)
    assert "peers.json" in str(caught.value)
