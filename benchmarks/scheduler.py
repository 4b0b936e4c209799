"""Host time that a step takes in vLLM's scheduler and in ours: what every step of a small target pays.

    python -m benchmarks.scheduler [--requests 1 8 64 256] --out FILE

No model runs. Requests of 100 prompt tokens decode with asynchronous scheduling, as in an engine on a GPU: a step is
planned, then the one before is taken in, whose drafts were accepted one after another with the same chance in every
arm. A request that ends is replaced by another, so with many requests most steps have a prompt in them, as in service.
Arms: vLLM's scheduler with K drafts a step, and ours with K_max = 7, where K is the request's own or learned (survivals
with each request). Milliseconds a step, the least mean of `--repeats` runs, arms in turns: other work on the machine
only adds to them.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from peagle.embedded import DEFAULT_TARGET, prepare_target
from peagle.heads import prepare_head
from peagle.provenance import conditions

ARMS = ("stock-0", "stock-3", "stock-7", "ours-3", "ours-7", "ours-learned")
K_MAX, PROMPT_TOKENS, BLOCK_TOKENS, ANSWER_TOKENS = 7, 100, 16, (128, 384)
ACCEPTANCE = 0.7
SURVIVAL = [0.75, 0.55, 0.42, 0.32, 0.25, 0.2, 0.16]


def make_scheduler(arm: str) -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from peagle.vllm.scheduler import PerRequestDepthAsyncScheduler

    kind, _, depth = arm.partition("-")
    target = prepare_target(DEFAULT_TARGET)
    k = K_MAX if kind == "ours" else int(depth)
    head = {"method": "eagle3", "model": str(prepare_head(DEFAULT_TARGET, target)), "parallel_drafting": True}
    config = EngineArgs(
        model=str(target),
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        speculative_config={**head, "num_speculative_tokens": k} if k else None,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True  # which vLLM turns off on a CPU
    config.cache_config.num_gpu_blocks = num_blocks = 256 * 2048 // BLOCK_TOKENS
    layer = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return (PerRequestDepthAsyncScheduler if kind == "ours" else AsyncScheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        block_size=BLOCK_TOKENS,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def new_request(arm: str, number: int, draw: random.Random, num_begun: int) -> Any:
    """num_begun: tokens of its answer that count as written, so that the first ones end at different times."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from peagle.vllm.request_args import DEPTH_KEY, SURVIVAL_KEY, WORKLOAD_KEY

    kind, _, depth = arm.partition("-")
    extra = {SURVIVAL_KEY: SURVIVAL, WORKLOAD_KEY: "code"} if depth == "learned" else {DEPTH_KEY: int(depth)}
    max_tokens = max(1, draw.randint(*ANSWER_TOKENS) - num_begun)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra if kind == "ours" else None)
    return Request(str(number), [5] * PROMPT_TOKENS, params, pooling_params=None)


def runner_output(scheduled: Any, unfinished: set[str], draw: random.Random) -> Any:
    """What a model runner would say of a step. unfinished: requests with a part of their prompt in it, not the last."""
    from vllm.v1.outputs import ModelRunnerOutput

    names, sampled = list(scheduled.num_scheduled_tokens), []
    for name in names:
        num_accepted, num_drafts = 0, len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        while num_accepted < num_drafts and draw.random() < ACCEPTANCE:
            num_accepted += 1
        sampled.append([] if name in unfinished else [7] * (1 + num_accepted))
    return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)


def measure(arm: str, num_requests: int, num_steps: int, num_warm: int = 40) -> dict[str, float]:
    """Mean milliseconds of planning a step and of taking it in."""
    scheduler, draw, number = make_scheduler(arm), random.Random(0), 0
    plan_s = update_s = 0.0
    before, unfinished = None, set[str]()
    for step in range(num_warm + num_steps):
        while len(scheduler.requests) < num_requests:
            scheduler.add_request(new_request(arm, number, draw, draw.randint(0, ANSWER_TOKENS[0]) * (step == 0)))
            number += 1
        if step == num_warm:
            plan_s = update_s = 0.0
        begun_s = time.perf_counter()
        scheduled = scheduler.schedule()
        plan_s += time.perf_counter() - begun_s
        prompts = {name for name in scheduled.num_scheduled_tokens if scheduler.requests[name].is_prefill_chunk}
        if before is not None:
            output = runner_output(before, unfinished, draw)
            begun_s = time.perf_counter()
            scheduler.update_from_output(before, output)
            update_s += time.perf_counter() - begun_s
        before, unfinished = scheduled, prompts
    return {"schedule_ms": 1e3 * plan_s / num_steps, "update_ms": 1e3 * update_s / num_steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for num_requests in options.requests:
        runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for _ in range(options.repeats):
            for arm in ARMS:
                runs[arm].append(measure(arm, num_requests, options.steps))
        for arm, found in runs.items():
            best = min(found, key=lambda figures: sum(figures.values()))
            row = {name: round(value, 4) for name, value in best.items()}
            rows.append({"arm": arm, "num_requests": num_requests, **row, "sum_ms": round(sum(best.values()), 4)})
    if options.out is not None:
        options.out.write_text(json.dumps({"made": conditions(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    by_arm = [[arm, *(row["sum_ms"] for row in rows if row["arm"] == arm)] for arm in ARMS]
    sys.stdout.write(markdown(["ms a step at requests", *map(str, options.requests)], by_arm) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
