"""A mailbox used by a GPU: its memory registered with CUDA, a step sent and drafts awaited in stream order.

The host enqueues and goes on; it learns later, from the area's `outcome`, what a wait came to. Everything here runs on
the current stream of the current device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.wait import take_answer, wait_for_word
from peagle.runtime.mailbox import Mailbox
from peagle.runtime.steps import NO_DRAFT

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def pin(mailbox: Mailbox, device: torch.device, *, will_wait: bool) -> None:
    """Let `device` reach the mailbox: needed before anything else here. Raises RuntimeError where CUDA refuses.

    will_wait: compiles the kernels of a wait, for timeouts of 32 and of 64 bits: at the first step it is too late.
    """
    base = torch.frombuffer(mailbox.memory.mapping, dtype=torch.uint8)
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(base.data_ptr(), base.nbytes, _PORTABLE_AND_MAPPED))
        status_2 = torch.empty(2, dtype=torch.int64, device=device)
        for timeout_ns in (1 << 20, 1 << 40) if will_wait else ():
            wait_for_word(mailbox.area(0).done, 0, mailbox.abort, status_2, timeout_ns)
        if will_wait:
            drafts_BK = torch.empty(1, mailbox.shape.max_depth, dtype=torch.int32, device=device)
            area = mailbox.area(0)
            take_answer(area.drafts_BK[:1], status_2, drafts_BK, torch.empty_like(status_2), NO_DRAFT)


def unpin(mailbox: Mailbox, device: torch.device) -> None:
    """Undo `pin`, before the memory goes and after the last work that uses it."""
    base = torch.frombuffer(mailbox.memory.mapping, dtype=torch.uint8)
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(base.data_ptr()))


def enqueue_send(
    mailbox: Mailbox, step: int, start_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor, hidden_RH: Tensor
) -> None:
    """Copy the device part of a step from device tensors, then its `ready` word: three copies."""
    area, num_rows = mailbox.area(step), len(next_tokens_R)
    packed = torch.cat([start_B, num_valid_B, next_tokens_R])
    area.device_part[: len(packed)].copy_(packed, non_blocking=True)
    area.payload_RH[:num_rows].copy_(hidden_RH, non_blocking=True)
    ready = torch.full((1,), step, dtype=torch.int64, device=hidden_RH.device)
    area.ready.copy_(ready, non_blocking=True)


def enqueue_wait(mailbox: Mailbox, step: int, timeout_s: float, out_BK: Tensor) -> None:
    """Wait for the drafts of a step, at most this long, and put them into out_BK (int32 on the device).

    Without an answer in time out_BK is `NO_DRAFT` all over. A reply that comes later is not seen.
    """
    area = mailbox.area(step)
    status_2 = torch.empty(2, dtype=torch.int64, device=out_BK.device)
    wait_for_word(area.done, step, mailbox.abort, status_2, int(timeout_s * 1e9))
    take_answer(area.drafts_BK[: len(out_BK)], status_2, out_BK, area.outcome, NO_DRAFT)
