"""What a target and a drafter tell each other, and its form on the wire.

    target                                            drafter
    Hello: shape, layers, heads by digest         ->
                                                  <-  Welcome: shared memory or none; an input projection for each head
    StepDescriptor: one target step               ->  (only without shared memory; frames: its tensors)
                                                  <-  Answer: to a step (frame: drafts, `peagle.drafter.rows`)
                                                  <-  Alive, twice a second: shows the drafter which targets are gone
                                                  <-  Bye: the connection is over, or refused; why, in words

A message is a zmq multipart message over TCP: `PROTOCOL`, the msgpack of one of the structs, and raw frames. On one
host steps and drafts pass through a ring in shared memory (`peagle.drafter.shared_memory`), and only the rest goes over
TCP. A drafter with a key asks for it in zmq's handshake (the mechanism PLAIN), before it reads any message.

Dimensions: B requests of a step, R rows of its payload, H hidden size, K the most drafts that a request may ask for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq
from torch import Tensor

PROTOCOL = b"peagle/8"  # the first frame of every message; another release may have another
MAX_NUM_HEADS = 63  # that a target may name
MAX_PROMPT_TOKENS = 262_144  # of all new requests of one step; beyond, prompts travel empty
MAX_PAYLOAD_BYTES = 1 << 30  # of one step's hidden rows
MAX_FRAME_BYTES = 1 << 24  # that a target may send; a larger one ends its connection unread. Payloads travel in pieces
MAX_REPLY_BYTES = 1 << 30  # of one frame of a drafter: the input projection of the widest targets has some 400 MB
USER = b"target"  # beside the key
NO_DRAFT = -1  # fills the drafts of a request from its number of drafts on
HEARTBEAT_MS, MAX_SILENCE_MS = 3000, 10_000  # of zmq, after which a connection counts as lost

Int32Array = npt.NDArray[np.int32]


class WireError(Exception):
    """The peer is no drafter or target of this protocol, or its message does not fit; the text says which."""


# Sizes

_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
DtypeName = Literal["bfloat16", "float16", "float32", "float64"]


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of one target engine, fixed for the life of a connection; msgspec checks those of a hello.

    hidden_size, dtype: H, and torch's name of the type of projected hidden rows. max_draft_tokens: K, the most drafts a
    request may ask for. max_num_requests, max_num_rows: B and R of the largest step. vocab_size: of the target.
    """

    hidden_size: _Size
    dtype: DtypeName
    max_draft_tokens: _Size
    max_num_requests: _Size
    max_num_rows: _Size
    vocab_size: _Size

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def payload_bytes(self) -> int:
        """Size of one step's hidden rows at most."""
        return self.max_num_rows * self.hidden_size * self.torch_dtype.itemsize


# Messages

HeadIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUM_HEADS)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A target introduces itself. heads: index -> digest; the indices are the target's own. host: of `host_identity`,
    "" for no shared memory."""

    name: str
    shape: TargetShape
    aux_layer_ids: tuple[int, ...]
    heads: dict[HeadIndex, str]
    host: str


class StepDescriptor(msgspec.Struct, frozen=True, tag=True):
    """What the target's host knows of a step: the same bytes in shared memory and over TCP.

    number: counts up from 1 within a connection.
    slots_B: the target's number of each request, 0 .. max_num_requests - 1; no slot twice in a step.
    heads_B: index of the head that drafts for the request. num_drafts_B: drafts wanted, 0 .. max_draft_tokens.
    row_offset_B: first row of the request in the payload. num_rows: R.
    prompts: slot -> token ids of positions 0 .. start of a request that is new to this drafter, so that it can look for
        cached rows of the same tokens; empty where they are not known.
    finished_slots: requests that ended before this step; a slot may be finished and used by a new one in the same step.
    """

    slots_B: Int32Array
    heads_B: Int32Array
    num_drafts_B: Int32Array
    row_offset_B: Int32Array
    num_rows: int
    prompts: dict[int, Int32Array] = {}
    finished_slots: tuple[int, ...] = ()
    number: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.slots_B)


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """shared_memory: its name, "" for none. A frame for the input projection of each head, in the hello's order."""

    shared_memory: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to a step. Frame: int32 [B, K], token ids of the target's vocabulary, `NO_DRAFT` from each
    request's number of drafts on."""

    number: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    """For the drafter: what is sent to a target that is gone fails."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The drafter ends the connection, or does not draft for whoever sent a hello."""

    reason: str


TargetMessage = Hello | StepDescriptor
DrafterMessage = Welcome | Answer | Alive | Bye


def _read_ints(_: Any, data: Any) -> Int32Array:
    return np.frombuffer(data, np.int32).copy()  # writable


FROM_TARGET: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(TargetMessage, dec_hook=_read_ints)
FROM_DRAFTER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(DrafterMessage)
encode = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode


def message_frames(message: TargetMessage | DrafterMessage, *raw: Any) -> list[Any]:
    """What `send_multipart` takes."""
    return [PROTOCOL, encode(message), *raw]


def decode(data: Any, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """A message of a peer. Raises WireError for anything else."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a message that does not fit: {error}") from error


def read_message(frames: Sequence[zmq.Frame], decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, Sequence[zmq.Frame]]:
    """A peer's message, by `FROM_TARGET` or `FROM_DRAFTER`, and its raw frames. Raises WireError for anything else."""
    version = frames[0].bytes if frames else b""
    if version != PROTOCOL or len(frames) < 2:
        raise WireError(
            f"it speaks {version[:40]!r}, this side {PROTOCOL!r}: run the same release at the target and at the drafter"
        )
    return decode(frames[1].buffer, decoder), frames[2:]


# A step as the drafter reads it: checked, whichever way it came


@dataclasses.dataclass(frozen=True)
class Step:
    """Request b has `num_valid_B[b]` rows at the positions from `start_B[b]` on; they lie in the payload from row
    `row_offset_B[b]` of the descriptor on. Other rows of the payload (rejected drafts, padding) mean nothing.

    num_valid_B: may be 0: nothing new, nothing to draft from. next_tokens_R: the token *after* each row's position.
    hidden_RH: projected hidden states, on the host, pinned where a GPU drafts; valid until the step is answered.
    session: the connection; slots of different sessions are different requests.
    """

    descriptor: StepDescriptor
    start_B: Int32Array
    num_valid_B: Int32Array
    next_tokens_R: Int32Array
    hidden_RH: Tensor
    session: int = 0

    def valid_rows(self) -> npt.NDArray[np.int64]:
        """Payload rows that belong to a request, request by request."""
        return valid_rows(self.descriptor.row_offset_B, self.num_valid_B)


def valid_rows(row_offset_B: npt.NDArray[np.integer], num_valid_B: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Rows row_offset_B[b] .. row_offset_B[b] + num_valid_B[b] - 1 of each request, one request after another."""
    before_B = np.cumsum(num_valid_B) - num_valid_B
    shift_R = np.repeat(row_offset_B - before_B, num_valid_B)
    return np.arange(len(shift_R)) + shift_R


def check_sizes(descriptor: StepDescriptor, shape: TargetShape) -> None:
    """Raise ValueError unless the step has as many requests and rows as it says, and no more than `shape` allows."""
    if not 0 <= descriptor.num_rows <= shape.max_num_rows:
        raise ValueError(f"num_rows = {descriptor.num_rows} is outside 0 .. {shape.max_num_rows}")
    for name in ("slots_B", "heads_B", "num_drafts_B", "row_offset_B"):
        if (found := len(getattr(descriptor, name))) != descriptor.num_requests:
            raise ValueError(f"{name} has {found} values for {descriptor.num_requests} requests")
    if descriptor.num_requests > shape.max_num_requests:
        raise ValueError(f"{descriptor.num_requests} requests are more than {shape.max_num_requests}")


def check_step(step: Step, shape: TargetShape) -> None:
    """Raise ValueError, naming the field, unless all values of a step whose sizes fit are those of `shape`: a wrong row
    or token would be a wild read on the drafter's GPU."""
    descriptor, num_rows = step.descriptor, step.descriptor.num_rows
    _check_range("slots_B", descriptor.slots_B, shape.max_num_requests - 1)
    _check_range("heads_B", descriptor.heads_B, MAX_NUM_HEADS - 1)
    _check_range("num_drafts_B", descriptor.num_drafts_B, shape.max_draft_tokens)
    _check_range("row_offset_B", descriptor.row_offset_B, num_rows)
    _check_range("finished_slots", np.array(descriptor.finished_slots, np.int32), shape.max_num_requests - 1)
    _check_range("start_B", step.start_B, 2**31 - 1 - shape.max_num_rows - shape.max_draft_tokens)
    _check_range("num_valid_B", step.num_valid_B, num_rows)
    if len(descriptor.slots_B) and np.bincount(descriptor.slots_B).max() > 1:
        raise ValueError(f"slots_B {descriptor.slots_B.tolist()} names a slot twice")
    if (descriptor.row_offset_B + step.num_valid_B > num_rows).any():
        raise ValueError(f"row_offset_B + num_valid_B reaches beyond the {num_rows} rows of the step")
    _check_range("next_tokens_R", step.next_tokens_R[step.valid_rows()], shape.vocab_size - 1)
    for slot, token_ids in descriptor.prompts.items():
        _check_range(f"prompts[{slot}]", token_ids, shape.vocab_size - 1)
        starts = step.start_B[descriptor.slots_B == slot]
        if not len(starts):
            raise ValueError(f"prompts has slot {slot}, which has no rows in this step")
        if len(token_ids) not in (0, starts[0] + 1):
            raise ValueError(f"prompts[{slot}] has {len(token_ids)} tokens, not 0 or {starts[0] + 1}, start + 1")


def _check_range(name: str, values: Int32Array, high: int) -> None:
    if values.size and int(values.view(np.uint32).max()) > high:  # a negative one, read without its sign, is above
        raise ValueError(f"{name} holds {values.min()} .. {values.max()}, outside 0 .. {high}")


# Heads as they are offered, and who fits whom


@dataclasses.dataclass(frozen=True)
class ServedHead:
    """A head as a drafter offers it. projection: its `InputProjection` as bytes. max_draft_tokens: at most."""

    digest: str
    projection: bytes
    hidden_size: int
    dtype: str
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_draft_tokens: int


#: Of a served head, what must be the same at the targets.
OF_TARGETS = ("hidden_size", "dtype", "vocab_size", "aux_layer_ids")


def find_mismatch(hello: Hello, heads: Mapping[int, ServedHead]) -> str | None:
    """Why these heads cannot draft for this target; None where they can."""
    if not hello.heads:
        return "the target names no head"
    shape, by_digest = hello.shape, {head.digest: head for head in heads.values()}
    if (num_bytes := shape.payload_bytes) > MAX_PAYLOAD_BYTES:
        return f"a step of max_num_rows = {shape.max_num_rows} has {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES}"
    theirs = {**dataclasses.asdict(shape), "aux_layer_ids": hello.aux_layer_ids}
    for index, digest in hello.heads.items():
        head = by_digest.get(digest)
        if head is None:
            return f"head {index} of the target is {digest}, this drafter has {', '.join(sorted(by_digest))}"
        for name in OF_TARGETS:
            if (ours := getattr(head, name)) != theirs[name]:
                return f"head {digest}: {name} is {ours} at the drafter and {theirs[name]} at the target"
        if shape.max_draft_tokens > head.max_draft_tokens:
            return (
                f"head {digest}: the target asks for up to {shape.max_draft_tokens} drafts, this drafter gives "
                f"{head.max_draft_tokens}: start it with a larger max_draft_tokens"
            )
    return None


def check_swap(heads: Mapping[int, ServedHead], index: int, served: ServedHead) -> ServedHead | None:
    """The head that `served` may replace; None in a new place. Raises ValueError for a head that is served under
    another number already, or one that targets of the others cannot feed."""
    if served.digest in {other.digest for i, other in heads.items() if i != index}:
        raise ValueError(f"head {served.digest} is served under another number already")
    other = heads.get(index) or next(iter(heads.values()))
    for name in OF_TARGETS:
        if (new := getattr(served, name)) != (value := getattr(other, name)):
            raise ValueError(
                f"head {served.digest} does not fit the targets: its {name} is {new}, that of head "
                f"{other.digest} {value}"
            )
    return heads.get(index)


# Sockets


class Waker:
    """Wakes a thread that polls its descriptor. The descriptor lives as long as anybody has the waker."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)


def set_up_socket(socket: zmq.Socket[bytes], max_frame_bytes: int) -> None:
    """What both sides want of their socket: bounded frames and queues, and a peer that hangs or is gone noticed."""
    socket.maxmsgsize = max_frame_bytes
    socket.rcvhwm = 64
    socket.handshake_ivl = 5000
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, MAX_SILENCE_MS
    socket.setsockopt(zmq.IPV6, 1)
