"""Output tokens/s with real heads on real prompts in stock vLLM: no speculation, EAGLE-3, P-EAGLE, side by side.

    python -m benchmarks.heads --prompts FILE.jsonl --arms none HEAD:3 HEAD:7 OTHER:7 --out FILE.json

An arm is `none`, or a head and its K, as vLLM serves it; HEAD:K+ours is on our worker. Every arm has an engine of its
own, in a process of its own; all are started first and stay, so that the arms take turns at each load. The load is
closed: c requests are always running, the same prompts in the same random order in every arm, answers greedy, up to the
end token or `--max-tokens`. Tokens are counted as they leave the engine's process, until no prompt is left to begin.
vLLM drafts in parallel only on its V1 model runner (PR #43010), and may give other arms V2: `--same-runner` gives V1.

otps: output tokens/s. tokens_per_step: of a request, in steps after its prompt. step_ms, median_step_ms: such a step.
num_identical: of num_answers, those with the tokens of the first arm's (in bfloat16 ties go either way).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from peagle.provenance import conditions
from peagle.vllm.engine import ASYNC_SCHEDULER, V2_WORKER, openmp_preload

NO_HEAD, OURS = "none", "+ours"
MAX_MODEL_LEN = 2048
KV_CACHE_BYTES = 6 * 2**30
"""Fixed: engines that size their caches from free memory take each other's growth for their own."""
MEMORY_SHARE = 0.08
"""Of the GPU, that must be free when an engine starts."""
START_S = 600.0
LEAST_PROMPTS, WAVES = 32, 4
"""Prompts of a load: so many, and so many for each of its requests, as far as there are."""
WARM_TOKENS = 8
"""Of each prompt's answer before anything is measured: vLLM compiles kernels for a prompt's length at its first use."""


def cpu_environment() -> dict[str, str]:
    """With which vLLM's CPU engine is at its speed; what this process has already, it keeps.

    vLLM alone leaves a core free for processes that mostly wait. Engine processes are spawned, so that LD_PRELOAD takes
    effect.
    """
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    added = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_OMP_THREADS_BIND": cores}
    preload = openmp_preload(os.environ.get("LD_PRELOAD", ""))
    return added | os.environ | ({"LD_PRELOAD": preload} if preload else {})


def parse_arm(text: str) -> tuple[str, int]:
    """Head and K, ("none", 0) without one.

    Raises:
        ValueError: naming what is wrong with `text`.
    """
    if text == NO_HEAD:
        return text, 0
    head, colon, k = text.removesuffix(OURS).rpartition(":")
    if not (colon and head and k.isdecimal() and int(k) > 0):
        raise ValueError(f"--arms: {text!r} is neither {NO_HEAD} nor HEAD:K")
    return head, int(k)


def engine_settings(target_dir: Path, arm: tuple[str, int], max_num_seqs: int, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`: its defaults, but for what a comparison fixes."""
    from peagle.checkpoint import read_head_config
    from peagle.heads import prepare_head

    head, k = arm
    settings: dict[str, Any] = {"model": str(target_dir), "max_model_len": MAX_MODEL_LEN, "max_num_seqs": max_num_seqs}
    settings |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "seed": 0}
    if on_gpu:
        settings |= {"dtype": "bfloat16", "gpu_memory_utilization": MEMORY_SHARE}
        settings |= {"kv_cache_memory_bytes": KV_CACHE_BYTES, "max_num_batched_tokens": 8192}
    else:
        settings |= {"dtype": "float32", "gpu_memory_utilization": 0.2, "enforce_eager": True}
    if k:
        head_dir = prepare_head(head, target_dir)
        parallel = read_head_config(head_dir).ptd_token_id is not None
        speculative = {"method": "eagle3", "model": str(head_dir), "num_speculative_tokens": k}
        settings["speculative_config"] = speculative | {"parallel_drafting": parallel}
    return settings


@dataclass
class _Running:
    """A request: the place of its prompt, what it has written so far, and when its last output came."""

    place: int
    tokens: list[int] = field(default_factory=list)
    last_s: float = 0.0


class Load:
    """One engine and its requests. Reads outputs as they leave the engine's process."""

    def __init__(self, settings: dict[str, Any], prompts: Sequence[list[int]], params: dict[str, Any]) -> None:
        """prompts: token ids; params: of `SamplingParams`."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from peagle.vllm import compat

        compat.allow_v2()
        config = EngineArgs(**settings).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self.runner = "V2" if config.use_v2_model_runner else "V1"
        self._engine = LLMEngine.from_vllm_config(config, UsageContext.OPENAI_API_SERVER, disable_log_stats=True)
        self._prompts, self._params = prompts, params
        self._num_requests = 0

    def _add(self, index: int) -> str:
        from vllm import SamplingParams, TokensPrompt

        self._num_requests += 1
        prompt = TokensPrompt(prompt_token_ids=self._prompts[index])
        request_id = f"r{self._num_requests}"
        self._engine.add_request(request_id, prompt, SamplingParams(**self._params))
        return request_id

    def run(self, num_requests: int, num_prompts: int, max_tokens: int) -> dict[str, Any]:
        """Answer the first prompts, so many at a time; what came out until no prompt was left to begin.

        Returns the fields of a row, and answers: token ids by the prompt's place, of those that ended.
        """
        self._params["max_tokens"] = max_tokens
        waiting = iter(range(num_prompts))
        running: dict[str, _Running] = {}
        answers: dict[int, list[int]] = {}
        self._begin(running, waiting, num_requests)
        begin_s = time.perf_counter()
        num_tokens, steps = 0, [(0, 0.0)]
        while len(running) == num_requests:
            outputs = self._engine.engine_core.get_output().outputs
            now_s = time.perf_counter()
            for output in outputs:
                request_id = output.request_id.split("-")[0]  # vLLM adds a suffix of its own
                if (one := running.get(request_id)) is None:
                    continue  # of a run before, under way when that was ended
                num_tokens += len(output.new_token_ids)
                if one.tokens:
                    steps.append((len(output.new_token_ids), now_s - one.last_s))
                one.tokens += output.new_token_ids
                one.last_s = now_s
                if output.finish_reason is not None:
                    answers[one.place] = one.tokens
                    del running[request_id]
            self._begin(running, waiting, num_requests)
        self._engine.abort_request(list(running))
        tokens, seconds = zip(*(steps[1:] or steps), strict=True)
        return {
            "otps": round(num_tokens / (now_s - begin_s), 2),
            "tokens_per_step": round(statistics.mean(tokens), 4),
            "step_ms": round(1e3 * statistics.mean(seconds), 4),
            "median_step_ms": round(1e3 * statistics.median(seconds), 4),
            "num_tokens": num_tokens,
            "answers": answers,
        }

    def _begin(self, running: dict[str, _Running], waiting: Iterator[int], num_requests: int) -> None:
        while len(running) < num_requests and (place := next(waiting, None)) is not None:
            running[self._add(place)] = _Running(place)

    def close(self) -> None:
        """Stop the engine's process."""
        self._engine.engine_core.shutdown()


def read_prompts(file: Path, target_dir: Path, max_tokens: int) -> tuple[list[list[int]], int]:
    """Token ids of the prompts that leave room for an answer, and the number of those that do not.

    Raises:
        ValueError: naming the file, where none does, or a line that is no prompt.
    """
    from transformers import AutoTokenizer

    from peagle.train.data import ChatTemplate, read_jsonl

    template = ChatTemplate(AutoTokenizer.from_pretrained(target_dir))
    rendered = [template.render(prompt) for prompt in read_jsonl(file)]
    fitting = [tokens for tokens in rendered if len(tokens) + max_tokens <= MAX_MODEL_LEN]
    if not fitting:
        raise ValueError(f"--prompts {file}: none fits {MAX_MODEL_LEN} tokens with an answer of {max_tokens}")
    random.Random(0).shuffle(fitting)
    return fitting, len(rendered) - len(fitting)


def serve_arm(settings: dict[str, Any], prompts: list[list[int]], params: dict[str, Any], pipe: Connection) -> None:
    """A process: starts the engine, says its model runner, runs the loads that it is told until its pipe is closed."""
    load = Load(settings, prompts, params)
    try:
        with suppress(EOFError):
            pipe.send(load.runner)
            while True:
                pipe.send(load.run(*pipe.recv()))
    finally:
        load.close()


def eos_ids(target_dir: Path) -> list[int]:
    """End tokens by generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = target_dir / name
        stored = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if stored is not None:
            return stored if isinstance(stored, list) else [stored]
    raise ValueError(f"target {target_dir}: neither generation_config.json nor config.json names eos_token_id")


def measure(args: argparse.Namespace, arms: dict[str, tuple[str, int]], target_dir: Path) -> dict[str, Any]:
    """Starts every arm, then a row for each load, turn and arm.

    Raises RuntimeError naming an arm whose engine did not start or ended, ValueError with too few prompts.
    """
    import torch

    prompts, num_left_out = read_prompts(args.prompts, target_dir, args.max_tokens)
    if len(prompts) <= max(args.num_requests):
        raise ValueError(f"--prompts: {len(prompts)} fit, --num-requests up to {max(args.num_requests)} need more")
    params = {"temperature": 0.0, "stop_token_ids": eos_ids(target_dir), "detokenize": False}
    on_gpu = torch.cuda.is_available()
    os.environ.update({} if on_gpu else cpu_environment())
    os.environ.update({"VLLM_USE_V2_MODEL_RUNNER": "0"} if args.same_runner else {})
    context = multiprocessing.get_context("spawn")
    running = {}
    for name, arm in arms.items():
        settings = engine_settings(target_dir, arm, max(args.num_requests), on_gpu)
        if name.endswith(OURS):
            settings |= {"worker_cls": V2_WORKER, "scheduler_cls": ASYNC_SCHEDULER, "async_scheduling": True}
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_arm, args=(settings, prompts, params, theirs), name=name)
        process.start()
        theirs.close()
        running[name] = (process, ours)
    rows: list[dict[str, Any]] = []
    try:
        runners = {name: _answer(name, pipe, START_S) for name, (_, pipe) in running.items()}
        for place, num_requests in enumerate(args.num_requests):
            num_prompts = min(max(LEAST_PROMPTS, WAVES * num_requests), len(prompts))
            names = list(running)
            answers: dict[str, dict[int, list[int]]] = {}
            for name in names[place % len(names) :] + names[: place % len(names)]:
                pipe = running[name][1]
                for max_tokens in (WARM_TOKENS, args.max_tokens):
                    pipe.send((num_requests, num_prompts, max_tokens))
                    found = _answer(name, pipe, START_S)
                answers[name] = found.pop("answers")
                rows.append({"arm": name, "num_requests": num_requests, **found})
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
            for row in rows[-len(names) :]:
                row |= compared(answers[row["arm"]], answers[names[0]])
    finally:
        for _, pipe in running.values():
            pipe.close()  # ends the process in an orderly way
        for process, _ in running.values():
            process.join(30.0)
            process.kill()
    return {"num_prompts": len(prompts), "num_left_out": num_left_out, "runners": runners, "rows": rows}


def _answer(name: str, pipe: Connection, timeout_s: float) -> Any:
    with suppress(EOFError):
        if pipe.poll(timeout_s):
            return pipe.recv()
    raise RuntimeError(f"the engine of {name} ended or does not answer: its log is above")


def compared(answers: dict[int, list[int]], base: dict[int, list[int]]) -> dict[str, int]:
    """How many prompts both answered, and how many of these answers are the same tokens."""
    both = answers.keys() & base.keys()
    return {"num_answers": len(both), "num_identical": sum(answers[place] == base[place] for place in both)}


def summary(rows: Sequence[dict[str, Any]], against: str) -> list[dict[str, Any]]:
    """The rows with the ratio of their OTPS to that of the arm `against` at the same load."""
    base = {row["num_requests"]: row["otps"] for row in rows if row["arm"] == against}
    return [{**row, "ratio": round(row["otps"] / base[row["num_requests"]], 4)} for row in rows]


def table(report: Sequence[dict[str, Any]]) -> str:
    """OTPS and its ratio, arms by load."""
    loads = list(dict.fromkeys(one["num_requests"] for one in report))
    cell = {(one["arm"], one["num_requests"]): f"{one['otps']:.0f} ({one['ratio']:.2f})" for one in report}
    names = sorted({one["arm"] for one in report}, key=[one["arm"] for one in report].index)
    return markdown(["requests", *map(str, loads)], [[name, *(cell[name, load] for load in loads)] for name in names])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="an embedded target's name, or a directory")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL, as peagle.vllm.generate takes it")
    parser.add_argument("--arms", nargs="+", required=True, help=f"{NO_HEAD}, or HEAD:K; ratios are to the first")
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--same-runner", action="store_true", help="vLLM's V1 model runner in every arm")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        arms = {text: parse_arm(text) for text in args.arms}
    except ValueError as error:
        parser.error(str(error))
    from peagle.embedded import embedded_targets, prepare_target

    target_dir = prepare_target(args.target) if args.target in embedded_targets() else Path(args.target)
    found = measure(args, arms, target_dir)
    found["rows"] = report = summary(found["rows"], args.arms[0])
    document = {"made": conditions(), "arms": args.arms, "max_tokens": args.max_tokens, **found}
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(report) + "\n")


if __name__ == "__main__":
    main()
