"""Makes the tables and pictures of measured figures from the results files.

    python scripts/bench_report.py            # writes them
    python scripts/bench_report.py --check    # exits with 1 when the documents are not what the results say

Reads ``benchmarks/results/*.json`` (the newest record of each cell counts), ``benchmarks/peers.json`` and the floors of
the model, and replaces what stands between ``<!-- bench:begin NAME -->`` and ``<!-- bench:end -->`` in the documents.
"""

import dataclasses
import difflib
import functools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from pallas_kernels import registry
from pallas_kernels.spec import specs_of
from qwen35_jax.bench import floors, pictures
from qwen35_jax.bench.known import FLOOR_DEVICE, Known, chunk_floors_ms, load_known, part_floors_ms
from qwen35_jax.bench.pictures import Panel
from qwen35_jax.bench.records import Record, parse_cell
from qwen35_jax.bench.report import SECTIONS
from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.errors import UserInputError

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS: Mapping[str, frozenset[str]] = {
    "README.md": frozenset({"summary"}),
    "benchmarks/README.md": frozenset(SECTIONS) - {"summary"},
}
"""Documents under the root, and the sections that each must have."""
PICTURES = "benchmarks/pictures"
STEPS = "step-"
"""How the names of pictures of steps by their parts begin; a size follows."""
MOST_HISTORIES = 12

_BLOCK = re.compile(r"(<!-- bench:begin (\S+) -->\n)(.*?)(<!-- bench:end -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- bench:(begin|end)")


def fill(text: str, name: str, known: Known, drawn: Mapping[str, Sequence[str]]) -> str:
    """A document with its sections made anew.

    Args:
        text: the document.
        name: its path under the root.
        known: figures.
        drawn: names of the pictures of a section.

    Raises:
        UserInputError: a section is missing, unknown, there twice, or a marker has no partner.
    """
    blocks = [match[2] for match in _BLOCK.finditer(text)]
    if len(_MARKER.findall(text)) != 2 * len(blocks) or any(_MARKER.search(m[3]) for m in _BLOCK.finditer(text)):
        raise UserInputError(f"{name}: a bench:begin marker without its bench:end, or the other way round")
    wanted = DOCUMENTS[name]
    for block in blocks:
        if block not in wanted:
            raise UserInputError(f"{name}: unknown section {block!r} (known here: {', '.join(sorted(wanted))})")
        if blocks.count(block) > 1:
            raise UserInputError(f"{name}: section {block!r} is there twice")
    if missing := sorted(wanted - set(blocks)):
        raise UserInputError(f"{name}: no section {missing[0]!r} (<!-- bench:begin {missing[0]} -->)")
    depth = name.count("/")
    results = "results" if depth else "benchmarks/results"

    def section(match: re.Match[str]) -> str:
        body = SECTIONS[match[2]](known, results)
        for picture in drawn.get(match[2], ()):
            body += f"\n\n![{picture}]({'pictures' if depth else PICTURES}/{picture}.png)"
        return f"{match[1]}\n{body}\n\n{match[4]}"

    return _BLOCK.sub(section, text)


def plan_pictures(known: Known) -> dict[str, Callable[[pathlib.Path], None]]:
    """How to draw the picture of every section that has one, for the sections that have figures."""
    planned: dict[str, Callable[[pathlib.Path], None]] = {}
    if panels := decode_panels(known):
        planned["decode"] = lambda path: pictures.draw_lines(path, panels, logarithmic=True)
    for size, records in profiled_steps(known).items():
        planned[f"{STEPS}{size}"] = functools.partial(draw_steps, size=size, records=records)
    if prefills := prefill_panels(known):
        planned["prefill"] = lambda path: pictures.draw_lines(path, prefills, logarithmic=True)
    if longs := long_panels(known):
        planned["long"] = lambda path: pictures.draw_lines(path, longs)
    if offline := offline_bars(known):
        planned["offline"] = lambda path: pictures.draw_bars(path, "Whole jobs", "output tokens a second", offline)
    if kernels := kernel_bars(known):
        title = "Kernels: share of the ceiling that bounds them"
        planned["kernels"] = lambda path: pictures.draw_bars(path, title, "per cent", kernels, limit=100)
    if dots := roofline_dots(known):
        planned["roofline"] = lambda path: draw_roofline(path, known, dots)
    if drifts := drift_panels(known):
        planned["drift"] = lambda path: pictures.draw_lines(path, drifts, logarithmic=True)
    if histories := history_panels(known):
        planned["history"] = lambda path: pictures.draw_lines(path, histories)
    return planned


def profiled_steps(known: Known) -> dict[str, list[Record]]:
    """The newest profiled record of every decode step and prefill, by size."""
    found: dict[str, list[Record]] = {}
    for cell in (*known.cells("decode"), *known.cells("prefill")):
        if record := known.profiled(cell):
            found.setdefault(parse_cell(cell).subject, []).append(record)
    return found


def draw_steps(path: pathlib.Path, size: str, records: Sequence[Record]) -> None:
    """Where the time of the steps of a size goes."""
    bars = []
    for record in records:
        metrics, floor = record.metrics, part_floors_ms(record).get("step")
        bars.append(pictures.step_bar(record.cell, metrics["step_ms"], metrics["parts"], metrics.get("idle_ms"), floor))
    devices = ", ".join(dict.fromkeys(record.device for record in records))
    pictures.draw_steps(path, f"{size.upper()} on {devices}", bars)


def decode_panels(known: Known) -> list[Panel]:
    """Milliseconds a step against rows, a panel a size that was measured."""
    sizes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cell in known.cells("decode"):
        parsed = parse_cell(cell)
        series = sizes.setdefault(parsed.subject, {"ours": [], "vLLM": [], "floor": []})
        rows = float(parsed.load or 0)
        if good := known.valid(cell):
            label = "@".join(["ours", *parsed.suffixes])
            series.setdefault(label, []).append((rows, good.metrics["step_ms"]))
        if not parsed.suffixes:
            if peer := known.peer(cell, "vllm"):
                series["vLLM"].append((rows, peer.metrics["step_ms"]))
            if floor := known.floor(cell):
                series["floor"].append((rows, floor[0]))
    return [
        Panel(f"{size.upper()} decode step", "rows", "ms", series)
        for size, series in sizes.items()
        if any(points for label, points in series.items() if label.startswith("ours"))
    ]


def prefill_panels(known: Known) -> list[Panel]:
    """Milliseconds of a step of prompts against its tokens, a panel a size of which several numbers were measured."""
    sizes: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cell in known.cells("prefill"):
        parsed, good = parse_cell(cell), known.valid(cell)
        if good and parsed.load and "step_ms" in good.metrics:
            series = sizes.setdefault(parsed.subject, {"ours": [], "floor": []})
            label = "@".join(["ours", *parsed.suffixes])
            series.setdefault(label, []).append((parsed.load, good.metrics["step_ms"]))
            if not parsed.suffixes and (floor := known.floor(cell)):
                series["floor"].append((parsed.load, parsed.load / floor[0] * 1e3))
    return [
        Panel(f"{size.upper()} prefill step", "tokens", "ms", series)
        for size, series in sizes.items()
        if len(series["ours"]) > 1
    ]


def long_panels(known: Known) -> list[Panel]:
    """Milliseconds of a chunk against the tokens before it, a panel a long prompt."""
    panels = []
    for cell in known.cells("long"):
        if good := known.valid(cell):
            starts = [start for start, _ in good.settings["chunks"]]
            series = {
                "ours": list(zip(starts, good.metrics["chunk_ms"], strict=True)),
                "floor": list(zip(starts, chunk_floors_ms(good), strict=False)),
            }
            panels.append(Panel(cell.removeprefix("long/"), "tokens before the chunk", "ms a chunk", series))
    return panels


def offline_bars(known: Known) -> dict[str, dict[str, float]]:
    """Output tokens a second of every job that was measured."""
    bars = {}
    for cell in known.cells("offline"):
        if good := known.valid(cell):
            values = {"ours": good.metrics["output_tok_s"]}
            if peer := known.peer(cell, "vllm"):
                values["vLLM"] = peer.metrics["output_tok_s"]
            if floor := known.floor(cell):
                values["floor"] = floor[0]
            bars[cell.removeprefix("offline/")] = values
    return bars


def kernel_bars(known: Known) -> dict[str, dict[str, float]]:
    """Share of the ceiling of every kernel that was measured, in per cent."""
    shares = {}
    for cell in known.cells("kernel"):
        good = known.valid(cell)
        if good and (share := good.metrics.get("share_of_ceiling")) is not None:
            shares[cell.removeprefix("kernel/")] = {"ours": 100 * share}
    return shares


def measured_kernels(known: Known) -> dict[str, list[Record]]:
    """Kernels that were measured on the device whose ceilings are known, by op."""
    found: dict[str, list[Record]] = {}
    for cell in known.cells("kernel"):
        if (good := known.valid(cell)) and (good.device, good.device_count) == (FLOOR_DEVICE, 1):
            found.setdefault(parse_cell(cell).subject, []).append(good)
    return found


def roofline_dots(known: Known) -> dict[str, list[pictures.Dot]]:
    """Rate against intensity of the kernels that were measured, by op.

    Intensity is that of the spec (its operations over its compulsory bytes), the rate is the spec's operations in the
    record's time. Ops whose specs count no operations, and ops and specs that are no more, are left out.
    """
    ops = {op.name for op in registry.all_ops()}
    dots: dict[str, list[pictures.Dot]] = {}
    for op, records in measured_kernels(known).items():
        specs = specs_of(op) if op in ops else {}
        for record in records:
            name = record.cell.split("/", 2)[2]
            if name in specs and (operations := specs[name].flops()):
                rate = operations / record.metrics["us"] / 1e6
                dot = pictures.Dot(name, operations / specs[name].compulsory_bytes(), rate)
                dots.setdefault(op, []).append(dot)
    return dots


def draw_roofline(path: pathlib.Path, known: Known, dots: Mapping[str, Sequence[pictures.Dot]]) -> None:
    """The kernels under the roofs; the size of their model, if it is one, is in the title instead of the labels."""
    title = f"Kernels under the roofs of one {FLOOR_DEVICE}"
    sizes = {dot.label.partition("-")[0] for found in dots.values() for dot in found}
    if len(sizes) == 1:
        title = f"{title}, shapes of {sizes.pop().upper()}"
        dots = {
            op: [dataclasses.replace(dot, label=dot.label.partition("-")[2]) for dot in found]
            for op, found in dots.items()
        }
    without = [op for op in measured_kernels(known) if op not in dots]
    note = f"operations not counted: {', '.join(without)}" if without else ""
    ceilings = {"tb_s": floors.H200.bytes_per_s / 1e12, "tflop_s": floors.H200.flops_per_s / 1e12}
    pictures.draw_roofline(path, title, dots, note=note, **ceilings)


def drift_panels(known: Known) -> list[Panel]:
    """Relative errors of states and outputs against the step, a panel a cell."""
    panels = []
    for cell in known.cells("drift"):
        if good := known.valid(cell):
            series = {
                f"{dtype}, {what}": list(zip(good.metrics["steps"], curves[what], strict=True))
                for dtype, curves in good.metrics["curves"].items()
                for what in ("state", "output")
            }
            panels.append(Panel(cell.removeprefix("drift/"), "decode step", "relative error", series))
    return panels


def history_panels(known: Known) -> list[Panel]:
    """The main figure against the date, of the cells with the most records; kernels come last."""
    found = []
    for (cell, metric), records in sorted(known.series.items()):
        points = [(r.when, r.metrics[metric]) for r in records if not r.faults()]
        if len(points) > 1:
            found.append((cell.startswith("kernel/"), -len(points), Panel(cell, "", metric, {"ours": points})))
    found.sort(key=lambda item: item[:2])
    return [panel for *_, panel in found[:MOST_HISTORIES]]


def report(root: pathlib.Path, *, check: bool, draw: bool) -> list[str]:
    """Make (or with ``check`` compare) documents and pictures.

    Returns:
        Files that were changed, or that differ; with ``check`` as diffs.

    Raises:
        UserInputError: a results file, peers.json or a document is wrong, or matplotlib is missing.
    """
    known = load_known(root / "benchmarks/results", root / "benchmarks/peers.json")
    planned = plan_pictures(known)
    drawn = {name: [name] for name in planned if name in SECTIONS}
    if "roofline" in planned:
        drawn["kernels"] = [*drawn.get("kernels", ()), "roofline"]
        drawn["summary"] = ["roofline"]
    drawn["decode"] = [*drawn.get("decode", ()), *(name for name in planned if name.startswith(STEPS))]
    old, new = {}, {}
    for name in DOCUMENTS:
        try:
            old[name] = (root / name).read_text(encoding="utf-8")
        except OSError as error:
            raise UserInputError(f"{name}: {error.strerror or error}") from error
        new[name] = fill(old[name], name, known, drawn)
    different = [name for name in DOCUMENTS if old[name] != new[name]]
    if check:
        absent = [f"{PICTURES}/{name}.png" for name in planned if not (root / PICTURES / f"{name}.png").is_file()]
        return [diff(name, old[name], new[name]) for name in different] + [f"{path} is missing\n" for path in absent]
    if draw:
        for name, drawing in planned.items():
            drawing(root / PICTURES / f"{name}.png")
    for name in different:
        (root / name).write_text(new[name], encoding="utf-8")
    return different + ([f"{PICTURES}/{name}.png" for name in planned] if draw else [])


def diff(name: str, old: str, new: str) -> str:
    """What would change in a document."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name} from the results", n=0)
    return "".join(lines)


def _run(line: CommandLine) -> int:
    found = report(pathlib.Path(line.root or ROOT), check=line.check, draw=line.pictures)
    if line.check and found:
        print("".join(found) + "the documents are not what the results say: run python scripts/bench_report.py")
        return 1
    print("as the results say" if line.check else "\n".join(found) or "nothing changed")
    return 0


def main(argv: Sequence[str]) -> int:
    line = CommandLine("bench_report.py [--check] [--flag=value ...]", __doc__ or "")
    line.group("Report")
    line.define("bool", "check", False, "Write nothing; exit with 1 when something would change.")
    line.define("bool", "pictures", True, "Draw pictures, with matplotlib (the extra bench).")
    line.define("str", "root", None, "A checkout; the default is the one that this script is in.")
    return run_with_flags(line, argv, _run)


if __name__ == "__main__":
    run_command(main)
