"""QK-clip (MuonClip, arXiv 2507.20534, section 2.1): attention scores kept from growing without bound.

Query and key matrices grow under Muon, and nothing in the loss holds them back. Scores in the hundreds make the softmax
a hard choice of one key, which passes no gradient, and bfloat16 rounds them by whole units. The heads of SmolLM2-135M,
trained without the clip, have scores above a thousand in their first layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.model import Drafter, Layer
from peagle.train.cod import next_tokens, row_inputs
from peagle.train.data import Batch

#: Steps from one clip to the next: each takes a pass over a few hundred tokens.
EVERY_STEPS = 4


@torch.no_grad()
def attention_scores(drafter: Drafter, batch: Batch, aux_BNX: Tensor, max_tokens: int = 512) -> Tensor:
    """Greatest absolute score q k / sqrt(D) of each layer and head [L, A], float32.

    One draft is looked at: the first `max_tokens` of the batch's first sequence, and for P-EAGLE the K - 1 mask tokens
    behind them. aux_BNX: the target's auxiliary hidden states of the batch. Padding does not count.
    """
    num_tokens = min(max_tokens, batch.tokens_BN.shape[1])
    tokens_BN, document_N = batch.tokens_BN[:1, :num_tokens], batch.document_BN[0, :num_tokens]
    aux_BNX, position_N = aux_BNX[:1, :num_tokens], batch.position_BN[0, :num_tokens]
    device, num_masks = tokens_BN.device, drafter.config.num_depths - 1 if drafter.config.is_parallel else 0
    found: list[Tensor] = []

    def attend(_layer: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        q_GMTD, k_GTD = q_BATD[0].float().unflatten(0, (k_BGTD.shape[1], -1)), k_BGTD[0].float()
        scores_ATT = (q_GMTD @ k_GTD[:, None].mT).flatten(0, 1) * q_BATD.shape[-1] ** -0.5
        found.append(scores_ATT.abs().masked_fill(~counted_TT, 0).amax((1, 2)))
        return F.scaled_dot_product_attention(q_BATD, k_BGTD, v_BGTD, attn_mask=seen_TT, enable_gqa=True)

    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        embeds_BTH, hidden_BTH = row_inputs(drafter, next_tokens(tokens_BN), aux_BNX, num_masks)
        ahead = torch.arange(1, num_masks + 1, device=device)
        position_T = torch.cat([position_N, position_N[-1] + ahead])
        document_T = torch.cat([document_N, document_N[-1:].expand(num_masks)])
        seen_TT = (document_T[:, None] == document_T).tril()
        counted_TT = seen_TT & (document_T >= 0)
        drafter(embeds_BTH, hidden_BTH, position_T[None], attend)
    return torch.stack(found)


@torch.no_grad()
def clip_attention(drafter: Drafter, scores_LA: Tensor, max_score: float) -> None:
    """Scales query and key matrices, in place, so that scores above `max_score` shrink to it.

    The queries that share a key shrink together, each matrix by the square root of the ratio. Not for a head that
    normalises queries and keys (Qwen 3's layers): the size of these matrices does not reach its scores.
    """
    config = drafter.config
    for layer, scores_A in zip(drafter.layers, scores_LA, strict=True):
        assert isinstance(layer, Layer)
        top_G = scores_A.view(config.num_key_value_heads, -1).amax(1)
        scale_G = (max_score / top_G.clamp_min(max_score)).sqrt()
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            for parameter in projection.parameters():
                parameter.unflatten(0, (config.num_key_value_heads, -1)).mul_(
                    scale_G.view(-1, *[1] * parameter.ndim).to(parameter.dtype)
                )
