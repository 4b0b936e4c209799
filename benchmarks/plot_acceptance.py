"""Draws what `peagle evaluate` measured: AL by K and survival by depth. Needs matplotlib (extra `train`).

    python -m benchmarks.plot_acceptance DIR/evaluation.json

The PNG lies beside the file, under the same name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from peagle.evaluate import LOOPING


def plot_acceptance(document: dict[str, Any], path: Path) -> None:
    """A row a set of answers, AL by K on the left, survival by depth on the right.

    Bands: 95% around all answers pooled. Dashed: the second head, all answers pooled.
    """
    sets, heads = document["sets"], [head["kind"] for head in document["heads"]]
    figure = Figure(figsize=(10.4, 4.2 * len(sets)), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    for row, answers in enumerate(sets):
        panels = [figure.add_subplot(len(sets), 2, 2 * row + column + 1) for column in range(2)]
        for key, axes in zip(("acceptance_length", "survival"), panels, strict=True):
            curves = [(name, "-", group) for name, group in answers["groups"].items()]
            curves += [(name, "--", group) for name, group in answers.get("against", {}).items() if name == "all"]
            for name, line, group in curves:
                if not group["num_answers"] or name.endswith((f" {LOOPING}", f" non-{LOOPING}")):
                    continue  # a category's looping share is left to the table
                values, bounds = group[key], group.get(f"{key}_95")
                if isinstance(values, dict):  # AL is keyed by K
                    values, bounds = list(values.values()), bounds and list(bounds.values())
                depths, color = range(1, len(values) + 1), "black" if name == "all" else None
                label = f"{name} ({group['num_answers']})" if line == "-" else f"{name}, {heads[-1]}"
                axes.plot(depths, values, line, color=color, lw=2.2 if name == "all" else 1.1, label=label)
                if name == "all" and bounds:
                    low, high = zip(*bounds, strict=True)
                    axes.fill_between(depths, low, high, color="0.5", alpha=0.25, lw=0)
            axes.grid(alpha=0.3)
            axes.set_title(f"{Path(answers['answers']).name}, temperature {answers['temperature']:g}")
        panels[0].set(xlabel="K (draft tokens)", ylabel="AL (tokens a step, bonus token counted)")
        panels[0].legend(fontsize=7, ncols=2, title=heads[0], title_fontsize=8, loc="upper left")
        panels[1].set(xlabel="depth", ylabel="survival (share of steps)", ylim=(0, 1))
    figure.savefig(path)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    plot_acceptance(json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".png"))
