"""K of each request from what the targets report: posteriors, load and step times in one object.

Enters: the reports of the target replicas, about once a second. Leaves: a `Drafting` for each request that nobody fixed
a K for, and a document that shows what is believed and why. Each ingress replica has one over all targets; each target
replica has one over itself, for requests that come by a deployment handle past the ingress. Never knows: HTTP, Ray, the
engine. No clock of its own.
"""

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.acceptance import AcceptanceBook, Report
from cluster.depth import Choice, DepthChooser, Load, Objective
from cluster.request import DEFAULT_WORKLOAD, DepthPolicy, Drafting
from cluster.step_time import Corrections, LiveCosts, StepTimes
from cluster.transfer import SPLIT_SHARE

MAX_REPORT_AGE_S = 30.0
"""Reports older than this decide nothing: K is then the operator's default."""

LOAD_WEIGHT = 0.5
"""Weight of the newest reading in the mean load; readings come about once a second."""


@dataclass(frozen=True)
class Observation:
    """One target replica as it reports itself.

    Attributes:
        report: its cumulative counts by workload since it started, and the head that made them.
        num_running: its running requests by workload.
        context_tokens: mean context of its running requests, 0 where unknown.
        corrections: what its engine's steps turn out to take over the table; None where it has not said.
    """

    report: Report
    num_running: Mapping[str, float] = field(default_factory=dict)
    context_tokens: float = 0.0
    corrections: Corrections | None = None


def _described(times: StepTimes) -> str:
    if not times.measured:
        return "no step times were measured, a cautious model stands in (python -m peagle.vllm.calibrate)"
    return f"step times measured on {times.conditions.get('gpu', 'an unnamed device')}"


def fixed_document(policy: DepthPolicy, model: str) -> dict[str, Any]:
    """What `DepthControl.document` says where K is fixed: the operator's table, and nothing learned."""
    nothing: dict[str, list[float]] = {"mean": [], "low": [], "high": []}
    table = {**policy.by_workload, DEFAULT_WORKLOAD: policy.k_of(DEFAULT_WORKLOAD)[0]}
    workloads = [
        {
            "workload": name,
            "num_requests": 0.0,
            "num_steps": 0.0,
            "k": k,
            "source": policy.k_of(name)[1],
            "reason": "",
            "acceptance_length": None,
            "survival": nothing,
        }
        for name, k in sorted(table.items())
    ]
    deepest = policy.max_draft_tokens
    said = {"model": model, "max_draft_tokens": deepest, "policy": "fixed", "step_times": "not used"}
    return {**said, "workloads": workloads}


class DepthControl:
    """Decides K where neither the request nor the operator did. Not thread-safe.

    Args:
        policy: the operator's limits, defaults and pinned workloads.
        times: step times of the targets' engines. Measured ones are corrected by what the engines report, each engine's
            word for `MAX_REPORT_AGE_S` after its last report. The cautious model is not: its seconds mean nothing, and
            engines that trim by no table report no corrections.
        objectives: by workload; `default_objective` for the others.
        seed: of the draws for probes.
        split_share: as of `AcceptanceBook`.
    """

    def __init__(
        self,
        policy: DepthPolicy,
        times: StepTimes,
        *,
        objectives: Mapping[str, Objective] | None = None,
        seed: int | None = None,
        split_share: float = SPLIT_SHARE,
    ) -> None:
        self.policy = policy
        self.times = times
        self.book = AcceptanceBook(policy.max_draft_tokens, split_share=split_share)
        self._costs = LiveCosts(times, MAX_REPORT_AGE_S) if times.measured else None
        self._chooser = DepthChooser(times, policy.max_k, objectives=objectives or {})
        # An engine with measured times weighs every draft at every step, by the load of that step, and does it for
        # throughput alone: for that a K of arrival could only hold it back, for other objectives it is what counts.
        self._lets_steps_decide = times.measured and not objectives
        self._random = random.Random(seed)
        self._load: dict[str, float] = {}
        self._context_tokens = 0.0
        self._observed_s = -math.inf
        self._choices: dict[str, Drafting] = {}

    def observe(self, observations: Iterable[Observation], now_s: float) -> None:
        """Take in what the replicas say, all of them at once. `now_s` is monotonic."""
        observed = list(observations)
        if not observed:
            return
        self.book.absorb_all(one.report for one in observed)
        mean: dict[str, float] = {}
        for one in observed:
            for workload, num in one.num_running.items():
                mean[workload] = mean.get(workload, 0.0) + num / len(observed)
        for workload in {*self._load, *mean}:
            before = self._load.get(workload, 0.0)
            self._load[workload] = before + LOAD_WEIGHT * (mean.get(workload, 0.0) - before)
        self._load = {workload: num for workload, num in self._load.items() if num > 0.01}
        known = {*self.book.workloads(), *self._load}  # names come and go, and only these are shown
        self._choices = {workload: chosen for workload, chosen in self._choices.items() if workload in known}
        contexts = [one.context_tokens for one in observed if one.context_tokens > 0]
        self._context_tokens = sum(contexts) / len(contexts) if contexts else 0.0
        self._observed_s = now_s
        if self._costs is not None:
            said = {one.report.source: one.corrections for one in observed if one.corrections is not None}
            if self._costs.take(said, now_s):
                self._chooser.use(self._costs.curves)

    def settle(self, drafting: Drafting, now_s: float, max_k: int | None = None) -> Drafting:
        """`drafting` as it is where the request or the operator fixed K; else with the K that is best, at most `max_k`
        (the limit of the request's caller; None: the operator's).

        Where the engines trim every step and throughput is all that is asked for, a learned K is what the load of the
        moment calls for, and the request may be verified deeper later (`Drafting.max_k`).
        """
        if drafting.source != "default":
            return drafting
        silent_s = now_s - self._observed_s
        if not 0 <= silent_s <= MAX_REPORT_AGE_S:
            since = "yet" if math.isinf(silent_s) else f"for {abs(silent_s):.0f} s"
            return dataclasses.replace(drafting, reason=f"no target has reported {since}: the default K")
        load = Load(dict(self._load), self._context_tokens)
        choice = self._chooser.decide(drafting.workload, self.book, load, now_s, self._random)
        settled = self._drafting(drafting.workload, choice)
        if choice.source != "probe":
            self._choices[drafting.workload] = settled
        if max_k is None or settled.max_k <= max_k:
            return settled
        if settled.k <= max_k:
            return dataclasses.replace(settled, max_k=max_k)
        reason = f"{settled.reason}; the caller's limit"  # the time per token that was expected is of another K
        return dataclasses.replace(settled, k=max_k, max_k=max_k, reason=reason, expected_tpot_s=None)

    def _drafting(self, workload: str, choice: Choice) -> Drafting:
        # A probe must be verified to its end, so the engine gets no survival by which it could trim it.
        survival = () if choice.source == "probe" else tuple(round(value, 4) for value in choice.survival)
        # With K = 0 the drafter's pass is left out, which steps that may draft could not do.
        is_weighed = self._lets_steps_decide and choice.source == "learned" and choice.k > 0
        max_k = self.policy.max_k if is_weighed else choice.k
        return Drafting(workload, choice.k, choice.source, choice.reason, survival, choice.expected_tpot_s, max_k)

    def document(self, now_s: float) -> dict[str, Any]:
        """What is believed and chosen, as JSON: see `cluster.view`."""
        workloads = []
        for name in sorted({*self.book.workloads(), *self._load, *self.policy.by_workload}):
            survival = self.book.survival(name)
            pinned = self.policy.by_workload.get(name)
            chosen = self._choices.get(name)
            k = pinned if pinned is not None else self.policy.default_k if chosen is None else chosen.k
            workloads.append(
                {
                    "workload": name,
                    "num_requests": round(self._load.get(name, 0.0), 2),
                    "num_steps": round(survival.num_steps, 1),
                    "k": k,
                    "source": "workload" if pinned is not None else "default" if chosen is None else chosen.source,
                    "reason": "pinned by depth.by_workload" if pinned is not None else chosen.reason if chosen else "",
                    "acceptance_length": round(survival.acceptance_length(k), 3),
                    "survival": {
                        end: [round(value, 4) for value in getattr(survival, end)] for end in ("mean", "low", "high")
                    },
                }
            )
        silent_s = now_s - self._observed_s
        return {
            "max_draft_tokens": self.policy.max_draft_tokens,
            "policy": "adaptive",
            "step_times": _described(self.times),
            "corrections": None if self._costs is None else self._costs.document(),
            "head": self.book.head,
            "seconds_since_report": None if math.isinf(silent_s) else round(silent_s, 1),
            "context_tokens": round(self._context_tokens, 1),
            "workloads": workloads,
        }

    def snapshot(self) -> dict[str, Any]:
        """The posteriors as JSON, for `restore` after a restart."""
        return self.book.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Raises ValueError naming what is wrong with the snapshot; nothing has changed then."""
        self.book.restore(snapshot)
