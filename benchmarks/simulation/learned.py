"""Our own rule for K inside the engine model: the same objects that the cluster runs, driven by the model's clock.

Acceptance goes into an `AcceptanceBook` as the cumulative counts of one replica, once every `report_s`, as telemetry
brings it, with the mean load since then; a `DepthChooser` gives each request its K at admission; `allocate` weighs the
drafts of every step, up to K_max where a learned K is above 0 (`cluster.request.Drafting.max_k`). What steps turn out
to take corrects the table for the trimming, as in the engine's scheduler, and by the reports for the choice of K. So
the rule knows no more and no sooner than in production, but that there is one replica and one ingress.
"""

import math
import random
from collections.abc import Mapping, Sequence

from benchmarks.simulation.engine_model import Active
from cluster.acceptance import AcceptanceBook, Counts
from cluster.depth import DepthChooser, Load, allocate
from cluster.step_time import CostCurves, LiveCosts, Residuals, StepCosts, StepShape
from cluster.transfer import SPLIT_SHARE

SOURCE, HEAD, ALL = "engine", "head", "default"
NUM_STEPS_BETWEEN_CORRECTIONS = 500
"""As `peagle.vllm.trimming`."""


class Learned:
    """`by_workload` False: all requests count as one workload. `limits` True: no step of a request has more drafts than
    its K of admission. `per_step` False: that K stands, no step trims it. `chooses` False: every request is admitted at
    K_max and only the steps trim. `corrects` False: K is chosen by the table as it is, and only the trimming is
    corrected."""

    drafts = True

    def __init__(
        self,
        times: StepCosts,
        max_draft_tokens: int,
        seed: int,
        *,
        by_workload: bool = True,
        limits: bool = False,
        per_step: bool = True,
        chooses: bool = True,
        corrects: bool = True,
        report_s: float = 1.0,
        split_share: float = SPLIT_SHARE,
    ) -> None:
        self._times, self._max_draft_tokens = times, max_draft_tokens
        self._trim_costs = CostCurves(times)
        self._residuals = Residuals(times.full_graph_depths)
        self._live = LiveCosts(times, math.inf) if corrects else None
        self._chooser = DepthChooser(self._trim_costs, max_draft_tokens)
        self.book = AcceptanceBook(max_draft_tokens, split_share=split_share)
        self._random = random.Random(seed)
        self._limits = limits or not per_step
        self._by_workload, self._per_step, self._chooses, self._report_s = by_workload, per_step, chooses, report_s
        self._reported_s = 0.0
        self._request_s: dict[str, float] = {}
        self._load: Load | None = None
        self._ended: dict[str, list[list[int]]] = {}
        self._survival: dict[str, Sequence[float]] = {}
        self._planned = (0.0, 0)  # context and prompt tokens of the step under way

    def admit(self, label: str, num_running: Mapping[str, int], context_tokens: float, now_s: float) -> int:
        if not self._chooses:
            return self._max_draft_tokens
        load = self._load
        if load is None:  # nothing reported yet
            numbers: dict[str, float] = {}
            for other, num in num_running.items():
                numbers[self._name(other)] = numbers.get(self._name(other), 0.0) + num
            load = Load(numbers, context_tokens)
        choice = self._chooser.decide(self._name(label), self.book, load, now_s, self._random)
        is_limit = self._limits or choice.source != "learned" or choice.k == 0
        return choice.k if is_limit else self._max_draft_tokens

    def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
        self._planned = context_tokens, prompt_tokens
        caps = [one.cap for one in requests]
        if not self._per_step:
            return caps
        survivals = [self._known(self._name(one.label)) for one in requests]
        return allocate(survivals, caps, self._trim_costs, context_tokens, prompt_tokens)

    def observe(
        self, requests: Sequence[Active], depths: Sequence[int], accepted: Sequence[int], seconds: float, now_s: float
    ) -> None:
        self._time(depths, seconds)
        for request, k, j in zip(requests, depths, accepted, strict=True):
            name = self._name(request.label)
            if name not in self._ended:
                self._ended[name] = [[0] * (self._max_draft_tokens + 1) for _ in range(self._max_draft_tokens + 1)]
            self._ended[name][k][j] += 1
            self._request_s[name] = self._request_s.get(name, 0.0) + seconds
        since_s = now_s - self._reported_s
        if since_s >= self._report_s:
            self._report(since_s, sum(one.context_tokens for one in requests) / len(requests))
            self._reported_s = now_s

    def _time(self, depths: Sequence[int], seconds: float) -> None:
        """What the scheduler makes of a step's time; one with a prompt in it has none (`peagle.vllm.trimming`)."""
        context_tokens, prompt_tokens = self._planned
        if prompt_tokens:
            return
        shape = StepShape.of_depths(depths, context_tokens)
        self._residuals.observe(seconds, self._times.seconds(shape), shape)
        if self._residuals.num_steps % NUM_STEPS_BETWEEN_CORRECTIONS == 0:
            self._trim_costs = CostCurves(self._residuals.corrected(self._times))

    def _report(self, since_s: float, context_tokens: float) -> None:
        self.book.absorb(SOURCE, HEAD, {name: counts_of(ended) for name, ended in self._ended.items()})
        self._load = Load({name: total / since_s for name, total in self._request_s.items()}, context_tokens)
        self._request_s.clear()
        self._survival.clear()
        if self._live is not None and self._live.take({SOURCE: self._residuals.corrections()}, self._reported_s):
            self._chooser.use(self._live.curves)

    def standing(self) -> Mapping[str, int]:
        return self._chooser.depths if self._chooses else {}

    def _name(self, label: str) -> str:
        return label if self._by_workload else ALL

    def _known(self, name: str) -> Sequence[float]:
        if name not in self._survival:
            self._survival[name] = self.book.survival(name).mean
        return self._survival[name]


def counts_of(ended: Sequence[Sequence[int]]) -> Counts:
    """Counts by depth from `ended[k][j]`, the number of steps that verified k drafts and accepted j."""
    depths = range(1, len(ended))
    drafted = tuple(sum(sum(ended[k]) for k in depths if k >= i) for i in depths)
    reached = tuple(sum(sum(ended[k][i - 1 :]) for k in depths if k >= i) for i in depths)
    accepted = tuple(sum(sum(ended[k][i:]) for k in depths if k >= i) for i in depths)
    return Counts(drafted, reached, accepted)
