"""vLLM's adaptive verification (PR 52228) with the drafts of a P-EAGLE speculator.

vLLM fits the acceptance of each draft position online, as a logistic of the draft's log odds. It ranks the drafts of a
batch by the chance that they and all before them are accepted. It verifies as many of the best as give the most tokens
per second, by step times that it measured at its start. Its own speculators read the draft's probability from logits
inside their graphs; a P-EAGLE pass has it already, with the draft token.

The scheduler gets back how many drafts of each request were verified. It has one step in
`peagle.vllm.scheduler.VERIFY_ALL_INTERVAL_STEPS` verify all: confident drafts are no sample of the others' acceptance.

B requests, S slots of requests in the runner, K drafts at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import _MAX_LOG_ODDS, OnlineAcceptanceEstimator


def predict_acceptance(
    estimator: OnlineAcceptanceEstimator, probability_BK: Tensor, slot_B: Tensor, num_drafts: int
) -> None:
    """Do `OnlineAcceptanceEstimator.predict` from probabilities in place of logits: write the feature and the predicted
    acceptance of the first `num_drafts` drafts of the requests in these slots.

    probability_BK: float32, of each draft token under the drafter's distribution; NaN counts as 0.
    """
    _predict_kernel[(len(slot_B),)](
        probability_BK, slot_B, estimator.features, estimator.predictions, estimator.slope, estimator.intercepts,
        num_drafts, K=estimator.num_speculative_steps, MAX_LOG_ODDS=_MAX_LOG_ODDS,
        BLOCK=triton.next_power_of_2(estimator.num_speculative_steps), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_drafts"])
def _predict_kernel(
    probability_BK, slot_B, features_SK, predictions_SK, slope, intercepts_K,
    num_drafts, K: tl.constexpr, MAX_LOG_ODDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a request."""
    request, position = tl.program_id(0), tl.arange(0, BLOCK)
    is_draft = (position < num_drafts) & (position < K)
    slot = tl.load(slot_B + request).to(tl.int64)
    probability = tl.load(probability_BK + request * K + position, mask=is_draft, other=0.5)
    probability = tl.where(probability == probability, probability, 0.0)
    log_odds = tl.log(probability) - tl.log(1.0 - probability)
    feature = tl.minimum(tl.maximum(log_odds, -MAX_LOG_ODDS), MAX_LOG_ODDS)
    predicted = tl.sigmoid(tl.load(slope) * feature + tl.load(intercepts_K + position, mask=is_draft, other=0.0))
    tl.store(features_SK + slot * K + position, feature, mask=is_draft)
    tl.store(predictions_SK + slot * K + position, predicted, mask=is_draft)


@contextlib.contextmanager
def paused(runner: Any) -> Iterator[None]:
    """Steps in this context verify all their drafts, and vLLM's estimator does not learn from them."""
    owners = [(runner, "adaptive_verification"), (runner.speculator, "acceptance_estimator")]
    kept = [(owner, name, getattr(owner, name)) for owner, name in owners if hasattr(owner, name)]
    for owner, name, _ in kept:
        setattr(owner, name, None)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def count_admitted(input_batch: Any) -> Tensor:
    """Drafts of each request of a vLLM `InputBatch` that its step verifies, int32 [B], on their way to the host."""
    rows_B1: Tensor = input_batch.cu_num_logits
    return (rows_B1.diff() - 1).to(torch.int32).to("cpu", non_blocking=True)
