"""Waiting on the device for a word that another process writes: the target's stream waits, its host does not.

The words are int64 in memory that both sides see: shared host memory, registered as pinned where a GPU waits
(`cudaHostRegister`; a CPU tensor over it is what the kernel takes). The kernel is one warp that reads the words over
the bus until one of three things is so. What follows on the stream reads the outcome: an answer that did not come in
time is no error, only no answer. A stream that waits holds one warp of one multiprocessor; others go on.

As work of the stream, a wait must not be enqueued where the writer of the word itself waits for this stream: only the
deadline would end it.
"""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from peagle.drafter.dispatch import INTERPRETED, check_shape, uses_kernel

#: Values of `status_2[0]`.
REACHED, ABORTED, TIMED_OUT = 1, 2, 3

#: The twin reads this often without a pause, then sleeps between reads.
NUM_QUICK_READS = 200
SLEEP_S = 50e-6

ANSWER_BLOCK = 512


def wait_for_word(
    word_1: Tensor, wanted_1: Tensor | int, abort_1: Tensor, status_2: Tensor, timeout_ns: Tensor | int
) -> None:
    """Waits until word_1 >= wanted_1, abort_1 != 0, or timeout_ns are over since the wait itself began.

    With `status_2` on a GPU this enqueues the wait on the current stream and returns; otherwise it blocks. The word is
    looked at before the others, so an answer that is there counts even with the abort word set or no time left.

    Args:
        word_1, abort_1: int64 [1], written by others while this waits.
        wanted_1: int64 [1] that the device reads when the wait begins (in CUDA graphs), or a number.
        status_2: int64 [2], written at the end: REACHED, ABORTED or TIMED_OUT, and the nanoseconds waited.
        timeout_ns: nanoseconds, int64 [1] or a number like wanted_1. On a GPU the time is its global timer's.

    Raises ValueError for words of another type or size.
    """
    words = {"word_1": word_1, "wanted_1": wanted_1, "abort_1": abort_1, "timeout_ns": timeout_ns}
    tensors = {name: word for name, word in words.items() if isinstance(word, Tensor)}
    for name, tensor in {**tensors, "status_2": status_2}.items():
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} is {tensor.dtype} and must be torch.int64")
        check_shape(name, tensor, 2 if name == "status_2" else 1)
    (wait_for_word_triton if uses_kernel(status_2) else wait_for_word_torch)(
        word_1, wanted_1, abort_1, status_2, timeout_ns
    )


def take_answer(answer_BK: Tensor, status_2: Tensor, out_BK: Tensor, outcome_2: Tensor, missing: int) -> None:
    """After a wait: out_BK becomes answer_BK if the word was reached, `missing` all over if not; outcome_2 the status.

    answer_BK (int32, contiguous) and outcome_2 (int64 [2]) may lie in pinned host memory, which the kernel reads and
    writes in place: one launch for what would be two copies over the bus and two kernels. On a CPU it is done at once.

    Raises ValueError for tensors of another type or size.
    """
    check_shape("out_BK", out_BK, *answer_BK.shape)
    check_shape("outcome_2", outcome_2, 2)
    if {answer_BK.dtype, out_BK.dtype} != {torch.int32} or not (answer_BK.is_contiguous() and out_BK.is_contiguous()):
        raise ValueError("answer_BK and out_BK must be int32 and contiguous")
    (take_answer_triton if uses_kernel(out_BK) else take_answer_torch)(answer_BK, status_2, out_BK, outcome_2, missing)


def take_answer_torch(answer_BK: Tensor, status_2: Tensor, out_BK: Tensor, outcome_2: Tensor, missing: int) -> None:
    """The twin, on one device."""
    out_BK.copy_(answer_BK)
    out_BK.masked_fill_(status_2[:1, None] != REACHED, missing)
    outcome_2.copy_(status_2)


def take_answer_triton(answer_BK: Tensor, status_2: Tensor, out_BK: Tensor, outcome_2: Tensor, missing: int) -> None:
    """One launch, a program for some numbers each."""
    num_numbers = out_BK.numel()
    _take_answer_kernel[(max(1, triton.cdiv(num_numbers, ANSWER_BLOCK)),)](
        answer_BK, status_2, out_BK, outcome_2, num_numbers, missing, BLOCK=ANSWER_BLOCK, num_warps=4
    )


def wait_for_word_torch(
    word_1: Tensor, wanted_1: Tensor | int, abort_1: Tensor, status_2: Tensor, timeout_ns: Tensor | int
) -> None:
    """The twin for CPU tensors: blocks the thread, the clock is the host's monotonic one."""
    start_ns, wanted, timeout = time.monotonic_ns(), int(wanted_1), int(timeout_ns)
    word, abort = word_1.numpy(), abort_1.numpy()  # a read of an aligned 64-bit word is one load
    num_reads, status = 0, 0
    while not status:
        waited_ns = time.monotonic_ns() - start_ns
        if word[0] >= wanted:
            status = REACHED
        elif abort[0] != 0:
            status = ABORTED
        elif waited_ns >= timeout:
            status = TIMED_OUT
        elif (num_reads := num_reads + 1) > NUM_QUICK_READS:
            time.sleep(SLEEP_S)
    status_2[0], status_2[1] = status, waited_ns


def wait_for_word_triton(
    word_1: Tensor, wanted_1: Tensor | int, abort_1: Tensor, status_2: Tensor, timeout_ns: Tensor | int
) -> None:
    """One warp on the current stream. Under the interpreter, which has no timer, a read of the words counts 1 ns."""
    _wait_kernel[(1,)](
        word_1, wanted_1, abort_1, status_2, timeout_ns,
        WANTED_IS_TENSOR=isinstance(wanted_1, Tensor), TIMEOUT_IS_TENSOR=isinstance(timeout_ns, Tensor),
        HAS_TIMER=not INTERPRETED, num_warps=1,
    )  # fmt: skip


# The numbers change with every call: without this a kernel would be compiled anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["wanted_1", "timeout_ns"])
def _wait_kernel(
    word_1, wanted_1, abort_1, status_2, timeout_ns,
    WANTED_IS_TENSOR: tl.constexpr, TIMEOUT_IS_TENSOR: tl.constexpr, HAS_TIMER: tl.constexpr,
):  # fmt: skip
    if WANTED_IS_TENSOR:
        wanted = tl.load(wanted_1)
    else:
        wanted = wanted_1.to(tl.int64)
    if TIMEOUT_IS_TENSOR:
        timeout = tl.load(timeout_ns)
    else:
        timeout = timeout_ns.to(tl.int64)
    waited = timeout * 0
    start = waited
    if HAS_TIMER:
        start = cuda.globaltimer()
    status = _status(word_1, wanted, abort_1, waited, timeout)
    while status == 0:
        if HAS_TIMER:
            waited = cuda.globaltimer() - start
        else:
            waited += 1
        status = _status(word_1, wanted, abort_1, waited, timeout)
    tl.store(status_2, status)
    tl.store(status_2 + 1, waited)


@triton.jit
def _status(word_1, wanted, abort_1, waited, timeout):
    """0 while the wait goes on. Volatile: every read goes to memory, where another processor writes."""
    status = tl.where(waited >= timeout, 3, 0).to(tl.int64)
    status = tl.where(tl.load(abort_1, volatile=True) != 0, 2, status).to(tl.int64)
    return tl.where(tl.load(word_1, volatile=True) >= wanted, 1, status).to(tl.int64)


@triton.jit(
    do_not_specialize=["num_numbers", "missing"], do_not_specialize_on_alignment=["answer_BK", "out_BK", "outcome_2"]
)
def _take_answer_kernel(answer_BK, status_2, out_BK, outcome_2, num_numbers, missing, BLOCK: tl.constexpr):
    status = tl.load(status_2)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    answer = tl.load(answer_BK + number, mask=number < num_numbers, other=0, volatile=True)
    tl.store(out_BK + number, tl.where(status == 1, answer, missing), mask=number < num_numbers)
    if tl.program_id(0) == 0:
        both = tl.arange(0, 2)  # in one store: who sees the status reads the time
        tl.store(outcome_2 + both, tl.load(status_2 + both))
