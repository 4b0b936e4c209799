"""Data-parallel training: every worker has the whole drafter, batches of its own, and the mean of all gradients.

Whoever starts the workers (Ray Train, torchrun) also starts torch.distributed's default process group; without one
there is a single worker and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch import distributed as dist


class Workers:
    """rank: 0 .. size - 1; rank 0 writes files and decides."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites every worker's tensors by those of rank 0, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def agree(self, value: float, device: torch.device | str) -> float:
        """Rank 0's value: clocks differ, decisions must not."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared)

    def average(self, parameters: Iterable[Tensor], num_passes: int) -> None:
        """Gradients become the mean over `num_passes` passes of every worker; one message for all of them.

        A parameter that no row of this worker reached counts as zero.
        """
        parameters = list(parameters)
        count = num_passes * self.size
        if count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.size > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)])
        torch._foreach_mul_(gradients, 1 / count)
