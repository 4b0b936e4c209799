"""What is seen of the drafting itself: heads and their acceptance, drafter replicas, and the links to them.

Enters: counts of a target replica, and what drafter replicas and links say of themselves. Leaves: values that an
ingress can ask for, their part of `GET /drafting`, and of `/metrics`.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.util.metrics import Counter

from cluster.control import DepthControl
from cluster.counts import Counts, MetricsExport, TargetReport, WorkloadCounts
from cluster.settings import ClusterSettings
from peagle.vllm.acceptance import DraftingRecorder, RequestDrafting

# ====================================================================================================
# What is seen of the drafting itself: heads and their acceptance, drafter replicas, and the links to them.
#
# Enters: counts of a target replica, and what drafter replicas and links say of themselves. Leaves: values that an
# ingress can ask for, their part of `GET /drafting`, and of `/metrics`.

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
    """One target replica's link to a drafter: its state (`peagle.drafter.client`), the path of the data, the last thing
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
        self._seen: dict[str, Counts] = {}
        self._by_head: dict[str, Counts] = {}

    def add(self, totals: Mapping[str, Counts], heads: Mapping[str, str], default: str) -> None:
        """Take a reading. `heads`: digest by workload, `default` for the others."""
        for workload, stats in totals.items():
            before = self._seen.get(workload, Counts())
            new = stats if stats.num_steps < before.num_steps else stats - before
            head = heads.get(workload, default)
            if new.num_steps:
                self._by_head[head] = self._by_head.pop(head, Counts()) + new
        self._seen = dict(totals)
        while len(self._by_head) > MAX_NUM_HEADS:
            del self._by_head[next(iter(self._by_head))]

    def by_head(self) -> dict[str, Counts]:
        return dict(self._by_head)


def drafting_document(
    by_head: Iterable[Mapping[str, Counts]],
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
                round(accepted / drafted, 4) for accepted, drafted in zip(stats.accepted, stats.drafted, strict=True)
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


def head_metrics(by_replica: Mapping[str, Mapping[str, Counts]], model: str) -> list[Metric]:
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
            for family, by_depth in zip(families, (stats.drafted, stats.accepted), strict=True):
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


def _summed(by_head: Iterable[Mapping[str, Counts]], live: set[str]) -> dict[str, Counts]:
    sums = {head: Counts() for head in live}
    for one in by_head:
        for head, stats in one.items():
            sums[head] = sums.get(head, Counts()) + stats
    return sums


# ====================================================================================================
# Acceptance by workload and depth, as each target replica counts it and as `/metrics` shows it.
#
# Enters: the engine's `DraftingRecorder` in a target replica. Leaves: a `ReplicaReport` (a value that any ingress can ask
# for), Ray's own metrics (`ray.util.metrics`, on every node's metrics port), and Prometheus text for all replicas.
#
# Denominators: `draft_tokens{depth=i}` counts the steps that verified at least i drafts, so accepted_tokens{depth=i} /
# draft_tokens{depth=i} is the survival S_i even where K varies, and 1 + sum over depths of accepted_tokens /
# verification_steps is AL. `reached_draft_tokens{depth=i}` counts those of them whose first i - 1 drafts were accepted,
# so accepted_tokens / reached_draft_tokens is the conditional acceptance a_i; accepted_tokens{depth=i} /
# accepted_tokens{depth=i-1} is not, where some steps end at K = i - 1. Series carry the replica that counted them: sum
# over `replica`, and a replica that is gone takes its series along instead of making a sum go down.

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class WorkloadReport:
    """One workload on one replica since it started. Requests and tokens count what has ended, `stats` also the
    steps of requests that still run."""

    stats: Counts = field(default_factory=Counts)
    num_finished: int = 0
    num_aborted: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True)
class ReplicaReport:
    """What one target replica has counted since it started, drafting with `head` (a digest, or several joined by +
    where workloads have heads of their own; "" without a drafter).

    `num_running`: requests that the engine works on or keeps waiting; `running`: their sequences by workload, with a
    mean context of `context_tokens`. `by_head`: its steps by the head that drafted them; `links`: to drafters;
    `step_costs`: what its scheduler believes of step times, as it travelled (`cluster.step_time`)."""

    replica: str
    model: str
    num_running: int
    workloads: Mapping[str, WorkloadReport] = field(default_factory=dict)
    head: str = ""
    running: Mapping[str, int] = field(default_factory=dict)
    context_tokens: float = 0.0
    by_head: Mapping[str, Counts] = field(default_factory=dict)
    links: tuple[LinkReport, ...] = ()
    step_costs: str = ""


class ReplicaTelemetry:
    """Counts in one target replica. `recorder` is to be attached to the replica's engine client."""

    def __init__(self, replica: str, model: str, max_workloads: int, head: str = "") -> None:
        self.recorder = DraftingRecorder(self._finished, max_workloads=max_workloads)
        self._replica = replica
        self._model = model
        self._head = head
        self._heads: dict[str, str] = {}
        self._by_head = HeadCounts()
        self._export = MetricsExport()
        keys = ("model", "workload")
        self._steps = Counter("peagle_verification_steps", "Steps that verified drafts.", keys)
        self._drafted = Counter("peagle_draft_tokens", "Draft tokens verified.", (*keys, "depth"))
        self._reached = Counter("peagle_reached_draft_tokens", "Verified, all before accepted.", (*keys, "depth"))
        self._accepted = Counter("peagle_accepted_tokens", "Draft tokens accepted.", (*keys, "depth"))

    def set_heads(self, default: str, by_workload: Mapping[str, str]) -> None:
        """Say which heads draft from now on: `default`, and those of workloads that have their own."""
        if (default, dict(by_workload)) != (self._head, self._heads):
            self._by_head.add(self._totals(), self._heads, self._head)
            self._head, self._heads = default, dict(by_workload)

    def head_of(self, workload: str) -> str:
        """Digest of the head that drafts for a workload, "" without a drafter."""
        return self._heads.get(workload, self._head)

    def report(self, num_running: int, links: Sequence[LinkReport] = ()) -> ReplicaReport:
        """The counts so far. `num_running`: requests that the engine works on or keeps waiting."""
        counted = self.recorder.workloads()
        self._by_head.add({name: counts.counts for name, counts in counted.items()}, self._heads, self._head)
        workloads = {name: WorkloadReport(counts.counts, *counts.numbers()[1:]) for name, counts in counted.items()}
        running = {name: counts.num_running for name, counts in counted.items() if counts.num_running}
        return ReplicaReport(
            self._replica,
            self._model,
            num_running,
            workloads,
            self._all_heads(),
            running,
            self.recorder.context_tokens(),
            self._by_head.by_head(),
            tuple(links),
            self.recorder.step_costs,
        )

    def scaling_counters(self) -> dict[str, float]:
        """Counters that only grow, and step costs, as the policy of autoscaling reads them (`cluster.traffic`)."""
        costs = self.recorder.step_costs or None
        return self._export.to_metrics(
            TargetReport(
                self._replica, head=self._head, heads=self._heads, workloads=self.recorder.workloads(), step_costs=costs
            )
        )

    def _totals(self) -> dict[str, Counts]:
        return {name: counts.counts for name, counts in self.recorder.workloads().items()}

    def _all_heads(self) -> str:
        return "+".join(dict.fromkeys((self._head, *self._heads.values())))

    def _finished(self, record: RequestDrafting) -> None:
        tags = {"model": self._model, "workload": record.workload}
        if record.counts.num_steps:
            self._steps.inc(record.counts.num_steps, tags)
        for counter, counts in (
            (self._drafted, record.counts.drafted),
            (self._reached, record.counts.reached),
            (self._accepted, record.counts.accepted),
        ):
            for depth, count in enumerate(counts, start=1):
                if count:
                    counter.inc(count, {**tags, "depth": str(depth)})


def prometheus_text(reports: Iterable[ReplicaReport], more: Iterable[Metric] = ()) -> bytes:
    """The reports in Prometheus' text format, every counter from zero on at each replica's start; and `more`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reports(list(reports), list(more)))
    return generate_latest(registry)


class _Reports:
    """A prometheus_client collector over fixed reports."""

    def __init__(self, reports: list[ReplicaReport], more: list[Metric]) -> None:
        self._reports = reports
        self._more = more

    def collect(self) -> list[Metric]:
        labels = ("model", "workload", "replica")
        ready = GaugeMetricFamily("peagle_target_replicas", "Target replicas that answer.")
        ready.add_metric([], len(self._reports))
        running = GaugeMetricFamily(
            "peagle_running_requests", "Requests in the engine, waiting ones included.", labels=("model", "replica")
        )
        requests = CounterMetricFamily(
            "peagle_requests", "Sequences ended; aborted: the client left.", labels=(*labels, "outcome")
        )
        tokens = CounterMetricFamily("peagle_output_tokens", "Output tokens of ended sequences.", labels=labels)
        steps = CounterMetricFamily("peagle_verification_steps", "Steps that verified drafts.", labels=labels)
        drafted = CounterMetricFamily(
            "peagle_draft_tokens", "Draft tokens verified: steps at least this deep.", labels=(*labels, "depth")
        )
        reached = CounterMetricFamily(
            "peagle_reached_draft_tokens",
            "Draft tokens verified with all before them accepted: trials of the conditional acceptance.",
            labels=(*labels, "depth"),
        )
        accepted = CounterMetricFamily(
            "peagle_accepted_tokens", "Draft tokens accepted at this depth.", labels=(*labels, "depth")
        )
        for report in self._reports:
            running.add_metric([report.model, report.replica], report.num_running)
            for workload, counts in sorted(report.workloads.items()):
                values = [report.model, workload, report.replica]
                requests.add_metric([*values, "finished"], counts.num_finished)
                requests.add_metric([*values, "aborted"], counts.num_aborted)
                tokens.add_metric(values, counts.num_output_tokens)
                steps.add_metric(values, counts.stats.num_steps)
                for family, by_depth in (
                    (drafted, counts.stats.drafted),
                    (reached, counts.stats.reached),
                    (accepted, counts.stats.accepted),
                ):
                    for depth, count in enumerate(by_depth, start=1):
                        family.add_metric([*values, str(depth)], count)
        by_head = {report.replica: report.by_head for report in self._reports}
        model = self._reports[0].model if self._reports else ""
        heads = head_metrics(by_head, model)
        return [ready, running, requests, tokens, steps, drafted, reached, accepted, *heads, *self._more]


# ====================================================================================================
# Where the choice of K meets the service: reports in, decisions out, and the file that keeps what was learned.
#
# Enters: `ReplicaReport`s and the settings. Leaves: `DepthControl`s for ingress and target replicas. The decisions are
# `cluster.control`'s; here are only the clock, the file and Prometheus.

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 30.0


def make_control(settings: ClusterSettings) -> DepthControl:
    """The control of one replica."""
    objectives = {name: section.objective() for name, section in settings.depth.objectives.items()}
    return DepthControl(
        settings.depth_policy(),
        is_adaptive=settings.depth.policy == "adaptive" and settings.max_draft_tokens > 0,
        on_gpu=settings.target.has_gpu,
        objectives=objectives,
    )


def target_report(report: ReplicaReport) -> TargetReport:
    """A replica's report as the control reads it."""
    workloads = {}
    for workload, counted in report.workloads.items():
        num_ended = counted.num_finished + counted.num_aborted
        workloads[workload] = WorkloadCounts(
            num_ended + report.running.get(workload, 0),
            counted.num_finished,
            counted.num_aborted,
            counted.num_output_tokens,
            counted.num_prompt_tokens,
            counted.stats,
        )
    for workload, num_running in report.running.items():
        workloads.setdefault(workload, WorkloadCounts(num_started=num_running))
    costs = report.step_costs or None
    return TargetReport(report.replica, report.model, report.head, {}, workloads, report.context_tokens, costs)


def observe(control: DepthControl, reports: Iterable[ReplicaReport]) -> None:
    """Take in reports."""
    control.observe([target_report(report) for report in reports], time.monotonic())


class StateFile:
    """Saves what a control has learned, at most every `SAVE_INTERVAL_S`, and finds it again.

    Replicas of the ingress may share one file: each writes the whole state, which they derive from the same reports.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._saved_s = time.monotonic()

    def restore(self, control: DepthControl) -> None:
        """Begin where the last replica stopped. A damaged or foreign file is logged, put aside, and not used."""
        if self._path is None or not self._path.exists():
            return
        try:
            control.restore(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            aside = self._path.with_suffix(".unusable")
            logger.warning("depth.state: %s cannot be used (%s); it is kept as %s", self._path, error, aside)
            with contextlib.suppress(OSError):  # another replica of the ingress was first, or the folder is read-only
                self._path.replace(aside)

    def save(self, control: DepthControl, *, at_once: bool = False) -> None:
        if self._path is None or (not at_once and time.monotonic() - self._saved_s < SAVE_INTERVAL_S):
            return
        self._saved_s = time.monotonic()
        part = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(control.snapshot()), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            logger.warning("depth.state: %s cannot be written: %s", self._path, error)


def depth_metrics(document: Mapping[str, Any], model: str) -> list[Metric]:
    """What `DepthControl.document` says, as gauges."""
    labels = ["model", "workload"]
    chosen = GaugeMetricFamily("peagle_depth", "K that a request of the workload gets.", labels=[*labels, "source"])
    survival = GaugeMetricFamily(
        "peagle_survival",
        "Believed survival by depth; bound: mean, low, high (90 %).",
        labels=[*labels, "depth", "bound"],
    )
    for one in document["workloads"]:
        chosen.add_metric([model, one["workload"], one["source"]], one["k"])
        for bound, values in one["survival"].items():
            for depth, value in enumerate(values, start=1):
                survival.add_metric([model, one["workload"], str(depth), bound], value)
    return [chosen, survival]
