"""Starts an engine of a published model's real shape with random weights, drafts, and lets it answer.

    python -m benchmarks.check_models --shape GPT_OSS_20B [--num-layers 4] [--head-layers 1] [--own-tables]

Writes one JSON line, to `--out` or among what vLLM prints. Engine settings are the service's; on a machine without a
GPU the target's weights are not quantised. A batch of requests is answered twice, with K_max drafts and without any:
random weights hardly accept a draft, so `equal_answers` says that verification leaves answers alone (near ties fall
either way in bfloat16), and the program fails where an answer is short or nothing was drafted.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import models
from peagle.provenance import conditions

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, (16, 200), 24


def engine_settings(args: argparse.Namespace, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `LLM`."""
    from peagle.vllm.engine import engine_kwargs

    shape = dict(getattr(models, args.shape))
    if args.num_layers:
        shape = models.shortened(shape, args.num_layers)
    if on_cpu:
        shape.pop("quantization_config", None)
    head = {**models.PUBLISHED_HEADS.get(args.shape, {"num_depths": 7}), "num_layers": args.head_layers}
    if args.vocab_size:
        special = {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in shape}
        shape |= {"vocab_size": args.vocab_size, **special}
        head["draft_vocab_size"] = min(args.vocab_size, head.get("draft_vocab_size", models.DRAFT_VOCAB_SIZE))
    target_dir = models.write_target(folder / "target", shape)
    head_dir = models.write_head(folder / "head", target=shape, own_tables=args.own_tables, **head)
    extra = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": NUM_REQUESTS,
        "enable_prefix_caching": False,
        # Little, so that two models are checked side by side on one GPU.
        **({} if on_cpu else {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}),
        "enforce_eager": args.eager or on_cpu,
        "disable_log_stats": False,
        "tensor_parallel_size": args.tensor_parallel_size,
        **({} if args.kv_cache_dtype is None else {"kv_cache_dtype": args.kv_cache_dtype}),
        **({} if args.backend is None else {"attention_backend": args.backend}),
    }
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    kwargs = engine_kwargs(target_dir, head_dir, dtype=dtype, on_cpu=on_cpu, extra=extra)
    kwargs["speculative_config"]["draft_load_config"] = {"load_format": "safetensors"}
    return kwargs


def answers(engine: Any, prompts: list[list[int]], k: int | None) -> list[list[int]]:
    """Greedy answers, with at most `k` drafts a step."""
    from vllm import SamplingParams, TokensPrompt

    from peagle.vllm.request_args import DEPTH_KEY

    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=OUTPUT_TOKENS,
        detokenize=False,
        extra_args=None if k is None else {DEPTH_KEY: k},
    )
    found = engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in found]


def counted(engine: Any) -> tuple[int, int]:
    """Drafts verified and accepted since the engine's start."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return int(values[names[0]]), int(values[names[1]])


def check(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from vllm import LLM
    from vllm.platforms import current_platform

    from peagle.vllm import compat

    on_cpu = current_platform.is_cpu()
    models.spawn_engines()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    compat.allow_v2()
    settings = engine_settings(args, folder, on_cpu)
    start_s = time.perf_counter()
    engine = LLM(**settings)
    report: dict[str, Any] = {"shape": args.shape, "start_s": round(time.perf_counter() - start_s, 1)}
    config = engine.llm_engine.vllm_config.model_config
    report |= {"architecture": config.architecture, "num_layers": config.hf_text_config.num_hidden_layers}
    report |= {"vocab_size": config.get_vocab_size(), "quantization": config.quantization, "dtype": settings["dtype"]}
    report |= {"k_max": settings["speculative_config"]["num_speculative_tokens"], "head_layers": args.head_layers}
    report |= {} if args.backend is None else {"backend": args.backend}
    draw = random.Random(0)
    prompts = [[draw.randrange(1000, 30_000) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(NUM_REQUESTS)]
    drafted = answers(engine, prompts, None)
    num_drafts, num_accepted = counted(engine)
    plain = answers(engine, prompts, 0)
    report |= {"draft_tokens": num_drafts, "accepted_tokens": num_accepted}
    report["drafts_at_k_0"] = counted(engine)[0] - num_drafts
    report["equal_answers"] = f"{sum(a == b for a, b in zip(drafted, plain, strict=True))} of {NUM_REQUESTS}"
    is_complete = all(len(answer) == OUTPUT_TOKENS for answer in (*drafted, *plain))
    report["ok"] = is_complete and num_drafts > 0 and report["drafts_at_k_0"] == 0
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", required=True, help=f"a name of benchmarks.models: {', '.join(models.PUBLISHED_HEADS)}"
    )
    parser.add_argument("--num-layers", type=int, help="fewer layers of the target")
    parser.add_argument("--vocab-size", type=int, help="a smaller vocabulary, where memory is short")
    parser.add_argument("--head-layers", type=int, default=4)
    parser.add_argument("--own-tables", action="store_true", help="the head has its own embeddings and output matrix")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", help="bfloat16 on a CPU: slow, in half the memory")
    parser.add_argument("--kv-cache-dtype", help="vLLM's name, such as fp8")
    parser.add_argument("--backend", help="vLLM's name of a way to attend, such as TRITON_ATTN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eager", action="store_true", help="without compilation and CUDA graphs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = check(args, Path(folder))
    line = json.dumps(report | {"conditions": conditions()}) + "\n"
    if args.out is None:
        sys.stdout.write(line)
    else:
        args.out.write_text(line, encoding="utf-8")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
