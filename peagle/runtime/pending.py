"""Draft ids of a pass that may still run."""

from __future__ import annotations

import abc

import numpy as np

from peagle.runtime.steps import NO_DRAFT, Int32Array


class PendingDrafts(abc.ABC):
    @abc.abstractmethod
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    @abc.abstractmethod
    def wait(self) -> Int32Array:
        """[B, K], -1 where no draft is wanted; an array of the caller's own."""


def widened(drafts_BK: Int32Array, max_depth: int) -> Int32Array:
    """[B, depth] -> [B, max_depth], with -1 in the new columns; always a new array."""
    wide_BK = np.full((len(drafts_BK), max_depth), NO_DRAFT, np.int32)
    wide_BK[:, : drafts_BK.shape[1]] = drafts_BK
    return wide_BK


class KnownDrafts(PendingDrafts):
    """Drafts of a pass that is over."""

    def __init__(self, drafts_BK: Int32Array, max_depth: int) -> None:
        self._drafts_BK = widened(drafts_BK, max_depth)

    def ready(self) -> bool:
        return True

    def wait(self) -> Int32Array:
        return self._drafts_BK
