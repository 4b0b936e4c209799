"""A drafter on another GPU against one inside the engine: the same target, head and acceptance. Needs GPUs.

    python -m benchmarks.remote --placements colocated remote none --num-requests 1 8 32 64 --out FILE.json
    python -m benchmarks.remote --check [--choice] --placements colocated remote none --out FILE.json

The first form has the shape of Llama-3.1-8B with random weights and a P-EAGLE head of four layers, and synthetic
acceptance (`SURVIVAL`): output tokens/s of a closed load of 128 prompt tokens and `--output-tokens`, and where the time
of a remote step goes. The second has the embedded small model and its head: greedy output of a few texts, which
must be the same in each placement, and tokens a step; with `--choice` any number of drafts is verified, chosen by the
drafter's chances (`peagle.vllm.chosen`), and steps with such drafts are counted. Each placement runs in a process of
its own. The target runs on GPU `--target-gpu`, the remote drafter (`benchmarks.drafter`) on `--drafter-gpu`; both may
be the same.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import LLAMA_8B, spawn_engines, write_embedding, write_head, write_target
from peagle.provenance import conditions
from peagle.vllm.engine import RemoteSettings, engine_kwargs
from peagle.vllm.request_args import DEPTH_KEY
from peagle.vllm.step_notes import STEPS_HEADER

PLACEMENTS = ("colocated", "remote", "none")
SURVIVAL = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""Synthetic P(first i drafts accepted), in the range published for P-EAGLE heads."""
K_MAX = len(SURVIVAL)
START_S = 120.0
PROMPT_TOKENS = 128

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


@dataclass
class Window:
    """What came out of the engine while it was open. Steps include those without drafts.

    `otps` counts tokens. `expected_otps` takes each step's time as measured and its tokens as `SURVIVAL` expects them
    at the drafts it verified, so that the luck of a few seconds drops out: the load divided by the mean time a token of
    a whole request, its first one included (the median: a host that stands still meets all prompts of a load at once).
    """

    mean_tokens: float
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_expected: float = 0.0
    steps_s: float = 0.0
    first_s: list[float] = field(default_factory=list)

    def add(self, num_tokens: int, steps: Sequence[tuple[int, int]], seconds: float, first: bool) -> None:
        """One output of a request, `seconds` after its last one or, for the first, after the request was sent. steps:
        (verified, accepted)."""
        self.num_tokens += num_tokens
        if first:
            self.first_s.append(seconds)
            return
        self.steps_s += seconds
        for verified, accepted in steps or ((0, 0),):
            self.num_steps += 1
            self.num_drafts += verified
            self.num_accepted += accepted
            self.num_expected += 1 + sum(SURVIVAL[:verified])

    def document(self, num_requests: int, seconds: float) -> dict[str, Any]:
        steps, first_s = max(self.num_steps, 1), statistics.median(self.first_s or [0.0])
        decode_s = self.steps_s / max(self.num_expected, 1.0) * (self.mean_tokens - 1)
        request_s = first_s + decode_s
        return {
            "window_s": round(seconds, 3),
            "otps": round(self.num_tokens / seconds, 2),
            "expected_otps": round(num_requests * self.mean_tokens / request_s, 2) if request_s else 0.0,
            "mean_k": round(self.num_drafts / steps, 3),
            "acceptance_length": round(1 + self.num_accepted / steps, 3),
            "step_ms": round(1e3 * self.steps_s / steps, 3),
            "median_ttft_ms": round(1e3 * first_s, 2),
        }


class LoadedEngine:
    """One running engine, and the loop that keeps so many requests on it, each with a prompt of random tokens and an
    answer of a length drawn from a range (equal ones would end, and bring their prompts, in one step). Its outputs are
    read as they leave the engine's process, so that the client's own speed does not enter."""

    def __init__(self, kwargs: dict[str, Any], output_tokens: tuple[int, int], k: int) -> None:
        """output_tokens: least and most of an answer; k: of every request."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        config = EngineArgs(**kwargs).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._engine = LLMEngine.from_vllm_config(config, UsageContext.OPENAI_API_SERVER, disable_log_stats=True)
        self._output_tokens, self._k = output_tokens, k
        self._sent_s: dict[str, float] = {}  # by request: when it was sent or, negative, when it last gave tokens
        self._num_requests = 0

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """What the engine's workers answer."""
        return list(self._engine.collective_rpc(method, args=args))

    def _add(self, chance: random.Random) -> None:
        from vllm import SamplingParams, TokensPrompt

        self._num_requests += 1
        request_id = f"load-{self._num_requests}"
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=chance.randint(*self._output_tokens),
            extra_args={DEPTH_KEY: self._k},
        )
        prompt = TokensPrompt(prompt_token_ids=[chance.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)])
        self._engine.add_request(request_id, prompt, params)
        self._sent_s[request_id] = time.perf_counter()

    def run(self, num_requests: int, warmup_s: float, window_s: float) -> dict[str, Any]:
        """Keep `num_requests` running for `warmup_s` + `window_s`, then end them. What came out of the window."""
        chance = random.Random(num_requests)
        for _ in range(num_requests):
            self._add(chance)
        window, begin_s, opened_s = Window(sum(self._output_tokens) / 2), time.perf_counter(), 0.0
        while True:
            outputs = self._engine.engine_core.get_output().outputs
            now_s = time.perf_counter()
            for output in outputs:
                request_id = "-".join(output.request_id.split("-")[:2])  # vLLM adds a suffix of its own
                last_s = self._sent_s.get(request_id)
                if last_s is None:
                    continue  # of a load before, under way when that was ended
                self._sent_s[request_id] = -now_s
                if opened_s:
                    words = (output.trace_headers or {}).get(STEPS_HEADER, "").split()
                    pairs = (word.split(",") for word in words)
                    steps = [(int(verified), int(accepted)) for verified, accepted in pairs]
                    window.add(len(output.new_token_ids), steps, now_s - abs(last_s), last_s > 0)
                if output.finish_reason is not None:
                    del self._sent_s[request_id]
                    self._add(chance)
            if not opened_s and now_s - begin_s >= warmup_s:
                opened_s = now_s
            if opened_s and now_s - opened_s >= window_s:
                break
        self._engine.abort_request(list(self._sent_s))
        self._sent_s.clear()
        return window.document(num_requests, now_s - opened_s)

    def close(self) -> None:
        """Stop the engine's process."""
        self._engine.engine_core.shutdown()


class ChosenSteps:
    """vLLM's `worker_extension_cls`: counts the steps whose drafts were chosen."""

    model_runner: Any

    def count_chosen_steps(self) -> None:
        """From now on."""
        chosen, self.num_chosen_steps = self.model_runner.chosen, 0
        inner = chosen.reallocate_drafts

        def counting(*args: Any) -> Any:
            self.num_chosen_steps += 1
            return inner(*args)

        chosen.reallocate_drafts = counting

    def chosen_steps(self) -> int:
        return self.num_chosen_steps


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
    if has_head and args.choice:
        extra["worker_extension_cls"] = "benchmarks.remote.ChosenSteps"
    kwargs = engine_kwargs(
        target,
        head if has_head else None,
        max_draft_tokens=K_MAX if has_head else None,
        dtype="bfloat16",
        on_cpu=False,
        remote=RemoteSettings(min_deadline_s=0.2) if placement == "remote" else None,
        extra=extra,
    )
    if has_head and args.choice:
        kwargs["scheduler_cls"] = "benchmarks.choosing_scheduler.ChoosingScheduler"
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
    command = [sys.executable, "-m", "benchmarks.drafter", "--head", str(head), "--target", str(target)]
    command += ["--max-num-requests", str(args.max_num_seqs), "--max-num-rows", "8192", "--max-depth", str(K_MAX)]
    command += ["--max-context", "2048", "--cache-gib", "4"]
    command += ["--shares-gpu"] if args.drafter_gpu == args.target_gpu else []
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
    spawn_engines()
    kwargs = settings_of(placement, args)
    if args.check:
        from vllm import LLM, SamplingParams

        engine = LLM(**kwargs, disable_log_stats=True)
        if found:
            connect(engine.collective_rpc, found)
        if args.choice and placement != "none":
            engine.collective_rpc("count_chosen_steps")
        start_s = time.perf_counter()
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TEXT_TOKENS)
        outputs = engine.generate(TEXTS, params, use_tqdm=False)
        row: dict[str, Any] = {"placement": placement, "wall_s": time.perf_counter() - start_s}
        row["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        if found:
            row["report"] = engine.collective_rpc("remote_report")[0]
        if args.choice and placement != "none":
            row["num_chosen_steps"] = engine.collective_rpc("chosen_steps")[0]
        yield row
        return
    k = K_MAX if placement != "none" else 0
    rig = LoadedEngine(kwargs, tuple(args.output_tokens), k)
    try:
        if found:
            connect(rig.collective_rpc, found)
        for num_requests in (max(args.num_requests), 4):  # kernels compile at first use
            rig.run(num_requests, 1.0, 1.0)
        for num_requests in args.num_requests:
            before = rig.collective_rpc("remote_report")[0] if found else None
            row = {"placement": placement, "num_requests": num_requests}
            row |= rig.run(num_requests, args.warmup_s, args.window_s)
            if found:
                row["remote"] = {"before": before, "after": rig.collective_rpc("remote_report")[0]}
                row["step_parts_ms"] = step_parts_ms(**row["remote"], step_ms=row["step_ms"])
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
    parser.add_argument("--choice", action="store_true", help="with --check: drafts chosen by the drafter's chances")
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
