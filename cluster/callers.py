"""Who asks: callers, known by their API keys.

Enters: the Authorization header of a request. Leaves: a `Caller`, or an `UnknownCallerError`. Knows SHA-256 digests
only, so the keys are in no settings object, no log and no error. Never knows: HTTP beyond this one header.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TagRight = Literal["allow", "refuse", "ignore"]


class UnknownCallerError(ValueError):
    """No caller has this key, or the request brings none. The message does not repeat the key."""


@dataclass(frozen=True)
class Caller:
    """One caller and what it may. `tags`: whether it may set the workload tag of a request; `workload`: where its
    requests belong without a tag (None: found out as `cluster.workloads` says); `max_depth`: the largest K of its
    requests (None: the operator's limit for all)."""

    name: str
    tags: TagRight = "refuse"
    workload: str | None = None
    max_depth: int | None = None


ANYONE = Caller("anyone", tags="allow")
"""Every request of a service without a `callers` section, and every call by deployment handle inside the cluster."""


class Callers:
    """The callers of a service by the SHA-256 of their keys, in lower-case hexadecimal."""

    def __init__(self, by_digest: Mapping[str, Caller]) -> None:
        self._by_digest = dict(by_digest)

    def identify(self, authorization: str | None) -> Caller:
        """The caller of a request with this Authorization header (None: without one).

        Raises:
            UnknownCallerError: no header, another scheme than Bearer, or a key that nobody has.
        """
        if not authorization:
            raise UnknownCallerError("this service needs an API key: send the header Authorization: Bearer YOUR_KEY")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnknownCallerError("the Authorization header must read: Bearer YOUR_KEY")
        # Looked up by digest, so the time that it takes says nothing about a key that is nearly right.
        caller = self._by_digest.get(digest_of(key.strip()))
        if caller is None:
            raise UnknownCallerError("incorrect API key: no caller of this service has it")
        return caller


def digest_of(key: str) -> str:
    """SHA-256 of a key, in lower-case hexadecimal: what `printf %s KEY | sha256sum` prints."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
