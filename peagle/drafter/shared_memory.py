"""The ring through which a target's steps reach a drafter, and drafts come back, without a call between them.

It has three slots; step s uses slot s % 3. A slot holds a request and its reply:

    descriptor    by the target's host              `StepDescriptor`, the same bytes as over TCP
    tensors       by the target's GPU, or its host  starts, valid rows, next tokens; payload (projected hidden rows)
    ready         the same, last                    the step's number: the request is whole
    drafts        by the drafter                    drafts (`peagle.drafter.rows`), time of service
    done          the same, last                    the step's number: the reply is whole

Three, because with asynchronous scheduling the target's host writes step s + 2 while the drafter still reads step s. A
sender that finds step s - 3 unanswered does not send (`is_free`). On one host the ring lies in memory that both
processes share. Between hosts each side has one of its own, and messages carry what is new to the other.

The word `abort`, beside the slots, is non-zero while the target must not wait; its host sets it. The flags rely on the
order of plain stores and loads that x86-64 keeps.

On a GPU everything is enqueued on the current stream: kernels write and read the ring where it lies, in host memory.
The host goes on, the stream waits, and the host learns later from `outcome` what a wait came to.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from peagle.drafter.protocol import (
    FROM_TARGET,
    MAX_PROMPT_TOKENS,
    Int32Array,
    Step,
    StepDescriptor,
    TargetShape,
    WireError,
    check_sizes,
    check_step,
    decode,
    encode,
)
from peagle.drafter.rows import INTERPRETED, uses_kernel

Int64Array = npt.NDArray[np.int64]

NUM_SLOTS = 3
_LINE_BYTES = 64
_REQUEST_BYTES = 64  # of a descriptor, for each request, and more than its numbers take


def host_identity() -> str:
    """Equal for two processes exactly when one may open the other's files through /proc: of one kernel, process
    namespace and user. "" where rings cannot be shared."""
    if platform.machine() != "x86_64":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}:{os.getuid()}"
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Views of one slot's memory. B, R, K are the largest of the shape."""

    descriptor: npt.NDArray[np.uint8]
    descriptor_size: Int64Array  # [1]: bytes that are used
    integers: Int32Array  # [2 B + R]: of a step's own B and R, starts, valid rows, next tokens, without gaps
    payload_RH: Tensor
    ready: Int64Array  # [1]
    drafts_BK: Int32Array
    service_ns: Int64Array  # [1]: from when the drafter saw the step to its answer
    done: Int64Array  # [1]
    outcome: Int64Array  # [2]: REACHED, ABORTED or TIMED_OUT, 0 before; nanoseconds waited


def slot_layout(shape: TargetShape) -> np.dtype[Any]:
    """The fields of a `Slot` in memory, each on cache lines of its own; `payload_RH` as bytes."""
    num_requests, num_rows = shape.max_num_requests, shape.max_num_rows
    formats = {
        "descriptor": (np.uint8, 4 * MAX_PROMPT_TOKENS + _REQUEST_BYTES * (num_requests + 64)),
        "descriptor_size": (np.int64, (1,)),
        "integers": (np.int32, 2 * num_requests + num_rows),
        "payload_RH": (np.uint8, shape.payload_bytes),
        "ready": (np.int64, (1,)),
        "drafts_BK": (np.int32, (num_requests, shape.max_draft_tokens)),
        "service_ns": (np.int64, (1,)),
        "done": (np.int64, (1,)),
        "outcome": (np.int64, (2,)),
    }
    fields: list[np.dtype[Any]] = [np.dtype(field) for field in formats.values()]
    ends = np.cumsum([-(-field.itemsize // _LINE_BYTES) * _LINE_BYTES for field in fields]).tolist()
    return np.dtype({"names": [*formats], "formats": fields, "offsets": [0, *ends[:-1]], "itemsize": ends[-1]})


def ring_bytes(shape: TargetShape) -> int:
    """Size of a ring: three payloads and little else."""
    return _LINE_BYTES + NUM_SLOTS * slot_layout(shape).itemsize


class Ring:
    """One side's view of a ring. Steps are numbered from 1 on, without gaps.

    Its memory has no file: another process opens it as the maker's, under `name`, while that one lives. So the kernel
    frees it with the last process that has it, whatever ends them.
    """

    def __init__(self, fd: int, shape: TargetShape) -> None:
        """fd: of the memory; the ring closes it."""
        self.shape, self._fd = shape, fd
        self.name = f"{os.getpid()}/{fd}"
        self.memory = mmap.mmap(fd, ring_bytes(shape))
        self._abort: Int64Array = np.frombuffer(self.memory, np.int64, 1)
        self._slots = []
        for record in np.frombuffer(self.memory, slot_layout(shape), NUM_SLOTS, _LINE_BYTES):
            views = {name: record[name] for name in slot_layout(shape).names or ()}
            payload = torch.from_numpy(views.pop("payload_RH")).view(shape.torch_dtype)
            self._slots.append(Slot(**views, payload_RH=payload.view(shape.max_num_rows, shape.hidden_size)))

    @classmethod
    def create(cls, shape: TargetShape) -> Ring:
        fd = os.memfd_create("peagle-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, ring_bytes(shape))
        return cls(fd, shape)

    @classmethod
    def attach(cls, name: str, shape: TargetShape) -> Ring:
        """Another process's. Raises OSError where it cannot be had, ValueError for a name or size of something else."""
        if not (found := re.fullmatch(r"(\d+)/(\d+)", name)):
            raise ValueError(f"shared memory {name!r:.80} is not named PROCESS/DESCRIPTOR")
        fd = os.open(f"/proc/{found[1]}/fd/{found[2]}", os.O_RDWR | os.O_CLOEXEC)
        if (size := os.fstat(fd).st_size) != ring_bytes(shape):
            os.close(fd)
            raise ValueError(f"shared memory {name} has {size} bytes, not {ring_bytes(shape)}: the two sides differ")
        return cls(fd, shape)

    def __del__(self) -> None:
        if hasattr(self, "_fd") and os is not None:  # not made; or at the interpreter's end, when the kernel closes it
            os.close(self._fd)

    def slot(self, number: int) -> Slot:
        return self._slots[number % NUM_SLOTS]

    # The target's side

    def is_free(self, number: int) -> bool:
        """Whether the slot of this step may be written: the step that had it before is answered."""
        return int(self.slot(number).done[0]) >= number - NUM_SLOTS

    def write_descriptor(self, descriptor: StepDescriptor) -> None:
        """Before the step's tensors. Sizes are the sender's to keep: within the shape."""
        slot, data = self.slot(descriptor.number), encode(descriptor)
        slot.outcome[0] = 0
        slot.descriptor[: len(data)] = np.frombuffer(data, np.uint8)
        slot.descriptor_size[0] = len(data)

    def write_tensors(
        self, number: int, start_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor, hidden_RH: Tensor
    ) -> None:
        """The rest of a step, `ready` last: the first three int32; on a GPU in the order of its current stream."""
        slot = self.slot(number)
        slot.payload_RH[: len(hidden_RH)].copy_(hidden_RH, non_blocking=True)
        publish_step(slot, number, torch.cat([start_B, num_valid_B, next_tokens_R]))

    def wait(self, number: int, timeout_s: float, out_BK: Tensor) -> None:
        """Wait for the drafts of a step, at most this long, and put them into out_BK, int64: 0 where there are none, or
        when they come later. With a tensor on a GPU its stream waits."""
        wait_for_drafts(self.slot(number), self._abort, number, int(timeout_s * 1e9), out_BK)

    def is_done(self, number: int) -> bool:
        return int(self.slot(number).done[0]) >= number

    def set_abort(self, aborted: bool) -> None:
        """Let go, or not, of whoever waits for drafts: also a GPU that waits already."""
        self._abort[0] = aborted

    # The drafter's side

    def is_ready(self, number: int) -> bool:
        return int(self.slot(number).ready[0]) == number

    def read_step(self, number: int) -> Step:
        """A step that is ready. `hidden_RH` is a view, the rest copies. Raises ValueError or WireError for what does
        not fit."""
        slot = self.slot(number)
        descriptor = decode(slot.descriptor[: max(0, int(slot.descriptor_size[0]))].tobytes(), FROM_TARGET)
        if not isinstance(descriptor, StepDescriptor) or descriptor.number != number:
            raise WireError(f"step {number} is described by {descriptor!r:.80}")
        check_sizes(descriptor, self.shape)
        num_requests, num_rows = descriptor.num_requests, descriptor.num_rows
        start_B, num_valid_B, next_tokens_R = np.split(
            slot.integers[: 2 * num_requests + num_rows].copy(), [num_requests, 2 * num_requests]
        )
        step = Step(descriptor, start_B, num_valid_B, next_tokens_R, slot.payload_RH[:num_rows])
        check_step(step, self.shape)
        return step

    def write_drafts(self, number: int, drafts_BK: Int32Array, service_ns: int) -> None:
        """Drafts of a step, [B, max_draft_tokens]; then `done`."""
        slot = self.slot(number)
        slot.drafts_BK[: len(drafts_BK)] = drafts_BK
        slot.service_ns[0] = service_ns
        slot.done[0] = number

    def write_received(self, descriptor: StepDescriptor, frames: Sequence[Any]) -> None:
        """A step that came over TCP (`peagle.drafter.client.step_frames`). Raises ValueError or WireError for one that
        does not fit."""
        check_sizes(descriptor, self.shape)
        slot, integers = self.slot(descriptor.number), np.frombuffer(frames[0] if frames else b"", np.int32)
        payload = np.frombuffer(b"".join(frames[1:]), np.uint8)
        payload_X = slot.payload_RH[: descriptor.num_rows].view(torch.uint8).view(-1).numpy()
        if len(integers) != 2 * descriptor.num_requests + descriptor.num_rows or len(payload) != len(payload_X):
            raise WireError(
                f"{descriptor.num_requests} requests and {descriptor.num_rows} rows with {len(integers)} integers and "
                f"{len(payload)} bytes"
            )
        payload_X[:] = payload
        self.write_descriptor(descriptor)
        slot.integers[: len(integers)] = integers
        slot.ready[0] = descriptor.number

    # CUDA

    def pin(self, device: torch.device, *, will_wait: bool) -> None:
        """Register the memory with CUDA, so that `device` reaches it. Raises RuntimeError where CUDA refuses.

        will_wait: compiles the kernels of the target's side: at the first step it is too late. Only while no step is
            under way.
        """
        portable_and_mapped = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
        base = torch.frombuffer(self.memory, dtype=torch.uint8)
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(base.data_ptr(), base.nbytes, portable_and_mapped)
            torch.cuda.check_error(error)
            if will_wait:
                ids_1K = torch.zeros(1, self.shape.max_draft_tokens, dtype=torch.int64, device=device)
                publish_step(self.slot(0), 0, ids_1K[0].int())
                self.wait(0, 0.0, ids_1K)
                torch.cuda.current_stream().synchronize()
                self.slot(0).outcome[:] = 0

    def unpin(self, device: torch.device) -> None:
        """Undo `pin`, before the memory goes and after the last work that uses it."""
        base = torch.frombuffer(self.memory, dtype=torch.uint8)
        with torch.cuda.device(device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(base.data_ptr()))


# The target's side in the order of a stream


REACHED, ABORTED, TIMED_OUT = 1, 2, 3  # values of `outcome[0]`
# The twin reads this often without a pause, then sleeps between reads: the drafter may need its cores.
_NUM_QUICK_READS, _SLEEP_S = 50, 0.3e-3
_BLOCK = 1024


def publish_step(slot: Slot, number: int, integers: Tensor) -> None:
    """Put a step's starts, valid rows and next tokens, int32 one after another, into its slot; then its number into
    `ready`. On a GPU one kernel on the current stream: what the stream did before has reached the host by then."""
    if uses_kernel(integers):
        _publish_kernel[(1,)](
            integers, len(integers), slot.integers.ctypes.data, slot.ready.ctypes.data, number,
            BLOCK=_BLOCK, ON_GPU=not INTERPRETED,
        )  # fmt: skip
        return
    slot.integers[: len(integers)] = integers.numpy(force=True)
    slot.ready[0] = number


def wait_for_drafts(slot: Slot, abort: Int64Array, number: int, timeout_ns: int, out_BK: Tensor) -> None:
    """As `Ring.wait`, which ends also when the abort word is set. An answer that is there counts even then, or with no
    time left. `outcome` is written at the end.

    On a GPU one kernel: one warp reads the words over the bus, other work goes on. Under Triton's interpreter, which
    has no timer, a read of the words counts 1 ns.
    """
    num_requests, num_columns = out_BK.shape
    if uses_kernel(out_BK):
        _wait_kernel[(1,)](
            slot.done.ctypes.data, abort.ctypes.data, slot.drafts_BK.ctypes.data, slot.outcome.ctypes.data,
            number, timeout_ns, num_requests * num_columns, out_BK,
            BLOCK=_BLOCK, ON_GPU=not INTERPRETED, num_warps=1,
        )  # fmt: skip
        return
    status, waited_ns = _wait(slot.done, number, abort, timeout_ns)
    out_BK.zero_()
    if status == REACHED:
        out_BK.copy_(torch.from_numpy(slot.drafts_BK[:num_requests]).clamp(min=0))
    slot.outcome[:] = status, waited_ns


def _wait(word: Int64Array, wanted: int, abort: Int64Array, timeout_ns: int) -> tuple[int, int]:
    """REACHED once the word is `wanted` or more, else ABORTED or TIMED_OUT; and nanoseconds waited."""
    start_ns, num_reads = time.monotonic_ns(), 0
    while True:  # a read of an aligned 64-bit word is one load
        waited_ns = time.monotonic_ns() - start_ns
        if word[0] >= wanted:
            return REACHED, waited_ns
        if abort[0] != 0:
            return ABORTED, waited_ns
        if waited_ns >= timeout_ns:
            return TIMED_OUT, waited_ns
        if (num_reads := num_reads + 1) > _NUM_QUICK_READS:
            time.sleep(_SLEEP_S)


@triton.jit
def fence(ON_GPU: tl.constexpr):
    """What this program has stored so far reaches the host before what it stores from here on."""
    if ON_GPU:
        tl.inline_asm_elementwise("membar.sys; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, False, 1)
        tl.debug_barrier()


# Numbers are 64 bits wide whatever their value, and none has a kernel of its own: it would be compiled while a target
# waits.


@triton.jit(do_not_specialize=["count", "integers_at", "ready_at", "number"])
def _publish_kernel(
    integers, count: tl.int64, integers_at: tl.int64, ready_at: tl.int64, number: tl.int64,
    BLOCK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    out = integers_at.to(tl.pointer_type(tl.int32))
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(integers + at, mask=at < count), mask=at < count)
    fence(ON_GPU)
    tl.store(ready_at.to(tl.pointer_type(tl.int64)), number)


@triton.jit(do_not_specialize=["done_at", "abort_at", "drafts_at", "outcome_at", "number", "timeout_ns", "count"])
def _wait_kernel(
    done_at: tl.int64, abort_at: tl.int64, drafts_at: tl.int64, outcome_at: tl.int64,
    number: tl.int64, timeout_ns: tl.int64, count: tl.int64, out_BK,
    BLOCK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    done_1, abort_1 = done_at.to(tl.pointer_type(tl.int64)), abort_at.to(tl.pointer_type(tl.int64))
    drafts, outcome_2 = drafts_at.to(tl.pointer_type(tl.int32)), outcome_at.to(tl.pointer_type(tl.int64))
    waited = timeout_ns * 0
    start = waited
    if ON_GPU:
        start = cuda.globaltimer()
    status = _wait_status(done_1, number, abort_1, waited, timeout_ns)
    while status == 0:
        if ON_GPU:
            waited = cuda.globaltimer() - start
        else:
            waited += 1
        status = _wait_status(done_1, number, abort_1, waited, timeout_ns)
    num_found = tl.where(status == 1, count, 0)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        # Volatile: past the caches, which may hold what an earlier step had here.
        draft = tl.load(drafts + at, mask=at < num_found, other=0, volatile=True)
        tl.store(out_BK + at, tl.maximum(draft, 0).to(tl.int64), mask=at < count)
    tl.store(outcome_2 + 1, waited)
    fence(ON_GPU)
    tl.store(outcome_2, status)


@triton.jit
def _wait_status(word_1, wanted, abort_1, waited, timeout):
    """0 while the wait goes on. Volatile: every read goes to memory, where another processor writes."""
    status = tl.where(waited >= timeout, 3, 0).to(tl.int64)
    status = tl.where(tl.load(abort_1, volatile=True) != 0, 2, status).to(tl.int64)
    return tl.where(tl.load(word_1, volatile=True) >= wanted, 1, status).to(tl.int64)
