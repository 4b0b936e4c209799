"""Acceptance traces: what a real head's drafts would have accepted at every position of real answers.

Enters: an `.npz` of `peagle.evaluate --traces`. Leaves: answers that decoding at any K, or at a K that changes on the
way, can be replayed on, and AL at a fixed K. Never knows: step times, policies.

An answer of n tokens after its first has n anchors. At anchor p with K = k the target accepts j = min(accepted[p], k)
drafts and emits one token more, so the next anchor is p + j + 1. For greedy decoding this is the very run the engine
would make at that K; above temperature 0 it has the same distribution (see `peagle.evaluate`). The last step emits no
token past the answer's end.
"""

import dataclasses
import fnmatch
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_ARRAYS = ("accepted", "num_anchors", "num_depths", "category", "temperature", "distinct_share")


@dataclass(frozen=True)
class Answer:
    """One stored answer. `accepted`: drafts confirmed at each anchor, one byte an anchor; `distinct_share`: share of
    distinct pieces of text, low where the answer repeats itself."""

    category: str
    temperature: float
    distinct_share: float
    accepted: bytes


@dataclass(frozen=True)
class Kind:
    """The answers of one workload: categories by pattern (as in a shell), and the temperature."""

    categories: tuple[str, ...]
    temperature: float = 0.0

    def holds(self, answer: Answer) -> bool:
        return answer.temperature == self.temperature and any(
            fnmatch.fnmatchcase(answer.category, one) for one in self.categories
        )


@dataclass(frozen=True)
class Mix:
    """Workloads and the share of requests each one sends. With `late_shares` the mix drifts linearly from `shares` to
    them over the run."""

    kinds: Mapping[str, Kind]
    shares: Mapping[str, float]
    late_shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, shares in {"shares": self.shares, "late_shares": self.late_shares or self.shares}.items():
            if set(shares) != set(self.kinds):
                raise ValueError(f"{name} names {sorted(shares)}, but the workloads are {sorted(self.kinds)}")
            if min(shares.values()) < 0 or sum(shares.values()) <= 0:
                raise ValueError(f"{name} must be at least 0 each and not all 0, not {dict(shares)}")

    def at(self, progress: float) -> np.ndarray:
        """Chance of each workload, in the order of `kinds`, at this share of the run."""
        early, late = (
            np.array([shares[name] for name in self.kinds], float) / sum(shares.values())
            for shares in (self.shares, self.late_shares or self.shares)
        )
        return (1 - progress) * early + progress * late


def even(kinds: Mapping[str, Kind]) -> Mix:
    return Mix(kinds, dict.fromkeys(kinds, 1.0))


def mixes() -> dict[str, Mix]:
    """Mixes by name. Categories are those of the dev questions (MT-Bench, Spec-Bench, HumanEval)."""
    code = Kind(("humaneval", "coding"))
    chat = ("writing", "roleplay", "humanities")
    apps = {
        "code": code,
        "chat": Kind(chat),
        "translation": Kind(("translation",)),
        "summarization": Kind(("summarization",)),
        "sampled": Kind(("*",), temperature=1.0),
    }
    two = {"code": code, "chat": Kind((*chat, "qa"), temperature=1.0)}
    return {
        "code-chat": even(two),
        "apps": even(apps),
        "code-to-chat": Mix(two, {"code": 0.9, "chat": 0.1}, {"code": 0.1, "chat": 0.9}),
        "one": even({"all": Kind(("*",))}),
    }


class Traces:
    """The answers of one file, or some of them; `max_draft_tokens` is the K_max they were drafted at."""

    def __init__(self, answers: Sequence[Answer], max_draft_tokens: int, source: str = "traces") -> None:
        self.answers = tuple(answers)
        self.max_draft_tokens = max_draft_tokens
        self.source = source

    @classmethod
    def load(cls, path: str | Path) -> "Traces":
        """Raises ValueError naming the file and the array that is missing or does not fit."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in _ARRAYS if name in stored.files}
        except (OSError, zipfile.BadZipFile, EOFError, ValueError, TypeError) as error:
            raise ValueError(
                f"traces {path}: cannot be read ({error}); write it with peagle.evaluate --traces"
            ) from error
        if missing := [name for name in _ARRAYS if name not in arrays]:
            raise ValueError(f"traces {path}: has no array {missing[0]!r}; write it with peagle.evaluate --traces")
        _check(arrays, f"traces {path}")
        ends = np.cumsum(arrays["num_anchors"], dtype=np.int64)
        flat = arrays["accepted"].astype(np.uint8).tobytes()
        answers = [
            Answer(str(category), float(temperature), float(share), flat[end - num : end])
            for category, temperature, share, num, end in zip(
                *(arrays[name] for name in ("category", "temperature", "distinct_share", "num_anchors")),
                ends.tolist(),
                strict=True,
            )
            if num
        ]
        return cls(answers, int(arrays["num_depths"]), str(path))

    def select(self, kind: Kind) -> list[Answer]:
        return [answer for answer in self.answers if kind.holds(answer)]

    def without_repetition(self, min_distinct_share: float) -> "Traces":
        """Leaves out answers that repeat themselves, whose drafts are easier than those of useful text."""
        kept = [one for one in self.answers if one.distinct_share >= min_distinct_share]
        return Traces(kept, self.max_draft_tokens, self.source)

    def up_to(self, max_draft_tokens: int) -> "Traces":
        """As if drafted at a lesser K_max: P-EAGLE's draft at a depth does not depend on how many follow."""
        limit = bytes(min(value, max_draft_tokens) for value in range(256))
        kept = [dataclasses.replace(one, accepted=one.accepted.translate(limit)) for one in self.answers]
        return Traces(kept, max_draft_tokens, self.source)

    def cut(self, max_tokens: int) -> "Traces":
        """As if no answer had been longer than so many tokens, the first one counted."""
        if max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, not {max_tokens}: the first token has no step")
        kept = []
        for one in self.answers:
            anchors = one.accepted[: max_tokens - 1]
            left = range(len(anchors), 0, -1)
            kept.append(dataclasses.replace(one, accepted=bytes(map(min, anchors, left))))
        return Traces(kept, self.max_draft_tokens, self.source)

    def halves(self) -> tuple["Traces", "Traces"]:
        """Two disjoint sets with half of each category and temperature: one to tune on, one to measure on."""
        seen: dict[tuple[str, float], int] = {}
        parts: tuple[list[Answer], list[Answer]] = ([], [])
        for answer in self.answers:
            group = answer.category, answer.temperature
            seen[group] = seen.get(group, -1) + 1
            parts[seen[group] % 2].append(answer)
        first, second = (Traces(part, self.max_draft_tokens, self.source) for part in parts)
        return first, second

    def draw(self, mix: Mix, num_requests: int, rng: np.random.Generator) -> list[tuple[str, Answer]]:
        """Requests of a mix, with their workload, answers drawn with repetition.

        Raises ValueError naming the workload that no answer belongs to.
        """
        names = list(mix.kinds)
        pools = [self.select(mix.kinds[name]) for name in names]
        for name, pool in zip(names, pools, strict=True):
            if not pool:
                kind = mix.kinds[name]
                categories = ", ".join(kind.categories)
                raise ValueError(
                    f"{self.source}: workload {name!r} has no answer: none of category {categories} at "
                    f"temperature {kind.temperature:g}"
                )
        drawn = []
        for index in range(num_requests):
            which = int(rng.choice(len(names), p=mix.at(index / max(1, num_requests - 1))))
            drawn.append((names[which], pools[which][int(rng.integers(len(pools[which])))]))
        return drawn


def synthetic(
    survivals: Mapping[str, Sequence[float]], seed: int, num_answers: int = 400, num_tokens: int = 256
) -> Traces:
    """Answers whose drafts are accepted by chance alone: at each anchor the first i with probability S_i of the
    workload, wherever the draft starts, as in an engine with synthetic acceptance. The workload is the category.

    `num_tokens` is the mean: answers of one length run in lockstep where K is 0, and their prompts then meet in a few
    steps. Lengths are drawn evenly from half of it to one and a half.

    Raises ValueError naming the workload whose survivals are none, or not as many as the others'.
    """
    deepest = max(map(len, survivals.values()))
    answers = []
    for number, (name, of) in enumerate(survivals.items()):
        falling = np.array([1.0, *of])
        if len(of) != deepest or not ((np.diff(falling) <= 0).all() and falling[-1] >= 0):
            raise ValueError(f"survival of {name!r} must be {deepest} falling probabilities, not {list(of)}")
        rng = np.random.default_rng([seed, number])
        for _ in range(num_answers):
            num_anchors = int(rng.integers(num_tokens // 2, num_tokens * 3 // 2)) - 1
            accepted = (rng.random((num_anchors, 1)) < falling[1:]).sum(axis=1)
            left = np.arange(num_anchors, 0, -1)  # the last step emits no token past the answer's end
            answers.append(Answer(name, 0.0, 1.0, np.minimum(accepted, left).astype(np.uint8).tobytes()))
    return Traces(answers, deepest, "synthetic acceptance")


def _check(arrays: Mapping[str, Any], path: str) -> None:
    num_anchors, accepted = arrays["num_anchors"], arrays["accepted"]
    for name in ("category", "temperature", "distinct_share"):
        if len(arrays[name]) != len(num_anchors):
            raise ValueError(f"{path}: {name} has {len(arrays[name])} entries for {len(num_anchors)} answers")
    if num_anchors.sum() != len(accepted):
        raise ValueError(f"{path}: num_anchors add up to {num_anchors.sum()}, but accepted has {len(accepted)}")
    if not len(accepted):
        raise ValueError(f"{path}: holds no answer")
    if not 1 <= int(arrays["num_depths"]) <= 255:
        raise ValueError(f"{path}: num_depths is {arrays['num_depths']}, not 1 to 255")
    if int(accepted.max()) > int(arrays["num_depths"]):
        raise ValueError(f"{path}: accepted holds {accepted.max()}, above num_depths {arrays['num_depths']}")


def num_steps(accepted: bytes, k: int) -> int:
    """Decoding steps of one answer at a fixed K = k."""
    steps = anchor = 0
    while anchor < len(accepted):
        steps += 1
        anchor += min(accepted[anchor], k) + 1
    return steps


def acceptance_length(answers: Iterable[Answer], k: int) -> float:
    """AL at a fixed K: tokens over steps, pooled over answers, the first token of each left out (as in vLLM)."""
    tokens = steps = 0
    for answer in answers:
        tokens += len(answer.accepted)
        steps += num_steps(answer.accepted, k)
    if not steps:
        raise ValueError("acceptance length of no answers")
    return tokens / steps


def survival(answers: Iterable[Answer], max_draft_tokens: int) -> tuple[float, ...]:
    """S_1..S_K_max over the steps of decoding at K_max, pooled over answers."""
    steps = 0
    survived = [0] * max_draft_tokens
    for answer in answers:
        anchor = 0
        while anchor < len(answer.accepted):
            steps += 1
            found = answer.accepted[anchor]
            for depth in range(min(found, max_draft_tokens)):
                survived[depth] += 1
            anchor += min(found, max_draft_tokens) + 1
    if not steps:
        raise ValueError("survival of no answers")
    return tuple(count / steps for count in survived)
