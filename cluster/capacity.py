"""What one replica gives: output tokens per second of a target at its predicted best K, passes per second of a drafter.

Enters: step times, limits of the engine and of TPOT, and what each workload looks like (share of the demand, survival,
lengths). Leaves: a `Capacity`, remembered for inputs that are nearly the same. Never knows: demand, replicas, clocks.

Target (policy-and-apis, D4):

    mu = max over b of 1 / (1 / R(b) + p tau(b)),   R(b) = sum_c b_c L_c(k_c) / t(b, n)

k_c is the plan of `cluster.depth.best_depths` at b requests, not the K in force, so that the choice of K and the
number of replicas do not chase each other. p is the number of prompt tokens per output token and tau the time that one
adds to a step; 1 - mu / R is the share of time that prompts take. Batches b count where TPOT, prompts' time included,
keeps its limit; a workload that misses it even at b = 1 is left out of that, for no number of replicas would help it.
The workloads' shares in a batch follow from their tokens: b_c ~ d_c / L_c.

Drafter: passes per second = max over b of b / t_d(b), in requests drafted; a target step of one request needs one.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from cluster.depth import THROUGHPUT, Demand, Objective, Plan, best_depths
from cluster.step_time import StepCosts
from peagle.schema import Section

MAX_WORKLOADS = 3
"""Workloads planned apart, those with the most tokens; the rest are averaged. All plans of so few are compared."""

MAX_REMEMBERED = 256
SURVIVAL_GRAIN, SHARE_GRAIN = 0.02, 0.02
"""Inputs are rounded to these before capacity is computed: some tenths of a percent of capacity."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One workload: its share of the output tokens, S_1 .. S_K_max, and mean lengths of its requests in tokens."""

    workload: str
    share: float
    survival: tuple[float, ...]
    output_tokens: float
    prompt_tokens: float


@dataclass(frozen=True)
class Capacity:
    """One target replica at its best batch.

    Attributes:
        tokens_per_s: mu, output tokens per second.
        num_requests: b, the batch that gives it.
        acceptance_length: mean AL of its steps at the predicted K.
        depths: predicted K by workload; workloads planned together are under `others`.
        prefill_share: of the time.
        drafted_steps_per_token: request steps with K > 0 for each output token: what a remote drafter must serve.
        meets_limit: every workload keeps the TPOT limit.
        hopeless: workloads that miss the TPOT limit even alone.
    """

    tokens_per_s: float
    num_requests: int
    acceptance_length: float
    depths: Mapping[str, int]
    prefill_share: float
    drafted_steps_per_token: float
    meets_limit: bool
    hopeless: tuple[str, ...] = ()


class PassPoint(Section):
    """Seconds of a drafter's pass for so many requests."""

    num_requests: int = Field(ge=1)
    median_s: float = Field(gt=0, allow_inf_nan=False)


class PassTimes(Section):
    """Times of a remote drafter's passes by number of requests, as measured."""

    points: tuple[PassPoint, ...] = Field(min_length=1, strict=False)
    measured: bool = True
    conditions: dict[str, object] = Field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> "PassTimes":
        """Raises ValueError naming the file and what is wrong."""
        try:
            return cls.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError, ValidationError) as error:
            raise ValueError(f"pass times {path}: {error}") from error

    def passes_per_s(self, max_pass_s: float = math.inf) -> float:
        """Requests drafted per second at the best batch, of those whose pass takes at most `max_pass_s` (the quickest
        pass, where none is as quick)."""
        quickest = min(point.median_s for point in self.points)
        limit_s = max(max_pass_s, quickest)
        return max(point.num_requests / point.median_s for point in self.points if point.median_s <= limit_s)


class CapacityModel:
    """Capacities of a target replica, remembered. Not thread-safe.

    Args:
        costs: of the engine's steps, drafting included.
        max_num_seqs: requests that the engine runs at a time.
        max_tpot_s: limit of TPOT for all workloads, None for no limit.
        max_k: the most drafts a request gets.
        pinned: K of the workloads whose K is fixed; with `pinned_default`, K of all others too.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        max_num_seqs: int,
        max_k: int,
        max_tpot_s: float | None = None,
        pinned: Mapping[str, int] | None = None,
        pinned_default: int | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        self.costs, self.max_num_seqs, self.max_k = costs, max_num_seqs, max_k
        self._objective = Objective(max_tpot_s=max_tpot_s)
        self._pinned, self._pinned_default = dict(pinned or {}), pinned_default
        self._known: OrderedDict[tuple[Traffic, ...], Capacity] = OrderedDict()

    @property
    def max_steps_per_s(self) -> float:
        """Verification steps per second of all requests of a replica together that no engine exceeds."""
        batches = _batches(self.max_num_seqs)
        return max(b / self.costs.seconds(b, b) for b in batches)

    def capacity(self, traffic: Iterable[Traffic]) -> Capacity:
        """Capacity for a mix; shares need not add up to 1.

        Raises ValueError for no traffic or a survival that is none.
        """
        key = self._rounded(list(traffic))
        if key not in self._known:
            self._known[key] = self._best(key)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _rounded(self, traffic: list[Traffic]) -> tuple[Traffic, ...]:
        total = sum(one.share for one in traffic)
        if not traffic or not 0 < total < math.inf:
            raise ValueError("capacity needs traffic: at least one workload with a share above 0")
        apart = sorted(traffic, key=lambda one: (-one.share, one.workload))
        # A workload whose K is pinned is never averaged with one whose K is not.
        kept = [one for one in apart if self._pin(one.workload) is not None] if self._pinned_default is None else []
        free = [one for one in apart if one not in kept]
        if len(free) > MAX_WORKLOADS:
            free = [*free[: MAX_WORKLOADS - 1], _averaged(free[MAX_WORKLOADS - 1 :])]
        rounded = []
        for one in [*kept, *free]:
            share = max(SHARE_GRAIN, round(one.share / total / SHARE_GRAIN) * SHARE_GRAIN) if one.share else 0.0
            if share:
                survival = tuple(np.minimum.accumulate([_grain(value) for value in one.survival]).tolist())
                lengths = _two_digits(one.output_tokens), _two_digits(one.prompt_tokens)
                rounded.append(Traffic(one.workload, share, survival, *lengths))
        return tuple(rounded)

    def _pin(self, workload: str) -> int | None:
        return self._pinned.get(workload, self._pinned_default)

    def _best(self, traffic: Sequence[Traffic]) -> Capacity:
        alone = self._at(traffic, 1, {}, ())
        best = near = replace(alone, meets_limit=True)
        low, too_many = 1, self.max_num_seqs + 1
        while too_many - low > 1:
            # From the largest batch down by halves, on a logarithmic scale: TPOT grows with the batch.
            middle = too_many - 1 if too_many > self.max_num_seqs else max(low + 1, int(math.sqrt(low * too_many)))
            found = self._at(traffic, middle, near.depths, alone.hopeless)
            if found.meets_limit:
                low, near = middle, found
                best = max(best, found, key=lambda one: one.tokens_per_s)
            else:
                too_many = middle
        return replace(best, hopeless=alone.hopeless, meets_limit=not alone.hopeless)

    def _at(
        self, traffic: Sequence[Traffic], num_requests: int, near: Mapping[str, int], hopeless: Sequence[str]
    ) -> Capacity:
        """A batch of so many requests. `near`: predicted depths of a similar one, by which it is divided; `hopeless`:
        workloads without a limit."""
        lengths = {one.workload: _length(one.survival, near.get(one.workload, self.max_k)) for one in traffic}
        parts = {one.workload: one.share / lengths[one.workload] for one in traffic}
        total = sum(parts.values())
        demands = []
        for one in traffic:
            pin = self._pin(one.workload)
            objective = THROUGHPUT if one.workload in hopeless else self._objective
            num = num_requests * parts[one.workload] / total
            demand = Demand(one.workload, num, one.survival, max(self.max_k, pin or 0), objective)
            demands.append(demand if pin is None else demand.pinned(pin))
        context = sum(one.share * (one.prompt_tokens + one.output_tokens / 2) for one in traffic)
        context /= sum(one.share for one in traffic)
        return self._counted(traffic, demands, best_depths(demands, self.costs, context), context)

    def _counted(self, traffic: Sequence[Traffic], demands: Sequence[Demand], plan: Plan, context: float) -> Capacity:
        num_requests = round(sum(one.num_requests for one in demands))
        steps = {one.workload: one.num_requests / num_requests for one in demands}  # share of the request steps
        length = sum(steps[one.workload] * _length(one.survival, plan.depths[one.workload]) for one in traffic)
        drafted = sum(steps[name] for name, k in plan.depths.items() if k > 0)
        share = sum(one.share for one in traffic)
        prompts = sum(one.share / share / one.output_tokens for one in traffic)  # prompts per output token
        prompt_tokens = sum(one.share / share * one.prompt_tokens / one.output_tokens for one in traffic) / prompts
        prefill_s = prompts * self._prefill_s(num_requests, plan, steps, prompt_tokens, context)
        rate = plan.tokens_per_s
        prefill_share = prefill_s * rate / (1 + prefill_s * rate)
        limits_s = {one.workload: (one.objective.max_tpot_s or math.inf) * (1 - prefill_share) for one in demands}
        missed = tuple(name for name, tpot_s in plan.tpot_s.items() if tpot_s > limits_s[name] * (1 + 1e-9))
        return Capacity(
            tokens_per_s=rate * (1 - prefill_share),
            num_requests=num_requests,
            acceptance_length=length,
            depths=dict(plan.depths),
            prefill_share=prefill_share,
            drafted_steps_per_token=drafted / length,
            meets_limit=not missed,
            hopeless=missed,
        )

    def _prefill_s(
        self, num_requests: int, plan: Plan, steps: Mapping[str, float], prompt_tokens: float, context: float
    ) -> float:
        """What one prompt adds to the step that takes it in."""
        num_tokens = num_requests * (1 + sum(steps[name] * k for name, k in plan.depths.items()))
        without = self.costs.seconds(num_requests, num_tokens, context)
        with_prompt = self.costs.seconds(num_requests, num_tokens, context, prompt_tokens)
        return max(0.0, with_prompt - without)


def _batches(most: int) -> list[int]:
    """1 .. `most`, about four to a doubling."""
    found = {1, most, *(round(2 ** (step / 2)) for step in range(1, 40))}
    return sorted(b for b in found if b <= most)


def _length(survival: Sequence[float], k: int) -> float:
    return 1.0 + sum(survival[:k])


def _grain(value: float) -> float:
    return min(1.0, round(value / SURVIVAL_GRAIN) * SURVIVAL_GRAIN)


def _two_digits(value: float) -> float:
    return float(f"{max(value, 1.0):.1e}")


def _averaged(traffic: Sequence[Traffic]) -> Traffic:
    """Several workloads as one, by their tokens."""
    weights = np.array([one.share for one in traffic])
    weights = weights / weights.sum() if weights.sum() else np.full(len(traffic), 1 / len(traffic))
    survival = tuple((weights @ np.array([one.survival for one in traffic])).tolist())
    lengths = (float(weights @ [getattr(one, what) for one in traffic]) for what in ("output_tokens", "prompt_tokens"))
    return Traffic("others", sum(one.share for one in traffic), survival, *lengths)
