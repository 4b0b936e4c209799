"""Drafts for the requests of several targets and heads: one step of each target in, draft ids out.

The requests' cache blocks are looked up or given (`peagle.drafter.kvcache`), and each head runs one pass over all its
requests of the call, more where they do not fit in one. The engine knows nothing of connections: a `session` is a
number, and whoever opened it drops it. Steps have been checked where they came in.

A request is a slot of a session. Without a prompt in its first step it still drafts, but its blocks answer for no
prefix. The cache follows what a target sends: a start before the cached rows truncates, a start after them begins cold,
a step that is repeated gives the same drafts again.

G requests of one head, F requests of a call, R rows of a payload or of several joined, K drafts at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peagle.drafter.kvcache import NO_ROW, BlockPool, Counters, Int64Array, RequestTable
from peagle.drafter.parallel_pass import ParallelPass, PassBatch, PassLimits, PendingDrafts
from peagle.drafter.protocol import NO_DRAFT, Int32Array, TargetStep

HostStep = TargetStep[Int32Array]
MIN_IDLE_CALLS = 32


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests of one head in one call, or what of them goes into one pass.

    flat_G: place among all requests of the call. step_G: index of the target's step, ascending; its payload has the
    rows. table_rows_G: their rows in the request table. The others as in `TargetStep`.
    """

    flat_G: Int64Array
    step_G: Int64Array
    table_rows_G: Int64Array
    start_G: Int64Array
    num_valid_G: Int64Array
    row_offset_G: Int64Array
    depth_G: Int64Array

    def __len__(self) -> int:
        return len(self.flat_G)

    def __getitem__(self, index: npt.NDArray[Any] | slice) -> Requests:
        return Requests(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))

    @property
    def end_G(self) -> Int64Array:
        """Position after the last row in the pass, those of the mask token included."""
        return self.start_G + self.num_valid_G + np.maximum(self.depth_G - 1, 0)

    def by_step(self) -> Iterator[tuple[int, slice]]:
        """Each step's index and where its requests are."""
        first = 0
        while first < len(self):
            index = int(self.step_G[first])
            end = int(np.searchsorted(self.step_G, index, side="right"))
            yield index, slice(first, end)
            first = end

    def payload_rows(self) -> Int64Array:
        """Rows of the payloads that the requests have, one request after another."""
        ends_G = np.cumsum(self.num_valid_G)
        shift_G = self.row_offset_G - ends_G + self.num_valid_G
        return np.arange(ends_G[-1]) + np.repeat(shift_G, self.num_valid_G)


def split(requests: Requests, max_num_rows: int, max_num_requests: int) -> list[Requests]:
    """Passes within the limits, each with its requests by step; one pass if they all fit.

    Otherwise those that want drafts come before those that only enter the cache, and a request with more rows than a
    pass takes is cut into pieces, of which the last one drafts.
    """
    num_rows_G = requests.end_G - requests.start_G
    if len(requests) <= max_num_requests and int(num_rows_G.sum()) <= max_num_rows:
        return [requests]
    pieces = _cut(requests[np.argsort(requests.depth_G == 0, kind="stable")], max_num_rows)
    ends_G = np.cumsum(pieces.end_G - pieces.start_G)
    passes, first, before = [], 0, 0
    while first < len(pieces):
        end = int(np.searchsorted(ends_G, before + max_num_rows, side="right"))
        end = min(end, first + max_num_requests)
        part = pieces[first:end]
        passes.append(part[np.argsort(part.step_G, kind="stable")])
        first, before = end, int(ends_G[end - 1])
    return passes


def _cut(requests: Requests, max_num_rows: int) -> Requests:
    """Requests with more rows than a pass takes in pieces, in order; the others as they are."""
    # Every piece leaves room for the mask rows, so that the last one, whatever its size, has it.
    room_G = max_num_rows - np.maximum(requests.depth_G - 1, 0)
    num_pieces_G = np.maximum(-(-requests.num_valid_G // room_G), 1)
    request_P = np.repeat(np.arange(len(requests)), num_pieces_G)
    piece_P = np.arange(len(request_P)) - (np.cumsum(num_pieces_G) - num_pieces_G)[request_P]
    pieces, room_P = requests[request_P], room_G[request_P]
    is_last_P, skipped_P = piece_P == num_pieces_G[request_P] - 1, piece_P * room_P
    return dataclasses.replace(
        pieces,
        start_G=pieces.start_G + skipped_P,
        row_offset_G=pieces.row_offset_G + skipped_P,
        num_valid_G=np.minimum(pieces.num_valid_G - skipped_P, room_P),
        depth_G=np.where(is_last_P, pieces.depth_G, 0),
    )


def pass_batch(part: Requests, steps: Sequence[HostStep], table: RequestTable, limits: PassLimits) -> PassBatch:
    """What the pass gets: of each payload the rows from the first to the last that is used, nothing copied.

    Only where those are more than the pass takes, because rows of other requests lie between, are the used ones
    gathered.
    """
    offset_G, last_G = part.row_offset_G.copy(), part.row_offset_G + part.num_valid_G
    tokens, hidden, num_before = [], [], 0
    for index, mine in part.by_step():
        first, end = int(part.row_offset_G[mine].min()), int(last_G[mine].max())
        offset_G[mine] += num_before - first
        tokens.append(steps[index].next_tokens_R[first:end])
        hidden.append(steps[index].hidden_RH[first:end])
        num_before += len(tokens[-1])
    if num_before > limits.max_payload_rows:
        rows = [(steps[index], part[mine].payload_rows()) for index, mine in part.by_step()]
        tokens = [step.next_tokens_R[rows_R] for step, rows_R in rows]
        hidden = [step.hidden_RH[torch.from_numpy(rows_R)] for step, rows_R in rows]
        offset_G = np.cumsum(part.num_valid_G) - part.num_valid_G
    return PassBatch(
        start_B=part.start_G.astype(np.int32),
        num_valid_B=part.num_valid_G.astype(np.int32),
        row_offset_B=offset_G.astype(np.int32),
        depth_B=part.depth_G.astype(np.int32),
        cache_start_B=table.cache_start_C[part.table_rows_G].astype(np.int32),
        next_tokens_R=_joined(tokens),
        hidden=hidden,
        block_table_BN=table.block_table(part.table_rows_G, part.end_G),
    )


class DraftEngine:
    """Not safe for threads: one thread calls it."""

    def __init__(
        self, heads: Mapping[int, ParallelPass], *, max_num_requests: int = 1024, min_idle_calls: int = MIN_IDLE_CALLS
    ) -> None:
        """heads: by the index that steps name them with.

        max_num_requests: requests with rows in the cache, for each head.
        min_idle_calls: a request is evicted for others only after so many calls of `step` without it: with a full cache
            new requests are refused rather than those in use evicted back and forth.
        """
        self.counters = Counters()
        self._max_num_requests, self._min_idle_calls = max_num_requests, min_idle_calls
        self._heads: dict[int, ParallelPass] = {}
        self.tables: dict[int, RequestTable] = {}  # by head
        for index, head in heads.items():
            self.swap(index, head)

    def swap(self, index: int, head: ParallelPass) -> None:
        """Put a head in the place of another, or in a new place. All rows of the old one are void and dropped."""
        limits = head.limits
        if limits.max_num_rows < limits.max_depth:
            raise ValueError(
                f"head {index}: max_num_rows = {limits.max_num_rows} holds no request that wants "
                f"max_depth = {limits.max_depth} drafts: raise it"
            )
        self.tables[index] = RequestTable(
            BlockPool(limits.num_blocks, limits.block_size),
            head.digest,
            self.counters,
            max_num_requests=min(self._max_num_requests, limits.num_blocks),
            max_num_positions=limits.max_blocks * limits.block_size,
            min_idle_calls=self._min_idle_calls,
        )
        self._heads[index] = head
        self.max_depth = max(head.limits.max_depth for head in self._heads.values())

    def release(self, session: int, slots: Iterable[int]) -> None:
        """These requests of a session ended."""
        ended = list(slots)
        for table in self.tables.values():
            table.release(session, ended)

    def drop_session(self, session: int) -> None:
        """A target went away. Its prefixes stay for others as long as there is room."""
        for table in self.tables.values():
            table.drop_session(session)

    def step(self, steps: Sequence[HostStep]) -> list[Int32Array]:
        """Drafts of each step's requests, [B, K] each, as they travel, `NO_DRAFT` from a request's depth on.

        A request that is refused for lack of cache has none.
        """
        if len(steps) > 1 and len({step.session for step in steps}) < len(steps):
            # A later step needs an earlier one's rows.
            return [self.step([step])[0] for step in steps]
        for step in steps:
            self._release_ended(step)
        heads_F = _joined([step.heads_B for step in steps])
        launched = [part for index in np.unique(heads_F).tolist() for part in self._launch(index, steps, heads_F)]
        drafts_FK = self._gathered(launched, len(heads_F))
        self.counters.drafts += int((drafts_FK != NO_DRAFT).sum())
        return np.split(drafts_FK, np.cumsum([step.num_requests for step in steps])[:-1])

    def _release_ended(self, step: HostStep) -> None:
        """Release what ended before a step, also where only its slot says so: another request begins there."""
        if ended := [*step.finished_slots, *step.prompts]:
            self.release(step.session, ended)

    def _gathered(self, launched: Sequence[tuple[Requests, PendingDrafts]], num_requests: int) -> Int32Array:
        """[F, K] drafts of all requests of a call, once their passes are over."""
        if len(launched) == 1 and len(launched[0][0]) == num_requests:
            drafts_FK = launched[0][1]()
            if drafts_FK.shape[1] == self.max_depth:
                return drafts_FK
        drafts_FK = np.full((num_requests, self.max_depth), NO_DRAFT, np.int32)
        for part, pending in launched:
            wanting = part.depth_G > 0  # a piece that does not draft must not undo one that does
            drafts_GK = pending()
            drafts_FK[part.flat_G[wanting], : drafts_GK.shape[1]] = drafts_GK[wanting]
        return drafts_FK

    def _admit(self, index: int, steps: Sequence[HostStep], heads_F: Int32Array) -> Requests:
        """The requests of one head that have a table row and blocks now, and new rows to write."""
        table, flat_G = self.tables[index], np.flatnonzero(heads_F == index)
        table.call += 1
        mine = [np.flatnonzero(step.heads_B == index) for step in steps]
        slots = [step.slots_B[which] for step, which in zip(steps, mine, strict=True)]
        rows = [table.find(step.session, slots_G) for step, slots_G in zip(steps, slots, strict=True)]
        for step, slots_G, rows_G in zip(steps, slots, rows, strict=True):
            for i in np.flatnonzero(rows_G == NO_ROW).tolist():
                slot = int(slots_G[i])
                self.release(step.session, [slot])  # it may have rows of another head
                rows_G[i] = table.open(step.session, slot, step.prompts.get(slot))
        columns = [
            np.array([step.start_B, step.num_valid_B, step.row_offset_B, step.depth_B], np.int64)[:, which]
            for step, which in zip(steps, mine, strict=True)
        ]
        step_G = np.repeat(np.arange(len(steps)), [len(slots_G) for slots_G in slots])
        requests = Requests(flat_G, step_G, _joined(rows), *_joined(columns, axis=1))
        if not (opened_G := requests.table_rows_G != NO_ROW).all():
            self.counters.refused += int((~opened_G).sum())
            requests = requests[opened_G]
        granted_G = table.place(requests.table_rows_G, requests.start_G, requests.num_valid_G, requests.depth_G)
        granted_G &= requests.num_valid_G > 0
        return requests if granted_G.all() else requests[granted_G]

    def _launch(
        self, index: int, steps: Sequence[HostStep], heads_F: Int32Array
    ) -> list[tuple[Requests, PendingDrafts]]:
        """Start the passes of one head and take their rows into its cache."""
        requests, table, head = self._admit(index, steps, heads_F), self.tables[index], self._heads[index]
        if not len(requests):
            return []
        launched = []
        for part in split(requests, head.limits.max_num_rows, head.limits.max_num_requests):
            batch = pass_batch(part, steps, table, head.limits)
            self.counters.passes += 1
            self.counters.rows += batch.num_rows
            launched.append((part, head.launch(batch)))
        tokens = [steps[i].next_tokens_R[requests[mine].payload_rows()] for i, mine in requests.by_step()]
        # Passes run in the order of their launch, so whoever finds these rows from now on reads them written.
        table.commit(requests.table_rows_G, requests.start_G, requests.num_valid_G, _joined(tokens))
        return launched


def _joined(arrays: Sequence[npt.NDArray[Any]], axis: int = 0) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)
