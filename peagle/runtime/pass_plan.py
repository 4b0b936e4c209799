"""Requests of one call cut into passes, and the part of the targets' payloads that each pass needs.

G requests; R rows of a payload or of several joined, H hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peagle.runtime.pass_batch import PassBatch, PassLimits
from peagle.runtime.request_table import Int64Array, RequestTable
from peagle.runtime.steps import TargetStep


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests of one head in one call, or what of them goes into one pass.

    flat_G: place among all requests of the call. step_G: index of the target's step, ascending; its payload has the
    rows. rows_G: their rows in the request table. The others as in `TargetStep`.
    """

    flat_G: Int64Array
    step_G: Int64Array
    rows_G: Int64Array
    start_G: Int64Array
    num_valid_G: Int64Array
    row_offset_G: Int64Array
    depth_G: Int64Array

    def __len__(self) -> int:
        return len(self.flat_G)

    def __getitem__(self, index: npt.NDArray[Any] | slice) -> Requests:
        return Requests(
            self.flat_G[index],
            self.step_G[index],
            self.rows_G[index],
            self.start_G[index],
            self.num_valid_G[index],
            self.row_offset_G[index],
            self.depth_G[index],
        )

    def moved(self, step: TargetStep) -> Requests:
        """The same requests, all of one step, with the device part of a later one."""
        start_G, num_valid_G = step.start_B.astype(np.int64), step.num_valid_B.astype(np.int64)
        return Requests(self.flat_G, self.step_G, self.rows_G, start_G, num_valid_G, self.row_offset_G, self.depth_G)

    @functools.cached_property
    def end_G(self) -> Int64Array:
        """Position after the last row in the pass, those of the mask token included."""
        return self.start_G + self.num_valid_G + np.maximum(self.depth_G - 1, 0)

    def by_step(self) -> Iterator[tuple[int, slice]]:
        """Each step's index and where its requests are."""
        if len(self) and self.step_G[0] == self.step_G[-1]:  # ascending: all of one step
            yield int(self.step_G[0]), slice(None)
            return
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
    pass takes is cut into pieces, of which the last one drafts. Raises ValueError if a pass has no room for a request's
    last row and its mask rows.
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
    num_masks_G = np.maximum(requests.depth_G - 1, 0)
    if int(num_masks_G.max()) >= max_num_rows:
        raise ValueError(f"max_num_rows = {max_num_rows} leaves no room for {num_masks_G.max()} mask rows: raise it")
    # Every piece leaves room for the mask rows, so that the last one, whatever its size, has it.
    room_G = max_num_rows - num_masks_G
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


def pass_batch(part: Requests, steps: Sequence[TargetStep], table: RequestTable, limits: PassLimits) -> PassBatch:
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
        num_before += end - first
    if num_before > limits.max_payload_rows:
        tokens, hidden = _gathered(part, steps)
        offset_G = np.cumsum(part.num_valid_G) - part.num_valid_G
    return PassBatch(
        start_B=part.start_G.astype(np.int32),
        num_valid_B=part.num_valid_G.astype(np.int32),
        row_offset_B=offset_G.astype(np.int32),
        depth_B=part.depth_G.astype(np.int32),
        cache_start_B=table.cache_start_C[part.rows_G].astype(np.int32),
        next_tokens_R=tokens[0] if len(tokens) == 1 else np.concatenate(tokens),
        hidden_RH=hidden,
        block_table_BN=table.block_table(part.rows_G, part.end_G),
    )


def _gathered(part: Requests, steps: Sequence[TargetStep]) -> tuple[list[npt.NDArray[np.int32]], list[torch.Tensor]]:
    """Tokens and hidden rows of the requests alone, step after step."""
    tokens, hidden = [], []
    for index, mine in part.by_step():
        rows_R = part[mine].payload_rows()
        tokens.append(steps[index].next_tokens_R[rows_R])
        hidden.append(steps[index].hidden_RH[torch.from_numpy(rows_R)])
    return tokens, hidden


def tokens_of(requests: Requests, steps: Sequence[TargetStep]) -> npt.NDArray[np.int32]:
    """[R] tokens of the requests' rows, one request after another."""
    parts = [steps[index].next_tokens_R[requests[mine].payload_rows()] for index, mine in requests.by_step()]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
