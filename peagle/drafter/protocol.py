"""What a target and a drafter tell each other, and its form on the wire.

    target                                            drafter
    Hello: shape, layers, heads by digest         ->
                                                  <-  Refused: why, in words
                                                  <-  Welcome: shared memory or none; a frame for each input projection
    StepDescriptor: one target step               ->  (only without shared memory; frames: its tensors)
                                                  <-  Answer: to a step (frame: drafts, `peagle.drafter.drafts`)
                                                  <-  Alive, twice a second
                                                  <-  Swapped or Bye: the connection is over

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

PROTOCOL = b"peagle/6"  # the first frame of every message; another release may have another
MAX_NUM_HEADS = 63  # that a target may name
MAX_PROMPT_TOKENS = 262_144  # of all new requests of one step; beyond, prompts travel empty
MAX_PAYLOAD_BYTES = 1 << 30  # of one step's hidden rows
MAX_FRAME_BYTES = 1 << 24  # that a target may send; a larger one ends its connection unread. Payloads travel in pieces
MAX_REPLY_BYTES = 1 << 30  # of one frame of a drafter: the input projection of the widest targets has some 400 MB
USER = b"target"  # beside the key
NO_DRAFT = -1  # fills the drafts of a request from its number of drafts on

Int32Array = npt.NDArray[np.int32]


class WireError(Exception):
    """The peer is no drafter or target of this protocol, or its message does not fit; the text says which."""


# Sizes

_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
DtypeName = Literal["bfloat16", "float16", "float32", "float64"]


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of one target engine, fixed for the life of a connection; msgspec checks those of a hello.

    hidden_size: width of a projected hidden row (the drafter's H).
    dtype: of those rows, torch's name of it.
    max_draft_tokens: K, the most drafts a request may ask for.
    max_num_requests: B of the largest step; requests are numbered 0 .. max_num_requests - 1.
    max_num_rows: R of the largest step.
    vocab_size: of the target; tokens of drafts are below it.
    """

    hidden_size: _Size
    dtype: DtypeName
    max_draft_tokens: _Size
    max_num_requests: _Size
    max_num_rows: _Size
    vocab_size: _Size

    def __post_init__(self) -> None:
        if self.max_num_rows < self.max_num_requests:
            raise ValueError(
                f"max_num_rows = {self.max_num_rows} is below max_num_requests = {self.max_num_requests}: every "
                "request of a step has a row"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def payload_bytes(self) -> int:
        """Size of one step's hidden rows at most."""
        return self.max_num_rows * self.hidden_size * self.torch_dtype.itemsize


# Messages

HeadIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUM_HEADS)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A target introduces itself. heads: index -> digest; the indices are the target's own. host: of `host_identity`,
    "" for no shared memory. known_projections: digests of heads whose input projection the target has already."""

    name: str
    shape: TargetShape
    aux_layer_ids: tuple[int, ...]
    heads: dict[HeadIndex, str]
    host: str
    known_projections: tuple[str, ...] = ()


class StepDescriptor(msgspec.Struct, frozen=True, tag=True):
    """What the target's host knows of a step: the same bytes in shared memory and over TCP.

    number: counts up from 1 within a connection.
    slots_B: the target's number of each request, 0 .. max_num_requests - 1; no slot twice in a step.
    heads_B: index of the head that drafts for the request.
    num_drafts_B: drafts wanted, 0 .. max_draft_tokens.
    row_offset_B: first row of the request in the payload.
    num_rows: R.
    prompts: slot -> token ids of positions 0 .. start of a request that this drafter has not seen, so that it can look
        for cached rows of the same tokens. An entry says "a new request has this slot". It is empty where the tokens
        are not known: of a request that another drafter served before.
    finished_slots: requests that ended before this step; their cache may be dropped. They are released first: a slot
        may be finished and, for a new request, used in the same step.
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
    """shared_memory: its name, or "" and `tcp_reason`. projections: digests, a frame each."""

    shared_memory: str
    tcp_reason: str
    projections: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why this drafter does not draft for whoever sent a hello."""

    reason: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to a step. Frame: int32 [B, K], drafts as they travel (`peagle.drafter.drafts`), `NO_DRAFT` from each
    request's number of drafts on."""

    number: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The drafter's serving thread runs."""


class Swapped(msgspec.Struct, frozen=True, tag=True):
    """Another head took the place of one of the target's: digests. The target connects again."""

    old: str
    new: str


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The drafter ends the connection."""

    reason: str


TargetMessage = Hello | StepDescriptor
DrafterMessage = Welcome | Refused | Answer | Alive | Swapped | Bye


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


# Heads as they are offered, and who fits whom


@dataclasses.dataclass(frozen=True)
class ServedHead:
    """A head as a drafter offers it.

    digest: of `peagle.heads.head_digest`. projection: its `InputProjection` as bytes. max_draft_tokens: the most drafts
    it is run for.
    """

    digest: str
    projection: bytes
    hidden_size: int
    dtype: str
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_draft_tokens: int


_SHARED_FIELDS = ("hidden_size", "dtype", "vocab_size", "aux_layer_ids")


def find_mismatch(hello: Hello, heads: Mapping[int, ServedHead]) -> str | None:
    """Why these heads cannot draft for this target; None where they can."""
    if not hello.heads:
        return "the target names no head"
    shape, by_digest = hello.shape, {head.digest: head for head in heads.values()}
    if (num_bytes := shape.payload_bytes) > MAX_PAYLOAD_BYTES:
        return f"a step of max_num_rows = {shape.max_num_rows} has {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES}"
    for index, digest in hello.heads.items():
        head = by_digest.get(digest)
        if head is None:
            return f"head {index} of the target is {digest}, this drafter has {', '.join(sorted(by_digest))}"
        for name in _SHARED_FIELDS:
            theirs = hello.aux_layer_ids if name == "aux_layer_ids" else getattr(shape, name)
            if (ours := getattr(head, name)) != theirs:
                return f"head {digest}: {name} is {ours} at the drafter and {theirs} at the target"
        if shape.max_draft_tokens > head.max_draft_tokens:
            return (
                f"head {digest}: the target asks for up to {shape.max_draft_tokens} drafts, this drafter gives "
                f"{head.max_draft_tokens}: start it with a larger max_draft_tokens"
            )
    return None


def check_swap(heads: Mapping[int, ServedHead], index: int, served: ServedHead) -> ServedHead | None:
    """The head that `served` may replace; None in a new place.

    Raises ValueError for a head that is served under another number already, or one that targets of the others cannot
    feed.
    """
    if served.digest in {other.digest for i, other in heads.items() if i != index}:
        raise ValueError(f"head {served.digest} is served under another number already")
    other = heads.get(index) or next(iter(heads.values()))
    for name in _SHARED_FIELDS:
        if getattr(served, name) != getattr(other, name):
            raise ValueError(
                f"head {served.digest} does not fit the targets: its {name} is {getattr(served, name)}, that of head "
                f"{other.digest} {getattr(other, name)}"
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
    """What both sides want of their socket: bounded frames and queues, and a peer whose host went away noticed within
    half a minute."""
    socket.maxmsgsize = max_frame_bytes
    socket.rcvhwm = 64
    socket.handshake_ivl = 5000
    socket.setsockopt(zmq.IPV6, 1)
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
