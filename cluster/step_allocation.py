"""Which drafts one step verifies: the rule of the engine's scheduler, exact for any step latency."""

from collections.abc import Sequence

import numpy as np

from cluster.acceptance import Array
from cluster.step_latency import StepLatency


def allocate(
    rates: Sequence[Sequence[float]], max_ks: Sequence[int], latency: StepLatency, prompt_tokens: float = 0.0
) -> tuple[list[int], float]:
    """Drafts of each request that give the most tokens per second in the next step; and how many tokens per second.

    With m drafts the best ones are the m of the greatest cumulative acceptance rates over all requests. So one sort and
    one pass over m finds the optimum. The drafter's pass counts as paid. At a tie the step with fewer drafts wins, and
    the request that comes first.

    Args:
        rates: S_1, S_2, ... of each request, at least as many as its `max_ks`, the most drafts that it gets.
        prompt_tokens: of other requests' prompts that run in the same step.
    """
    if not rates:
        return [], 0.0
    groups: dict[tuple[tuple[float, ...], int], list[int]] = {}
    for index, key in enumerate(zip(map(tuple, rates), max_ks, strict=True)):
        groups.setdefault(key, []).append(index)
    values: list[float] = []
    owners: list[list[int]] = []
    for (own, max_k), members in groups.items():
        values += own[:max_k]
        owners += [members] * max_k
    # Stable: a request's own drafts keep their order at equal rates.
    order = np.argsort(-np.array(values), kind="stable")
    counts = np.array([len(members) for members in owners], np.int64)
    added = np.repeat(np.array(values)[order], counts[order])
    num_tokens = len(rates) + np.concatenate([[0.0], np.cumsum(added)])
    tokens_per_s = num_tokens / latency.curve(len(rates), len(added), prompt_tokens, is_drafted=True)
    num_left = int(tokens_per_s.argmax())
    best, depths = float(tokens_per_s[num_left]), [0] * len(rates)
    for slot in order.tolist():
        for index in owners[slot][:num_left]:
            depths[index] += 1
        num_left -= min(num_left, len(owners[slot]))
        if not num_left:
            break
    return depths, best


PROBABILITY_LEVELS = (0.02, *(round(0.05 * number, 2) for number in range(1, 20)), 0.98)
"""Cumulative probabilities at which the drafts of a batch are counted (`best_total`)."""


def best_total(counts: Sequence[float], num_requests: int, max_total: int, seconds: Array) -> tuple[int, float]:
    """How many drafts of a batch give the most tokens per second in the next step, where the best are verified; and how
    many tokens per second.

    Args:
        counts: of the batch's drafts, how many reach each of `PROBABILITY_LEVELS` with the probability that they and
            all before them are accepted.
        max_total: the most drafts.
        seconds: of a step with 0 .. `max_total` drafts.
    """
    levels = (*PROBABILITY_LEVELS, 1.0)
    known = np.minimum([0.0, *reversed(counts), max_total], max_total)
    cumulative = [(low + high) / 2 for low, high in zip((0.0, *levels), levels, strict=False)]
    gained = np.concatenate([[0.0], np.cumsum(np.diff(known) * cumulative[::-1])])
    tokens_per_s = (num_requests + np.interp(np.arange(max_total + 1), known, gained)) / seconds
    best = int(tokens_per_s.argmax())
    return best, float(tokens_per_s[best])
