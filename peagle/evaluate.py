"""Acceptance of a head on greedy answers of its target: AL and survival for every K from one pass (no decoding).

    python -m peagle.evaluate HEAD_DIR --target DIR --answers DIR [--out FILE.json]

All positions of an answer are drafted at once, on the true prefix; a walk then replays decoding: draft at an anchor,
accept the longest correct beginning of K tokens, go on after the bonus token. AL = answer tokens / steps (the bonus
token counts, as in the paper and in vLLM). Exact for greedy decoding but for two things: the last step of an answer is
not credited past its end, and the target's argmax in bfloat16 may differ between batch shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle import masks
from peagle.cod import chain_lengths, sample_rows
from peagle.data import Batch, Conversations, PackedBatches, pack
from peagle.model import Drafter
from peagle.parallel import draft_rows
from peagle.prompts import distinct_share
from peagle.target import Target


@dataclasses.dataclass
class Tally:
    """Decoding steps of one group of answers at one K."""

    num_steps: int = 0
    num_tokens: int = 0
    accepted_by_depth: list[int] = dataclasses.field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else float("nan")

    @property
    def survival(self) -> list[float]:
        """S_1..S_K: share of steps whose first i draft tokens were all accepted."""
        return [count / self.num_steps for count in self.accepted_by_depth] if self.num_steps else []


def walk(matches_AK: np.ndarray, max_draft_tokens: int, tally: Tally) -> None:
    """Replays greedy decoding of one answer at K = max_draft_tokens.

    matches_AK: bool, draft i of the a-th anchor equals the answer's token; anchors in order, the first drafts the
    answer's second token (the first comes from the prompt's own pass).
    """
    tally.accepted_by_depth = tally.accepted_by_depth or [0] * max_draft_tokens
    anchor = 0
    while anchor < len(matches_AK):
        wrong = np.flatnonzero(~matches_AK[anchor, :max_draft_tokens])
        accepted = int(wrong[0]) if len(wrong) else max_draft_tokens
        emitted = min(accepted + 1, len(matches_AK) - anchor)
        for depth in range(accepted):
            tally.accepted_by_depth[depth] += 1
        tally.num_steps, tally.num_tokens = tally.num_steps + 1, tally.num_tokens + emitted
        anchor += accepted + 1


@torch.no_grad()
def match_matrices(
    drafter: Drafter, target: Target, data: Conversations, max_tokens: int = 2048
) -> list[np.ndarray | None]:
    """Per conversation the bool matrix [answer tokens - 1, K] that `walk` reads; None where it exceeds max_tokens."""
    found: list[np.ndarray | None] = [None] * len(data)
    usable = np.flatnonzero(data.lengths <= max_tokens)
    longest = int(data.lengths[usable].max())
    packer = PackedBatches(data, num_sequences=1, max_tokens=longest, seed=0)
    for indices in pack(data.lengths, longest, usable):
        batch = packer.assemble([indices]).to(target.device)
        tokens_N, draft_NK = batch.tokens_BN[0], _drafts(drafter, target, batch)
        start = 0
        for index in indices:
            length, prompt = int(data.lengths[index]), int(data.prompt_lengths[index])
            anchors = torch.arange(start + prompt - 1, start + length - 2, device=target.device)
            labels = anchors[:, None] + 2 + torch.arange(draft_NK.shape[1], device=target.device)
            inside = labels < start + length
            matches = (draft_NK[anchors] == tokens_N[labels.clamp_max(len(tokens_N) - 1)]) & inside
            found[index] = matches.cpu().numpy()
            start += length
    return found


def _drafts(drafter: Drafter, target: Target, batch: Batch) -> torch.Tensor:
    """Draft tokens [N, K] of every anchor of one packed sequence, as ids of the target."""
    config = drafter.config
    aux_BNX, _ = target.states(batch.tokens_BN, batch.document_BN, batch.position_BN, config.aux_layer_ids)
    everywhere = torch.ones_like(batch.answer_BN)
    chain_BN = chain_lengths(batch.document_BN, everywhere, config.num_depths)
    rows = sample_rows(torch.full_like(chain_BN, config.num_depths), config.num_depths, 1.0)
    mask = masks.dense(rows, batch.document_BN)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        positions_BT = batch.position_BN.gather(1, rows.anchor_BT) + rows.offset_BT
        normed_BTH = draft_rows(drafter, batch.tokens_BN, aux_BNX, positions_BT, mask)
        best_T = torch.cat([drafter.logits(part).argmax(-1) for part in normed_BTH[0].split(4096)])
    draft_NK = best_T.new_zeros(rows.num_tokens, config.num_depths)
    draft_NK[rows.anchor_BT[0], rows.offset_BT[0]] = drafter.target_ids[best_T]
    return draft_NK


def group_names(data: Conversations, categories: list[str]) -> list[list[str]]:
    """Groups that each conversation counts in: all, its category, looping or not, and the category's looping or not."""
    names = []
    for (tokens, prompt), category in zip(data.documents(), categories, strict=True):
        kind = "looping" if distinct_share(tokens[prompt:].tolist()) < 0.5 else "non-looping"
        names.append(["all", category, kind, f"{category} {kind}"])
    return names


def evaluate(drafter: Drafter, target: Target, data: Conversations, categories: list[str]) -> dict[str, Any]:
    """AL for K = 1..K_max, and survival at K_max, by group.

    categories: one per conversation. Returns {group: {"num_answers", "num_tokens", "acceptance_length": {K: AL},
    "survival": [...]}}.
    """
    num_depths = drafter.config.num_depths
    tallies: dict[str, dict[int, Tally]] = {}
    answers: dict[str, int] = {}
    for matches, groups in zip(match_matrices(drafter, target, data), group_names(data, categories), strict=True):
        if matches is None or not len(matches):
            continue
        for group in groups:
            answers[group] = answers.get(group, 0) + 1
            for k in range(1, num_depths + 1):
                walk(matches, k, tallies.setdefault(group, {}).setdefault(k, Tally()))
    return {
        group: {
            "num_answers": answers[group],
            "num_tokens": by_k[num_depths].num_tokens,
            "acceptance_length": {str(k): round(tally.acceptance_length, 4) for k, tally in by_k.items()},
            "survival": [round(share, 4) for share in by_k[num_depths].survival],
        }
        for group, by_k in sorted(tallies.items())
    }


def load_answers(folder: str | Path, max_per_category: int | None = None) -> tuple[Conversations, list[str]]:
    """Answers written by `peagle.vllm.generate --prompts`, and their categories."""
    data = Conversations.load(folder)
    categories = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))["categories"]
    if len(categories) != len(data):
        raise ValueError(f"{folder}: manifest.json names {len(categories)} categories for {len(data)} conversations")
    if max_per_category is None:
        return data, categories
    seen: dict[str, int] = {}
    chosen = []
    for index, category in enumerate(categories):
        seen[category] = seen.get(category, 0) + 1
        if seen[category] <= max_per_category:
            chosen.append(index)
    return data.select(chosen), [categories[index] for index in chosen]


def main() -> None:
    from peagle.checkpoint import build_drafter, load_head
    from peagle.provenance import conditions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--target", required=True, help="directory of the target's checkpoint")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = Target(args.target, device=device, dtype=dtype)
    drafter = build_drafter(
        *load_head(args.head), embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS, dtype=dtype, device=device
    )
    result = {"made": conditions(), "groups": evaluate(drafter, target, *load_answers(args.answers))}
    for group, figures in result["groups"].items():
        lengths = "  ".join(f"K={k} {value:.2f}" for k, value in figures["acceptance_length"].items())
        print(f"{group:32s} n={figures['num_answers']:<4d} {lengths}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
