"""What is seen of the service: Prometheus families, and the document of `GET /drafting`.

Enters: `TargetReport`s, `DrafterReport`s, the front ends' own metrics, and decisions. Leaves: text and JSON. There is
one way into Prometheus: the router asks all replicas when `/metrics` is read, so that one address says everything, with
every replica once, vLLM's own families included. Ray's metrics would need a scraper on every node, and come in steps
of 10 s.

Denominators: `draft_tokens` at a draft position i counts the steps that verified at least i drafts, so accepted_tokens
/ draft_tokens at i is the cumulative acceptance rate S_i even where K varies, and 1 + sum over i of
accepted_tokens / verification_steps is AL. `reached_draft_tokens` at i counts those of them whose first i - 1 drafts
were accepted, so accepted_tokens / reached_draft_tokens is the conditional acceptance a_i. Series carry the replica
that counted them: sum over `replica`, and a replica that is gone takes its series along instead of making a sum go
down.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from cluster.counts import CounterDeltas, Counts, TargetReport
from cluster.heads import MAX_HEADS, DrafterReport
from cluster.learning import LearnerReport
from deployments.metrics import FAMILIES, Families

logger = logging.getLogger(__name__)


def add_head_counts(by_head: dict[str, Counts], deltas: CounterDeltas) -> None:
    """Add new steps to those of each head, over all targets, in place. The heads that counted last stay."""
    for head, by_workload in deltas.by_head.items():
        by_head[head] = by_head.pop(head, Counts()) + sum(by_workload.values(), Counts())
    while len(by_head) > MAX_HEADS:
        del by_head[next(iter(by_head))]


def drafting_document(
    reports: Sequence[TargetReport], by_head: Mapping[str, Counts], drafters: Sequence[DrafterReport]
) -> dict[str, Any]:
    """The part of `GET /drafting` that no policy decides."""
    live = {head for report in reports for head in (report.head, report.trial_head) if head}
    by_head = {**{head: Counts() for head in live}, **by_head}
    return {
        "heads": [
            {
                "head": head,
                "is_live": head in live,
                "num_steps": counts.num_steps,
                "acceptance_length": round(counts.acceptance_length, 4) if counts.num_steps else None,
                "acceptance_rates": [
                    round(accepted / drafted, 4)
                    for accepted, drafted in zip(counts.accepted, counts.drafted, strict=True)
                ],
            }
            for head, counts in sorted(by_head.items())
        ],
        "drafters": [
            {
                "replica": drafter.replica,
                "address": drafter.address,
                "heads": [
                    {"index": index, "name": head.name, "head": head.digest} for index, head in enumerate(drafter.heads)
                ],
                "refused": drafter.refused,
                "problems": dict(drafter.problems),
                "counters": dict(drafter.counters),
            }
            for drafter in drafters
        ],
        "links": [{"target": report.replica, **link} for report in reports for link in report.links],
    }


# ---- Prometheus


def prometheus_text(families: Iterable[Metric]) -> bytes:
    """The text of some families; those of one name become one."""
    merged: dict[str, Metric] = {}
    for family in families:
        known = merged.setdefault(family.name, family)
        if known is not family:
            known.samples = [*known.samples, *family.samples]
    collector: Any = SimpleNamespace(collect=merged.values)
    return generate_latest(collector)


def labelled(families: Iterable[Metric], **labels: str) -> list[Metric]:
    """The families of one replica with further labels on every sample."""
    found = list(families)
    for family in found:
        family.samples = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
    return found


METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_PREFIX = "vllm:"


def engine_metrics(folder: str | None = None) -> list[Metric]:
    """vLLM's families of one engine, without its replica. `folder`: where the clients of an engine that has several
    keep them; None: they are in this process."""
    registry: Any = REGISTRY if folder is None else MultiProcessCollector(CollectorRegistry(), folder)  # type: ignore[no-untyped-call]
    found = [family for family in registry.collect() if family.name.startswith(ENGINE_PREFIX)]
    for family in found:
        shown = (sample for sample in family.samples if not sample.name.endswith("_created"))
        family.samples = [sample._replace(timestamp=None) for sample in shown]
    return found


def add_target_metrics(found: Families, reports: Sequence[TargetReport], num_ready: int, model: str) -> None:
    """What targets of `model` have counted by workload, every counter from zero on at each replica's start."""
    found.add("target_replicas", num_ready)
    for report in reports:
        found.add("running_requests", report.num_running, model, report.replica)
        found.add("generated_tokens", report.num_output_tokens, model, report.replica)
        for workload, counted in sorted(report.workloads.items()):
            labels = model, workload, report.replica
            found.add("requests", counted.num_finished, *labels, "finished")
            found.add("requests", counted.num_aborted, *labels, "aborted")
            found.add("output_tokens", counted.num_output_tokens, *labels)
            found.add("prompt_tokens", counted.num_prompt_tokens, *labels)
            found.add("verification_steps", counted.counts.num_steps, *labels)
            found.add_positions("draft_tokens", counted.counts.drafted, *labels)
            found.add_positions("reached_draft_tokens", counted.counts.reached, *labels)
            found.add_positions("accepted_tokens", counted.counts.accepted, *labels)


def add_head_metrics(found: Families, by_head: Mapping[str, Counts]) -> None:
    """Steps and tokens by the head that drafted them, as the router has counted them."""
    for head, counts in by_head.items():
        found.add("head_verification_steps", counts.num_steps, head)
        found.add_positions("head_draft_tokens", counts.drafted, head)
        found.add_positions("head_accepted_tokens", counts.accepted, head)


SHOWN_S = 3600.0
"""Time for which the metric shows that a head was rolled back."""


def add_change_metrics(found: Families, changes: Iterable[Mapping[str, Any]]) -> None:
    """Heads that are tried, watched, or were rolled back of late (`HeadManager.document`)."""
    for change in changes:
        is_compared = change["state"] in ("loading", "running") or change["is_watched"]
        if is_compared or (change["state"] == "rolled back" and time.time() - change["changed_s"] < SHOWN_S):
            heads = change["head"], change["against"]
            found.add("head_change", 1, *heads, change["state"])
            for bound in ("gain", "low", "high") if change["gain"] is not None else ():
                found.add("head_gain", change[bound], *heads, "mean" if bound == "gain" else bound)


def add_drafter_metrics(found: Families, drafters: Sequence[DrafterReport], reports: Sequence[TargetReport]) -> None:
    """The drafter replicas and the targets' links to them."""

    def count(prefix: str, counters: Mapping[str, float], *labels: str) -> None:
        for name, value in sorted(counters.items()):
            family = prefix + (f"{name[:-1]}seconds" if name.endswith("_s") else name)
            if family in FAMILIES:  # GET /drafting has the others too
                found.add(family, value, *labels)

    found.add("drafter_replicas", len(drafters))
    for drafter in drafters:
        found.add("drafter_head_refused", float(bool(drafter.refused)), drafter.replica)
        for index, head in enumerate(drafter.heads):
            found.add("drafter_head", 1, drafter.replica, str(index), head.digest)
        count("drafter_", drafter.counters, drafter.replica)
    for report in reports:
        for link in report.links:
            found.add("link_up", float(link["state"] == "up"), report.replica, link["drafter"])
            count("link_", link["counters"], report.replica, link["drafter"])


def add_learner_metrics(found: Families, reports: Sequence[LearnerReport]) -> None:
    """What the learner keeps and does, its counters from zero on at its start, and its last round's comparison."""
    for report in reports:
        found.add("learner_buffer_bytes", report.num_bytes)
        found.add("learner_phase", 1, report.phase)
        for workload, number in report.num_answers.items():
            found.add("learner_answers", number, workload)
        for name, value in report.counters.items():
            if name.startswith("answers_"):
                found.add("learner_fetched_answers", value, name.removeprefix("answers_"))
            elif f"learner_{name}" in FAMILIES:
                found.add(f"learner_{name}", value)
        for mix in report.last_round.keys() & {"recent", "before"}:
            for bound in ("ratio", "low", "high"):
                found.add("learner_acceptance_ratio", report.last_round[mix][bound], mix, bound)


def add_k_metrics(found: Families, document: Mapping[str, Any], model: str) -> None:
    """What `KPolicy.document` says, as gauges."""
    for row in document["workloads"]:
        found.add("num_draft_tokens", row["k"], model, row["workload"], row["source"])
        for bound, rates in row["acceptance_rates"].items():
            for position, rate in enumerate(rates, start=1):
                found.add("acceptance_rate", rate, model, row["workload"], str(position), bound)
    if document["step_s"] is not None:
        found.add("step_seconds", document["step_s"], model)


def add_scaling_metrics(found: Families, document: Mapping[str, Any] | None) -> None:
    """A decision as gauges. Its reason in words stands in `GET /drafting`: as a label, each text would be a series."""
    if document is None:
        return
    for name in ("target", "drafter"):
        for count, value in (document[name] or {}).items():
            found.add("autoscaling_replicas", value, name, count.removeprefix("num_"))
    found.add("autoscaling_source", 1, document["source"])
    for key, name in (
        ("num_decisions", "decisions"),
        ("demand_tokens_per_s", "demand_tokens_per_second"),
        ("capacity_tokens_per_s", "capacity_tokens_per_second"),
        ("acceptance_length", "acceptance_length"),
        ("needed", "needed_replicas"),
    ):
        if document[key] is not None:
            found.add(f"autoscaling_{name}", document[key])
