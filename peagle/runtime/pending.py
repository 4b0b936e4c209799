"""Draft ids of a pass that may still run."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from peagle.runtime.steps import NO_DRAFT


class PendingDrafts(abc.ABC):
    @abc.abstractmethod
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    @abc.abstractmethod
    def wait(self) -> Tensor:
        """[B, K] int32 in host memory, -1 where no draft is wanted; a tensor of the caller's own."""


def widened(drafts_BK: Tensor, max_depth: int) -> Tensor:
    """[B, depth] -> [B, max_depth], with -1 in the new columns; always a new tensor."""
    wide_BK = torch.full((len(drafts_BK), max_depth), NO_DRAFT, dtype=torch.int32)
    wide_BK[:, : drafts_BK.shape[1]] = drafts_BK
    return wide_BK


class KnownDrafts(PendingDrafts):
    """Drafts of a pass that is over."""

    def __init__(self, drafts_BK: Tensor, max_depth: int) -> None:
        self._drafts_BK = widened(drafts_BK, max_depth)

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._drafts_BK
