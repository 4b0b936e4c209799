"""Learned K against every fixed K on one engine, at several loads, with workloads of unlike acceptance. Needs a GPU.

    python -m benchmarks.depths --engine k7 --arms learned 0 1 3 5 7 --out FILE.json
    python -m benchmarks.depths --engine none --arms 0 --out FILE.json       (results are added to FILE.json)

Engines have the shape of Qwen3-Coder-30B-A3B with random weights and a P-EAGLE head of four layers. `k7`, `k5`, `k3`:
built for that K_max; `none`: no speculation. Acceptance is synthetic, by workload (`SURVIVALS`), in one batch
(`peagle.vllm.synthetic`).

An arm is a rule for K: `learned` is the service's own (`cluster.control.DepthControl`, fed twice a second with what the
engine reports, and the trimming scheduler), a number pins K. The load is closed: c requests are always running, each of
128 prompt tokens and an answer of a length drawn from `--output-tokens`, workloads in random order in equal numbers.
Tokens are counted over `--window-s` after `--warmup-s`, which at many requests should last longer than an answer takes;
arms take turns at each load, after a run of each that is not counted. The learned arm starts from nothing and keeps
what it has learned, as a service does. Writes its conditions beside the figures.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.load import LEARNED, Rig
from benchmarks.models import write_head, write_target
from peagle.provenance import conditions
from peagle.vllm.engine import engine_kwargs

K_MAX = 7
TIERS = (0, 1, 2, 3, 5, 7)
SURVIVALS: dict[str, tuple[float, ...]] = {
    "code": (0.88, 0.77, 0.66, 0.56, 0.48, 0.40, 0.34),
    "chat": (0.64, 0.39, 0.23, 0.13, 0.08, 0.05, 0.03),
}
"""P(first i drafts accepted): AL 5.09 and 2.55 at K = 7; coding accepts about twice what chat does."""
MIXES = {"mixed": ("code", "chat"), "code": ("code",), "chat": ("chat",)}
WARM_S = 1.0
ENGINES = {"k7": K_MAX, "k5": 5, "k3": 3, "none": 0}


def settings_of(name: str, folder: Path, max_num_seqs: int) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`."""
    from peagle.vllm.synthetic import SYNTHETIC_WORKER

    k = ENGINES[name]
    extra: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 2048, "max_num_seqs": max_num_seqs}
    extra |= {"max_num_batched_tokens": 8192, "seed": 0, "load_format": "dummy", "skip_tokenizer_init": True}
    head_dir = folder / "head" if k else None
    if head_dir is not None and not (head_dir / "config.json").exists():
        write_head(head_dir, K_MAX)
    kwargs = engine_kwargs(
        write_target(folder / "target"),
        head_dir,
        max_draft_tokens=k or None,
        dtype="bfloat16",
        async_scheduling=True,
        on_cpu=False,
        extra=extra,
    )
    if k:
        kwargs["worker_cls"] = SYNTHETIC_WORKER
        kwargs["speculative_config"] |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [1.0] * k,
            "draft_load_config": {"load_format": "safetensors"},
        }
    return kwargs


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One row for each mix, load and arm."""
    kwargs = settings_of(args.engine, folder, args.max_num_seqs)
    rig = Rig(kwargs, tuple(args.output_tokens), SURVIVALS, LEARNED in args.arms)
    try:
        for arm in args.arms:  # kernels compile at first use, and the learned arm starts from nothing
            for num_requests in (max(args.num_requests), 8):
                rig.run(arm, MIXES["mixed"], num_requests, 1.0, 3.0 if arm == LEARNED else 0.5)
        for mix in args.mixes:
            for place, num_requests in enumerate(args.num_requests):
                # Kernels of a batch's size compile at its first use, which must not fall on one arm.
                for arm in args.arms:
                    rig.run(arm, MIXES[mix], num_requests, 0.0, WARM_S)
                for turn in range(args.repeats):
                    first = (place + turn) % len(args.arms)
                    for arm in args.arms[first:] + args.arms[:first]:
                        row = {"engine": args.engine, "mix": mix, "num_requests": num_requests, "arm": arm}
                        row |= rig.run(arm, MIXES[mix], num_requests, args.warmup_s, args.window_s)
                        if arm == LEARNED:
                            row["drafting"] = rig.drafting()
                        sys.stdout.write(json.dumps({**row, "drafting": None}) + "\n")
                        sys.stdout.flush()
                        yield row
    finally:
        rig.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--arms", nargs="+", required=True, help=f"{LEARNED}, or K's")
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=["mixed"])
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, nargs=2, default=[128, 384], metavar=("LEAST", "MOST"))
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument("--warmup-s", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-depths"), help="models")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for arm in args.arms:
        if arm != LEARNED and not (arm.isdecimal() and int(arm) <= ENGINES[args.engine]):
            parser.error(f"--arms: {arm!r} is neither {LEARNED} nor a K in 0..{ENGINES[args.engine]}")
    if not 2 <= args.output_tokens[0] <= args.output_tokens[1]:
        parser.error("--output-tokens: two numbers from 2 on, the least first")
    if args.max_num_seqs < max(args.num_requests):
        parser.error("--max-num-seqs is below the largest of --num-requests: requests would wait")
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": [], "rows": []}
    result["runs"].append({"engine": args.engine, "survivals": SURVIVALS, "conditions": conditions()})
    for row in measure(args, args.folder):
        result["rows" if "arm" in row else "runs"].append(row)
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
