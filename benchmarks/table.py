"""Markdown tables from result files.

    python -m benchmarks.table FILE.json [FILE2.json ...]

Reads what `benchmarks.ablation table`, `peagle.evaluate` and `benchmarks.stock_acceptance` wrote, each known by its keys.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

TABLE_DEPTHS = (3, 5, 7)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """First column left, the rest right; floats with three decimals, None as a dash."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def acceptance_cells(groups: dict[str, Any], group: str, depths: Sequence[int] = TABLE_DEPTHS) -> list[float | None]:
    """AL of one group at each K; None where the head drafts fewer tokens or the group is absent."""
    lengths = groups.get(group, {}).get("acceptance_length", {})
    return [lengths.get(str(k)) for k in depths]


def ablation_table(document: dict[str, Any]) -> str:
    """A row a run: AL by group, steps and speed; a run that failed says so. Runs that never began stand below."""
    groups = ("all", "humaneval", "non-looping", "looping")
    header = ["run", "overrides", *(f"{group} K={k}" for group in groups for k in TABLE_DEPTHS)]
    header += ["steps", "minutes", "tokens/s"]
    rows = []
    for name, run in document["runs"].items():
        what = "`" + " ".join(run["overrides"]) + "`" if run["overrides"] else ""
        if run["status"] == "waiting":
            continue
        if run["status"] != "finished":
            rows.append([name, f"{what} {run['status']}", *[None] * (len(header) - 2)])
            continue
        lengths = [cell for group in groups for cell in acceptance_cells(run["groups"], group)]
        rows.append([name, what, *lengths, run["num_steps"], run["minutes"], round(run["tokens_per_s"] or 0) or None])
    waiting = [name for name, run in document["runs"].items() if run["status"] == "waiting"]
    return markdown(header, rows) + (f"\n\nNot run: {', '.join(waiting)}." if waiting else "")


def evaluation_table(document: dict[str, Any]) -> str:
    """Of each set of answers a row a group: AL at K = 1..K_max, then, for two heads, the ratio of AL."""
    tables = []
    for one in document["sets"]:
        depths = [str(k) for k in range(1, document["num_depths"] + 1)]
        ratios = one.get("ratios", {})
        compared = list(ratios["all"]["ratio"]) if ratios else []
        header = ["group", "answers", *(f"K={k}" for k in depths), *(f"ratio K={k}" for k in compared)]
        rows = []
        for name, figures in one["groups"].items():
            lengths = figures.get("acceptance_length", {})
            cells = [ratios[name]["ratio"][k] if name in ratios else None for k in compared]
            rows.append([name, figures["num_answers"], *(lengths.get(k) for k in depths), *cells])
        title = f"{one['answers']}, temperature {one['temperature']:g}: "
        title += " over ".join(head["kind"] for head in document["heads"])
        tables.append(f"{title}\n\n{markdown(header, rows)}")
    return "\n\n".join(tables)


def comparison_table(document: dict[str, Any]) -> str:
    """A row a K and group of `benchmarks.stock_acceptance`: the engine beside the walk."""
    columns = ("engine", "tokens_per_step", "offline", "ratio", "share_identical")
    rows = [[row["group"], row["k"], *(row[name] for name in columns)] for row in document["comparison"]]
    return markdown(["group", "K", *columns], rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "runs": ablation_table,
    "comparison": comparison_table,
    "sets": evaluation_table,
}


def render(path: Path) -> str:
    """The table of one result file. Raises ValueError for a file of no known kind."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for key, table in TABLES.items():
        if document.get(key):
            return table(document)
    raise ValueError(f"{path}: no table for it; expected one of the keys {', '.join(TABLES)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args().results:
        print(f"{path}\n\n{render(path)}\n")


if __name__ == "__main__":
    main()
