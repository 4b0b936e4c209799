"""A target's drafters: which one each request belongs to, as they come, go and fail.

A request stays with the drafter of its first step, which holds its cache. The choice is by rendezvous hash over those
that serve: when a drafter is added or lost, only the requests that it gets or had are chosen anew. Requests of a lost
drafter go to another and begin cold there; those of a drafter that is drained stay until they end.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peagle.runtime.head import Reducer
from peagle.runtime.hello import MAX_NUM_HEADS, Hello
from peagle.runtime.link import Link
from peagle.runtime.pass_times import PassTimes
from peagle.runtime.shared_memory import host_identity
from peagle.runtime.steps import Int32Array, TargetShape

_CLOSE_S = 2.0
DEFAULT_MIN_DEADLINE_S, DEFAULT_MAX_DEADLINE_S = 0.05, 1.0


@dataclasses.dataclass(frozen=True)
class KnownDrafter:
    """heads: index -> digest. key: what it lets targets in with, "" for nothing."""

    heads: dict[int, str]
    key: str = dataclasses.field(default="", repr=False)


def read_drafters(drafters: object) -> dict[str, KnownDrafter]:
    """By address, of `[{"address": "host:port", "heads": {index: digest}, "key": text}]`; the key may be left out.

    Raises ValueError, naming the entry and the field, for anything else.
    """
    if not isinstance(drafters, Sequence) or isinstance(drafters, str | bytes):
        raise ValueError(f"drafters is a {type(drafters).__name__}, not a list")
    found: dict[str, KnownDrafter] = {}
    for i, entry in enumerate(drafters):
        if not isinstance(entry, Mapping) or set(entry) - {"key"} != {"address", "heads"}:
            raise ValueError(f"drafters[{i}] must have the fields address, heads and, if it has one, key; no others")
        address, heads, key = entry["address"], entry["heads"], entry.get("key", "")
        if not isinstance(key, str):
            raise ValueError(f"drafters[{i}].key is a {type(key).__name__}, not text")
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"drafters[{i}].address = {address!r:.80} must be host:port")
        if address in found:
            raise ValueError(f"drafters[{i}].address = {address} is there twice")
        if not isinstance(heads, Mapping) or not heads:
            raise ValueError(f"drafters[{i}].heads = {heads!r:.80} must give the digest of one head or more by index")
        for index, digest in heads.items():
            number = str(index)
            is_number = number.isascii() and number.isdigit() and int(number) < MAX_NUM_HEADS
            if not is_number or not isinstance(digest, str) or not digest:
                raise ValueError(
                    f"drafters[{i}].heads: {index!r}: {digest!r:.40} must be a head's number, "
                    f"0 .. {MAX_NUM_HEADS - 1}, and its digest"
                )
        found[address] = KnownDrafter({int(index): digest for index, digest in heads.items()}, key)
    return found


class LinkPool:
    """Used by the engine's thread only."""

    def __init__(
        self,
        shape: TargetShape,
        *,
        aux_layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        name: str = "target",
        min_deadline_s: float = DEFAULT_MIN_DEADLINE_S,
        max_deadline_s: float = DEFAULT_MAX_DEADLINE_S,
        use_shared_memory: bool = True,
    ) -> None:
        """Without drafters yet. use_shared_memory: False takes TCP also on one host.

        Raises ValueError for deadlines out of order.
        """
        self.device = torch.device(device)
        self._times = PassTimes(min_deadline_s, max_deadline_s)
        self._hello = Hello(name, shape, tuple(aux_layer_ids), {}, host_identity() if use_shared_memory else "")
        self._reducers: dict[str, Reducer] = {}
        self._links: dict[int, Link] = {}  # by a number that is never used again
        self._draining: set[int] = set()
        self._num_made = 0
        self._link_of = np.full(shape.max_num_requests, -1, np.int64)  # by slot
        self._key_of: dict[int, str] = {}

    def set_drafters(self, drafters: object) -> None:
        """The drafters to use from now on, see `read_drafters`; does not wait for them. On a GPU their mailboxes are
        registered with CUDA as they connect, so CUDA graphs are captured before.

        Those that are not named any more are drained. Raises ValueError, and changes nothing, for a bad list.
        """
        wanted = read_drafters(drafters)
        number_of = {link.address: number for number, link in self._links.items()}
        for address, one in wanted.items():
            if (number := number_of.get(address)) is not None:
                self._links[number].want(one.heads, one.key)
                self._draining.discard(number)
                continue
            hello = dataclasses.replace(self._hello, heads=one.heads, key=one.key)
            times = dataclasses.replace(self._times)
            self._links[self._num_made] = Link(address, hello, times, self.device, self._reducers)
            self._num_made += 1
        self._draining |= {number for address, number in number_of.items() if address not in wanted}
        self._close_drained()

    def assign(
        self, slots_B: Int32Array, heads_B: Int32Array, new_slots: Mapping[int, str] | Collection[int] = ()
    ) -> list[tuple[Link, npt.NDArray[np.int64]]]:
        """Begin a step: for each link that takes part, the positions 0 .. B - 1 of its requests.

        new_slots: requests that are new to the target, with their ids where they have some. Requests are in no group
        while their drafter is late or none serves their head.
        """
        if new_slots:
            keys = new_slots if isinstance(new_slots, Mapping) else {slot: f"{slot}" for slot in new_slots}
            self.finish(slot for slot in keys if self._link_of[slot] >= 0)
            self._key_of.update(keys)
        usable = {number: link for number, link in self._links.items() if link.begin_step()}
        links_B = self._link_of[slots_B]
        connected = [number for number, link in self._links.items() if link.is_connected]
        self._forget_reducers()
        for i in np.flatnonzero(~_is_one_of(links_B, connected)).tolist():
            slot, head = int(slots_B[i]), int(heads_B[i])
            key = self._key_of.setdefault(slot, f"{slot}")
            links_B[i] = self._link_of[slot] = self._choose(key, head, usable)
        groups = []
        for number, link in usable.items():
            served_B = _is_one_of(heads_B, link.served)
            if len(members_M := np.flatnonzero((links_B == number) & served_B)):
                groups.append((link, members_M))
            self._link_of[slots_B[(links_B == number) & ~served_B]] = -1  # its heads changed: another one's, next time
        return groups

    def finish(self, slots: Iterable[int]) -> None:
        """These requests ended or were aborted."""
        for slot in slots:
            if (link := self._links.get(int(self._link_of[slot]))) is not None:
                link.finish([slot])
            self._link_of[slot] = -1
            self._key_of.pop(slot, None)
        self._close_drained()

    @property
    def num_up(self) -> int:
        """Links that take steps now."""
        return sum(link.state == "up" for link in self._links.values())

    def live_heads(self) -> set[int]:
        """Heads with a link that takes steps now, if only of requests that it has already."""
        return {head for link in self._links.values() if link.state == "up" for head in link.heads}

    def report(self) -> dict[str, Any]:
        """Plain values: the links and how many requests each has."""
        numbers, counts = np.unique(self._link_of, return_counts=True)
        num_requests = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        links = [
            {**link.report(), "draining": number in self._draining, "num_requests": num_requests.get(number, 0)}
            for number, link in self._links.items()
        ]
        return {"num_up": self.num_up, "links": links}

    def close(self) -> None:
        for link in self._links.values():
            link.close(_CLOSE_S)
        self._links.clear()

    def _choose(self, key: str, head: int, usable: Mapping[int, Link]) -> int:
        """Number of the link with the highest hash, of those that serve the head and stay; -1 without one."""
        serving = [n for n, link in usable.items() if n not in self._draining and head in link.served]
        return max(serving, key=lambda number: _rank(key, self._links[number].address), default=-1)

    def _forget_reducers(self) -> None:
        """Of heads that were swapped for others, or that nobody serves any more."""
        used = {digest for link in self._links.values() for of in (link.heads, link.served) for digest in of.values()}
        for digest in self._reducers.keys() - used:
            del self._reducers[digest]

    def _close_drained(self) -> None:
        for number in [number for number in self._draining if not np.any(self._link_of == number)]:
            self._draining.discard(number)
            self._links.pop(number).close()


def _is_one_of(values_B: npt.NDArray[Any], numbers: Iterable[int]) -> npt.NDArray[np.bool_]:
    """As `np.isin`, which takes ten times as long for a few numbers."""
    found_B = np.zeros(len(values_B), bool)
    for number in numbers:
        found_B |= values_B == number
    return found_B


def _rank(key: str, address: str) -> bytes:
    return hashlib.blake2b(f"{key}\n{address}".encode(), digest_size=8).digest()
