"""The numbers under which a drafter knows a target's requests: slots 0 .. max_num_requests - 1, reused.

Enters: the requests of each step. Leaves: their slots, which of them are new, and which slots ended. Pure.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from peagle.runtime.steps import Int32Array


@dataclasses.dataclass(frozen=True)
class SlotChange:
    """slots_B: of the step's requests. new: their positions 0 .. B - 1 that had no slot before. finished: slots whose
    request is gone; one of them may be in use again by a new one."""

    slots_B: Int32Array
    new: tuple[int, ...]
    finished: tuple[int, ...]


@dataclasses.dataclass
class _Held:
    slot: int
    request: object
    last_step: int


class RequestSlots:
    """Who holds which slot.

    A request keeps its slot while it waits, such as after preemption, so that its cache at the drafter can be used
    again. When slots run out, the request that has waited longest loses its own and is a new one when it comes back.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[str, _Held] = {}
        self._step = 0

    def update(self, request_ids: Sequence[str], requests: Mapping[str, object]) -> SlotChange:
        """Slots of a step of `request_ids`; `requests` are all that the engine has, running or waiting.

        A request that is another object than before under the same id is another request.
        """
        self._step += 1
        gone = [key for key, held in self._held.items() if requests.get(key) is not held.request]
        finished = [self._release(key) for key in gone]
        for request_id in request_ids:
            if (held := self._held.get(request_id)) is not None:
                held.last_step = self._step
        new = tuple(i for i, request_id in enumerate(request_ids) if request_id not in self._held)
        for i in new:
            if not self._free:
                finished.append(self._release(min(self._held, key=lambda key: self._held[key].last_step)))
            request_id = request_ids[i]
            self._held[request_id] = _Held(self._free.pop(), requests[request_id], self._step)
        slots_B = np.array([self._held[request_id].slot for request_id in request_ids], dtype=np.int32)
        return SlotChange(slots_B, new, tuple(finished))

    def _release(self, request_id: str) -> int:
        slot = self._held.pop(request_id).slot
        self._free.append(slot)
        return slot
