"""Passes of a P-EAGLE head after any prefix of finished texts, with or without the target's newest hidden states.

Many passes of different texts and prefixes run as one, which reads the weights once. Each attends to the keys and
values of its own text's rows before it, all with the target's true states, and to its own rows; nothing of it stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.bench.ahead_walk import Lookup, Proposals
from peagle.model import Drafter

#: What stands for a hidden state of the target that is not known yet: P-EAGLE's learned one, the drafter's own output
#: of the row before (EAGLE-3's way), or, to check the others against, the target's all the same.
StandIn = Literal["shared", "own", "target"]
MAX_PASSES = 64
"""Passes that run as one."""


class Key(NamedTuple):
    """A pass after tokens 0..newest of a text, its `num_missing` newest rows with a stand-in; without any: "target"."""

    text: int
    newest: int
    num_missing: int
    stand_in: StandIn

    @property
    def first_row(self) -> int:
        """Rows before it come from the cache; the last real row is newest - 1."""
        return self.newest - max(self.num_missing, 1)


@dataclasses.dataclass(frozen=True)
class _Text:
    """tokens_N; hidden_NH: the target's states after `fc`; keys, values: of all rows but the last, by layer."""

    tokens_N: Tensor
    hidden_NH: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class Passes:
    """Each pass is made once, when it is first asked for or by `make`."""

    def __init__(self, drafter: Drafter, num_depths: int, num_columns: int) -> None:
        """num_depths: D, proposals of a pass; num_columns: M, tokens kept of each.

        Raises ValueError for a head without a mask token, or with a sliding window.
        """
        if drafter.config.ptd_token_id is None:
            raise ValueError("head: it has no mask token (EAGLE-3); drafting ahead is measured for P-EAGLE heads")
        if drafter.config.sliding_window is not None:
            raise ValueError("head: drafting ahead is not measured for heads with a sliding window")
        self._drafter, self._num_depths, self._num_columns = drafter, num_depths, num_columns
        self._mask_id = drafter.config.ptd_token_id
        with torch.no_grad():
            self._shared_H = drafter.reduce(drafter.mask_hidden).view(-1)
        self._texts: list[_Text] = []
        self._made: dict[Key, Proposals] = {}
        self._streams: dict[Key, Tensor] = {}

    @torch.no_grad()
    def add(self, tokens_N: Tensor, aux_NX: Tensor) -> int:
        """Index of the text. aux_NX: the target's tapped hidden states at all its tokens."""
        hidden_NH = self._drafter.reduce(aux_NX)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(_layer: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
            keys.append(k_BGTD)
            values.append(v_BGTD)
            return F.scaled_dot_product_attention(q_BATD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True)

        positions_BN = torch.arange(len(tokens_N) - 1)[None]
        self._drafter(self._drafter.embed(tokens_N[None, 1:]), hidden_NH[None, :-1], positions_BN, attend)
        self._texts.append(_Text(tokens_N, hidden_NH, keys, values))
        return len(self._texts) - 1

    def lookup(self, text: int, stand_in: StandIn = "shared") -> Lookup:
        """Proposals by (newest, num_missing), as `peagle.bench.ahead_walk` asks for them."""
        return lambda newest, num_missing: self[key_of(text, newest, num_missing, stand_in)]

    def __getitem__(self, key: Key) -> Proposals:
        if key not in self._made:
            self.make([key])
        return self._made[key]

    def make(self, keys: Iterable[Key]) -> None:
        """Make those that are not made yet, many at once."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._made]
        # What a row's own stand-in is comes from the pass whose drafts are verified meanwhile.
        before = [key_of(key.text, key.first_row, 0) for key in wanted if key.stand_in == "own"]
        if before:
            self.make(before)
        for start in range(0, len(wanted), MAX_PASSES):
            self._run(wanted[start : start + MAX_PASSES])

    @torch.no_grad()
    def _run(self, keys: Sequence[Key]) -> None:
        num_masks = self._num_depths - 1
        ids, hidden, positions = [], [], []
        for key in keys:
            text, first = self._texts[key.text], key.first_row
            masks = torch.full((num_masks,), self._mask_id)
            ids.append(torch.cat([text.tokens_N[first + 1 : key.newest + 1], masks]))
            hidden.append(torch.cat([self._hidden(key), self._shared_H.expand(num_masks, -1)]))
            positions.append(torch.arange(first, key.newest + num_masks))
        embeds_BRH = self._drafter.embed(torch.cat(ids)[None])
        attend = self._attend(keys, [len(one) for one in ids])
        normed_BRH, stream_BRH = self._drafter(embeds_BRH, torch.cat(hidden)[None], torch.cat(positions)[None], attend)
        ends_P = np.cumsum([len(one) for one in ids])
        drafting_PD = torch.from_numpy(ends_P[:, None] - self._num_depths + np.arange(self._num_depths))
        logits_PDV = self._drafter.logits(normed_BRH[0, drafting_PD])
        for key, rows_D, logits_DV in zip(keys, drafting_PD, logits_PDV, strict=True):
            self._made[key] = self._proposals(key, logits_DV)
            if not key.num_missing:
                self._streams[key] = stream_BRH[0, rows_D]

    def _attend(self, keys: Sequence[Key], num_rows: Sequence[int]) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        def attend(layer: int, q_BARD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
            outs = []
            parts = (x.split(list(num_rows), dim=2) for x in (q_BARD, k_BGRD, v_BGRD))
            for key, q_BATD, k_BGTD, v_BGTD in zip(keys, *parts, strict=True):
                text, first, num_new = self._texts[key.text], key.first_row, q_BATD.shape[2]
                k_BGUD = torch.cat([text.keys[layer][:, :, :first], k_BGTD], dim=2)
                v_BGUD = torch.cat([text.values[layer][:, :, :first], v_BGTD], dim=2)
                seen_TU = torch.ones(num_new, first + num_new, dtype=torch.bool).tril(first)
                outs.append(F.scaled_dot_product_attention(q_BATD, k_BGUD, v_BGUD, attn_mask=seen_TU, enable_gqa=True))
            return torch.cat(outs, dim=2)

        return attend

    def _proposals(self, key: Key, logits_DV: Tensor) -> Proposals:
        top = logits_DV.topk(self._num_columns)
        probs_DM = (top.values - logits_DV.logsumexp(-1, keepdim=True)).exp()
        ids_DM = self._drafter.target_ids[top.indices].numpy()
        true = self._texts[key.text].tokens_N[key.newest + 1 :][: self._num_depths].numpy()
        right = ids_DM[: len(true), 0] == true
        return Proposals(ids_DM.astype(np.int32), probs_DM.float().numpy(), int(right.cumprod().sum()))

    def _hidden(self, key: Key) -> Tensor:
        """Hidden states [T, H] of rows first_row .. newest - 1."""
        first = key.first_row
        if key.stand_in == "target":
            return self._texts[key.text].hidden_NH[first : key.newest]
        if key.stand_in == "shared":
            return self._shared_H.expand(key.num_missing, -1)
        return self._streams[key_of(key.text, first, 0)][: key.num_missing]


def key_of(text: int, newest: int, num_missing: int, stand_in: StandIn = "shared") -> Key:
    return Key(text, newest, num_missing, stand_in if num_missing else "target")
