"""A simulated fleet under Ray Serve: arrivals, routing, replicas that start and drain, late metrics, an autoscaler.

Enters: requests with times, step times, an `Arm` (who decides the number of replicas). Leaves: a `FleetRun`: attainment
of the limits, GPU hours, changes of the target number over time. Never knows: how an arm decides.

What is like the service: two replicas drawn at random, the one with fewer requests gets the request; at most
`max_num_seqs` at a time, the others wait in front of them, first come first served; K at admission is the best plan for
the learned acceptance at the present load, and K_max for some as a probe; a replica serves `start_time_s` after the
decision, give or take; one that goes finishes what it has. Counters reach the arm 6 to 10 s late, numbers of requests
as Serve averages them; Serve's delays and bounds apply to what it wishes (`serve_rules`). Times of the controller are
in steps of `TICK_S`. A GPU counts from the decision to start it until its replica is gone.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.fleet_engine import Replica, Request, StepSeconds, Trajectory
from benchmarks.simulation.fleet_records import Arm, Arrival, Conditions, FleetRun, Swap, View
from benchmarks.simulation.serve_rules import PUSH_S, RECORD_S, DelayedTarget, LookBack
from cluster.acceptance import AcceptanceBook, Counts
from cluster.depth import Demand, Objective, best_depths
from cluster.step_time import CostCurves, StepCosts
from cluster.traffic import CounterExport, Reading

TICK_S = 2.0
COUNT_S, PLAN_S = 10.0, 30.0
PROBE_SHARE = 0.02
LAGS_S = (6.0, 8.0, 10.0)
START_SPREAD = 0.2


@dataclass(eq=False)
class _Node:
    """A replica's life. `ready_s`: from when on it serves; `lag_s`: of its counters."""

    replica: Replica
    began_s: float
    ready_s: float
    lag_s: float
    export: CounterExport
    is_ready: bool = False
    is_draining: bool = False
    recorded: deque[Reading] = field(default_factory=deque)
    shown: Reading | None = None
    steps: dict[str, NDArray[np.int64]] = field(default_factory=dict)


class Fleet:
    """One run of one arm. `paths`: trajectories by answer and K, shared between runs."""

    def __init__(
        self,
        conditions: Conditions,
        times: StepCosts,
        seconds: StepSeconds,
        arm: Arm,
        arrivals: Sequence[Arrival],
        swaps: Sequence[Swap],
        initial: int,
        seed: int,
        paths: Callable[[bytes, int], Trajectory],
    ) -> None:
        self._conditions, self._seconds, self._arm, self._paths = conditions, seconds, arm, paths
        self._max_draft_tokens = times.max_draft_tokens
        self._curves = CostCurves.of(times)
        self._arrivals, self._swaps = deque(enumerate(arrivals)), deque(swaps)
        self._random = random.Random(seed)
        self._queue: deque[Request] = deque()
        self._nodes: list[_Node] = []
        self._num_started = 0
        self._head = "sound"
        self._confirm: Callable[[bytes], bytes] | None = None
        self._target = DelayedTarget(
            initial,
            conditions.min_replicas,
            conditions.max_replicas,
            conditions.upscale_delay_s,
            conditions.downscale_delay_s,
            arm.downscaling_factor,
        )
        self._requests, self._queued = LookBack(), LookBack()
        self._book = AcceptanceBook(times.max_draft_tokens)
        self._depths: Mapping[str, int] = {}
        self._objective = Objective(max_tpot_s=conditions.max_tpot_s)
        self.run = FleetRun()
        for _ in range(initial):
            self._start(0.0, 0.0)

    def finish(self) -> FleetRun:
        """Runs to the end of the duration; what then runs or waits is followed to its end on the replicas there are."""
        tick, now_s = 0, 0.0
        while now_s < self._conditions.duration_s:
            tick += 1
            now_s = tick * TICK_S
            while self._arrivals and self._arrivals[0][1].time_s <= now_s:
                index, arrival = self._arrivals.popleft()
                self._progress(arrival.time_s)
                prompt_tokens = self._conditions.prompt_tokens
                self._queue.append(Request(index, arrival.label, arrival.answer, prompt_tokens, arrival.time_s))
                self._dispatch(arrival.time_s)
            self._progress(now_s)
            self._control(now_s)
        for node in self._nodes:
            self._count_hours(node, now_s)
        for node in self._nodes:
            node.is_ready, node.is_draining = True, False
        self._finish_requests(now_s)
        self._collect()
        return self.run

    def _finish_requests(self, now_s: float) -> None:
        self._dispatch(now_s)
        while self._nodes and (self._queue or any(node.replica.num_ongoing for node in self._nodes)):
            now_s += TICK_S
            self._progress(now_s)
            for node in self._nodes:
                node.replica.advance(now_s)
        self.run.num_requests += len(self._queue)

    def _progress(self, now_s: float) -> None:
        """Up to now; requests that wait are dispatched as others end."""
        while self._queue:
            serving = [node.replica for node in self._nodes if node.is_ready]
            at_s = min((replica.next_event_s() for replica in serving), default=float("inf"))
            if at_s > now_s:
                break
            for replica in serving:
                replica.advance(at_s)
            self._dispatch(at_s)

    def _dispatch(self, now_s: float) -> None:
        routable = [node.replica for node in self._nodes if node.is_ready and not node.is_draining]
        while self._queue and routable:
            drawn = self._random.sample(routable, 2) if len(routable) > 1 else routable
            for replica in drawn:
                replica.advance(now_s)
            best = min(drawn, key=lambda one: one.num_ongoing)
            if best.num_ongoing >= self._conditions.max_num_seqs:
                for replica in routable:
                    replica.advance(now_s)
                best = min(routable, key=lambda one: one.num_ongoing)
            if best.num_ongoing >= self._conditions.max_num_seqs:
                return
            request = self._queue.popleft()
            best.admit(request, self._depth_of(request.label), now_s)

    def _depth_of(self, label: str) -> int:
        if self._random.random() < PROBE_SHARE:
            return self._max_draft_tokens
        return self._depths.get(label, self._max_draft_tokens)

    def _control(self, now_s: float) -> None:
        """What happens at a tick: starts and ends, swaps, metrics, the plan of K, and the arm's wish."""
        for node in self._nodes:
            if not node.is_ready and node.ready_s <= now_s:
                node.is_ready = True
                node.replica.advance(now_s)
        self._retire(now_s)
        while self._swaps and self._swaps[0].time_s <= now_s:
            swap = self._swaps.popleft()
            self._head, self._confirm = swap.head, swap.confirm
            self._book = AcceptanceBook(self._max_draft_tokens)  # a new head is known nothing of
            for node in self._nodes:
                node.replica.change_head(now_s, swap.confirm)
                node.steps = {}
        self._dispatch(now_s)
        serving = [node for node in self._nodes if node.is_ready and not node.is_draining]
        if now_s % RECORD_S == 0:
            ongoing = 0
            for node in self._nodes:
                node.replica.advance(now_s)
                ongoing += node.replica.num_ongoing
            self._requests.sample(ongoing + len(self._queue), now_s)
            self._queued.sample(len(self._queue), now_s)
        if now_s % PUSH_S == 0:
            self._requests.deliver()
            self._queued.deliver()
        if now_s % COUNT_S == 0:
            self._record(serving, now_s)
        if now_s % PLAN_S == 0:
            self._plan(serving)
        self._scale(serving, now_s)

    def _record(self, serving: Sequence[_Node], now_s: float) -> None:
        """Counters for the arm, and what is new in them for the choice of K."""
        new: dict[str, NDArray[np.int64]] = {}
        for node in serving:
            node.replica.count(now_s)
            for label, steps in node.replica.steps().items():
                before = node.steps.get(label)
                # A head that was swapped begins anew.
                since = steps if before is None or (steps < before).any() else steps - before
                new[label] = new[label] + since if label in new else since
                node.steps[label] = steps
            if self._arm.reads_counters:
                values = node.export.flat(self._head, node.replica.totals())
                node.recorded.append(Reading(node.replica.name, now_s, values))
        for label, rows in new.items():
            self._book.add(label, Counts(*(tuple(row.tolist()) for row in rows)))

    def _plan(self, serving: Sequence[_Node]) -> None:
        load: dict[str, float] = {}
        for node in serving:
            for label, num in node.replica.num_running_by_label().items():
                load[label] = load.get(label, 0.0) + num / len(serving)
        demands = [Demand(name, num, self._book.survival(name).gains(), self._objective) for name, num in load.items()]
        if demands:
            self._depths = best_depths(sorted(demands, key=lambda one: one.workload), self._curves).depths

    def _scale(self, serving: Sequence[_Node], now_s: float) -> None:
        for node in serving:
            while node.recorded and now_s - node.recorded[0].time_s >= node.lag_s:
                node.shown = node.recorded.popleft()
        view = View(
            now_s=now_s,
            num_running=len(serving),
            target=self._target.target,
            num_requests=self._requests.seen,
            num_queued=self._queued.seen,
            running=tuple(node.replica.name for node in serving),
            readings=tuple(node.shown for node in serving if node.shown is not None),
        )
        before = self._target.target
        after = self._target.apply(self._arm.wish(view), len(serving), self._requests.seen, now_s)
        if after == before:
            return
        self.run.targets.append((now_s, after))
        self.run.num_changes += now_s >= self._conditions.measured_from_s
        alive = [node for node in self._nodes if not node.is_draining]
        for _ in range(after - len(alive)):
            spread = self._random.uniform(1 - START_SPREAD, 1 + START_SPREAD)
            self._start(now_s, now_s + spread * self._conditions.start_time_s)
        # Serve stops replicas that do not serve yet first.
        alive.sort(key=lambda node: (node.is_ready, node.replica.num_ongoing, -node.began_s))
        for node in alive[: max(0, len(alive) - after)]:
            node.is_draining = True
        self._retire(now_s)

    def _start(self, now_s: float, ready_s: float) -> None:
        name = f"replica-{self._num_started}"
        lag_s = LAGS_S[self._num_started % len(LAGS_S)]
        self._num_started += 1
        replica = Replica(name, self._seconds, self._paths, self._max_draft_tokens)
        if self._confirm is not None:
            replica.change_head(now_s, self._confirm)
        self._nodes.append(_Node(replica, now_s, ready_s, lag_s, CounterExport(), is_ready=ready_s <= now_s))

    def _retire(self, now_s: float) -> None:
        still = []
        for node in self._nodes:
            if node.is_draining:
                node.replica.advance(now_s)
                if not node.replica.num_ongoing:
                    self._count_hours(node, now_s)
                    self._collect([node])
                    continue
            still.append(node)
        self._nodes = still

    def _count_hours(self, node: _Node, now_s: float) -> None:
        self.run.gpu_hours += max(0.0, now_s - max(node.began_s, self._conditions.measured_from_s)) / 3600

    def _collect(self, nodes: Sequence[_Node] | None = None) -> None:
        conditions, run = self._conditions, self.run
        for node in self._nodes if nodes is None else nodes:
            for request, ended_s in node.replica.ended:
                if request.arrived_s < conditions.measured_from_s:
                    continue
                ttft_s = request.first_token_s - request.arrived_s
                tpot_s = (ended_s - request.first_token_s) / max(1, len(request.answer))
                is_kept = ttft_s <= conditions.max_ttft_s and tpot_s <= conditions.max_tpot_s
                run.num_requests += 1
                run.num_kept += is_kept
                run.num_tokens += request.num_tokens
                minute = int(request.arrived_s // 60)
                num, num_kept = run.minutes.get(minute, (0, 0))
                run.minutes[minute] = num + 1, num_kept + is_kept
                run.tpot_s.append(tpot_s)
                run.ttft_s.append(ttft_s)


def remembered_paths() -> Callable[[bytes, int], Trajectory]:
    """Trajectories, computed once for each answer and K."""
    return functools.cache(Trajectory.of)
