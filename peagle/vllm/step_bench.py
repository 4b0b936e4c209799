"""Times of decoding steps of fixed batches, on a running engine.

Enters: batches to time (`Cell`). Leaves: points of a table of step times. The engine runs as it serves, in a process of
its own with its own loop; only its scheduler is the timed one, and reports the interval between two results with the
shape of each step (`peagle.vllm.step_clock`). This side reads those reports and nothing else, so its own speed does
not enter. Only steps count that have exactly the cell's shape and follow another such step.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from cluster.step_time import StepPoint, StepShape, StepTimes
from peagle.vllm.channel import DEPTH_KEY
from peagle.vllm.engine_facts import capture_sizes, graph_padding_tokens
from peagle.vllm.step_clock import STEP_TIME_HEADER, TimedStep
from peagle.vllm.timed_scheduler import CONDITIONS_HEADER

TIMED_SYNC_SCHEDULER = "peagle.vllm.timed_scheduler.TimedScheduler"
TIMED_ASYNC_SCHEDULER = "peagle.vllm.timed_scheduler.TimedAsyncScheduler"
MIN_STEPS = 5
"""Fewer timed steps of a shape are no measurement."""
PATIENCE = 10
"""Steps that a batch may take in all, for each that it is to be timed; prompts come on top."""


Mixed = Literal["none", "few", "many"]
"""Which batches of unequal depths to time."""


@dataclass(frozen=True)
class Cell:
    """A batch to time: the K of each request, and how long their prompts are."""

    depths: tuple[int, ...]
    context_tokens: int

    def __str__(self) -> str:
        k = "/".join(str(depth) for depth in sorted(set(self.depths)))
        return f"{len(self.depths)} requests at K = {k}, context {self.context_tokens}"

    def matches(self, step: TimedStep) -> bool:
        uniform = self.depths[0] if min(self.depths) == max(self.depths) else None
        num_tokens = len(self.depths) + sum(self.depths)
        return (step.num_requests, step.num_tokens, step.uniform_depth) == (len(self.depths), num_tokens, uniform)


def grid(
    batch_sizes: Iterable[int], depths: Sequence[int], contexts: Sequence[int], mixed: Mixed = "few"
) -> list[Cell]:
    """Every batch size at every depth at the first context, and batches of unequal depths.

    `few` of these are two a size: one request at a draft less than the others, which have the deepest K (the ragged
    batch with the most tokens), and halves at the deepest and none. With full graphs for several depths the first is
    padded onto one, and all that is known of ragged batches is the second: `many` adds halves at neighbouring depths.
    At each further context: smallest, middle and largest batch, each at no drafts and at the deepest K.
    """
    sizes, levels = sorted(set(batch_sizes)), sorted(set(depths))
    deepest = levels[-1]
    cells = [Cell((depth,) * size, contexts[0]) for size in sizes for depth in levels]
    pairs = [] if mixed == "none" or deepest == 0 else [(0, deepest)]
    pairs += pairwise(levels) if mixed == "many" else []
    for size in (size for size in sizes if size > 1):
        cells += [Cell((high,) * (size - size // 2) + (low,) * (size // 2), contexts[0]) for low, high in pairs]
        cells += [Cell((deepest,) * (size - 1) + (deepest - 1,), contexts[0])] if pairs else []
    for context in contexts[1:]:
        for size in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
            cells += [Cell((depth,) * size, context) for depth in sorted({min(depths), deepest})]
    return list(dict.fromkeys(cells))


class StepBench:
    """One engine, started with `engine_kwargs`' settings."""

    def __init__(self, kwargs: dict[str, Any], seed: int = 0) -> None:
        scheduler = TIMED_ASYNC_SCHEDULER if kwargs["async_scheduling"] else TIMED_SYNC_SCHEDULER
        settings = {"skip_tokenizer_init": True, **kwargs, "scheduler_cls": scheduler}
        config = EngineArgs(**settings).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._raw_capture_sizes = tuple(config.compilation_config.cudagraph_capture_sizes or ())
        self._config = config
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        self.max_model_len: int = config.model_config.max_model_len
        self.max_draft_tokens: int = config.num_speculative_tokens
        self._engine = LLMEngine.from_vllm_config(config, UsageContext.OPENAI_API_SERVER, disable_log_stats=True)
        cache = self._engine.vllm_config.cache_config
        self._max_cached_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._seed = seed
        self._num_cells = 0
        self.conditions: dict[str, Any] = {}
        """Of the engine, by its own word (`engine_conditions`); there once a cell was measured."""

    def why_not(self, cell: Cell, num_steps: int) -> str | None:
        """What keeps `cell` from being timed on this engine; None if nothing does."""
        size = len(cell.depths)
        if size > self.max_num_seqs:
            return f"the engine takes {self.max_num_seqs} requests at once (max_num_seqs)"
        grown = cell.context_tokens + num_steps * (1 + max(cell.depths))
        if grown > self.max_model_len:
            return f"a request may grow to {grown} tokens, the engine's limit is {self.max_model_len} (max_model_len)"
        if self._max_cached_tokens and size * grown > self._max_cached_tokens:
            return f"it may need {size * grown} tokens of KV cache, the engine has {self._max_cached_tokens}"
        return None

    def measure(self, cell: Cell, num_steps: int, num_warmup: int) -> list[TimedStep]:
        """`num_steps` timed steps of `cell`, after `num_warmup` that are thrown away.

        Fewer where requests ended first, or kept waiting for each other (a KV cache too small for all of them).
        Prompts are random tokens, the same for every cell, so that the engine's prefix cache has them.
        """
        self._num_cells += 1
        prefix = f"cell{self._num_cells}-"
        ids = [self._add(f"{prefix}{index}", index, depth, cell) for index, depth in enumerate(cell.depths)]
        found: list[TimedStep] = []
        num_running, was_ours = len(ids), False
        patience = PATIENCE * (num_steps + num_warmup) + len(ids) * (1 + cell.context_tokens // 128)
        while num_running and patience and len(found) < num_steps + num_warmup:
            patience -= 1
            for output in self._engine.engine_core.get_output().outputs:
                headers = output.trace_headers or {}
                if CONDITIONS_HEADER in headers:
                    self.conditions = json.loads(headers[CONDITIONS_HEADER])
                if not output.request_id.startswith(prefix):
                    continue  # of an earlier cell, under way when that was ended
                num_running -= output.finish_reason is not None
                if STEP_TIME_HEADER in headers:
                    step = TimedStep.decode(headers[STEP_TIME_HEADER])
                    is_ours = cell.matches(step)
                    if is_ours and was_ours:
                        found.append(step)
                    was_ours = is_ours
        self._engine.abort_request(ids)
        return found[num_warmup : num_warmup + num_steps]

    def _add(self, request_id: str, index: int, depth: int, cell: Cell) -> str:
        tokens = random.Random(self._seed + index).choices(range(self._vocab_size), k=cell.context_tokens)
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=self.max_model_len - cell.context_tokens,
            extra_args={DEPTH_KEY: depth},
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=tokens), params)
        return request_id

    def table(self, points: Sequence[StepPoint], conditions: Mapping[str, Any]) -> StepTimes:
        """`points` of this engine, with its conditions and `conditions`. Call it after a measurement."""
        depths = self.conditions["full_graph_depths"]
        return StepTimes(
            points,
            max_draft_tokens=self.max_draft_tokens,
            full_graph_depths=depths,
            capture_sizes=capture_sizes(self._config, self._raw_capture_sizes, self.conditions["cudagraph_mode"]),
            padding_tokens=graph_padding_tokens(self._config) if depths else 0,
            conditions={**self.conditions, **conditions},
        )

    def close(self) -> None:
        """Stop the engine's process."""
        self._engine.engine_core.shutdown()


def to_point(cell: Cell, rounds: Sequence[Sequence[TimedStep]]) -> StepPoint:
    """The least of the rounds' medians, and the 95th percentile of all steps.

    What else runs on a machine makes steps longer and never shorter, and two rounds taken together, one of them slow,
    may have a median in the middle that no step has (on an H200 one batch came to 37 ms with a 95th percentile of 47,
    between neighbours of 27 and 31).

    Raises:
        ValueError: fewer steps than `MIN_STEPS`.
    """
    everything = [step for steps in rounds for step in steps]
    if len(everything) < MIN_STEPS:
        raise ValueError(
            f"{cell}: {len(everything)} timed steps, at least {MIN_STEPS} are needed; requests ended or waited before"
        )
    whole = [steps for steps in rounds if len(steps) >= MIN_STEPS] or [everything]
    median_s, best = min(((_median_s(steps), steps) for steps in whole), key=lambda one: one[0])
    context = float(np.mean([step.context_tokens for step in best]))
    shape = StepShape(best[0].num_requests, best[0].num_tokens, best[0].uniform_depth, context)
    p95_s = float(np.percentile([step.seconds for step in everything], 95))
    return StepPoint(shape, median_s, max(p95_s, median_s), len(everything))


def _median_s(steps: Sequence[TimedStep]) -> float:
    return float(np.median([step.seconds for step in steps]))
