"""Memory and time of one long sequence in S segments, as published and with kept keys and values.

    python -m benchmarks.partition --tokens 8192 20480 --segments 1 2 4 8 --method kept recomputed --out FILE.json

One pass is forward and backward of one sequence (one document, every token worth a loss) with soft labels over the
whole vocabulary, whose logits exist `--chunk` rows at a time, the target's too. Hidden states, tokens and weights are
random. On a GPU: float32 weights, bfloat16 autocast, FlexAttention, compiled for changing shapes so that all cases
share their kernels; on a CPU: float32, dense masks, no peak memory. With S = 1 there is nothing to choose: one case
stands for both methods. Case by case:

    peak_gib          most memory that tensors took at a time, all told
    above_gib         of it, above weights, gradients and inputs (`held_gib`)
    seconds           median pass after the first two, and in `first_seconds` the first one, compilation included
    rows_computed     rows that passed with gradients; `num_rows` is T
    difference        norm of the gradient's difference from that of S = 1, relative to its norm

A case that runs out of memory is recorded as such. `check` gives the same differences uncompiled, at a length where
float32 and dense masks are cheap, S = 4, and beside them what bfloat16 alone does to the gradient of S = 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.algorithm_1 import PublishedPartition, cut_by_position
from benchmarks.common import markdown
from peagle.config import DrafterConfig
from peagle.model import Drafter, initialize
from peagle.provenance import conditions
from peagle.train.cod import CodRows, chain_lengths, label_rows, sample_rows
from peagle.train.losses import ChunkedLoss
from peagle.train.partition import LossOf, PackedSequence, Partition, cut_by_rows

GIB = 1 << 30
METHODS: dict[str, type[Partition]] = {"kept": Partition, "recomputed": PublishedPartition}
WHOLE = "recomputed"  # which with one segment is the whole pass
CHECK_SEGMENTS = 4
COLUMNS = ("tokens", "S", "method", "peak GiB", "above GiB", "seconds", "tokens/s", "rows computed", "difference")

#: Shapes of targets that the drafter's layers take: hidden, intermediate, heads, key-value heads, vocabulary.
SHAPES = {
    "tiny": (64, 96, 4, 2, 320),
    "smollm2": (576, 1536, 9, 3, 49152),
    # The intermediate size is what makes 1.8 B parameters of its published head: 4 layers, both tables of its own.
    "gpt-oss-20b": (2880, 14336, 64, 8, 201088),
    "8b": (4096, 14336, 32, 8, 128256),
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """tokens_1N; aux_1NX: tapped hidden states; last_1NS: input of the output matrix; embed and lm_head [V, H]."""

    tokens_1N: Tensor
    aux_1NX: Tensor
    last_1NS: Tensor
    embed_VH: Tensor
    lm_head_VH: Tensor

    @classmethod
    def random(cls, shape: str, num_tokens: int, device: str) -> Inputs:
        hidden, _, _, _, vocabulary = SHAPES[shape]
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def normal(*size: int, std: float = 1.0) -> Tensor:
            return (torch.randn(size, generator=generator, device=device) * std).to(dtype)

        return cls(
            torch.randint(vocabulary, (1, num_tokens), generator=generator, device=device),
            normal(1, num_tokens, 3 * hidden),
            normal(1, num_tokens, hidden),
            normal(vocabulary, hidden, std=0.02),
            normal(vocabulary, hidden, std=0.02),
        )


class Problem:
    """A drafter of one shape, and a sequence for it with labels. Gradients are allocated from the start."""

    def __init__(self, shape: str, num_layers: int, device: str) -> None:
        hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[shape]
        config = DrafterConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=64 if shape == "gpt-oss-20b" else hidden // heads,
            vocab_size=vocabulary,
            draft_vocab_size=vocabulary,
            target_hidden_size=hidden,
            aux_layer_ids=(2, 12, 21),
            ptd_token_id=vocabulary - 1,
            fc_norm=True,
        )
        self.shape, self.device = shape, device
        self.drafter = Drafter(config).to(device)
        for parameter in self.drafter.trainable().values():
            parameter.grad = torch.zeros_like(parameter)
        self._started = False

    def load(self, num_tokens: int, num_depths: int, ratio: float, dtype: torch.dtype | None = None) -> None:
        """Draws the inputs of one length, in bfloat16 on a GPU unless asked for otherwise."""
        inputs = Inputs.random(self.shape, num_tokens, self.device)
        if dtype is not None:
            floats = (inputs.aux_1NX, inputs.last_1NS, inputs.embed_VH, inputs.lm_head_VH)
            inputs = Inputs(inputs.tokens_1N, *(value.to(dtype) for value in floats))
        self.inputs = inputs
        random = torch.Generator(self.device).manual_seed(0)
        self.drafter.share_target(inputs.embed_VH, inputs.lm_head_VH)
        if not self._started:
            initialize(self.drafter, inputs.aux_1NX[0], random)
            self._started = True
        document_1N = torch.zeros_like(inputs.tokens_1N)
        chain_1N = chain_lengths(document_1N, document_1N == 0, num_depths)
        rows = sample_rows(chain_1N, num_depths, ratio, generator=random)
        self.sequence = PackedSequence(inputs.tokens_1N, document_1N, inputs.aux_1NX, rows, rows.position_BT)
        self._useful_T, self._label_T, _ = label_rows(rows, chain_1N)

    def loss_of(self, score: ChunkedLoss) -> LossOf:
        """Mean soft cross-entropy over the useful rows, by the rows of one segment after another."""
        lm_head_VH = self.inputs.lm_head_VH
        labels = score.labels(self.inputs.last_1NS[0], lm_head_VH)
        share = 1 / self._useful_T.sum()

        def loss_of(normed_RH: Tensor, index_R: Tensor) -> Tensor:
            useful_R = self._useful_T[index_R]
            label_R = self._label_T[index_R[useful_R]]
            return score(normed_RH[useful_R], lm_head_VH, labels, label_R, share.expand(len(label_R))).total

        return loss_of

    def run(self, partition: Partition, score: ChunkedLoss) -> None:
        """Gradients of one pass."""
        partition.backward(self.drafter, self.sequence, self.loss_of(score))

    def clear(self) -> None:
        for parameter in self.drafter.trainable().values():
            assert parameter.grad is not None
            parameter.grad.zero_()

    def gradient(self) -> dict[str, Tensor]:
        """A copy on the host, from where it comes back fast."""
        copies = {}
        for name, value in self._owned():
            assert value.grad is not None
            copies[name] = torch.empty_like(value.grad, device="cpu", pin_memory=value.is_cuda).copy_(value.grad)
        return copies

    def difference(self, wanted: dict[str, Tensor]) -> float:
        """Norm of the gradient's difference, relative to that of `wanted`."""
        squares = torch.zeros(2, dtype=torch.float64)
        for name, value in self._owned():
            assert value.grad is not None
            want = wanted[name].to(self.device)
            squares += torch.stack([(value.grad - want).square().sum(), want.square().sum()]).cpu()
        return float((squares[0] / squares[1]).sqrt())

    def _owned(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.drafter.trainable().items())


def timed(run: Callable[[], None], device: str) -> float:
    """Seconds of one call, until the device is done with it."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(problem: Problem, partition: Partition, score: ChunkedLoss, repeats: int) -> dict[str, Any]:
    """Memory and time of one case; the gradient of the last pass stays."""
    on_gpu = problem.device == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
    seconds = []
    try:
        for i in range(2 + repeats):
            problem.clear()
            if on_gpu:
                torch.cuda.synchronize()
                if i == 2:  # compilation and the choice of kernels hold memory of their own
                    torch.cuda.reset_peak_memory_stats()
            seconds.append(timed(lambda: problem.run(partition, score), problem.device))
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    found: dict[str, Any] = {"first_seconds": round(seconds[0], 3), "seconds": statistics.median(seconds[2:])}
    found["tokens_per_s"] = problem.sequence.rows.num_tokens / found["seconds"]
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
        found |= {"peak_gib": peak / GIB, "held_gib": held / GIB, "above_gib": (peak - held) / GIB}
    return found


def rows_computed(rows: CodRows, method: str, num_segments: int) -> int:
    """Rows that pass through the drafter with gradients, without those that fill up a tile."""
    cut = cut_by_rows if method == "kept" else cut_by_position
    prefix = 0 if method == "kept" else 1
    return sum(segment.num_rows + prefix * segment.start for segment in cut(rows, num_segments))


def measure_lengths(problem: Problem, args: argparse.Namespace, on_case: Callable[[dict[str, Any]], None]) -> None:
    """Every case of every length, S = 1 first."""
    on_gpu = problem.device == "cuda"
    score = ChunkedLoss("soft", args.chunk, compiled=on_gpu)
    partitions = {name: kind(1, block_mask=on_gpu, compiled=on_gpu, dynamic=True) for name, kind in METHODS.items()}
    for num_tokens in args.tokens:
        problem.load(num_tokens, args.depths, args.ratio)
        rows = problem.sequence.rows
        whole: dict[str, Tensor] = {}
        cases = [(1, WHOLE)] if 1 in args.segments else []
        cases += [(s, method) for method in args.method for s in sorted(args.segments) if s > 1]
        for num_segments, method in cases:
            partition = partitions[method]
            partition.num_segments = num_segments
            case: dict[str, Any] = {"num_tokens": num_tokens, "num_segments": num_segments}
            case["method"] = "whole" if num_segments == 1 else method
            case |= {"num_rows": rows.anchor_BT.shape[1], "rows_computed": rows_computed(rows, method, num_segments)}
            case |= measure(problem, partition, score, args.repeats)
            if num_segments == 1 and "seconds" in case:
                whole = problem.gradient()
            elif whole and "seconds" in case:
                case["difference"] = problem.difference(whole)
            on_case(case)


def check(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Differences of gradients in plain torch: S = 4 from S = 1 in float32, and everything in bfloat16 from that."""
    problem.load(args.check_tokens, args.depths, args.ratio, torch.float32)
    score = ChunkedLoss("soft", args.chunk)
    found: dict[str, Any] = {"num_tokens": args.check_tokens, "num_segments": CHECK_SEGMENTS}
    whole: dict[str, Tensor] = {}
    for autocast in (False, True) if problem.device == "cuda" else (False,):
        dtype = "bfloat16" if autocast else "float32"
        for num_segments, method in ((1, WHOLE), *((CHECK_SEGMENTS, method) for method in METHODS)):
            problem.clear()
            problem.run(METHODS[method](num_segments, autocast=autocast), score)
            whole = whole or problem.gradient()
            found[f"{dtype}_{method if num_segments > 1 else 'whole'}"] = problem.difference(whole)
    return found


def table(document: dict[str, Any]) -> str:
    """A row a case."""
    names = ("num_tokens", "num_segments", "method", "peak_gib", "above_gib", "seconds", "tokens_per_s")
    rows = []
    for case in document["cases"]:
        cells = [case.get(name) for name in (*names, "rows_computed")]
        cells[6] = cells[6] and round(cells[6])
        difference = f"{case['difference']:.1e}" if "difference" in case else None
        rows.append([*cells, "out of memory" if "out_of_memory" in case else difference])
    return markdown(COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 20480], help="lengths N")
    parser.add_argument("--segments", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of segments S")
    parser.add_argument("--method", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--depths", type=int, default=8, help="K")
    parser.add_argument("--ratio", type=float, default=0.8, help="r")
    parser.add_argument("--chunk", type=int, default=2048, help="rows whose logits exist at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check-tokens", type=int, default=512, help="length of `check`; 0: leave it out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if wrong := [s for s in args.segments if not 1 <= s <= min(args.tokens)]:
        raise ValueError(f"--segments: {wrong} must be in 1..{min(args.tokens)}, the smallest of --tokens")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    settings |= dict(
        zip(("hidden", "intermediate", "heads", "kv_heads", "vocabulary"), SHAPES[args.shape], strict=True)
    )
    document: dict[str, Any] = {"made": conditions(), "settings": settings, "cases": []}

    def write() -> None:
        args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def on_case(case: dict[str, Any]) -> None:
        print(json.dumps(case), flush=True)
        document["cases"].append(case)
        write()

    problem = Problem(args.shape, args.layers, args.device)
    if args.check_tokens:
        document["check"] = check(problem, args)
        print(json.dumps(document["check"]), flush=True)
    measure_lengths(problem, args, on_case)
    print(table(document))


if __name__ == "__main__":
    main()
