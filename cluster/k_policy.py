"""The choice of K: how many drafts the requests of each workload may have verified in a step.

Enters: the targets' reports, about once a second. Leaves: a `PolicyUpdate` with the K of every workload, a `Drafting`
for each request, and a document that shows what is believed and why. Knows no HTTP, no Ray, no engine, no clock.

One replica runs b_c requests of each workload c in a step. At K = k_c the step yields

    sum over c of b_c L_c(k_c) tokens,   L_c(k) = 1 + S_c1 + ... + S_ck

with the cumulative acceptance rates S of `cluster.acceptance`, and takes as long as `cluster.step_latency` says for
b requests and sum b_c k_c drafts. `best_ks` gives the most tokens per second:

1. The next draft that a step verifies should be the one that is accepted most often. So the drafts of all workloads are
   ranked by S, and only the first 0, 1, 2, ... of this ranking are compared. That is the optimum where each further
   draft takes the same time.
2. With no draft at all the drafter's pass is left out too. K = 0 wins where drafting does not pay.
3. A workload may have a limit of TPOT, its seconds per token t / L_c. Plans that keep all limits come first, and are
   also taken from a ranking in which the drafts of workloads with a limit stand first.

The router decides so for all targets (`KPolicy.observe`), changes K only for a gain of `MIN_GAIN`, and hands a
`PolicyUpdate` to the front ends. A front end then answers for each request (`PolicyUpdate.choose`): a K that the client
or the operator fixed stays, and a caller's limit caps a learned K. The scheduler verifies all drafts of a fixed K in
every step. A learned K is a plan: each step verifies what pays at its own load (`cluster.step_allocation`). It verifies
up to `max_k`, or up to K where any workload has a limit of TPOT. A learned `max_k` is 0 on a GPU while no workload
drafts, and with a limit of TPOT for each workload with K = 0. A few of its requests then explore: they get the largest
K, because nothing would be measured without them.
"""

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.acceptance import AcceptancePosteriors, AcceptanceSnapshot
from cluster.counts import CounterDeltas, DeltaTracker, TargetReport
from cluster.heads import HeadRouting
from cluster.request import DEFAULT_WORKLOAD, Drafting, KRules, base_workload
from cluster.spending import DaySpending
from cluster.step_latency import StepLatency, average_latency, guessed_latency

MIN_GAIN = 0.03
"""Expected gain in tokens per second for which K changes, as a share of the tokens of the workloads that change."""

MIN_STEPS = 200.0
"""Steps of any traffic below which K rests on a published curve, and is at least 1."""

EXPLORED_STEPS = 0.01
"""Share of steps with an exploration request, while a workload has `max_k` = 0."""

MIN_SHARED = 1.5
"""Mean requests of a step from which workloads share steps. A mean of readings of 1 may lie a little above 1."""

MAX_REPORT_AGE_S = 30.0
"""The step latency of a replica that has not reported for longer does not count."""

LOAD_WEIGHT = 0.5
"""Weight of the newest reading in the mean load; readings come about once a second."""


# ---- the best K of each workload, at one time


@dataclass(frozen=True)
class Demand:
    """One workload on one replica.

    Attributes:
        num_requests: mean number of its requests in a step, above 0; a fraction where traffic is thin.
        rates: cumulative acceptance rates S_1, S_2, ..., at least `max_k`.
        min_k, max_k: the fewest and the most drafts that its requests may get; equal where K is pinned.
        max_tpot_s: limit of seconds per output token.
    """

    workload: str
    num_requests: float
    rates: Sequence[float]
    max_k: int
    min_k: int = 0
    max_tpot_s: float = math.inf

    def pinned(self, k: int) -> "Demand":
        k = min(max(k, self.min_k), self.max_k)
        return dataclasses.replace(self, min_k=k, max_k=k)

    def acceptance_length(self, k: int) -> float:
        return 1.0 + sum(self.rates[:k])


@dataclass(frozen=True)
class Plan:
    """K by workload, and what is expected of it: output tokens per second of the replica, and seconds per output token
    of each workload. `excess`: the greatest TPOT / limit of any workload, 1.0 where every limit is kept."""

    ks: Mapping[str, int]
    tokens_per_s: float
    tpot_s: Mapping[str, float]
    excess: float = 1.0
    reason: str = field(default="", compare=False)


def best_ks(demands: Sequence[Demand], latency: StepLatency) -> Plan:
    """K of each workload that gives the most tokens per second within the limits of TPOT; at a tie, fewer drafts. Where
    no plan compared keeps all limits, the one that exceeds them least.

    `demands`: at least one, and each workload once."""
    scale = 1.0 / min(1.0, sum(demand.num_requests for demand in demands))  # a step that runs has a request
    loads_C = np.array([scale * demand.num_requests for demand in demands])
    limits_C = np.array([demand.max_tpot_s for demand in demands])
    num_requests, least = float(loads_C.sum()), [demand.min_k for demand in demands]
    drafts = [(rate, index) for index, each in enumerate(demands) for rate in each.rates[each.min_k : each.max_k]]
    curve = latency.curve(num_requests, math.ceil(sum(loads_C * [each.max_k for each in demands])), is_drafted=True)
    undrafted_s = float(latency.curve(num_requests, 0)[0])
    plans: list[tuple[tuple[float, float, float], Plan]] = []
    for limited_first in {False, bool(np.isfinite(limits_C).any())}:
        # Stable: a workload's own drafts keep their order at equal rates.
        ranking = sorted(drafts, key=lambda draft: (limited_first and math.isinf(limits_C[draft[1]]), -draft[0]))
        owners = [index for _, index in ranking]
        lengths_PC = np.zeros((len(ranking) + 1, len(demands)))  # of plans with the first 0, 1, 2, ... of the ranking
        lengths_PC[0] = [each.acceptance_length(each.min_k) for each in demands]
        lengths_PC[range(1, len(lengths_PC)), owners] = [rate for rate, _ in ranking]
        lengths_PC = lengths_PC.cumsum(0)
        num_drafts_P = np.cumsum([loads_C @ least, *loads_C[owners]])
        seconds_P = np.interp(num_drafts_P, range(len(curve)), curve)
        if not any(least):
            seconds_P[0] = undrafted_s
        tpot_s_PC = seconds_P[:, None] / lengths_PC
        # Rounded, so that differences in the last digits do not decide.
        excess_P = np.round(np.maximum(1.0, (tpot_s_PC / limits_C).max(1)), 9)
        gain_P = np.round(lengths_PC @ loads_C / seconds_P * undrafted_s / num_requests, 9)
        at = int(np.lexsort((num_drafts_P, -gain_P, excess_P))[0])
        rank = (float(excess_P[at]), -float(gain_P[at]), float(num_drafts_P[at]))
        ks = {each.workload: each.min_k + owners[:at].count(index) for index, each in enumerate(demands)}
        tpot_s = {each.workload: float(tpot_s_PC[at, index]) for index, each in enumerate(demands)}
        plans.append((rank, Plan(ks, float(lengths_PC[at] @ loads_C / seconds_P[at]), tpot_s, rank[0])))
    _, plan = min(plans, key=lambda found: found[0])
    reason = f"{plan.tokens_per_s:.0f} tokens/s expected at {num_requests:.3g} request{'s' * (num_requests != 1)}, "
    reason += f"{num_requests / undrafted_s:.0f} without drafts" if any(plan.ks.values()) else "no draft pays"
    if plan.excess > 1.0:
        worst = max(demands, key=lambda demand: plan.tpot_s[demand.workload] / demand.max_tpot_s)
        reason += f"; no K meets {1e3 * worst.max_tpot_s:.3g} ms per token of {worst.workload}"
        reason += f", the fastest gives {1e3 * plan.tpot_s[worst.workload]:.3g} ms"
    elif np.isfinite(limits_C).any():
        reason += "; within the TPOT limits"
    return dataclasses.replace(plan, reason=reason)


def steady_ks(demands: Sequence[Demand], latency: StepLatency, ks: Mapping[str, int]) -> Plan:
    """The best plan, or the one with the `ks` in force while the best one gains less than `MIN_GAIN`, or brings TPOT
    nearer to a missed limit by less. Workloads without a K in force get the best."""
    best = best_ks(demands, latency)
    kept = best_ks([demand.pinned(ks.get(demand.workload, best.ks[demand.workload])) for demand in demands], latency)
    tokens = {demand.workload: demand.num_requests / kept.tpot_s[demand.workload] for demand in demands}
    changed = sum(rate for name, rate in tokens.items() if kept.ks[name] != best.ks[name]) / sum(tokens.values())
    gain = best.tokens_per_s / kept.tokens_per_s - 1.0
    if kept.ks == best.ks or kept.excess > best.excess * (1.0 + MIN_GAIN):
        return best
    if kept.excess >= best.excess and gain > MIN_GAIN * changed:
        return best
    return dataclasses.replace(kept, reason=f"kept, for another K gains only {max(gain, 0.0):.1%}: {kept.reason}")


# ---- K over time


@dataclass(frozen=True)
class PolicyUpdate:
    """What the router tells every target replica, once a second.

    Attributes:
        num_targets: target replicas that run.
        workloads: names that any of them distinguishes.
        choices: what requests get by workload, that of `default` for every other; {} where K is not chosen.
        exploration_share: share of the requests of workloads with `max_k` = 0 that explore.
        heads: requests that draft with a head which the settings do not name.
        spending: what callers have used today.
    """

    num_targets: int = 1
    workloads: tuple[str, ...] = ()
    choices: Mapping[str, Drafting] = field(default_factory=dict)
    exploration_share: float = 0.0
    heads: HeadRouting = field(default_factory=HeadRouting)
    spending: DaySpending = field(default_factory=DaySpending)

    def choose(self, drafting: Drafting, max_k: int) -> Drafting:
        """`drafting` as it is where the request or the operator fixed K, or nothing was chosen yet. Else with the K
        that was chosen, at most `max_k` (the limit of the operator, and of the request's caller)."""
        if drafting.source != "default" or not self.choices:
            return drafting
        choice = self.choices.get(drafting.workload) or self.choices[DEFAULT_WORKLOAD]
        choice = dataclasses.replace(choice, workload=drafting.workload)
        if choice.max_k == 0 < max_k and random.random() < self.exploration_share:
            reason = f"{self.exploration_share:.2g} of requests explore: they get K={max_k} instead of 0"
            return Drafting(drafting.workload, max_k, "exploration", reason)
        if choice.k > max_k:  # the time per token that was expected is of another K
            reason = f"{choice.reason}; the caller's limit"
            choice = dataclasses.replace(choice, k=max_k, reason=reason, expected_tpot_s=None)
        return dataclasses.replace(choice, max_k=min(choice.max_k, max_k))


class KPolicy:
    """Learns acceptance, and decides K where neither the request nor the operator did. Not thread-safe.

    Args:
        rules: the operator's limits, defaults and pinned workloads, which may change.
        on_gpu: whether the engines have GPUs. It sets the step latency until they report theirs, and whether K = 0 is
            decided for all steps or for each.
        max_num_seqs: sequences that one engine runs at a time; what it has beyond them waits, and is no load of a step.
    """

    def __init__(self, rules: KRules, *, on_gpu: bool = False, max_num_seqs: float = math.inf) -> None:
        self.rules, self.max_num_seqs = rules, max_num_seqs
        self.tracker = DeltaTracker()
        self.posteriors = AcceptancePosteriors(rules.max_draft_tokens)
        self._on_gpu, self._guess = on_gpu, guessed_latency(on_gpu)
        self._latencies: dict[str, tuple[float, StepLatency]] = {}
        self._load: dict[str, float] = {}
        self._choices: dict[str, Drafting] = {}
        self._observed_s = -math.inf

    @property
    def latency(self) -> StepLatency:
        """Step latency of the engines together, as they last reported it."""
        return average_latency([found for _, found in self._latencies.values()]) if self._latencies else self._guess

    @property
    def num_requests(self) -> float:
        """Mean requests of a replica's step."""
        return sum(self._load.values())

    def observe(self, reports: Sequence[TargetReport], now_s: float) -> CounterDeltas | None:
        """Take in one round of reports, all replicas at once, and decide anew. `now_s`: monotonic seconds. Returns what
        is new in the reports; None without reports."""
        if not reports:
            self._load.clear()
            return None
        deltas = self.tracker.update(reports)
        self.posteriors.update(deltas)
        self._latencies |= {r.replica: (now_s, r.step_latency) for r in reports if r.step_latency is not None}
        self._latencies = {
            name: found for name, found in self._latencies.items() if 0 <= now_s - found[0] <= MAX_REPORT_AGE_S
        }
        mean: dict[str, float] = {}
        for report in reports:
            for workload, counts in report.workloads.items():
                mean[workload] = mean.get(workload, 0.0) + max(0, counts.num_running) / len(reports)
        share_running = min(1.0, self.max_num_seqs / max(1.0, sum(mean.values())))
        for workload in {*self._load, *mean}:
            before = self._load.get(workload, 0.0)
            self._load[workload] = before + LOAD_WEIGHT * (share_running * mean.get(workload, 0.0) - before)
        self._load = {workload: num for workload, num in self._load.items() if num > 0.01}
        self._observed_s = now_s
        self._choices = self._choose() if self.rules.is_adaptive else {}
        return deltas

    def _choose(self) -> dict[str, Drafting]:
        """What requests get, by workload."""
        ks, latency = {name: choice.k for name, choice in self._choices.items()}, self.latency
        is_cold, num_requests = self.posteriors.num_steps < MIN_STEPS, self.num_requests
        loaded = [self._demand(name, load, is_cold) for name, load in self._load.items()]
        plan, beside, choices = None, list[Demand](), dict[str, Drafting]()
        if num_requests >= MIN_SHARED:
            plan = steady_ks(loaded, latency, ks)
            beside = [demand.pinned(plan.ks[demand.workload]) for demand in loaded]
        for name in dict.fromkeys((DEFAULT_WORKLOAD, *self.posteriors.workloads(), *self._load)):
            found, demand = plan, self._demand(name, 1.0, is_cold, is_free=True)
            is_pinned = base_workload(name) in self.rules.by_workload  # then `default` still stands for others
            if found is None or name not in found.ks or is_pinned:  # as one request beside those that share steps
                others = [
                    dataclasses.replace(one, workload=f"pinned {name}") if one.workload == name else one
                    for one in beside
                ]
                found = steady_ks([*others, demand], latency, ks)
            k, rates = found.ks[name], tuple(round(rate, 4) for rate in demand.rates)
            # On a GPU the drafter's pass is left out only where no request may draft, on a CPU step by step.
            steps_decide = not self.rules.max_tpot_ms and (any(found.ks.values()) or not self._on_gpu)
            choices[name] = Drafting(
                name,
                k,
                "prior" if is_cold else "learned",
                f"few steps measured yet: {found.reason}" if is_cold else found.reason,
                rates if steps_decide else rates[:k],
                found.tpot_s[name],
                self.rules.max_k if steps_decide or k > 0 else 0,
            )
        return choices

    def _demand(self, name: str, num_requests: float, is_cold: bool, *, is_free: bool = False) -> Demand:
        """`is_free`: though the operator may have pinned its K."""
        rules, base, bounds = self.rules, base_workload(name), (int(is_cold and self.rules.max_k > 0), self.rules.max_k)
        low, high = bounds if is_free else (rules.by_workload.get(base, k) for k in bounds)
        rates = self.posteriors.rates(name).mean[: rules.max_k]
        return Demand(name, num_requests, rates, high, low, rules.max_tpot_ms.get(base, math.inf) / 1e3)

    def make_update(self, num_targets: int) -> PolicyUpdate:
        """The update for each of `num_targets` target replicas; `heads` and `spending` are the router's to add."""
        workloads = tuple(sorted({*self.posteriors.workloads(), *self._load}))
        return PolicyUpdate(num_targets, workloads, self._choices, EXPLORED_STEPS / max(1.0, self.num_requests))

    def document(self, now_s: float) -> dict[str, Any]:
        """What is believed and chosen, as JSON: see `deployments.view`."""
        names = {*self.posteriors.workloads(), *self._load, *self.rules.by_workload} or {DEFAULT_WORKLOAD}
        rows = [self._describe(name) for name in sorted(names)]
        silent_s, latency, engines = now_s - self._observed_s, self.latency, len(self._latencies)
        learned = f"learned over {latency.num_steps:.0f} steps of {engines} engine{'s' * (engines != 1)}"
        load, drafts = self.num_requests, sum(self._load.get(row["workload"], 0) * row["k"] for row in rows)
        step_s = latency.seconds(max(1.0, load), max(1.0, load) * (1 + drafts / load)) if engines and load else None
        return {
            "max_draft_tokens": self.rules.max_draft_tokens,
            "policy": "adaptive" if self.rules.is_adaptive else "fixed",
            "step_times": f"step times {learned if engines else 'guessed, no engine has reported any'}",
            "step_s": None if step_s is None else round(step_s, 6),
            "head": self.posteriors.head or None,
            "seconds_since_report": None if math.isinf(silent_s) else round(silent_s, 1),
            "workloads": rows,
        }

    def _describe(self, workload: str) -> dict[str, Any]:
        rates = self.posteriors.rates(workload)
        k, source = self.rules.find_k(base_workload(workload))  # a trial gets the K of its workload
        reason = "pinned by num_draft_tokens.by_workload" if source == "workload" else ""
        chosen = self._choices.get(base_workload(workload))
        if source == "default" and chosen is not None:
            k, source, reason = chosen.k, chosen.source, chosen.reason
        return {
            "workload": workload,
            "num_requests": round(self._load.get(workload, 0.0), 2),
            "num_steps": round(rates.num_steps, 1),
            "k": k,
            "source": source,
            "reason": reason,
            "acceptance_length": round(rates.acceptance_length(k), 3),
            "acceptance_rates": {
                end: [round(value, 4) for value in getattr(rates, end)] for end in ("mean", "low", "high")
            },
        }

    def restore(self, reports: Iterable[TargetReport], acceptance: AcceptanceSnapshot) -> None:
        """Go on from `tracker.last_reports` and the posteriors' snapshot of an earlier policy. Raises ValueError for
        one of another K_max."""
        self.posteriors.restore(acceptance)
        for report in reports:
            self.tracker.remember(report)
