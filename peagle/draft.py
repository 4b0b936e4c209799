"""Drafting in plain torch, with a KV cache: K tokens by one forward pass (P-EAGLE) or one by each of K (EAGLE-3).

The engine's own drafter (vLLM's `eagle3`, with `parallel_drafting` for P-EAGLE) is the same function; this one is for
reading, for evaluation and for tests, one request at a time.

The rows of P-EAGLE's pass (arXiv 2602.01469, section 2). Tokens are counted from 0; n are committed and token n - 1 is
the newest, whose hidden state the target has not computed yet. As in EAGLE, tokens are shifted by one against hidden
states:

    depth    row at position    embedding of      hidden state        proposes
    -        p < n - 2          token p + 1       target's at p       (cached, or given now to enter the cache)
    1        n - 2              token n - 1       target's at n - 2   token n      (next-token prediction)
    2        n - 1              mask token        mask_hidden         token n + 1
    K        n + K - 3          mask token        mask_hidden         token n + K - 1

A head without a mask token (EAGLE-3) has the same rows up to depth 1, and then a pass of one row for each depth:

    d        n + d - 3          token n + d - 2   its own of depth d - 1       token n + d - 1

The token is the one drafted at depth d - 1, the hidden state what the drafter's layers left there: its residual stream.

Every row attends to all rows at its own and earlier positions. Rows of depths beyond 1 leave no trace: they are dropped
from the cache at the end, and real rows take their positions the next time. Rejected drafts never become rows of their
own.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.model import Drafter


class KVCache:
    """Keys and values of one request's rows, for each layer of the drafter: [1, G, num_rows, D], rotated already."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def num_rows(self) -> int:
        """Rows that every layer holds; row i stands at position i."""
        last = self._layers[-1]
        return 0 if last is None else last[0].shape[2]

    def append(self, layer_index: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add T rows to one layer; return all its keys and values, [1, G, num_rows + T, D] each."""
        if (old := self._layers[layer_index]) is not None:
            k_BGTD, v_BGTD = torch.cat([old[0], k_BGTD], dim=2), torch.cat([old[1], v_BGTD], dim=2)
        self._layers[layer_index] = k_BGTD, v_BGTD
        return k_BGTD, v_BGTD

    def truncate(self, num_rows: int) -> None:
        """Forget all rows from position num_rows on."""
        self._layers = [layer and (layer[0][:, :, :num_rows], layer[1][:, :, :num_rows]) for layer in self._layers]


@dataclasses.dataclass(frozen=True)
class Drafts:
    """Draft tokens of one pass: token_ids_K int64 in the target's vocabulary, logits_KV over the draft vocabulary."""

    token_ids_K: Tensor
    logits_KV: Tensor


class DraftSession:
    """Drafting for one request: the cache of its committed rows, and `propose`."""

    def __init__(self, drafter: Drafter) -> None:
        """drafter: with its tables; without `ptd_token_id` it drafts one token after another (EAGLE-3)."""
        self.drafter = drafter
        self.cache = KVCache(drafter.config.num_hidden_layers)

    @property
    def num_rows(self) -> int:
        """Committed rows in the cache: positions 0..num_rows - 1."""
        return self.cache.num_rows

    @torch.no_grad()
    def propose(self, next_token_ids_T: Tensor, aux_TX: Tensor, num_drafts: int) -> Drafts:
        """Add T rows and propose the tokens after them, greedily.

        next_token_ids_T: int, row i's token: the one *after* position num_rows + i; the last is the token that the
        target emitted last. aux_TX: [T, C * S], the target's auxiliary hidden states at positions num_rows ..
        num_rows + T - 1. num_drafts: K; heads are trained for `config.num_depths`, more is allowed, as in vLLM. A
        smaller K gives the first tokens of a larger one.
        """
        num_kept = self.num_rows + len(next_token_ids_T)
        parallel = self.drafter.config.is_parallel
        logits_KV = (self._in_one_pass if parallel else self._one_by_one)(next_token_ids_T, aux_TX, num_drafts)
        self.cache.truncate(num_kept)
        return Drafts(token_ids_K=self.drafter.target_ids[logits_KV.argmax(dim=-1)], logits_KV=logits_KV)

    def _in_one_pass(self, next_token_ids_T: Tensor, aux_TX: Tensor, num_drafts: int) -> Tensor:
        """P-EAGLE: [K, V_draft] logits of the last row given and of K - 1 mask rows."""
        num_masks = num_drafts - 1
        assert self.drafter.config.ptd_token_id is not None
        mask_ids = next_token_ids_T.new_full((num_masks,), self.drafter.config.ptd_token_id)
        mask_aux = self.drafter.mask_hidden.to(aux_TX.dtype).view(1, -1).expand(num_masks, -1)
        hidden_TH = self.drafter.project_inputs(torch.cat([aux_TX, mask_aux]))
        normed_TH, _ = self._forward(torch.cat([next_token_ids_T, mask_ids]), hidden_TH)
        return self.drafter.logits(normed_TH[-num_drafts:])

    def _one_by_one(self, next_token_ids_T: Tensor, aux_TX: Tensor, num_drafts: int) -> Tensor:
        """EAGLE-3: [K, V_draft] logits, each of a pass that reads the token of the one before."""
        ids_T, hidden_TH, logits = next_token_ids_T, self.drafter.project_inputs(aux_TX), []
        for _ in range(num_drafts):
            normed_TH, back_TH = self._forward(ids_T, hidden_TH)
            logits.append(self.drafter.logits(normed_TH[-1]))
            ids_T, hidden_TH = self.drafter.target_ids[logits[-1].argmax()][None], back_TH[-1:]
        return torch.stack(logits)

    def _forward(self, token_ids_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Rows at the next T positions, which enter the cache: normed [T, H], and what EAGLE-3 feeds back [T, H]."""
        positions_BT = torch.arange(self.num_rows, self.num_rows + len(token_ids_T), device=hidden_TH.device)[None]
        embeds_BTH = self.drafter.embed(token_ids_T[None])
        normed_BTH, back_BTH = self.drafter(embeds_BTH, hidden_TH[None], positions_BT, self._attend)
        return normed_BTH[0], back_BTH[0]

    def _attend(self, layer_index: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        """Attention of a pass's rows over the cache and over each other, by position."""
        k_BGUD, v_BGUD = self.cache.append(layer_index, k_BGTD, v_BGTD)
        num_new, num_all = q_BATD.shape[2], k_BGUD.shape[2]
        visible_TU = torch.ones(num_new, num_all, dtype=torch.bool, device=q_BATD.device).tril(num_all - num_new)
        return F.scaled_dot_product_attention(q_BATD, k_BGUD, v_BGUD, attn_mask=visible_TU, enable_gqa=True)
