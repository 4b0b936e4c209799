"""What one target replica gives: output tokens per second at its predicted best K.

Enters: step latency, limits of the engine and of TPOT, and what each workload looks like. Leaves: a `Capacity`. Never
knows: replicas, clocks.

    mu = max over b of 1 / (1 / R(b) + p tau(b)),   R(b) = sum_c b_c L_c(k_c) / t(b, n)

k_c is the plan of `cluster.k_policy.best_ks` at b requests. It is not the K in force, so that the choice of K and the
number of replicas do not chase each other. p is the number of prompts per output token, and tau the time that one
prompt adds to a step. So 1 - mu / R is the share of time that prompts take.

Only batches b count whose TPOT, prompts' time included, keeps its limit. A workload that misses the limit even at b = 1
is left out of this check, because no number of replicas would help it. The workloads' shares in a batch follow from
their tokens: b_c ~ d_c / L_c.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.k_policy import Demand, best_ks
from cluster.step_latency import StepLatency


@dataclass(frozen=True)
class WorkloadDemand:
    """One workload: arrivals, mean lengths in tokens, and its cumulative acceptance rates."""

    workload: str
    requests_per_s: float
    output_tokens: float
    prompt_tokens: float
    rates: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.requests_per_s * self.output_tokens

    def acceptance_length(self, k: int) -> float:
        return 1.0 + sum(self.rates[:k])


@dataclass(frozen=True)
class Capacity:
    """One target replica at its best batch.

    Attributes:
        tokens_per_s: mu, output tokens per second.
        num_requests: b, the batch that gives it.
        acceptance_length: mean AL of its steps at the predicted K.
        ks: predicted K by workload.
        missed: workloads that miss the TPOT limit; in the result of `CapacityModel.capacity` those that miss it even
            alone.
    """

    tokens_per_s: float
    num_requests: int
    acceptance_length: float
    ks: Mapping[str, int]
    missed: tuple[str, ...] = ()


@dataclass(frozen=True)
class CapacityModel:
    """Limits of a target replica.

    Attributes:
        max_num_seqs: requests that the engine runs at a time.
        max_k: the most drafts a request gets.
        pinned: K of the workloads whose K is fixed; with `pinned_default`, K of all others too.
        max_tpot_ms: limit of TPOT for all workloads, None for no limit.
    """

    max_num_seqs: int
    max_k: int
    pinned: Mapping[str, int] = field(default_factory=dict)
    pinned_default: int | None = None
    max_tpot_ms: float | None = None

    def capacity(self, latency: StepLatency, demands: Sequence[WorkloadDemand]) -> Capacity:
        """Capacity for a mix. Raises ValueError for no demand."""
        if not sum(demand.tokens_per_s for demand in demands) > 0:
            raise ValueError("capacity needs at least one workload with arrivals")
        alone = self._at(1, latency, demands, {}, ())
        best = near = replace(alone, missed=())
        low, too_many = 1, self.max_num_seqs + 1
        while too_many - low > 1:
            # From the largest batch down by halves, on a logarithmic scale: TPOT grows with the batch.
            middle = too_many - 1 if too_many > self.max_num_seqs else max(low + 1, int(math.sqrt(low * too_many)))
            found = self._at(middle, latency, demands, near.ks, alone.missed)
            if found.missed:
                too_many = middle
            else:
                low, near = middle, found
                best = max(best, found, key=lambda capacity: capacity.tokens_per_s)
        return replace(best, missed=alone.missed)

    def _at(
        self,
        num_requests: int,
        latency: StepLatency,
        demands: Sequence[WorkloadDemand],
        ks_near: Mapping[str, int],
        hopeless: Sequence[str],
    ) -> Capacity:
        """The capacity at a batch of `num_requests`. `ks_near`: predicted K at a similar batch, by which this one is
        divided among the workloads; `hopeless`: workloads without a limit."""
        rate = sum(demand.tokens_per_s for demand in demands)
        parts = np.array([d.tokens_per_s / d.acceptance_length(ks_near.get(d.workload, self.max_k)) for d in demands])
        parts /= parts.sum()  # of the requests of a step
        asked = []
        for demand, part in zip(demands, parts.tolist(), strict=True):
            k = self.pinned.get(demand.workload, self.pinned_default)
            limit_s = math.inf if demand.workload in hopeless else (self.max_tpot_ms or math.inf) / 1e3
            low, high = (0, self.max_k) if k is None else (k, k)
            asked.append(Demand(demand.workload, num_requests * part, demand.rates, high, low, limit_s))
        plan = best_ks(asked, latency)
        ks = [plan.ks[demand.workload] for demand in demands]
        lengths = np.array([demand.acceptance_length(k) for demand, k in zip(demands, ks, strict=True)])
        prompts_per_token = sum(demand.requests_per_s for demand in demands) / rate
        prompt_tokens = sum(d.requests_per_s * d.prompt_tokens for d in demands) / rate / prompts_per_token
        num_tokens = num_requests * (1.0 + float(parts @ ks))
        prompt_s = latency.seconds(num_requests, num_tokens, prompt_tokens) - latency.seconds(num_requests, num_tokens)
        prefill_s = prompts_per_token * prompt_s * plan.tokens_per_s  # for each second of decoding
        decode_share = 1.0 / (1.0 + prefill_s)
        missed: tuple[str, ...] = ()
        if self.max_tpot_ms is not None:
            most_s = self.max_tpot_ms / 1e3 * decode_share * (1 + 1e-9)
            missed = tuple(name for name, tpot_s in plan.tpot_s.items() if tpot_s > most_s and name not in hopeless)
        return Capacity(plan.tokens_per_s * decode_share, num_requests, float(parts @ lengths), dict(plan.ks), missed)
