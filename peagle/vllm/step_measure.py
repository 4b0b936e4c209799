"""Times of decoding steps, measured by the engine itself when it starts.

Enters: a worker that is ready to serve. Leaves: a document for the scheduler's process, in a file named after the
engine. Steps are real: they go through vLLM's own `execute_model` and `sample_tokens`, with requests that only this
module knows. So their times include target, sampling and drafting, and the host's work where the GPU waits for it.
Tokens are random, because equal ones would go to the same experts. The context is an empty cache.
"""

import json
import logging
import time
from itertools import pairwise
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from peagle.vllm.draft_budget import document_path
from peagle.vllm.request_args import MAX_K_KEY
from peagle.vllm.step_notes import SchedulerPlan, write_plan

logger = logging.getLogger(__name__)

REQUEST_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXT_TOKENS = 512
NUM_WARM_STEPS, NUM_STEPS = 1, 3
MAX_STEPS_AHEAD = 2
"""Steps that the host may be ahead of the GPU, as in an engine: the runner's buffers are made for this number."""


def write_steps(config: Any, points: list[dict[str, Any]]) -> None:
    """Write the document: {"device", "max_draft_tokens", "context_tokens", "points"}."""
    document = {
        "device": torch.cuda.get_device_name(),
        "max_draft_tokens": config.num_speculative_tokens,
        "context_tokens": CONTEXT_TOKENS,
        "points": points,
    }
    document_path(config.instance_id).write_text(json.dumps(document), encoding="utf-8")


@torch.inference_mode()
def measure_steps(worker: Any) -> list[dict[str, Any]]:
    """Points {"num_requests", "num_tokens", "step_s"}: R requests with N rows in all, decoding only.

    For each R no drafts, 1, half of K_max, and K_max; at most K_max + 1 rows a request.
    """
    config, start_s = worker.vllm_config, time.perf_counter()
    k_max = config.num_speculative_tokens
    scheduler = config.scheduler_config
    points = []
    worker.model_runner.kv_connector.set_disabled(True)
    for num_requests in sorted({*REQUEST_COUNTS, scheduler.max_num_seqs}):
        if num_requests > scheduler.max_num_seqs:
            break
        # Without drafts the requests have K = 0: nothing is drafted either.
        for max_k, depths in ((0, {0}), (k_max, {1, k_max // 2, k_max} - {0})):
            batch = _Batch(worker, num_requests, max_k)
            if not batch.fits:
                break
            batch.admit()
            for depth in sorted(depth for depth in depths if depth <= max_k):
                if num_requests * (1 + depth) <= scheduler.max_num_batched_tokens:
                    point = {"num_requests": num_requests, "num_tokens": num_requests * (1 + depth)}
                    points.append({**point, "step_s": batch.time_steps(depth)})
            batch.finish()
    worker.model_runner.kv_connector.set_disabled(False)
    logger.info("measured %d decoding steps in %.1f s", len(points), time.perf_counter() - start_s)
    return points


class _Batch:
    """R requests of the worker's runner, at `CONTEXT_TOKENS` of context or what the engine allows."""

    def __init__(self, worker: Any, num_requests: int, max_k: int) -> None:
        self._worker, self._runner = worker, worker.model_runner
        self._ids = [f"_peagle_measured_{index}" for index in range(num_requests)]
        self._max_k, self._num_steps = max_k, 4 * (NUM_WARM_STEPS + NUM_STEPS)
        grown = self._num_steps * (1 + max_k) + worker.vllm_config.num_lookahead_tokens
        self._context = min(CONTEXT_TOKENS, worker.model_config.max_model_len - grown - 1)
        # Each request has blocks of its own for what it writes; all share the blocks of the context before.
        self._blocks = [
            cdiv(self._context + grown, group.kv_cache_spec.block_size)
            for group in self._runner.kv_cache_config.kv_cache_groups
        ]
        self._computed = self._context
        self._tokens = torch.Generator(device=worker.device).manual_seed(0)
        num_blocks = self._runner.kv_cache_config.num_blocks - 1
        self.fits = self._context > 0 and bool(self._blocks) and num_blocks > max(self._blocks) + num_requests

    def admit(self) -> None:
        """One step in which the requests appear, with one token each left to compute."""
        output = SchedulerOutput.make_empty()
        num_blocks, vocabulary = self._runner.kv_cache_config.num_blocks - 1, self._worker.model_config.get_vocab_size()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._worker.model_config.max_model_len,
            extra_args={MAX_K_KEY: self._max_k},
        )
        for index, request_id in enumerate(self._ids):
            tokens = [(index * 7919 + 13 * position) % vocabulary for position in range(self._context + 1)]
            blocks = tuple(
                [1 + (index * count + block) % num_blocks for block in range(count)] for count in self._blocks
            )
            request = NewRequestData(
                req_id=request_id,
                prompt_token_ids=tokens,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=blocks,
                num_computed_tokens=self._context,
                lora_request=None,
                prefill_token_ids=tokens,
            )
            output.scheduled_new_reqs.append(request)
        self._run(output, 0)

    def time_steps(self, depth: int) -> float:
        """Least seconds of `NUM_STEPS` steps in which every request verifies `depth` drafts: what else runs on the GPU
        only adds time."""
        done: list[torch.cuda.Event] = []
        for index in range(NUM_WARM_STEPS + NUM_STEPS):
            cached = CachedRequestData.make_empty()
            cached.req_ids = list(self._ids)
            cached.num_computed_tokens = [self._computed] * len(self._ids)
            cached.num_output_tokens = [1] * len(self._ids)
            cached.new_block_ids = [None] * len(self._ids)
            output = SchedulerOutput.make_empty()
            output.scheduled_cached_reqs = cached
            if index >= MAX_STEPS_AHEAD:
                done[index - MAX_STEPS_AHEAD].synchronize()
            self._run(output, depth)
            done.append(torch.cuda.Event(enable_timing=True))
            done[-1].record()
        torch.accelerator.synchronize()
        return min(start.elapsed_time(end) / 1e3 for start, end in pairwise(done[NUM_WARM_STEPS - 1 :]))

    def finish(self) -> None:
        """Remove the requests from the runner."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self._ids)
        self._worker.execute_model(output)
        torch.accelerator.synchronize()

    def _run(self, output: SchedulerOutput, depth: int) -> None:
        states, vocabulary = self._runner.req_states, self._worker.model_config.get_vocab_size()
        for tokens in (states.draft_tokens, states.last_sampled_tokens):
            if tokens.numel():
                tokens.random_(0, vocabulary, generator=self._tokens)
        output.num_scheduled_tokens = dict.fromkeys(self._ids, 1 + depth)
        output.total_num_scheduled_tokens = (1 + depth) * len(self._ids)
        if depth:
            output.scheduled_spec_decode_tokens = {request_id: [-1] * depth for request_id in self._ids}
        output.num_spec_tokens_to_schedule = self._runner.num_speculative_steps
        # Drafts of random tokens are all rejected. The pass is measured with as many rows as if half of them were.
        write_plan(output, SchedulerPlan(depth, num_rejected=depth * len(self._ids) // 2))
        self._worker.execute_model(output)
        self._worker.sample_tokens(None)
        self._computed += 1 + depth
