"""Figures of an evaluation. Needs matplotlib (extra `train`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PANEL_INCHES = (5.2, 4.2)
DPI = 100
NUM_COLORS = 128
POOLED = ("all", "non-looping", "looping")
LINES = ("-", "--")


def curves(groups: dict[str, Any]) -> list[str]:
    """Groups worth a line: the pooled ones, then the workloads; a workload's looping share is left to the table."""
    walked = [name for name, one in groups.items() if one["num_answers"]]
    pooled = [name for name in POOLED if name in walked]
    return [*pooled, *(name for name in walked if name not in POOLED and not name.endswith(POOLED[1:]))]


def plot_acceptance(document: dict[str, Any], path: str | Path) -> Path:
    """Writes a PNG of the document of `peagle.evaluate`: a row a set of answers, AL by K on the left, survival by depth
    on the right, bands of 95% around all answers pooled; with a second head (dashed, pooled groups only) a row with the
    ratio of AL below each.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    sets, heads = document["sets"], [head["kind"] for head in document["heads"]]
    rows = [(one, part) for one in sets for part in ("lines", "ratios") if part == "lines" or one.get(part)]
    figure = Figure(figsize=(2 * PANEL_INCHES[0], len(rows) * PANEL_INCHES[1]), dpi=DPI, layout="constrained")
    canvas, grid = FigureCanvasAgg(figure), figure.add_gridspec(len(rows), 2)
    for row, (one, part) in enumerate(rows):
        title = f"{Path(one['answers']).name}, temperature {one['temperature']:g}"
        if part == "lines":
            _lengths(figure.add_subplot(grid[row, 0]), one, heads, title)
            _survival(figure.add_subplot(grid[row, 1]), one, title)
        else:
            _ratios(figure.add_subplot(grid[row, :]), one, heads, title)
    canvas.draw()
    # A palette makes the file a third as large.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)
    return Path(path)


def _lines(one: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, figures and line style of each curve: all of the first head, the pooled ones of the second."""
    for name in curves(one["groups"]):
        yield name, one["groups"][name], LINES[0]
    for name in curves(one.get("against", {})):
        if name in POOLED:
            yield name, one["against"][name], LINES[1]


def _colors(names: list[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    greys = dict(zip(POOLED, ("black", "0.35", "0.6"), strict=True))
    workloads = [name for name in names if name not in greys]
    return greys | {name: colormaps["tab20"](index % 20) for index, name in enumerate(workloads)}


def _lengths(axes: Any, one: dict[str, Any], heads: list[str], title: str) -> None:
    colors = _colors(curves(one["groups"]))
    for name, figures, line in _lines(one):
        depths = [int(k) for k in figures["acceptance_length"]]
        label = f"{name} ({figures['num_answers']})" if line == LINES[0] else None
        axes.plot(depths, figures["acceptance_length"].values(), line, color=colors[name], lw=_width(name), label=label)
        if name == "all" and "acceptance_length_95" in figures:
            bounds = zip(*figures["acceptance_length_95"].values(), strict=True)
            axes.fill_between(depths, *bounds, color="0.5", alpha=0.25, lw=0)
    axes.set(xlabel="K (draft tokens)", ylabel="AL (tokens a step, bonus token counted)", title=title, xticks=depths)
    axes.grid(alpha=0.3)
    legend = " (solid), ".join(heads) + (" (dashed)" if len(heads) > 1 else "")
    axes.legend(fontsize=7, ncols=2, title=legend, title_fontsize=8, loc="upper left")


def _survival(axes: Any, one: dict[str, Any], title: str) -> None:
    colors = _colors(curves(one["groups"]))
    for name, figures, line in _lines(one):
        depths = range(1, len(figures["survival"]) + 1)
        axes.plot(depths, figures["survival"], line, color=colors[name], lw=_width(name))
        if name == "all" and "survival_95" in figures:
            axes.fill_between(depths, *zip(*figures["survival_95"], strict=True), color="0.5", alpha=0.25, lw=0)
    axes.set(xlabel="depth", ylabel="survival (share of steps)", ylim=(0, 1), xticks=depths, title=title)
    axes.grid(alpha=0.3)


def _width(name: str) -> float:
    return 2.2 if name == "all" else 1.1


def _ratios(axes: Any, one: dict[str, Any], heads: list[str], title: str) -> None:
    """Ratio of AL by group at each K, with its interval."""
    names = curves(one["groups"])
    depths = list(one["ratios"][names[0]]["ratio"])
    for shift, k in enumerate(depths):
        places = [index + 0.22 * (shift - (len(depths) - 1) / 2) for index in range(len(names))]
        values = [one["ratios"][name]["ratio"][k] for name in names]
        axes.plot(places, values, "o", ms=3, label=f"K = {k}", color=f"C{shift}")
        for place, name in zip(places, names, strict=True):
            if bounds := one["ratios"][name].get("ratio_95", {}).get(k):
                axes.plot([place, place], bounds, "-", lw=1, color=f"C{shift}")
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="ratio of AL", title=f"{title}: {heads[0]} over {heads[1]}, paired 95% intervals")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7)
