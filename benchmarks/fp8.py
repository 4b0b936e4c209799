"""AL of a head whose products are in FP8, as vLLM makes them with `quantization: fp8`, over the head as it is.

    peagle generate RECIPE target=DIR --prompts prompts/chat.jsonl --out ANSWERS
    python -m benchmarks.fp8 HEAD ANSWERS --target DIR [--out FILE]

The products of `fc` and of the layers are computed here from rounded operands: weights to E4M3 with one scale for each
matrix that vLLM multiplies by (q, k and v are one, gate and up another), inputs to E4M3 with one scale a row. Attention
and the output matrix stay as they are, as in vLLM. Acceptance is that of `peagle evaluate`; on a CPU in float32. In
FILE `groups` are the head's figures with FP8, `against` those without.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from peagle.checkpoint import build_drafter, load_head
from peagle.evaluate import evaluate_folder, load_answers, table
from peagle.model import Drafter
from peagle.provenance import conditions
from peagle.train.recipe import target_checkpoint
from peagle.train.target import Target

E4M3 = torch.float8_e4m3fn
MAX_E4M3 = torch.finfo(E4M3).max


def rounded(x: Tensor, largest: Tensor) -> Tensor:
    """x with E4M3's precision, scaled so that `largest` (broadcast to x) is the format's greatest number."""
    scale = (largest / MAX_E4M3).clamp_min(1e-12)
    return (x / scale).to(E4M3).to(x.dtype) * scale


def joined_matrices(drafter: Drafter) -> list[list[nn.Linear]]:
    """The matrices that are quantised, those with one scale together."""
    found: list[list[nn.Linear]] = [[drafter.fc]]
    for layer in drafter.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        found += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    return found


@torch.no_grad()
def to_fp8(drafter: Drafter) -> Drafter:
    """Make the drafter's products those of FP8 operands, in place."""
    for matrices in joined_matrices(drafter):
        largest = torch.stack([matrix.weight.abs().max() for matrix in matrices]).max()
        for matrix in matrices:
            matrix.weight.copy_(rounded(matrix.weight, largest))
            matrix.register_forward_pre_hook(lambda _, given: rounded(given[0], given[0].abs().amax(-1, keepdim=True)))
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("answers", type=Path, help="folder that `peagle generate --prompts` wrote")
    parser.add_argument("--target", required=True, help="an embedded target's name or a directory")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = Target(target_checkpoint(options.target), device="cpu", dtype=torch.float32)
    config, tensors = load_head(options.head)

    def drafter() -> Drafter:
        return build_drafter(config, dict(tensors), embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)

    result = evaluate_folder(
        [to_fp8(drafter()), drafter()], target, load_answers(options.answers), config.num_depths, None
    )
    print(table(result))
    if options.out:
        found = {"conditions": conditions(), "head": str(options.head), "answers": str(options.answers), **result}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
