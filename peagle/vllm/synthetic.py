"""vLLM's GPU worker for measurements: drafts are accepted with the chances that each request brings along.

vLLM's own synthetic rejection (`rejection_sample_method="synthetic"`) has one list of chances for the whole engine.
Here the engine is given chances of 1, and the random number of each draft is divided by the conditional chance of its
own request before vLLM compares it with 1. Speed is then measured without content, for several workloads in one batch.
Tokens that come out are meaningless. Given to vLLM as `worker_cls=SYNTHETIC_WORKER`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_model_runner, gpu_worker

from peagle.vllm import compat
from peagle.vllm.acceptance import SYNTHETIC_KEY

if TYPE_CHECKING:
    _Runner = gpu_model_runner.GPUModelRunner
else:
    _Runner = object

SYNTHETIC_WORKER = "peagle.vllm.synthetic.SyntheticWorker"


def conditional(survival: Sequence[float]) -> tuple[float, ...]:
    """a_i = S_i / S_{i-1} of a survival; 0 beyond a depth that nothing survives."""
    before, found = 1.0, []
    for value in survival:
        found.append(value / before if before > 0 else 0.0)
        before = value
    return tuple(found)


class SyntheticAcceptance(_Runner):
    """Mixin over vLLM's model runner."""

    synthetic_chances: dict[str, tuple[float, ...]]
    synthetic_divisor: torch.Tensor | None

    def start_synthetic(self) -> None:
        """Take the place of vLLM's random numbers, in this process."""
        compat.check("synthetic")
        self.synthetic_chances, self.synthetic_divisor = {}, None
        drawn = rejection_sampler.generate_uniform_probs

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor:
            uniform = drawn(*args, **kwargs)
            divisor = self.synthetic_divisor
            return uniform if divisor is None else uniform / divisor

        rejection_sampler.generate_uniform_probs = divided

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None:
            self.synthetic_divisor = self._divisor(spec_decode_metadata.num_draft_tokens)
        try:
            return super()._sample(logits, spec_decode_metadata)
        finally:
            self.synthetic_divisor = None

    def _divisor(self, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Conditional chance of every draft of the batch, float64 on the device. [drafts]"""
        chances: list[float] = []
        for request_id, num_drafts in zip(self.input_batch.req_ids, num_draft_tokens, strict=True):
            chances += self._chances(request_id)[:num_drafts]
        host = torch.tensor(chances, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    def _chances(self, request_id: str) -> tuple[float, ...]:
        found = self.synthetic_chances.get(request_id)
        if found is None:
            if len(self.synthetic_chances) > 4096:
                self.synthetic_chances = {
                    known: chances for known, chances in self.synthetic_chances.items() if known in self.requests
                }
            params = self.requests[request_id].sampling_params
            survival = (params.extra_args or {}).get(SYNTHETIC_KEY) if params is not None else None
            if survival is None:
                raise ValueError(f"request {request_id} has no extra_args[{SYNTHETIC_KEY!r}], which this worker needs")
            found = self.synthetic_chances[request_id] = conditional(survival)
        return found


class SyntheticModelRunner(SyntheticAcceptance, gpu_model_runner.GPUModelRunner):
    """vLLM's model runner for GPUs with synthetic acceptance."""


class SyntheticWorker(gpu_worker.Worker):
    """Drop-in for vLLM's GPU worker on its V1 model runner."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = SyntheticModelRunner
        self.model_runner.start_synthetic()
