"""Pictures of figures, drawn with matplotlib, which is imported only when there is something to draw.

The same figures give the same file, byte for byte, with the same version of matplotlib.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_jax.errors import UserInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"ours": "#c23b22", "vLLM": "#2f6db5", "floor": "#7f7f7f"}
"""Colours of the series that every picture shows alike."""

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


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserInputError("pictures need matplotlib: pip install '.[bench]', or ask for none") from error
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
