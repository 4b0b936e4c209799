"""A drafter on another GPU against one inside the engine: the same target, head and acceptance. Needs GPUs.

    python -m benchmarks.remote --placements colocated remote none --num-requests 1 8 32 64 --out FILE.json
    python -m benchmarks.remote --check --placements colocated remote none --out FILE.json

The first form has the shape of Llama-3.1-8B with random weights and a P-EAGLE head of four layers, and synthetic
acceptance (`SURVIVAL`): output tokens/s of a closed load of 128 prompt tokens and `--output-tokens`, and where the time
of a remote step goes. The second has the embedded small model and its head: greedy output of a few texts, which
must be the same in each placement, and tokens a step. Each placement runs in a process of its own. The target runs on
GPU `--target-gpu`, the remote drafter (`peagle drafter`) on `--drafter-gpu`; both may be the same.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load import Rig
from benchmarks.models import LLAMA_8B, write_embedding, write_head, write_target
from peagle.provenance import conditions
from peagle.vllm.engine import RemoteSettings, engine_kwargs

PLACEMENTS = ("colocated", "remote", "none")
SURVIVAL = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""Synthetic P(first i drafts accepted), in the range published for P-EAGLE heads."""
K_MAX = len(SURVIVAL)
START_S = 120.0

TEXTS = (
    "def fibonacci(n):\n    ",
    "The capital of France is",
    "Write a short story about a fox and a river.\n",
    "import numpy as np\n\ndef mean(values):\n",
    "Question: What is 17 times 23?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam, I am writing to",
    "The three laws of motion are as follows.\n1.",
)
NUM_TEXT_TOKENS = 96


def models(folder: Path, check: bool) -> tuple[Path, Path]:
    """Directories of target and head, made where they are not there yet."""
    if check:
        from peagle.embedded import DEFAULT_TARGET, prepare_target
        from peagle.heads import prepare_head

        target = prepare_target()
        return target, prepare_head(DEFAULT_TARGET, target)
    target, head = folder / "llama-8b", folder / "llama-8b-head"
    if not (head / "config.json").exists():
        write_target(target, LLAMA_8B)
        write_embedding(target, LLAMA_8B)  # the drafter's process reads it there
        write_head(head, K_MAX, LLAMA_8B, mlp_size=LLAMA_8B["intermediate_size"])
    return target, head


def settings_of(placement: str, args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs` and `LLM`."""
    target, head = models(args.folder, args.check)
    extra: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 2048, "max_num_seqs": args.max_num_seqs}
    extra |= {"max_num_batched_tokens": 8192, "seed": 0}
    if args.check:
        extra |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 * 2**30, "generation_config": "vllm"}
    else:
        extra |= {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": args.gpu_memory}
    has_head = placement != "none"
    kwargs = engine_kwargs(
        target,
        head if has_head else None,
        max_draft_tokens=K_MAX if has_head else None,
        dtype="bfloat16",
        async_scheduling=not args.sync,
        on_cpu=False,
        remote=RemoteSettings(min_deadline_s=0.2) if placement == "remote" else None,
        extra=extra,
    )
    if has_head and not args.check:
        kwargs["speculative_config"] |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(SURVIVAL),
            "draft_load_config": {"load_format": "safetensors"},
        }
    return kwargs


@contextmanager
def drafter(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A drafter's process, as `set_drafters` takes it."""
    target, head = models(args.folder, args.check)
    command = [sys.executable, "-m", "deployments.cli", "drafter", "--head", str(head), "--target", str(target)]
    command += ["--max-num-requests", str(args.max_num_seqs), "--max-num-rows", "8192", "--max-depth", str(K_MAX)]
    command += ["--max-context", "2048", "--cache-gib", "4"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(args.drafter_gpu)}
    log = args.out.with_suffix(".drafter.log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, start_new_session=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the drafter did not start: see {log.name}")
        yield json.loads(line)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
        log.close()


def connect(rpc: Callable[..., Any], found: dict[str, Any]) -> None:
    """Give the engine its drafter, and wait until its link is up. Raises RuntimeError when it does not come up."""
    rpc("set_drafters", args=([found],))
    begin_s = time.monotonic()
    while (report := rpc("remote_report")[0]["pool"])["num_up"] == 0:
        if time.monotonic() - begin_s > START_S:
            raise RuntimeError(f"no link: {report}")
        time.sleep(0.2)


def measure(placement: str, args: argparse.Namespace, found: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """One row for each load, or one with the texts' output."""
    kwargs = settings_of(placement, args)
    if args.check:
        from vllm import LLM, SamplingParams

        engine = LLM(**kwargs, disable_log_stats=True)
        if found:
            connect(engine.collective_rpc, found)
        start_s = time.perf_counter()
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TEXT_TOKENS)
        outputs = engine.generate(TEXTS, params, use_tqdm=False)
        row: dict[str, Any] = {"placement": placement, "wall_s": time.perf_counter() - start_s}
        row["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        if found:
            row["report"] = engine.collective_rpc("remote_report")[0]
        yield row
        return
    rig = Rig(kwargs, tuple(args.output_tokens), {"all": SURVIVAL})
    try:
        if found:
            connect(rig.collective_rpc, found)
        for num_requests in (max(args.num_requests), 4):  # kernels compile at first use
            rig.run(str(K_MAX if placement != "none" else 0), ("all",), num_requests, 1.0, 1.0)
        for num_requests in args.num_requests:
            arm = str(K_MAX if placement != "none" else 0)
            before = rig.collective_rpc("remote_report")[0] if found else None
            row = {"placement": placement, "num_requests": num_requests}
            row |= rig.run(arm, ("all",), num_requests, args.warmup_s, args.window_s)
            if found:
                row["remote"] = {"before": before, "after": rig.collective_rpc("remote_report")[0]}
                row["step_parts_ms"] = step_parts_ms(**row["remote"], step_ms=row["by_workload"]["all"]["step_ms"])
            yield row
    finally:
        rig.close()


def step_parts_ms(before: dict[str, Any], after: dict[str, Any], step_ms: float) -> dict[str, float]:
    """Where a remote step's time went between two reports of its one link, on average: what the target's stream waited
    for drafts, of which the drafter's service and the transfer (what is left), and the target's own work.
    """
    (old,), (new,) = (report["pool"]["links"] for report in (before, after))
    num_answers = max(new["num_answered"] - old["num_answered"], 1)
    wait_ms, service_ms = (1e3 * (new[name] - old[name]) / num_answers for name in ("sum_wait_s", "sum_service_s"))
    parts = {"target": step_ms - wait_ms, "wait": wait_ms, "service": service_ms, "transfer": wait_ms - service_ms}
    return {name: round(part, 4) for name, part in parts.items()}


def run_one(placement: str, args: argparse.Namespace) -> None:
    """Measure one placement in this process and write its rows."""
    rows = []
    os.environ["CUDA_VISIBLE_DEVICES"] = str(args.target_gpu)
    if placement == "remote":
        with drafter(args) as found:
            for row in measure(placement, args, found):
                rows.append(row)
                sys.stdout.write(json.dumps(row)[:600] + "\n")
                sys.stdout.flush()
    else:
        rows += list(measure(placement, args, None))
    args.part.write_text(json.dumps(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--check", action="store_true", help="outputs of the embedded small model instead of speed")
    parser.add_argument("--sync", action="store_true", help="without asynchronous scheduling")
    parser.add_argument("--target-gpu", type=int, default=0)
    parser.add_argument("--drafter-gpu", type=int, default=1)
    parser.add_argument("--gpu-memory", type=float, default=0.8)
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, nargs=2, default=[128, 384], metavar=("LEAST", "MOST"))
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--warmup-s", type=float, default=1.5)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one placement")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-remote"), help="models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        run_one(args.placements[0], args)
        return 0
    models(args.folder, args.check)
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": [], "rows": []}
    result["runs"].append({"survival": None if args.check else SURVIVAL, "conditions": conditions()})
    failed = 0
    for placement in args.placements:
        part = args.out.with_suffix(f".{placement}.part")
        part.unlink(missing_ok=True)
        flags = [*sys.argv[1:], "--part", str(part)]
        command = [sys.executable, "-m", "benchmarks.remote", *flags, "--placements", placement]
        with args.out.with_suffix(f".{placement}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(args.timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        failed += not part.exists()
        rows = json.loads(part.read_text()) if part.exists() else [{"placement": placement, "error": log.name}]
        result["rows"] += rows
        args.out.write_text(json.dumps(result, indent=1))
        sys.stdout.write("".join(json.dumps(row)[:300] + "\n" for row in rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
