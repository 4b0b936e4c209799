"""What a request asks for and what it gets, which workload it belongs to, and whose it is."""

import contextlib
import hashlib
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.request import (
    ANYONE,
    Caller,
    Drafting,
    KRules,
    Workloads,
    fingerprint,
    hash_key,
    identify_caller,
    is_workload_tag,
    resolve,
    system_prompt,
)
from cluster.settings import Catalog, ClusterSettings, load_settings
from peagle.checkpoint import read_head_config
from peagle.schema import SettingsError

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


# ---- which workload a request belongs to, and a bound that no flood turns against the busy


CODER = "You are a coding assistant. Answer with code only."
COMPANION = "You are a friendly companion."


def system(content, role="system"):
    return {"role": role, "content": content}


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], ""),
        ([system(CODER), USER], CODER),
        ([system("a"), system("b", "developer"), USER], "a\nb"),
        ([USER, system(CODER), USER, system("later")], CODER),
        ([system([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), USER], "a\nb"),
        ([system([{"type": "image_url", "image_url": {"url": "x"}}, {"text": 3}]), system(None), USER], ""),
        ([{"content": "no role"}], ""),
    ],
)
def test_the_system_prompt_is_the_first_run_of_its_messages(messages, expected):
    assert system_prompt(messages) == expected


def test_a_fingerprint_is_a_tag_and_the_same_for_what_one_application_sends():
    name = fingerprint(CODER)
    assert len(name) == len("sys-") + 8
    assert is_workload_tag(name)
    assert fingerprint(f"  {CODER.replace(' ', chr(10))}\n") == name
    assert fingerprint(COMPANION) != name
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
    assert workloads.resolve("mine", "small-coder", COMPANION) == "mine"
    assert workloads.resolve(None, "small-coder", COMPANION) == "code"
    assert workloads.resolve(None, "small", COMPANION) == fingerprint(COMPANION)
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


# ---- callers and their keys: what settings are accepted, who is let through, and that no key leaks on the way


SECRET = "sk-very-secret"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
OTHER = {"key_sha256": "ab" * 32}
KEY_ERRORS: dict[str, tuple[Any, list[str]]] = {
    "a key as the section": (SECRET, ["callers must be a mapping"]),
    "nobody": ({}, ["callers is empty"]),
    "a name with a blank": ({"a b": OTHER}, ["callers has the name 'a b'"]),
    "a key as a caller": ({"web": SECRET}, ["callers.web must be a mapping", "key_sha256"]),
    "no key": ({"web": {"tags": "allow"}}, ["callers.web has no key", "key_sha256", "key_env"]),
    "a key and a file": ({"web": {**OTHER, "key_file": "/k"}}, ["callers.web has key_sha256 and key_file"]),
    "a plain key": ({"web": {"key": SECRET, **OTHER}}, ["callers.web.key: keys do not stand in the settings"]),
    "a key for a digest": ({"web": {"key_sha256": SECRET}}, ["callers.web.key_sha256", "64 hexadecimal digits"]),
    "a number for a digest": ({"web": {"key_sha256": 31415926535}}, ["callers.web.key_sha256", "in quotes"]),
    "the digest of nothing": ({"web": {"key_sha256": hash_key("")}}, ["callers.web.key_sha256", "empty key"]),
    "a key for a variable": ({"web": {"key_env": SECRET}}, ["callers.web.key_env", "name of an environment variable"]),
    "a variable that is not set": ({"web": {"key_env": "NO_KEY"}}, ["callers.web.key_env", "NO_KEY is not set here"]),
    "a variable of two words": ({"web": {"key_env": "WORDS"}}, ["callers.web.key_env", "the key in WORDS has blanks"]),
    "a workload that is none": ({"web": {**OTHER, "workload": "a b"}}, ["callers.web.workload", "'a b'"]),
    "two with one key": (
        {"web": {"key_sha256": DIGEST.upper()}, "job": {"key_env": "WEB_KEY"}},
        ["callers web and job have the same key"],
    ),
}
ENV = {"WEB_KEY": f"{SECRET}\n", "WORDS": f"{SECRET} {SECRET}"}


@pytest.mark.parametrize("name", KEY_ERRORS)
def test_bad_callers_are_named_without_repeating_a_key(name: str) -> None:
    raw, words = KEY_ERRORS[name]
    with pytest.raises(SettingsError) as raised:
        service(raw)
    (problem,) = raised.value.problems
    assert all(word in problem for word in words), problem
    assert SECRET not in problem
    assert "31415926535" not in problem


def service(raw: Any) -> ClusterSettings:
    drafter = {"head": "org/head", "max_draft_tokens": 7}
    args = {"model": {"source": "org/tiny", "id": "tiny"}, "callers": raw, "drafter": drafter}
    return load_settings(args, Catalog((), Path("nowhere"), read_head_config), ENV)


def test_a_key_by_digest_and_by_variable_are_the_same_caller_and_stay_secret() -> None:
    further = {"tags": "ignore", "workload": "pages", "max_k": 3, "requests_per_minute": 60.0}
    wanted = Caller("web", **further)
    for key in ({"key_sha256": DIGEST.upper()}, {"key_env": "WEB_KEY"}):
        settings = service({"web": {**key, **further}})
        table = settings.caller_table()
        for header in (f"Bearer {SECRET}", f"bearer   {SECRET} "):
            assert identify_caller(table, header) == wanted
        assert SECRET not in repr(settings)
        assert SECRET.encode() not in pickle.dumps((settings, table))


def test_all_keys_of_a_file_are_the_callers_and_others_can_be_read_later(tmp_path: Path) -> None:
    path = tmp_path / "web"
    settings = service({"web": {"key_file": str(path), "max_k": 3}, "job": {"key_sha256": DIGEST}})
    for text, keys in (("sk-new\n\n sk-old \n", ["sk-new", "sk-old"]), ("sk-next", ["sk-next"]), ("", [])):
        path.write_text(text)
        found = settings.read_key_files()
        assert found == {"web": [hash_key(key) for key in keys]}
        table = settings.caller_table(found)
        for key in ("sk-new", "sk-old", "sk-next"):
            with contextlib.nullcontext() if key in keys else pytest.raises(ApiError):
                assert identify_caller(table, f"Bearer {key}") == Caller("web", max_k=3)
        assert identify_caller(table, f"Bearer {SECRET}").name == "job"


def test_key_files_that_cannot_be_used_are_all_named_without_their_keys(tmp_path: Path) -> None:
    for name, text in (("words", "sk a"), ("same", SECRET), ("twice", "x\nx")):
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes").write_bytes(b"\xff")
    files = {name: {"key_file": str(tmp_path / name)} for name in ("none", "words", "same", "twice", "bytes")}
    with pytest.raises(SettingsError) as raised:
        service({**files, "job": {"key_sha256": DIGEST}}).read_key_files()
    text = str(raised.value)
    for part in (
        f"callers.none.key_file: {tmp_path}/none cannot be read: No such file",
        f"callers.words.key_file: a key in {tmp_path}/words has blanks",
        f"callers.bytes.key_file: a key in {tmp_path}/bytes has blanks",
        "callers job and same have the same key",
    ):
        assert part in text
    assert "twice" not in text
    assert SECRET not in text
