"""Discrete-event model of one engine with continuous batching: real acceptance traces and measured step times, no GPU.

Enters: requests with the answers they will give, how they arrive, a `Policy` of K and a table of step times. Leaves: a
`Run` with the tokens, times and depths of the steady part. Never knows: how the policy decides.

A step decodes every running request, each with 1 + k tokens, and spends what is left of `max_step_tokens` on chunks of
prompts, first come first served, as vLLM's scheduler does. It takes what the table says for its number of requests, of
tokens and mean context, times a jitter. A step with a chunk in it is no uniform batch, so it runs off the full graph.
The context of a request grows with its tokens. Not modelled: the KV cache's limit and preemption, prefix caching, and
the time between steps beyond what the table contains.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.simulation.traces import Answer
from cluster.step_time import StepShape


class Times(Protocol):
    """What the model asks of a table of step times (`cluster.step_time.StepTimes` is one)."""

    def seconds(self, shape: StepShape) -> float: ...


class Active:
    """A request in the engine. A policy may read `label`, `cap` (the K of its admission) and
    `context_tokens`; only an oracle looks at `answer` and `anchor`."""

    __slots__ = (
        "anchor",
        "answer",
        "cap",
        "context_tokens",
        "first_token_s",
        "index",
        "label",
        "prompt_left",
        "started_s",
    )

    def __init__(self, index: int, label: str, answer: Answer, prompt_tokens: int, cap: int, started_s: float) -> None:
        self.index = index
        self.label = label
        self.answer = answer
        self.cap = cap
        self.prompt_left = prompt_tokens
        self.context_tokens = prompt_tokens
        self.started_s = started_s
        self.first_token_s = 0.0
        self.anchor = 0


class Policy(Protocol):
    """A rule for K. `drafts` is False for an engine without a drafter. K never exceeds the K_max of the traces."""

    drafts: bool

    def admit(self, label: str, num_running: Mapping[str, int], context_tokens: float, now_s: float) -> int:
        """The K that a request of this workload is admitted with."""
        ...

    def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
        """The K of every decoding request in the coming step, which also takes in so many tokens of prompts."""
        ...

    def observe(
        self, requests: Sequence[Active], depths: Sequence[int], accepted: Sequence[int], seconds: float, now_s: float
    ) -> None:
        """What the step accepted of each request, how long it took, and the time at its end."""
        ...

    def standing(self) -> Mapping[str, int]:
        """The K in force, by workload or for the whole batch: its changes are counted, trims of one step are not."""
        ...


@dataclass(frozen=True)
class Engine:
    """Limits and conditions of the modelled engine. `jitter`: standard deviation of the logarithm of step times."""

    max_num_seqs: int = 256
    max_step_tokens: int = 8192
    prompt_tokens: int = 128
    jitter: float = 0.02

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_step_tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.jitter < 0:
            raise ValueError(f"jitter must be at least 0, not {self.jitter}")


@dataclass(frozen=True)
class Traffic:
    """Requests in order. `arrivals_s`: when each one arrives; empty for a closed loop, in which `concurrency` clients
    each send the next request when theirs is answered. `labels`: the workloads that the policy sees."""

    answers: Sequence[Answer]
    labels: Sequence[str]
    arrivals_s: Sequence[float] = ()
    concurrency: int | None = None


@dataclass
class Run:
    """The steady part of a run: after the first `warmup` requests started, until the last one did.

    `num_tokens` counts all output tokens, `num_decoded` those of `num_request_steps` decoding steps, `num_drafted`
    their draft tokens; `tpot_s` and `ttft_s` have one entry a request.
    """

    num_tokens: int = 0
    num_decoded: int = 0
    num_request_steps: int = 0
    num_drafted: int = 0
    num_engine_steps: int = 0
    num_changes: int = 0
    seconds: float = 0.0
    tpot_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    drafted_by_label: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps_by_label: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.num_decoded / self.num_request_steps if self.num_request_steps else 0.0

    @property
    def mean_depth(self) -> float:
        return self.num_drafted / self.num_request_steps if self.num_request_steps else 0.0


class Simulation:
    """One run. `warmup`: share of the requests that start before measuring does."""

    def __init__(
        self, engine: Engine, times: Times, policy: Policy, traffic: Traffic, rng: np.random.Generator, warmup: float
    ) -> None:
        if (traffic.concurrency is None) == (not traffic.arrivals_s):
            raise ValueError("traffic needs either arrivals_s or concurrency")
        self._engine, self._times, self._policy, self._traffic = engine, times, policy, traffic
        self._rng = rng
        self._slots = min(engine.max_num_seqs, traffic.concurrency or engine.max_num_seqs)
        self._num = len(traffic.answers)
        # The last ones of a closed loop finish in an emptying engine.
        self._measured = range(int(self._num * warmup), self._num - (traffic.concurrency or 0))
        if not self._measured:
            raise ValueError(f"{self._num} requests leave nothing to measure: send more, or with less concurrency")
        self._now_s = 0.0
        self._next = 0
        self._prefilling: deque[Active] = deque()
        self._running: list[Active] = []
        self._num_running: dict[str, int] = {}
        self._standing: dict[str, int] = {}
        self._steady = False
        self.run = Run()

    def finish(self) -> Run:
        """Serves every request."""
        while self._next < self._num or self._running or self._prefilling:
            self._admit()
            if self._running or self._prefilling:
                self._step()
            else:
                arrives_s = self._traffic.arrivals_s[self._next]
                self.run.seconds += arrives_s - self._now_s if self._steady else 0.0
                self._now_s = arrives_s
        return self.run

    def _admit(self) -> None:
        traffic, policy = self._traffic, self._policy
        while self._next < self._num and len(self._running) + len(self._prefilling) < self._slots:
            index = self._next
            arrived_s = traffic.arrivals_s[index] if traffic.arrivals_s else self._now_s
            if arrived_s > self._now_s:
                break
            label = traffic.labels[index]
            cap = policy.admit(label, self._num_running, self._context(), self._now_s) if policy.drafts else 0
            request = Active(index, label, traffic.answers[index], self._engine.prompt_tokens, cap, arrived_s)
            self._prefilling.append(request)
            self._num_running[label] = self._num_running.get(label, 0) + 1
            self._next += 1
            self._count_changes()
        self._steady = self._measured.start < self._next < self._num

    def _context(self) -> float:
        running = self._running
        return sum([one.context_tokens for one in running]) / len(running) if running else 0.0

    def _count_changes(self) -> None:
        for name, k in self._policy.standing().items():
            if self._steady and self._standing.get(name, k) != k:
                self.run.num_changes += 1
            self._standing[name] = k

    def _step(self) -> None:
        requests, context_tokens = self._running, self._context()
        depths = [0] * len(requests)
        if self._policy.drafts and requests:
            waiting = sum(one.prompt_left for one in self._prefilling)
            prompt_tokens = min(waiting, max(0, self._engine.max_step_tokens - len(requests)))
            depths = self._policy.depths(requests, context_tokens, prompt_tokens)
        num_decoding = len(requests) + sum(depths)
        chunks = self._take_chunks(self._engine.max_step_tokens - num_decoding)
        shape = StepShape(
            num_requests=len(requests) + len(chunks),
            num_tokens=num_decoding + sum(chunk for _, chunk in chunks),
            uniform_depth=depths[0] if depths and not chunks and min(depths) == max(depths) else None,
            context_tokens=context_tokens,
            longest_tokens=max(1 + max(depths, default=0), *(chunk for _, chunk in chunks), 1),
        )
        seconds = self._times.seconds(shape)
        if self._engine.jitter:
            seconds *= float(np.exp(self._engine.jitter * self._rng.standard_normal()))
        self._now_s += seconds
        accepted = self._decode(requests, depths)
        if self._policy.drafts and requests:
            self._policy.observe(requests, depths, accepted, seconds, self._now_s)
            self._count_changes()
        if self._steady:
            self.run.seconds += seconds
            self.run.num_engine_steps += 1
        self._retire()
        self._end_prefills(chunks)

    def _take_chunks(self, budget: int) -> list[tuple[Active, int]]:
        chunks = []
        for request in self._prefilling:
            if budget <= 0:
                break
            chunk = min(request.prompt_left, budget)
            request.prompt_left -= chunk
            budget -= chunk
            chunks.append((request, chunk))
        return chunks

    def _decode(self, requests: Sequence[Active], depths: Sequence[int]) -> list[int]:
        """Advances every request; returns the drafts each had accepted."""
        accepted, num_tokens = [], 0
        for request, k in zip(requests, depths, strict=True):
            anchors = request.answer.accepted
            found = anchors[request.anchor]
            emitted = 1 + (found if found < k else k)
            accepted.append(emitted - 1)
            request.anchor += emitted
            if request.anchor > len(anchors):  # the answer ends with an accepted draft
                emitted -= 1
            request.context_tokens += emitted
            num_tokens += emitted
        if self._steady:
            run = self.run
            run.num_tokens += num_tokens
            run.num_decoded += num_tokens
            run.num_request_steps += len(requests)
            run.num_drafted += sum(depths)
            for request, k in zip(requests, depths, strict=True):
                run.drafted_by_label[request.label] += k
                run.steps_by_label[request.label] += 1
        return accepted

    def _retire(self) -> None:
        still = []
        for request in self._running:
            if request.anchor < len(request.answer.accepted):
                still.append(request)
                continue
            self._num_running[request.label] -= 1
            if request.index in self._measured:
                self.run.tpot_s.append((self._now_s - request.first_token_s) / len(request.answer.accepted))
        self._running = still

    def _end_prefills(self, chunks: Sequence[tuple[Active, int]]) -> None:
        """A finished prompt gives the first token; decoding starts with the next step."""
        for request, _ in chunks:
            if request.prompt_left:
                continue
            self._prefilling.popleft()
            request.first_token_s = self._now_s
            request.context_tokens += 1
            self._running.append(request)
            self.run.num_tokens += self._steady
            if request.index in self._measured:
                self.run.ttft_s.append(self._now_s - request.started_s)
