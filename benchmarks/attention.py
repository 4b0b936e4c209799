"""How sharply a head's layers attend: greatest scores, and entropy over the keys, of each layer and attention head.

    python -m benchmarks.attention HEAD... --target DIR --answers DIR [--out FILE.json]

answers: a folder of conversations (`peagle generate`), of which the first sequence of up to 2,048 tokens is drafted
after. On a CPU in float32. An entropy near 0 nats is a choice of one key, through which no gradient passes
(`peagle.train.qk_clip`).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoint import build_drafter, load_head
from peagle.provenance import conditions
from peagle.train.data import Batch, Conversations, PackedBatches
from peagle.train.qk_clip import attention_scores, look_at_scores
from peagle.train.target import Target


def entropies(scores_ATT: Tensor, counted_TT: Tensor) -> Tensor:
    """Mean entropy [A], in nats, of the rows that see 32 keys or more."""
    many_T = counted_TT.sum(1) >= 32
    log_p_ART = scores_ATT.masked_fill(~counted_TT, -torch.inf)[:, many_T].log_softmax(-1)
    return -(log_p_ART.exp() * log_p_ART).nan_to_num().sum(-1).mean(-1)


def figures(head_dir: Path, target: Target, batch: Batch) -> dict[str, Any]:
    config, tensors = load_head(head_dir)
    aux_BNX, _ = target.states(batch.tokens_BN, batch.document_BN, batch.position_BN, config.aux_layer_ids)
    drafter = build_drafter(
        config,
        tensors,
        embed_VH=target.embed_VS,
        lm_head_VH=target.lm_head_VS,
        dtype=target.model.dtype,
        device=target.device,
    )
    found = {
        "greatest_scores": attention_scores(drafter, batch, aux_BNX),
        "entropies": look_at_scores(drafter, batch, aux_BNX, entropies),
    }
    return {name: [[round(one, 3) for one in layer] for layer in values.tolist()] for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path)
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--answers", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = Target(args.target, device="cpu", dtype=torch.float32)
    batch = next(PackedBatches(Conversations.load(args.answers), num_sequences=1, max_tokens=2048, seed=0)())
    heads = {}
    with torch.no_grad():
        for head_dir in args.heads:
            heads[head_dir.name] = figures(head_dir, target, batch)
            for layer, values in enumerate(heads[head_dir.name]["greatest_scores"]):
                means = sum(heads[head_dir.name]["entropies"][layer]) / len(values)
                sys.stdout.write(f"{head_dir.name} layer {layer}: scores to {max(values):.0f}, entropy {means:.2f}\n")
    if args.out is not None:
        report = {"made": conditions(), "num_tokens": int(batch.tokens_BN.numel()), "heads": heads}
        args.out.write_text(json.dumps(report) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
