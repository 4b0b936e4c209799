"""Autoscaling from acceptance against Serve's queue length, in a model of a fleet whose head fails for 15 minutes.

    python -m benchmarks.simulate_scaling [--seeds 3]

Requests arrive at a constant mean rate; every replica runs them in steps that take what a `StepLatency` says, at the K
that is best for the true acceptance, which nobody tells the policies. Time goes by in seconds; replicas export their
counts every 10 s, a wish must last Serve's delays, and a replica starts in `START_S`. Compared are the share of
requests that keep their limits of TTFT and TPOT, and replica hours. Our policy is the product's own object.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.capacity import CapacityModel
from cluster.counts import Counts, TargetReport, WorkloadCounts
from cluster.scaling import Pool, ScalingPolicy
from cluster.settings import AutoscalingSettings
from cluster.step_latency import DRAFTS, REQUESTS, StepLatency

GOOD, BAD = (0.82, 0.66, 0.52), (0.06, 0.004, 0.0)
LATENCY = StepLatency(
    tuple(tuple(0.02 + 0.0005 * num * (1 + max(0.0, k)) + 0.001 * num for k in (-1.0, *DRAFTS)) for num in REQUESTS),
    prompt_row_s=0.0005,
    is_measured=True,
)
MODEL = CapacityModel(max_num_seqs=8, max_k=3)
REQUESTS_PER_S, OUTPUT_TOKENS, PROMPT_TOKENS = 6.0, 200, 100
DURATION_S, MEASURED_FROM_S = 3000, 600
LOW_S, HIGH_S = 1200, 2100
"""Acceptance collapses at the first and comes back at the second."""

MAX_TTFT_S, MAX_TPOT_S = 3.0, 0.040
START_S, UPSCALE_S, DOWNSCALE_S, EXPORT_S = 60, 15, 300, 10
MAX_REPLICAS = 20
PROBE_SHARE = 0.02
"""Of the steps, at K_max to see what lies there."""


@dataclass
class Request:
    arrived_s: int
    num_tokens: float
    remaining: float
    first_s: int = -1


@dataclass
class Replica:
    """`counts`: since it started, as a target counts."""

    name: str
    ready_s: int
    running: list[Request] = field(default_factory=list)
    counts: WorkloadCounts = field(default_factory=WorkloadCounts)

    def second(self, survival: Sequence[float], now_s: int, rng: np.random.Generator) -> list[Request]:
        """Decode for a second at the best K; returns the requests that end."""
        if not self.running:
            return []
        num = len(self.running)
        lengths = 1.0 + np.concatenate([[0.0], np.cumsum(survival)])
        k = int(np.argmax([lengths[k] / LATENCY.seconds(num, num * (1 + k)) for k in range(len(survival) + 1)]))
        num_steps = round(num / LATENCY.seconds(num, num * (1 + k)))
        drawn = drawn_counts(num_steps, k, survival, rng)
        tokens = (num_steps + drawn.num_accepted_tokens) / num
        num_probes = round(PROBE_SHARE * num_steps) if k < len(survival) else 0
        self.counts.counts += drawn + drawn_counts(num_probes, len(survival), survival, rng)
        ended = []
        for request in self.running:
            request.first_s = now_s if request.first_s < 0 else request.first_s
            request.remaining -= tokens
            if request.remaining <= 0:
                ended.append(request)
        self.running = [request for request in self.running if request.remaining > 0]
        self.counts.num_finished += len(ended)
        self.counts.num_output_tokens += round(sum(request.num_tokens for request in ended))
        self.counts.num_prompt_tokens += PROMPT_TOKENS * len(ended)
        return ended


def drawn_counts(num_steps: int, k: int, survival: Sequence[float], rng: np.random.Generator) -> Counts:
    accepted: list[int] = []
    for before, after in zip((1.0, *survival), survival[:k], strict=False):
        accepted.append(int(rng.binomial(accepted[-1] if accepted else num_steps, after / before if before else 0.0)))
    return Counts([num_steps] * k, [num_steps, *accepted[:-1]][:k], accepted)


Policy = Callable[[int, Pool, Sequence[Replica]], int]
"""The wanted number of replicas, of the time, the pool and the replicas that serve."""


def by_acceptance(utilisation: float) -> Policy:
    settings = AutoscalingSettings.model_validate(
        {
            "policy": "acceptance",
            "target": {"min": 1, "max": MAX_REPLICAS},
            "utilisation": utilisation,
            "start_time_s": float(START_S),
            "warmup_s": 0.0,
        }
    )
    policy = ScalingPolicy(settings, MODEL, max_ongoing_requests=256)

    def wanted(now_s: int, pool: Pool, ready: Sequence[Replica]) -> int:
        reports = [
            TargetReport(one.name, "", "h", {}, {"chat": one.counts}, step_latency=LATENCY, time_s=float(now_s))
            for one in ready
        ]
        documents = {report.replica: report.to_wire() for report in reports}
        return policy.decide(float(now_s), pool, list(documents), documents).target

    return wanted


def by_queue(target_ongoing_requests: float) -> Policy:
    """Serve's own rule."""
    return lambda now_s, pool, ready: min(
        MAX_REPLICAS, max(1, math.ceil(pool.ongoing_requests / target_ongoing_requests))
    )


@dataclass(frozen=True)
class Outcome:
    """`kept`: share of the requests that kept both limits; `recovery_s`: from the collapse to the minute from which on,
    until acceptance is back, 19 of 20 requests do."""

    kept: float
    replica_hours: float
    num_changes: int
    recovery_s: int


def simulate(policy: Policy, *, collapses: bool, seed: int, initial: int) -> Outcome:
    rng = np.random.default_rng(seed)
    fleet = [Replica(f"r{index}", 0) for index in range(initial)]
    waiting: deque[Request] = deque()
    ended: list[tuple[Request, int]] = []
    ongoing: deque[int] = deque(maxlen=30)  # what Serve averages over
    target, direction, since_s, num_changes, replica_s = initial, 0, 0, 0, 0
    for now_s in range(DURATION_S):
        survival = BAD if collapses and LOW_S <= now_s < HIGH_S else GOOD
        for _ in range(rng.poisson(REQUESTS_PER_S)):
            num_tokens = float(rng.integers(OUTPUT_TOKENS // 2, OUTPUT_TOKENS * 3 // 2))
            waiting.append(Request(now_s, num_tokens, num_tokens))
        ready = [replica for replica in fleet if replica.ready_s <= now_s]
        while waiting and (free := min(ready, key=lambda replica: len(replica.running))):
            if len(free.running) >= MODEL.max_num_seqs:
                break
            free.running.append(waiting.popleft())
            free.counts.num_started += 1
        for replica in ready:
            ended += [(request, now_s + 1) for request in replica.second(survival, now_s, rng)]
        ongoing.append(len(waiting) + sum(len(replica.running) for replica in ready))
        if now_s % EXPORT_S == 0:
            pool = Pool(len(ready), target, float(np.mean(ongoing)), float(len(waiting)))
            wish = policy(now_s, pool, ready)
            before, direction = direction, (wish > target) - (wish < target)
            since_s = since_s if direction == before else now_s
            if direction and now_s - since_s >= (UPSCALE_S if direction > 0 else DOWNSCALE_S):
                num_changes += now_s >= MEASURED_FROM_S
                target, direction = wish, 0
        while len(fleet) < target:
            fleet.append(Replica(f"r{now_s}-{len(fleet)}", now_s + START_S))
        if len(fleet) > target:
            for gone in fleet[target:]:  # what it runs goes to the others first
                waiting.extendleft(gone.running)
            fleet = fleet[:target]
        replica_s += len(fleet) * (now_s >= MEASURED_FROM_S)
    return _outcome(ended, replica_s, num_changes)


def _outcome(ended: Sequence[tuple[Request, int]], replica_s: int, num_changes: int) -> Outcome:
    is_kept: dict[int, list[bool]] = {}
    for request, end_s in ended:
        if request.arrived_s >= MEASURED_FROM_S:
            tpot_s = (end_s - request.first_s) / request.num_tokens
            kept = request.first_s - request.arrived_s <= MAX_TTFT_S and tpot_s <= MAX_TPOT_S
            is_kept.setdefault(request.arrived_s // 60, []).append(kept)
    low = range(LOW_S // 60, HIGH_S // 60)
    good = [minute for minute in low if np.mean(is_kept.get(minute, [True])) >= 0.95]
    steady = next((minute for minute in good if all(each in good for each in range(minute, low[-1] + 1))), None)
    recovery_s = HIGH_S - LOW_S if steady is None else 60 * steady - LOW_S
    everything = [kept for minute in is_kept.values() for kept in minute]
    return Outcome(float(np.mean(everything)), replica_s / 3600, num_changes, recovery_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args(arguments).seeds)
    arms = {f"acceptance, utilisation {share}": by_acceptance for share in (0.6, 0.7, 0.8)}
    for collapses in (False, True):
        print("collapse of the head" if collapses else "steady")
        for name in (*arms, *(f"queue length {num}" for num in (2, 3, 4, 5, 6))):
            number = float(name.split()[-1])
            make = arms.get(name, by_queue)
            found = [simulate(make(number), collapses=collapses, seed=seed, initial=4) for seed in seeds]
            kept, hours, changes, recovery = (
                float(np.mean([getattr(one, key) for one in found]))
                for key in ("kept", "replica_hours", "num_changes", "recovery_s")
            )
            print(f"  {name:30s} {kept:7.4f} kept {hours:6.2f} h {changes:5.1f} changes {recovery:6.0f} s to recover")


if __name__ == "__main__":
    main()
