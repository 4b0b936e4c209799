"""Time of the drafter's one pass by batch size, on a GPU or on the CPU.

    python -m benchmarks.parallel_pass --out FILE [--shapes 8b qwen3-30b-a3b] [--batches 1 8 32 64 128]
    python -m benchmarks.parallel_pass --out FILE --head HEAD        a drafter of the shape of this head

Drafters have four layers, random weights and the shape that targets of that name give them; requests stand at the same
context, in shuffled blocks of a cache of random keys and values. Two layouts of the same requests:

    dropped   rows of accepted tokens only (1 + a binomial number of K), and K - 1 mask rows: what this drafter computes
    padded    1 + K rows and K - 1 mask rows a request: what vLLM's in-process drafter computes whatever was rejected

and for each, medians in milliseconds:

    pass      from the call to the drafts in host memory, hidden rows coming from (pinned) host memory
    launch    of it, the host's own time until everything is enqueued
    steady    a pass when the next is always enqueued behind it: what the device needs
    eager     as `pass`, without CUDA graphs
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peagle.config import DrafterConfig
from peagle.drafter.drafts import token_ids
from peagle.drafter.graphs import GraphSizes
from peagle.drafter.parallel_pass import ParallelPass, PassBatch
from peagle.drafter.protocol import Int32Array
from peagle.model import Drafter
from peagle.provenance import conditions

BLOCK_SIZE = 16
NUM_LAYERS = 4
DRAFT_VOCAB_SIZE = 32_000

_COMMON: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128}
#: config.json of targets, as far as a drafter's shape follows from it, and the width of the drafter's MLP.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": _COMMON
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128_256}
    | {"num_hidden_layers": 32},
    "qwen3-30b-a3b": _COMMON
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4, "vocab_size": 151_936}
    | {"num_hidden_layers": 48},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_key_value_heads": 3, "vocab_size": 49_152}
    | {"num_hidden_layers": 30, "num_attention_heads": 9, "head_dim": 64},
}
LAYOUTS = ("dropped", "padded")


@dataclasses.dataclass(frozen=True)
class Load:
    """What requests look like: K drafts a request, of which `accepted` are accepted on average; tokens before."""

    depth: int
    accepted: float
    context: int


def random_drafter(shape: str, depth: int, device: str, dtype: torch.dtype) -> Drafter:
    """Weights of standard deviation 0.02, norms of 1."""
    target = SHAPES[shape]
    config = DrafterConfig.for_target(
        target,
        num_layers=NUM_LAYERS,
        draft_vocab_size=min(DRAFT_VOCAB_SIZE, target["vocab_size"]),
        ptd_token_id=target["vocab_size"] - 1,
        num_depths=depth,
        max_position_embeddings=1 << 17,
    )
    return drafter_of(config, device, dtype)


def head_config(head: Path, depth: int) -> DrafterConfig:
    """The shape of a head. Raises OSError or ValueError naming its config.json."""
    path = head / "config.json"
    config = DrafterConfig.from_dict(json.loads(path.read_text(encoding="utf-8")), str(path))
    return dataclasses.replace(config, num_depths=max(depth, config.num_depths))


def drafter_of(config: DrafterConfig, device: str, dtype: torch.dtype) -> Drafter:
    """A drafter of this shape with random weights."""
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        drafter = Drafter(config).to(dtype)
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        tables = [
            torch.randn(size, config.hidden_size, dtype=dtype).mul_(0.02)
            for size in (config.vocab_size, config.draft_vocab_size)
        ]
    drafter.share_target(*tables)
    return drafter.requires_grad_(False)


def make_batch(config: DrafterConfig, load: Load, num_requests: int, layout: str, dtype: torch.dtype) -> PassBatch:
    """One step of requests that all stand at the same context; the payload holds rejected rows as well."""
    random = np.random.default_rng(num_requests)
    accepted_B = random.binomial(load.depth, load.accepted / load.depth, num_requests)
    scheduled = 1 + load.depth
    blocks = blocks_each(load)
    hidden_RH = torch.randn(num_requests * scheduled, config.hidden_size).to(dtype)
    return PassBatch(
        start_B=np.full(num_requests, load.context, np.int32),
        num_valid_B=(1 + accepted_B if layout == "dropped" else np.full(num_requests, scheduled)).astype(np.int32),
        row_offset_B=np.arange(num_requests, dtype=np.int32) * scheduled,
        depth_B=np.full(num_requests, load.depth, np.int32),
        cache_start_B=np.zeros(num_requests, np.int32),
        next_tokens_R=random.integers(0, config.vocab_size - 1, len(hidden_RH), dtype=np.int32),
        hidden=[hidden_RH.pin_memory() if torch.cuda.is_available() else hidden_RH],
        block_table_BN=random.permutation(num_requests * blocks).astype(np.int32).reshape(num_requests, blocks),
    )


def blocks_each(load: Load) -> int:
    """Cache blocks of a request: for its context, its rows and its mask rows."""
    return -(-(load.context + 2 * load.depth + 1) // BLOCK_SIZE)


def new_pass(
    drafter: Drafter, load: Load, num_requests: int, device: str, dtype: torch.dtype, sizes: GraphSizes | None
) -> ParallelPass:
    """A pass for one batch size, its cache full of random numbers."""
    made = ParallelPass(
        drafter, digest="", max_num_requests=num_requests, max_num_rows=num_requests * (2 * load.depth + 1),
        num_blocks=num_requests * blocks_each(load), block_size=BLOCK_SIZE, max_depth=load.depth, device=device,
        dtype=dtype, max_context=blocks_each(load) * BLOCK_SIZE, graph_sizes=sizes,
    )  # fmt: skip
    made._cache_tensor.normal_(generator=torch.Generator(device).manual_seed(1))  # zeros run faster than what is real
    return made


def median_ms(call: Callable[[], object], num_calls: int) -> float:
    times = []
    for _ in range(num_calls):
        begun = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begun))
    return round(statistics.median(times), 4)


def steady_ms(parallel_pass: ParallelPass, batch: PassBatch, num_calls: int) -> float:
    """Wall time of many passes, each launched before the one before is waited for, over their number."""
    begun = time.perf_counter()
    pending = [parallel_pass.launch(batch) for _ in range(num_calls)]
    for one in pending:
        one()
    return round(1e3 * (time.perf_counter() - begun) / num_calls, 4)


def measure(
    drafter: Drafter, load: Load, num_requests: int, layout: str, device: str, dtype: torch.dtype, num_calls: int
) -> dict[str, Any]:
    """One row of the table. On a CPU, where a launch is the pass, `pass_ms` alone."""
    batch = make_batch(drafter.config, load, num_requests, layout, dtype)
    row: dict[str, Any] = {"num_requests": num_requests, "layout": layout, "num_rows": int(batch.rows_B().sum())}
    drafts_BK = _measure_graphs(new_pass(drafter, load, num_requests, device, dtype, None), batch, row, num_calls)
    if device != "cpu":
        eager = new_pass(drafter, load, num_requests, device, dtype, GraphSizes((), (), ()))
        row["share_of_drafts_as_eager"] = round(float((token_ids(eager.run(batch)) == token_ids(drafts_BK)).mean()), 4)
        median_ms(lambda: eager.run(batch), 10)
        row["eager_ms"] = median_ms(lambda: eager.run(batch), num_calls)
    return row


def _measure_graphs(parallel_pass: ParallelPass, batch: PassBatch, row: dict[str, Any], num_calls: int) -> Int32Array:
    """Adds the times of a pass to `row`; returns its drafts."""
    is_cpu = parallel_pass.device.type == "cpu"
    drafts_BK = parallel_pass.run(batch)
    median_ms(lambda: parallel_pass.run(batch), 2 if is_cpu else 10)
    row["pass_ms"] = median_ms(lambda: parallel_pass.run(batch), num_calls)
    if not is_cpu:
        launches = []
        for _ in range(num_calls):
            begun = time.perf_counter()
            pending = parallel_pass.launch(batch)
            launches.append(1e3 * (time.perf_counter() - begun))
            pending()
        row["launch_ms"] = round(statistics.median(launches), 4)
        row["steady_ms"] = min(steady_ms(parallel_pass, batch, num_calls) for _ in range(3))
    return drafts_BK


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--head", type=Path, help="folder of a head: measure a drafter of its shape, and no other")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8b", "qwen3-30b-a3b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128], help="requests")
    parser.add_argument("--depth", type=int, default=7, help="K, drafts a request")
    parser.add_argument("--accepted", type=float, default=2.0, help="accepted drafts a step and request, on average")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the step")
    parser.add_argument("--calls", type=int, help="passes timed; 100 on a GPU, 5 on a CPU")
    args = parser.parse_args()
    if args.depth < 1 or not 0 <= args.accepted <= args.depth or args.context < 0 or min(args.batches) < 1:
        parser.error("--depth and --batches must be at least 1, --accepted in 0 .. depth, --context at least 0")
    return args


def main() -> None:
    args = parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    load = Load(args.depth, args.accepted, args.context)
    try:
        config = None if args.head is None else head_config(args.head, args.depth)
    except (OSError, ValueError) as error:
        sys.exit(f"benchmarks.parallel_pass: --head: {error}")
    results: dict[str, list[dict[str, Any]]] = {}
    for shape in args.shapes if config is None else [str(args.head)]:
        drafter = (
            random_drafter(shape, args.depth, args.device, dtype)
            if config is None
            else drafter_of(config, args.device, dtype)
        )
        results[shape] = []
        for num_requests, layout in itertools.product(args.batches, LAYOUTS):
            num_calls = args.calls or (5 if args.device == "cpu" else 100)
            row = measure(drafter, load, num_requests, layout, args.device, dtype, num_calls)
            results[shape].append(row)
            print(shape, json.dumps(row), flush=True)
        num_layers = drafter.config.num_hidden_layers
        del drafter
    settings = {"device": args.device, "dtype": str(dtype), "num_layers": num_layers, **dataclasses.asdict(load)}
    document = {"conditions": conditions(), "settings": settings, "passes": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
