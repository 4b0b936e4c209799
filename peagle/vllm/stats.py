"""Acceptance as counts by depth: the values that `peagle.vllm.recorder` leaves.

Enters: verified steps. Leaves: `DraftingStats` of some steps, `RequestDrafting` of a request. Imports no vLLM, so
that a deployment can carry them as values.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from peagle.vllm.channel import VerifiedStep


@dataclass(frozen=True, slots=True)
class DraftingStats:
    """Counts over some verification steps, by depth.

    `drafted_by_depth[i - 1]` steps verified at least i drafts; in `reached_by_depth[i - 1]` of those the first i - 1
    were all accepted, and in `accepted_by_depth[i - 1]` the first i. So accepted / reached estimates the conditional
    acceptance a_i, and accepted / drafted the survival S_i, also where K differs between requests or steps: a step with
    fewer than i drafts is in no count of depth i. All three are as long as the deepest step, and empty without steps.
    """

    drafted_by_depth: tuple[int, ...] = ()
    reached_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps that verified at least one draft. Prefill and steps at K = 0 are none."""
        return self.drafted_by_depth[0] if self.drafted_by_depth else 0

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified. What the drafter proposed beyond K is not counted."""
        return sum(self.drafted_by_depth)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted, also those that a stop condition cut from the end of the output afterwards."""
        return sum(self.accepted_by_depth)

    @property
    def acceptance_length(self) -> float:
        """AL, tokens per verification step: 1 + accepted / steps. 1.0 without steps (K = 0)."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    def __add__(self, other: "DraftingStats") -> "DraftingStats":
        return DraftingStats(
            _sum_by_depth(self.drafted_by_depth, other.drafted_by_depth),
            _sum_by_depth(self.reached_by_depth, other.reached_by_depth),
            _sum_by_depth(self.accepted_by_depth, other.accepted_by_depth),
        )

    def __sub__(self, earlier: "DraftingStats") -> "DraftingStats":
        """What came on top of `earlier`, a previous reading of the same counts."""
        added = self + DraftingStats(
            tuple(-count for count in earlier.drafted_by_depth),
            tuple(-count for count in earlier.reached_by_depth),
            tuple(-count for count in earlier.accepted_by_depth),
        )
        # As long as the deepest of these steps, which the ones before may have been deeper than.
        deepest = max((depth for depth, count in enumerate(added.drafted_by_depth, start=1) if count), default=0)
        return DraftingStats(
            added.drafted_by_depth[:deepest], added.reached_by_depth[:deepest], added.accepted_by_depth[:deepest]
        )

    @classmethod
    def from_steps(cls, steps: Iterable[VerifiedStep]) -> "DraftingStats":
        """Counts of `steps`, each (drafts verified, drafts accepted)."""
        counter = StepCounter()
        for step in steps:
            counter.add(step)
        return counter.stats()


def _sum_by_depth(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(a), len(b))
    return tuple(x + y for x, y in zip(a + (0,) * (length - len(a)), b + (0,) * (length - len(b)), strict=True))


@dataclass(slots=True)
class StepCounter:
    """Growing counts; `stats()` is a frozen copy."""

    drafted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, step: VerifiedStep) -> None:
        num_verified, num_accepted = step
        while len(self.drafted) < num_verified:
            self.drafted.append(0)
            self.reached.append(0)
            self.accepted.append(0)
        for index in range(num_verified):
            self.drafted[index] += 1
        for index in range(min(num_verified, num_accepted + 1)):
            self.reached[index] += 1
        for index in range(num_accepted):
            self.accepted[index] += 1

    def stats(self) -> DraftingStats:
        return DraftingStats(tuple(self.drafted), tuple(self.reached), tuple(self.accepted))


@dataclass(frozen=True, slots=True)
class RequestDrafting:
    """How one sequence was drafted, from its first token to its end.

    Attributes:
        request_id: the id its caller gave to the engine; the n sequences of a request with n > 1 share it.
        workload: `extra_args["peagle_workload"]`, or `default`.
        k: `extra_args["peagle_k"]` as sent, None where it was not.
        stats: counts by depth.
        num_output_tokens, num_prompt_tokens: tokens that the engine returned for it, and those of its prompt.
        is_aborted: the caller left, or cancelled it, before it was complete.
    """

    request_id: str
    workload: str
    k: Any
    stats: DraftingStats
    num_output_tokens: int
    is_aborted: bool
    num_prompt_tokens: int = 0
