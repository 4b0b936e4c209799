"""One engine of `benchmarks.graphs`, in this process: start it, run its batches, say what every step ran on.

All engines use `GRAPH_WORKER`; without tiers it leaves vLLM's choice of graphs alone and records it.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import write_head, write_target
from peagle.vllm.acceptance import DEPTH_KEY
from peagle.vllm.engine import GRAPH_WORKER, GRAPHS_KEY, engine_kwargs
from peagle.vllm.graph_worker import RecordedStep

SURVIVAL = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""Synthetic P(first i drafts accepted) by depth i, in the range published for P-EAGLE heads."""

K_MAX = len(SURVIVAL)
TIERS = (0, 1, 3, 5, 7)
PROMPT_TOKENS = 128
MAX_NUM_SEQS = 32
MIN_STEPS = 20
"""Fewer steady steps than this are no measurement."""

LABELS = ("0", "1", "2", "3", "5", "7", "7+1")
"""Draft depths of a batch: one for all requests, or several in turn."""

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


@dataclass(frozen=True)
class Engine:
    """`tiers`: None for vLLM's own graphs. `labels`: batches to run. `is_text`: real weights and texts, no timing."""

    max_draft_tokens: int
    tiers: tuple[int, ...] | None
    labels: tuple[str, ...]
    is_text: bool = False


ENGINES = {
    "k7-tiers": Engine(K_MAX, TIERS, LABELS),
    "k7": Engine(K_MAX, None, LABELS),
    "k3": Engine(3, None, ("3",)),
    "k5": Engine(5, None, ("5",)),
    "text-tiers": Engine(K_MAX, TIERS, (*LABELS, "0+1+2+3+5+7"), is_text=True),
    "text": Engine(K_MAX, None, (*LABELS, "0+1+2+3+5+7"), is_text=True),
}


def depths_of(label: str, num_requests: int) -> list[int]:
    """K of each request of a batch: "7+1" is 7, 1, 7, 1, ..."""
    depths = [int(depth) for depth in label.split("+")]
    return [depths[place % len(depths)] for place in range(num_requests)]


def steady(steps: Sequence[RecordedStep], depths: Sequence[int]) -> dict[str, Any]:
    """What the batch with these depths took per step, between the first and the last step with all its requests.

    Returns {"seconds": mean interval, "num_steps", "share": steps between those two that have the batch's shape,
    "graphs": {"MODE/tokens of the graph": steps}}.

    Raises:
        ValueError: too few steps have the batch's shape.
    """
    shape = (len(depths), len(depths) + sum(depths))
    places = [place for place, (_, _, *found, _) in enumerate(steps) if tuple(found) == shape]
    if len(places) < MIN_STEPS:
        raise ValueError(f"{len(places)} of {len(steps)} steps have {shape[0]} requests and {shape[1]} tokens")
    between = steps[places[0] : places[-1] + 1]
    graphs = Counter(f"{mode}/{padded}" for _, mode, _, _, padded in between)
    return {
        "seconds": (between[-1][0] - between[0][0]) / (len(between) - 1),
        "num_steps": len(between),
        "share": round(len(places) / len(between), 4),
        "graphs": dict(graphs.most_common()),
    }


def settings_of(engine: Engine, folder: Path, head_dir: Path | None = None) -> dict[str, Any]:
    """Keyword arguments for vLLM's `LLM`."""
    k = engine.max_draft_tokens
    extra: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 2048, "max_num_seqs": MAX_NUM_SEQS}
    extra |= {"max_num_batched_tokens": 8192, "seed": 0, "disable_log_stats": True}
    if engine.is_text:
        from peagle.embedded import DEFAULT_TARGET, prepare_target
        from peagle.heads import prepare_head

        target_dir = prepare_target()
        head_dir = prepare_head(DEFAULT_TARGET, target_dir)
        extra |= {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 4 * 2**30, "generation_config": "vllm"}
    else:
        target_dir = write_target(folder / "target")
        head_dir = head_dir or folder / "head"
        if not (head_dir / "config.json").exists():
            write_head(head_dir, K_MAX)
        extra |= {"load_format": "dummy", "skip_tokenizer_init": True}
    kwargs = engine_kwargs(
        target_dir,
        head_dir,
        max_draft_tokens=k,
        dtype="bfloat16",
        async_scheduling=True,
        on_cpu=False,
        full_graph_depths=engine.tiers,
        extra=extra,
    )
    if engine.tiers is None:
        counted = {"depths": [], "max_padding_tokens": 0}
        kwargs |= {"worker_cls": GRAPH_WORKER, "additional_config": {GRAPHS_KEY: counted}}
    if not engine.is_text:
        kwargs["speculative_config"] |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(SURVIVAL[:k]),
            "draft_load_config": {"load_format": "safetensors"},
        }
    return kwargs


class RunningEngine:
    """An `LLM` and the batches that are asked of it."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        from vllm import LLM

        start_s = time.perf_counter()
        self._llm = LLM(**kwargs)
        self.start_s = round(time.perf_counter() - start_s, 1)

    def collective_rpc(self, method: str, *args: Any) -> Any:
        """What the first worker answers."""
        return self._llm.collective_rpc(method, args=args)[0]

    def report(self) -> dict[str, Any]:
        """`GraphTiers.graph_report` of the first worker."""
        report: dict[str, Any] = self._llm.collective_rpc("graph_report")[0]
        return report

    def steps(self) -> list[RecordedStep]:
        """Steps since the last call."""
        steps: list[RecordedStep] = [tuple(step) for step in self._llm.collective_rpc("graph_steps")[0]]
        return steps

    def run(
        self, prompts: Sequence[Sequence[int]], depths: Sequence[int], max_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Greedy output of all prompts at once, each at its K."""
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=length, detokenize=False, extra_args={DEPTH_KEY: depth}
            )
            for depth, length in zip(depths, max_tokens, strict=True)
        ]
        requests = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of `texts`."""
        tokenizer = self._llm.get_tokenizer()
        return [list(tokenizer.encode(text)) for text in texts]


def time_batches(
    engine: RunningEngine, spec: Engine, batch_sizes: Sequence[int], num_steps: int, num_repeats: int
) -> Iterator[dict[str, Any]]:
    """One row a label and batch size: median over repeats of the mean step time, in seconds."""
    random_ids = random.Random(0)
    for num_requests in batch_sizes:
        prompts = [[random_ids.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)]
        for label in spec.labels:
            depths = depths_of(label, num_requests)
            # Long enough at the expected acceptance, with a margin; steps after the first end do not count.
            lengths = [math.ceil(1.2 * num_steps * (1 + sum(SURVIVAL[:depth]))) for depth in depths]
            engine.run(prompts, depths, [24] * num_requests)  # first use of a shape compiles small kernels
            engine.steps()
            runs = []
            for _ in range(num_repeats):
                engine.run(prompts, depths, lengths)
                runs.append(steady(engine.steps(), depths))
            runs.sort(key=lambda run: float(run["seconds"]))
            yield {"label": label, "num_requests": num_requests, **runs[len(runs) // 2], "repeats": runs}


def write_texts(engine: RunningEngine, spec: Engine) -> Iterator[dict[str, Any]]:
    """One row a label and batching: the tokens that came out of each prompt, alone and beside the others."""
    prompts = engine.encode(TEXTS)
    for label in spec.labels:
        engine.steps()
        depths = depths_of(label, len(prompts))
        lengths = [NUM_TEXT_TOKENS] * len(prompts)
        together = engine.run(prompts, depths, lengths)
        yield {"label": label, "batching": "together", "tokens": together, **_what_ran(engine.steps())}
        alone = [
            engine.run([prompt], [depth], [NUM_TEXT_TOKENS])[0] for prompt, depth in zip(prompts, depths, strict=True)
        ]
        yield {"label": label, "batching": "alone", "tokens": alone, "prompts": prompts, **_what_ran(engine.steps())}


def _what_ran(steps: Sequence[RecordedStep]) -> dict[str, Any]:
    graphs = Counter(f"{mode}/{padded}" for _, mode, _, _, padded in steps)
    return {"num_steps": len(steps), "num_request_steps": sum(step[2] for step in steps), "graphs": dict(graphs)}


def measure(
    name: str,
    folder: Path,
    batch_sizes: Sequence[int],
    num_steps: int,
    num_repeats: int,
    max_padding_tokens: int | None,
) -> dict[str, Any]:
    """Everything that one engine is there for."""
    spec = ENGINES[name]
    kwargs = settings_of(spec, folder)
    if spec.tiers is not None and max_padding_tokens is not None:
        kwargs["additional_config"][GRAPHS_KEY]["max_padding_tokens"] = max_padding_tokens
    engine = RunningEngine(kwargs)
    engine.steps()
    rows = (
        write_texts(engine, spec) if spec.is_text else time_batches(engine, spec, batch_sizes, num_steps, num_repeats)
    )
    found = {"rows": list(rows), "start_s": engine.start_s, "report": engine.report()}
    shown = {name: value for name, value in kwargs.items() if name not in ("model", "speculative_config")}
    return found | {"engine": shown | {"speculative_config": kwargs["speculative_config"] | {"model": "head"}}}
