"""Memory that two processes of one host share, and that no kill -9 leaves behind.

A file in /dev/shm that loses its name as soon as both sides have it: from then on the kernel frees it with its last
process. Until then its maker holds a lock on it; a lock that can be taken belongs to a dead maker, whose file the next
maker removes (`sweep`). Knows nothing of what the memory holds.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import mmap
import os
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.steps import NO_DRAFT, Int32Array, TargetShape, TargetStep
from peagle.drafter.wait import take_answer, wait_for_word

# ====================================================================================================
# Memory that two processes of one host share, and that no kill -9 leaves behind.
#
# A file in /dev/shm that loses its name as soon as both sides have it: from then on the kernel frees it with its last
# process. Until then its maker holds a lock on it; a lock that can be taken belongs to a dead maker, whose file the next
# maker removes (`sweep`). Knows nothing of what the memory holds.

SHARED_DIR = Path("/dev/shm")
_PREFIX = "peagle-mailbox-"
_MIN_AGE_S = 30.0  # a younger file may be one whose maker has not locked it yet
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Equal for two processes exactly when files that one makes in /dev/shm are the other's too; "" where none are.

    The kernel's boot and the device number of the mount: containers of one host share the first, not the second.
    Only x86-64 keeps the order of plain stores and loads, which the mailbox's flags rely on.
    """
    if platform.machine() != "x86_64":
        return ""
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}:{SHARED_DIR.stat().st_dev}"
    except OSError:
        return ""


class SharedMemory:
    """A shared mapping. `name` is the file's as long as it has one."""

    def __init__(self, mapping: mmap.mmap, name: str = "", lock_fd: int | None = None) -> None:
        self.mapping = mapping
        self.name = name
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, all zero and reserved. Raises OSError where /dev/shm has no room for it."""
        name = f"{_PREFIX}{secrets.token_hex(12)}"
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

    @classmethod
    def private(cls, num_bytes: int) -> SharedMemory:
        """Memory of this process alone."""
        return cls(mmap.mmap(-1, num_bytes))

    def unlink(self) -> None:
        """Take the name away, if it is still there. The memory stays with those who have it."""
        if self.name:
            (SHARED_DIR / self.name).unlink(missing_ok=True)
            self.name = ""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def sweep() -> int:
    """Remove files whose maker died before the other side had them; how many."""
    num_removed = 0
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
            num_removed += 1
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return num_removed


# ====================================================================================================
# The memory through which a target hands its steps to a drafter and takes drafts back, without a call between them.
#
# Three areas in turn (step s uses area s % 3), each with a request and its reply:
#
#     host part      the target's host writes it    slots, heads, row offsets, depths, finished slots, prompts; last the
#                                                   counts, and of them last the step's number: all of this part is there
#     device part    the target's GPU, or its host  starts, valid rows, next tokens; payload (reduced hidden rows)
#     ready          the same, last                 the step's number: all of the request is there
#     drafts         the drafter                    ids, time of service
#     done           the drafter, last              the step's number: all of the reply is there
#
# Three, not two: with asynchronous scheduling the target's host writes step s + 2 while the drafter still reads step s.
# A sender that finds step s - 3 unanswered does not send (`is_free`), so nothing is overwritten while it is read.
#
# Words beside the areas: `abort`, non-zero while the target must not wait (its host sets it); `heartbeat`, the drafter's
# monotonic clock in ns, which all processes of a host share. `outcome` is the target's own: what its GPU's wait came to.
# Memory order: see `peagle.drafter.mailbox.host_identity`.

NUM_AREAS = 3
MAX_PROMPT_TOKENS = 262_144  # of all new requests of one step; beyond, prompts travel empty
_LINE_BYTES, _PAGE_BYTES = 64, 4096
_HOST_ROWS = 4  # slots, heads, row offsets, depths


@dataclasses.dataclass(frozen=True)
class Area:
    """Views of one area's memory; what each holds is said in the module. B, R, K are the largest of the shape."""

    counts: Tensor  # int64 [8]
    host_4B: Tensor  # int32
    finished_B: Tensor  # int32
    prompt_slots_B: Tensor  # int32
    prompt_lengths_B: Tensor  # int32
    prompt_tokens_P: Tensor  # int32
    device_part: Tensor  # int32 [2 B + R]: of a step's own B, starts, valid rows, next tokens, without gaps
    ready: Tensor  # int64 [1]
    payload_RH: Tensor
    drafts_BK: Tensor  # int32
    service_ns: Tensor  # int64 [1]
    done: Tensor  # int64 [1]
    outcome: Tensor  # int64 [2]: status of `peagle.drafter.wait`, nanoseconds waited


@dataclasses.dataclass(frozen=True)
class HostPart:
    """Copies of what the target's host wrote. content: the bytes of host_4B, the same object while they stay equal."""

    step: int
    num_rows: int
    content: bytes
    host_4B: Int32Array
    finished_slots: Sequence[int]
    prompts: Mapping[int, Int32Array]


class _Carver:
    """Cuts views out of a buffer one after another; with no buffer it only counts the bytes."""

    def __init__(self, buffer: object | None) -> None:
        self._buffer = buffer
        self.num_bytes = 0

    def take(self, dtype: torch.dtype, *sizes: int, align_bytes: int = _LINE_BYTES) -> Tensor:
        offset = -(-self.num_bytes // align_bytes) * align_bytes
        count = math.prod(sizes)
        self.num_bytes = offset + count * dtype.itemsize
        if self._buffer is None:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=offset).view(sizes)


def _carve(carver: _Carver, shape: TargetShape) -> tuple[Tensor, tuple[Area, ...]]:
    num_requests, num_rows, int32, int64 = shape.max_num_requests, shape.max_num_rows, torch.int32, torch.int64
    words = carver.take(int64, 2 * _LINE_BYTES // 8)
    areas = tuple(
        Area(
            counts=carver.take(int64, 8),
            host_4B=carver.take(int32, _HOST_ROWS, num_requests),
            finished_B=carver.take(int32, num_requests),
            prompt_slots_B=carver.take(int32, num_requests),
            prompt_lengths_B=carver.take(int32, num_requests),
            prompt_tokens_P=carver.take(int32, MAX_PROMPT_TOKENS),
            device_part=carver.take(int32, 2 * num_requests + num_rows),
            ready=carver.take(int64, 1),
            payload_RH=carver.take(shape.torch_dtype, num_rows, shape.hidden_size, align_bytes=_PAGE_BYTES),
            drafts_BK=carver.take(int32, num_requests, shape.max_depth),
            service_ns=carver.take(int64, 1),
            done=carver.take(int64, 1),
            outcome=carver.take(int64, 2),
        )
        for _ in range(NUM_AREAS)
    )
    return words, areas


def mailbox_bytes(shape: TargetShape) -> int:
    """Size of a mailbox, in whole pages: three payloads and little else."""
    carver = _Carver(None)
    _carve(carver, shape)
    return -(-carver.num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class Mailbox:
    """One side's view of a mailbox. Steps count up from 1, without gaps."""

    def __init__(self, memory: SharedMemory, shape: TargetShape) -> None:
        self.memory, self.shape = memory, shape
        words, self.areas = _carve(_Carver(memory.mapping), shape)
        self.abort, self.heartbeat = words[:1], words[_LINE_BYTES // 8 :][:1]
        # Reading a word through numpy costs a tenth of reading it through torch, and waiting is reading words.
        self._ready = [area.ready.numpy() for area in self.areas]
        self._done = [area.done.numpy() for area in self.areas]
        self._abort, self._heartbeat = self.abort.numpy(), self.heartbeat.numpy()
        self._parts = [(area.counts.numpy(), area.host_4B.numpy(), area.device_part.numpy()) for area in self.areas]
        self._replies = [(area.drafts_BK.numpy(), area.service_ns.numpy()) for area in self.areas]
        self._host_part: HostPart | None = None
        self._checked: HostPart | None = None

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
        return cls(SharedMemory.private(mailbox_bytes(shape)), shape)

    def area(self, step: int) -> Area:
        return self.areas[step % NUM_AREAS]

    # The target's side.

    def is_free(self, step: int) -> bool:
        """Whether the area of `step` may be written: the step that had it before is answered."""
        return int(self._done[step % NUM_AREAS][0]) >= step - NUM_AREAS

    def write_host_part(
        self,
        step: int,
        host_4B: Int32Array,
        num_rows: int,
        finished_slots: Sequence[int] = (),
        prompts: Mapping[int, Int32Array] | None = None,
    ) -> int:
        """What the target's host knows of a step: rows of host_4B are slots, heads, row offsets, depths.

        Returns how many prompts did not fit and travel empty. Sizes are the sender's to keep: within the shape.
        """
        area, num_requests = self.area(step), host_4B.shape[1]
        area.outcome[0] = 0
        area.host_4B.numpy()[:, :num_requests] = host_4B
        area.finished_B.numpy()[: len(finished_slots)] = finished_slots
        used, num_cut = 0, 0
        for i, (slot, token_ids) in enumerate((prompts or {}).items()):
            if used + len(token_ids) > MAX_PROMPT_TOKENS:
                token_ids, num_cut = token_ids[:0], num_cut + 1
            area.prompt_slots_B[i], area.prompt_lengths_B[i] = slot, len(token_ids)
            area.prompt_tokens_P.numpy()[used : used + len(token_ids)] = token_ids
            used += len(token_ids)
        counts = self._parts[step % NUM_AREAS][0]
        counts[1:5] = (num_requests, num_rows, len(finished_slots), len(prompts or {}))
        counts[0] = step
        return num_cut

    def write_device_part(
        self, step: int, start_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor, hidden_RH: Tensor
    ) -> None:
        """The rest of a step, from tensors on the host; then `ready`. Of a GPU: `peagle.drafter.mailbox`."""
        area, num_rows = self.area(step), len(next_tokens_R)
        area.device_part[: 2 * len(start_B) + num_rows] = torch.cat([start_B, num_valid_B, next_tokens_R])
        area.payload_RH[:num_rows].copy_(hidden_RH)
        self._ready[step % NUM_AREAS][0] = step

    def is_done(self, step: int) -> bool:
        return int(self._done[step % NUM_AREAS][0]) >= step

    def set_abort(self, aborted: bool) -> None:
        """Let go, or not, of whoever waits for drafts: also a GPU that waits already."""
        self._abort[0] = aborted

    def is_aborted(self) -> bool:
        return bool(self._abort[0])

    def read_drafts(self, step: int, num_requests: int) -> Int32Array:
        """[B, K], once `is_done`; a copy."""
        return self.area(step).drafts_BK[:num_requests].numpy().copy()

    def service_s(self, step: int) -> float:
        """Seconds from when the drafter saw the step to its answer, once `is_done`."""
        return float(self.area(step).service_ns[0]) * 1e-9

    def silence_s(self) -> float:
        """Seconds since the drafter's last heartbeat."""
        return (time.monotonic_ns() - int(self._heartbeat[0])) * 1e-9

    # The drafter's side.

    def beat(self) -> None:
        self._heartbeat[0] = time.monotonic_ns()

    def is_ready(self, step: int) -> bool:
        return int(self._ready[step % NUM_AREAS][0]) == step

    def read_ahead(self, step: int) -> None:
        """Take the host part of a step, if it is there: mostly it is long before the step is ready.

        Raises ValueError for sizes that do not fit.
        """
        if (self._host_part is None or self._host_part.step != step) and int(
            self._parts[step % NUM_AREAS][0][0]
        ) == step:
            self._host_part = self._read_host_part(step)

    def read_step(self, step: int, session: int) -> TargetStep:
        """A step that is ready. `hidden_RH` is a view, the rest copies. Raises ValueError for what does not fit."""
        if (host := self._host_part) is None or host.step != step:
            host = self._read_host_part(step)
        num_requests, num_rows = host.host_4B.shape[1], host.num_rows
        device_part: Int32Array = self._parts[step % NUM_AREAS][2][: 2 * num_requests + num_rows].copy()
        found = TargetStep(
            session=session,
            step=step,
            slots_B=host.host_4B[0],
            heads_B=host.host_4B[1],
            start_B=device_part[:num_requests],
            num_valid_B=device_part[num_requests : 2 * num_requests],
            row_offset_B=host.host_4B[2],
            depth_B=host.host_4B[3],
            next_tokens_R=device_part[2 * num_requests :],
            hidden_RH=self.area(step).payload_RH[:num_rows],
            finished_slots=host.finished_slots,
            prompts=host.prompts,
            host_part=host.content,
        )
        found.check(self.shape, knows_host_part=self._checked is not None and host.content is self._checked.content)
        self._checked = host
        return found

    def _read_host_part(self, step: int) -> HostPart:
        area, shape = self.area(step), self.shape
        counts, all_4B, _ = self._parts[step % NUM_AREAS]
        counted_step, num_requests, num_rows, num_finished, num_prompts = sizes = counts[:5].tolist()
        limits = (step, shape.max_num_requests, shape.max_num_rows, shape.max_num_requests, shape.max_num_requests)
        if counted_step != step or any(not 0 <= n <= limit for n, limit in zip(sizes, limits, strict=True)):
            raise ValueError(f"the host part of step {step} says step {counted_step} with sizes {sizes[1:]}")
        content: bytes = all_4B[:, :num_requests].tobytes()
        # While the same requests decode, step after step has the same host part.
        if (old := self._checked) is not None and old.num_rows == num_rows and old.content == content:
            content = old.content
        return HostPart(
            step,
            num_rows,
            content,
            np.frombuffer(content, np.int32).reshape(_HOST_ROWS, num_requests),
            area.finished_B[:num_finished].tolist() if num_finished else (),
            _read_prompts(area, num_prompts) if num_prompts else {},
        )

    def answer(self, step: int, drafts_BK: Int32Array, service_ns: int) -> None:
        """Drafts of a step, [B, max_depth]; then `done`."""
        replied_BK, replied_ns = self._replies[step % NUM_AREAS]
        replied_BK[: len(drafts_BK)] = drafts_BK
        replied_ns[0] = service_ns
        self._done[step % NUM_AREAS][0] = step


def _read_prompts(area: Area, num_prompts: int) -> dict[int, Int32Array]:
    lengths = area.prompt_lengths_B[:num_prompts].tolist()
    if any(length < 0 for length in lengths) or sum(lengths) > MAX_PROMPT_TOKENS:
        raise ValueError(f"prompts of {lengths} tokens, at most {MAX_PROMPT_TOKENS} together")
    ends = np.cumsum([0, *lengths])
    tokens = area.prompt_tokens_P.numpy()[: ends[-1]].copy()
    slots = area.prompt_slots_B[:num_prompts].tolist()
    return {slot: tokens[ends[i] : ends[i + 1]] for i, slot in enumerate(slots)}


# ====================================================================================================
# A mailbox used by a GPU: its memory registered with CUDA, a step sent and drafts awaited in stream order.
#
# The host enqueues and goes on; it learns later, from the area's `outcome`, what a wait came to. Everything here runs on
# the current stream of the current device.

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
