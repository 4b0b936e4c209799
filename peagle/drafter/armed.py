"""A drafter's pass that is enqueued before its step is ready: between the step's `ready` and its `done` no host acts.

On the stream of the pass:

    await      waits for `ready`; then reads the device part, checks it, and puts valid rows and tokens into the pass's
               inputs. Not so where the step is not what was assumed, is called off or does not come: then the pass that
               follows has no rows, and the usual way takes the step
    the pass   a graph, for the most rows that may come
    answer     puts the drafts into the mailbox, then `done`; in any case, last, the outcome where the host looks for it

On a CPU the three run as soon as the host looks and finds the step ready (`ArmedPass.poll`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from peagle.drafter.mailbox import (
    ABORTED,
    REACHED,
    Int64Array,
    Mailbox,
    fence,
    memory_at,
    wait_for,
    wait_in_kernel,
)
from peagle.drafter.protocol import NO_DRAFT
from peagle.drafter.rows import INTERPRETED, uses_kernel

ANSWERED, CANCELLED, REJECTED = REACHED, ABORTED, 4  # outcomes, beside TIMED_OUT; 0: there is none yet
# Of a pass: its graph runs for all rows that may come, and those that do not come cost the more, the more there are.
# Measured up to 64 requests with K = 7, 896 rows.
MAX_ROWS = 1024
TIMEOUT_S = 1.0  # longer than a target's step; no kernel may wait for ever
_AWAITED, _ANSWERED = 256, 512  # elements at once: all of one block are on their way over the bus together
_CANCEL, _OUTCOME, _NUM_FLAGS = 0, 8, 16  # the two words lie in cache lines of their own


class ArmedWords(NamedTuple):
    """What the kernels read, each an int64, by its place. Addresses first: of the mailbox's area, then of the
    flags. Graphs and kernels know of no step, so one compilation serves all.

    num_requests: of the step. vocab_size, max_depth: of the target. first_row: of the step's payload, where the pass's
    begins. num_rows: of the pass's payload. depth: columns of the pass's drafts. status, seen_ns: what the wait came
    to, and when, by the GPU's clock; for the answer.
    """

    device_part: int
    ready: int
    drafts: int
    service_ns: int
    done: int
    cancel: int = 0
    outcome: int = 0
    number: int = 0
    num_requests: int = 0
    vocab_size: int = 0
    max_depth: int = 0
    first_row: int = 0
    num_rows: int = 0
    depth: int = 0
    timeout_ns: int = 0
    status: int = 0
    seen_ns: int = 0


def armed_words(mailbox: Mailbox, number: int, num_requests: int) -> ArmedWords:
    """Those of a step that the mailbox gives."""
    area, shape = mailbox.area(number), mailbox.shape
    return ArmedWords(
        device_part=area.device_part.ctypes.data,
        ready=area.ready.ctypes.data,
        drafts=area.drafts_BK.ctypes.data,
        service_ns=area.service_ns.ctypes.data,
        done=area.done.ctypes.data,
        number=number,
        num_requests=num_requests,
        vocab_size=shape.vocab_size,
        max_depth=shape.max_depth,
    )


def new_flags(*, pinned: bool) -> Int64Array:
    """Host memory for the words `cancel` and `outcome` of one armed pass at a time."""
    return torch.zeros(_NUM_FLAGS, dtype=torch.int64, pin_memory=pinned).numpy()


class ArmedPass:
    """A pass that begins by itself. Until its outcome is known, nobody else uses the pass or the mailbox."""

    def __init__(
        self, flags: Int64Array, finish: Callable[[], None], is_due: Callable[[], bool] = lambda: False
    ) -> None:
        """flags: see `reset`. finish: returns when the outcome is there, or raises what went wrong on the GPU; it may
        block for as long as the step may take to come. is_due: whether the host must call it for anything to happen.
        """
        self._flags, self._finish, self._is_due = flags, finish, is_due
        self._latest_s = time.monotonic() + TIMEOUT_S

    def poll(self) -> int:
        """The outcome, 0 as long as there is none. Raises what went wrong on the GPU, at the latest when the time is
        over."""
        if not self._flags[_OUTCOME] and (self._is_due() or time.monotonic() > self._latest_s):
            self._finish()
        return int(self._flags[_OUTCOME])

    def cancel(self) -> None:
        """Let it end as soon as it can. It may still answer."""
        self._flags[_CANCEL] = 1

    def settle(self) -> int:
        """Cancel, wait, and return the outcome. Raises what went wrong on the GPU."""
        self.cancel()
        if not self._flags[_OUTCOME]:
            self._finish()
        return int(self._flags[_OUTCOME])


def reset(flags: Int64Array, words: ArmedWords, *, depth: int, timeout_s: float) -> ArmedWords:
    """The words for a pass with drafts of so many columns, and its flags cleared."""
    flags[:] = 0
    cancel = flags.ctypes.data
    return words._replace(
        cancel=cancel + _CANCEL * flags.itemsize,
        outcome=cancel + _OUTCOME * flags.itemsize,
        depth=depth,
        timeout_ns=int(timeout_s * 1e9),
    )


def await_step(
    words_W: Tensor, start_B: Tensor, row_offset_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor
) -> None:
    """Wait for a step and put its valid rows and tokens into num_valid_B, int32, and next_tokens_R, int64 with any
    stride; valid rows of 0 for all requests where it does not come as assumed.

    On entry num_valid_B holds the most valid rows of each request, and next_tokens_R the request whose row each row of
    the payload may be. A step is as assumed where each request begins at its start_B and has no more rows than those,
    one request at least has any, and the tokens of valid rows are of the vocabulary. So the pass takes no row that it
    was not made ready for, whatever the target writes meanwhile: each of its numbers is read once.
    """
    if uses_kernel(next_tokens_R):
        _await_kernel[(1,)](
            words_W, start_B, row_offset_B, num_valid_B, next_tokens_R, next_tokens_R.stride(0),
            BLOCK=_AWAITED, ON_GPU=not INTERPRETED, num_warps=1,
        )  # fmt: skip
        return
    words = ArmedWords(*words_W.tolist())
    status, _ = wait_for(words.ready, words.number, words.cancel, words.timeout_ns)
    seen_ns, num_requests, num_rows = time.monotonic_ns(), words.num_requests, words.num_rows
    most_B, request_R = num_valid_B[:num_requests].clone(), next_tokens_R[:num_rows].clone()
    num_valid_B[:num_requests] = 0
    if status == REACHED:
        count = 2 * num_requests + words.first_row + num_rows
        part = memory_at(words.device_part, count, torch.int32).clone()
        valid_B, tokens_R = part[num_requests : 2 * num_requests], part[count - num_rows :]
        is_wrong_B = (part[:num_requests] != start_B[:num_requests]) | (valid_B < 0) | (valid_B > most_B)
        is_valid_R = torch.arange(num_rows) - row_offset_B[request_R] < valid_B[request_R]
        is_token_R = (tokens_R >= 0) & (tokens_R < words.vocab_size)
        if is_wrong_B.any() or not valid_B.any() or (is_valid_R & ~is_token_R).any():
            status = REJECTED
        else:
            num_valid_B[:num_requests] = valid_B
            next_tokens_R[:num_rows] = torch.where(is_token_R, tokens_R, 0)
    words_W[-2:] = torch.tensor([status, seen_ns])


def answer_step(words_W: Tensor, drafts_BK: Tensor) -> None:
    """After `await_step` and the pass: put the drafts, int32, of the step's requests or more, into the mailbox, as wide
    as the target wants them, and `done`, if the step came as assumed; then the outcome."""
    if uses_kernel(drafts_BK):
        _answer_kernel[(1,)](words_W, drafts_BK, BLOCK=_ANSWERED, ON_GPU=not INTERPRETED)
        return
    words = ArmedWords(*words_W.tolist())
    if words.status == REACHED:
        found_BK = drafts_BK[: words.num_requests, : words.max_depth]
        out_BK = memory_at(words.drafts, words.num_requests * words.max_depth, torch.int32)
        out_BK = out_BK.view(words.num_requests, words.max_depth).fill_(NO_DRAFT)
        out_BK[:, : found_BK.shape[1]] = found_BK
        memory_at(words.service_ns, 1, torch.int64)[0] = time.monotonic_ns() - words.seen_ns
        memory_at(words.done, 1, torch.int64)[0] = words.number
    memory_at(words.outcome, 1, torch.int64)[0] = words.status


def compile_kernels(
    words_W: Tensor, start_B: Tensor, row_offset_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor
) -> None:
    """Run both once for no step, so that the first one does not wait for their compilation."""
    flags = new_flags(pinned=True)
    nowhere = flags.ctypes.data
    words = ArmedWords(nowhere, nowhere, nowhere, nowhere, nowhere, number=1)
    words_W.copy_(torch.tensor(reset(flags, words, depth=0, timeout_s=0.0)))
    await_step(words_W, start_B, row_offset_B, num_valid_B, next_tokens_R)
    answer_step(words_W, torch.empty(1, dtype=torch.int32, device=words_W.device))
    torch.cuda.current_stream().synchronize()


# Places of `ArmedWords` in kernels.
(
    _AT_DEVICE_PART, _AT_READY, _AT_DRAFTS, _AT_SERVICE_NS, _AT_DONE, _AT_CANCEL, _AT_OUTCOME, _AT_NUMBER,
    _AT_NUM_REQUESTS, _AT_VOCAB_SIZE, _AT_MAX_DEPTH, _AT_FIRST_ROW, _AT_NUM_ROWS, _AT_DEPTH, _AT_TIMEOUT_NS, _AT_STATUS,
    _AT_SEEN_NS,
) = map(tl.constexpr, range(len(ArmedWords._fields)))  # fmt: skip


@triton.jit
def _await_kernel(
    words_W, start_B, row_offset_B, num_valid_B, next_tokens_R, tokens_stride, BLOCK: tl.constexpr, ON_GPU: tl.constexpr
):
    device_part = tl.load(words_W + _AT_DEVICE_PART).to(tl.pointer_type(tl.int32))
    ready_1 = tl.load(words_W + _AT_READY).to(tl.pointer_type(tl.int64))
    cancel_1 = tl.load(words_W + _AT_CANCEL).to(tl.pointer_type(tl.int64))
    num_requests, num_rows = tl.load(words_W + _AT_NUM_REQUESTS), tl.load(words_W + _AT_NUM_ROWS)
    vocab_size, timeout = tl.load(words_W + _AT_VOCAB_SIZE), tl.load(words_W + _AT_TIMEOUT_NS)
    tokens = device_part + 2 * num_requests + tl.load(words_W + _AT_FIRST_ROW)
    status, seen = wait_in_kernel(ready_1, tl.load(words_W + _AT_NUMBER), cancel_1, timeout, ON_GPU)
    if ON_GPU:
        seen = cuda.globaltimer()
    # Volatile, here and below: past the caches, which may hold what an earlier step had here.
    num_wrong, num_valid = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for i in range(0, tl.where(status == 1, num_requests, 0), BLOCK):
        at = i + tl.arange(0, BLOCK)
        mask = at < num_requests
        start = tl.load(device_part + at, mask=mask, other=0, volatile=True)
        valid = tl.load(device_part + num_requests + at, mask=mask, other=0, volatile=True)
        most = tl.load(num_valid_B + at, mask=mask, other=0)
        is_wrong = (start != tl.load(start_B + at, mask=mask, other=0)) | (valid < 0) | (valid > most)
        valid = tl.where(is_wrong, 0, valid)
        num_wrong += is_wrong.to(tl.int32)
        num_valid += valid
        tl.store(num_valid_B + at, valid, mask=mask)
    if ON_GPU:
        tl.debug_barrier()  # below, other threads read what these have stored
    for i in range(0, tl.where(status == 1, num_rows, 0), BLOCK):
        at = i + tl.arange(0, BLOCK)
        mask = at < num_rows
        request = tl.load(next_tokens_R + at * tokens_stride, mask=mask, other=0)
        token = tl.load(tokens + at, mask=mask, other=0, volatile=True)
        is_token = (token >= 0) & (token < vocab_size)
        offset = at - tl.load(row_offset_B + request, mask=mask, other=0)
        is_valid = mask & (offset < tl.load(num_valid_B + request, mask=mask, other=0))
        num_wrong += (is_valid & (is_token == 0)).to(tl.int32)
        tl.store(next_tokens_R + at * tokens_stride, tl.where(is_token, token, 0).to(tl.int64), mask=mask)
    is_assumed = (tl.sum(num_wrong, axis=0) == 0) & (tl.sum(num_valid, axis=0) > 0)
    status = tl.where((status == 1) & (is_assumed == 0), 4, status).to(tl.int64)
    if ON_GPU:
        tl.debug_barrier()  # above, other threads read what these overwrite
    for i in range(0, tl.where(status == 1, 0, num_requests), BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(num_valid_B + at, tl.zeros([BLOCK], tl.int32), mask=at < num_requests)
    tl.store(words_W + _AT_STATUS, status)
    tl.store(words_W + _AT_SEEN_NS, seen)


@triton.jit
def _answer_kernel(words_W, drafts_BK, BLOCK: tl.constexpr, ON_GPU: tl.constexpr):
    out_BK = tl.load(words_W + _AT_DRAFTS).to(tl.pointer_type(tl.int32))
    service_1 = tl.load(words_W + _AT_SERVICE_NS).to(tl.pointer_type(tl.int64))
    done_1 = tl.load(words_W + _AT_DONE).to(tl.pointer_type(tl.int64))
    outcome_1 = tl.load(words_W + _AT_OUTCOME).to(tl.pointer_type(tl.int64))
    status, seen = tl.load(words_W + _AT_STATUS), tl.load(words_W + _AT_SEEN_NS)
    # 32 bits: a division of 64 takes many times as long.
    max_depth, depth = tl.load(words_W + _AT_MAX_DEPTH).to(tl.int32), tl.load(words_W + _AT_DEPTH).to(tl.int32)
    count = tl.where(status == 1, tl.load(words_W + _AT_NUM_REQUESTS).to(tl.int32) * max_depth, 0)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        request, column = at // max_depth, at % max_depth
        is_draft = (at < count) & (column < depth)
        draft = tl.load(drafts_BK + request * depth + column, mask=is_draft, other=-1)
        tl.store(out_BK + at, draft, mask=at < count)
    service = seen * 0
    if ON_GPU:
        service = cuda.globaltimer() - seen
    tl.store(service_1, service, mask=status == 1)
    fence(ON_GPU)
    tl.store(done_1, tl.load(words_W + _AT_NUMBER), mask=status == 1)
    fence(ON_GPU)
    tl.store(outcome_1, status)
