"""Which workload a request belongs to.

Enters: what a request shows of itself (its tag, the model id it names, its system prompt) and the operator's names.
Leaves: the name of a workload. Never knows: HTTP, keys, K.

The first of these decides: the tag (the caller's right to set one is checked before, in `cluster.drafting`), the
workload of the model alias that the request names, the fingerprint of the system prompt, else `default`. Acceptance is
learned per workload, so their number is bounded: the least recently used one makes room, and only for a name that is
asked for more often than it. Frequency is counted in requests, not in seconds, so no clock is needed.
"""

import hashlib
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.drafting import DEFAULT_WORKLOAD

MAX_NUM_WORKLOADS = 64
FINGERPRINT_PREFIX = "sys-"

_SYSTEM_ROLES = ("system", "developer")
_NUM_READ_CHARACTERS = 2048
_NUM_HASHED_CHARACTERS = 1024
_DIGITS = re.compile(r"[0-9]+")


def system_prompt(messages: Iterable[Mapping[str, Any]]) -> str:
    """The system prompt of a chat: the text of its first run of messages of the role system or developer, else "".

    A message's content is a string or a list of parts, of which those with text count. Later runs are left out: they
    come and go with the turns of one conversation.
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

    Prompts of one application differ in what they fill in: the date, a count, documents at the end. So the beginning
    alone counts (1024 characters), blanks are one blank, and a number is a number whatever its value.
    """
    text = " ".join(_DIGITS.sub("0", prompt[:_NUM_READ_CHARACTERS]).split())[:_NUM_HASHED_CHARACTERS]
    if not text:
        return None
    # A lone surrogate is valid in a JSON string and has no UTF-8 form.
    return FINGERPRINT_PREFIX + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


class Workloads:
    """The workloads that are told apart, at most `max_num` with `default`. State of one replica, for one event loop.

    `known` (the operator's names) and the workloads of `aliases` (model id: workload) always stay, also when they alone
    are more than `max_num`. Of the others:

    - a fingerprint becomes a workload at its `min_num_requests`-th request among the last `window_requests` to twice
      as many: a system prompt that is used once is no application. A tag becomes one at once, while there is room;
    - without room, either replaces the least recently used workload, if it has `min_num_requests` and more requests in
      that window than this one. So thousands of names that come once or twice cannot displace a busy workload;
    - until then its requests belong to `default`.

    Raises:
        ValueError: a bound below 1.
    """

    def __init__(
        self,
        max_num: int = MAX_NUM_WORKLOADS,
        known: Iterable[str] = (),
        *,
        aliases: Mapping[str, str] | None = None,
        min_num_requests: int = 3,
        window_requests: int = 4096,
    ) -> None:
        for name, value in (("max_num", max_num), ("min_num_requests", min_num_requests)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be 1 or more")
        if window_requests < min_num_requests:
            raise ValueError(f"window_requests is {window_requests}: below min_num_requests, {min_num_requests}")
        self._aliases = dict(aliases or {})
        self._kept = frozenset({DEFAULT_WORKLOAD, *known, *self._aliases.values()})
        self._max_num_others = max(0, max_num - len(self._kept))
        self._others: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._min_num_requests = min_num_requests
        self._window_requests = window_requests
        self._num_in_window = 0
        self._counts: Counter[str] = Counter()
        self._counts_before: Counter[str] = Counter()

    def of(self, tag: str | None = None, model: str | None = None, prompt: str = "") -> str:
        """The workload of a request with this tag (None: none), for this model id, with this system prompt."""
        if tag is not None:
            return self.label(tag)
        if model is not None and (workload := self._aliases.get(model)) is not None:
            return workload
        name = fingerprint(prompt)
        return DEFAULT_WORKLOAD if name is None else self._admitted(name, self._min_num_requests)

    def label(self, tag: str) -> str:
        """The workload under which a request with this tag is counted: the tag's own, or `default`."""
        return self._admitted(tag, 1)

    def names(self) -> tuple[str, ...]:
        """The present workloads: those that always stay by name, then the others, least recently used first."""
        return (*sorted(self._kept), *self._others)

    def _admitted(self, name: str, num_needed: int) -> str:
        if name in self._kept:
            return name
        self._count(name)
        if name in self._others:
            self._others.move_to_end(name)
            return name
        if self._max_num_others == 0:
            return DEFAULT_WORKLOAD
        num = self._num_recent(name)
        if len(self._others) >= self._max_num_others:
            oldest = next(iter(self._others))
            if num < self._min_num_requests or num <= self._num_recent(oldest):
                return DEFAULT_WORKLOAD
            del self._others[oldest]
        elif num < num_needed:
            return DEFAULT_WORKLOAD
        self._others[name] = None
        return name

    def _count(self, name: str) -> None:
        """Two windows, the one that fills and the full one before it: old counts end, and memory stays bounded."""
        if self._num_in_window >= self._window_requests:
            self._counts_before, self._counts, self._num_in_window = self._counts, Counter(), 0
        self._counts[name] += 1
        self._num_in_window += 1

    def _num_recent(self, name: str) -> int:
        return self._counts[name] + self._counts_before[name]


def _texts(content: Any) -> list[str]:
    """The texts of a message's content. vLLM takes a list of parts, of which some may be bare strings."""
    parts = content if isinstance(content, list | tuple) else [content]
    found = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return [text for text in found if isinstance(text, str) and text]
