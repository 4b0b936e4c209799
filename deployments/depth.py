"""Where the choice of K meets the service: reports in, decisions out, and the file that keeps what was learned.

Enters: `ReplicaReport`s and the settings. Leaves: `DepthControl`s for ingress and target replicas. The decisions are
`cluster.control`'s; here are only the clock, the file and Prometheus.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.acceptance import Counts, Report
from cluster.control import DepthControl, Observation
from cluster.corrections import Corrections
from cluster.settings import ClusterSettings
from cluster.step_time import StepTimes
from deployments.telemetry import ReplicaReport
from peagle.vllm.stats import DraftingStats

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 30.0


def make_control(settings: ClusterSettings, times: StepTimes | None) -> DepthControl | None:
    """The control of one replica; None where K is fixed."""
    if times is None:
        return None
    objectives = {name: section.objective() for name, section in settings.depth.objectives.items()}
    return DepthControl(settings.depth_policy(), times, objectives=objectives)


def step_times(settings: ClusterSettings) -> StepTimes | None:
    """What K is chosen by; None where it is fixed. Raises ValueError for an unusable file."""
    if settings.depth.policy == "fixed" or settings.max_draft_tokens == 0:
        return None
    depths = settings.target.full_graph_depths
    if depths is not None:
        depths = [*depths, settings.max_draft_tokens]  # which always has full graphs
    if settings.engine.get("enforce_eager"):
        depths = []
    return settings.depth.times(settings.max_draft_tokens, on_gpu=settings.target.has_gpu, full_graph_depths=depths)


def observation(report: ReplicaReport) -> Observation:
    """A replica's report as the control reads it. Corrections that cannot be read are logged and left out."""
    totals = {workload: counts_of(one.stats) for workload, one in report.workloads.items()}
    corrections = None
    if report.corrections:
        try:
            corrections = Corrections.decode(report.corrections)
        except ValueError as error:
            logger.warning("the step times of target replica %s stay uncorrected: %s", report.replica, error)
    counted = Report(report.replica, report.head, totals)
    return Observation(counted, dict(report.running), report.context_tokens, corrections)


def counts_of(stats: DraftingStats) -> Counts:
    return Counts(stats.drafted_by_depth, stats.reached_by_depth, stats.accepted_by_depth)


def observe(control: DepthControl, reports: Iterable[ReplicaReport]) -> None:
    """Take in reports. One that cannot be is logged and left out; the others count."""
    usable = []
    for report in reports:
        try:
            usable.append(observation(report))
        except ValueError as error:
            logger.warning("the report of target replica %s is left out: %s", report.replica, error)
    control.observe(usable, time.monotonic())


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
