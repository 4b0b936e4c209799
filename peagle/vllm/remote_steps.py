"""From one step of the engine to the messages of its drafters, and from their answers to the drafts of the batch.

Enters: an `EngineStep`, what the model runner has after sampling. Leaves: rows on the links of a pool, and drafts
[B, K]. Knows vLLM's runner not; on a GPU nothing here waits for the device.

Dimensions: B requests of the batch, M of them on one link, R rows, X = C * S tapped hidden states, H, K drafts.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.runtime.steps import NO_DRAFT, Int32Array, TargetShape
from peagle.vllm.remote_health import Health
from peagle.vllm.remote_slots import RequestSlots


@dataclasses.dataclass(frozen=True)
class EngineStep:
    """A batch after sampling. Arrays are known to the host; tensors may be known to the device only.

    requests: all that the engine has, by id. wanted_B: whether the drafter needs the request's rows. prompt_of: token
    ids of the positions 0 .. start of a request of the batch that starts or comes back, empty if not known.
    aux: tapped hidden states of each layer, [>= R, S]; rows of request b are from row_offset_B[b], num_rows_B[b] of
    them, of which the first num_valid_B[b] stay.
    """

    request_ids: Sequence[str]
    requests: Mapping[str, object]
    heads_B: Int32Array
    depth_B: Int32Array
    wanted_B: np.ndarray[Any, np.dtype[np.bool_]]
    row_offset_B: Int32Array
    num_rows_B: Int32Array
    start_B: Tensor
    num_valid_B: Tensor
    next_tokens_R: Tensor
    aux: Sequence[Tensor]
    prompt_of: Callable[[int], Int32Array]


@dataclasses.dataclass(frozen=True)
class Sent:
    """A message under way: its link, and the positions in the batch of its requests."""

    link: Any
    members_M: Int32Array


class StepSender:
    """Sends every step of one engine to the drafters of `pool` (`peagle.runtime.pool.LinkPool`).

    Nobody waits for the answer to a step without drafts, such as a prompt chunk, while the target goes on. It is waited
    for before the next step is sent there, so that a drafter is at most one step behind.
    """

    def __init__(
        self, pool: Any, shape: TargetShape, device: torch.device, *, on_stream: bool, health: Health | None = None
    ) -> None:
        """on_stream: a GPU's stream waits for answers, not the host. health: where to say which heads are live."""
        self.pool, self.shape, self.device = pool, shape, device
        self._on_stream, self._health = on_stream, health
        self._unanswered: dict[Any, Sent] = {}  # by link
        self._slots = RequestSlots(shape.max_num_requests)
        self._counts: Counter[str] = Counter()

    def send(self, step: EngineStep) -> list[Sent]:
        """Hand the rows of a step to the drafters of its requests; the messages whose drafts are to be waited for.

        Never raises for a drafter that is gone.
        """
        change = self._slots.update(step.request_ids, step.requests)
        self.pool.finish(list(change.finished))
        new = {int(change.slots_B[i]): step.request_ids[i] for i in change.new}
        wanted = np.flatnonzero(step.wanted_B)
        self._counts["steps"] += 1
        self._counts["requests"] += len(wanted)
        sent = []
        # A drafter that was let go owes nothing.
        self._unanswered = {link: one for link, one in self._unanswered.items() if link.state != "closed"}
        groups = self.pool.assign(change.slots_B[wanted], step.heads_B[wanted], new) if len(wanted) else ()
        for link, places in groups:
            members_M = wanted[np.asarray(places, dtype=np.int64)]
            prompts = {int(change.slots_B[i]): step.prompt_of(i) for i in change.new if i in members_M}
            if (unanswered := self._unanswered.pop(link, None)) is not None:
                self._settle(unanswered)
            if self._send_to(link, step, change.slots_B, members_M, prompts):
                message = Sent(link, members_M.astype(np.int32))
                if step.depth_B[members_M].any():
                    sent.append(message)
                else:
                    self._unanswered[link] = message
                self._counts["requests_sent"] += len(members_M)
        if self._health is not None:
            self._health.write(self.pool.live_heads())
        return sent

    def _settle(self, message: Sent) -> None:
        """Wait for an answer without drafts."""
        if self._on_stream:
            size = (len(message.members_M), self.shape.max_depth)
            message.link.enqueue_wait(torch.empty(size, dtype=torch.int32, device=self.device))
        else:
            message.link.wait_host()

    def _send_to(
        self, link: Any, step: EngineStep, slots_B: Int32Array, members_M: Any, prompts: Mapping[int, Int32Array]
    ) -> bool:
        rows = _rows_of(step, members_M, self.device)
        heads_M = step.heads_B[members_M]
        hidden_RH = _reduce(link.reducers, heads_M, rows, step.aux)
        places = _place(members_M, len(step.request_ids), self.device)
        next_tokens_R = step.next_tokens_R if rows.index is None else step.next_tokens_R[rows.index]
        is_sent: bool = link.send(
            slots_B[members_M],
            heads_M,
            step.depth_B[members_M],
            rows.offset_M,
            step.start_B[places],
            step.num_valid_B[places],
            next_tokens_R[: len(hidden_RH)],
            hidden_RH,
            prompts=prompts,
        )
        self._counts["rows_sent"] += len(hidden_RH) if is_sent else 0
        return is_sent

    def wait_host(self, sent: Sequence[Sent], num_requests: int) -> Int32Array:
        """Drafts [B, K] of the host, -1 where there are none; waits no longer than the links' deadlines."""
        drafts_BK = np.full((num_requests, self.shape.max_depth), NO_DRAFT, dtype=np.int32)
        for message in sent:
            if (drafts_MK := message.link.wait_host()) is not None:
                drafts_BK[message.members_M] = drafts_MK
        return drafts_BK

    def enqueue_wait(self, sent: Sequence[Sent], num_requests: int) -> Tensor:
        """Drafts [B, K], int32 on the device, filled in the order of its stream; 0 where there are none."""
        size = (num_requests, self.shape.max_depth)
        drafts_BK = torch.zeros(size, dtype=torch.int32, device=self.device)
        for message in sent:
            places = _place(message.members_M, num_requests, self.device)
            drafts_MK = torch.empty(len(message.members_M), size[1], dtype=torch.int32, device=self.device)
            message.link.enqueue_wait(drafts_MK)
            drafts_MK.clamp_(min=0)
            if isinstance(places, slice):
                return drafts_MK
            drafts_BK[places] = drafts_MK
        return drafts_BK

    def report(self) -> dict[str, Any]:
        """Plain values: steps and rows since the start, and what the pool says of its links."""
        return {"counts": dict(self._counts), "pool": self.pool.report()}

    def close(self) -> None:
        self.pool.close()


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a message: their places in the batch, None for all as they stand, and where each request's begin."""

    index: Tensor | None
    num_rows: int
    offset_M: Int32Array
    num_rows_M: Int32Array


def _rows_of(step: EngineStep, members_M: Any, device: torch.device) -> _Rows:
    """Which rows travel. Where the host knows the rejected ones they stay behind, else they travel as holes."""
    offset_M, num_rows_M = step.row_offset_B[members_M], step.num_rows_B[members_M]
    if device.type == "cpu":
        num_rows_M = step.num_valid_B.numpy()[members_M]
    num_all = int((step.row_offset_B + step.num_rows_B).max())
    num_rows = int(num_rows_M.sum())
    if num_rows == num_all:
        return _Rows(None, num_all, offset_M, num_rows_M)
    ends_M = np.cumsum(num_rows_M)
    packed_M = (ends_M - num_rows_M).astype(np.int32)
    index_R = np.arange(num_rows) + np.repeat(offset_M - packed_M, num_rows_M)
    return _Rows(_upload(index_R, device), num_rows, packed_M, num_rows_M)


def _reduce(reducers: Mapping[int, Any], heads_M: Int32Array, rows: _Rows, aux: Sequence[Tensor]) -> Tensor:
    """Hidden rows [R, H], each reduced by the head of its request."""
    chosen = [layer[: rows.num_rows] if rows.index is None else layer[rows.index] for layer in aux]
    aux_RX = torch.cat(chosen, dim=-1)
    heads = np.unique(heads_M).tolist()
    if len(heads) == 1:
        reduced: Tensor = reducers[heads[0]].reduce(aux_RX)
        return reduced
    of_row_R = np.repeat(heads_M, rows.num_rows_M)
    parts = {head: _upload(np.flatnonzero(of_row_R == head), aux_RX.device) for head in heads}
    hidden_RH = aux_RX.new_zeros(rows.num_rows, reducers[heads[0]].hidden_size)
    for head, index in parts.items():
        hidden_RH[index] = reducers[head].reduce(aux_RX[index]).to(hidden_RH.dtype)
    return hidden_RH


def _place(members_M: Any, num_requests: int, device: torch.device) -> Tensor | slice:
    """Index of a message's requests in the batch; a slice, which copies nothing, where it is all of them in order."""
    if len(members_M) == num_requests and np.array_equal(members_M, np.arange(num_requests)):
        return slice(None)
    return _upload(np.asarray(members_M, dtype=np.int64), device)


def _upload(index: Any, device: torch.device) -> Tensor:
    """An int64 index on the device, without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
