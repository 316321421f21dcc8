"""The log of a training run (JSON lines) and its picture."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.errors import UserInputError

LOG = "log.jsonl"
PICTURE = "loss.png"


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a log; none where there is no file. A last line that broke off is left out.

    Raises:
        UserInputError: another line is not JSON; names it.
    """
    if not path.exists():
        return []
    records = []
    lines = path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise UserInputError(f"{path}, line {number}: not JSON ({error})") from error
    return records


def write_log(path: pathlib.Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes a whole log."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    partial.replace(path)


def append_log(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Adds a record."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def draw(records: Sequence[Mapping[str, Any]], path: pathlib.Path, *, dpi: int = 100) -> None:
    """Draws loss and accuracy by task over the steps, training as lines and held-out examples as points.

    Raises:
        UserInputError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserInputError("pictures need matplotlib: pip install '.[train]'") from error
    series: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {
        quantity: {kind: collections.defaultdict(list) for kind in ("train", "eval")}
        for quantity in ("nll", "accuracy")
    }
    for record in records:
        if record.get("kind") in ("train", "eval"):
            for quantity in series:
                for task, value in {"all": record[quantity], **record[f"{quantity}_by_task"]}.items():
                    if value is not None:
                        series[quantity][record["kind"]][task].append((record["step"], value))

    figure = Figure(figsize=(13.0, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    titles = {"nll": "Loss of a token (nats)", "accuracy": "Answer tokens predicted right"}
    tasks = list(dict.fromkeys(task for kind in series["nll"].values() for task in kind))
    colours = {task: "black" if task == "all" else f"C{index % 10}" for index, task in enumerate(tasks)}
    for axes, (quantity, kinds) in zip((left, right), series.items(), strict=True):
        for kind, by_task in kinds.items():
            for task, points in by_task.items():
                style = (
                    {"linewidth": 2 if task == "all" else 1} if kind == "train" else {"marker": "o", "markersize": 3}
                )
                axes.plot(
                    *zip(*points, strict=True),
                    linestyle="-" if kind == "train" else "none",
                    color=colours[task],
                    label=task if kind == "train" else None,
                    **style,
                )
        axes.set_title(f"{titles[quantity]}; points: held-out examples", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(True, alpha=0.3)
    left.set_yscale("log")
    if tasks:
        left.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=dpi, metadata={"Software": None})
