"""Pictures of figures, drawn with matplotlib, which is imported only when there is something to draw.

The same figures give the same file, byte for byte, with the same version of matplotlib.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_jax.bench.device_trace import group_sums
from qwen35_jax.errors import UserInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

COLOURS = {"ours": "#c23b22", "vLLM": "#2f6db5", "floor": "#7f7f7f"}
"""Colours of the series that every picture shows alike."""

NOT_PROFILED = "not profiled"
"""In place of the groups of a step whose kernels are not known."""

GROUP_COLOURS = {
    "GEMMs": "#2f6db5",
    "GDN": "#c23b22",
    "attention": "#e0a030",
    "sampling": "#7a52a1",
    "glue": "#4c9f70",
    "copies": "#8c6d46",
    "other": "#666666",
    "idle": "#dddddd",
    NOT_PROFILED: "#dddddd",
}
"""Colours of the groups of kernels of a step, in the order in which a bar shows them."""

_PANEL_INCHES = (5.0, 3.6)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: over it.
        x_label: under it.
        y_label: beside it.
        series: points by label; x is a number or a date.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float | datetime.datetime, float]]]


@dataclasses.dataclass(frozen=True)
class StepBar:
    """A step by its groups of kernels.

    Attributes:
        label: beside the bar.
        shares: percent of the measured step by group of :data:`GROUP_COLOURS`.
        floor: percent of the measured step; None if unknown.
    """

    label: str
    shares: Mapping[str, float]
    floor: float | None = None


def step_bar(
    cell: str, step_ms: float, parts: Mapping[str, float], idle_ms: float | None, floor_ms: float | None
) -> StepBar:
    """A step as a bar.

    Args:
        cell: its name.
        step_ms: milliseconds of it.
        parts: milliseconds by part of :data:`~qwen35_jax.bench.device_trace.PARTS`; empty where it was not profiled.
        idle_ms: milliseconds in which no kernel ran; below zero counts as none, None is left out.
        floor_ms: of the step; None if unknown.
    """
    groups = group_sums(parts) if parts else {NOT_PROFILED: step_ms}
    if parts and idle_ms is not None:
        groups["idle"] = max(0.0, idle_ms)
    shares = {group: 100 * ms / step_ms for group, ms in groups.items()}
    label = f"{cell.partition('/')[0]} {cell.split('/')[-1]}\n{step_ms:.2f} ms"
    return StepBar(label, shares, None if floor_ms is None else 100 * floor_ms / step_ms)


def draw_lines(path: Path, panels: Sequence[Panel], *, logarithmic: bool = False, columns: int = 3) -> None:
    """Lines with markers, a panel beside the other; empty series are left out.

    Args:
        path: the PNG to write.
        panels: at least one.
        logarithmic: whether both axes are (base 2 along x, with plain numbers at the points).
        columns: most panels side by side.

    Raises:
        UserInputError: matplotlib is not installed.
    """
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        for label, points in panel.series.items():
            if points:
                style = "--" if label == "floor" else ":" if "@" in label else "-"
                axes.plot(
                    *zip(*points, strict=True), style, marker="o", markersize=4, label=label, color=_colour(label)
                )  # type: ignore[arg-type]
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.grid(True, alpha=0.3)
        if logarithmic:
            _plain_logarithmic(axes, panel)
        if any(isinstance(x, datetime.datetime) for points in panel.series.values() for x, _ in points):
            axes.tick_params(axis="x", rotation=30, labelsize=8)
        if len(panel.series) > 1:
            axes.legend(fontsize=8)
    _save(figure, path)


def draw_bars(
    path: Path, title: str, x_label: str, bars: Mapping[str, Mapping[str, float]], *, limit: float | None = None
) -> None:
    """Horizontal bars from top to bottom, several series to a label.

    Args:
        path: the PNG to write.
        title: over the axes.
        x_label: under them.
        bars: value by series, by label.
        limit: end of the axis, with a line drawn there.

    Raises:
        UserInputError: matplotlib is not installed.
    """
    found = dict.fromkeys(name for values in bars.values() for name in values)
    series = [*(name for name in COLOURS if name in found), *(name for name in found if name not in COLOURS)]
    height = 0.8 / len(series)
    figure = _figure(8.0, 1.2 + 0.28 * len(bars) * max(1, len(series) * 0.7))
    axes = figure.add_subplot()
    for index, name in enumerate(series):
        points = [(at, values[name]) for at, values in enumerate(bars.values()) if name in values]
        places = [at + (index - (len(series) - 1) / 2) * height for at, _ in points]
        axes.barh(places, [value for _, value in points], height * 0.9, label=name, color=_colour(name))
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_xlim(0, limit)
    if len(series) > 1:
        axes.legend(fontsize=8)
    _save(figure, path)


@dataclasses.dataclass(frozen=True)
class Dot:
    """A workload in a roofline.

    Attributes:
        label: beside its marker.
        intensity: operations a byte.
        rate: operations a second, in millions of millions.
    """

    label: str
    intensity: float
    rate: float


def draw_steps(path: Path, title: str, steps: Sequence[StepBar]) -> None:
    """A bar a step, its groups end to end, the floor as a mark; each bar is scaled to its own step.

    Raises:
        UserInputError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(10, 1.4 + 0.45 * len(steps))
    axes = figure.add_subplot()
    lefts = [0.0] * len(steps)
    for group, colour in GROUP_COLOURS.items():
        widths = [step.shares.get(group, 0.0) for step in steps]
        if any(widths):
            axes.barh(range(len(steps)), widths, left=lefts, height=0.7, color=colour, label=group)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    label = "floor"
    for at, step in enumerate(steps):
        if step.floor is not None:
            axes.plot([step.floor, step.floor], [at - 0.42, at + 0.42], color="black", linewidth=2, label=label)
            label = ""  # once in the legend
    axes.set_yticks(range(len(steps)), [step.label for step in steps], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("% of the measured step")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right center", fontsize=8)
    _save(figure, path)


def draw_roofline(
    path: Path, title: str, dots: Mapping[str, Sequence[Dot]], *, tb_s: float, tflop_s: float, note: str = ""
) -> None:
    """Rates against intensities, both logarithmic, under the two roofs of a device; a kind of marker an op.

    Dots of an op that would hide each other share a label.

    Args:
        path: the PNG to write.
        title: over the axes.
        dots: workloads by op; at least one.
        tb_s: the memory's roof, TB/s.
        tflop_s: the products' roof, TFLOP/s.
        note: under the legend.

    Raises:
        UserInputError: matplotlib is not installed.
    """
    figure = _figure(13.0, 8.0)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    every = [dot for found in dots.values() for dot in found]
    ridge = tflop_s / tb_s
    left, right = min(dot.intensity for dot in every) / 1.6, max(ridge, *(dot.intensity for dot in every)) * 3
    low, high = min(dot.rate for dot in every) / 1.6, tflop_s * 2
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.plot([low / tb_s, ridge, right], [low, tflop_s, tflop_s], color="black", linewidth=1.2, zorder=1)
    for number, (op, found) in enumerate(dots.items()):
        axes.plot(
            [dot.intensity for dot in found],
            [dot.rate for dot in found],
            linestyle="none",
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=6,
            color=f"C{number % 10}",
            label=op,
            zorder=3,
        )
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("operations a compulsory byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(True, which="major", alpha=0.3)
    legend = axes.legend(loc="lower right", fontsize=9, title=note or None, title_fontsize=8)
    figure.canvas.draw()  # places are in pixels, which only a laid out figure has
    names = _Names(axes)
    names.avoid_line((low / tb_s, low), (ridge, tflop_s))
    names.avoid_line((ridge, tflop_s), (right, tflop_s))
    names.avoid(legend.get_window_extent())
    for dot in every:
        names.avoid_dot(dot)
    middle = (left * ridge) ** 0.5
    names.put(f"memory: {tb_s:g} TB/s", (middle, middle * tb_s), "black", far=True)
    names.put(f"products: {tflop_s:g} TFLOP/s", (ridge * (right / ridge) ** 0.5, tflop_s), "black")
    for number, found in enumerate(dots.values()):
        for label, place in _together(found, names.pixels):
            names.put(label, place, f"C{number % 10}")
    _save(figure, path)


_MARKERS = "osD^vP*X"
_NEAR = 7.0  # pixels: markers closer than that share a label


def _together(
    dots: Sequence[Dot], pixels: Callable[[tuple[float, float]], tuple[float, float]]
) -> list[tuple[str, tuple[float, float]]]:
    """Labels and places; of dots whose markers lie on each other, those of the first with all labels."""
    groups: list[list[Dot]] = []
    for dot in sorted(dots, key=lambda dot: (dot.intensity, dot.rate)):
        at = pixels((dot.intensity, dot.rate))
        for group in groups:
            if math.dist(at, pixels((group[-1].intensity, group[-1].rate))) < _NEAR:
                group.append(dot)
                break
        else:
            groups.append([dot])
    return [(_joined([dot.label for dot in group]), (group[0].intensity, group[0].rate)) for group in groups]


def _joined(labels: Sequence[str]) -> str:
    """Labels one after the other; the suffix of all of them once."""
    suffixes = {label.partition("@")[2] for label in labels}
    if len(suffixes) > 1 or "" in suffixes:
        return ", ".join(labels)
    return f"{', '.join(label.partition('@')[0] for label in labels)} @{suffixes.pop()}"


class _Names:
    """Names of points, each beside its point where nothing else is, with a thin line to it if that is not close."""

    def __init__(self, axes: Axes):
        self._axes = axes
        self._taken: list[tuple[float, float, float, float]] = []

    def pixels(self, place: tuple[float, float]) -> tuple[float, float]:
        x, y = self._axes.transData.transform(place)
        return float(x), float(y)

    def avoid(self, box: Bbox) -> None:
        self._taken.append((box.x0, box.y0, box.x1, box.y1))

    def avoid_dot(self, dot: Dot) -> None:
        x, y = self.pixels((dot.intensity, dot.rate))
        self._taken.append((x - 5, y - 5, x + 5, y + 5))

    def avoid_line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        (x0, y0), (x1, y1) = self.pixels(start), self.pixels(end)
        steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / 4))
        for step in range(steps + 1):
            x, y = x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps
            self._taken.append((x - 3, y - 3, x + 3, y + 3))

    def put(self, words: str, place: tuple[float, float], colour: str, *, far: bool = False) -> None:
        """Writes the name at the nearest free place; nowhere free, at the nearest of all."""
        text = self._axes.text(*place, words, fontsize=8, color=colour, zorder=4)
        text.set_in_layout(False)
        size = text.get_window_extent()
        width, height = size.width, size.height
        x, y = self.pixels(place)
        box = self._free(x, y, width, height, 24.0 if far else 9.0)
        left, low = self._axes.transData.inverted().transform((box[0], box[1]))
        text.set_position((float(left), float(low)))
        text.set_verticalalignment("bottom")
        self._taken.append(box)
        # To the nearest point of the text.
        near = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
        if math.dist(near, (x, y)) > 14:
            ends = self._axes.transData.inverted().transform([(x, y), near])
            self._axes.plot(ends[:, 0], ends[:, 1], color=colour, linewidth=0.6, alpha=0.7, zorder=2)

    def _free(self, x: float, y: float, width: float, height: float, least: float) -> tuple[float, float, float, float]:
        frame = self._axes.get_window_extent()
        first = None
        for radius in range(int(least), 400, 4):
            for angle in range(0, 360, 15):  # to the right first, then upwards and on
                dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
                left = x + radius * dx - width * (1 - dx) / 2
                low = y + radius * dy - height * (1 - dy) / 2
                box = (left, low, left + width, low + height)
                first = first or box
                inside = frame.x0 < box[0] and box[2] < frame.x1 and frame.y0 < box[1] and box[3] < frame.y1
                if inside and not any(
                    box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
                    for other in self._taken
                ):
                    return box
        assert first is not None
        return first


def check() -> None:
    """Raises: UserInputError: matplotlib is not installed."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserInputError("pictures need matplotlib: pip install '.[bench]', or ask for none") from error


def _figure(width: float, height: float) -> Figure:
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _colour(label: str) -> str | None:
    """Of a series; variants (``ours@bf16state``) have that of what they vary."""
    return COLOURS.get(label.partition("@")[0])


def _plain_logarithmic(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    def plain(value: float, _: object) -> str:
        return f"{value:g}"

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted({float(x) for points in panel.series.values() for x, _ in points}))  # type: ignore[arg-type]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(plain))
        axis.set_minor_formatter(NullFormatter())


def _save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    except OSError as error:
        raise UserInputError(f"{path}: cannot write the picture: {error.strerror or error}") from error
