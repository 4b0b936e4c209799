"""Learned K against the best fixed K, without an engine: on recorded acceptance and measured step times.

    python -m benchmarks.simulate_depths [--mix code-chat] [--requests 600] [--traces FILE]

A closed loop of clients sends requests whose drafts are accepted as a real head's were (`benchmarks.traces`) to
an engine whose steps take what was measured on a real one. The learned arm is the product's own code: `KPolicy` gets a
report each second, and the scheduler's `DraftBudget` sees every step's time and decides every step's drafts. It begins
with the product's guess of the engine.

A step decodes every running request with 1 + k rows, and takes in the prompts of new ones. Not modelled: the limit of
the KV cache, prefix caching, several replicas.
"""

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import typer

from cluster.counts import TargetReport, WorkloadCounts
from cluster.k_policy import KPolicy
from cluster.request import Drafting, KRules
from cluster.step_latency import StepLatency, StepLatencyModel, TimedStep
from peagle.provenance import conditions
from peagle.vllm.draft_budget import DraftBudget
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, WORKLOAD_KEY

RESULTS = Path(__file__).parent / "results"
TRACES = RESULTS / "2026-11-21-traces-smollm2-135m.npz"
ENGINES = {
    "h200": RESULTS / "step-times-qwen3-30b-a3b-shape-h200.json",
    "cpu": RESULTS / "step-times-smollm2-135m-cpu.json",  # at K = 0 the drafter's pass ran too
    "coder": RESULTS / "step-times-qwen2-coder-1b-shape-h100.json",
    "8b": RESULTS / "step-times-llama-8b-shape-h200.json",
}
K_MAX = 7

CHAT = ("writing", "roleplay", "humanities")
MIXES: dict[str, dict[str, tuple[Sequence[str], float]]] = {
    "code": {"code": (("humaneval", "coding"), 0.0)},
    "chat": {"chat": (CHAT, 0.0)},
    "code-chat": {"code": (("humaneval", "coding"), 0.0), "chat": ((*CHAT, "qa"), 1.0)},
}
"""Workloads by mix, each the categories of its answers and their temperature."""


@dataclass(frozen=True)
class Answer:
    """`accepted`: drafts that the target accepts at each token of the answer, one byte a token, at K = K_max.

    At token p with K = k the target accepts j = min(accepted[p], k) drafts, and the next step starts at p + j + 1: for
    greedy decoding the very run of the engine at that K, above temperature 0 one of the same distribution.
    """

    category: str
    temperature: float
    accepted: bytes


def load_answers(path: Path = TRACES) -> list[Answer]:
    """Answers of a file that `benchmarks.traces` wrote, as if drafted at `K_MAX` where their own is more."""
    with np.load(path, allow_pickle=False) as stored:
        ends = np.cumsum(stored["num_anchors"], dtype=np.int64)
        accepted = np.minimum(stored["accepted"], K_MAX).astype(np.uint8).tobytes()
        rows = zip(stored["category"], stored["temperature"], stored["num_anchors"], ends.tolist(), strict=True)
        return [
            Answer(str(category), float(temperature), accepted[end - int(num) : end])
            for category, temperature, num, end in rows
            if num
        ]


def select(answers: Sequence[Answer], categories: Sequence[str], temperature: float) -> list[Answer]:
    """The answers of one workload."""
    return [answer for answer in answers if answer.temperature == temperature and answer.category in categories]


Engine = Callable[..., float]
"""Seconds of a step of so many requests and target rows, beside so many rows of prompts, with the drafter's pass or
without: as `TableEngine` is called."""


class TableEngine:
    """A measured engine: straight lines between its points, along the rows of a request and along the requests. Beyond
    the points, and for prompts, a row costs what it does at the most requests measured.

    The drafter's pass takes what the points with drafts, continued to none, lie above the point without.
    """

    def __init__(self, points: Sequence[Mapping[str, Any]]) -> None:
        by_requests: dict[int, dict[float, list[float]]] = {}
        for point in points:
            if point.get("uniform_depth", 0) is not None:
                rows = point["num_tokens"] / point["num_requests"]
                by_requests.setdefault(point["num_requests"], {}).setdefault(rows, []).append(point["median_s"])
        self._sizes = sorted(by_requests)
        self._rows = [sorted(by_requests[size]) for size in self._sizes]
        self._seconds = [
            np.maximum.accumulate([np.median(by_requests[size][row]) for row in rows])
            for size, rows in zip(self._sizes, self._rows, strict=True)
        ]
        self._passes = [
            max(0.0, float(curve[1] - (curve[2] - curve[1]) * (rows[1] - 1) / (rows[2] - rows[1]) - curve[0]))
            for rows, curve in zip(self._rows, self._seconds, strict=True)
        ]
        most = self._sizes[-1] * (self._rows[-1][-1] - self._rows[-1][0])
        self._row_s = float(self._seconds[-1][-1] - self._seconds[-1][0]) / most

    @classmethod
    def load(cls, path: Path) -> "TableEngine":
        """Of a file in benchmarks/results."""
        return cls(json.loads(path.read_text())["points"])

    def __call__(
        self, num_requests: int, num_tokens: int, prompt_tokens: int = 0, is_drafted: bool | None = None
    ) -> float:
        rows, has_drafts = num_tokens / num_requests, num_tokens > num_requests
        at_sizes = [float(np.interp(rows, *curve)) for curve in zip(self._rows, self._seconds, strict=True)]
        seconds = float(np.interp(num_requests, self._sizes, at_sizes))
        if is_drafted is not None and is_drafted != has_drafts:
            pass_s = float(np.interp(num_requests, self._sizes, self._passes))
            seconds += pass_s if is_drafted else -pass_s
        beyond = max(0, num_requests - self._sizes[-1]) * rows
        return seconds + self._row_s * (beyond + prompt_tokens)


@dataclass(eq=False)
class Request:
    """A request in the engine; `request_id`, `num_computed_tokens`, `sampling_params` as `DraftBudget` reads them."""

    request_id: str
    workload: str
    answer: Answer
    drafting: Drafting
    place: int = 0
    num_computed_tokens: int = 128
    sampling_params: Any = None


@dataclass
class Fixed:
    """One K for all. A policy decides K at admission and at every step, says whether the step makes drafts for the next
    one, and learns from what came of it: drafts verified and accepted of each request."""

    k: int

    def admit(self, workload: str) -> Drafting:
        return Drafting(workload, self.k, "request")

    def allocate_drafts(self, requests: Sequence[Request], prompt_tokens: int) -> list[int]:
        return [request.drafting.k for request in requests]

    def drafts(self, requests: Sequence[Request], prompt_tokens: int) -> bool:
        return any(request.drafting.k for request in requests)

    def observe(self, requests: list[Request], steps: list[tuple[int, int]], step: TimedStep, now_s: float) -> None: ...


class Learned:
    """The product: `KPolicy` in the router and `DraftBudget` in the scheduler, with one replica."""

    REPORT_S = 1.0

    def __init__(self, on_gpu: bool) -> None:
        random.seed(0)  # of exploration requests
        self.k_policy = KPolicy(KRules(K_MAX, K_MAX, 3), on_gpu=on_gpu)
        self.draft_budget = DraftBudget(StepLatencyModel(on_gpu))
        self._on_gpu = on_gpu
        self._counts: dict[str, WorkloadCounts] = {}
        self._reported_s = 0.0
        self._report(0.0)

    def admit(self, workload: str) -> Drafting:
        self._counts.setdefault(workload, WorkloadCounts()).num_started += 1
        return self.k_policy.make_update(1).choose(Drafting(workload, 3, "default"), K_MAX)

    def allocate_drafts(self, requests: Sequence[Request], prompt_tokens: int) -> list[int]:
        for request in requests:
            if request.sampling_params is None:
                rates = request.drafting.acceptance_rates
                known = {ACCEPTANCE_RATES_KEY: rates} if rates else {}
                request.sampling_params = SimpleNamespace(extra_args={**known, WORKLOAD_KEY: request.workload})
        max_ks = [request.drafting.max_k for request in requests]
        depths = self.draft_budget.allocate_drafts(cast(Any, requests), max_ks)
        if prompt_tokens:  # as the scheduler asks
            depths = self.draft_budget.allocate_drafts(cast(Any, requests), max_ks, prompt_tokens)
        return depths

    def drafts(self, requests: Sequence[Request], prompt_tokens: int) -> bool:
        max_ks = [request.drafting.max_k for request in requests]
        if self._on_gpu:  # with asynchronous scheduling the pass is not left out
            return any(max_ks)
        return self.draft_budget.makes_drafts(cast(Any, requests), max_ks, prompt_tokens)

    def observe(self, requests: list[Request], steps: list[tuple[int, int]], step: TimedStep, now_s: float) -> None:
        self.draft_budget.model.observe(step)
        for request, (num_verified, num_accepted) in zip(requests, steps, strict=True):
            counts = self._counts[request.workload]
            counts.counts.add_step(num_verified, num_accepted)
            counts.num_finished += request.place >= len(request.answer.accepted)
        if now_s - self._reported_s >= self.REPORT_S:
            self._report(now_s)

    def _report(self, now_s: float) -> None:
        self._reported_s = now_s
        text = self.draft_budget.report(now_s)
        latency = None if text is None else msgspec.json.decode(text, type=StepLatency)
        report = TargetReport("replica", head="head", workloads=self._counts, step_latency=latency)
        self.k_policy.observe([report], now_s)


Policy = Fixed | Learned


@dataclass(frozen=True)
class Load:
    """A closed loop. Rates count the requests from `warm_share` on, while all clients are busy."""

    concurrency: int
    num_requests: int = 600
    prompt_tokens: int = 128
    jitter: float = 0.03
    warm_share: float = 0.2
    warm_steps: int = 0


def simulate(engine: Engine, pools: Mapping[str, Sequence[Answer]], policy: Policy, load: Load) -> float:
    """Output tokens per second of the steady part. `pools`: answers by workload, asked for equally often."""
    rng, names = np.random.default_rng(0), sorted(pools)
    draws = [
        (name := names[int(rng.integers(len(names)))], int(rng.integers(len(pools[name]))))
        for _ in range(load.num_requests)
    ]
    arrivals = deque(enumerate(draws))
    running: list[Request] = []
    now_s = steady_s = 0.0
    is_drafted = False
    num_tokens = num_steps = 0
    while len(running) + len(arrivals) >= load.concurrency:
        admitted: list[Request] = []
        while len(running) + len(admitted) < load.concurrency and arrivals:
            number, (name, index) = arrivals.popleft()
            admitted.append(Request(str(number), name, pools[name][index], policy.admit(name)))
        prompt_tokens = len(admitted) * load.prompt_tokens
        depths = policy.allocate_drafts(running, prompt_tokens) if running else []
        depths = depths if is_drafted else [0] * len(running)
        is_drafted = policy.drafts([*running, *admitted], prompt_tokens)
        num_requests, num_rows = len(running), len(running) + sum(depths)
        noise = float(np.exp(load.jitter * rng.standard_normal()))
        seconds = engine(max(num_requests, 1), max(num_rows, 1), prompt_tokens, is_drafted) * noise
        now_s += seconds
        steps = []
        num_emitted = len(admitted)
        for request, k in zip(running, depths, strict=True):
            accepted = min(request.answer.accepted[request.place], k)
            emitted = min(accepted + 1, len(request.answer.accepted) - request.place)
            request.place += accepted + 1
            request.num_computed_tokens += emitted
            num_emitted += emitted
            steps.append((k, accepted))
        num_steps += 1
        is_steady = len(arrivals) <= (1 - load.warm_share) * load.num_requests and num_steps > load.warm_steps
        if is_steady:
            num_tokens += num_emitted
            steady_s += seconds
        if running:
            step = TimedStep(seconds, num_requests, num_rows, prompt_tokens, is_drafted)
            policy.observe(running, steps, step, now_s)
        running = [request for request in running if request.place < len(request.answer.accepted)] + admitted
    return num_tokens / steady_s


def compare(
    engine: Engine, pools: Mapping[str, Sequence[Answer]], load: Load, learned: Callable[[], Policy]
) -> dict[str, float]:
    """Tokens per second of every arm: `K=0` .. `K=7`, and `learned`."""
    rates = {f"K={k}": simulate(engine, pools, Fixed(k), load) for k in range(K_MAX + 1)}
    return rates | {"learned": simulate(engine, pools, learned(), load)}


def learned_share(rates: Mapping[str, float]) -> float:
    """Learned K against the best fixed K."""
    return rates["learned"] / max(rate for name, rate in rates.items() if name.startswith("K="))


def main(
    mix: Annotated[str, typer.Option(help=f"Workloads: {', '.join(MIXES)}.")] = "code-chat",
    engine: Annotated[str, typer.Option(help=f"Engine whose steps were measured: {', '.join(ENGINES)}.")] = "h200",
    requests: Annotated[int, typer.Option(help="Requests of each run.")] = 600,
    traces: Annotated[Path, typer.Option(help="Recorded acceptance.")] = TRACES,
    out: Annotated[Path | None, typer.Option(help="JSON with the figures and their conditions.")] = None,
) -> None:
    """Print tokens per second by K, and of learned K, at several numbers of clients."""
    found: dict[int, dict[str, float]] = {}
    answers, table = load_answers(traces), TableEngine.load(ENGINES[engine])
    pools = {name: select(answers, *kind) for name, kind in MIXES[mix].items()}
    for concurrency in (1, 4, 8) if engine == "cpu" else (1, 8, 32, 64, 128, 256):
        load = Load(concurrency, max(requests, 4 * concurrency))
        rates = compare(table, pools, load, lambda: Learned(engine != "cpu"))
        found[concurrency] = {name: round(rate, 1) for name, rate in rates.items()}
        cells = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        typer.echo(f"{concurrency:4d} clients: {cells}  learned / best K {learned_share(rates):.3f}")
    if out is not None:
        figures = {"mix": mix, "engine": engine, "tokens_per_s": found, "conditions": conditions()}
        out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
