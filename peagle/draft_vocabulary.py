"""A reduced draft vocabulary: which tokens of the target it has, and the tables `d2t` and `t2d` that say so in a head.

Fewer tokens make the drafter's output matrix, and so its pass, cheaper; a token that is left out can never be drafted.
The rows of the output matrix stay the target's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from peagle.train.data import Conversations


def answer_token_counts(data: Conversations, vocab_size: int) -> Tensor:
    """count_V [vocab_size] int64: how often each token of the target occurs in the answers.

    Raises ValueError when the data holds a token outside the vocabulary.
    """
    starts = data.lengths.cumsum(dtype=np.int64) - data.lengths
    position = np.arange(len(data.tokens)) - np.repeat(starts, data.lengths)
    answers = data.tokens[position >= np.repeat(data.prompt_lengths, data.lengths)]
    if answers.size and not 0 <= int(answers.min()) <= int(answers.max()) < vocab_size:
        raise ValueError(
            f"data: answers hold tokens {int(answers.min())}..{int(answers.max())}, the target's vocabulary is "
            f"0..{vocab_size - 1}: they were written with another tokenizer"
        )
    return torch.from_numpy(np.bincount(answers, minlength=vocab_size))


def frequent_tokens(count_V: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens, ascending [size] int64; ties go to the lower id.

    always: ids that are taken whatever their count, such as the end of a turn.

    Raises ValueError when `size` exceeds the vocabulary or cannot hold `always`, or one of those is no token.
    """
    chosen = sorted(set(always))
    if not len(chosen) <= size <= len(count_V):
        raise ValueError(
            f"draft_vocab_size = {size}: must be in {len(chosen)}..{len(count_V)} (tokens that are always taken .. "
            "vocabulary of the target)"
        )
    if chosen and not 0 <= chosen[0] <= chosen[-1] < len(count_V):
        raise ValueError(f"always: {chosen} must be tokens of the target, 0..{len(count_V) - 1}")
    ranked = count_V.long().clone()
    ranked[chosen] = torch.iinfo(torch.int64).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def offsets(target_ids_V: Tensor) -> Tensor:
    """target_ids_V [V_draft], the target's id of each draft token -> d2t [V_draft] int64, as vLLM adds it: id - i."""
    return target_ids_V.long() - torch.arange(len(target_ids_V), device=target_ids_V.device)


def target_ids(d2t: Tensor) -> Tensor:
    """d2t [V_draft], offsets -> [V_draft] int64, the target's token id of each draft token."""
    return torch.arange(len(d2t), device=d2t.device) + d2t.long()


def marks(target_ids_V: Tensor, vocab_size: int) -> Tensor:
    """t2d [vocab_size] bool: the target's tokens that the draft vocabulary has."""
    marked = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids_V.device)
    return marked.index_fill(0, target_ids_V.long(), True)
