"""How a sequence is cut in segments: the paper's assignment, and one that shares the rows evenly."""

from collections.abc import Iterable

import pytest
import torch

from peagle.train.cod import CodRows, sample_rows
from peagle.train.partition import Segment, cut_by_position, cut_by_rows
from tests.head_factory import CONFIG
from tests.packed import NUM_TOKENS, packed_sequence


def by_algorithm_1(rows: CodRows, num_segments: int) -> dict[tuple[int, int], int]:
    """The paper's assignment, depth by depth: (position, depth) -> segment."""
    found = {}
    for position, depth in sorted(pairs(rows), key=lambda pair: pair[1]):
        if depth <= 1:
            bounds = [s * rows.num_tokens / num_segments for s in range(1, num_segments)]
            # Position N stands behind the last boundary.
            found[position, depth] = sum(position >= int(bound) for bound in bounds)
        else:
            found[position, depth] = found[position - 1, depth - 1]
    return found


def pairs(rows: CodRows, numbers: Iterable[int] | None = None) -> list[tuple[int, int]]:
    """(position, depth counted from 0) of rows, as the paper names them."""
    numbers = range(rows.anchor_BT.shape[1]) if numbers is None else numbers
    return [(int(rows.position_BT[0, i]), int(rows.offset_BT[0, i])) for i in numbers]


def own_rows(segment: Segment) -> list[int]:
    return segment.index(torch.device("cpu")).tolist()


@pytest.mark.parametrize("num_segments", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_cut_by_position_is_algorithm_1(num_segments: int, ratio: float) -> None:
    rows = packed_sequence(CONFIG, ratio).rows
    wanted = by_algorithm_1(rows, num_segments)
    for number, segment in enumerate(cut_by_position(rows, num_segments)):
        assert {pair for pair, owner in wanted.items() if owner == number} == set(pairs(rows, own_rows(segment)))


def test_example_of_the_paper() -> None:
    """N = 16, S = 2: position 8 at depth 2 rests on 7 at depth 1, which lies before the boundary at 8 (Fig. 4)."""
    anchor = torch.tensor([[*range(16), 6, 6, 7, 9, 9]])
    offset = torch.tensor([[*[0] * 16, 1, 2, 1, 1, 2]])
    first, second = cut_by_position(CodRows(anchor, offset, 16), 2)
    first_rows = pairs(CodRows(anchor, offset, 16), own_rows(first))
    assert (7, 1) in first_rows
    assert (8, 2) in first_rows, "a cut by position alone would give it to the second segment, apart from its chain"
    assert (8, 1) in pairs(CodRows(anchor, offset, 16), own_rows(second))


@pytest.mark.parametrize("cut", [cut_by_position, cut_by_rows])
@pytest.mark.parametrize("num_segments", [1, 2, 4, 7, NUM_TOKENS])
def test_each_row_has_one_segment_and_mask_rows_stay_together(cut, num_segments: int) -> None:
    rows = packed_sequence(CONFIG, 0.8, seed=num_segments).rows
    segments = cut(rows, num_segments)
    owned = [own_rows(segment) for segment in segments]
    assert sorted(number for numbers in owned for number in numbers) == list(range(rows.anchor_BT.shape[1]))
    owner = {number: which for which, numbers in enumerate(owned) for number in numbers}
    for number in range(rows.num_tokens + 1, rows.anchor_BT.shape[1]):
        if rows.anchor_BT[0, number] == rows.anchor_BT[0, number - 1]:
            assert owner[number] == owner[number - 1]
    for which, segment in enumerate(segments):
        anchors = rows.anchor_BT[0, own_rows(segment)]
        assert anchors.max() < segment.stop, "a chain whose own prefix is in a later segment"
        assert [owner[number] for number in range(segment.start, segment.stop)] == [which] * (
            segment.stop - segment.start
        )


@pytest.mark.parametrize("num_segments", [2, 4, 7])
def test_cut_by_rows_is_even_where_labels_are_not(num_segments: int) -> None:
    """The first half is a prompt: nearly all rows are of the second."""
    chain_1N = torch.zeros(1, 64, dtype=torch.int64)
    chain_1N[:, 32:58] = 5
    rows = sample_rows(chain_1N, 5, 0.75, generator=torch.Generator().manual_seed(0))
    even = -(-rows.anchor_BT.shape[1] // num_segments)
    assert max(segment.num_rows for segment in cut_by_rows(rows, num_segments)) <= even + 5
    assert max(segment.num_rows for segment in cut_by_position(rows, num_segments)) > even + 5
