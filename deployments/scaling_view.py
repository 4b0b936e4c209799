"""The last decision of autoscaling, for `GET /drafting` and `/metrics` of the ingress.

Enters: the board (`deployments.scaling_board`). Leaves: the decision's document, and its numbers as gauges. Tells the
board too that a request found no target, which is all that wakes a target scaled to zero.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from deployments.scaling_board import ASKED, DECISION, Board

logger = logging.getLogger(__name__)

ASK_INTERVAL_S = 2.0


class ScalingView:
    """What one ingress replica knows of autoscaling."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._asked_s = float("-inf")

    async def document(self) -> dict[str, Any] | None:
        """The newest decision as the target's policy shows it; None before the first, or where none can be read."""
        try:
            return await asyncio.to_thread(self._board.get, DECISION)
        except Exception:
            logger.exception("the decision of autoscaling cannot be read")
            return None

    async def ask(self) -> None:
        """A request found no target replica. Said at most every `ASK_INTERVAL_S`."""
        if time.monotonic() - self._asked_s < ASK_INTERVAL_S:
            return
        self._asked_s = time.monotonic()
        try:
            await asyncio.to_thread(self._board.put, ASKED, {"time_s": time.time()})
        except Exception:
            logger.exception("autoscaling cannot be told of a request")


def scaling_metrics(document: Mapping[str, Any] | None) -> list[Metric]:
    """A decision as gauges. Its reason in words stands in `GET /drafting`: as a label, each text would be a series."""
    if document is None:
        return []
    replicas = GaugeMetricFamily(
        "peagle_autoscaling_replicas", "Replicas; count: running, wanted, min, max.", labels=("deployment", "count")
    )
    for name in ("target", "drafter"):
        for count, value in (document[name] or {}).items():
            if value is not None:
                replicas.add_metric([name, count.removeprefix("num_")], value)
    source = GaugeMetricFamily("peagle_autoscaling_source", "1: what decided.", labels=("source",))
    source.add_metric([document["source"]], 1)
    decisions = GaugeMetricFamily("peagle_autoscaling_decisions", "Decisions since the controller started.")
    decisions.add_metric([], document["num_decisions"])
    found: list[Metric] = [replicas, source, decisions]
    for key, name, text in (
        ("demand_tokens_per_s", "demand_tokens_per_second", "Output tokens per second that are asked for."),
        ("capacity_tokens_per_s", "capacity_tokens_per_second", "Output tokens per second that one replica gives."),
        ("acceptance_length", "acceptance_length", "AL of a replica at the predicted K."),
        ("needed", "needed_replicas", "Target replicas that the demand needs, before dead band and bounds."),
    ):
        if document[key] is not None:
            gauge = GaugeMetricFamily(f"peagle_autoscaling_{name}", text)
            gauge.add_metric([], document[key])
            found.append(gauge)
    return found
