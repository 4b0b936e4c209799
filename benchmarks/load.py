"""A closed load on one engine, and what came out of it. For benchmarks without Ray.

Enters: an engine's settings, and requests to keep running: each of `PROMPT_TOKENS` random tokens, with an answer of a
length drawn from a range (equal ones would end, and bring their prompts, in one step), the acceptance of its workload
(`peagle.vllm.synthetic`) and a K that an arm decides. Leaves: output tokens/s, step times, AL.
Outputs are read as they leave the engine's process, so that the client's own speed does not enter.
"""

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.control import DepthControl
from cluster.counts import Counts, TargetReport, WorkloadCounts
from cluster.request import DepthPolicy, Drafting
from peagle.vllm.acceptance import (
    DEPTH_KEY,
    STEP_COSTS_HEADER,
    STEPS_HEADER,
    SURVIVAL_KEY,
    SYNTHETIC_KEY,
    WORKLOAD_KEY,
    decode_steps,
)

LEARNED = "learned"
PROMPT_TOKENS = 128
OBSERVE_INTERVAL_S = 0.5
DEFAULT_DEPTH = 5


@dataclass
class Workload:
    """One workload's requests while the window was open. Steps include those without drafts."""

    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_expected: float = 0.0
    first_s: list[float] = field(default_factory=list)
    steps_s: float = 0.0


class Window:
    """What came out while it was open, by workload.

    `otps` counts tokens. `expected_otps` takes each step's time as measured and its tokens as the survivals expect them
    at the drafts it verified, so that the luck of a few seconds (AL of a step varies by its own size) drops out: the
    load divided by the mean time a token of a whole request, its first one included. Of times to first token it takes
    the median: a host that stands still for a second meets all of a load's prompts at once, and one arm alone.
    """

    def __init__(self, mean_tokens: float, survivals: Mapping[str, Sequence[float]]) -> None:
        """mean_tokens: of an answer."""
        self.by_workload: dict[str, Workload] = {}
        self._mean_tokens, self._survivals = mean_tokens, survivals

    def add(
        self, workload: str, num_tokens: int, steps: Sequence[tuple[int, int]], seconds: float, first: bool
    ) -> None:
        """One output of a request, `seconds` after its last one or, for the first, after the request was sent."""
        one = self.by_workload.setdefault(workload, Workload())
        one.num_tokens += num_tokens
        if first:
            one.first_s.append(seconds)
            return
        one.steps_s += seconds
        for verified, accepted in steps or ((0, 0),):
            one.num_steps += 1
            one.num_drafts += verified
            one.num_accepted += accepted
            one.num_expected += 1 + sum(self._survivals[workload][:verified])

    def document(self, num_requests: int, seconds: float) -> dict[str, Any]:
        found, token_s = {}, []
        for name, one in sorted(self.by_workload.items()):
            steps, firsts_s = max(one.num_steps, 1), one.first_s or [0.0]
            found[name] = {
                "otps": round(one.num_tokens / seconds, 2),
                "mean_k": round(one.num_drafts / steps, 3),
                "acceptance_length": round(1 + one.num_accepted / steps, 3),
                "step_ms": round(1e3 * one.steps_s / steps, 3),
                "ttft_ms": round(1e3 * statistics.mean(firsts_s), 2),
                "median_ttft_ms": round(1e3 * statistics.median(firsts_s), 2),
            }
            decode_s = one.steps_s / max(one.num_expected, 1.0) * (self._mean_tokens - 1)
            token_s.append((statistics.median(firsts_s) + decode_s) / self._mean_tokens)
        total = sum(one.num_tokens for one in self.by_workload.values())
        expected = num_requests * len(token_s) / sum(token_s) if token_s and sum(token_s) > 0 else 0.0
        return {"otps": round(total / seconds, 2), "expected_otps": round(expected, 2), "by_workload": found}


class Rig:
    """One running engine, and the loop that keeps it loaded. Reads its outputs as they leave the engine's process."""

    def __init__(
        self,
        kwargs: dict[str, Any],
        output_tokens: tuple[int, int],
        survivals: Mapping[str, Sequence[float]],
        learns: bool = False,
    ) -> None:
        """`output_tokens`: least and most of an answer; `survivals`, by workload: what drafts are accepted with;
        `learns`: there is a learned arm."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        start_s = time.perf_counter()
        config = EngineArgs(**kwargs).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._engine = LLMEngine.from_vllm_config(config, UsageContext.OPENAI_API_SERVER, disable_log_stats=True)
        self.start_s = round(time.perf_counter() - start_s, 1)
        self._output_tokens, self._survivals = output_tokens, survivals
        self._mean_tokens = sum(output_tokens) / 2
        self._max_depth = config.num_speculative_tokens
        self._control = None
        if learns:
            policy = DepthPolicy(self._max_depth, self._max_depth, min(DEFAULT_DEPTH, self._max_depth))
            # Synthetic acceptance is the same wherever a draft starts.
            self._control = DepthControl(policy, on_gpu=True, seed=0, split_share=0.0)
        self._totals: dict[str, Counts] = {}
        self._untold: dict[str, list[tuple[int, int]]] = {}
        self._costs: str | None = None
        self._workload_of: dict[str, str] = {}
        self._last_s: dict[str, float] = {}
        self._num_requests = 0

    def _add(self, arm: str, workload: str, chance: random.Random) -> None:
        from vllm import SamplingParams, TokensPrompt

        self._num_requests += 1
        request_id = f"{arm}-{self._num_requests}"
        drafting = Drafting(workload, DEFAULT_DEPTH if arm == LEARNED else int(arm), "default")
        if arm == LEARNED:
            assert self._control is not None
            drafting = self._control.settle(drafting, time.monotonic())
        extra = extra_args(drafting, self._survivals[workload])
        num_tokens = chance.randint(*self._output_tokens)
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=num_tokens, extra_args=extra
        )
        prompt = TokensPrompt(prompt_token_ids=[chance.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)])
        self._engine.add_request(request_id, prompt, params)
        self._workload_of[request_id] = workload
        self._last_s[request_id] = -time.perf_counter()  # negative: no output yet

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """What the engine's workers answer."""
        return list(self._engine.collective_rpc(method, args=args))

    def run(self, arm: str, workloads: Sequence[str], num_requests: int, warmup_s: float, window_s: float) -> Any:
        """Keep `num_requests` running for `warmup_s` + `window_s`, then end them. What came out of the window."""
        chance = random.Random(f"{num_requests} {'+'.join(workloads)}")
        order = _endless(workloads, chance)
        for _ in range(num_requests):
            self._add(arm, next(order), chance)
        window, begin_s, opened_s = Window(self._mean_tokens, self._survivals), time.perf_counter(), 0.0
        observed_s = begin_s
        while True:
            outputs = self._engine.engine_core.get_output().outputs
            now_s = time.perf_counter()
            is_open = now_s - begin_s >= warmup_s
            for output in outputs:
                headers = output.trace_headers or {}
                self._costs = headers.get(STEP_COSTS_HEADER, self._costs)
                # vLLM adds a suffix of its own.
                request_id = "-".join(output.request_id.split("-")[:2])
                workload = self._workload_of.get(request_id)
                if workload is None:
                    continue  # of an arm before, under way when that was ended
                steps = decode_steps(headers.get(STEPS_HEADER, ""))
                if arm == LEARNED:
                    self._untold.setdefault(workload, []).extend(steps)
                last_s, self._last_s[request_id] = self._last_s[request_id], now_s
                if opened_s:
                    window.add(workload, len(output.new_token_ids), steps, now_s - abs(last_s), last_s < 0)
                if output.finish_reason is not None:
                    del self._workload_of[request_id], self._last_s[request_id]
                    self._add(arm, next(order), chance)
            if not opened_s and is_open:
                opened_s = now_s
            if arm == LEARNED and now_s - observed_s >= OBSERVE_INTERVAL_S:
                observed_s = now_s
                self._observe()
            if opened_s and now_s - opened_s >= window_s:
                break
        self._engine.abort_request(list(self._workload_of))
        self._workload_of.clear()
        self._last_s.clear()
        return {"window_s": round(now_s - opened_s, 3), **window.document(num_requests, now_s - opened_s)}

    def _observe(self) -> None:
        assert self._control is not None
        for workload, steps in self._untold.items():
            self._totals[workload] = self._totals.get(workload, Counts()) + Counts.from_steps(steps)
        self._untold.clear()
        running = Counter(self._workload_of.values())
        workloads = {
            workload: WorkloadCounts(running[workload], counts=self._totals.get(workload, Counts()))
            for workload in {*running, *self._totals}
        }
        context = PROMPT_TOKENS + self._mean_tokens / 2
        report = TargetReport(
            "engine", head="head", workloads=workloads, context_tokens=context, step_costs=self._costs
        )
        self._control.observe([report], time.monotonic())

    def drafting(self) -> Any:
        """What the learned arm believes and chooses, as the service shows it."""
        return None if self._control is None else self._control.document(time.monotonic())

    def close(self) -> None:
        """Stop the engine's process."""
        self._engine.engine_core.shutdown()


def extra_args(drafting: Drafting, survival: Sequence[float]) -> dict[str, Any]:
    """What a request tells the engine, as `deployments.target` does, and the acceptance that its drafts get."""
    told = {SYNTHETIC_KEY: list(survival), DEPTH_KEY: drafting.max_k, WORKLOAD_KEY: drafting.workload}
    return told | ({SURVIVAL_KEY: list(drafting.survival)} if drafting.survival else {})


def _endless(workloads: Sequence[str], chance: random.Random) -> Iterator[str]:
    while True:
        yield from chance.sample(workloads, len(workloads))
