"""Traffic of real answers for the decisions on heads: steps of a head, request by request, replayed from traces.

A worse head is the same one of whose accepted drafts each is lost with some chance, with all that follow it.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.counts import CounterDeltas, Counts, WorkloadCounts
from cluster.heads import DrafterReport, HeadManager, HeadRef
from cluster.request import TRIAL_SUFFIX

TRACES = Path(__file__).parents[2] / "benchmarks/results/2026-11-21-traces-smollm2-135m.npz"
TASKS = ("humaneval", "math_reasoning", "qa", "rag", "summarization", "translation")
K = 5

Rows = NDArray[np.int64]
"""[num_requests, 3 * K]: drafted, reached and accepted by depth, of each request."""


@cache
def requests_of(task: str, loss: float = 0.0) -> Rows:
    """Greedy answers of a task, each walked at K."""
    found = np.load(TRACES)
    ends = np.cumsum(found["num_anchors"])
    random, rows = np.random.default_rng(0), []
    for index in np.flatnonzero((found["category"] == task) & (found["temperature"] == 0)):
        accepted = np.minimum(found["accepted"][ends[index] - found["num_anchors"][index] : ends[index]], K)
        kept = np.minimum(accepted, random.geometric(loss, len(accepted)) - 1) if loss else accepted
        at, row = 0, np.zeros((3, K), np.int64)
        while at < len(accepted):
            num = int(kept[at])
            row[0] += 1
            row[1, : num + 1] += 1
            row[2, :num] += 1
            at += num + 1
        rows.append(row.ravel())
    return np.array(rows)


def acceptance_length(loss: float) -> float:
    """AL over all tasks."""
    rows = sum(requests_of(task, loss).sum(0) for task in TASKS)
    return float(1 + rows[2 * K :].sum() / rows[0])


class HeadTraffic:
    """Requests of six workloads, drafted for with the heads that `manager` desires."""

    def __init__(self, manager: HeadManager, seed: int, losses: Mapping[str, float], head: str = "a") -> None:
        """losses: of the heads that there are, by digest."""
        self.manager, self.losses, self._random = manager, losses, np.random.default_rng(seed)
        self.configured = HeadRef(head, head)
        self.weights = np.full(len(TASKS), 1 / len(TASKS))
        self.weights_of_target = ""
        self.num_requests = 0

    @property
    def head(self) -> str:
        """That of the requests without a trial."""
        desired = self.manager.desired
        replacement = desired.replacement if desired.replaced == self.configured.digest else None
        return (replacement or self.configured).digest

    def report(self) -> None:
        """The drafter's report; every head loads at once."""
        desired = self.manager.desired
        heads = [HeadRef(self.head, self.head)]
        if (candidate := desired.candidate) is not None:
            heads.append(HeadRef(candidate.name, candidate.name.removeprefix("candidate-")))
        report = DrafterReport("r", "", tuple(heads), configured=self.configured, desired=desired)
        self.manager.observe_drafters([report])

    def run(self, num_requests: int, at_a_time: int = 60, workload: str | None = None) -> None:
        """So many requests, some in each report. `workload`: all under this name, else each under that of its task."""
        for _ in range(num_requests // at_a_time):
            self.report()
            routing, news = self.manager.routing, CounterDeltas()
            share = routing.share if routing.trial else 0.0
            for task, num in zip(TASKS, self._random.multinomial(at_a_time, self.weights), strict=True):
                num_tried = self._random.binomial(num, share)
                name = workload or task
                self._add(news, name, task, self.head, int(num - num_tried))
                self._add(news, name + TRIAL_SUFFIX, task, routing.trial, int(num_tried))
            self.num_requests += at_a_time
            self.manager.record_counts(news, dict.fromkeys(TASKS, 2), self.weights_of_target)

    def _add(self, news: CounterDeltas, name: str, task: str, head: str, num: int) -> None:
        if not num:
            return
        rows = requests_of(task, self.losses[head])
        row = rows[self._random.integers(len(rows), size=num)].sum(0)
        depths = int((row[:K] > 0).sum())
        counts = Counts(*(row[start : start + depths].tolist() for start in range(0, 3 * K, K)))
        before = news.workloads.get(name, WorkloadCounts())
        news.workloads[name] = before + WorkloadCounts(num, num, counts=counts)
        of_head = news.by_head.setdefault(head, {})
        of_head[name] = of_head.get(name, Counts()) + counts
