"""The order in which the scheduler admits sequences of requests that have one or many."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from peagle.vllm.request_args import GROUP_KEY
from peagle.vllm.turns import MAX_OVERTAKEN, count_overtaken, order_by_turns


def sequence(name: str, group: str | None = None, status: Any = RequestStatus.WAITING, arrival: float = 0.0) -> Any:
    extra_args = None if group is None else {GROUP_KEY: group}
    params = SimpleNamespace(extra_args=extra_args)
    return SimpleNamespace(request_id=name, sampling_params=params, status=status, arrival_time=arrival)


def names(requests: list[Any]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_request_of_one_sequence_waits_for_one_of_each_other_request() -> None:
    wide = [sequence(f"a{number}", "a") for number in range(3)] + [sequence(f"b{number}", "b") for number in range(3)]
    waiting = [*wide, sequence("plain"), sequence("plain too")]
    assert names(order_by_turns(waiting, [])) == ["a0", "b0", "plain", "plain too", "a1", "b1", "a2", "b2"]
    running = [sequence(f"a-{number}", "a") for number in range(2)]
    assert names(order_by_turns(waiting, running)) == ["b0", "plain", "plain too", "b1", "a0", "b2", "a1", "a2"]


def test_requests_of_one_sequence_keep_their_order_and_a_preempted_sequence_stays_first() -> None:
    single = [sequence(str(number)) for number in range(5)]
    assert order_by_turns(single, single[:2]) == single
    preempted = sequence("a9", "a", RequestStatus.PREEMPTED)
    waiting = [preempted, sequence("plain")]
    assert order_by_turns(waiting, [sequence("a0", "a")]) == waiting


def test_no_sequence_is_overtaken_without_end() -> None:
    last = sequence("a1", "a", arrival=1.0)
    running = [sequence("a0", "a")]
    for number in range(MAX_OVERTAKEN):
        later = sequence(str(number), arrival=2.0 + number)
        assert order_by_turns([last, later], running) == [later, last]
        count_overtaken([last], [later])
    count_overtaken([last], [sequence("earlier", arrival=0.5)])
    later = sequence("later", arrival=1e6)
    assert order_by_turns([last, later], running) == [last, later]
