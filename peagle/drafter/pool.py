"""A target's drafters: which one each request belongs to, as they come, go and fail.

An engine's step is

    pool.finish_requests(slots)  # of requests that are gone, before others get their slots
    for link, members_M in pool.assign(slots_B, heads_B):
        link.send(descriptor, starts, valid rows, next tokens, rows)  # projected by `link.projections`
        link.wait(out_MK)  # on a GPU in the order of its stream
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from peagle.drafter.client import DrafterEntry, Link
from peagle.drafter.protocol import Hello, Int32Array, TargetShape
from peagle.drafter.shared_memory import host_identity

_CLOSE_S = 2.0


class LinkPool:
    """For the engine's thread only. A request stays with the drafter of its first step, which has its cache: that with
    the fewest requests. Those of a lost drafter go to another and begin cold there, those of a drained one stay."""

    def __init__(
        self,
        shape: TargetShape,
        *,
        aux_layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        max_deadline_s: float,
        name: str = "target",
        use_shared_memory: bool = True,
    ) -> None:
        """Without drafters yet. max_deadline_s: how long a step waits for its drafts. use_shared_memory: False takes
        TCP also on one host."""
        self.device = torch.device(device)
        self._max_deadline_s = max_deadline_s
        self._hello = Hello(name, shape, tuple(aux_layer_ids), {}, host_identity() if use_shared_memory else "")
        self.links: dict[int, Link] = {}  # by a number that is never used again
        self._draining: set[int] = set()
        self._numbers = itertools.count()
        self._link_of = np.full(shape.max_num_requests, -1, np.int64)  # by slot

    def set_drafters(self, drafters: Iterable[Mapping[str, Any]]) -> None:
        """The drafters to use from now on, the fields of a `DrafterEntry` each; does not wait for them. Those that are
        not named any more are drained. One with other heads or another key than before is connected to anew: its
        requests begin cold. On a GPU their rings are registered with CUDA as they connect, so CUDA graphs are captured
        before. Raises msgspec.ValidationError naming a wrong field; nothing has changed then.
        """
        wanted = {entry.address: entry for entry in msgspec.convert(list(drafters), list[DrafterEntry], strict=False)}
        self._draining = {n for n, link in self.links.items() if link.drafter.address not in wanted}
        for number in [n for n, link in self.links.items() if link.drafter not in wanted.values()]:
            if number not in self._draining:
                self.links.pop(number).close()
        connected = [link.drafter for link in self.links.values()]
        for entry in wanted.values():
            if entry not in connected:
                self.links[next(self._numbers)] = Link(entry, self._hello, self._max_deadline_s, self.device)
        self._close_drained()

    def assign(self, slots_B: Int32Array, heads_B: Int32Array) -> list[tuple[Link, npt.NDArray[np.int64]]]:
        """Begin a step: for each link that takes part, the positions 0 .. B - 1 of its requests, in their order; none
        of requests whose drafter is late or whose head nobody serves. Requests of one that is late again and again go
        to another one."""
        usable = {number: link for number, link in self.links.items() if link.begin_step()}
        kept = [n for n, link in self.links.items() if link.state != "connecting" and not (usable and link.is_paused)]
        for i in np.flatnonzero(~np.isin(self._link_of[slots_B], kept)).tolist():
            slot, chosen = int(slots_B[i]), self._choose_link(int(heads_B[i]), usable)
            if (before := self.links.get(int(self._link_of[slot]))) is not None and before.is_paused:
                if chosen < 0:
                    continue
                before.finish_request(slot)
            self._link_of[slot] = chosen
        groups, links_B = [], self._link_of[slots_B]
        for number, link in usable.items():
            is_served_B = np.isin(heads_B, [*link.projections])
            if len(members_M := np.flatnonzero((links_B == number) & is_served_B)):
                groups.append((link, members_M))
            # The link's heads changed: next time the request goes to another one.
            self._link_of[slots_B[(links_B == number) & ~is_served_B]] = -1
        return groups

    def finish_requests(self, slots: Iterable[int]) -> None:
        """These requests ended or were aborted."""
        for slot in slots:
            if (link := self.links.get(int(self._link_of[slot]))) is not None:
                link.finish_request(slot)
            self._link_of[slot] = -1
        self._close_drained()

    @property
    def num_up(self) -> int:
        """Links that take steps now."""
        return sum(link.state == "up" for link in self.links.values())

    def report(self) -> dict[str, Any]:
        """Plain values: the links, and how many requests each has."""
        links = [link.report() for link in self.links.values()]
        return {"num_up": self.num_up, "num_requests": [*map(self._num_requests, self.links)], "links": links}

    def close(self) -> None:
        for link in self.links.values():
            link.close(_CLOSE_S)
        self.links.clear()

    def _num_requests(self, number: int) -> int:
        return int(np.count_nonzero(self._link_of == number))

    def _choose_link(self, head: int, usable: Mapping[int, Link]) -> int:
        """Number of the link with the fewest requests, of those that serve the head and stay, late ones last; -1
        without one."""
        serving = [n for n, link in usable.items() if n not in self._draining and head in link.projections]
        return min(serving, key=lambda n: (usable[n].was_late, self._num_requests(n), random.random()), default=-1)

    def _close_drained(self) -> None:
        for number in [number for number in self._draining if not self._num_requests(number)]:
            self._draining.discard(number)
            self.links.pop(number).close()
