"""What is kept of live traffic for the learner of heads (`deployments.learner`), in memory and bounded.

Enters: finished answers of requests whose caller or workload opted in, as token ids. Leaves: conversations to train on,
others to judge a new head by, and the verdict on it. Nothing here writes to a disk.

No caller can fill the buffer or the training. A prompt counts once for each caller and workload, and answers that loop
are left out. Workloads, and callers within a workload, get equal shares of the tokens as far as they have any. When the
target's weights change, what the old ones wrote is dropped.
"""

import dataclasses
import functools
import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

GRAM_TOKENS = 8
MIN_DISTINCT_SHARE = 0.5
"""An answer with fewer distinct n-grams loops (`peagle.train.data.distinct_share` has the same rule)."""
LOOP_SIZES = (64, 128, 256, 512, 1024)
"""Numbers of n-grams at an answer's end that are looked at as well: a target that falls into a loop stays in it until
`max_tokens`."""
HELD_OUT_SHARE = 0.2
"""Share of all prompts, by their hash, that a new head is judged by, and never trained on."""
Group = tuple[str, str]
"""Workload and caller."""


@dataclasses.dataclass(eq=False)
class KeptAnswer:
    """A finished answer. prompt, answer: token ids [tokens] int32; caller: its name, "anyone" without callers; target:
    digest of the weights that wrote it; arrived_s: in the buffer, on its clock."""

    workload: str
    caller: str
    prompt: np.ndarray
    answer: np.ndarray
    target: str = ""
    arrived_s: float = 0.0

    @property
    def group(self) -> Group:
        return self.workload, self.caller

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def num_bytes(self) -> int:
        return int(self.prompt.nbytes + self.answer.nbytes)

    @functools.cached_property
    def prompt_hash(self) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(self.prompt, np.int32).tobytes()).digest()[:8]

    @property
    def key(self) -> tuple[Group, bytes]:
        return self.group, self.prompt_hash

    @property
    def is_held_out(self) -> bool:
        """By the prompt alone: it is never both trained on and judged by."""
        return int.from_bytes(self.prompt_hash[:4], "big") < HELD_OUT_SHARE * 2**32

    @property
    def is_looping(self) -> bool:
        """The whole answer, or its end."""
        tokens = self.answer.tolist()
        grams = [tuple(tokens[start : start + GRAM_TOKENS]) for start in range(len(tokens) - GRAM_TOKENS + 1)]
        ends = (grams[-size:] for size in (len(grams), *LOOP_SIZES))
        return any(len(set(end)) < MIN_DISTINCT_SHARE * len(end) for end in ends)


class AnswerQueue:
    """Answers of one target that wait for the learner; beyond `max_bytes` the oldest go."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._answers: deque[KeptAnswer] = deque()

    def put(self, answer: KeptAnswer) -> None:
        self._answers.append(answer)
        self._num_bytes += answer.num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._answers.popleft().num_bytes

    def drain(self) -> list[KeptAnswer]:
        """All of them, which are then the caller's."""
        taken = list(self._answers)
        self._answers.clear()
        self._num_bytes = 0
        return taken


class TrafficBuffer:
    """Answers of live traffic, at most `max_bytes`, none for longer than `keep_s`, all of one target.

    Where it is full, one goes of the older three quarters of the largest caller in the largest workload.
    So the newest are all there, and of older ones a sample, which holds the mix of before a shift.
    """

    def __init__(
        self, max_bytes: int, keep_s: float, *, max_prompt_tokens: int = 2**31, replay: Sequence[KeptAnswer] = ()
    ) -> None:
        """max_prompt_tokens: answers to longer prompts are left out, since training could not use them. replay: stored
        answers, which stand for the mix of before."""
        self._max_bytes, self._keep_s, self._max_prompt_tokens = max_bytes, keep_s, max_prompt_tokens
        self._replay, self._random = replay, random.Random(0)
        self._answers: dict[tuple[Group, bytes], KeptAnswer] = {}  # by prompt, the oldest first
        self.num_bytes = 0
        self.target = ""
        """Digest of the target whose answers are kept: of the last that came."""
        self.num_new: Counter[str] = Counter()
        """Kept answers by workload; whoever trains on them takes them out."""
        self.counters: Counter[str] = Counter()
        """Answers that came (`taken`), and what became of those that are not kept: looping, duplicate, short, long, and
        outdated, which left when the target changed."""

    def num_answers(self) -> dict[str, int]:
        """By workload."""
        return dict(sorted(Counter(answer.workload for answer in self._answers.values()).items()))

    def add(self, answers: Iterable[KeptAnswer], now_s: float) -> None:
        for answer in answers:
            self.counters["taken"] += 1
            if answer.target != self.target:  # while targets of two versions run, each empties it
                self.counters["outdated"] += len(self._answers)
                self._answers.clear()
                self.num_new.clear()
                self.target = answer.target
            if len(answer.answer) < GRAM_TOKENS:
                self.counters["short"] += 1
            elif len(answer.prompt) > self._max_prompt_tokens:
                self.counters["long"] += 1
            elif answer.is_looping:
                self.counters["looping"] += 1
            else:
                if self._answers.pop(answer.key, None):  # the newest counts, and is nothing new
                    self.counters["duplicate"] += 1
                else:
                    self.num_new[answer.workload] += 1
                answer.arrived_s = now_s
                self._answers[answer.key] = answer
        self._answers = {key: one for key, one in self._answers.items() if now_s - one.arrived_s <= self._keep_s}
        self._evict()

    def _evict(self) -> None:
        groups = self._by_group()
        num_bytes = {group: sum(answer.num_bytes for answer in answers) for group, answers in groups.items()}
        while sum(num_bytes.values()) > self._max_bytes:
            of_workload: Counter[str] = Counter()
            for (workload, _), number in num_bytes.items():
                of_workload[workload] += number
            largest = max(num_bytes, key=lambda group: (of_workload[group[0]], num_bytes[group]))
            older = math.ceil(0.75 * len(groups[largest]))
            gone = groups[largest].pop(self._random.randrange(older))
            num_bytes[largest] -= gone.num_bytes
            del self._answers[gone.key]
        self.num_bytes = sum(num_bytes.values())

    def _by_group(self) -> dict[Group, list[KeptAnswer]]:
        """The oldest first."""
        found: dict[Group, list[KeptAnswer]] = {}
        for answer in self._answers.values():
            found.setdefault(answer.group, []).append(answer)
        return found

    def draw(
        self, *, held_out: bool, newest: bool = True, max_tokens: float = math.inf, max_answers: float = math.inf
    ) -> list[KeptAnswer]:
        """Answers in equal shares (of tokens) of the workloads and of callers in them: the newest, or a sample of the
        mix of before, which is the older half. held_out: those to judge by, else those to train on."""
        kept = self._by_group()
        if not newest:
            kept = {group: answers[: (len(answers) + 1) // 2] for group, answers in kept.items()}
            if self._replay:
                kept = {("replay", ""): list(self._replay)}
            for answers in kept.values():
                self._random.shuffle(answers)
        left = {group: [one for one in answers if one.is_held_out == held_out] for group, answers in kept.items()}
        left = {group: answers for group, answers in left.items() if answers}
        drawn: Counter[str | Group] = Counter()
        found, num_tokens = list[KeptAnswer](), 0
        while left and len(found) < max_answers:
            group = min(left, key=lambda group: (drawn[group[0]], drawn[group]))
            answer = left[group].pop()
            if not left[group]:
                del left[group]
            if num_tokens + answer.num_tokens <= max_tokens:
                num_tokens += answer.num_tokens
                drawn.update({answer.workload: answer.num_tokens, group: answer.num_tokens})
                found.append(answer)
        return found


# ---- the gate

BETTER = "better"


def judge_gain(
    recent: Mapping[str, Any], before: Mapping[str, Any], min_answers: int, min_gain: float, max_loss: float
) -> str:
    """`BETTER`, or why the new head is not proposed, after which it is trained on; with "worse" first: it is dropped.

    recent, before: AL relative to the current head (`num_answers`, `ratio`, `low`, `high`) on held-out answers of the
    newest traffic, and of the mix of before. Better: the interval on recent traffic lies above 1 + `min_gain`, and on
    the mix of before neither the ratio lies more than `max_loss` below 1 nor the whole interval below 1.
    """
    if recent["high"] < 1 or before["high"] < 1 - max_loss:
        return f"worse: AL ratio {recent['ratio']:.3f} on recent answers, {before['ratio']:.3f} on the mix of before"
    for what, found in (("recent answers", recent), ("answers of the mix of before", before)):
        if found["num_answers"] < min_answers:
            return f"{found['num_answers']} held-out {what}, {min_answers} needed"
    if recent["low"] <= 1 + min_gain:
        return f"AL ratio {recent['ratio']:.3f} from {recent['low']:.3f} on, {1 + min_gain:g} needed"
    if before["ratio"] < 1 - max_loss or before["high"] < 1:
        return f"AL ratio {before['ratio']:.3f} on the mix of before, {1 - max_loss:g} needed"
    return BETTER


# ---- what the learner says of itself


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """phase: collecting, training, judging or trial (a head of it is on trial). problem: what went wrong last, "" when
    nothing did. num_answers: kept, by workload. counters: since its start. last_round: its figures."""

    phase: str
    problem: str = ""
    num_answers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    last_round: Mapping[str, Any] = dataclasses.field(default_factory=dict)
