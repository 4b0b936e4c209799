"""Callers and their keys: what settings are accepted, who is let through, and that no key leaks on the way."""

import contextlib
import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.request import Caller, hash_key, identify_caller
from cluster.settings import Catalog, ClusterSettings, load_settings
from peagle.checkpoint import read_head_config
from peagle.schema import SettingsError

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
