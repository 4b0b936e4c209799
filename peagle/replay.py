"""How many drafts of a head a finished text would have accepted, at every anchor of it: the input of `peagle.walk`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from peagle.data import Batch, Conversations, PackedBatches, pack
from peagle.model import Drafter
from peagle.parallel import next_tokens, row_inputs
from peagle.target import Target
from peagle.unroll import attend_chains, check_window

PACK_TOKENS = 2048
"""Answers are packed into sequences of so many tokens; a longer one is a sequence of its own."""
LOGIT_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a head would have accepted: accepted_A of each answer walked (`peagle.walk`), and which answers these are.

    skipped: reason of each answer that is not, by its index. log_probs: [A, K_max] of each answer walked, the drafter's
    log-probability of its draft at each depth, wrong drafts and those behind them too; empty where not asked for.
    """

    accepted: list[np.ndarray]
    walked: list[int]
    skipped: dict[int, str]
    num_depths: int
    log_probs: list[np.ndarray] = dataclasses.field(default_factory=list)


@torch.no_grad()
def replay(
    drafter: Drafter,
    target: Target,
    data: Conversations,
    num_depths: int | None = None,
    max_tokens: int | None = None,
    with_log_probs: bool = False,
) -> Replay:
    """Drafts at every anchor of every answer.

    num_depths: K_max, by default the head's own. max_tokens: prompt and answer together; longer ones are skipped.
    with_log_probs: takes longer, for the logits of all depths are then needed at every anchor.
    Raises ValueError for a K_max that a P-EAGLE head was not trained for, and for log-probabilities of an EAGLE-3 head,
    whose drafts behind a wrong one depend on it.
    """
    trained = drafter.config.num_depths
    num_depths = num_depths or trained
    if drafter.config.ptd_token_id is not None and num_depths > trained:
        raise ValueError(f"K_max = {num_depths}: the head was trained to draft {trained} tokens in a pass")
    if drafter.config.ptd_token_id is None and with_log_probs:
        raise ValueError("with_log_probs: the head has no mask token (EAGLE-3); give a P-EAGLE head")
    check_window(drafter.config.sliding_window, num_depths)
    skipped = {}
    for index, (length, prompt) in enumerate(zip(data.lengths.tolist(), data.prompt_lengths.tolist(), strict=True)):
        if length - prompt < 2:
            skipped[index] = "fewer than 2 answer tokens"
        elif max_tokens is not None and length > max_tokens:
            skipped[index] = f"more than {max_tokens} tokens"
    walked = [index for index in range(len(data)) if index not in skipped]
    found: dict[int, np.ndarray] = {}
    log_probs: dict[int, np.ndarray] = {}
    for indices, batch in _sequences(data, walked):
        accepted, log_probs_NK = _accepted(drafter, target, batch.to(target.device), num_depths, with_log_probs)
        accepted_N = accepted.cpu().numpy().astype(np.uint8)
        ends = data.lengths[indices].cumsum()
        for index, end in zip(indices, ends.tolist(), strict=True):
            first = end - int(data.lengths[index]) + int(data.prompt_lengths[index]) - 1
            found[index] = accepted_N[first : end - 2]
            if log_probs_NK is not None:
                log_probs[index] = log_probs_NK[first : end - 2].cpu().numpy()
    by_answer = [log_probs[index] for index in walked] if with_log_probs else []
    return Replay([found[index] for index in walked], walked, skipped, num_depths, by_answer)


def _sequences(data: Conversations, indices: list[int]) -> Iterator[tuple[list[int], Batch]]:
    """Packed sequences without padding, and the conversations in them."""
    if not indices:
        return
    packer = PackedBatches(data, num_sequences=1, max_tokens=max(PACK_TOKENS, int(data.lengths.max())), seed=0)
    order = np.array(indices)
    order = order[np.argsort(-data.lengths[order], kind="stable")]
    is_long = data.lengths[order] > PACK_TOKENS
    groups = [[int(index)] for index in order[is_long]]
    for group in [*groups, *pack(data.lengths, PACK_TOKENS, order[~is_long])]:
        whole, num_tokens = packer.assemble([group]), int(data.lengths[group].sum())
        yield group, Batch(*(getattr(whole, field.name)[:, :num_tokens] for field in dataclasses.fields(Batch)))


def _accepted(
    drafter: Drafter, target: Target, batch: Batch, num_depths: int, with_log_probs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """How many leading drafts of each anchor [N] are the document's own tokens; log-probability of each draft [N, K].

    Depth after depth from all anchors at once, in the form of `peagle.unroll`: attention over the anchors' own rows is
    the same for every depth, and a mask over all rows, which grows with (N * K) ** 2, is never needed. A chain stops to
    count at its first wrong draft; until then its drafts are the true tokens, so EAGLE-3's rows can read those.
    """
    config, document_BN = drafter.config, batch.document_BN
    aux_BNX, _ = target.states(batch.tokens_BN, document_BN, batch.position_BN, config.aux_layer_ids, eager=True)
    last = batch.tokens_BN.shape[1] - 1
    anchor_N = torch.arange(last + 1, device=target.device)
    alive_N = batch.answer_BN[0].roll(-1)  # the first draft is compared with the answer's second token
    alive_N[last] = False
    accepted_N = torch.zeros_like(anchor_N)
    answer_R = alive_N.nonzero().squeeze(1)
    log_probs_NK = torch.zeros(last + 1, num_depths, device=target.device) if with_log_probs else None
    attend = attend_chains(document_BN, config.sliding_window)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        if config.ptd_token_id is None:
            embeds_BNH, hidden_BNH = drafter.embed(next_tokens(batch.tokens_BN)), drafter.reduce(aux_BNX)
        else:
            embeds_BMH, hidden_BMH = row_inputs(drafter, next_tokens(batch.tokens_BN), aux_BNX, 1)
            embeds_BNH, hidden_BNH = embeds_BMH[:, :-1], hidden_BMH[:, :-1]
        for depth in range(num_depths):
            normed_BNH, stream_BNH = drafter(embeds_BNH, hidden_BNH, batch.position_BN + depth, attend)
            label_N = (anchor_N + depth + 2).clamp_max(last)
            alive_N = alive_N & (anchor_N + depth + 2 <= last) & (document_BN[0, label_N] == document_BN[0])
            index_R = answer_R if with_log_probs else alive_N.nonzero().squeeze(1)
            if not len(index_R):
                break
            best = [_best(drafter, part_RH, with_log_probs) for part_RH in normed_BNH[0, index_R].split(LOGIT_ROWS)]
            drafts_R = drafter.target_ids[torch.cat([ids_R for ids_R, _ in best])]
            alive_N[index_R] &= drafts_R == batch.tokens_BN[0, label_N[index_R]]
            accepted_N += alive_N
            if log_probs_NK is not None:
                log_probs_NK[index_R, depth] = torch.cat([log_probs_R for _, log_probs_R in best])
            if config.ptd_token_id is None:
                embeds_BNH, hidden_BNH = drafter.embed(batch.tokens_BN[:, label_N]), stream_BNH
            else:
                embeds_BNH, hidden_BNH = (x[:, -1:].expand_as(embeds_BNH) for x in (embeds_BMH, hidden_BMH))
    return accepted_N, log_probs_NK


def _best(drafter: Drafter, normed_RH: torch.Tensor, with_log_probs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's likeliest token of the draft vocabulary [R], and its log-probability [R], zero where not asked for."""
    logits_RV = drafter.logits(normed_RH)
    ids_R = logits_RV.argmax(-1)
    if not with_log_probs:
        return ids_R, torch.zeros_like(ids_R, dtype=torch.float32)
    return ids_R, (logits_RV.gather(1, ids_R[:, None])[:, 0] - logits_RV.logsumexp(-1)).float()
