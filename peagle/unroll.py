"""EAGLE-3 by its training-time test: the drafter is unrolled on its own hidden states (arXiv 2503.01840, section 3.2).

A chain starts at an anchor a (`peagle.cod`). Its row at step k, in the place of P-EAGLE's offset k, is what vLLM
computes when it drafts the chain's token k + 1 after the tokens up to a + 1:

    step    position    embedding of    hidden state                              proposes
    0       a           token a + 1     target's at a, through fc                 token a + 2
    k       a + k       token a + k + 1 drafter's own residual stream, step k-1   token a + k + 2

It sees what vLLM's KV cache holds by then: rows of step 0 at anchors <= a of its document, then its own chain's rows of
steps 1..k. All anchors take step k together, and gradients flow back through all steps.

Chains read the true tokens, where decoding reads those that it drafted. The two are the same as far as drafts are
right, and no draft behind a wrong one is ever used: rows, labels and accepted lengths of a walk need no more.

Attention of a step is that over the rows of step 0, the same causal mask at every step, joined by log-sum-exp with the
at most K - 1 keys of the own chain, one dot product each. So every step has the same static shapes and shares one block
mask; a mask over all steps' keys would grow with k and need a kernel a step. (A sliding window moves on with the steps:
one mask a step then.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from peagle import masks
from peagle.cod import Rows, chain_lengths
from peagle.config import DrafterConfig
from peagle.data import Batch
from peagle.losses import ChunkedLoss
from peagle.model import Attend, Drafter
from peagle.parallel import labelled_rows
from peagle.passes import Report, States, row_weights
from peagle.recipe import Recipe

#: What chains see of the rows of step 0: document ids [B, N] (plain torch, any device), or `block_masks` (compiled
#: functions, GPU).
Sight = Tensor | tuple[BlockMask, ...]

_TILE = 1024  # queries whose scores exist at once where no kernel avoids them


class UnrolledPass:
    """EAGLE-3: `num_depths` steps from every anchor. No row is dropped; `cod` of the recipe does not apply."""

    def __init__(self, recipe: Recipe, *, compiled: bool) -> None:
        """Raises ValueError for more than one segment (gradients tie the steps together), or too short a window."""
        if recipe.batch.num_segments > 1:
            raise ValueError(
                f"batch.num_segments = {recipe.batch.num_segments}: method eagle3 has no segments, write 1"
            )
        check_window(recipe.drafter.sliding_window, recipe.drafter.num_depths)
        self.recipe = recipe
        self.score = ChunkedLoss(recipe.loss.name, recipe.loss.chunk, compiled)
        self._block_mask = compiled and recipe.attention == "flex"
        self._draft_rows = torch.compile(unrolled_rows, dynamic=False, fullgraph=True) if compiled else unrolled_rows

    def __call__(self, drafter: Drafter, batch: Batch, states: States) -> Report:
        device, num_depths = batch.tokens_BN.device.type, drafter.config.num_depths
        chain_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_depths)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            sight = block_masks(batch.document_BN, drafter.config) if self._block_mask else batch.document_BN
            normed_BTH = self._draft_rows(drafter, batch.tokens_BN, states.aux_BNX, batch.position_BN, sight)
        index_R, label_R, offset_R = labelled_rows(all_rows(chain_BN, num_depths), chain_BN)
        weigh = row_weights(self.recipe.loss, label_R, offset_R, chain_BN.numel(), num_depths)
        labels = self.score.labels(states.last_BNS.flatten(0, 1), states.lm_head_VS, drafter.target_ids)
        assert drafter.lm_head is not None, "share_target or load_head first"
        scored = self.score(normed_BTH.flatten(0, 1)[index_R], drafter.lm_head.weight, labels, label_R, weigh)
        del labels  # their logits need not live beside the drafter's gradients
        scored.total.backward()
        return Report(scored.total.detach(), scored.correct_R, offset_R)


def check_window(window: int | None, num_depths: int) -> None:
    """Raises ValueError where the last steps of a chain would see no row of step 0."""
    if window is not None and window < num_depths:
        raise ValueError(f"sliding_window = {window} must be at least num_depths = {num_depths}")


def block_masks(document_BN: Tensor, config: DrafterConfig, tile: int = 128) -> tuple[BlockMask, ...]:
    """What each step sees of the N rows of step 0; one mask for all steps where they see the same."""
    rows, window = all_rows(document_BN, 1), config.sliding_window
    if window is None:
        return (masks.block(rows, document_BN, tile),)
    return tuple(masks.block(rows, document_BN, tile, window=window - step) for step in range(config.num_depths))


def all_rows(like_BN: Tensor, num_depths: int) -> Rows:
    """Rows of an unroll, T = K * N: all N anchors of step 0, then of step 1, and so on."""
    batch, num_tokens = like_BN.shape
    index_T = torch.arange(num_depths * num_tokens, device=like_BN.device).expand(batch, -1)
    return Rows(index_T % num_tokens, index_T // num_tokens, num_tokens)


def unrolled_rows(drafter: Drafter, tokens_BN: Tensor, aux_BNX: Tensor, position_BN: Tensor, sight: Sight) -> Tensor:
    """Normed hidden states [B, K * N, H] in the order of `all_rows`, each chain on the true tokens.

    aux_BNX: the target's tapped hidden states [B, N, C * S]. Near the end of a document,
    chains read tokens behind it; no loss looks at those rows, and no other row sees them.
    """
    attend, hidden_BNH = attend_chains(sight, drafter.config.sliding_window), drafter.reduce(aux_BNX)
    last = tokens_BN.shape[1] - 1
    anchor_N = torch.arange(last + 1, device=tokens_BN.device)
    normed = []
    for step in range(drafter.config.num_depths):
        embeds_BNH = drafter.embed(tokens_BN[:, (anchor_N + step + 1).clamp_max(last)])
        normed_BNH, hidden_BNH = drafter(embeds_BNH, hidden_BNH, position_BN + step, attend)
        normed.append(normed_BNH)
    return torch.cat(normed, dim=1)


def attend_chains(sight: Sight, window: int | None) -> Attend:
    """Attention of one unroll; it keeps the keys and values of the steps it has seen, and so serves one unroll only."""
    held: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(layer_index: int, q_BAND: Tensor, k_BGND: Tensor, v_BGND: Tensor) -> Tensor:
        steps = held.setdefault(layer_index, [])
        steps.append((k_BGND, v_BGND))
        (first_k, first_v), *own = steps
        if isinstance(sight, Tensor):
            left = None if window is None else window - len(own)
            return join(*_plain_attention(sight, left, q_BAND, first_k, first_v), q_BAND, own)
        mask = sight[min(len(own), len(sight) - 1)]
        out_BAND, aux = flex_attention(
            q_BAND, first_k, first_v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        assert aux.lse is not None
        return join(out_BAND, aux.lse, q_BAND, own)

    return attend


def join(out_BAND: Tensor, lse_BAN: Tensor, q_BAND: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over a first set of keys, its output and log-sum-exp given, and over one more key a query and step.

    own: keys and values [B, G, N, D] of the chain's steps 1..k; query n sees key n of each.
    """
    if not own:
        return out_BAND
    num_groups, scale = own[0][0].shape[1], q_BAND.shape[-1] ** -0.5
    q_BGMND = q_BAND.unflatten(1, (num_groups, -1)).to(lse_BAN.dtype)
    scores = [(q_BGMND * k_BGND[:, :, None]).sum(-1).flatten(1, 2) * scale for k_BGND, _ in own]
    first, *others = torch.stack([lse_BAN, *scores]).softmax(dim=0).unbind(0)
    joined_BAND = first[..., None] * out_BAND
    for weight_BAN, (_, v_BGND) in zip(others, own, strict=True):
        weight_BGMN = weight_BAN.unflatten(1, (num_groups, -1))
        joined_BAND = joined_BAND + (weight_BGMN[..., None] * v_BGND[:, :, None]).flatten(1, 2)
    return joined_BAND.to(out_BAND.dtype)


def _plain_attention(
    document_BN: Tensor, window: int | None, q_BAND: Tensor, k_BGND: Tensor, v_BGND: Tensor
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: output, and log-sum-exp [B, A, N] in float32 or wider.

    window: anchors that a query sees back, its own counted.
    """
    q_BGMND = q_BAND.unflatten(1, (k_BGND.shape[1], -1)) * q_BAND.shape[-1] ** -0.5
    num_tokens = q_BAND.shape[2]
    anchor_N = torch.arange(num_tokens, device=q_BAND.device)
    outs, sums = [], []
    for start in range(0, num_tokens, _TILE):
        end = min(start + _TILE, num_tokens)
        ahead = anchor_N[start:end, None] - anchor_N[:end]
        near = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
        visible = near & (document_BN[:, start:end, None] == document_BN[:, None, :end])
        scores = q_BGMND[..., start:end, :] @ k_BGND[:, :, None, :end].mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        sums.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1).to(v_BGND.dtype) @ v_BGND[:, :, None, :end])
    return torch.cat(outs, dim=-2).flatten(1, 2), torch.cat(sums, dim=-1).flatten(1, 2)
