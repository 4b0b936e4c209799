"""From the rows of a drafter's pass in vLLM to draft tokens, on either model runner.

vLLM's own choice scatters logits to the target's vocabulary first; here a reduced draft vocabulary stays small. A head
with a Markov head (`peagle.markov`) has its tensors in a folder of the head's, where stock vLLM does not look: there the
same head drafts without them.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoint import load_markov_head
from peagle.markov import MarkovTables


class DraftChoice:
    """Greedy drafts of one head. `model`: vLLM's network of an EAGLE-3 head, loaded."""

    def __init__(self, model: Any, head_dir: str | Path) -> None:
        """Raises HeadError for a head whose config.json names a Markov head that is not there or does not fit."""
        self._model = model
        self._markov: MarkovTables | None = None
        if (head := load_markov_head(head_dir)) is not None:
            ids_V = torch.arange(model.config.draft_vocab_size, device=model.lm_head.weight.device)
            with torch.inference_mode():
                embeds_VH = model.model.embed_tokens(self._in_target(ids_V))
                self._markov = MarkovTables.of(head, embeds_VH, self._logits)

    def __call__(self, normed_MH: Tensor, num_drafts: int) -> Tensor:
        """Tokens of the target, int64 [M], of M = B * num_drafts rows: those of a request after each other."""
        logits_MV = self._logits(normed_MH)
        if self._markov is None:
            return self._in_target(logits_MV.argmax(dim=-1))
        normed_BKH, logits_BKV = (rows.unflatten(0, (-1, num_drafts)) for rows in (normed_MH, logits_MV))
        return self._in_target(self._markov.choose(normed_BKH, logits_BKV).flatten())

    def _logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self._model.logits_processor(self._model.lm_head, normed)
        return logits

    def _in_target(self, index: Tensor) -> Tensor:
        offsets = self._model.draft_id_to_target_id
        return index if offsets is None else index + offsets[index]
