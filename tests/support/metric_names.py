"""The table of metrics, and what a text of Prometheus' format holds, in one form."""

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import FAMILIES, PREFIX


def documented() -> dict[str, set[str]]:
    """Labels by metric, as the table has them. A histogram is named without `_bucket`, `_sum` and `_count`."""
    return {
        f"{PREFIX}{name}{'_total' if family.kind == 'counter' else ''}": set(family.labels.split())
        for name, family in FAMILIES.items()
    }


def exported(text: str) -> dict[str, set[str]]:
    """Labels by metric of a page, in the same form; of a metric without samples, none."""
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] |= {label for sample in family.samples for label in sample.labels if label != "le"}
    return dict(found)
