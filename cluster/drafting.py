"""Which K and which workload a request gets.

Enters: the operator's `DepthPolicy`, the request's `drafting` object and headers, its caller, and how a workload is
found. Leaves: a `Drafting`, or a `DraftingError` that names the field and its range. Never knows: HTTP, Ray, the
engine.

K counts the draft tokens that the target verifies in a step of one request. The head proposes K_max in one pass
whatever K is, so K is a verification depth and 0 <= K <= K_max. What a client asks outside that range is an error;
what it asks inside the range but above the operator's own limit is lowered to that limit.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

from cluster.callers import ANYONE, Caller

DEFAULT_WORKLOAD = "default"
K_HEADER = "x-drafting-k"
WORKLOAD_HEADER = "x-drafting-workload"

Source = Literal["request", "workload", "default", "learned", "probe"]
SOURCES: tuple[Source, ...] = get_args(Source)

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")
_REQUEST_KEYS = ("k", "workload")


class DraftingError(ValueError):
    """A request's drafting cannot be used. `field` is the name the client sent it under."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type["DraftingError"], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ForbiddenTagError(DraftingError):
    """A workload tag from a caller that may not set one."""


WorkloadOf = Callable[[str | None], str]
"""The workload of a request, given the tag that it may set (None: none)."""


def _tag_or_default(tag: str | None) -> str:
    return DEFAULT_WORKLOAD if tag is None else tag


@dataclass(frozen=True)
class DepthPolicy:
    """The operator's choice of K. Every depth counts draft tokens; 0 means that nothing is verified.

    `max_draft_tokens` is K_max (0 when the target runs without a drafter), `max_depth` the most a request gets.
    """

    max_draft_tokens: int
    max_depth: int
    default_depth: int
    by_workload: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.max_depth <= self.max_draft_tokens:
            raise ValueError(f"max_depth {self.max_depth} is outside 0..{self.max_draft_tokens}")
        for name, depth in {"default_depth": self.default_depth, **self.by_workload}.items():
            if not 0 <= depth <= self.max_depth:
                raise ValueError(f"the depth of {name!r} is {depth}, outside 0..{self.max_depth}")

    def depth_of(self, workload: str) -> tuple[int, Source]:
        """K of a workload and where it comes from."""
        if workload in self.by_workload:
            return self.by_workload[workload], "workload"
        return self.default_depth, "default"


@dataclass(frozen=True)
class Drafting:
    """How one request is drafted.

    Attributes:
        workload: what its acceptance is counted under.
        k: drafts verified per step.
        source: what chose K: the `request`, the operator's table by `workload`, the `default`, or what was `learned`;
            `probe`: learned, but for this request deeper, to see what lies there.
        reason: why, in words; "" where the source says all.
        survival: S_1, S_2, ... on which a learned K rests, by which the engine may trim it under load; () otherwise.
        expected_tpot_s: seconds per output token that a learned K was expected to give.
        max_k: the most drafts of a step, where the engine weighs at every step which of them pay, by `survival`; k then
            says what is planned at the load of its arrival. None: no step has more than k.
        limit: the largest K that its caller may have, where it has a limit of its own.
    """

    workload: str
    k: int
    source: Source
    reason: str = ""
    survival: tuple[float, ...] = ()
    expected_tpot_s: float | None = None
    max_k: int | None = None
    limit: int | None = field(default=None, compare=False)

    @property
    def most(self) -> int:
        """Drafts that a step of the request may verify."""
        return self.k if self.max_k is None else self.max_k

    def to_wire(self) -> dict[str, Any]:
        """The form in which the ingress hands its decision to the target, inside the request's `drafting` field."""
        wire: dict[str, Any] = {"workload": self.workload, "k": self.k, "source": self.source}
        if self.reason:
            wire["reason"] = self.reason
        if self.survival:
            wire["survival"] = list(self.survival)
        if self.expected_tpot_s is not None:
            wire["expected_tpot_ms"] = round(1000 * self.expected_tpot_s, 3)
        if self.max_k is not None:
            wire["max_k"] = self.max_k
        return wire


def is_workload_tag(tag: str) -> bool:
    """Whether a string may name a workload: 1 to 64 letters, digits and `. _ : -`, starting with a letter or digit."""
    return _TAG.fullmatch(tag) is not None


def resolve(
    policy: DepthPolicy,
    requested: Any = None,
    headers: Mapping[str, str] | None = None,
    caller: Caller = ANYONE,
    workload_of: WorkloadOf = _tag_or_default,
) -> Drafting:
    """Decide K and workload of a request.

    `requested` is the body's `drafting` value: None or `{"k": int, "workload": str}` with both keys optional. The
    headers `X-Drafting-K` and `X-Drafting-Workload` say the same; a header that contradicts the body is an error.
    A tag that `caller` may set comes first, then the caller's own workload, then what `workload_of(None)` finds.

    Raises:
        DraftingError: unknown key, wrong type, K outside 0..K_max, malformed tag, or header and body disagree.
        ForbiddenTagError: a tag from a caller that may not set one.
    """
    body = _checked_object(requested)
    by_header = {name.lower(): value for name, value in (headers or {}).items()}
    body_tag, header_tag = body.get("workload"), by_header.get(WORKLOAD_HEADER)
    body_k, header_k = body.get("k"), by_header.get(K_HEADER)

    tag = _one_of(
        ("drafting.workload", None if body_tag is None else _checked_tag("drafting.workload", body_tag)),
        ("X-Drafting-Workload", None if header_tag is None else _checked_tag("X-Drafting-Workload", header_tag)),
    )
    k = _one_of(
        ("drafting.k", None if body_k is None else _checked_k("drafting.k", body_k, policy)),
        ("X-Drafting-K", None if header_k is None else _checked_k("X-Drafting-K", _parsed(header_k), policy)),
    )
    if tag is not None and caller.tags == "refuse":
        name = "X-Drafting-Workload" if body_tag is None else "drafting.workload"
        raise ForbiddenTagError(name, f"the caller {caller.name} may not set {name}: leave it out")
    if caller.tags == "ignore":
        tag = None
    workload = caller.workload if tag is None and caller.workload is not None else workload_of(tag)
    depth, source = policy.depth_of(workload)
    if k is not None:
        depth, source = min(k, policy.max_depth), "request"
    limit = caller.max_depth
    return Drafting(workload, depth if limit is None else min(depth, limit), source, limit=limit)


def is_decided(requested: Any) -> bool:
    """Whether a request's `drafting` value is a decision of the ingress. Clients cannot send one over HTTP."""
    return isinstance(requested, Mapping) and "source" in requested


def from_wire(policy: DepthPolicy, requested: Any, workload_of: WorkloadOf = _tag_or_default) -> Drafting:
    """Read what reaches the target: a decision of the ingress (it has a `source`), or a request that came by a
    deployment handle past the ingress, which gets the same defaults.

    Raises:
        DraftingError: as `resolve`.
    """
    if not is_decided(requested):
        return resolve(policy, requested, workload_of=workload_of)
    source = requested["source"]
    if source not in SOURCES:
        raise DraftingError("drafting.source", f"drafting.source is {source!r}; only the ingress sets it")
    k = _checked_k("drafting.k", requested.get("k"), policy)
    tag = _checked_tag("drafting.workload", requested.get("workload"))
    tpot_ms, max_k = requested.get("expected_tpot_ms"), requested.get("max_k")
    return Drafting(
        workload_of(tag),
        min(k, policy.max_depth),
        source,
        str(requested.get("reason", "")),
        _checked_survival(requested.get("survival", ()), policy),
        None if tpot_ms is None else float(tpot_ms) / 1000,
        None if max_k is None else min(_checked_k("drafting.max_k", max_k, policy), policy.max_depth),
    )


def _checked_object(requested: Any) -> Mapping[str, Any]:
    if requested is None:
        return {}
    if not isinstance(requested, Mapping):
        raise DraftingError("drafting", f"drafting must be an object with k and workload, not {requested!r:.80}")
    for key in requested:
        if key not in _REQUEST_KEYS:
            raise DraftingError(
                f"drafting.{key}", f"unknown field drafting.{key!s:.80}: drafting has the fields k and workload"
            )
    return requested


def _checked_tag(name: str, tag: Any) -> str:
    if not isinstance(tag, str) or not is_workload_tag(tag):
        raise DraftingError(
            name, f"{name} must be 1 to 64 letters, digits or . _ : - starting with a letter or digit, not {tag!r:.80}"
        )
    return tag


def _checked_survival(survival: Any, policy: DepthPolicy) -> tuple[float, ...]:
    values = survival if isinstance(survival, list | tuple) else [None]
    numbers = all(isinstance(value, int | float) and 0 <= value <= 1 for value in values)
    if not numbers or len(values) > policy.max_draft_tokens or any(a < b for a, b in pairwise(values)):
        raise DraftingError("drafting.survival", f"drafting.survival is {survival!r:.80}; only the ingress sets it")
    return tuple(map(float, values))


def _checked_k(name: str, k: Any, policy: DepthPolicy) -> int:
    allowed = f"an integer from 0 to {policy.max_draft_tokens}"
    if policy.max_draft_tokens == 0:
        allowed = "0, because this model is served without a drafter"
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= policy.max_draft_tokens:
        raise DraftingError(name, f"{name} must be {allowed}, not {k!r:.80}")
    return k


def _parsed(text: str) -> int | str:
    """A header's integer, or its text as it is, which then fails the check with the text in the message."""
    return int(text) if _INTEGER.fullmatch(text.strip()) else text


def _one_of(body: tuple[str, Any], header: tuple[str, Any]) -> Any:
    if body[1] is not None and header[1] is not None and body[1] != header[1]:
        raise DraftingError(
            body[0], f"{body[0]} is {body[1]!r} but the header {header[0]} says {header[1]!r}: send one, or the same"
        )
    return header[1] if body[1] is None else body[1]
