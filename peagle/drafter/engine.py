"""Drafts for the requests of several targets and heads: one step of each target in, draft ids out.

The requests' cache blocks are looked up or given (`peagle.drafter.kvcache`), and each head runs one pass over all its
requests of the call, more where they do not fit in one. A `session` is the number of a connection, and a request is a
slot of it. Steps have been checked where they came in. The cache follows what a target sends: a start before the cached
rows truncates, a start after them begins cold.

G requests of one head, F requests of a call, R rows of all its payloads, K drafts at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from peagle.drafter.kvcache import NO_ROW, BlockPool, Counters, Int64Array, RequestTable
from peagle.drafter.parallel_pass import ParallelPass, PendingDrafts, row_addresses
from peagle.drafter.protocol import NO_DRAFT, Int32Array, Step, valid_rows
from peagle.drafter.rows import PassBatch

REQUEST = np.dtype([(name, np.int64) for name in ("place", "cache_row", "start", "num_valid", "row", "num_drafts")])
"""A request of a call. place: among all of the call. cache_row: its row in the request table. row: its first one of the
rows of all steps together. The others as in `Step` and its descriptor."""
Requests = npt.NDArray[np.void]


def num_mask_rows(requests: Requests) -> Int64Array:
    """Rows of the mask token that each request has in its pass."""
    return np.maximum(requests["num_drafts"] - 1, 0)


def split(requests: Requests, max_num_rows: int, max_num_requests: int) -> list[Requests]:
    """Requests of each pass within the limits; one pass if they all fit.

    Otherwise those that want drafts come before those that only enter the cache, and a request with more rows than a
    pass takes is cut into pieces, of which the last one drafts.
    """
    masks_G = num_mask_rows(requests)
    if len(requests) <= max_num_requests and int((requests["num_valid"] + masks_G).sum()) <= max_num_rows:
        return [requests]
    passes: list[list[Any]] = []
    room = 0
    for i in np.argsort(requests["num_drafts"] == 0, kind="stable").tolist():
        most, left = max_num_rows - int(masks_G[i]), int(requests["num_valid"][i])
        for first in range(0, left, most):
            piece = requests[i].copy()
            piece["start"] += first
            piece["row"] += first
            piece["num_valid"] = min(most, left - first)
            piece["num_drafts"] *= first + most >= left
            num_rows = int(piece["num_valid"]) + int(num_mask_rows(piece))
            if num_rows > room or len(passes[-1]) == max_num_requests:
                passes.append([])
                room = max_num_rows
            passes[-1].append(piece)
            room -= num_rows
    return [np.array(part, REQUEST) for part in passes]


class DraftEngine:
    """Not safe for threads: one thread calls it."""

    def __init__(self, heads: Mapping[int, ParallelPass]) -> None:
        """heads: by the index that steps name them with."""
        self.counters = Counters()
        self._heads: dict[int, ParallelPass] = {}
        self.tables: dict[int, RequestTable] = {}  # by head
        for index, head in heads.items():
            self.swap(index, head)

    def swap(self, index: int, head: ParallelPass) -> None:
        """Put a head in the place of another, or in a new place. All rows of the old one are void and dropped."""
        limits = head.limits
        pool = BlockPool(limits.num_blocks, limits.block_size)
        self.tables[index] = RequestTable(pool, head.digest, self.counters, limits.max_blocks * limits.block_size)
        self._heads[index] = head
        self.max_draft_tokens = max(head.limits.max_draft_tokens for head in self._heads.values())

    def release(self, session: int, slots: Sequence[int]) -> None:
        """These requests of a session ended."""
        for table in self.tables.values():
            table.release(session, slots)

    def drop_session(self, session: int) -> None:
        """A target went away. Its prefixes stay for others as long as there is room."""
        for table in self.tables.values():
            table.drop_session(session)

    def step(self, steps: Sequence[Step]) -> list[Int32Array]:
        """Drafts of each step's requests, [B, K] each, `NO_DRAFT` from a request's number of drafts on.

        A request that is refused for lack of cache has none. Each session has one step at most.
        """
        for step in steps:  # those too that ended without a word: another request begins in their slot
            self.release(step.session, [*step.descriptor.finished_slots, *step.descriptor.prompts])
        descriptors = [step.descriptor for step in steps]
        ends = np.cumsum([descriptor.num_requests for descriptor in descriptors])
        first_rows = np.cumsum([0, *(descriptor.num_rows for descriptor in descriptors)])
        requests_F = np.zeros(ends[-1], REQUEST)
        requests_F["place"] = np.arange(len(requests_F))
        requests_F["start"] = np.concatenate([step.start_B for step in steps])
        requests_F["num_valid"] = np.concatenate([step.num_valid_B for step in steps])
        requests_F["num_drafts"] = np.concatenate([one.num_drafts_B for one in descriptors])
        requests_F["row"] = np.concatenate(
            [one.row_offset_B + first for one, first in zip(descriptors, first_rows, strict=False)]
        )
        tokens_R = np.concatenate([step.next_tokens_R for step in steps])
        addresses_R = np.concatenate([row_addresses(step.hidden_RH) for step in steps])
        heads_F, launched = np.concatenate([one.heads_B for one in descriptors]), list[tuple[Requests, PendingDrafts]]()
        for index in np.unique(heads_F).tolist():
            for mine, step in zip(np.split(requests_F, ends[:-1]), steps, strict=True):
                self._find_cache_rows(index, step, mine)
            launched += self._launch(index, requests_F[heads_F == index], tokens_R, addresses_R)
        drafts_FK = np.full((len(requests_F), self.max_draft_tokens), NO_DRAFT, np.int32)
        for part, pending in launched:
            wanting = part["num_drafts"] > 0  # a piece that does not draft must not undo one that does
            drafts_GD = pending()
            drafts_FK[part["place"][wanting], : drafts_GD.shape[1]] = drafts_GD[wanting]
        self.counters.drafts += int((drafts_FK != NO_DRAFT).sum())
        return np.split(drafts_FK, ends[:-1])

    def _find_cache_rows(self, index: int, step: Step, requests: Requests) -> None:
        """Fill in `cache_row` of a step's requests of one head, opened where new."""
        is_mine_B = step.descriptor.heads_B == index
        table, slots_G, prompts = self.tables[index], step.descriptor.slots_B[is_mine_B], step.descriptor.prompts
        rows_G = table.find(step.session, slots_G)
        for i in np.flatnonzero(rows_G == NO_ROW).tolist():
            slot = int(slots_G[i])
            self.release(step.session, [slot])  # it may have rows of another head
            rows_G[i] = table.open(step.session, slot, prompts.get(slot))
        requests["cache_row"][is_mine_B] = rows_G

    def _launch(
        self, index: int, requests: Requests, tokens_R: Int32Array, addresses_R: Int64Array
    ) -> list[tuple[Requests, PendingDrafts]]:
        """Start the passes of one head and take their rows into its cache."""
        table, head = self.tables[index], self._heads[index]
        granted_G = table.place(*(requests[name] for name in ("cache_row", "start", "num_valid", "num_drafts")))
        requests = requests[granted_G & (requests["num_valid"] > 0)]
        launched = []
        for part in split(requests, head.limits.max_num_rows, head.limits.max_num_requests) if len(requests) else ():
            rows_R = valid_rows(part["row"], part["num_valid"])
            start_B = part["start"] - table.origin_C[part["cache_row"]]
            end_B = start_B + part["num_valid"] + num_mask_rows(part)
            batch = PassBatch(
                start_B=start_B.astype(np.int32),
                num_valid_B=part["num_valid"].astype(np.int32),
                row_offset_B=(np.cumsum(part["num_valid"]) - part["num_valid"]).astype(np.int32),
                num_drafts_B=part["num_drafts"].astype(np.int32),
                next_tokens_R=tokens_R[rows_R].astype(np.int64),
                addresses_R=addresses_R[rows_R],
                block_table_BN=table.block_table(part["cache_row"], end_B),
            )
            self.counters.passes += 1
            self.counters.rows += batch.num_rows
            launched.append((part, head.launch(batch)))
        rows_R = valid_rows(requests["row"], requests["num_valid"])
        # Passes run in the order of their launch, so whoever finds these rows from now on reads them written.
        table.commit(requests["cache_row"], requests["start"], requests["num_valid"], tokens_R[rows_R])
        return launched
