"""Figures of an evaluation. Needs matplotlib (extra `train`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PANEL_INCHES = (5.2, 4.2)
DPI = 100
POOLED = ("all", "non-looping", "looping")
LINES = ("-", "--")


def curves(groups: dict[str, Any]) -> list[str]:
    """Groups worth a line: the pooled ones, then the workloads; a workload's looping share is left to the table."""
    walked = [name for name, one in groups.items() if one["num_answers"]]
    pooled = [name for name in POOLED if name in walked]
    return [*pooled, *(name for name in walked if name not in POOLED and not name.endswith(POOLED[1:]))]


def plot_acceptance(document: dict[str, Any], path: str | Path) -> Path:
    """Writes a PNG of the document of `peagle.evaluate`: a row a set of answers, AL by K on the left, survival by depth
    on the right, bands of 95% around the pooled group; with a second head (dashed) the ratio of AL below.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sets, heads = document["sets"], [head["kind"] for head in document["heads"]]
    compared = [one for one in sets if one.get("ratios")]
    num_rows = len(sets) + len(compared)
    figure = Figure(figsize=(2 * PANEL_INCHES[0], num_rows * PANEL_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, 2, squeeze=False)
    for row, one in enumerate(sets):
        title = f"{Path(one['answers']).name}, temperature {one['temperature']:g}"
        _lengths(axes[row][0], one, heads, title)
        _survival(axes[row][1], one)
    for row, one in enumerate(compared, start=len(sets)):
        _ratios(axes[row][0], one, heads)
        axes[row][1].axis("off")
    figure.savefig(path, dpi=DPI)
    return Path(path)


def _colors(names: list[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    greys = dict(zip(POOLED, ("black", "0.35", "0.6"), strict=True))
    workloads = [name for name in names if name not in greys]
    return greys | {name: colormaps["tab20"](index % 20) for index, name in enumerate(workloads)}


def _lengths(axes: Any, one: dict[str, Any], heads: list[str], title: str) -> None:
    names = curves(one["groups"])
    colors = _colors(names)
    for groups, line in zip((one["groups"], one.get("against", {})), LINES, strict=True):
        for name in curves(groups):
            figures = groups[name]
            depths = [int(k) for k in figures["acceptance_length"]]
            width = 2.2 if name == "all" else 1.1
            label = f"{name} ({figures['num_answers']})" if line == LINES[0] else None
            axes.plot(depths, figures["acceptance_length"].values(), line, color=colors[name], lw=width, label=label)
            if name == "all" and "acceptance_length_95" in figures:
                axes.fill_between(
                    depths, *zip(*figures["acceptance_length_95"].values(), strict=True), alpha=0.15, lw=0
                )
    axes.set(xlabel="K (draft tokens)", ylabel="AL (tokens a step, bonus token counted)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, title=" - -  ".join(heads) if len(heads) > 1 else heads[0], title_fontsize=8)


def _survival(axes: Any, one: dict[str, Any]) -> None:
    colors = _colors(curves(one["groups"]))
    for groups, line in zip((one["groups"], one.get("against", {})), LINES, strict=True):
        for name in curves(groups):
            survival = groups[name]["survival"]
            depths = range(1, len(survival) + 1)
            axes.plot(depths, survival, line, color=colors[name], lw=2.2 if name == "all" else 1.1)
            if name == "all" and "survival_95" in groups[name]:
                axes.fill_between(depths, *zip(*groups[name]["survival_95"], strict=True), alpha=0.15, lw=0)
    axes.set(xlabel="depth", ylabel="survival (share of steps)", ylim=(0, 1), title="survival at K_max")
    axes.grid(alpha=0.3)


def _ratios(axes: Any, one: dict[str, Any], heads: list[str]) -> None:
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
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axes.set(ylabel=f"AL {heads[0]} / {heads[1]}", title="ratio of AL, paired 95% intervals")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7)
