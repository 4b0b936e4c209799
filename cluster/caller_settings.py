"""From the raw `callers` section to checked records that hold digests, and what is wrong with it.

No message here repeats a value that may be a key: settings files and logs are read by more people than keys are for.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cluster import messages
from cluster.callers import digest_of
from cluster.drafting import is_workload_tag
from cluster.settings import CallerSettings

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[!-~]+")  # what a header carries unchanged: ASCII without blanks
_HOW = "write key_sha256 (printf %s KEY | sha256sum), or key_env, the name of an environment variable that holds it"


def read_callers(raw: Any, env: Mapping[str, str]) -> tuple[dict[str, CallerSettings], list[str]]:
    """The callers by name, each with the `key_sha256` of its key, and a line for each problem."""
    if not isinstance(raw, Mapping):
        return {}, ["callers must be a mapping from a caller's name to its settings; leave it out to serve everyone"]
    if not raw:
        return {}, ["callers is empty, so nobody could ask: name at least one, or leave it out to serve everyone"]
    callers: dict[str, CallerSettings] = {}
    problems: list[str] = []
    for name, section in raw.items():
        if not isinstance(name, str) or not is_workload_tag(name):
            problems.append(f"callers has the name {name!r:.80}: a name is 1 to 64 letters, digits or . _ : -")
        elif (caller := _read(name, section, env, problems)) is not None:
            callers[name] = caller
    return callers, problems + _shared_keys(callers)


def check_depths(callers: Mapping[str, CallerSettings], limit: int, because: str) -> list[str]:
    """A line for each caller whose `max_depth` is above the limit of all, `because` of which it is one."""
    return [
        f"callers.{name}.max_depth is {caller.max_depth}, outside 0..{limit} ({because})"
        for name, caller in callers.items()
        if caller.max_depth is not None and caller.max_depth > limit
    ]


def _read(name: str, section: Any, env: Mapping[str, str], problems: list[str]) -> CallerSettings | None:
    path = f"callers.{name}"
    if not isinstance(section, Mapping):
        problems.append(f"{path} must be a mapping with its key: {_HOW}")
        return None
    digest, key_problem = _digest(path, section, env)
    if key_problem:
        problems.append(key_problem)
    rest = {key: value for key, value in section.items() if key not in ("key_sha256", "key_env")}
    try:
        caller = CallerSettings.model_validate({**rest, "key_sha256": digest})
    except ValidationError as error:
        problems.extend(_problem(detail, path) for detail in error.errors())
        return None
    if caller.workload is not None and not is_workload_tag(caller.workload):
        problems.append(
            f"{path}.workload is {caller.workload!r:.80}: a workload is 1 to 64 letters, digits or . _ : - "
            "starting with a letter or digit"
        )
    return caller


def _problem(detail: Any, path: str) -> str:
    key = str(detail["loc"][-1])
    if detail["type"] == "extra_forbidden" and key in ("key", "api_key", "token"):
        return f"{path}.{key}: keys do not stand in the settings: {_HOW}"
    return messages.problem(detail, path, CallerSettings)


def _digest(path: str, section: Mapping[Any, Any], env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The digest of a caller's key, or what is wrong with it."""
    given, variable = section.get("key_sha256"), section.get("key_env")
    if given is not None and variable is not None:
        return None, f"{path} has key_sha256 and key_env: keep one of them"
    if given is not None:
        if not isinstance(given, str) or not _DIGEST.fullmatch(given):
            return None, (
                f"{path}.key_sha256 must be the 64 hexadecimal digits of `printf %s KEY | sha256sum`, in quotes; "
                "it is not the key itself"
            )
        if given.lower() == digest_of(""):
            return None, f"{path}.key_sha256 is the SHA-256 of an empty key"
        return given.lower(), None
    if variable is None:
        return None, f"{path} has no key: {_HOW}"
    if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
        return None, f"{path}.key_env must be the name of an environment variable; it is not the key itself"
    key = env.get(variable, "").strip()
    if not key:
        return None, f"{path}.key_env: the environment variable {variable} is not set here, where settings are read"
    if not _KEY.fullmatch(key):
        return None, f"{path}.key_env: the key in {variable} has blanks or characters other than ASCII"
    return digest_of(key), None


def _shared_keys(callers: Mapping[str, CallerSettings]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, caller in callers.items():
        if caller.key_sha256 is not None:
            names.setdefault(caller.key_sha256, []).append(name)
    return [f"callers {messages.listed(same)} have the same key" for same in names.values() if len(same) > 1]
