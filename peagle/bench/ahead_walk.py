"""Drafting ahead over a finished text, in plain numpy: guessed outcomes, and decoding with drafts made ahead.

While the target verifies drafts d_1..d_K, the drafter guesses how that ends: a drafts accepted and then token x. For
each of its m likeliest outcomes (a, x) it drafts what would follow. If the true outcome is among them (a hit), the next
drafts are there when the step ends, and the target never waits. They are other drafts than those made after the step,
for the target's hidden states of the a + 1 newest rows are not known yet: `num_missing` = a + 1 rows carry a stand-in.

With draft probabilities q_i at depth i and c_i the chance that draft i is accepted after the ones before it,

    P(a, x) = c_1 .. c_a (1 - c_{a+1}) q_{a+1}(x) / (1 - q_{a+1}(d_{a+1}))   a < K, x other than the rejected d_{a+1}
    P(K, x) = c_1 .. c_K q_{K+1}(x)                                          all accepted; needs a proposal more than K

Positions are those of the answer's tokens in its text of N tokens; `newest` is the last one that the target emitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Literal

import numpy as np

#: What a step without a hit does: wait for drafts made after the step before, or go on without drafts.
OnMiss = Literal["wait", "without"]
#: How the drafts of a step came: made after the step before, made ahead of its end, or none.
HOW = ("after", "ahead", "none")


@dataclasses.dataclass(frozen=True)
class Proposals:
    """What one pass of the drafter proposes after a prefix of the text.

    token_ids_DM, probs_DM: the M likeliest tokens at each of D depths, descending; column 0 is the draft. num_accepted:
    leading drafts that are the text's own tokens, 0..D.
    """

    token_ids_DM: np.ndarray
    probs_DM: np.ndarray
    num_accepted: int


#: proposals(newest, num_missing): of the pass after text[: newest + 1], its last `num_missing` rows without the
#: target's hidden states; 0 for drafts made after the step.
Lookup = Callable[[int, int], Proposals]


def guesses(
    proposals: Proposals, num_drafts: int, max_guesses: int, accept_D: np.ndarray | None = None
) -> list[tuple[int, int]]:
    """The likeliest outcomes (number accepted, next token) of verifying the first num_drafts drafts, likeliest first.

    accept_D: c_i of each depth; by default the drafter's own probability of its draft, q_i(d_i).

    Raises ValueError when there are fewer than num_drafts + 1 depths, or when `max_guesses` outcomes cannot be told
    from M tokens a depth (one may be the rejected draft).
    """
    num_depths, num_columns = proposals.token_ids_DM.shape
    if num_drafts + 1 > num_depths:
        raise ValueError(
            f"num_drafts = {num_drafts} needs proposals at {num_drafts + 1} depths, there are {num_depths}"
        )
    if not 1 <= max_guesses < num_columns:
        raise ValueError(f"max_guesses = {max_guesses} must be in 1..{num_columns - 1}: one less than tokens a depth")
    depths = slice(0, num_drafts + 1)
    probs_AM = proposals.probs_DM[depths].astype(np.float64)
    accept_A = (probs_AM[:, 0] if accept_D is None else np.asarray(accept_D, np.float64)[depths]).copy()
    reached_A = np.concatenate([[1.0], accept_A[:-1].cumprod()])
    chance_AM = reached_A[:, None] * probs_AM
    rest_A = np.maximum(1 - probs_AM[:-1, 0], np.finfo(np.float64).tiny)
    chance_AM[:-1] *= ((1 - accept_A[:-1]) / rest_A)[:, None]
    chance_AM[:-1, 0] = -1  # that draft was rejected
    best = np.argsort(-chance_AM, axis=None, kind="stable")[:max_guesses]
    accepted, column = np.divmod(best, num_columns)
    token_ids = proposals.token_ids_DM[accepted, column]
    return list(zip(accepted.tolist(), token_ids.tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class Play:
    """Decoding of one text. steps, tokens: by `HOW` the step's drafts came; num_guessed: steps whose outcome counted as
    hit or miss (all but the last); num_hits of these."""

    steps: dict[str, int]
    tokens: dict[str, int]
    num_guessed: int
    num_hits: int


def visits(
    text: np.ndarray,
    prompt_length: int,
    num_drafts: int,
    max_guesses: int,
    on_miss: OnMiss,
    accept_D: np.ndarray | None = None,
) -> Generator[tuple[int, int], Proposals, Play]:
    """`play` for a caller that runs many at once: yields what to look up, takes the proposals, returns the play."""
    steps, tokens = dict.fromkeys(HOW, 0), dict.fromkeys(HOW, 0)
    newest, num_missing, how = prompt_length, 0, "after"
    num_guessed = num_hits = 0
    while newest <= len(text) - 2:
        proposals = yield newest, num_missing
        depth = 0 if how == "none" else num_drafts
        accepted = min(proposals.num_accepted, depth)
        steps[how] += 1
        tokens[how] += min(accepted + 1, len(text) - 1 - newest)
        newest += accepted + 1
        if newest > len(text) - 2:
            break
        num_guessed += 1
        hit = max_guesses > 0 and (accepted, int(text[newest])) in guesses(proposals, depth, max_guesses, accept_D)
        num_hits += hit
        if hit:
            num_missing, how = accepted + 1, "ahead"
        else:
            num_missing, how = 0, "after" if on_miss == "wait" else "none"
    return Play(steps, tokens, num_guessed, num_hits)


def play(
    text: np.ndarray,
    prompt_length: int,
    lookup: Lookup,
    num_drafts: int,
    max_guesses: int,
    on_miss: OnMiss,
    accept_D: np.ndarray | None = None,
) -> Play:
    """Decode at K = num_drafts, drafting ahead for `max_guesses` outcomes of each step (0: never ahead).

    The first token comes from the prompt's pass and the first drafts after it. Tokens past the text's end are not
    counted, as in `peagle.walk`. During a step without drafts the drafter first makes the drafts that were missed; what
    they begin with are its guesses of the step's one token.
    """
    asked = visits(text, prompt_length, num_drafts, max_guesses, on_miss, accept_D)
    try:
        where = next(asked)
        while True:
            where = asked.send(lookup(*where))
    except StopIteration as end:
        played: Play = end.value
        return played


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One step of normal decoding that is not the last. newest: before it; accepted: drafts in it; ranks: of the true
    outcome among the guesses of each order, from 0; `max_guesses` where it is not among them."""

    newest: int
    accepted: int
    ranks: tuple[int, ...]

    @property
    def next_newest(self) -> int:
        return self.newest + self.accepted + 1


def outcomes(
    text: np.ndarray,
    prompt_length: int,
    lookup: Lookup,
    num_drafts: int,
    max_guesses: int,
    orders: tuple[np.ndarray | None, ...] = (None,),
) -> list[Outcome]:
    """Steps of decoding with drafts made after every step, and how well each was guessed; orders: `accept_D` each."""
    found, newest = [], prompt_length
    while newest <= len(text) - 2:
        proposals = lookup(newest, 0)
        accepted = min(proposals.num_accepted, num_drafts)
        after = newest + accepted + 1
        if after > len(text) - 2:
            break
        true = (accepted, int(text[after]))
        ranks = []
        for accept_D in orders:
            guessed = guesses(proposals, num_drafts, max_guesses, accept_D)
            ranks.append(guessed.index(true) if true in guessed else max_guesses)
        found.append(Outcome(newest, accepted, tuple(ranks)))
        newest = after
    return found


def conditional_acceptance(accepted: list[int], num_depths: int) -> np.ndarray:
    """a_i for i = 1..num_depths: share of steps with i drafts accepted among those with i - 1 (or 0)."""
    survived_D = (np.array(accepted)[:, None] >= np.arange(num_depths + 1)).sum(axis=0)
    return survived_D[1:] / np.maximum(survived_D[:-1], 1)
