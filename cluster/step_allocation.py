"""Which drafts one step verifies: the rule of the engine's scheduler, exact for any step latency."""

from collections.abc import Sequence

import numpy as np

from cluster.step_latency import StepLatency


def allocate(
    rates: Sequence[Sequence[float]],
    max_ks: Sequence[int],
    latency: StepLatency,
    prompt_tokens: float = 0.0,
    min_ks: Sequence[int] = (),
) -> list[int]:
    """Drafts of each request that give the most tokens per second in the next step.

    With m drafts the best ones are those of `min_ks`, and then those of the greatest cumulative acceptance rates over
    all requests. So one sort and one pass over m finds the optimum. The time of the drafter's pass counts for every m.
    At a tie the step with fewer drafts wins, and the request that comes first.

    Args:
        rates: S_1, S_2, ... of each request, at least as many as its `max_ks`, the most drafts that it gets.
        prompt_tokens: of other requests' prompts that run in the same step.
        min_ks: the fewest drafts of each request, at most its `max_ks`; by default 0.
    """
    if not rates:
        return []
    groups: dict[tuple[tuple[float, ...], int, int], list[int]] = {}
    for index, key in enumerate(zip(map(tuple, rates), max_ks, min_ks or [0] * len(rates), strict=True)):
        groups.setdefault(key, []).append(index)
    values: list[float] = []
    owners: list[list[int]] = []
    is_free: list[bool] = []
    for (own, max_k, min_k), members in groups.items():
        values += own[:max_k]
        owners += [members] * max_k
        is_free += [position >= min_k for position in range(max_k)]
    # Stable: a request's own drafts keep their order at equal rates.
    order = np.lexsort((-np.array(values), np.array(is_free)))
    counts = np.array([len(members) for members in owners], np.int64)
    added = np.repeat(np.array(values)[order], counts[order])
    num_tokens = len(rates) + np.concatenate([[0.0], np.cumsum(added)])
    tokens_per_s = num_tokens / latency.curve(len(rates), len(added), prompt_tokens, is_drafted=True)
    least = sum(min_ks)
    num_left = least + int(tokens_per_s[least:].argmax())
    num_drafts = [0] * len(rates)
    for draft in order.tolist():
        for index in owners[draft][:num_left]:
            num_drafts[index] += 1
        num_left -= min(num_left, len(owners[draft]))
        if not num_left:
            break
    return num_drafts
