"""Caller, workload and K of a request.

Enters: the Authorization header, the request's `drafting` object and headers, its model and system prompt, and the
operator's settings. Leaves: a `Caller`, the name of a workload, and a `Drafting`; or an `ApiError` that names the field
and its range. Never knows: HTTP beyond these headers, Ray, the engine.
"""

import functools
import hashlib
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.errors import ApiError

# ---- callers; only SHA-256 digests of their keys are kept, so the keys are in no settings object, log or error

TagRight = Literal["allow", "refuse", "ignore"]


@dataclass(frozen=True)
class Caller:
    """One caller and its rights; the fields are those of `cluster.settings.CallerSettings`, None for no limit.
    `workload`: of its requests without a tag (None: as `Workloads.resolve` decides). `address`: of a caller without a
    key, "" where it is not known; callers of different addresses take turns."""

    name: str
    tags: TagRight = "refuse"
    workload: str | None = None
    max_k: int | None = None
    max_running_requests: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    tokens_per_day: int | None = None
    learn: bool = False
    address: str = ""

    @property
    def queue(self) -> str:
        """Name of its queue for a place. No caller's name has a slash."""
        return f"{self.name}/{self.address}" if self.address else self.name


@functools.lru_cache
def client_network(address: str) -> str:
    """The address of one client: IPv4 as it is, of IPv6 the first 64 bits, of which a client has all addresses; "" for
    what is no address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    return str(found if found.version == 4 else ipaddress.ip_network((found, 64), strict=False))


ANYONE = Caller("anyone", tags="allow")
"""Every request of a service without a `callers` section, and every call by deployment handle inside the cluster."""

Callers = Mapping[str, Caller]
"""The callers of a service by the SHA-256 of their keys, in lower-case hexadecimal."""


def identify_caller(callers: Callers, authorization: str | None) -> Caller:
    """The caller of a request with this Authorization header (None: without one). Raises ApiError (401), which does not
    repeat the key, for no header, another scheme than Bearer, or a key that nobody has."""
    if not authorization:
        raise _unknown("this service needs an API key: send the header Authorization: Bearer YOUR_KEY")
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unknown("the Authorization header must read: Bearer YOUR_KEY")
    # Looked up by digest, so the time that it takes says nothing about a key that is nearly right.
    if (caller := callers.get(hash_key(key.strip()))) is None:
        raise _unknown("incorrect API key: no caller of this service has it")
    return caller


def _unknown(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def hash_key(key: str) -> str:
    """SHA-256 of a key, in lower-case hexadecimal: what `printf %s KEY | sha256sum` prints."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


# ---- K and workload of a request
#
# `k` is the number of drafts to verify in a step of the request, `max_k` the most that the scheduler may verify. The
# head proposes K_max in one pass whatever k is, so 0 <= k <= max_k <= K_max. Only this module checks it: a k outside
# 0..K_max is an error, a k above the operator's limit is lowered to the limit.

DEFAULT_WORKLOAD = "default"
TRIAL_SUFFIX = "/trial"
"""Behind the name of a workload: its requests that draft with a candidate head. No tag can have it."""
K_HEADER = "X-Drafting-K"
WORKLOAD_HEADER = "X-Drafting-Workload"

Source = Literal["request", "workload", "default", "prior", "learned", "exploration"]

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")
_REQUEST_KEYS = ("k", "workload")


@dataclass(frozen=True)
class KRules:
    """The operator's choice of K (checked by `cluster.settings`). `max_draft_tokens`: K_max, 0 without a drafter;
    `max_k`: the largest K of a request; `is_adaptive`: K of workloads that are not pinned is learned; `max_tpot_ms`:
    limits of TPOT by workload."""

    max_draft_tokens: int
    max_k: int
    default_k: int
    by_workload: Mapping[str, int] = field(default_factory=dict)
    is_adaptive: bool = True
    max_tpot_ms: Mapping[str, float] = field(default_factory=dict)

    def find_k(self, workload: str) -> tuple[int, Source]:
        """K of a workload and where it comes from."""
        if workload in self.by_workload:
            return self.by_workload[workload], "workload"
        return self.default_k, "default"


@dataclass(frozen=True)
class Drafting:
    """How one request is drafted: the record of K from the front end to the answer.

    Attributes:
        workload: under which its acceptance is counted.
        k: drafts verified per step; where `max_k` is more, the plan at the load of its arrival.
        source: what chose K: the `request`, the operator's table by `workload`, the `default`, or acceptance and load
            (`learned`, or `prior` while few steps were measured); an `exploration` measures acceptance where a learned
            `max_k` is 0.
        reason: in words; "" where the source says all.
        acceptance_rates: S_1, S_2, ... on which a learned K rests, by which the scheduler may lower it under load; ()
            otherwise.
        expected_tpot_s: seconds per output token expected of a learned K.
        max_k: the most drafts of a step: k, unless the scheduler decides by `acceptance_rates`.
    """

    workload: str
    k: int
    source: Source
    reason: str = ""
    acceptance_rates: tuple[float, ...] = ()
    expected_tpot_s: float | None = None
    max_k: int = None  # type: ignore[assignment]  # k where it is not given

    def __post_init__(self) -> None:
        if self.max_k is None:
            object.__setattr__(self, "max_k", self.k)


def base_workload(workload: str) -> str:
    """The workload that a request belongs to, whatever head drafts."""
    return workload.removesuffix(TRIAL_SUFFIX)


def is_workload_tag(tag: str) -> bool:
    """Whether a string may name a workload: 1 to 64 letters, digits and `. _ : -`, starting with a letter or digit."""
    return _TAG.fullmatch(tag) is not None


def resolve(
    rules: KRules,
    requested: Any = None,
    headers: Mapping[str, str] | None = None,
    caller: Caller = ANYONE,
    find_workload: Callable[[str | None], str] = lambda tag: tag or DEFAULT_WORKLOAD,
) -> Drafting:
    """Decide K and workload of a request.

    `requested` is the body's `drafting` value: None or `{"k": int, "workload": str}` with both keys optional. The
    headers `X-Drafting-K` and `X-Drafting-Workload` say the same; a header that contradicts the body is an error.
    A tag that `caller` may set comes first, then the caller's own workload, then what `find_workload(None)` finds.
    `find_workload`: the workload of a request, given the tag that it may set (None: none).

    Raises:
        ApiError: (400) unknown key, wrong type, K outside 0..K_max, malformed tag, or header and body disagree. (403) A
            tag from a caller that may not set one.
    """
    if requested is not None and not isinstance(requested, Mapping):
        text = f"drafting must be an object with k and workload, not {requested!r:.80}"
        raise ApiError(400, text, param="drafting")
    body = requested or {}
    if unknown := [key for key in body if key not in _REQUEST_KEYS]:
        name = f"drafting.{unknown[0]!s:.80}"
        text = f"unknown field {name}: drafting has the fields k and workload"
        raise ApiError(400, text, param=name, code="unknown_field")
    by_header = {name.lower(): value for name, value in (headers or {}).items()}
    header_k: int | str | None = by_header.get(K_HEADER.lower())
    if isinstance(header_k, str) and _INTEGER.fullmatch(header_k.strip()):
        header_k = int(header_k)  # else it fails the check with its own text in the message
    tag = _agreed(
        {"drafting.workload": body.get("workload"), WORKLOAD_HEADER: by_header.get(WORKLOAD_HEADER.lower())},
        lambda value: isinstance(value, str) and is_workload_tag(value),
        "1 to 64 letters, digits or . _ : - starting with a letter or digit",
    )
    most = rules.max_draft_tokens
    k = _agreed(
        {"drafting.k": body.get("k"), K_HEADER: header_k},
        lambda value: type(value) is int and 0 <= value <= most,
        f"an integer from 0 to {most}" if most else "0, because this model is served without a drafter",
    )
    if tag is not None and caller.tags == "refuse":
        name = WORKLOAD_HEADER if body.get("workload") is None else "drafting.workload"
        text = f"the caller {caller.name} may not set {name}: leave it out"
        raise ApiError(403, text, param=name, code="tag_not_allowed")
    if caller.tags == "ignore":
        tag = None
    workload = caller.workload if tag is None and caller.workload is not None else find_workload(tag)
    chosen, source = rules.find_k(workload)
    if k is not None:
        chosen, source = min(k, rules.max_k), "request"
    return Drafting(workload, chosen if caller.max_k is None else min(chosen, caller.max_k), source)


def _agreed(values: Mapping[str, Any], is_valid: Callable[[Any], bool], rule: str) -> Any:
    """The value in the body or a header, None without either. `values`: by the name that the client used.

    Raises ApiError for a value that is not valid, or two that differ."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if not is_valid(value):
            raise ApiError(400, f"{name} must be {rule}, not {value!r:.80}", param=name)
    if len(given) == 2 and len(set(given.values())) == 2:
        (name, value), (header, other) = given.items()
        text = f"{name} is {value!r} but the header {header} says {other!r}: send one, or the same"
        raise ApiError(400, text, param=name)
    return next(iter(given.values()), None)


# ---- the workload of a request: its tag, else its caller's (`resolve`), else that of the model alias that it names,
# else the fingerprint of its system prompt, else `default`
#
# Acceptance is learned per workload, so their number is bounded: the rarest workload is replaced, but only by a name
# with more requests. Counts are halved every so many requests, so no clock is needed.

MAX_NUM_WORKLOADS = 64
HALVING_REQUESTS = 4096
FINGERPRINT_PREFIX = "sys-"

_SYSTEM_ROLES = ("system", "developer")
_NUM_READ_CHARACTERS = 2048
_NUM_HASHED_CHARACTERS = 1024
_DIGITS = re.compile(r"[0-9]+")


def system_prompt(messages: Iterable[Mapping[str, Any]]) -> str:
    """The system prompt of a chat: the text of its first run of messages of the role system or developer, else "".

    Of a content that is a list of parts, those with text count. Later runs are left out, because they differ between
    the turns of one conversation.
    """
    texts: list[str] = []
    for message in messages:
        if message.get("role") in _SYSTEM_ROLES:
            texts += _texts(message.get("content"))
        elif texts:
            break
    return "\n".join(texts)


def fingerprint(prompt: str) -> str | None:
    """`sys-` and 8 hexadecimal digits for a system prompt, None for a blank one.

    Prompts of one application differ in dates, counts and documents at the end. So only the first 1024 characters
    count, with numbers and blanks made equal.
    """
    text = " ".join(_DIGITS.sub("0", prompt[:_NUM_READ_CHARACTERS]).split())[:_NUM_HASHED_CHARACTERS]
    if not text:
        return None
    # A lone surrogate is valid in a JSON string and has no UTF-8 form.
    return FINGERPRINT_PREFIX + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


class Workloads:
    """The distinguished workloads, at most `max_num` with `default`. State of one replica, for one event loop.

    `known` (the operator's names) and the workloads of `aliases` (model id: workload) always stay, also when they alone
    are more than `max_num`. Of the others:

    - a fingerprint becomes a workload at its `min_num_requests`-th recent request, a tag at once, while there is room;
    - without room, either replaces the rarest workload, if it has `min_num_requests` and more recent requests than this
      one, so that names that come once or twice do not displace a busy workload;
    - until then its requests belong to `default`.
    """

    def __init__(
        self,
        max_num: int = MAX_NUM_WORKLOADS,
        known: Iterable[str] = (),
        *,
        aliases: Mapping[str, str] | None = None,
        min_num_requests: int = 3,
    ) -> None:
        self._aliases = dict(aliases or {})
        self._kept = frozenset({DEFAULT_WORKLOAD, *known, *self._aliases.values()})
        self._max_num_others = max(0, max_num - len(self._kept))
        self._others: dict[str, None] = {}
        self._min_num_requests = min_num_requests
        self._counts = Counter[str]()  # recent requests by name
        self._num_counted = 0

    def resolve(self, tag: str | None = None, model: str | None = None, prompt: str = "") -> str:
        """The workload of a request with this tag (None: none), for this model id, with this system prompt."""
        if tag is not None:
            return self._admitted(tag, 1)
        if model is not None and (workload := self._aliases.get(model)) is not None:
            return workload
        name = fingerprint(prompt)
        return DEFAULT_WORKLOAD if name is None else self._admitted(name, self._min_num_requests)

    def remember(self, name: str) -> None:
        """Tell `name` apart, which others have found, where there is room. Does not count as a request of it."""
        if name not in self._kept and len(self._others) < self._max_num_others:
            self._others.setdefault(name)

    def names(self) -> tuple[str, ...]:
        """The present workloads: those that always stay by name, then the others."""
        return (*sorted(self._kept), *self._others)

    def _admitted(self, name: str, num_needed: int) -> str:
        if name in self._kept:
            return name
        self._num_counted += 1
        if self._num_counted % HALVING_REQUESTS == 0:
            self._counts = Counter({name: num // 2 for name, num in self._counts.items() if num > 1})
        self._counts[name] += 1
        num = self._counts[name]
        if name in self._others:
            return name
        if len(self._others) >= self._max_num_others:
            rarest = min(self._others, key=self._counts.__getitem__, default=None)
            if rarest is None or num < self._min_num_requests or num <= self._counts[rarest]:
                return DEFAULT_WORKLOAD
            del self._others[rarest]
        elif num < num_needed:
            return DEFAULT_WORKLOAD
        self._others[name] = None
        return name


def _texts(content: Any) -> list[str]:
    """The texts of a message's content: a string, or a list of parts and strings."""
    parts = content if isinstance(content, list | tuple) else [content]
    found = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return [text for text in found if isinstance(text, str) and text]
