"""Which drafts one step verifies: the rule of the engine's scheduler, exact for any step latency."""

from collections.abc import Sequence

import numpy as np

from cluster.step_latency import StepLatency


def allocate(
    rates: Sequence[Sequence[float]], max_ks: Sequence[int], latency: StepLatency, prompt_tokens: float = 0.0
) -> list[int]:
    """Drafts of each request that give the most tokens per second in the next step.

    With m drafts the best ones are the m of the greatest cumulative acceptance rates over all requests. So one sort and
    one pass over m finds the optimum. The drafter's pass counts as paid. At a tie the step with fewer drafts wins, and
    the request that comes first.

    Args:
        rates: S_1, S_2, ... of each request, at least as many as its `max_ks`, the most drafts that it gets.
        prompt_tokens: of other requests' prompts that run in the same step.
    """
    if not rates:
        return []
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
    depths = [0] * len(rates)
    for slot in order.tolist():
        for index in owners[slot][:num_left]:
            depths[index] += 1
        num_left -= min(num_left, len(owners[slot]))
        if not num_left:
            break
    return depths
