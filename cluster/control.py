"""K of each request from what the targets report: posteriors, load and step costs in one object.

Enters: the reports of the target replicas, about once a second. Leaves: a `Drafting` for each request that nobody fixed
a K for, and a document that shows what is believed and why. The router has one over all targets and publishes its
choices as `Guidance`; the control of a target follows these, and decides on what the target itself has counted only
where it hears nothing. Never knows: HTTP, Ray, the engine. No clock of its own.
"""

import dataclasses
import logging
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.acceptance import AcceptanceBook
from cluster.counts import Ledger, TargetReport
from cluster.depth import Choice, DepthChooser, Objective
from cluster.heads import HeadRouting, base_workload
from cluster.request import DEFAULT_WORKLOAD, DepthPolicy, Drafting
from cluster.step_time import StepCosts, average_costs, guessed_costs

logger = logging.getLogger(__name__)

MAX_REPORT_AGE_S = 30.0
"""Reports older than this decide nothing: K is then the operator's default. Nor does guidance that is older."""

LOAD_WEIGHT = 0.5
"""Weight of the newest reading in the mean load; readings come about once a second."""

FORMAT = 2
"""Of the snapshot."""


@dataclass(frozen=True)
class Guidance:
    """What the router tells every target replica, once a second.

    Attributes:
        num_targets: target replicas that run.
        workloads: names that any of them has told apart.
        choices: of K by workload, that of `default` for every other; {} where K is not chosen, or on no fresh reports.
        heads: requests that draft with a head which the settings do not name.
    """

    num_targets: int = 1
    workloads: tuple[str, ...] = ()
    choices: Mapping[str, Choice] = field(default_factory=dict)
    heads: HeadRouting = field(default_factory=HeadRouting)


class DepthControl:
    """Learns acceptance under every policy, and decides K where neither the request nor the operator did.

    Not thread-safe.

    Args:
        policy: the operator's limits, defaults and pinned workloads.
        is_adaptive: K is chosen; else the operator's default stands, and what is learned is shown only.
        on_gpu: of the targets' engines: what is guessed of their steps until they report what these take.
        objectives: by workload; the others want throughput.
        max_num_seqs: sequences that one engine runs at a time; what it has beyond them waits, and is no load of a step.
        seed: of the draws for probes.
    """

    def __init__(
        self,
        policy: DepthPolicy,
        *,
        is_adaptive: bool = True,
        on_gpu: bool = False,
        objectives: Mapping[str, Objective] | None = None,
        max_num_seqs: float = math.inf,
        seed: int | None = None,
    ) -> None:
        self.policy = policy
        self._max_num_seqs = max_num_seqs
        self.is_adaptive = is_adaptive
        self.ledger = Ledger()
        self.book = AcceptanceBook(policy.max_draft_tokens)
        self._on_gpu, self._guess = on_gpu, guessed_costs(on_gpu)
        self._chooser = DepthChooser(self._guess, policy.max_k, objectives=objectives or {})
        # The scheduler weighs every draft at every step, by the load of that step, and does it for throughput alone:
        # for that a K of arrival could only hold it back, for other objectives it is what counts.
        self._lets_steps_decide = not objectives
        self._random = random.Random(seed)
        self._costs: dict[str, tuple[float, StepCosts]] = {}
        self._load: dict[str, float] = {}
        self._context_tokens = 0.0
        self._observed_s = -math.inf
        self._choices: dict[str, Drafting] = {}
        self._followed: Mapping[str, Choice] = {}
        self._followed_s = -math.inf

    @property
    def costs(self) -> StepCosts:
        """Step costs of the engines together, as they last reported them."""
        return average_costs([costs for _, costs in self._costs.values()]) if self._costs else self._guess

    def observe(self, reports: Iterable[TargetReport], now_s: float) -> None:
        """Take in what the replicas say, all of them at once; `now_s` is monotonic. A report that cannot be is logged
        and left out, and never raises: requests must not fail for what is only learned."""
        observed = [report for report in reports if _is_usable(report)]
        if not observed:
            return
        self.book.absorb(self.ledger.take(observed))
        for report in observed:
            if report.step_costs is not None:
                self._costs[report.replica] = now_s, report.step_costs
        self._costs = {
            replica: (at_s, costs)
            for replica, (at_s, costs) in self._costs.items()
            if 0 <= now_s - at_s <= MAX_REPORT_AGE_S
        }
        self._chooser.costs = self.costs
        mean: dict[str, float] = {}
        for report in observed:
            for workload, counts in report.workloads.items():
                mean[workload] = mean.get(workload, 0.0) + max(0, counts.num_running) / len(observed)
        share_running = min(1.0, self._max_num_seqs / max(1.0, sum(mean.values())))
        mean = {workload: share_running * num for workload, num in mean.items()}
        for workload in {*self._load, *mean}:
            before = self._load.get(workload, 0.0)
            self._load[workload] = before + LOAD_WEIGHT * (mean.get(workload, 0.0) - before)
        self._load = {workload: num for workload, num in self._load.items() if num > 0.01}
        known = {*self.book.workloads(), *self._load}  # names come and go, and only these are shown
        self._choices = {workload: chosen for workload, chosen in self._choices.items() if workload in known}
        contexts = [report.context_tokens for report in observed if report.context_tokens > 0]
        self._context_tokens = sum(contexts) / len(contexts) if contexts else 0.0
        self._observed_s = now_s

    def settle(self, drafting: Drafting, now_s: float, max_k: int | None = None) -> Drafting:
        """`drafting` as it is where the request or the operator fixed K; else with the K that is best, at most `max_k`
        (the limit of the request's caller; None: the operator's).

        Where the engines weigh every step and throughput is all that is asked for, a learned K is what the load of the
        moment calls for, and the request may be verified deeper later (`Drafting.max_k`).
        """
        if drafting.source != "default" or not self.is_adaptive:
            return drafting
        workload, silent_s = drafting.workload, now_s - self._observed_s
        if self.follows(now_s):
            choice = self._followed.get(workload) or self._followed[DEFAULT_WORKLOAD].of(workload)
        elif 0 <= silent_s <= MAX_REPORT_AGE_S:
            choices = self._chooser.choices(
                {workload}, self.book, self._load, self._context_tokens, now_s, self._random
            )
            choice = choices[workload]
        else:
            since = "yet" if math.isinf(silent_s) else f"for {abs(silent_s):.0f} s"
            return dataclasses.replace(drafting, reason=f"no target has reported {since}: the default K")
        settled = self._as_played(choice.drafting)
        if not self.follows(now_s):  # who follows forgets no workload, and is not asked for what was chosen
            self._choices[workload] = settled
        if not settled.max_k:  # it has no drafts that a step could verify
            settled = self._as_played(choice.draw(self._random))
        max_k = self.policy.max_k if max_k is None else min(max_k, self.policy.max_k)
        if settled.max_k <= max_k:
            return settled
        if settled.k <= max_k:
            return dataclasses.replace(settled, max_k=max_k)
        reason = f"{settled.reason}; the caller's limit"  # the time per token that was expected is of another K
        return dataclasses.replace(settled, k=max_k, max_k=max_k, reason=reason, expected_tpot_s=None)

    def _as_played(self, chosen: Drafting) -> Drafting:
        """A choice as the scheduler gets it, with what it may decide at each step."""
        survival = tuple(round(value, 4) for value in chosen.survival)
        if not self._lets_steps_decide:
            survival = survival[: chosen.k]  # deeper is only the step in many that verifies all drafts
        max_k = chosen.max_k
        # On a GPU the drafter's pass is left out only where all requests have K = 0, on a CPU where that is faster.
        if chosen.source == "learned" and (chosen.k > 0 or (self._lets_steps_decide and not self._on_gpu)):
            max_k = max(chosen.k, self.policy.max_k)
        return dataclasses.replace(chosen, survival=survival, max_k=max_k)

    def guidance(self, num_targets: int, now_s: float) -> Guidance:
        """What the controls of `num_targets` target replicas are to `follow`. Raises what the choice of K raises."""
        workloads = tuple(sorted({*self.book.workloads(), *self._load}))
        if not self.is_adaptive or not 0 <= now_s - self._observed_s <= MAX_REPORT_AGE_S:
            return Guidance(num_targets, workloads)
        load = self._load or {DEFAULT_WORKLOAD: 1.0}
        planned = self._chooser.choices(load.keys(), self.book, load, self._context_tokens, now_s, self._random)
        choices = dict(planned)
        is_measured = all(choice.drafting.source == "learned" for choice in planned.values())
        for workload in (DEFAULT_WORKLOAD, *workloads):
            if is_measured and load.get(workload, 0.0) < 1.0:
                choices[workload] = self._chooser.choice_beside(workload, self.book, self._context_tokens)
            elif workload not in choices:
                choices[workload] = next(iter(planned.values())).of(workload)
        self._choices = {workload: self._as_played(choice.drafting) for workload, choice in choices.items()}
        return Guidance(num_targets, workloads, choices)

    def follow(self, guidance: Guidance, now_s: float) -> None:
        """Choose by these from now on. Guidance without choices leaves the last one, until it is too old."""
        if guidance.choices:
            self._followed, self._followed_s = guidance.choices, now_s

    def follows(self, now_s: float) -> bool:
        """Whether the last guidance decides."""
        return 0 <= now_s - self._followed_s <= MAX_REPORT_AGE_S

    def document(self, now_s: float) -> dict[str, Any]:
        """What is believed and chosen, as JSON: see `cluster.view`."""
        names = {*self.book.workloads(), *self._load, *self.policy.by_workload}
        silent_s = now_s - self._observed_s
        rows = [self._describe(name) for name in sorted(names or {DEFAULT_WORKLOAD})]
        return {
            "max_draft_tokens": self.policy.max_draft_tokens,
            "policy": "adaptive" if self.is_adaptive else "fixed",
            "step_times": self._describe_costs(),
            "step_s": self._step_s({row["workload"]: row["k"] for row in rows}),
            "head": self.ledger.head or None,
            "seconds_since_report": None if math.isinf(silent_s) else round(silent_s, 1),
            "context_tokens": round(self._context_tokens, 1),
            "workloads": rows,
        }

    def _step_s(self, k_of: Mapping[str, int]) -> float | None:
        """Seconds of a step at the mean load, each request with the K of its workload; None without load or costs."""
        num_requests = sum(self._load.values())
        if not self._costs or not num_requests:
            return None
        num_tokens = sum(load * (1 + k_of[workload]) for workload, load in self._load.items())
        scale = max(1.0, 1.0 / num_requests)  # a step has at least one request
        return round(self.costs.seconds(num_requests * scale, num_tokens * scale, self._context_tokens), 6)

    def _describe(self, workload: str) -> dict[str, Any]:
        survival = self.book.survival(workload)
        k, source = self.policy.k_of(base_workload(workload))  # a trial gets the K of its workload
        reason = "pinned by depth.by_workload" if source == "workload" else ""
        chosen = self._choices.get(base_workload(workload))
        if source == "default" and chosen is not None:
            k, source, reason = chosen.k, chosen.source, chosen.reason
        return {
            "workload": workload,
            "num_requests": round(self._load.get(workload, 0.0), 2),
            "num_steps": round(survival.num_steps, 1),
            "k": k,
            "source": source,
            "reason": reason,
            "acceptance_length": round(survival.acceptance_length(k), 3),
            "survival": {end: [round(value, 4) for value in getattr(survival, end)] for end in ("mean", "low", "high")},
        }

    def _describe_costs(self) -> str:
        if not self._costs:
            return "step times guessed, no engine has reported any"
        costs = self.costs
        start = "measured by the engines at their start, and" if costs.has_points else "learned"
        engines = "1 engine" if len(self._costs) == 1 else f"{len(self._costs)} engines"
        return f"step times {start} over {costs.num_steps:.0f} steps of {engines}"

    def take_over(self, before: "DepthControl") -> None:
        """Go on from what a control with other settings has learned, has seen last, and follows."""
        self.restore(before.snapshot())
        self._costs, self._load = dict(before._costs), dict(before._load)
        self._context_tokens, self._observed_s = before._context_tokens, before._observed_s
        self._followed, self._followed_s = before._followed, before._followed_s
        self._chooser.costs = self.costs

    def snapshot(self) -> dict[str, Any]:
        """The posteriors, and what was counted for them, as JSON, for `restore` after a restart."""
        return {"format": FORMAT, "ledger": self.ledger.to_wire(), "acceptance": self.book.snapshot()}

    def restore(self, snapshot: Any) -> None:
        """Raises ValueError naming what is wrong with the snapshot; nothing has changed then."""
        if not isinstance(snapshot, Mapping) or snapshot.get("format") != FORMAT:
            raise ValueError(f"the snapshot is not of format {FORMAT}: start without it")
        ledger = Ledger.from_wire(snapshot.get("ledger"))
        self.book.restore(snapshot.get("acceptance"))
        self.ledger = ledger


def _is_usable(report: TargetReport) -> bool:
    """Whether a report can be; one that cannot be is logged."""
    try:
        for counts in report.workloads.values():
            counts.counts.check()
        if not 0 <= report.context_tokens < math.inf:
            raise ValueError(f"context_tokens is {report.context_tokens}")
    except (AttributeError, TypeError, ValueError) as error:
        logger.warning("the report of target replica %s is left out: %s", getattr(report, "replica", "?"), error)
        return False
    return True
