"""Which workload a request belongs to: the order of what decides, and a bound that no flood turns against the busy."""

import pickle
import random

import pytest

from cluster.request import Workloads, fingerprint, is_workload_tag, system_prompt

CODE = "You are a coding assistant. Answer with code only."
CHAT = "You are a friendly companion."


def system(content, role="system"):
    return {"role": role, "content": content}


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], ""),
        ([system(CODE), USER], CODE),
        ([system("a"), system("b", "developer"), USER], "a\nb"),
        ([USER, system(CODE), USER, system("later")], CODE),
        ([system([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), USER], "a\nb"),
        ([system([{"type": "image_url", "image_url": {"url": "x"}}, {"text": 3}]), system(None), USER], ""),
        ([{"content": "no role"}], ""),
    ],
)
def test_the_system_prompt_is_the_first_run_of_its_messages(messages, expected):
    assert system_prompt(messages) == expected


def test_a_fingerprint_is_a_tag_and_the_same_for_what_one_application_sends():
    name = fingerprint(CODE)
    assert len(name) == len("sys-") + 8
    assert is_workload_tag(name)
    assert fingerprint(f"  {CODE.replace(' ', chr(10))}\n") == name
    assert fingerprint(CHAT) != name
    dated = "You help {}. Today is 2026-{:02}-{}, {} new mails."
    assert fingerprint(dated.format("Ann", 9, 8, 0)) == fingerprint(dated.format("Ann", 11, 21, 1234))
    assert fingerprint(dated.format("Ann", 9, 8, 0)) != fingerprint(dated.format("Bob", 9, 8, 0))
    long = "rule " * 300
    assert fingerprint(long + "first document") == fingerprint(long + "another")
    assert fingerprint("first " + long) != fingerprint("another " + long)
    assert [fingerprint(blank) for blank in ("", "\n\t \u2003")] == [None, None]
    assert fingerprint("\ud800 x") not in (None, fingerprint("x")), "it has no UTF-8 form"


def test_tag_comes_before_alias_before_system_prompt_before_default():
    workloads = Workloads(aliases={"small-coder": "code"}, min_num_requests=1)
    assert workloads.resolve("mine", "small-coder", CHAT) == "mine"
    assert workloads.resolve(None, "small-coder", CHAT) == "code"
    assert workloads.resolve(None, "small", CHAT) == fingerprint(CHAT)
    assert workloads.resolve(None, "small") == workloads.resolve() == "default"


def test_tags_get_their_workload_at_once_while_there_is_room_and_share_default_afterwards():
    workloads = Workloads(5, ["code", "chat"])
    assert [workloads.resolve(f"tag{i}") for i in range(4)] == ["tag0", "tag1", "default", "default"]
    assert [workloads.resolve(tag) for tag in ("code", "tag1", "default")] == ["code", "tag1", "default"]
    assert workloads.names() == ("chat", "code", "default", "tag0", "tag1")


def test_what_the_operator_names_always_stays():
    workloads = Workloads(2, ["code", "chat"], aliases={"x": "docs"})
    assert {workloads.resolve(tag) for tag in ["new", "newer"] * 50} == {"default"}
    assert workloads.names() == ("chat", "code", "default", "docs")


@pytest.mark.parametrize("times_each", [1, 3])
@pytest.mark.parametrize("kind", ["prompt", "tag"])
def test_thousands_of_names_do_not_displace_the_busy(kind, times_each):
    """One request in eleven belongs to one of ten busy applications, the rest to names that come and do not return."""
    random_source = random.Random(times_each)
    workloads = Workloads(max_num=16)
    busy = [f"You write {letter} code." for letter in "abcdefghij"]
    for prompt in busy * 20:
        workloads.resolve(prompt=prompt)
    for number in range(4000):
        name = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        for _ in range(times_each):
            workloads.resolve(**{kind: name})
            if random_source.random() < 0.1:
                prompt = random_source.choice(busy)
                assert fingerprint(prompt) in workloads.names()
                assert workloads.resolve(prompt=prompt) == fingerprint(prompt)
    assert len(workloads.names()) <= 16


def test_memory_is_bounded_whatever_comes():
    workloads, sizes = Workloads(), []
    for start, end in ((0, 3 * 4096), (3 * 4096, 30 * 4096)):
        for number in range(start, end):
            workloads.resolve(f"tag-{number}")
        sizes.append(len(pickle.dumps(workloads)))
    assert sizes[1] < 1.5 * sizes[0]
