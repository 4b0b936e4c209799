"""The table of metrics in docs/operate.md, and what a text of Prometheus' format holds, in one form."""

import re
from collections import defaultdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

OPERATE = Path(__file__).parents[2] / "docs" / "operate.md"


def documented() -> dict[str, set[str]]:
    """Labels by metric, as the table has them. A histogram is named without `_bucket`, `_sum` and `_count`."""
    found = {}
    for line in OPERATE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and (name := re.fullmatch(r"`(peagle_\w+)`", cells[0])):
            assert name[1] not in found, f"{name[1]} stands in the table twice"
            assert cells[1], f"{name[1]} has no unit"
            found[name[1]] = set(re.findall(r"\w+", cells[2]))
    return found


def exported(text: str) -> dict[str, set[str]]:
    """Labels by metric of a page, in the same form; of a metric without samples, none."""
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] |= {label for sample in family.samples for label in sample.labels if label != "le"}
    return dict(found)
