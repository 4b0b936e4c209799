"""What a request asks for and what it gets: every source of K, and every bad value one by one."""

import pytest

from cluster.errors import ApiError
from cluster.request import ANYONE, Caller, Drafting, KRules, resolve

POLICY = KRules(max_draft_tokens=7, max_k=6, default_k=5, by_workload={"code": 6, "chat": 2, "prose": 0})


def test_k_is_the_requests_else_that_of_its_workload_else_the_default():
    for nothing in ((), ({},), ({"k": None, "workload": None},), (None, {"Accept": "*"})):
        assert resolve(POLICY, *nothing) == Drafting("default", 5, "default")
    assert resolve(POLICY, {"workload": "chat"}) == Drafting("chat", 2, "workload")
    assert resolve(POLICY, None, {"x-drafting-workload": "prose"}) == Drafting("prose", 0, "workload")
    assert resolve(POLICY, {"workload": "chat", "k": 4}) == Drafting("chat", 4, "request")
    assert resolve(POLICY, {"workload": "never-seen"}) == Drafting("never-seen", 5, "default")
    assert resolve(POLICY, {"k": 3}, {"X-Drafting-Workload": "chat"}) == Drafting("chat", 3, "request")
    assert resolve(POLICY, {"k": 3}, {"X-DRAFTING-K": " 3 "}) == Drafting("default", 3, "request"), "they agree"


@pytest.mark.parametrize(
    ("requested", "headers", "field"),
    [
        ({"k": -1}, {}, "drafting.k"),
        ({"k": 8}, {}, "drafting.k"),
        ({"k": "x"}, {}, "drafting.k"),
        ({"k": 3.0}, {}, "drafting.k"),
        ({"k": True}, {}, "drafting.k"),
        (None, {"X-Drafting-K": "x"}, "X-Drafting-K"),
        (None, {"X-Drafting-K": ""}, "X-Drafting-K"),
        (None, {"X-Drafting-K": "9" * 5000}, "X-Drafting-K"),
        ({"workload": "a b"}, {}, "drafting.workload"),
        ({"workload": "x" * 65}, {}, "drafting.workload"),
        (None, {"X-Drafting-Workload": "a b"}, "X-Drafting-Workload"),
        ({"depth": 3}, {}, "drafting.depth"),
        (3, {}, "drafting"),
        ({"k": 3}, {"X-Drafting-K": "4"}, "drafting.k"),
        ({"workload": "code"}, {"X-Drafting-Workload": "chat"}, "drafting.workload"),
    ],
)
def test_bad_input_names_its_field(requested, headers, field):
    with pytest.raises(ApiError) as raised:
        resolve(POLICY, requested, headers)
    assert raised.value.param == field
    assert field in raised.value.message
    assert len(raised.value.message) < 400


def test_without_a_drafter_only_zero_may_be_asked():
    policy = KRules(0, 0, 0)
    assert resolve(policy) == Drafting("default", 0, "default")
    assert resolve(policy, {"k": 0}) == Drafting("default", 0, "request")
    with pytest.raises(ApiError, match="without a drafter"):
        resolve(policy, {"k": 1})


def test_a_tag_is_taken_only_from_a_caller_that_may_set_one():
    chat = Caller("web", tags="refuse", workload="chat")
    for requested, headers, name in (
        ({"workload": "code"}, {}, "drafting.workload"),
        (None, {"X-Drafting-Workload": "code"}, "X-Drafting-Workload"),
        ({"workload": "chat"}, {}, "drafting.workload"),
    ):
        with pytest.raises(ApiError, match=f"web may not set {name}") as raised:
            resolve(POLICY, requested, headers, chat)
        assert raised.value.param == name
    ignoring = Caller("old", tags="ignore", workload="chat")
    assert resolve(POLICY, {"workload": "code", "k": 6}, {}, ignoring) == Drafting("chat", 6, "request")
    with pytest.raises(ApiError, match="letters"):
        resolve(POLICY, {"workload": "a b"}, {}, ignoring)
    trusted = Caller("job", tags="allow", workload="chat")
    assert resolve(POLICY, {"workload": "code"}, {}, trusted) == Drafting("code", 6, "workload")


def test_a_callers_own_workload_comes_before_what_the_request_shows():
    asked = []

    def workload_of(tag):
        asked.append(tag)
        return tag or "sys-0"

    assert resolve(POLICY, None, {}, Caller("web", workload="chat"), workload_of).workload == "chat"
    assert resolve(POLICY, None, {}, Caller("web"), workload_of).workload == "sys-0"
    assert resolve(POLICY, {"workload": "x"}, {}, ANYONE, workload_of).workload == "x"
    with pytest.raises(ApiError):
        resolve(POLICY, {"workload": "x", "k": 99}, {}, ANYONE, workload_of)
    # A refused request is not counted as one of its workload.
    assert asked == [None, "x"]
