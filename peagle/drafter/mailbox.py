"""Shared memory through which a target hands its steps to a drafter and takes drafts back, without a call between them.

Three areas in turn (step s uses area s % 3), each with a request and its reply:

    host part     by the target's host              slots, heads, depths, row offsets, finished slots, prompts; then the
                                                    counts, and last of them the step's number: the part is whole.
                                                    Before the step runs, so that the drafter can prepare meanwhile
    device part   by the target's GPU, or its host  starts, valid rows, next tokens; payload (reduced hidden rows)
    ready         the same, last                    the step's number: the request is whole
    drafts        by the drafter, or its GPU        drafts (`peagle.drafter.drafts`), time of service
    done          the same, last                    the step's number: the reply is whole

Three, because with asynchronous scheduling the target's host writes step s + 2 while the drafter still reads step s. A
sender that finds step s - 3 unanswered does not send (`is_free`).

The word `abort`, beside the areas, is non-zero while the target must not wait; its host sets it. The flags rely on the
order of plain stores and loads that x86-64 keeps.

On a GPU everything is enqueued on the current stream, in few launches: kernels write and read the words where they lie,
in host memory. The host goes on, the stream waits, and the host learns later from `outcome` what a wait came to. A wait
must not be enqueued where the writer of the word itself waits for this stream: only the deadline would end it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import math
import mmap
import os
import platform
import secrets
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from peagle.drafter.drafts import unpack, unpack_in_kernel
from peagle.drafter.protocol import (
    MAX_PROMPT_TOKENS,
    Int32Array,
    StepPlan,
    TargetShape,
    TargetStep,
    check_device_part,
    check_host_part,
)
from peagle.drafter.rows import INTERPRETED, uses_kernel

Int64Array = npt.NDArray[np.int64]

# Shared memory


SHARED_DIR = Path("/dev/shm")
_PREFIX = "peagle-mailbox-"
_MIN_AGE_S = 30.0  # a younger file may be one whose maker has not locked it yet
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Equal for two processes exactly when files that one makes in /dev/shm are the other's too; "" where none are.

    The kernel's boot and the device number of the mount: containers of one host share the first, not the second.
    """
    if platform.machine() != "x86_64":
        return ""
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}:{SHARED_DIR.stat().st_dev}"
    except OSError:
        return ""


class SharedMemory:
    """A mapping that two processes share, and that no kill -9 leaves behind.

    Its file loses its name as soon as both sides have it: from then on the kernel frees it with its last process. Until
    then its maker holds a lock on it; a lock that can be taken belongs to a dead maker (`sweep`).
    """

    def __init__(self, mapping: mmap.mmap, name: str = "", lock_fd: int | None = None) -> None:
        """name: the file's, "" where it has none."""
        self.mapping, self.name, self._lock_fd = mapping, name, lock_fd

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, all zero and reserved. Raises OSError where /dev/shm has no room for it."""
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(12)}"  # the number says whose it is, to those who look
        fd = os.open(SHARED_DIR / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Without room the first touch of a page would kill the process, here it raises.
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(mmap.mmap(fd, num_bytes), name, fd)
        except BaseException:
            (SHARED_DIR / name).unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def attach(cls, name: str, num_bytes: int) -> SharedMemory:
        """The memory that another process made under `name`, which it loses here.

        Raises OSError where there is none, ValueError for a name that `create` does not give or another size.
        """
        if not name.startswith(_PREFIX) or "/" in name:
            raise ValueError(f"mailbox {name!r:.80} is not named {_PREFIX}...")
        fd = os.open(SHARED_DIR / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if (found := os.fstat(fd).st_size) != num_bytes:
                raise ValueError(
                    f"mailbox {name} has {found} bytes, not {num_bytes}: the two sides differ in its layout"
                )
            memory = cls(mmap.mmap(fd, num_bytes), name)
        finally:
            os.close(fd)
        memory.unlink()
        return memory

    def unlink(self) -> None:
        """Take the name away, if it is still there. The memory stays with those who have it."""
        if self.name:
            (SHARED_DIR / self.name).unlink(missing_ok=True)
            self.name = ""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def sweep() -> None:
    """Remove files whose maker died before the other side had them."""
    for path in SHARED_DIR.glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < _MIN_AGE_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone by now, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


# The mailbox

NUM_AREAS = 3
_NUM_WORDS = 2 * NUM_AREAS  # steps whose `StepWords` are kept: two turns of the areas
_LINE_BYTES, _PAGE_BYTES = 64, 4096
_HOST_ROWS = 4  # slots, heads, depths, row offsets


@dataclasses.dataclass(frozen=True)
class Area:
    """Views of one area's memory. B, R, K are the largest of the shape."""

    counts: Int64Array  # [5]: the step's number; of it: requests, rows, finished slots, prompts
    host_4B: Int32Array
    finished_B: Int32Array
    prompt_slots_B: Int32Array
    prompt_lengths_B: Int32Array
    prompt_tokens_P: Int32Array
    device_part: Int32Array  # [2 B + R]: of a step's own B, starts, valid rows, next tokens, without gaps
    ready: Int64Array  # [1]
    payload_RH: Tensor
    drafts_BK: Int32Array
    service_ns: Int64Array  # [1]
    done: Int64Array  # [1]
    outcome: Int64Array  # [2]: REACHED, ABORTED or TIMED_OUT, 0 before; nanoseconds waited


class StepWords(NamedTuple):
    """What the kernels of the target's side read of a step, each an int64, by its place: so a captured graph
    serves every step, area and session. The addresses are those of the area, `abort` the mailbox's.

    num_waiting: requests that the target waits for. timeout_ns: how long.
    """

    device_part: int
    ready: int
    done: int
    drafts: int
    outcome: int
    abort: int
    number: int = 0
    num_requests: int = 0
    num_rows: int = 0
    num_waiting: int = 0
    timeout_ns: int = 0


class _Carver:
    """Cuts views out of a buffer one after another; with no buffer it only counts the bytes."""

    def __init__(self, buffer: mmap.mmap | None) -> None:
        self._buffer, self.num_bytes = buffer, 0

    def take(self, dtype: torch.dtype, *sizes: int, align_bytes: int = _LINE_BYTES) -> Tensor:
        offset = -(-self.num_bytes // align_bytes) * align_bytes
        count = math.prod(sizes)
        self.num_bytes = offset + count * dtype.itemsize
        if self._buffer is None:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=offset).view(sizes)

    def ints(self, *sizes: int) -> Any:
        return self.take(torch.int32, *sizes).numpy()

    def words(self, count: int) -> Any:
        return self.take(torch.int64, count).numpy()

    def area(self, shape: TargetShape) -> Area:
        num_requests, num_rows = shape.max_num_requests, shape.max_num_rows
        return Area(
            counts=self.words(5),
            host_4B=self.ints(_HOST_ROWS, num_requests),
            finished_B=self.ints(num_requests),
            prompt_slots_B=self.ints(num_requests),
            prompt_lengths_B=self.ints(num_requests),
            prompt_tokens_P=self.ints(MAX_PROMPT_TOKENS),
            device_part=self.ints(2 * num_requests + num_rows),
            ready=self.words(1),
            payload_RH=self.take(shape.torch_dtype, num_rows, shape.hidden_size, align_bytes=_PAGE_BYTES),
            drafts_BK=self.ints(num_requests, shape.max_depth),
            service_ns=self.words(1),
            done=self.words(1),
            outcome=self.words(2),
        )


def mailbox_bytes(shape: TargetShape) -> int:
    """Size of a mailbox, in whole pages: three payloads and little else."""
    carver = _Carver(None)
    carver.words(1)
    for _ in range(NUM_AREAS):
        carver.area(shape)
    return -(-carver.num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class Mailbox:
    """One side's view of a mailbox. Steps are numbered from 1 on, without gaps."""

    def __init__(self, memory: SharedMemory, shape: TargetShape) -> None:
        self.memory, self.shape = memory, shape
        carver = _Carver(memory.mapping)
        self._abort = carver.words(1)
        self.areas = tuple(carver.area(shape) for _ in range(NUM_AREAS))
        self._words = torch.tensor([self._addresses(self.area(i)) for i in range(_NUM_WORDS)])

    @classmethod
    def create(cls, shape: TargetShape) -> Mailbox:
        """In shared memory. Raises OSError where there is no room."""
        return cls(SharedMemory.create(mailbox_bytes(shape)), shape)

    @classmethod
    def attach(cls, name: str, shape: TargetShape) -> Mailbox:
        """Another process's; its name is gone afterwards. Raises OSError or ValueError where it cannot be had."""
        return cls(SharedMemory.attach(name, mailbox_bytes(shape)), shape)

    @classmethod
    def private(cls, shape: TargetShape) -> Mailbox:
        """Between threads of this process."""
        return cls(SharedMemory(mmap.mmap(-1, mailbox_bytes(shape))), shape)

    def area(self, number: int) -> Area:
        return self.areas[number % NUM_AREAS]

    def _addresses(self, area: Area) -> StepWords:
        arrays = (area.device_part, area.ready, area.done, area.drafts_BK)
        return StepWords(*(array.ctypes.data for array in (*arrays, area.outcome, self._abort)))

    # The target's side

    def is_free(self, number: int) -> bool:
        """Whether the area of this step may be written: the step that had it before is answered."""
        return int(self.area(number).done[0]) >= number - NUM_AREAS

    def write_host_part(self, plan: StepPlan) -> int:
        """What the target's host knows of a step. Returns how many prompts did not fit and travel empty.

        Sizes are the sender's to keep: within the shape.
        """
        area = self.area(plan.number)
        area.outcome[0] = 0
        area.host_4B[:, : plan.num_requests] = (plan.slots_B, plan.heads_B, plan.depth_B, plan.row_offset_B)
        area.finished_B[: len(plan.finished_slots)] = plan.finished_slots
        used, num_cut = 0, 0
        for i, (slot, token_ids) in enumerate(plan.prompts.items()):
            if used + len(token_ids) > MAX_PROMPT_TOKENS:
                token_ids, num_cut = token_ids[:0], num_cut + 1
            area.prompt_slots_B[i], area.prompt_lengths_B[i] = slot, len(token_ids)
            area.prompt_tokens_P[used : used + len(token_ids)] = token_ids
            used += len(token_ids)
        area.counts[1:] = (plan.num_requests, plan.num_rows, len(plan.finished_slots), len(plan.prompts))
        area.counts[0] = plan.number
        return num_cut

    def write_device_part(
        self, number: int, start_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor, hidden_RH: Tensor
    ) -> None:
        """The rest of a step, `ready` last: tensors as in `TargetStep`, on a GPU in the order of its current stream."""
        self.area(number).payload_RH[: len(hidden_RH)].copy_(hidden_RH, non_blocking=True)
        words_W = self.words(number, request=(len(start_B), len(next_tokens_R)))
        integers = torch.cat([start_B, num_valid_B, next_tokens_R])
        post_step(words_W.to(integers.device, non_blocking=True), integers)

    def enqueue_wait(self, number: int, timeout_s: float, out_BK: Tensor, chance_BK: Tensor) -> None:
        """Let the current stream wait for the drafts of a step, at most this long, and put them into out_BK, int64, and
        their chances into chance_BK, float32, on the device: 0 where there are none, all over without an answer in
        time. A reply that comes later is not seen.
        """
        words_W = self.words(number, wait=(len(out_BK), timeout_s))
        take_drafts(words_W.to(out_BK.device, non_blocking=True), out_BK, chance_BK)

    def words(
        self, number: int, *, request: tuple[int, int] | None = None, wait: tuple[int, float] | None = None
    ) -> Tensor:
        """`StepWords` of a step, on the host, pinned where the mailbox is: to be copied in the order of the stream.

        request: the step's requests and rows. wait: requests to wait for, and seconds. What is not given stays as it
        was: a copy of it may be under way. The host writes them again six steps later. A step is waited for in its own
        turn or in the next one, and vLLM's host is at most two steps ahead of the stream, so by then all is done.
        """
        words_W = self._words[number % _NUM_WORDS]
        values = words_W.numpy()
        values[6] = number
        if request is not None:
            values[7:9] = request
        if wait is not None:
            values[9:] = wait[0], int(wait[1] * 1e9)
        return words_W

    def is_done(self, number: int) -> bool:
        return int(self.area(number).done[0]) >= number

    def set_abort(self, aborted: bool) -> None:
        """Let go, or not, of whoever waits for drafts: also a GPU that waits already."""
        self._abort[0] = aborted

    def is_aborted(self) -> bool:
        return bool(self._abort[0])

    def read_drafts(self, number: int, num_requests: int) -> Int32Array:
        """[B, K] as they travel, once `is_done`; a copy."""
        return self.area(number).drafts_BK[:num_requests].copy()

    def service_s(self, number: int) -> float:
        """Seconds from when the drafter saw the step to its answer, once `is_done`."""
        return float(self.area(number).service_ns[0]) * 1e-9

    # The drafter's side

    def is_ready(self, number: int) -> bool:
        return int(self.area(number).ready[0]) == number

    def read_step(self, number: int, session: int) -> TargetStep[Int32Array]:
        """A step that is ready. `hidden_RH` is a view, the rest copies. Raises ValueError for what does not fit."""
        return self.read_device_part(self.read_host_part(number, session))

    def read_host_part(self, number: int, session: int) -> TargetStep[Int32Array]:
        """A step as far as its host knows it: starts, valid rows, next tokens and `hidden_RH` are views of where they
        will be once it is ready, the rest copies. Raises ValueError for what does not fit."""
        area, shape = self.area(number), self.shape
        counted, num_requests, num_rows, num_finished, num_prompts = sizes = area.counts.tolist()
        limits = (number, shape.max_num_requests, shape.max_num_rows, shape.max_num_requests, shape.max_num_requests)
        if counted != number or any(not 0 <= n <= limit for n, limit in zip(sizes, limits, strict=True)):
            raise ValueError(f"the host part of step {number} says step {counted} with sizes {sizes[1:]}")
        lengths = area.prompt_lengths_B[:num_prompts].tolist()
        if any(length < 0 for length in lengths) or sum(lengths) > MAX_PROMPT_TOKENS:
            raise ValueError(f"prompts of {lengths} tokens, at most {MAX_PROMPT_TOKENS} together")
        prompts = np.split(area.prompt_tokens_P[: sum(lengths)].copy(), np.cumsum(lengths)[:-1])
        slots_B, heads_B, depth_B, row_offset_B = area.host_4B[:, :num_requests].copy()
        device_part = area.device_part[: 2 * num_requests + num_rows]
        step = TargetStep(
            slots_B=slots_B,
            heads_B=heads_B,
            depth_B=depth_B,
            row_offset_B=row_offset_B,
            start_B=device_part[:num_requests],
            num_valid_B=device_part[num_requests : 2 * num_requests],
            next_tokens_R=device_part[2 * num_requests :],
            hidden_RH=area.payload_RH[:num_rows],
            prompts=dict(zip(area.prompt_slots_B[:num_prompts].tolist(), prompts, strict=False)),
            finished_slots=area.finished_B[:num_finished].tolist(),
            session=session,
            number=number,
        )
        check_host_part(step, shape)
        return step

    def read_device_part(self, step: TargetStep[Int32Array]) -> TargetStep[Int32Array]:
        """The step of a host part, now that it is ready. Raises ValueError for what does not fit."""
        num_requests, num_rows = step.num_requests, len(step.next_tokens_R)
        device_part = self.area(step.number).device_part[: 2 * num_requests + num_rows].copy()
        whole = dataclasses.replace(
            step,
            start_B=device_part[:num_requests],
            num_valid_B=device_part[num_requests : 2 * num_requests],
            next_tokens_R=device_part[2 * num_requests :],
        )
        check_device_part(whole, self.shape)
        return whole

    def answer(self, number: int, drafts_BK: Int32Array, service_ns: int) -> None:
        """Drafts of a step, [B, max_depth] as they travel; then `done`."""
        area = self.area(number)
        area.drafts_BK[: len(drafts_BK)] = drafts_BK
        area.service_ns[0] = service_ns
        area.done[0] = number

    # CUDA

    def pin(self, device: torch.device, *, will_wait: bool) -> None:
        """Register the memory with CUDA, so that `device` reaches it. Raises RuntimeError where CUDA refuses.

        will_wait: compiles the kernels of the target's side: at the first step it is too late. Only while no step is
            under way.
        """
        portable_and_mapped = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
        base = torch.frombuffer(self.memory.mapping, dtype=torch.uint8)
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(base.data_ptr(), base.nbytes, portable_and_mapped)
            torch.cuda.check_error(error)
            if not will_wait:
                return
            self._words = self._words.pin_memory()
            words_W = self.words(0, request=(0, 0), wait=(0, 0.0)).to(device)
            integers, ids_1K = (
                torch.zeros(1, self.shape.max_depth, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)
            )
            post_step(words_W, integers)
            take_drafts(words_W, ids_1K, ids_1K.float())
            torch.cuda.current_stream().synchronize()
            self.areas[0].outcome[:] = 0

    def unpin(self, device: torch.device) -> None:
        """Undo `pin`, before the memory goes and after the last work that uses it."""
        base = torch.frombuffer(self.memory.mapping, dtype=torch.uint8)
        with torch.cuda.device(device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(base.data_ptr()))


# The target's side in the order of a stream


REACHED, ABORTED, TIMED_OUT = 1, 2, 3  # values of `outcome_2[0]`
_NUM_QUICK_READS, _SLEEP_S = 200, 50e-6  # the twin reads this often without a pause, then sleeps between reads
_BLOCK = 1024


def post_step(words_W: Tensor, integers: Tensor) -> None:
    """Put a step's starts, valid rows and next tokens, int32 one after another, into its area; then its number into
    `ready`. `integers` may be longer. On a GPU one kernel on the current stream: what the stream did before has reached
    the host when the number does.
    """
    if uses_kernel(integers):
        _post_kernel[(1,)](words_W, integers, BLOCK=_BLOCK, ON_GPU=not INTERPRETED)
        return
    step = StepWords(*words_W.tolist())
    count = 2 * step.num_requests + step.num_rows
    memory_at(step.device_part, count, torch.int32).copy_(integers[:count])
    memory_at(step.ready, 1, torch.int64)[0] = step.number


def take_drafts(words_W: Tensor, out_BK: Tensor, chance_BK: Tensor) -> None:
    """Wait until a step is done, the abort word is set, or its timeout is over since the wait itself began; then write
    the first rows of out_BK, int64, and of chance_BK, float32, as many as the words say: tokens and chances of the
    drafts; 0 where there are none.

    With out_BK on a GPU this enqueues one kernel on the current stream and returns: one warp reads the words over the
    bus, other work goes on. Otherwise it blocks. `done` is looked at before the others, so an answer that is there
    counts even with the abort word set or no time left. `outcome` is written at the end. Under Triton's interpreter,
    which has no timer, a read of the words counts 1 ns.
    """
    if uses_kernel(out_BK):
        _take_kernel[(1,)](
            words_W, out_BK, chance_BK, out_BK.shape[1], BLOCK=_BLOCK, ON_GPU=not INTERPRETED, num_warps=1
        )
        return
    step = StepWords(*words_W.tolist())
    status, waited_ns = wait_for(step.done, step.number, step.abort, step.timeout_ns)
    for column_BK in (out_BK, chance_BK):
        column_BK[: step.num_waiting] = 0
    if status == REACHED:
        drafts = memory_at(step.drafts, step.num_waiting * out_BK.shape[1], torch.int32)
        out_BK[: step.num_waiting], chance_BK[: step.num_waiting] = unpack(drafts.view(-1, out_BK.shape[1]))
    outcome_2 = memory_at(step.outcome, 2, torch.int64)
    outcome_2[1] = waited_ns
    outcome_2[0] = status


def wait_for(word: int, wanted: int, abort: int, timeout_ns: int) -> tuple[int, int]:
    """REACHED once the word at this address is `wanted` or more, else ABORTED or TIMED_OUT; and nanoseconds waited."""
    # A read of an aligned 64-bit word is one load.
    word_1, abort_1 = (memory_at(address, 1, torch.int64).numpy() for address in (word, abort))
    start_ns, num_reads = time.monotonic_ns(), 0
    while True:
        waited_ns = time.monotonic_ns() - start_ns
        if word_1[0] >= wanted:
            return REACHED, waited_ns
        if abort_1[0] != 0:
            return ABORTED, waited_ns
        if waited_ns >= timeout_ns:
            return TIMED_OUT, waited_ns
        if (num_reads := num_reads + 1) > _NUM_QUICK_READS:
            time.sleep(_SLEEP_S)


def memory_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Host memory as a tensor, which does not keep it."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


# Places of `StepWords` in kernels.
(
    _AT_DEVICE_PART, _AT_READY, _AT_DONE, _AT_DRAFTS, _AT_OUTCOME, _AT_ABORT, _AT_NUMBER, _AT_NUM_REQUESTS,
    _AT_NUM_ROWS, _AT_NUM_WAITING, _AT_TIMEOUT_NS,
) = map(tl.constexpr, range(len(StepWords._fields)))  # fmt: skip


@triton.jit
def fence(ON_GPU: tl.constexpr):
    """What this program has stored so far reaches the host before what it stores from here on."""
    if ON_GPU:
        tl.inline_asm_elementwise("membar.sys; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, False, 1)
        tl.debug_barrier()


@triton.jit
def _post_kernel(words_W, integers, BLOCK: tl.constexpr, ON_GPU: tl.constexpr):
    device_part = tl.load(words_W + _AT_DEVICE_PART).to(tl.pointer_type(tl.int32))
    count = 2 * tl.load(words_W + _AT_NUM_REQUESTS) + tl.load(words_W + _AT_NUM_ROWS)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(device_part + at, tl.load(integers + at, mask=at < count), mask=at < count)
    fence(ON_GPU)
    tl.store(tl.load(words_W + _AT_READY).to(tl.pointer_type(tl.int64)), tl.load(words_W + _AT_NUMBER))


@triton.jit
def _take_kernel(words_W, out_BK, chance_BK, num_columns, BLOCK: tl.constexpr, ON_GPU: tl.constexpr):
    done_1 = tl.load(words_W + _AT_DONE).to(tl.pointer_type(tl.int64))
    drafts_BK = tl.load(words_W + _AT_DRAFTS).to(tl.pointer_type(tl.int32))
    outcome_2 = tl.load(words_W + _AT_OUTCOME).to(tl.pointer_type(tl.int64))
    abort_1 = tl.load(words_W + _AT_ABORT).to(tl.pointer_type(tl.int64))
    number, timeout = tl.load(words_W + _AT_NUMBER), tl.load(words_W + _AT_TIMEOUT_NS)
    num_drafts = tl.load(words_W + _AT_NUM_WAITING) * num_columns
    status, waited = wait_in_kernel(done_1, number, abort_1, timeout, ON_GPU)
    num_found = tl.where(status == 1, num_drafts, 0)
    for i in range(0, num_drafts, BLOCK):
        at = i + tl.arange(0, BLOCK)
        # Volatile: past the caches, which may hold what an earlier step had here.
        draft = tl.load(drafts_BK + at, mask=at < num_found, other=0, volatile=True)
        token, chance = unpack_in_kernel(draft)
        tl.store(out_BK + at, token, mask=at < num_drafts)
        tl.store(chance_BK + at, chance, mask=at < num_drafts)
    tl.store(outcome_2 + 1, waited)
    fence(ON_GPU)
    tl.store(outcome_2, status)


@triton.jit
def wait_in_kernel(word_1, wanted, abort_1, timeout, ON_GPU: tl.constexpr):
    """As `wait_for`."""
    waited = timeout * 0
    start = waited
    if ON_GPU:
        start = cuda.globaltimer()
    status = _wait_status(word_1, wanted, abort_1, waited, timeout)
    while status == 0:
        if ON_GPU:
            waited = cuda.globaltimer() - start
        else:
            waited += 1
        status = _wait_status(word_1, wanted, abort_1, waited, timeout)
    return status, waited


@triton.jit
def _wait_status(word_1, wanted, abort_1, waited, timeout):
    """0 while the wait goes on. Volatile: every read goes to memory, where another processor writes."""
    status = tl.where(waited >= timeout, 3, 0).to(tl.int64)
    status = tl.where(tl.load(abort_1, volatile=True) != 0, 2, status).to(tl.int64)
    return tl.where(tl.load(word_1, volatile=True) >= wanted, 1, status).to(tl.int64)
