"""The queue in front of the engines: bounded, and fair between callers whatever each of them sends."""

import asyncio
import pickle
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.admission import UNCOUNTED_BODY_BYTES, Admission, BodyBudget
from cluster.counts import TargetReport
from cluster.errors import ApiError
from cluster.request import ANYONE, Caller, client_network
from cluster.spending import DAY_S, DaySpending, SpendingTracker

WEB, JOB = Caller("web"), Caller("job")


class Requests:
    """Requests that hold a place until they are let go."""

    def __init__(self, **options: Any) -> None:
        self.admission = Admission(**options)
        self.running: list[str] = []
        self.refused: list[ApiError] = []
        self._doors: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, name: str, caller: Caller, weight: int = 1) -> None:
        self._doors[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, caller, weight))
        await settle()

    async def _run(self, name: str, caller: Caller, weight: int) -> None:
        try:
            self.admission.count_request(caller)
            async with self.admission.hold_places(caller, weight):
                self.running.append(name)
                try:
                    await self._doors[name].wait()
                finally:
                    self.running.remove(name)
        except ApiError as error:
            self.refused.append(error)

    async def end(self, name: str) -> None:
        self._doors[name].set()
        await settle()

    async def run_alone(self, *names: str) -> None:
        """Of these one runs at a time, in this order."""
        for name in names:
            assert self.running == [name]
            await self.end(name)

    async def leave(self, name: str) -> None:
        """The client goes away, also while it waits."""
        self._tasks[name].cancel()
        await settle()


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_tokens_of_a_day_are_refused_until_midnight_and_counted_on_all_replicas() -> None:
    day, now_s = 20_000, 20_000 * DAY_S + 3600.5
    caller = Caller("web", tokens_per_day=100)
    tracker, replicas = SpendingTracker(), {name: Admission(4, 4, day_clock=lambda: now_s) for name in "ab"}

    def tell(uptime_s: float = 60.0) -> dict[str, int]:
        reports = [TargetReport(name, spent=dict(one.spent), uptime_s=uptime_s) for name, one in replicas.items()]
        tracker.observe(reports, now_s)
        for one in replicas.values():
            one.spending = tracker.today
        return tracker.today.tokens

    replicas["a"].charge_tokens("web", 60)
    tell()
    tell()
    replicas["b"].count_request(caller)
    replicas["b"].charge_tokens("web", 40)
    replicas["b"].charge_tokens("job", 1)
    assert tell() == {"web": 100, "job": 1}
    for one in replicas.values():
        with pytest.raises(ApiError, match="web has used up its 100 tokens a day, until 0:00 UTC") as raised:
            one.count_request(caller)
        assert raised.value.retry_after_s == DAY_S - 3600
        one.count_request(Caller("job"))
    # A router that starts again goes on where the last one stopped; a replica that starts again begins at 0.
    tracker = msgspec.json.decode(msgspec.json.encode(tracker), type=SpendingTracker)
    replicas["b"].charge_tokens("web", 5)
    replicas["a"].spent.clear()
    assert tell()["web"] == 105
    now_s += DAY_S
    replicas["a"].count_request(caller)
    tell(uptime_s=2 * DAY_S)
    assert tracker.today == DaySpending(day + 1, {"web": 0, "job": 0})
    tracker = SpendingTracker()
    assert tell(uptime_s=2 * DAY_S) == {"web": 0, "job": 0}, "what was used on an unknown day is not counted"


async def test_places_are_shared_evenly_between_callers_that_wait() -> None:
    requests = Requests(max_running=6, max_queued=100)
    callers = [Caller(name) for name in "abc"]
    for number in range(10):
        for caller in callers:
            await requests.send(f"{caller.name}{number}", caller)
    for _ in range(12):
        await requests.end(requests.running[0])
        shares = Counter(name[0] for name in requests.running)
        assert set(shares.values()) == {2}, shares


async def test_places_are_shared_by_sequences_and_not_by_requests() -> None:
    requests = Requests(max_running=8, max_queued=100)
    for number in range(4):
        await requests.send(f"web-{number}", WEB, 4)
    for number in range(6):
        await requests.send(f"job-{number}", JOB)
    await requests.end("web-0")
    assert requests.running == ["web-1", "job-0", "job-1", "job-2", "job-3"]


async def test_a_crowd_leaves_places_for_those_of_whom_nothing_runs() -> None:
    requests = Requests(max_running=8, max_queued=100)
    requests.admission.num_reserved = 2
    for number in range(8):
        await requests.send(f"crowd-{number}", WEB)
    assert len(requests.running) == 6
    await requests.send("first", JOB)
    await requests.send("second", JOB)
    await requests.send("other", Caller("other"))
    assert set(requests.running) - {f"crowd-{number}" for number in range(6)} == {"first", "other"}


async def test_callers_without_keys_take_turns_by_address_and_leave_nothing_behind() -> None:
    requests = Requests(max_running=2, max_queued=100)
    crowd, other = (replace(ANYONE, address=address) for address in ("192.0.2.1", "192.0.2.2"))
    for number in range(6):
        await requests.send(f"crowd-{number}", crowd)
    await requests.send("other", other)
    await requests.end("crowd-0")
    assert requests.running == ["crowd-1", "other"]
    for number in range(6):
        await requests.leave(f"crowd-{number}")
    size = len(pickle.dumps(requests.admission))
    await requests.send("second", other)
    for number in range(100):  # who leaves while it waits
        await requests.send(f"passing-{number}", replace(ANYONE, address=f"198.51.100.{number}"))
        await requests.leave(f"passing-{number}")
    await requests.leave("second")
    assert len(pickle.dumps(requests.admission)) <= size + 4, "one number more is longer"


def test_a_client_is_told_apart_by_what_it_cannot_choose_of_its_address() -> None:
    networks = {"192.0.2.1": "192.0.2.1", "::ffff:192.0.2.1": "192.0.2.1", "2001:db8::ffff:1": "2001:db8::/64"}
    assert {address: client_network(address) for address in networks} == networks
    assert client_network("unknown") == ""


def test_bodies_are_held_up_to_a_bound_of_which_one_caller_has_half() -> None:
    large = UNCOUNTED_BODY_BYTES + 1
    budget = BodyBudget(4 * large)
    with ExitStack() as bodies:
        for _ in range(2):
            bodies.enter_context(budget.hold_body(WEB))(large)
        third = bodies.enter_context(budget.hold_body(WEB))
        third(large - 1)  # nobody's large bodies keep out a small one
        with pytest.raises(ApiError, match="max_body_bytes_in_flight"):
            third(1)
        job = bodies.enter_context(budget.hold_body(JOB))
        for _ in range(large):
            job(2)
        assert budget.num_bytes == 4 * large
        with pytest.raises(ApiError):
            bodies.enter_context(budget.hold_body(Caller("other")))(large)
    assert budget.num_bytes == 0
    with budget.hold_body(WEB) as body:
        body(2 * large)


async def test_a_callers_limit_counts_its_own_sequences_and_what_weighs_more_runs_alone() -> None:
    requests = Requests(max_running=10, max_queued=10)
    limited = Caller("limited", max_running_requests=3)
    for name, weight in (("two", 2), ("four", 4), ("one", 1)):
        await requests.send(name, limited, weight)
    await requests.send("other", WEB)
    assert requests.running == ["two", "other"]
    await requests.end("other")
    await requests.run_alone("two", "four", "one")


async def test_a_full_queue_refuses_the_last_request_of_the_caller_with_the_most() -> None:
    requests = Requests(max_running=1, max_queued=3)
    for number in range(5):
        await requests.send(f"crowd-{number}", WEB)
    assert len(requests.refused) == 1, "the crowd's own"
    await requests.send("late", JOB)
    assert len(requests.refused) == 2
    await requests.run_alone("crowd-0", "late", "crowd-1", "crowd-2")


async def test_a_request_that_does_not_fit_into_the_queue_takes_no_other_with_it() -> None:
    requests = Requests(max_running=1, max_queued=3)
    for name in "abcd":
        await requests.send(name, Caller(name))
    await requests.send("late", Caller("late"))
    await requests.send("wide", Caller("a"), 4)
    assert len(requests.refused) == 2, "equal callers that wait longer stay"
    await requests.run_alone(*"abcd")


async def test_a_request_wider_than_the_queue_that_waits_alone_stays() -> None:
    requests = Requests(max_running=1, max_queued=3)
    for name, weight in (("running", 1), ("wide", 5), ("light", 1)):
        await requests.send(name, Caller(name), weight)
    assert len(requests.refused) == 1
    await requests.run_alone("running", "wide")


async def test_rates_are_refused_with_the_time_to_wait_and_come_back() -> None:
    now_s = 0.0
    requests = Requests(max_running=10, max_queued=10, clock=lambda: now_s)
    caller = Caller("rated", requests_per_minute=2, tokens_per_minute=600)
    for name in ("a", "b", "c"):
        await requests.send(name, caller)
    assert requests.running == ["a", "b"]
    assert (requests.refused[0].retry_after_s, "2 requests a minute" in requests.refused[0].message) == (30, True)
    now_s = 31.0
    requests.admission.charge_tokens(caller.name, 900)
    await requests.send("d", caller)
    assert (requests.refused[1].retry_after_s, "600 tokens" in requests.refused[1].message) == (31, True)
    now_s = 62.5
    await requests.send("e", caller)
    assert "e" in requests.running


async def test_replicas_share_the_limits_of_a_caller() -> None:
    now_s = 0.0
    caller = Caller("web", max_running_requests=5, requests_per_minute=6, tokens_per_minute=600)
    requests = Requests(max_running=8, max_queued=8, clock=lambda: now_s)
    requests.admission.num_replicas = 3
    for number in range(3):
        await requests.send(f"first-{number}", caller)
    assert len(requests.running) == 2, "a third of 5, rounded up; and a third of 6 a minute"
    assert requests.refused[0].retry_after_s == 30
    assert "6 requests a minute" in requests.refused[0].message, "the limit that the operator set"
    # A replica less: the part of the minute that is used up stays used up.
    requests.admission.num_replicas = 2
    await requests.send("second", caller)
    assert len(requests.refused) == 2
    now_s += 60
    await requests.send("third", caller)
    assert "third" in requests.running


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 2)), max_size=40),
    max_running=st.integers(1, 6),
    max_queued=st.sampled_from([0, 3, 8, 1000]),
)
async def test_nothing_is_ever_lost_whoever_comes_and_goes(
    moves: list[tuple[str, int, int]], max_running: int, max_queued: int
) -> None:
    requests = Requests(max_running=max_running, max_queued=max_queued)
    weights = {}
    for number, (name, weight, then) in enumerate(moves):
        weights[str(number)] = weight
        await requests.send(str(number), Caller(name), weight)
        total = sum(weights[running] for running in requests.running)
        assert total <= max_running or len(requests.running) == 1
        admission = requests.admission
        assert admission.num_queued_sequences <= max_queued or admission.num_queued_requests == 1
        if then == 1 and requests.running:
            await requests.end(requests.running[0])
        elif then == 2:
            await requests.leave(str(number // 2))
    while requests.running:
        await requests.end(requests.running[0])
    assert (requests.admission.num_running, requests.admission.num_queued_requests) == (0, 0)
    assert max_queued < 1000 or not requests.refused
