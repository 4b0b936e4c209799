"""The charts of `docs/`: a value against the number of requests, of files in `benchmarks/results`.

Plain SVG, readable on a light and on a dark page. `benchmarks.pages` writes it.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH, HEIGHT, LEFT, TOP = 380, 220, 58, 64
"""Of one panel's plot, and its place, in px."""

Points = Mapping[int, float]


class Panel(NamedTuple):
    """`arms`: name of a line -> arms of the file, of which the best stands at each number of requests."""

    title: str
    note: str
    file: str
    prompts: str
    arms: Mapping[str, Sequence[str]]


class Chart(NamedTuple):
    """`column`: of a row of the file; `best`: which of several arms' means a line shows."""

    label: str
    unit: str
    column: str
    best: Callable[[Iterable[float]], float]
    panels: tuple[Panel, Panel]


CODER = "Qwen2.5-Coder-1.5B, trained heads"
LLAMA = Panel(
    "Llama-3.1-8B's shape, random weights", "acceptance set; one H200; vLLM 0.32, EAGLE-3 0.33",
    "2026-11-29-headline-8b-shape-h200x2.json", "random",
    {"two layers": ["ours-7h2x4"], "EAGLE-3, K = 3": ["eagle3-3x4"], "four layers": ["ours-7x4"]},
)  # fmt: skip

CHARTS = {
    "speed.svg": Chart(
        "Output tokens per second against concurrent requests", "tokens/s", "output_throughput", max, (
            Panel(
                CODER, "HumanEval, greedy; one H200; vLLM 0.32, the others 0.33",
                "2026-11-29-headline-coder-seven-arms-h200x2.json", "humaneval", {
                    "this service": ["ours-7x4"],
                    "EAGLE-3, best of K = 3, 5, 7": ["eagle3-3x4", "eagle3-5x4", "eagle3-7x4"],
                    "none": ["none"],
                },
            ),
            LLAMA,
        ),
    ),
    "ttft.svg": Chart(
        "Median time to first token against concurrent requests", "ms", "p50_ttft_ms", min, (
            Panel(
                CODER, "HumanEval, greedy; one H200; vLLM 0.32, EAGLE-3 0.33",
                "2026-11-29-headline-coder-front-ends-h200.json", "humaneval",
                {"this service": ["ours-7x4"], "EAGLE-3, K = 5": ["eagle3-5x4"], "one process": ["ours-7"]},
            ),
            LLAMA,
        ),
    ),
}  # fmt: skip
"""By file name."""
STYLE = """
text { font: 12px sans-serif; fill: #24292f } .title { font-size: 14px; font-weight: bold } .small { fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 } .line { fill: none; stroke-width: 2.5 }
.a { stroke: #0969da } .b { stroke: #bc4c00 } .c { stroke: #6e7781 }
circle { stroke: none } circle.a { fill: #0969da } circle.b { fill: #bc4c00 } circle.c { fill: #6e7781 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #30363d }
  .a { stroke: #58a6ff } .b { stroke: #f0883e } .c { stroke: #8b949e }
  circle.a { fill: #58a6ff } circle.b { fill: #f0883e } circle.c { fill: #8b949e }
}
"""


def points_of(chart: Chart, panel: Panel, arms: Sequence[str]) -> Points:
    """Mean of the chart's column over the repeats, by number of requests; of several arms the best at each."""
    rows = json.loads((RESULTS / panel.file).read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row["prompts"] == panel.prompts and row["temperature"] == 0 and row["arm"] in arms]
    found = {}
    for count in sorted({row["num_requests"] for row in rows}):
        here = [row for row in rows if row["num_requests"] == count]
        found[count] = chart.best(
            mean(row[chart.column] for row in here if row["arm"] == arm) for arm in {row["arm"] for row in here}
        )
    return found


def svg(chart: Chart) -> str:
    parts, step = [], WIDTH + 100
    for index, panel in enumerate(chart.panels):
        parts.append(f'<g transform="translate({LEFT + index * step} {TOP})">\n{_panel(chart, panel)}</g>\n')
    size = f'viewBox="0 0 {2 * step + 10} {TOP + HEIGHT + 76}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{chart.label}">\n'
        f"<style>{STYLE}</style>\n{''.join(parts)}</svg>\n"
    )


def _panel(chart: Chart, panel: Panel) -> str:
    lines = {name: points_of(chart, panel, arms) for name, arms in panel.arms.items()}
    counts = sorted({count for line in lines.values() for count in line})
    values = [value for line in lines.values() for value in line.values()]
    low, high = math.floor(math.log10(min(values))), math.log10(max(values) * 1.15)

    def at(count: int, value: float) -> tuple[float, float]:
        across = math.log2(count / counts[0]) / math.log2(counts[-1] / counts[0])
        return WIDTH * across, HEIGHT * (1 - (math.log10(value) - low) / (high - low))

    made = [f'<text class="title" x="0" y="-40">{panel.title}</text>', f'<text x="0" y="-22">{panel.note}</text>']
    for tick in (factor * 10**power for power in range(low, math.ceil(high) + 1) for factor in (1, 2, 5)):
        if math.log10(tick) <= high:
            y = at(counts[0], tick)[1]
            made.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
            made.append(f'<text class="small" x="-8" y="{y + 4:.1f}" text-anchor="end">{tick:,}</text>')
    for count in counts:
        x = at(count, 10**low)[0]
        made.append(f'<text class="small" x="{x:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{count}</text>')
    made.append(f'<text class="small" x="0" y="-6">{chart.unit}</text>')
    made.append(f'<text class="small" x="{WIDTH / 2}" y="{HEIGHT + 36}" text-anchor="middle">requests at a time</text>')
    for place, ((name, line), kind) in enumerate(zip(lines.items(), "abc", strict=False)):
        where = [at(count, value) for count, value in line.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        made.append(f'<polyline class="line {kind}" points="{path}"/>')
        made += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in where]
        x, y = (0, 120, 310)[place], HEIGHT + 56
        made.append(f'<line class="line {kind}" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>')
        made.append(f'<text x="{x + 28}" y="{y}">{name}</text>')
    return "".join(f"{line}\n" for line in made)
