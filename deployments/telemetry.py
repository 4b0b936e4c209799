"""What is seen of the service: Prometheus families, the document of `GET /drafting`, and the store that keeps what
was learned.

Enters: `TargetReport`s, `DrafterReport`s, the front ends' own metrics, and decisions. Leaves: text and JSON. There is
one way into Prometheus: the router asks all replicas when `/metrics` is read, so that one address says everything, with
every replica once, vLLM's own families included. Ray's metrics would need a scraper on every node, and come in steps
of 10 s.

Denominators: `draft_tokens{depth=i}` counts the steps that verified at least i drafts, so accepted_tokens{depth=i} /
draft_tokens{depth=i} is the survival S_i even where K varies, and 1 + sum over depths of accepted_tokens /
verification_steps is AL. `reached_draft_tokens{depth=i}` counts those of them whose first i - 1 drafts were accepted,
so accepted_tokens / reached_draft_tokens is the conditional acceptance a_i. Series carry the replica that counted them:
sum over `replica`, and a replica that is gone takes its series along instead of making a sum go down.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from cluster.counts import CounterDeltas, Counts, TargetReport
from cluster.heads import DrafterReport, HeadManager
from cluster.k_policy import KPolicy
from cluster.learning import LearnerReport
from cluster.settings import ClusterSettings
from cluster.spending import DaySpending, SpendingTracker
from deployments.compat import KVChannel
from deployments.metrics import counter, gauge
from peagle.store import write_bytes

logger = logging.getLogger(__name__)

MAX_NUM_HEADS = 16
"""Heads whose counts are kept; the one that counted longest ago goes first."""

SAVE_INTERVAL_S = 30.0
LEARNED = "learned"
"""Name of the saved state among the documents of the cluster."""


def make_k_policy(settings: ClusterSettings, before: KPolicy | None = None) -> KPolicy:
    """What chooses K in one replica, with what `before` has learned."""
    policy = KPolicy(
        settings.depth_policy(),
        is_adaptive=settings.depth.policy == "adaptive" and settings.max_draft_tokens > 0,
        on_gpu=settings.target.has_gpu,
        max_tpot_ms={name: one.max_tpot_ms for name, one in settings.depth.objectives.items() if one.max_tpot_ms},
        max_num_seqs=settings.max_num_seqs,
    )
    if before is not None:
        policy.inherit(before)
    return policy


class HeadCounts:
    """Verification steps by the head that drafted them, over all targets since this replica started."""

    def __init__(self) -> None:
        self._by_head: dict[str, Counts] = {}

    def add(self, deltas: CounterDeltas) -> None:
        for head, by_workload in deltas.by_head.items():
            added = sum(by_workload.values(), Counts())
            self._by_head[head] = self._by_head.pop(head, Counts()) + added
        while len(self._by_head) > MAX_NUM_HEADS:
            del self._by_head[next(iter(self._by_head))]

    def by_head(self, live: Iterable[str] = ()) -> dict[str, Counts]:
        """Counts by digest, with those of `live` heads that have none yet."""
        return {**{head: Counts() for head in live}, **self._by_head}


def live_heads(reports: Iterable[TargetReport]) -> list[str]:
    """Digests of the heads that draft now."""
    found = [head for report in reports for head in (report.head, *report.heads.values()) if head]
    return list(dict.fromkeys(found))


def drafting_document(
    reports: Sequence[TargetReport], by_head: Mapping[str, Counts], drafters: Sequence[DrafterReport]
) -> dict[str, Any]:
    """The part of `GET /drafting` that no policy decides."""
    live = live_heads(reports)
    return {
        "heads": [
            {
                "head": head,
                "is_live": head in live,
                "num_steps": counts.num_steps,
                "acceptance_length": round(counts.acceptance_length, 4) if counts.num_steps else None,
                "survival": [
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

    class Fixed:
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed())
    return generate_latest(registry)


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


def _add_depths(family: CounterMetricFamily, labels: Sequence[str], counts: Iterable[float]) -> None:
    for depth, count in enumerate(counts, start=1):
        family.add_metric([*labels, str(depth)], count)


def target_metrics(reports: Sequence[TargetReport], num_ready: int) -> list[Metric]:
    """What targets have counted by workload, every counter from zero on at each replica's start."""
    ready = gauge("target_replicas")
    ready.add_metric([], num_ready)
    running = gauge("running_requests")
    generated = counter("generated_tokens")
    requests = counter("requests")
    tokens = counter("output_tokens")
    prompts = counter("prompt_tokens")
    steps = counter("verification_steps")
    drafted = counter("draft_tokens")
    reached = counter("reached_draft_tokens")
    accepted = counter("accepted_tokens")
    for report in reports:
        running.add_metric([report.model, report.replica], report.num_running)
        generated.add_metric([report.model, report.replica], report.num_output_tokens)
        for workload, found in sorted(report.workloads.items()):
            values = [report.model, workload, report.replica]
            requests.add_metric([*values, "finished"], found.num_finished)
            requests.add_metric([*values, "aborted"], found.num_aborted)
            tokens.add_metric(values, found.num_output_tokens)
            prompts.add_metric(values, found.num_prompt_tokens)
            steps.add_metric(values, found.counts.num_steps)
            _add_depths(drafted, values, found.counts.drafted)
            _add_depths(reached, values, found.counts.reached)
            _add_depths(accepted, values, found.counts.accepted)
    return [ready, running, generated, requests, tokens, prompts, steps, drafted, reached, accepted]


def head_metrics(by_head: Mapping[str, Counts]) -> list[Metric]:
    """Steps and tokens by the head that drafted them, as the router has counted them."""
    steps = counter("head_verification_steps")
    drafted = counter("head_draft_tokens")
    accepted = counter("head_accepted_tokens")
    for head, found in by_head.items():
        steps.add_metric([head], found.num_steps)
        _add_depths(drafted, [head], found.drafted)
        _add_depths(accepted, [head], found.accepted)
    return [steps, drafted, accepted]


SHOWN_S = 3600.0
"""Time for which the metric shows that a head was rolled back."""


def change_metrics(changes: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """Heads that are tried, watched, or were rolled back of late (`HeadManager.document`)."""
    state = gauge("head_change")
    gain = gauge("head_gain")
    for change in changes:
        is_compared = change["state"] in ("loading", "running") or change["is_watched"]
        if is_compared or (change["state"] == "rolled back" and time.time() - change["changed_s"] < SHOWN_S):
            heads = [change["head"], change["against"]]
            state.add_metric([*heads, change["state"]], 1)
            for bound in ("gain", "low", "high") if change["gain"] is not None else ():
                gain.add_metric([*heads, "mean" if bound == "gain" else bound], change[bound])
    return [state, gain]


def drafter_metrics(drafters: Sequence[DrafterReport], reports: Sequence[TargetReport]) -> list[Metric]:
    """The drafter replicas and the targets' links to them."""
    ready = gauge("drafter_replicas")
    ready.add_metric([], len(drafters))
    heads = gauge("drafter_head")
    refused = gauge("drafter_head_refused")
    up = gauge("link_up")
    found: dict[str, CounterMetricFamily] = {}

    def count(prefix: str, labels: Mapping[str, str], counters: Mapping[str, float]) -> None:
        for counted, value in sorted(counters.items()):
            name = prefix + (f"{counted[:-1]}seconds" if counted.endswith("_s") else counted)
            family = found.setdefault(name, counter(name))
            family.add_metric(list(labels.values()), value)

    for drafter in drafters:
        refused.add_metric([drafter.replica], float(bool(drafter.refused)))
        for index, head in enumerate(drafter.heads):
            heads.add_metric([drafter.replica, str(index), head.digest], 1)
        count("drafter_", {"replica": drafter.replica}, drafter.counters)
    for report in reports:
        for link in report.links:
            labels = {"replica": report.replica, "drafter": link["drafter"]}
            up.add_metric(list(labels.values()), float(link["state"] == "up"))
            count("link_", labels, link["counters"])
    return [ready, heads, refused, up, *found.values()]


def learner_document(reports: Sequence[LearnerReport]) -> dict[str, Any] | None:
    """The part of `GET /drafting` about the learner; None while it does not answer."""
    return dataclasses.asdict(reports[0]) if reports else None


def learner_metrics(reports: Sequence[LearnerReport]) -> list[Metric]:
    """What the learner keeps and does, its counters from zero on at its start, and its last round's comparison."""
    kept = gauge("learner_answers")
    size = gauge("learner_buffer_bytes")
    came = counter("learner_fetched_answers")
    phase = gauge("learner_phase")
    ratio = gauge("learner_acceptance_ratio")
    others = {
        "rounds": counter("learner_rounds"),
        "proposals": counter("learner_proposals"),
        "busy_seconds": counter("learner_busy_seconds"),
    }
    for report in reports:
        size.add_metric([], report.num_bytes)
        phase.add_metric([report.phase], 1)
        for workload, number in report.num_answers.items():
            kept.add_metric([workload], number)
        for name, value in report.counters.items():
            if name in others:
                others[name].add_metric([], value)
            elif name.startswith("answers_"):
                came.add_metric([name.removeprefix("answers_")], value)
        for mix in ("recent", "before"):
            for bound in ("ratio", "low", "high"):
                if mix in report.last_round:
                    ratio.add_metric([mix, bound], report.last_round[mix][bound])
    return [kept, size, came, phase, ratio, *others.values()]


def depth_metrics(document: Mapping[str, Any], model: str) -> list[Metric]:
    """What `KPolicy.document` says, as gauges."""
    chosen = gauge("depth")
    survival = gauge("survival")
    for row in document["workloads"]:
        chosen.add_metric([model, row["workload"], row["source"]], row["k"])
        for bound, values in row["survival"].items():
            for depth, value in enumerate(values, start=1):
                survival.add_metric([model, row["workload"], str(depth), bound], value)
    step = gauge("step_seconds")
    if document["step_s"] is not None:
        step.add_metric([model], document["step_s"])
    return [chosen, survival, step]


def scaling_metrics(document: Mapping[str, Any] | None) -> list[Metric]:
    """A decision as gauges. Its reason in words stands in `GET /drafting`: as a label, each text would be a series."""
    if document is None:
        return []
    replicas = gauge("autoscaling_replicas")
    for name in ("target", "drafter"):
        for count, value in (document[name] or {}).items():
            if value is not None:
                replicas.add_metric([name, count.removeprefix("num_")], value)
    source = gauge("autoscaling_source")
    source.add_metric([document["source"]], 1)
    found: list[Metric] = [replicas, source]
    for key, name in (
        ("num_decisions", "decisions"),
        ("demand_tokens_per_s", "demand_tokens_per_second"),
        ("capacity_tokens_per_s", "capacity_tokens_per_second"),
        ("acceptance_length", "acceptance_length"),
        ("needed", "needed_replicas"),
    ):
        if document[key] is not None:
            found.append(family := gauge(f"autoscaling_{name}"))
            family.add_metric([], document[key])
    return found


def spending_metrics(today: DaySpending) -> list[Metric]:
    """What callers have used today, all replicas together."""
    found = gauge("caller_tokens_today")
    for caller, tokens in today.tokens.items():
        found.add_metric([caller], tokens)
    return [found]


# ---- what was learned, kept over restarts


class StateStore:
    """Saves what a policy has learned, and which heads it was left with, at most every `SAVE_INTERVAL_S`, and finds it
    again: in the file that `depth.state` names, else in the key-value store of the Ray cluster, which outlives every
    replica and needs no disk. It ends with the cluster, unless that keeps it in a Redis.

    A router that takes another's place may write beside it for a moment: each writes a file of its own first.
    """

    def __init__(self, path: str | None, channel: KVChannel | None = None) -> None:
        """With neither nothing is saved."""
        self._path, self._channel = None if path is None else Path(path), channel
        self._name = "the state in Ray's key-value store" if path is None else f"depth.state: {path}"
        self._saved_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._fails = False

    def restore(self, policy: KPolicy, heads: HeadManager | None = None) -> SpendingTracker:
        """Begin where the last replica stopped; what callers have used until then is returned. A state that is damaged
        or of another version is logged and not used; its file is put aside."""
        spending = SpendingTracker()
        try:
            snapshot = self._read()
            if snapshot is None:
                return spending
            spending = msgspec.convert(snapshot.get("spending", {}), SpendingTracker)
            if heads is not None and "heads" in snapshot:
                heads.restore(snapshot["heads"])  # first: heads are kept where what was learned is of another version
            policy.restore(snapshot)
        except Exception as error:  # noqa: BLE001  # the service starts without it, whatever is wrong
            kept = ""
            if self._path is not None:
                aside = self._path.with_suffix(".unusable")
                with contextlib.suppress(OSError):  # another replica was first, or the folder is read-only
                    self._path.replace(aside)
                    kept = f"; it is kept as {aside}"
            logger.warning("%s cannot be used (%s)%s", self._name, error, kept)
        return spending

    def _read(self) -> Any:
        """None where there is none."""
        if self._path is not None:
            return json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else None
        return None if self._channel is None else self._channel.get(LEARNED)

    def save_soon(
        self,
        policy: KPolicy,
        heads: HeadManager | None = None,
        spending: SpendingTracker | None = None,
        *,
        is_urgent: bool = False,
    ) -> None:
        """Save in a thread, when it is time again and the last save is done: a slow disk holds up no request.
        `is_urgent`: it is time."""
        if is_urgent:
            self._saved_s = -math.inf
        is_due = time.monotonic() - self._saved_s >= SAVE_INTERVAL_S
        if not is_due or (self._task is not None and not self._task.done()):
            return
        self._saved_s = time.monotonic()
        snapshot = policy.snapshot() | ({} if heads is None else {"heads": heads.snapshot()})
        snapshot |= {} if spending is None else {"spending": msgspec.to_builtins(spending)}
        work = asyncio.to_thread(self.write, snapshot)
        self._task = asyncio.get_running_loop().create_task(work)

    def write(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by this snapshot, at once and as a whole. The first of several failures in a row is logged,
        and their end."""
        try:
            if self._path is not None:
                self._replace_file(self._path, json.dumps(snapshot).encode())
            elif self._channel is not None:
                self._channel.put(LEARNED, snapshot)
        except Exception as error:  # noqa: BLE001  # of a disk or of Ray
            if not self._fails:
                again = f"the service goes on, and tries again every {SAVE_INTERVAL_S:.0f} s"
                logger.warning("%s cannot be written (%s); %s", self._name, error, again)
            self._fails = True
        else:
            if self._fails:
                logger.warning("%s is written again", self._name)
            self._fails = False

    @staticmethod
    def _replace_file(path: Path, data: bytes) -> None:
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(part, data)
            part.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
