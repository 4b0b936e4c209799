"""Writes what every token of recorded answers would accept of a head's drafts, for `benchmarks.simulate_depths`.

    python -m benchmarks.traces HEAD DIR [DIR2 ...] --target DIR --out FILE.npz [--chances]

DIR: answers of the target, as for `peagle evaluate`. Any policy of K can be replayed from the file: `peagle.evaluate`
says why. With `--chances` also the probability that a P-EAGLE head gives each of its drafts, for policies that look at
it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.checkpoint import build_drafter, load_head
from peagle.evaluate import LOGIT_ROWS, answer_anchors, load_answers, replay, sequences
from peagle.model import Drafter
from peagle.train.cod import next_tokens, row_inputs
from peagle.train.data import Conversations
from peagle.train.passes import ChainAttention
from peagle.train.target import Target


@torch.no_grad()
def chances(drafter: Drafter, target: Target, data: Conversations, walked: list[int]) -> list[np.ndarray]:
    """Of each answer of `walked`, [anchors, K]: probability of each draft by the P-EAGLE head that proposes it."""
    found: dict[int, np.ndarray] = {}
    for indices, batch in sequences(data, walked):
        batch = batch.to(target.device)
        aux_BNX, _ = target.states(batch.tokens_BN, batch.position_BN, drafter.config.aux_layer_ids, eager=True)
        attend = ChainAttention(batch.document_BN)
        embeds_BMH, hidden_BMH = row_inputs(drafter, next_tokens(batch.tokens_BN), aux_BNX, 1)
        embeds_BRH, hidden_BRH = embeds_BMH[:, :-1], hidden_BMH[:, :-1]
        is_answer_N = batch.answer_BN[0].roll(-1)
        anchor_R = torch.arange(len(is_answer_N), device=target.device)
        prob_NK = torch.zeros(len(is_answer_N), drafter.config.num_depths, device=target.device)
        for depth in range(drafter.config.num_depths):
            normed_BRH, _ = drafter(embeds_BRH, hidden_BRH, batch.position_BN[:, anchor_R] + depth, attend)
            index_R = is_answer_N[anchor_R].nonzero().squeeze(1)
            parts = normed_BRH[0, index_R].split(LOGIT_ROWS)
            anchor_R = anchor_R[index_R]
            prob_NK[anchor_R, depth] = torch.cat([drafter.logits(part).float().softmax(-1).amax(-1) for part in parts])
            attend.keep(index_R, anchor_R)
            embeds_BRH, hidden_BRH = (x[:, -1:].expand(-1, len(anchor_R), -1) for x in (embeds_BMH, hidden_BMH))
        found |= {index: prob_NK[anchors].cpu().numpy() for index, anchors in answer_anchors(data, indices).items()}
    return [found[index] for index in walked]


def save_traces(
    path: Any,
    accepted: Sequence[np.ndarray],
    answers: Mapping[str, Any],
    num_depths: int,
    chances: Sequence[np.ndarray] = (),
) -> None:
    """accepted: `Replay.accepted`. answers: further arrays, one entry an answer (as `category`).

    Stored: `accepted` (uint8, all answers end to end), `num_anchors` (of each answer), `num_depths`, and, where they
    are given, `chances` [all anchors, K] in float16.
    """
    arrays = {name: np.asarray(values) for name, values in answers.items()}
    arrays["accepted"] = np.concatenate([*accepted, np.zeros(0)]).astype(np.uint8)
    arrays["num_anchors"] = np.array([len(accepted_N) for accepted_N in accepted], np.int32)
    arrays["num_depths"] = np.array(num_depths)
    if chances:
        arrays["chances"] = np.concatenate(chances).astype(np.float16)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--target", required=True, help="directory of the target's checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chances", action="store_true", help="of a P-EAGLE head")
    parser.add_argument("--max-per-category", type=int, help="answers of each category and folder; default: all")
    args = parser.parse_args(arguments)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    target = Target(args.target, device=device, dtype=dtype)
    drafter = build_drafter(
        *load_head(args.head), embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS, dtype=dtype, device=device
    )
    if args.chances and drafter.config.ptd_token_id is None:
        parser.error(f"--chances: {args.head} is an EAGLE-3 head, which drafts behind its own drafts")
    accepted: list[np.ndarray] = []
    sure: list[np.ndarray] = []
    about: dict[str, list[Any]] = {"category": [], "temperature": []}
    for folder in args.answers:
        loaded = load_answers(folder, args.max_per_category)
        found = replay(drafter, target, loaded.data)
        accepted += found.accepted
        if args.chances:
            sure += chances(drafter, target, loaded.data, found.walked)
        about["category"] += [loaded.categories[index] for index in found.walked]
        about["temperature"] += [loaded.temperature] * len(found.walked)
    save_traces(args.out, accepted, about, drafter.config.num_depths, sure)


if __name__ == "__main__":
    main()
