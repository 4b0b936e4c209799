"""AL at one K from acceptance measured at another.

Enters: S_1 .. S_K_max and the K at which they were measured. Leaves: L(0) .. L(K_max), the tokens of a step at each K.

1 + S_1 + ... + S_k is L(k) only at the K that was played. Where a draft starts depends on K: text that is easy to draft
is one step at a great K and several at a small one, so the greater K is, the more of its steps start at hard tokens.
Sums of survivals measured at 7 give AL 4 to 9 % too low at 2 to 4; sums measured at 3, with deeper conditional
acceptances from probes, give AL 10 to 18 % too high at 7 (results/2026-11-21-traces-smollm2-135m.npz, greedy).

**To a lesser K.** Of the steps at m, the share P(j) = S_j - S_(j+1) accepted j drafts. Were all tokens hard or easy
whatever the depth, such a run of j + 1 tokens would take (j + 1) / (k + 1) steps at k, and at least one:

    L_split(k) = sum_j P(j) (j + 1) / sum_j P(j) max(1, (j + 1) / (k + 1))

This errs the other way, by 1 to 6 %. `SPLIT_SHARE` of it and the rest of the plain sum are taken. The share was chosen
on the greedy answers of one head; on answers at temperature 1, on an EAGLE-3 head and on a head of another target it
holds too, with a mean error of 0.3 to 1.4 % over groups of answers and k (the plain sum: 0.7 to 5 %).

**To a greater K** it is the inverse: of the curves whose conditional acceptances are the measured ones times one
factor, L(k) is that of the curve at k from which the former rule gives back the L(m) that was measured.

Where acceptance does not depend on where a draft starts, as with the synthetic acceptance of an engine under test, the
plain sum is right at every K: `split_share` 0.

Both rules are this project's own. tests/test_transfer.py holds them against replayed answers.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

SPLIT_SHARE = 2 / 3
"""Of the two views of a step's end: 0 where all steps are alike, 1 where tokens are hard or easy at any depth."""

NUM_SECANTS, TOLERANCE = 8, 1e-4


def lengths(survival: Sequence[float], measured_at: int, split_share: float = SPLIT_SHARE) -> tuple[float, ...]:
    """L(0) .. L(K_max) of S_1 .. S_K_max that were measured at K = `measured_at`; at 0, where nothing can have been
    measured, the plain sums. Raises ValueError where `measured_at` is not from 0 to K_max."""
    if not 0 <= measured_at <= len(survival):
        raise ValueError(f"measured_at is {measured_at}, outside 0..{len(survival)}")
    curve = [1.0, *survival]
    plain = tuple(accumulate(curve))
    if measured_at == 0 or split_share == 0:
        return plain
    played = curve[: measured_at + 1]
    less = (_at_lesser(played, k, split_share) for k in range(1, measured_at))
    more = (_at_greater(curve[: k + 1], measured_at, split_share) for k in range(measured_at + 1, len(curve)))
    return (1.0, *less, plain[measured_at], *more)


def gains(survival: Sequence[float], measured_at: int, split_share: float = SPLIT_SHARE) -> tuple[float, ...]:
    """L(k) - L(k - 1) for k = 1 .. K_max: what a further draft is worth to traffic at that K. Never rising, 0 to 1, as
    survivals are, so that a plan can rank drafts by them. Raises ValueError as `lengths`."""
    at = lengths(survival, measured_at, split_share)
    steps = (min(1.0, max(0.0, after - before)) for before, after in pairwise(at))
    return tuple(accumulate(steps, min))


def as_drawn(drawn: Sequence[float], mean: Sequence[float], worth: Sequence[float]) -> tuple[float, ...]:
    """What drafts are worth where survivals are as drawn from a posterior: as far from `worth` as the draw is from the
    posterior's mean."""
    moved = (min(1.0, max(0.0, one - base + by)) for one, base, by in zip(drawn, mean, worth, strict=False))
    return tuple(accumulate(moved, min))


def _at_lesser(played: Sequence[float], k: int, split_share: float) -> float:
    """L(k) of S_0 .. S_m measured at m > k."""
    ended = [before - after for before, after in zip(played, [*played[1:], 0.0], strict=True)]
    num_steps = sum(share * max(1.0, (j + 1) / (k + 1)) for j, share in enumerate(ended))
    return (1 - split_share) * sum(played[: k + 1]) + split_share * sum(played) / num_steps


def _at_greater(curve: Sequence[float], measured_at: int, split_share: float) -> float:
    """L(k) of S_0 .. S_k, of which those up to `measured_at` < k were measured there."""
    observed = sum(curve[: measured_at + 1])
    conditionals = [after / before if before > 0 else 0.0 for before, after in pairwise(curve)]
    # By secants: what a factor predicts rises with it, almost in a line, and at 1 it is too much.
    (before, excess), factor = (1.0, _at_lesser(curve, measured_at, split_share) - observed), 0.9
    for _ in range(NUM_SECANTS):
        found = _scaled(conditionals, factor)
        more = _at_lesser(found, measured_at, split_share) - observed
        if abs(more) < TOLERANCE or more == excess:
            break
        next_factor = factor - more * (factor - before) / (more - excess)
        before, excess, factor = factor, more, min(1.0, max(0.0, next_factor))
    return sum(_scaled(conditionals, factor))


def _scaled(conditionals: Sequence[float], factor: float) -> list[float]:
    """S_0 .. S_k of conditional acceptances times a factor."""
    return list(accumulate((factor * one for one in conditionals), lambda survival, one: survival * one, initial=1.0))
