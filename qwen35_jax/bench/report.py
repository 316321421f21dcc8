"""Tables of measured figures beside the peers' and the floors, as Markdown.

A record whose checks failed is shown as invalid, with the reason and never with its figures. Every section is a
function of everything that is known and of the path of the results as the document sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qwen35_jax.bench.device_trace import group_sums
from qwen35_jax.bench.known import (
    DEFAULT_ROWS,
    MAIN_METRIC,
    STARTS,
    Known,
    PeerFigure,
    cell_order,
    chunk_floors_ms,
    size_order,
)
from qwen35_jax.bench.markdown import NO_FIGURE, commit_of, invalid, join, measured, number, percent, table
from qwen35_jax.bench.part_tables import decode_parts_section, prefill_parts_section
from qwen35_jax.bench.records import OF_OPS, Record, parse_cell

type Section = Callable[[Known, str], str]

LATENCIES = ("tpot_mean_ms", "itl_p50_ms", "itl_p99_ms", "ttft_mean_ms", "output_tok_s")
MEMORY_METRICS = ("peak_memory_gib", "planned_memory_gib")


# --- words -------------------------------------------------------------------------------------------------------


def bound_by(record: Record | None) -> str:
    """The two largest groups of a step's parts, with their shares of the step."""
    if record is None:
        return NO_FIGURE
    metrics = record.metrics.get("last_chunk", record.metrics)  # a long prompt has the parts of its last chunk
    parts, step = metrics.get("parts"), metrics.get("step_ms")
    if not isinstance(parts, Mapping) or not step:
        return NO_FIGURE
    groups = {"idle": metrics.get("idle_ms") or 0.0} | group_sums(parts)
    largest = sorted((name for name in groups if groups[name] > 0), key=lambda name: -groups[name])[:2]
    return ", ".join(f"{name} {groups[name] / step:.0%}" for name in largest) or NO_FIGURE


def job_parts(known: Known, cell: str) -> str:
    """What a job's prefill and decode would take if its steps ran as they do alone, as shares of the time it took.

    The steps are those of the job's commit, if there are any.
    """
    parsed, record = parse_cell(cell), known.valid(cell)
    if record is None or parsed.lengths is None or record.settings.get("decode_overlap", "off") != "off":
        return NO_FIGURE
    variant = "".join(f"@{suffix}" for suffix in parsed.suffixes)
    rows = record.settings.get("max_num_seqs", DEFAULT_ROWS)
    prefill = known.beside(record, f"prefill/{parsed.subject}/8192{variant}")
    decode = known.beside(record, f"decode/{parsed.subject}/rows{rows}{variant}")
    if prefill is None or decode is None or len({item.device for item in (record, prefill, decode)}) > 1:
        return NO_FIGURE
    n_in, n_out = parsed.lengths
    request_s = n_out / record.metrics["output_tok_s"]
    prefill_s, decode_s = n_in / prefill.metrics["tok_s"], n_out * decode.metrics["step_ms"] * 1e-3 / rows
    return f"prefill {prefill_s / request_s:.0%}, decode {decode_s / request_s:.0%}"


def notes(known: Known, cells: Sequence[str], peers: Sequence[str] | None = None) -> str:
    """Conditions of the peers' figures (or of some), and the figures that tables do not show, as a list.

    Cells are named where a condition is not that of all cells.
    """
    grouped: dict[str, list[str]] = {}
    for cell in cells:
        shown: set[str] = set()
        for figure in known.peers.cells.get(cell, ()):
            if peers is not None and figure.peer not in peers:
                continue
            text = f"{known.peers.labels[figure.peer]}: {figure.conditions}" if figure.conditions else ""
            if figure.peer in shown:
                figures = ", ".join(f"`{name}` {number(value)}" for name, value in figure.metrics.items())
                text = f"{text or known.peers.labels[figure.peer]}: {figures}"
            shown.add(figure.peer)
            if text:
                grouped.setdefault(text, []).append(cell)
    with_peers = [cell for cell in cells if cell in known.peers.cells]
    return "\n".join(
        f"- {text}" + ("" if meant == with_peers else f" ({', '.join(f'`{cell}`' for cell in meant)})")
        for text, meant in grouped.items()
    )


def share_of_floor(kind: str, ours: float | None, floor: float) -> float | None:
    """How much of what is possible: 1 is the floor itself."""
    if not ours:
        return None
    return floor / ours if kind == "decode" else ours / floor


# --- sections ----------------------------------------------------------------------------------------------------


def headline_row(known: Known, cell: str, metric: str | None = None) -> dict[str, str]:
    """A cell's columns by name; ``metric`` says which, where a kind has several main ones."""
    kind = parse_cell(cell).kind
    metric = metric or MAIN_METRIC[kind]
    record, good = known.record(cell, metric), known.valid(cell, metric)
    figure = good.metrics[metric] if good else None
    peer_metric = "ready_s" if metric == "cold_s" else metric  # theirs are not of kept programs
    row = {
        "cell": f"`{cell}`",
        "ours": invalid(record) if record is not None and good is None else number(figure),
        "idle": percent(good.metrics.get("idle_share") if good else None),
        "padding": NO_FIGURE,
        "bound": job_parts(known, cell) if kind == "offline" else bound_by(good),
    }
    for name in ("vllm", "transformers"):
        peer = known.peer(cell, name)
        row[name] = number(peer.metrics.get(peer_metric)) if peer else NO_FIGURE
    floor = known.floor(cell)
    row["floor"] = number(floor[0]) if floor else NO_FIGURE
    row["overlapped"] = number(floor[1]) if floor and floor[1] else NO_FIGURE
    row["step"] = number(good.metrics.get("step_ms")) if good else NO_FIGURE
    row["floor_step"] = number(parse_cell(cell).load / floor[0] * 1e3) if floor and kind == "prefill" else NO_FIGURE
    row["share"] = percent(share_of_floor(kind, figure, floor[0]) if floor else None)
    if good and "prefill_padding" in good.metrics:
        row["padding"] = " / ".join(percent(good.metrics.get(name)) for name in ("prefill_padding", "decode_padding"))
    return row


def headline_section(kind: str, header: Mapping[str, str]) -> Callable[[Known, str], str]:
    """A section with a row a cell; ``header`` maps columns of :func:`headline_row` to their titles."""

    def section(known: Known, results: str) -> str:
        cells = known.cells(kind)
        rows = []
        for cell in cells:
            row = headline_row(known, cell)
            rows.append([*(row[name] for name in header), measured(known.record(cell), results)])
        titles = [title.format(**known.peers.labels) for title in header.values()]
        return join(table([*titles, "commit, file"], rows), notes(known, cells))

    return section


def long_section(known: Known, results: str) -> str:
    """Long prompts: a row each, then the time of every chunk of each beside its floor."""
    rows, blocks = [], []
    for cell in known.cells("long"):
        record, good = known.record(cell), known.valid(cell)
        row, metrics = headline_row(known, cell), good.metrics if good else {}
        floor = number(sum(chunk_floors_ms(record)) * 1e-3 or None) if record else NO_FIGURE
        peaks = [number(metrics.get(name)) for name in ("peak_first_chunk_gib", "peak_end_gib")]
        figures = [row["ours"], number(metrics.get("seconds")), row["floor"], floor, row["share"], row["bound"]]
        rows.append([f"`{cell}`", *figures, " / ".join(peaks), measured(record, results)])
        if good:
            blocks.append(join(f"`{cell}`", chunk_table(good)))
    if not rows:
        return "Not measured yet."
    header = ["cell", "ours, tok/s", "ours, s", "floor, tok/s", "floor, s", "share of the floor"]
    header += ["last chunk bound by", "peak after the first chunk / at the end, GiB", "commit, file"]
    return join(table(header, rows), *blocks)


def chunk_table(record: Record) -> str:
    """The chunks of a long prompt: what comes before each, its time and its floor."""
    times, floors = record.metrics["chunk_ms"], chunk_floors_ms(record)
    rows = []
    for at, ((start, length), ms) in enumerate(zip(record.settings["chunks"], times, strict=True)):
        floor = floors[at] if floors else None
        rows.append([f"{start:,}", f"{length:,}", number(ms), number(floor), percent(floor / ms if floor else None)])
    return table(["prefix", "tokens", "ms", "floor, ms", "floor / ours"], rows)


def latency_section(kind: str) -> Callable[[Known, str], str]:
    """A row for us and one for each peer."""

    def section(known: Known, results: str) -> str:
        header = ["cell", "", "TPOT mean, ms", "ITL p50, ms", "ITL p99, ms", "TTFT mean, ms", "output tok/s"]
        rows = []
        for cell in known.cells(kind):
            record, good = known.record(cell), known.valid(cell)
            figures = [number(good.metrics.get(name)) if good else NO_FIGURE for name in LATENCIES]
            if record is not None and good is None:
                figures[0] = invalid(record)
            rows.append([f"`{cell}`", "ours", *figures, measured(record, results)])
            if peer := known.peer(cell, "vllm"):
                figures = [number(peer.metrics.get(name)) for name in LATENCIES]
                rows.append(["", known.peers.labels["vllm"], *figures, ""])
        return join(table([*header, "commit, file"], rows), notes(known, known.cells(kind)))

    return section


def start_section(known: Known, results: str) -> str:
    """Process start to first token: a row for each way to start."""
    peers = [known.peers.labels[name] for name in ("vllm", "transformers")]
    header = [
        "cell",
        "",
        "ours, s",
        "of it compiling, s",
        "programs",
        *(f"{peer}, s" for peer in peers),
        "commit, file",
    ]
    rows = []
    for cell in known.cells("start"):
        others = [known.peer(cell, name) for name in ("vllm", "transformers")]
        theirs = [number(other.metrics.get("ready_s")) if other else NO_FIGURE for other in others]
        for metric, words in STARTS.items():
            record, good = known.record(cell, metric), known.valid(cell, metric)
            ours = invalid(record) if record is not None and good is None else _figure(good, metric)
            programs = NO_FIGURE if good is None else str(good.metrics.get("programs", NO_FIGURE))
            shown = theirs if metric == "cold_s" else ["", ""]
            rows.append(
                [f"`{cell}`", words, ours, _figure(good, "compile_s"), programs, *shown, measured(record, results)]
            )
    return join(table(header, rows), notes(known, known.cells("start")))


def _figure(record: Record | None, metric: str) -> str:
    return NO_FIGURE if record is None else number(record.metrics.get(metric))


def memory_section(known: Known, results: str) -> str:
    """Peak of the device's memory against the plan, of every record that says both."""
    rows = []
    for record in known.newest():
        if record.faults() or not all(record.metrics.get(name) for name in MEMORY_METRICS):
            continue
        peak, plan = (record.metrics[name] for name in MEMORY_METRICS)
        rows.append([f"`{record.cell}`", number(peak), number(plan), f"{peak / plan:.1%}", measured(record, results)])
    if not rows:
        return "Not measured yet."
    return table(["cell", "peak, GiB", "plan, GiB", "peak / plan", "commit, file"], rows)


def kernel_section(known: Known, results: str) -> str:
    """One operation at a time."""
    header = ["cell", "implementation", "us", "TB/s or TFLOP/s", "share of ceiling", "spread", "peer", "commit, file"]
    rows = []
    for cell in known.cells("kernel"):
        record, good = known.record(cell), known.valid(cell)
        metrics = good.metrics if good else {}
        others = [p for name in known.peers.labels if (p := known.peer(cell, name))]
        peers = [f"{known.peers.labels[p.peer]} {_peer_kernel(p)}" for p in others]
        if good and "peer_us" in metrics:
            gated = f", {number(metrics['peer_gated_us'])} us with its gate" if "peer_gated_us" in metrics else ""
            peers.insert(0, f"{good.settings['peer']} {number(metrics['peer_us'])} us{gated} in the same run")
        rows.append(
            [
                f"`{cell.removeprefix('kernel/')}`",
                str(good.settings.get("implementation", NO_FIGURE)) if good else NO_FIGURE,
                invalid(record) if record is not None and good is None else number(metrics.get("us")),
                _rate(metrics),
                percent(metrics.get("share_of_ceiling")),
                percent(metrics.get("spread")),
                "; ".join(peers) or NO_FIGURE,
                measured(record, results),
            ]
        )
    return join(table(header, rows), notes(known, known.cells("kernel")))


def _rate(metrics: Mapping[str, Any]) -> str:
    for name, unit in (("tb_s", "TB/s"), ("tflop_s", "TFLOP/s")):
        if metrics.get(name) is not None:
            return f"{number(metrics[name])} {unit}"
    return NO_FIGURE


def _peer_kernel(figure: PeerFigure) -> str:
    return f"{number(figure.metrics['us'])} us" if "us" in figure.metrics else _rate(figure.metrics)


def products_section(known: Known, results: str) -> str:
    """Rates of matrix products, after a pause and lasting."""
    clocks = (("sm_clock_mhz", number), ("power_w", number), ("power_capped_share", percent))
    rows = []
    for cell in known.cells("product"):
        record, good = known.record(cell), known.valid(cell)
        metrics = good.metrics if good else {}
        rates = [number(metrics.get("tflop_s")) if good else invalid(record), number(metrics.get("first_tflop_s"))]
        told = [shown(metrics.get("clocks", {}).get(name)) for name, shown in clocks]
        name = cell.removeprefix("product/")
        rows.append([f"`{name}`", *rates, percent(metrics.get("spread")), *told, measured(record, results)])
    if not rows:
        return "Not measured yet."
    header = ["cell", "TFLOP/s", "after a pause", "spread", "SM clock, MHz", "W", "capped", "commit, file"]
    return table(header, rows)


def drift_section(known: Known, results: str) -> str:
    """Errors of low-precision states after many steps."""
    names = ("state_error", "worst_head_error", "output_error", "float32_state_error", "float32_output_error")
    rows = []
    for cell in known.cells("drift"):
        record, good = known.record(cell), known.valid(cell)
        if good:
            figures = [str(good.settings.get("steps", NO_FIGURE)), *(f"{good.metrics[name]:.1e}" for name in names)]
        else:
            figures = [invalid(record) if record else NO_FIGURE, *[NO_FIGURE] * len(names)]
        rows.append([f"`{cell.removeprefix('drift/')}`", *figures, measured(record, results)])
    if not rows:
        return "Not measured yet."
    header = ["cell", "steps", "states", "worst head", "output", "float32: states", "float32: output", "commit, file"]
    return table(header, rows)


def peers_section(known: Known, results: str) -> str:
    """Where the peers' figures come from."""
    provenance = known.peers.provenance
    return (
        f"The peers' figures were measured on {provenance['measured']} on one {provenance['device']}: "
        f"{provenance['versions']}. Conditions: {provenance['conditions']}."
    )


def history_section(known: Known, results: str) -> str:
    """Cells that were measured more than once, oldest first."""
    rows = []
    for cell, metric in sorted(known.series, key=lambda key: (parse_cell(key[0]).kind, cell_order(key[0]), key[1])):
        records = known.series[cell, metric]
        for record in records if len(records) > 1 else ():
            figure = invalid(record) if record.faults() else number(record.metrics.get(metric))
            rows.append([f"`{cell}`", metric, record.date[:10], figure, measured(record, results)])
    if not rows:
        return "No cell has been measured twice yet."
    return table(["cell", "metric", "date", "figure", "commit, file"], rows)


_SUMMARY = (
    ("offline/{}/1024x128", "output_tok_s", "job, 1024 tokens in and 128 out: output tok/s"),
    ("prefill/{}/8192", "tok_s", "prefill of 8192 prompt tokens: tok/s"),
    ("long/{}/131072", "tok_s", "prompt of 131072 tokens in chunks of 8192: tok/s"),
    ("decode/{}/rows1", "step_ms", "decode step of 1 row: ms"),
    ("decode/{}/rows64", "step_ms", "decode step of 64 rows: ms"),
    ("decode/{}/rows256", "step_ms", "decode step of 256 rows: ms"),
    *(("start/{}", metric, f"start to first token, {words}: s") for metric, words in STARTS.items()),
)


def summary_section(known: Known, results: str) -> str:
    """The short table of the front page: what was measured of every size, beside vLLM and the floor."""
    rows, devices, cells = [], set(), []
    subjects = {parse_cell(cell).subject for cell, _ in known.series if parse_cell(cell).kind not in OF_OPS}
    for size in sorted(subjects, key=size_order):
        for form, metric, words in _SUMMARY:
            cell = form.format(size)
            if (record := known.record(cell, metric)) is not None:
                row = headline_row(known, cell, metric)
                shown = (row[name] for name in ("ours", "vllm", "floor", "share", "bound"))
                rows.append([size.upper(), words, *shown, commit_of(record)])
                devices.add(record.device)
                cells.append(cell)
    if not rows:
        return "No figures have been recorded yet."
    caption = f"Measured on {' and '.join(sorted(devices))} with random weights, bf16, greedy, EOS ignored."
    header = ["model", "", "ours", known.peers.labels["vllm"], "floor", "share of the floor", "bound by", "commit"]
    told = [cell for cell in dict.fromkeys(cells) if parse_cell(cell).kind in ("offline", "start")]
    return join(caption, table(header, rows), notes(known, told, peers=("vllm",)))


_HEADLINE = {"cell": "cell", "ours": "ours", "vllm": "{vllm}"}
_FLOOR = {"share": "share of the floor", "bound": "bound by"}
_STEPS = {"idle": "GPU idle", "padding": "padding, prompts / rows"}
SECTIONS: Mapping[str, Section] = {
    "summary": summary_section,
    "peers": peers_section,
    "offline": headline_section(
        "offline", {**_HEADLINE, "floor": "floor, in turns", "overlapped": "floor, overlapped", **_FLOOR, **_STEPS}
    ),
    "prefill": headline_section(
        "prefill",
        {
            "cell": "cell",
            "step": "ours, ms",
            "floor_step": "floor, ms",
            "ours": "ours, tok/s",
            "vllm": "{vllm}",
            "transformers": "{transformers}",
            "floor": "floor, tok/s",
            **_FLOOR,
        },
    ),
    "long": long_section,
    "decode": headline_section("decode", {**_HEADLINE, "floor": "floor", **_FLOOR}),
    "prefill_parts": prefill_parts_section,
    "decode_parts": decode_parts_section,
    "closed": latency_section("closed"),
    "open": latency_section("open"),
    "start": start_section,
    "memory": memory_section,
    "kernels": kernel_section,
    "products": products_section,
    "drift": drift_section,
    "history": history_section,
}
"""What documents may ask for by name."""
