"""The order in which the scheduler admits waiting sequences, if one request has many.

Enters: vLLM's waiting and running requests; those of one HTTP request (`n`, or a list of prompts) have the same
`extra_args["peagle_group"]`. Leaves: the waiting ones in another order. In vLLM's own order, first come first served, a
request of one sequence waits for every prompt of an earlier request of sixteen.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus

from peagle.vllm.request_args import GROUP_KEY, read_extra_args

MAX_OVERTAKEN = 64
"""Most later sequences that are admitted before a waiting one."""


def group_of(request: Any) -> str | None:
    """The group of a `Request`; None if its HTTP request has no other sequence."""
    group = read_extra_args(request.sampling_params).get(GROUP_KEY)
    return group if isinstance(group, str) else None


def order_by_turns(waiting: Iterable[Any], running: Iterable[Any]) -> list[Any]:
    """Sort `waiting` by the number of sequences of the same group that run or wait before it; equal ones keep their
    order. A sequence that was preempted, or overtaken `MAX_OVERTAKEN` times, comes first."""
    num_ahead = Counter(group_of(request) for request in running)

    def turn(request: Any) -> int:
        if (group := group_of(request)) is None:
            return 0
        num_ahead[group] += 1
        is_due = getattr(request, "peagle_num_overtaken", 0) >= MAX_OVERTAKEN
        return 0 if is_due or request.status == RequestStatus.PREEMPTED else num_ahead[group] - 1

    return sorted(waiting, key=turn)


def count_overtaken(waiting: Iterable[Any], admitted: Iterable[Any]) -> None:
    """Count on each waiting sequence the later ones that were `admitted` in this step."""
    arrivals = [request.arrival_time for request in admitted]
    for request in waiting:
        if num_later := sum(arrival > request.arrival_time for arrival in arrivals):
            request.peagle_num_overtaken = getattr(request, "peagle_num_overtaken", 0) + num_later
