"""Acceptance by workload and depth, as each target replica counts it and as `/metrics` shows it.

Enters: the engine's `DraftingRecorder` in a target replica. Leaves: a `ReplicaReport` (a value that any ingress can ask
for), Ray's own metrics (`ray.util.metrics`, on every node's metrics port), and Prometheus text for all replicas.

Denominators: `draft_tokens{depth=i}` counts the steps that verified at least i drafts, so accepted_tokens{depth=i} /
draft_tokens{depth=i} is the survival S_i even where K varies, and 1 + sum over depths of accepted_tokens /
verification_steps is AL. `reached_draft_tokens{depth=i}` counts those of them whose first i - 1 drafts were accepted,
so accepted_tokens / reached_draft_tokens is the conditional acceptance a_i; accepted_tokens{depth=i} /
accepted_tokens{depth=i-1} is not, where some steps end at K = i - 1. Series carry the replica that counted them: sum
over `replica`, and a replica that is gone takes its series along instead of making a sum go down.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.util.metrics import Counter

from cluster.counts import Counts
from cluster.scaling_counters import CounterExport, WorkloadTotals
from deployments.drafter_telemetry import HeadCounts, LinkReport, head_metrics
from peagle.vllm.recorder import DraftingRecorder
from peagle.vllm.stats import DraftingStats, RequestDrafting

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class WorkloadReport:
    """One workload on one replica since it started. Requests and tokens count what has ended, `stats` also the
    steps of requests that still run."""

    stats: DraftingStats = field(default_factory=DraftingStats)
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
    `corrections`: its scheduler's corrections of the step times, as they travelled (`cluster.corrections`)."""

    replica: str
    model: str
    num_running: int
    workloads: Mapping[str, WorkloadReport] = field(default_factory=dict)
    head: str = ""
    running: Mapping[str, int] = field(default_factory=dict)
    context_tokens: float = 0.0
    by_head: Mapping[str, DraftingStats] = field(default_factory=dict)
    links: tuple[LinkReport, ...] = ()
    corrections: str = ""


class ReplicaTelemetry:
    """Counts in one target replica. `recorder` is to be attached to the replica's engine client."""

    def __init__(self, replica: str, model: str, max_workloads: int, head: str = "") -> None:
        self.recorder = DraftingRecorder(self._finished, max_workloads=max_workloads)
        self._replica = replica
        self._model = model
        self._head = head
        self._heads: dict[str, str] = {}
        self._by_head = HeadCounts()
        self._export = CounterExport()
        self._ended: dict[str, WorkloadReport] = {}
        keys = ("model", "workload")
        self._steps = Counter("peagle_verification_steps", "Steps that verified drafts.", keys)
        self._drafted = Counter("peagle_draft_tokens", "Draft tokens verified.", (*keys, "depth"))
        self._reached = Counter("peagle_reached_draft_tokens", "Verified, all before accepted.", (*keys, "depth"))
        self._accepted = Counter("peagle_accepted_tokens", "Draft tokens accepted.", (*keys, "depth"))

    def set_heads(self, default: str, by_workload: Mapping[str, str]) -> None:
        """Say which heads draft from now on: `default`, and those of workloads that have their own."""
        if (default, dict(by_workload)) != (self._head, self._heads):
            self._by_head.add(self.recorder.totals(), self._heads, self._head)
            self._head, self._heads = default, dict(by_workload)

    def head_of(self, workload: str) -> str:
        """Digest of the head that drafts for a workload, "" without a drafter."""
        return self._heads.get(workload, self._head)

    def report(self, num_running: int, links: Sequence[LinkReport] = ()) -> ReplicaReport:
        """The counts so far. `num_running`: requests that the engine works on or keeps waiting."""
        workloads = {}
        totals = self.recorder.totals()
        self._by_head.add(totals, self._heads, self._head)
        self._ended = {workload: ended for workload, ended in self._ended.items() if workload in totals}
        for workload, stats in totals.items():
            ended = self._ended.get(workload, WorkloadReport())
            workloads[workload] = replace(ended, stats=stats)
        running, context_tokens = self.recorder.running()
        return ReplicaReport(
            self._replica,
            self._model,
            num_running,
            workloads,
            self._all_heads(),
            running,
            context_tokens,
            self._by_head.by_head(),
            tuple(links),
            self.recorder.corrections,
        )

    def scaling_counters(self) -> dict[str, int]:
        """Counters that only grow, as the policy of autoscaling reads them (`cluster.scaling_counters`)."""
        totals, (running, _) = self.recorder.totals(), self.recorder.running()
        counted = {}
        for workload, stats in totals.items():
            ended = self._ended.get(workload, WorkloadReport())
            num_ended = ended.num_finished + ended.num_aborted
            counted[workload] = WorkloadTotals(
                num_ended + running.get(workload, 0),
                num_ended,
                ended.num_output_tokens,
                ended.num_prompt_tokens,
                Counts(stats.drafted_by_depth, stats.reached_by_depth, stats.accepted_by_depth),
            )
        return self._export.flat(self._all_heads(), counted)

    def _all_heads(self) -> str:
        return "+".join(dict.fromkeys((self._head, *self._heads.values())))

    def _finished(self, record: RequestDrafting) -> None:
        old = self._ended.get(record.workload, WorkloadReport())
        self._ended[record.workload] = WorkloadReport(
            num_finished=old.num_finished + (not record.is_aborted),
            num_aborted=old.num_aborted + record.is_aborted,
            num_output_tokens=old.num_output_tokens + record.num_output_tokens,
            num_prompt_tokens=old.num_prompt_tokens + record.num_prompt_tokens,
        )
        tags = {"model": self._model, "workload": record.workload}
        if record.stats.num_steps:
            self._steps.inc(record.stats.num_steps, tags)
        for counter, counts in (
            (self._drafted, record.stats.drafted_by_depth),
            (self._reached, record.stats.reached_by_depth),
            (self._accepted, record.stats.accepted_by_depth),
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
                    (drafted, counts.stats.drafted_by_depth),
                    (reached, counts.stats.reached_by_depth),
                    (accepted, counts.stats.accepted_by_depth),
                ):
                    for depth, count in enumerate(by_depth, start=1):
                        family.add_metric([*values, str(depth)], count)
        by_head = {report.replica: report.by_head for report in self._reports}
        model = self._reports[0].model if self._reports else ""
        heads = head_metrics(by_head, model)
        return [ready, running, requests, tokens, steps, drafted, reached, accepted, *heads, *self._more]
