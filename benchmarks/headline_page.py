"""A page of what `benchmarks.headline` measured: FILE.md beside FILE.json.

    python -m benchmarks.headline_page FILE.json [--title TEXT] [--note TEXT ...]

The title, and notes (why a cell is lost), are kept in the JSON. Figures are means over the repeats, with the least and
greatest. The best stock arm of a cell is the one of the highest mean; ratios to it are taken repeat by repeat.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import markdown

OURS = ("ours-", "remote-")
WITHOUT_DRAFTER, BASE = "ours-0", "none"
TTFT_LIMIT = 1.05
"""Of median TTFT over that of `vllm serve` without speculation: more is named."""

Row = dict[str, Any]


class Table:
    """One set of prompts at one temperature: rows by arm and number of requests, one a repeat."""

    def __init__(self, prompts: str, temperature: float, rows: Sequence[Row]) -> None:
        self.name = f"{prompts}, " + (f"temperature {temperature:g}" if temperature else "greedy")
        self.rows = rows
        self.arms = list(dict.fromkeys(row["arm"] for row in rows))
        self.counts = sorted({row["num_requests"] for row in rows})

    def values(self, arm: str, count: int, key: str) -> list[Any]:
        """In the order of the repeats, where the arm has them."""
        found = [row for row in self.rows if (row["arm"], row["num_requests"]) == (arm, count) and key in row]
        return [row[key] for row in sorted(found, key=lambda row: int(row["repeat"]))]

    def mean(self, arm: str, count: int, key: str) -> float | None:
        values = self.values(arm, count, key)
        return sum(values) / len(values) if values else None

    def best_stock(self, count: int) -> str | None:
        """Arm of the highest mean output tokens/s among those that are not ours."""
        stock = {arm: self.mean(arm, count, "output_throughput") for arm in self.arms if not arm.startswith(OURS)}
        known = {arm: value for arm, value in stock.items() if value is not None}
        return max(known, key=lambda arm: known[arm]) if known else None

    def ours(self) -> list[str]:
        return [arm for arm in self.arms if arm.startswith(OURS) and arm != WITHOUT_DRAFTER]

    def ratios(self, arm: str, other: str, count: int, key: str = "output_throughput") -> list[float]:
        """Repeat by repeat."""
        pairs = zip(self.values(arm, count, key), self.values(other, count, key), strict=False)
        return [one / base for one, base in pairs if base]


def tables(document: dict[str, Any]) -> list[Table]:
    kinds = dict.fromkeys((row["prompts"], row["temperature"]) for row in document["rows"])
    return [
        Table(*kind, [row for row in document["rows"] if (row["prompts"], row["temperature"]) == kind])
        for kind in kinds
    ]


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Mean, and the least and greatest of several."""
    if not values:
        return "-"
    mean = form(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({form(min(values))} to {form(max(values))})"


def page(document: dict[str, Any]) -> str:
    """The whole page in Markdown."""
    made, options = document["conditions"], document["options"]
    hardware, num_repeats = made["hardware"], len({row["repeat"] for row in document["rows"]})
    machine = hardware.get("gpu") or f"{hardware.get('num_cpus')} CPU cores ({hardware.get('cpu')})"
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    parts = [
        f"# {document.get('title', 'The service against `vllm serve`, over HTTP')}",
        f"{machine}; {made['date'][:10]}, commit {made['commit']}; {versions}. Load: `vllm bench serve`, streamed, "
        f"closed loop, {num_repeats} of {options['repeats']} repeats, arms in turns. Made by\n\n    {made['command']}",
    ]
    for found in tables(document):
        parts += [f"## {found.name}", *sections(found)]
    parts += ["## Where it loses", "\n".join(f"- {line}" for line in losses(tables(document))) or "Nowhere."]
    if document.get("notes"):
        parts += ["## Notes", "\n".join(f"- {note}" for note in document["notes"])]
    return "\n\n".join(parts) + "\n"


def sections(found: Table) -> Iterable[str]:
    """Speed, ratios, latency and acceptance."""
    head = [str(count) for count in found.counts]

    def lines(key: str, form: Callable[[float], str]) -> list[list[str]]:
        shown = [arm for arm in found.arms if any(found.values(arm, count, key) for count in found.counts)]
        return [[arm, *(span(found.values(arm, count, key), form) for count in found.counts)] for arm in shown]

    yield markdown(["output tokens/s at requests", *head], lines("output_throughput", number))
    ratios = []
    for arm in found.ours():
        best = [found.best_stock(count) for count in found.counts]
        cells = [
            f"{span(found.ratios(arm, other, count), '{:.2f}'.format)} of {other}" if other else "-"
            for other, count in zip(best, found.counts, strict=True)
        ]
        ratios.append([f"{arm} over the best stock arm", *cells])
        for base in (BASE, WITHOUT_DRAFTER):
            if base in found.arms:
                over = [span(found.ratios(arm, base, count), "{:.2f}".format) for count in found.counts]
                ratios.append([f"{arm} over {base}", *over])
    if ratios:
        yield markdown(["ratio at requests", *head], ratios)
    for key, title in (
        ("p50_ttft_ms", "median TTFT, ms"),
        ("p99_ttft_ms", "p99 TTFT, ms"),
        ("p50_tpot_ms", "median TPOT, ms"),
    ):
        yield markdown([title, *head], lines(key, "{:.1f}".format))
    drafting = lines("accepted_length", "{:.2f}".format)
    if drafting:
        yield markdown(["AL", *head], drafting)
        yield markdown(["drafts a step", *head], lines("drafts_a_step", "{:.2f}".format))
    if equal := lines("equal_answers", "{:.0%}".format):
        yield markdown(["answers equal to those without speculation", *head], equal)
    if passed := lines("pass_at_1", "{:.0%}".format):
        yield markdown(["HumanEval pass@1", *head], passed)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def losses(found: Sequence[Table]) -> Iterable[str]:
    """Cells where an arm of ours is behind the best stock arm, or its TTFT behind `vllm serve` without speculation."""
    for one in found:
        for arm in one.ours():
            for count in one.counts:
                best = one.best_stock(count)
                ratios = one.ratios(arm, best, count) if best else []
                if ratios and sum(ratios) / len(ratios) < 1:
                    lengths = [one.mean(name, count, "accepted_length") for name in (arm, str(best))]
                    shown = " and ".join("-" if value is None else f"{value:.2f}" for value in lengths)
                    yield (
                        f"{one.name}, {count} requests: {arm} has {span(ratios, '{:.2f}'.format)} of {best}'s tokens/s "
                        f"(AL {shown})"
                    )
                ttft = one.ratios(arm, BASE, count, "p50_ttft_ms")
                if ttft and sum(ttft) / len(ttft) > TTFT_LIMIT:
                    shown = span(ttft, "{:.2f}".format)
                    yield f"{one.name}, {count} requests: {arm}'s median TTFT is {shown} of {BASE}'s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--title")
    parser.add_argument("--note", nargs="+", default=[], help="sentences; those given take the place of earlier ones")
    options = parser.parse_args()
    document = json.loads(options.file.read_text(encoding="utf-8"))
    given = {key: value for key, value in (("title", options.title), ("notes", options.note)) if value}
    if given:
        document |= given
        options.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    options.file.with_suffix(".md").write_text(page(document), encoding="utf-8")
    print(options.file.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
