"""Algorithm 1 of the paper as it is published, which `peagle.train.partition` is measured against.

Boundaries lie at multiples of N / S; each segment computes all rows of offset 0 before its right boundary again, with
gradients: one forward and backward pass a segment. The last segment still holds all N rows of offset 0.
"""

from __future__ import annotations

from peagle.model import Drafter
from peagle.train.cod import CodRows
from peagle.train.partition import LossOf, PackedSequence, Partition, Segment, SequencePass, segments_at


def cut_by_position(rows: CodRows, num_segments: int) -> list[Segment]:
    """Depths 0 and 1 by position, deeper rows where their chain is.

    In closed form: a row of offset 0 goes by its anchor, all others by anchor + 1, where the chain's first mask row
    stands. Raises ValueError for S > N.
    """
    bounds = [s * rows.num_tokens // num_segments for s in range(num_segments + 1)]
    firsts = [0, *(bound - 1 for bound in bounds[1:-1]), rows.num_tokens]
    return segments_at(rows, bounds, firsts)


class PublishedPartition(Partition):
    """`Partition` by Algorithm 1; with one segment it is the whole pass."""

    def backward(self, drafter: Drafter, sequence: PackedSequence, loss_of: LossOf) -> None:
        run = SequencePass(self, drafter, sequence)
        for segment in cut_by_position(sequence.rows, self.num_segments):
            normed_RH, _ = run(segment, 0, self.padded(segment.start + segment.num_rows), None)
            loss = loss_of(normed_RH[segment.start :], segment.index(run.device))
            del normed_RH
            if loss.requires_grad:
                loss.backward()
