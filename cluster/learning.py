"""What is kept of live traffic for the learner of heads (`deployments.learner`), in memory and bounded.

Enters: finished answers of requests whose caller or workload opted in, as token ids. Leaves: conversations to train on,
others to judge a new head by, and the verdict on it. Nothing here writes to a disk.

An answer counts once, however often it comes (`TrafficBuffer`); those that loop are left out; drawing gives workloads,
and callers within a workload, equal shares of tokens as far as they have any. So one that floods the buffer, or repeats
itself, neither pushes out the others' answers nor gets more of the training than they do. When the target's weights
change, what the old ones wrote is dropped.
"""

import dataclasses
import functools
import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

GRAM_TOKENS = 8
MIN_DISTINCT_SHARE = 0.5
"""Of an answer's n-grams; one with less loops (`peagle.train.data.distinct_share` has the same rule)."""
MIN_LOOP_GRAMS = 64
"""Of an answer's end, this many n-grams, twice, four times and so on are looked at as well."""
NUM_KEY_GRAMS = 4
"""Answers that agree in so many of their smallest n-gram hashes are near-duplicates: with a share J of n-grams in
common, about J ** 4 of them do."""
HELD_OUT_SHARE = 0.2
"""Of all prompts, by their hash: what a new head is judged by, and never trained on."""
Group = tuple[str, str]
"""Workload and caller."""

_MULTIPLIERS = np.random.default_rng(0).integers(2**63, size=GRAM_TOKENS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


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

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.prompt)

    @property
    def grams(self) -> np.ndarray:
        """Hashes of the answer's n-grams [answer tokens - 7], in their order."""
        if len(self.answer) < GRAM_TOKENS:
            return np.empty(0, np.uint64)
        windows = np.lib.stride_tricks.sliding_window_view(self.answer.astype(np.uint64), GRAM_TOKENS)
        hashes: np.ndarray = (windows * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
        return hashes

    @property
    def loops(self) -> bool:
        """The whole answer, or its end: a target that falls into a loop stays in it until `max_tokens`."""
        grams, size = self.grams, MIN_LOOP_GRAMS
        ends = [grams]
        while size < len(grams):
            ends.append(grams[-size:])
            size *= 2
        return any(len(np.unique(end)) < MIN_DISTINCT_SHARE * len(end) for end in ends)

    @functools.cached_property
    def keys(self) -> tuple[bytes, bytes]:
        """Two answers that share one of them are duplicates: of the prompt, and of the answer."""
        return b"p" + prompt_hash(self.prompt), b"a" + np.unique(self.grams)[:NUM_KEY_GRAMS].tobytes()


def is_held_out(prompt: np.ndarray) -> bool:
    """By the prompt's hash alone: a prompt is never both trained on and judged by."""
    return int.from_bytes(prompt_hash(prompt)[:4], "big") < HELD_OUT_SHARE * 2**32


def prompt_hash(prompt: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(prompt, np.int32).tobytes()).digest()[:8]


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

    def take(self) -> list[KeptAnswer]:
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

    def __init__(self, max_bytes: int, keep_s: float, *, max_prompt_tokens: int = 2**31, seed: int = 0) -> None:
        """max_prompt_tokens: answers to longer prompts are left out, since training could not use them."""
        self._max_bytes, self._keep_s, self._max_prompt_tokens = max_bytes, keep_s, max_prompt_tokens
        self._random = random.Random(seed)
        self._groups: dict[Group, list[KeptAnswer]] = {}  # oldest first
        self._bytes: Counter[Group] = Counter()
        self._by_key: dict[bytes, KeptAnswer] = {}
        self.target = ""
        """Digest of the target whose answers are kept: of the last that came."""
        self.num_new: Counter[str] = Counter()
        """Kept answers by workload; whoever trains on them takes them out."""
        self.counters: Counter[str] = Counter()
        """Answers that came, and what became of those that are not kept: looping, duplicate, short, long, and
        outdated, which left when the target changed."""

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def num_answers(self) -> dict[str, int]:
        """By workload."""
        found: Counter[str] = Counter()
        for (workload, _), answers in self._groups.items():
            found[workload] += len(answers)
        return dict(sorted(found.items()))

    def add(self, answers: Iterable[KeptAnswer], now_s: float) -> list[KeptAnswer]:
        """Those that were new and are kept."""
        added = []
        for answer in answers:
            self.counters["taken"] += 1
            if answer.target != self.target:
                self._follow(answer.target)
            if reason := self._refusal(answer):
                self.counters[reason] += 1
                continue
            before = {id(same): same for key in answer.keys if (same := self._by_key.get(key))}
            for same in before.values():  # the newest one counts, and is no news
                self._remove(same)
            self.counters["duplicate"] += len(before)
            answer.arrived_s = now_s
            self._groups.setdefault(answer.group, []).append(answer)
            self._bytes[answer.group] += answer.num_bytes
            self._by_key.update(dict.fromkeys(answer.keys, answer))
            if not before:
                self.num_new[answer.workload] += 1
                added.append(answer)
        for kept in list(self._groups.values()):
            while kept and now_s - kept[0].arrived_s > self._keep_s:
                self._remove(kept[0])
        while self.num_bytes > self._max_bytes:
            self._remove(self._next_out())
        return added

    def _follow(self, target: str) -> None:
        """What another target wrote is no evidence of this one. While targets of two versions run, each empties it."""
        self.counters["outdated"] += sum(map(len, self._groups.values()))
        for part in (self._groups, self._bytes, self._by_key, self.num_new):
            part.clear()
        self.target = target

    def _refusal(self, answer: KeptAnswer) -> str:
        if len(answer.answer) < GRAM_TOKENS:
            return "short"
        if len(answer.prompt) > self._max_prompt_tokens:
            return "long"
        return "looping" if answer.loops else ""

    def _remove(self, answer: KeptAnswer) -> None:
        self._groups[answer.group].remove(answer)
        self._bytes[answer.group] -= answer.num_bytes
        if not self._groups[answer.group]:
            del self._groups[answer.group], self._bytes[answer.group]
        for key in answer.keys:
            if self._by_key.get(key) is answer:
                del self._by_key[key]

    def _next_out(self) -> KeptAnswer:
        by_workload: Counter[str] = Counter()
        for (workload, _), num_bytes in self._bytes.items():
            by_workload[workload] += num_bytes
        largest = self._groups[max(self._bytes, key=lambda group: (by_workload[group[0]], self._bytes[group]))]
        return largest[self._random.randrange(math.ceil(0.75 * len(largest)))]

    def draw(
        self, max_tokens: int, *, held_out: bool, newest: bool = True, of: Callable[[str], bool] = lambda _: True
    ) -> list[KeptAnswer]:
        """Answers of at most so many tokens, the newest, or any of the older half, in equal shares of workloads and of
        callers in them.

        held_out: those to judge by, else those to train on. of: whether a workload is wanted.
        """
        left: dict[Group, list[KeptAnswer]] = {}
        for group, answers in self._groups.items():
            older = answers[: (len(answers) + 1) // 2]
            among = answers if newest else self._random.sample(older, len(older))
            if of(group[0]) and (chosen := [answer for answer in among if answer.is_held_out == held_out]):
                left[group] = chosen
        drawn: Counter[str | Group] = Counter()
        found, num_tokens = [], 0
        while left:
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """AL of a new head over the current one's on the same answers, paired: ratio, and the 95% interval's ends."""

    num_answers: int
    ratio: float
    low: float
    high: float


def verdict(recent: Comparison, before: Comparison, *, min_answers: int, min_gain: float, max_loss: float) -> str:
    """ "better", or why the new head is not proposed, after which it is trained on; with "worse" first: it is dropped.

    recent: held-out answers of the newest traffic; before: of the mix of before. Better means that the interval on
    recent traffic lies above 1 + `min_gain`, and that on the mix of before neither the ratio lies more than `max_loss`
    below 1 nor the whole interval below 1.
    """
    if recent.high < 1 or before.high < 1 - max_loss:
        return f"worse: AL ratio {recent.ratio:.3f} on recent answers, {before.ratio:.3f} on the mix of before"
    for what, compared in (("recent answers", recent), ("answers of the mix of before", before)):
        if compared.num_answers < min_answers:
            return f"{compared.num_answers} held-out {what}, {min_answers} needed"
    if recent.low <= 1 + min_gain:
        return f"AL ratio {recent.ratio:.3f} from {recent.low:.3f} on, {1 + min_gain:g} needed"
    if before.ratio < 1 - max_loss or before.high < 1:
        return f"AL ratio {before.ratio:.3f} on the mix of before, {1 - max_loss:g} needed"
    return BETTER


BETTER = "better"


# ---- what the learner says of itself


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """phase: collecting, training, judging or trial (a head of it is on trial). problem: what went wrong
    last, "" when nothing did. num_answers: kept, by workload. counters: since its start. last_round: its figures."""

    phase: str
    problem: str = ""
    num_answers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)
    last_round: Mapping[str, Any] = dataclasses.field(default_factory=dict)
