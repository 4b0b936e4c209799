"""Which waiting sequence the scheduler admits next, where one request has many.

Enters: vLLM's waiting and running requests; those of one HTTP request (`n`, or a list of prompts) have the same
`extra_args["peagle_group"]`. Leaves: the waiting ones in another order. In vLLM's own order, first come first served, a
request of one sequence waits until every prompt of a request of sixteen has been computed.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus

from peagle.vllm.request_args import GROUP_KEY

MAX_OVERTAKEN = 64
"""Later sequences that go before a waiting one at the most."""


def group_of(request: Any) -> str | None:
    """The group of a `Request`, None where its HTTP request has no other sequence."""
    params = request.sampling_params
    group = (params.extra_args or {}).get(GROUP_KEY) if params is not None else None
    return group if isinstance(group, str) else None


def order_by_turns(waiting: Iterable[Any], running: Iterable[Any]) -> list[Any]:
    """`waiting` in turns: first those of whose request no other sequence runs or waits before them, then those with one
    such, and so on; otherwise in their order. One that was preempted, or overtaken `MAX_OVERTAKEN` times, counts as
    first."""
    num_ahead = Counter(group_of(request) for request in running)

    def turn(request: Any) -> int:
        if (group := group_of(request)) is None:
            return 0
        num_ahead[group] += 1
        is_due = getattr(request, "peagle_num_overtaken", 0) >= MAX_OVERTAKEN
        return 0 if is_due or request.status == RequestStatus.PREEMPTED else num_ahead[group] - 1

    return sorted(waiting, key=turn)


def count_overtaken(waiting: Iterable[Any], admitted: Iterable[Any]) -> None:
    """Note on each waiting sequence how many that came later have been `admitted` in this step."""
    arrivals = [request.arrival_time for request in admitted]
    for request in waiting:
        if num_later := sum(arrival > request.arrival_time for arrival in arrivals):
            request.peagle_num_overtaken = getattr(request, "peagle_num_overtaken", 0) + num_later
