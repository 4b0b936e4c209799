"""Speed of engines with random weights of a real shape, at equal acceptance: tokens/s and time of a step.

    python -m benchmarks.engines --arm peagle-7 --out FILE [--requests 1 8 32] [--seconds 4]
    python -m benchmarks.engines --arm peagle-7 remote-7 --rounds 3 --kv-gib 6 --shape LLAMA_8B --out FILE

One engine a process. A cell keeps so many requests in flight, each replaced by another when it ends: prompts of 128
random tokens, answers of 128 to 384, so steps with prompts are among those counted, as in service. Nothing is streamed.
Steps, tokens and accepted drafts are vLLM's own counters over a window of time. A window in which the engine paused, as
for the compilation of a kernel, is measured again. All arms have the same CUDA graph sizes, the same sampling, and the
worker in a process of its own, as in service; else stock arms are vLLM as it comes. Acceptance is by position
(`synthetic_acceptance`). Several arms start together, their engines all on the GPU, and are measured in turn, round by
round: ratios are then of one host and of the same minutes. `peagle-Kfp8` has its drafter in FP8.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from cluster.counts import TargetReport
from cluster.k_policy import KPolicy
from cluster.request import Drafting, KRules
from cluster.step_latency import StepLatency
from peagle.provenance import conditions
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, MAX_K_KEY, WORKLOAD_KEY

ACCEPTANCE_RATES = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17, 0.13, 0.10, 0.075, 0.055, 0.04)
"""Probability that the first i drafts are accepted; beyond the seventh continued by hand at the same ratio."""
PARALLEL_RATIO = (1.003, 0.962, 0.913, 0.859, 0.809, 0.754, 0.688, 0.623)
"""Of P-EAGLE's probability to EAGLE-3's at each position: 404 answers, heads of 2026-11-27-coder-heads-h200x4.json."""
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 256, 8192, 4096
PROMPT_TOKENS, OUTPUT_TOKENS = 128, (128, 384)
WARM_S, LEARNING_S = 1.5, 4.0
WINDOW_PARTS, MAX_WINDOWS = 4, 5
"""A window with a part in which an engine gave less than half of the median is measured again, at most `MAX_WINDOWS`
times."""
COUNTERS = {
    "tokens": "vllm:generation_tokens_total",
    "steps": "vllm:iteration_tokens_total_count",
    "request_steps": "vllm:spec_decode_num_drafts_total",
    "drafts": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def synthetic_acceptance(k: int, parallel: bool) -> dict[str, Any]:
    """vLLM's speculative settings for drafts that are accepted with a probability of their position, lower ones where
    the head is `parallel`. K of such a head: 8 at the most."""
    rates = [ACCEPTANCE_RATES[i] * (PARALLEL_RATIO[i] if parallel else 1.0) for i in range(k)]
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [round(rate, 3) for rate in rates]}


@dataclass(frozen=True)
class Arm:
    """kind: none, eagle3 (stock), stock (P-EAGLE as vLLM runs it, on its V1 runner), peagle (ours, colocated) or remote
    (ours, the drafter on another GPU). k: K_max. Of `benchmarks.headline`: fixed_k, K that every request asks for;
    is_fp8, whether the drafter's weights and activations are in FP8; rule, vLLM's rule of drafts, or which graphs are
    left out (`benchmarks.headline`); head, which one of several, from 1; front_ends, processes for HTTP and text;
    num_targets, engines with a GPU each."""

    kind: str
    k: int = 0
    fixed_k: int | None = None
    is_fp8: bool = False
    rule: str = ""
    head: int = 1
    front_ends: int = 1
    num_targets: int = 1

    @classmethod
    def parse(cls, text: str) -> "Arm":
        kind, _, k = text.removesuffix("fp8").partition("-")
        return cls(kind, int(k or 0), is_fp8="fp8" in text)

    @property
    def num_gpus(self) -> int:
        """Of the targets, and of a remote drafter."""
        return self.num_targets + (self.kind == "remote")

    def __str__(self) -> str:
        fixed = "" if self.fixed_k is None else f"k{self.fixed_k}"
        more = ("fp8" if self.is_fp8 else "") + self.rule + (f"h{self.head}" if self.head > 1 else "")
        more += f"x{self.front_ends}" if self.front_ends > 1 else ""
        more += f"r{self.num_targets}" if self.num_targets > 1 else ""
        return f"{self.kind}-{self.k}{fixed}{more}" if self.k or self.kind == "ours" else f"{self.kind}{more}"


class Segments:
    """vLLM's `worker_extension_cls`: random tokens, and on the V2 runner what a step's time on the GPU goes to.

    Models of random weights choose tokens that repeat, each in its own way, and a target with experts is faster on
    equal tokens: so every arm verifies random drafts, and without a drafter the sampled tokens are random. With one the
    target's own token of each step stays its own.

    target: inputs and forward; sampling: output matrix, verification, bookkeeping; drafting; rest: until the next step,
    where the GPU waits for the host.
    """

    model_runner: Any

    def make_tokens_random(self) -> None:
        """From now on, whatever was drafted, or sampled without a drafter, is replaced by random tokens."""
        drafter: Any = getattr(self.model_runner, "speculator", None) or getattr(self.model_runner, "drafter", None)
        vocab_size, sampler = self.model_runner.model_config.get_vocab_size(), self.model_runner.sampler
        if drafter is None:
            sample = type(sampler).__call__

            def random_samples(sampler: Any, *args: Any, **kwargs: Any) -> Any:
                output = sample(sampler, *args, **kwargs)
                output.sampled_token_ids.random_(0, vocab_size)
                return output

            sampler.__class__ = type("RandomSampler", (type(sampler),), {"__call__": random_samples})
            return
        propose = drafter.propose

        def random_drafts(*args: Any, **kwargs: Any) -> Any:
            return propose(*args, **kwargs).random_(0, vocab_size)

        drafter.propose = random_drafts

    def start_segments(self) -> None:
        """From now on, mark the ends of a step's parts on the GPU's stream."""
        import torch

        runner = self.model_runner
        self.marks: list[list[Any]] = [[]]
        self.has_prompts = [False]

        def mark() -> None:
            self.marks[-1].append(torch.cuda.Event(enable_timing=True))
            self.marks[-1][-1].record()

        def around(owner: Any, name: str) -> None:
            inner = getattr(owner, name)

            def marked(*args: Any, **kwargs: Any) -> Any:
                if name == "execute_model":  # the first one of a step
                    self.marks.append([])
                    self.has_prompts.append(bool(args[0].scheduled_new_reqs))
                mark()
                found = inner(*args, **kwargs)
                mark()
                return found

            setattr(owner, name, marked)

        around(runner, "execute_model")
        if runner.speculator is not None:
            around(runner.speculator, "propose")
        else:
            around(runner, "sample_tokens")

    def take_segments(self) -> dict[str, dict[str, float]]:
        """Since the last call, for steps that only decode and those that also start requests: their number and the
        medians of their parts in ms."""
        import torch

        torch.cuda.synchronize()
        steps = [found for found in zip(self.marks[:-1], self.has_prompts, strict=False) if len(found[0]) == 4]
        self.marks[:], self.has_prompts[:] = [[]], [False]
        parts: dict[bool, list[list[float]]] = {False: [], True: []}
        for (step, has_prompts), (after, _) in pairwise(steps):
            parts[has_prompts].append([mark.elapsed_time(end) for mark, end in pairwise([*step, after[0]])])
        found = {}
        for kind, times in (("decoding", parts[False]), ("with_prompts", parts[True])):
            if times:
                medians = [round(statistics.median(column), 4) for column in zip(*times, strict=True)]
                names = ("target", "sampling", "drafting", "rest")
                found[kind] = {"num_steps": len(times), **dict(zip(names, medians, strict=True))}
        return found


def engine_settings(arm: Arm, args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`."""
    from benchmarks import models
    from peagle.vllm import compat
    from peagle.vllm.engine_settings import capture_sizes, engine_kwargs

    folder, shape = args.folder / args.shape, getattr(models, args.shape)
    target_dir, head_dir = models.write_target(folder / f"target-{arm}", shape), folder / f"head-{arm}"
    common: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "kv_cache_memory_bytes": args.kv_gib << 30,
        "gpu_memory_utilization": 0.1,  # no more has to be free at the start: other arms are there too
        "enable_prefix_caching": False,
        "distributed_executor_backend": "mp",
        "cudagraph_capture_sizes": capture_sizes(MAX_NUM_SEQS * (1 + max(arm.k, 7))),
        "worker_extension_cls": "benchmarks.engines.Segments",
        **json.loads(args.engine),
    }
    stock = {"model": str(target_dir), "dtype": "bfloat16", "async_scheduling": True, **common}
    if arm.kind == "none":
        return stock
    parallel = arm.kind != "eagle3"
    if not (head_dir / "config.json").exists():
        sizes = {"num_layers": 4, **models.PUBLISHED_HEADS.get(args.shape, {})} if parallel else {"num_layers": 1}
        models.write_head(head_dir, target=shape, **{**sizes, "num_depths": arm.k}, parallel=parallel)
    if arm.kind in ("peagle", "remote"):
        compat.allow_v2()
        deadline_s = None
        if arm.kind == "remote":
            models.write_embedding(target_dir, shape)  # the drafter's process reads it there
            deadline_s = 1.0
        kwargs = engine_kwargs(
            target_dir, head_dir, dtype="bfloat16", on_cpu=False, remote_deadline_s=deadline_s, extra=common
        )
    else:
        speculative = {"method": "eagle3", "model": str(head_dir), "num_speculative_tokens": arm.k}
        kwargs = {**stock, "speculative_config": {**speculative, "parallel_drafting": parallel}}
    kwargs["speculative_config"]["draft_load_config"] = {"load_format": "safetensors"}
    kwargs["speculative_config"] |= synthetic_acceptance(arm.k, parallel)
    if arm.is_fp8:
        kwargs["speculative_config"]["quantization"] = "fp8"
    return kwargs


@contextlib.contextmanager
def drafter(settings: dict[str, Any], gpu: str, log: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """A drafter's process on `gpu`, which starts beside the engine. What is called when it is needed waits for it and
    returns it as `set_drafters` takes it."""
    command = [sys.executable, "-m", "benchmarks.drafter", "--target", settings["model"]]
    command += ["--head", settings["speculative_config"]["model"], "--max-num-requests", str(MAX_NUM_SEQS)]
    command += ["--max-num-rows", str(MAX_NUM_BATCHED_TOKENS), "--max-context", "2048", "--cache-gib", "8"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, start_new_session=True
        )
        lines = process.stdout
        assert lines is not None
        try:
            yield lambda: json.loads(lines.readline())
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)


class Turns:
    """Of one arm among those of a call, as a context for each of its turns: files in one folder say who is ready, which
    turns are over and which arms have ended. A turn waits for every earlier one, but for those of ended arms."""

    def __init__(self, folder: Path, index: int, num_arms: int) -> None:
        self._folder, self._index, self._num_arms, self._round = folder, index, num_arms, 0

    async def __aenter__(self) -> None:
        (self._folder / f"ready-{self._index}").touch()
        earlier = range(self._round * self._num_arms + self._index)
        awaited = [(f"ready-{i}", i) for i in range(self._num_arms)]
        awaited += [(f"over-{turn}", turn % self._num_arms) for turn in earlier]
        while not all(self._is_there(name) or self._is_there(f"ended-{arm}") for name, arm in awaited):
            await asyncio.sleep(0.1)

    async def __aexit__(self, *error: object) -> None:
        (self._folder / f"over-{self._round * self._num_arms + self._index}").touch()
        self._round += 1

    def end(self) -> None:
        """The arm has ended: none of the others waits for it any more."""
        (self._folder / f"ended-{self._index}").touch()

    def _is_there(self, name: str) -> bool:
        return (self._folder / name).exists()


def measure_in_turn(args: argparse.Namespace) -> int:
    """Each arm in a process of its own; their reports together, by arm. Returns how many failed."""
    folder, num_arms = Path(tempfile.mkdtemp(dir=args.folder)), len(args.arm)
    running, reports, num_failed = {}, {}, 0
    for index, arm in enumerate(args.arm):
        command = [sys.executable, "-m", "benchmarks.engines", *sys.argv[1:], "--arm", arm]
        command += ["--out", str(folder / f"{index}.json"), "--turn", str(folder), str(index), str(num_arms)]
        running[index] = subprocess.Popen(command)

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends two, and the file is yet to be written
        sys.exit("ended; what was measured is in the file")

    signal.signal(signal.SIGTERM, end)
    try:
        while running:
            for index, process in list(running.items()):
                if process.poll() is not None:
                    del running[index]
                    Turns(folder, index, num_arms).end()
                    num_failed += process.returncode != 0
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.terminate()
        for index, arm in enumerate(args.arm):
            if (part := folder / f"{index}.json").exists():
                reports[arm] = json.loads(part.read_text())
        args.out.write_text(json.dumps(reports, indent=1))
    return num_failed


def read_counters() -> dict[str, float]:
    """vLLM's counters, summed over their labels; 0 for those that this engine has not."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return {name: sum(one.value for one in samples if one.name == counter) for name, counter in COUNTERS.items()}


class LearnedDepths:
    """K of each request as the service decides it, from what this engine counts and reports."""

    def __init__(self, engine: Any, k_max: int) -> None:
        from peagle.vllm.recorder import DraftingRecorder

        self._recorder, self._k_max = DraftingRecorder(), k_max
        self._recorder.attach(engine)
        self._k_policy = KPolicy(KRules(k_max, k_max, k_max), on_gpu=True)

    async def observe_forever(self) -> None:
        while True:
            text = self._recorder.step_latency
            latency = msgspec.json.decode(text, type=StepLatency) if text else None
            report = TargetReport("engine", "head", workloads=self._recorder.workloads(), step_latency=latency)
            self._k_policy.observe([report], time.monotonic())
            await asyncio.sleep(0.5)

    def believed(self) -> dict[str, Any]:
        """What K rests on now: acceptance rates and step latency."""
        latency = msgspec.to_builtins(self._k_policy.latency)
        return {**self._k_policy.document(time.monotonic()), "step_latency": latency}

    def extra_args(self, workload: str) -> dict[str, Any]:
        drafting = self._k_policy.make_update(1).choose(Drafting(workload, self._k_max, "default"), self._k_max)
        args = {MAX_K_KEY: drafting.max_k, WORKLOAD_KEY: drafting.workload}
        return {**args, ACCEPTANCE_RATES_KEY: list(drafting.acceptance_rates)} if drafting.acceptance_rates else args


class Load:
    """A number of requests in flight. mix: K of a request is drawn from these, as `--depths`; all: K_max."""

    def __init__(self, engine: Any, mix: str, learned: LearnedDepths | None = None) -> None:
        self._engine, self._learned, self._count = engine, learned, 0
        self._depths = [] if mix in ("all", "learned") else [int(k) for k in mix.split("/")]

    def _extra_args(self, draw: random.Random) -> dict[str, Any] | None:
        if self._learned is not None:
            return self._learned.extra_args("load")
        return {MAX_K_KEY: draw.choice(self._depths)} if self._depths else None

    async def measure(self, num_requests: int, seconds: float, segments_s: float) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._client(index)) for index in range(num_requests)]
            await asyncio.sleep(WARM_S if self._learned is None else LEARNING_S)
            num_windows = 0
            while num_windows < MAX_WINDOWS:
                num_windows += 1
                marks = [(time.perf_counter(), read_counters())]
                for _ in range(WINDOW_PARTS):
                    await asyncio.sleep(seconds / WINDOW_PARTS)
                    marks.append((time.perf_counter(), read_counters()))
                parts = [after["tokens"] - before["tokens"] for (_, before), (_, after) in pairwise(marks)]
                if min(parts) > 0.5 * statistics.median(parts):
                    break
            (start_s, before), (end_s, after) = marks[0], marks[-1]
            elapsed_s, segments = end_s - start_s, {}
            if segments_s:
                await self._engine.collective_rpc("take_segments")
                await asyncio.sleep(segments_s)
                segments = (await self._engine.collective_rpc("take_segments"))[0]
            for client in clients:
                client.cancel()
        await asyncio.sleep(0.3)
        done = {name: after[name] - before[name] for name in COUNTERS}
        # Where outputs are sent by the chunk, vLLM counts chunks as steps; requests in flight are always as many. Those
        # without drafts are not counted: where some have K = 0, `step_ms` is too long.
        steps = done["request_steps"] / num_requests if done["drafts"] else done["steps"]
        return {
            "num_requests": num_requests,
            "windows": num_windows,
            "paused": min(parts) <= 0.5 * statistics.median(parts),
            "seconds": round(elapsed_s, 3),
            "tokens_per_s": round(done["tokens"] / elapsed_s, 1),
            "step_ms": round(1e3 * elapsed_s / steps, 4) if steps else None,
            "steps": round(steps),
            "accepted_length": round(1 + done["accepted"] / done["request_steps"], 3) if done["drafts"] else 1.0,
            "drafts_a_step": round(done["drafts"] / done["request_steps"], 3) if done["drafts"] else 0.0,
            "segments_ms": segments,
        }

    async def _client(self, index: int) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        draw, is_first = random.Random(index), True
        while True:
            self._count += 1
            length = draw.randint(*OUTPUT_TOKENS)
            # The first ones end at different times.
            num_tokens = draw.randint(min(16, length), length) if is_first else length
            params = SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=num_tokens, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY, extra_args=self._extra_args(draw),
            )  # fmt: skip
            is_first = False
            prompt = TokensPrompt(prompt_token_ids=[draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)])
            async for _ in self._engine.generate(prompt, params, f"{id(self)}-{self._count}"):
                pass


async def run(args: argparse.Namespace) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from benchmarks import models

    models.spawn_engines()
    arm = Arm.parse(args.arm[0])
    settings = engine_settings(arm, args)
    with contextlib.ExitStack() as stack:
        if arm.kind == "remote":
            log = args.out.with_suffix(".drafter")
            found = stack.enter_context(drafter(settings, args.drafter_gpu, log))
        begun_s = time.perf_counter()
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        await engine.get_supported_tasks()
        start_s = round(time.perf_counter() - begun_s, 1)
        report: dict[str, Any] = {"arm": args.arm[0], "shape": args.shape, "start_s": start_s, "rows": []}
        if arm.kind == "remote":
            await engine.collective_rpc("set_drafters", args=([found()],))
            while not (await engine.collective_rpc("remote_report"))[0]["num_up"]:
                await asyncio.sleep(0.2)
        await measure_arm(engine, args, report, settings)
        if arm.kind == "remote":
            report["remote"] = (await engine.collective_rpc("remote_report"))[0]
            write(args.out, report, settings)
    with contextlib.suppress(Exception):
        engine.shutdown()
    return report


def write(out: Path, report: dict[str, Any], settings: dict[str, Any]) -> None:
    """What is known so far, with the engine's settings and the conditions."""
    shown = {name: value for name, value in settings.items() if name != "model"}
    out.write_text(json.dumps(report | {"settings": shown, "conditions": conditions()}, indent=1))


async def measure_arm(engine: Any, args: argparse.Namespace, report: dict[str, Any], settings: dict[str, Any]) -> None:
    """Every cell, round by round, then where a step's time goes; written as it comes."""
    await engine.collective_rpc("make_tokens_random")
    arm, learned, observing = Arm.parse(args.arm[0]), None, None
    if arm.kind not in ("peagle", "remote"):
        args.depths = ["all"]
    if "learned" in args.depths:
        learned = LearnedDepths(engine, arm.k)
        observing = asyncio.create_task(learned.observe_forever())
    turns: Any = Turns(Path(args.turn[0]), *map(int, args.turn[1:])) if args.turn else contextlib.nullcontext()
    shown = ("depths", "num_requests", "tokens_per_s", "step_ms", "accepted_length")
    for number in range(args.rounds):
        async with turns:
            for mix in args.depths:
                load = Load(engine, mix, learned if mix == "learned" else None)
                for num_requests in args.requests:
                    row = {"depths": mix, **await load.measure(num_requests, args.seconds, 0.0)}
                    if mix == "learned" and learned is not None:
                        row["believed"] = learned.believed()
                    print(json.dumps({"arm": args.arm[0], **{key: row[key] for key in shown}}), flush=True)
                    report["rows"].append({"round": number, **row})
                    write(args.out, report, settings)
    if observing is not None:
        observing.cancel()
    if arm.kind != "stock":
        report["segments"] = []
        async with turns:
            await engine.collective_rpc("start_segments")
            for mix in [mix for mix in args.depths if mix != "learned"]:
                for count in args.requests:
                    row = await Load(engine, mix).measure(count, 0.2, 1.0)
                    report["segments"].append({"depths": mix, **row})
        write(args.out, report, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", nargs="+", required=True, help="none, eagle3-K, stock-K, peagle-K or remote-K")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kv-gib", type=int, default=20, help="KV cache of each engine")
    parser.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--drafter-gpu", default="1", help="of a remote drafter")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-engines"))
    parser.add_argument("--shape", default="QWEN3_CODER_30B", help="a name of benchmarks.models")
    parser.add_argument("--engine", default="{}", help="further settings of every arm's engine, as JSON")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=4.0)
    depths = "K of requests of our arms: all (K_max), learned (as the service does), or such as 3 or 0/3/7, drawn from"
    parser.add_argument("--depths", nargs="+", default=["all"], help=depths)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if len(args.arm) > 1:
        return measure_in_turn(args)
    asyncio.run(run(args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
