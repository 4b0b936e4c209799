"""What is seen of the drafting itself: heads and their acceptance, drafter replicas, and the links to them.

Enters: counts of a target replica, and what drafter replicas and links say of themselves. Leaves: values that an
ingress can ask for, their part of `GET /drafting`, and of `/metrics`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from peagle.vllm.stats import DraftingStats

MAX_NUM_HEADS = 16
"""Heads whose counts a target replica keeps; the one that was live longest ago goes first."""


@dataclass(frozen=True)
class LiveHead:
    """A head that drafts: `index` is its place in `drafter.heads` of the settings, `name` what it was asked for as."""

    index: int
    name: str
    digest: str


@dataclass(frozen=True)
class DrafterReport:
    """One drafter replica. `address`, `key`: where targets connect to it, and with what. `refused`: why the heads that
    the last `user_config` named are not live, "" when they are. `counters`: what its engine and server counted since
    their start."""

    replica: str
    address: str
    heads: tuple[LiveHead, ...]
    refused: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class LinkReport:
    """One target replica's link to a drafter: its state (`peagle.runtime.link`), the path of the data, the last thing
    that went wrong, the mean time of an answer, and what was counted since the link was made."""

    address: str
    state: str
    path: str | None = None
    problem: str = ""
    average_pass_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


class HeadCounts:
    """Verification steps by the head that drafted them, in one target replica.

    Totals by workload are read about once a second: steps between the last reading before a swap and the swap itself
    count for the head that was live at that reading, and drafts of the old head that are still being verified at the
    next reading count for the new one.
    """

    def __init__(self) -> None:
        self._seen: dict[str, DraftingStats] = {}
        self._by_head: dict[str, DraftingStats] = {}

    def add(self, totals: Mapping[str, DraftingStats], heads: Mapping[str, str], default: str) -> None:
        """Take a reading. `heads`: digest by workload, `default` for the others."""
        for workload, stats in totals.items():
            before = self._seen.get(workload, DraftingStats())
            new = stats if stats.num_steps < before.num_steps else stats - before
            head = heads.get(workload, default)
            if new.num_steps:
                self._by_head[head] = self._by_head.pop(head, DraftingStats()) + new
        self._seen = dict(totals)
        while len(self._by_head) > MAX_NUM_HEADS:
            del self._by_head[next(iter(self._by_head))]

    def by_head(self) -> dict[str, DraftingStats]:
        return dict(self._by_head)


def drafting_document(
    by_head: Iterable[Mapping[str, DraftingStats]],
    live: Iterable[str],
    drafters: Iterable[DrafterReport],
    links: Mapping[str, Iterable[LinkReport]],
) -> dict[str, Any]:
    """The part of `GET /drafting` that no policy decides. `by_head`, `links` (by replica): of the target replicas."""
    live = set(live)
    heads = [
        {
            "head": head,
            "is_live": head in live,
            "num_steps": stats.num_steps,
            "acceptance_length": round(stats.acceptance_length, 4) if stats.num_steps else None,
            "survival": [
                round(accepted / drafted, 4)
                for accepted, drafted in zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True)
            ],
        }
        for head, stats in sorted(_summed(by_head, live).items())
    ]
    return {
        "heads": heads,
        "drafters": [
            {
                "replica": one.replica,
                "address": one.address,
                "heads": [{"index": head.index, "name": head.name, "head": head.digest} for head in one.heads],
                "refused": one.refused,
                "counters": dict(one.counters),
            }
            for one in drafters
        ],
        "links": [
            {
                "target": target,
                "drafter": link.address,
                "state": link.state,
                "path": link.path,
                "problem": link.problem,
                "average_pass_s": link.average_pass_s,
                "counters": dict(link.counters),
            }
            for target, found in links.items()
            for link in found
        ],
    }


def head_metrics(by_replica: Mapping[str, Mapping[str, DraftingStats]], model: str) -> list[Metric]:
    """Steps and tokens by the head that drafted them."""
    labels = ("model", "head", "replica")
    steps = CounterMetricFamily("peagle_head_verification_steps", "Steps that verified its drafts.", labels=labels)
    families = [
        CounterMetricFamily(f"peagle_head_{name}", text, labels=(*labels, "depth"))
        for name, text in (
            ("draft_tokens", "Drafts of a head that were verified."),
            ("accepted_tokens", "Drafts of a head that were accepted."),
        )
    ]
    for replica, by_head in by_replica.items():
        for head, stats in by_head.items():
            steps.add_metric([model, head, replica], stats.num_steps)
            for family, by_depth in zip(families, (stats.drafted_by_depth, stats.accepted_by_depth), strict=True):
                for depth, count in enumerate(by_depth, start=1):
                    family.add_metric([model, head, replica, str(depth)], count)
    return [steps, *families]


def drafter_metrics(drafters: Iterable[DrafterReport], links: Mapping[str, Iterable[LinkReport]]) -> list[Metric]:
    """The drafter replicas and the links to them."""
    reports = list(drafters)
    ready = GaugeMetricFamily("peagle_drafter_replicas", "Drafter replicas that answer.")
    ready.add_metric([], len(reports))
    heads = GaugeMetricFamily("peagle_drafter_head", "1: live on this drafter.", labels=("replica", "index", "head"))
    refused = GaugeMetricFamily("peagle_drafter_head_refused", "1: the last user_config was.", labels=("replica",))
    up = GaugeMetricFamily("peagle_link_up", "1: this target drafts over it.", labels=("replica", "drafter"))
    counts: dict[str, CounterMetricFamily] = {}

    def count(prefix: str, labels: Mapping[str, str], counters: Mapping[str, float]) -> None:
        for name, value in sorted(counters.items()):
            family = counts.setdefault(prefix + name, _counter(prefix + name, list(labels)))
            family.add_metric(list(labels.values()), value)

    for one in reports:
        refused.add_metric([one.replica], float(bool(one.refused)))
        for head in one.heads:
            heads.add_metric([one.replica, str(head.index), head.digest], 1)
        count("peagle_drafter_", {"replica": one.replica}, one.counters)
    for target, found in links.items():
        for link in found:
            up.add_metric([target, link.address], float(link.state == "up"))
            count("peagle_link_", {"replica": target, "drafter": link.address}, link.counters)
    return [ready, heads, refused, up, *counts.values()]


def _counter(name: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(name, name.removeprefix("peagle_").replace("_", " "), labels=labels)


def _summed(by_head: Iterable[Mapping[str, DraftingStats]], live: set[str]) -> dict[str, DraftingStats]:
    sums = {head: DraftingStats() for head in live}
    for one in by_head:
        for head, stats in one.items():
            sums[head] = sums.get(head, DraftingStats()) + stats
    return sums
