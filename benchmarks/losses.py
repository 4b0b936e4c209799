"""Time and peak memory of the losses over large vocabularies: whole logits under autograd against chunks.

    python -m benchmarks.losses --out FILE [--device cuda] [--loss soft] [--sizes 49152x576 201088x2880]

    plain      logits of all rows, of drafter and target, and autograd
    chunked    `ChunkedLoss` in eager torch, the target's logits held whole
    compiled   the same with compiled kernels, as the trainer runs it
    in_chunks  compiled, the target's logits made in chunks too, as for batches that are too large to hold them

Each way makes the labels from the target's last hidden states, the loss, and the gradient of the drafter's, of the rows
that one sequence of `--tokens` has under COD (K = 8, r = 0.8). Numbers are random; on a GPU in bfloat16. Peak memory is
what a way adds to its inputs. Every gradient is compared with that of a few rows by the plain way: where they differ,
nothing is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.provenance import conditions
from peagle.train.cod import chain_lengths, labelled_rows, sample_rows
from peagle.train.losses import KERNELS, ChunkedLoss, plain_losses

WHOLE = 1 << 50  # bytes: always
NUM_CHECKED = 256
MAX_ERROR = 0.05  # of the norm; bfloat16 rounds by 0.004, and a wrong row or sign is worth 0.1 or more


@dataclasses.dataclass(frozen=True)
class Inputs:
    hidden_RH: Tensor
    last_NH: Tensor
    lm_head_VH: Tensor
    label_R: Tensor
    weight_R: Tensor

    @classmethod
    def draw(cls, num_tokens: int, vocabulary: int, width: int, device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        document_1N = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
        chain_1N = chain_lengths(document_1N, document_1N == 0, 8)
        _, label_R, _ = labelled_rows(sample_rows(chain_1N, 8, 0.8, generator=generator), chain_1N)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        last_NH = normal(num_tokens, width)
        hidden_RH = last_NH[label_R] + normal(len(label_R), width)
        # Logits of standard deviation 4, about that of a language model.
        lm_head_VH = normal(vocabulary, width) * (4 * width**-0.5)
        weight_R = torch.full((len(label_R),), 1 / len(label_R), device=device)
        return cls(hidden_RH, last_NH, lm_head_VH, label_R, weight_R)


def plain(name: str, x: Inputs, hidden_RH: Tensor) -> Tensor:
    target_NV = (x.last_NH @ x.lm_head_VH.T).float()
    losses_R = plain_losses(
        name, (hidden_RH @ x.lm_head_VH.T).float(), target_NV[x.label_R], target_NV.argmax(-1)[x.label_R]
    )
    return (losses_R * x.weight_R).sum()


def chunked(loss: ChunkedLoss) -> Callable[[Inputs, Tensor], Tensor]:
    def way(x: Inputs, hidden_RH: Tensor) -> Tensor:
        return loss(hidden_RH, x.lm_head_VH, loss.labels(x.last_NH, x.lm_head_VH), x.label_R, x.weight_R).total

    return way


def gradient(way: Callable[[Inputs, Tensor], Tensor], x: Inputs) -> Tensor:
    hidden_RH = x.hidden_RH.detach().requires_grad_()
    way(x, hidden_RH).backward()
    assert hidden_RH.grad is not None
    return hidden_RH.grad


def measure(way: Callable[[Inputs, Tensor], Tensor], x: Inputs, expected_RH: Tensor, repeats: int) -> dict[str, Any]:
    """Seconds and peak bytes of one call. Raises ValueError when its gradient is wrong."""
    cuda = x.hidden_RH.is_cuda
    try:
        found = gradient(way, x)[:NUM_CHECKED].float()  # compiles
        error = float((found - expected_RH).norm() / expected_RH.norm())
        if not error <= MAX_ERROR:
            raise ValueError(f"gradient is off by {error:.3f} of its norm")
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        start = time.perf_counter()
        for _ in range(repeats):
            gradient(way, x)
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / repeats
        peak = torch.cuda.max_memory_allocated() - before if cuda else None
        return {"seconds": round(seconds, 5), "peak_bytes": peak, "gradient_error": round(error, 5)}
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    finally:
        if cuda:
            torch.cuda.empty_cache()


def reference(name: str, x: Inputs) -> Tensor:
    """Gradient of the first rows by the plain way, [NUM_CHECKED, H] float32."""
    few = slice(NUM_CHECKED)
    token_U, index_R = x.label_R[few].unique(return_inverse=True)
    part = Inputs(x.hidden_RH[few], x.last_NH[token_U], x.lm_head_VH, index_R, x.weight_R[few])
    return gradient(lambda x, hidden_RH: plain(name, x, hidden_RH), part).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["49152x576", "201088x2880"], help="vocabulary x hidden width")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--loss", choices=tuple(KERNELS), default="soft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    compiled = options.device == "cuda"
    ways = {
        "plain": lambda x, hidden_RH: plain(options.loss, x, hidden_RH),
        "chunked": chunked(ChunkedLoss(options.loss, options.chunk, max_whole_bytes=WHOLE)),
        "compiled": chunked(ChunkedLoss(options.loss, options.chunk, compiled, max_whole_bytes=WHOLE)),
        "in_chunks": chunked(ChunkedLoss(options.loss, options.chunk, compiled, max_whole_bytes=0)),
    }
    found = []
    for size in options.sizes:
        vocabulary, width = (int(number) for number in size.split("x"))
        x = Inputs.draw(options.tokens, vocabulary, width, options.device)
        expected_RH = reference(options.loss, x)
        for name, way in ways.items():
            record = {"vocabulary": vocabulary, "width": width, "num_rows": len(x.label_R), "way": name}
            record |= measure(way, x, expected_RH, options.repeats)
            found.append(record)
            print(json.dumps(record))
    settings = {name: getattr(options, name) for name in ("tokens", "chunk", "loss", "repeats", "device")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"conditions": conditions(), "settings": settings, "found": found}, indent=2)
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
