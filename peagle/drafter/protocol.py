"""What a target and a drafter say to each other: the step record, the messages, and their form on the wire.

    target                                            drafter
    Hello: shape, layers, heads by digest         ->
                                                  <-  Refused: why, in words
                                                  <-  Welcome: mailbox or none; one frame for each reducer
    Attached: whether it has the mailbox          ->  (only where a mailbox was named)
    Step: one target step                         ->  (only without a mailbox; frames: hidden rows)
                                                  <-  Answer: to a step (frame: drafts, `peagle.drafter.drafts`)
                                                  <-  Alive, twice a second
                                                  <-  Swapped or Bye: the connection is over

A message is a zmq multipart message over TCP: `PROTOCOL`, the msgpack of one of the structs, and raw frames. With a
shared mailbox (`peagle.drafter.mailbox`) steps and drafts pass through memory, and only the rest goes over TCP. A
drafter with a key asks for it in zmq's handshake (the mechanism PLAIN), before it reads any message.

Dimensions: B requests of a step, R rows of its payload, H hidden size, K the most drafts that a request may ask for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from peagle.model import rms_norm

PROTOCOL = b"peagle/5"  # the first frame of every message; another release may have another
MAX_NUM_HEADS = 63  # a bit each in a word of 64, the sign left out: `peagle.vllm.remote`
MAX_PROMPT_TOKENS = 262_144  # of all new requests of one step; beyond, prompts travel empty
MAX_PAYLOAD_BYTES = 1 << 30  # of one step's hidden rows
MAX_FRAME_BYTES = 1 << 24  # that a target may send; a larger one ends its connection unread. Payloads travel in pieces
MAX_REPLY_BYTES = 1 << 30  # of one frame of a drafter: a reducer of the widest targets has some 400 MB
USER = b"target"  # beside the key
NO_DRAFT = -1  # fills the drafts of a request from its number of drafts on

Int32Array = npt.NDArray[np.int32]
Ints = TypeVar("Ints", Int32Array, Tensor)


class WireError(Exception):
    """The peer is no drafter or target of this protocol, or its message does not fit; the text says which."""


# The step and its sizes

_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
DtypeName = Literal["bfloat16", "float16", "float32", "float64"]


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of one target engine, fixed for the life of a connection; msgspec checks those of a hello.

    hidden_size: width of a reduced hidden row (the drafter's H).
    dtype: of those rows, torch's name of it.
    max_depth: K, the most drafts a request may ask for.
    max_num_requests: B of the largest step; slots are numbered 0 .. max_num_requests - 1.
    max_num_rows: R of the largest step.
    vocab_size: of the target; tokens of drafts are below it.
    """

    hidden_size: _Size
    dtype: DtypeName
    max_depth: _Size
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
        """Of one step's hidden rows at most."""
        return self.max_num_rows * self.hidden_size * self.torch_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a target's host knows of a step before it runs; fields as in `TargetStep`.

    num_rows: of the payload. Number and finished slots are set by the link.
    """

    slots_B: Int32Array
    heads_B: Int32Array
    depth_B: Int32Array
    row_offset_B: Int32Array
    num_rows: int
    prompts: Mapping[int, Int32Array] = dataclasses.field(default_factory=dict)
    finished_slots: Sequence[int] = ()
    number: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.slots_B)


@dataclasses.dataclass(frozen=True)
class TargetStep(Generic[Ints]):
    """What one target hands to a drafter after one of its steps.

    Request b has `num_valid_B[b]` rows at the positions from `start_B[b]` on; they lie in the payload from row
    `row_offset_B[b]` on. Other rows of the payload (rejected drafts, padding) mean nothing. Payload row i holds the
    token *after* its position and the target's reduced hidden state at its position.

    At the target, start_B, num_valid_B and next_tokens_R are int32 tensors that its GPU may still compute. At the
    drafter they are arrays; all arrays and `hidden_RH` may be views of memory that is valid until the step is answered.

    slots_B: the target's row for the request, 0 .. max_num_requests - 1; no slot twice in a step.
    heads_B: index of the head that drafts for the request.
    num_valid_B: may be 0: nothing new, nothing to draft from.
    depth_B: drafts wanted, 0 .. max_depth.
    hidden_RH: at the drafter on the host, pinned where it comes from a mailbox of a GPU.
    prompts: slot -> int32 token ids of positions 0 .. start of a request that this drafter has not seen, so that it
        can look for cached rows of the same tokens. An entry says "a new request has this slot". It is empty where
        the tokens are not known: of a request that another drafter served before.
    finished_slots: requests that ended before this step; their cache may be dropped. They are released first: a slot
        may be finished and, for a new request, used in the same step.
    session: at the drafter, the connection; slots of different sessions are different requests.
    number: counts up within a session, gaps allowed (steps that were given up).
    """

    slots_B: Int32Array
    heads_B: Int32Array
    depth_B: Int32Array
    row_offset_B: Int32Array
    start_B: Ints
    num_valid_B: Ints
    next_tokens_R: Ints
    hidden_RH: Tensor
    prompts: Mapping[int, Int32Array] = dataclasses.field(default_factory=dict)
    finished_slots: Sequence[int] = ()
    session: int = 0
    number: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.slots_B)


def valid_rows(step: TargetStep[Int32Array]) -> npt.NDArray[np.int64]:
    """Payload rows that belong to a request, request by request."""
    before_B = np.cumsum(step.num_valid_B) - step.num_valid_B
    shift = np.repeat(step.row_offset_B - before_B, step.num_valid_B)
    return np.arange(len(shift)) + shift


def check_step(step: TargetStep[Int32Array], shape: TargetShape) -> None:
    """Raise ValueError, naming the field, unless all values fit `shape`: what comes from a peer is checked here.

    A wrong row or token would be a wild read on the drafter's GPU.
    """
    check_host_part(step, shape)
    check_device_part(step, shape)


def check_host_part(step: TargetStep[Int32Array], shape: TargetShape) -> None:
    """Those of `check_step` that need no starts, valid rows and next tokens, but for their number of rows."""
    num_rows = len(step.next_tokens_R)
    _check_range("slots_B", step.slots_B, shape.max_num_requests - 1)
    if step.num_requests and np.bincount(step.slots_B).max() > 1:
        raise ValueError(f"slots_B {step.slots_B.tolist()} names a slot twice")
    _check_range("heads_B", step.heads_B, MAX_NUM_HEADS - 1)
    _check_range("depth_B", step.depth_B, shape.max_depth)
    _check_range("row_offset_B", step.row_offset_B, num_rows)
    if step.finished_slots:
        _check_range("finished_slots", np.asarray(step.finished_slots, np.int32), shape.max_num_requests - 1)
    for slot, token_ids in step.prompts.items():
        if slot not in step.slots_B:
            raise ValueError(f"prompts has slot {slot}, which has no rows in this step")
        _check_range(f"prompts[{slot}]", token_ids, shape.vocab_size - 1)


def check_device_part(step: TargetStep[Int32Array], shape: TargetShape) -> None:
    """Those of `check_step` that `check_host_part` leaves."""
    num_rows = len(step.next_tokens_R)
    _check_range("start_B", step.start_B, 2**31 - 1 - shape.max_num_rows - shape.max_depth)
    _check_range("num_valid_B", step.num_valid_B, num_rows)
    if (step.row_offset_B + step.num_valid_B > num_rows).any():
        raise ValueError(f"row_offset_B + num_valid_B reaches beyond the {num_rows} rows of the step")
    if not _is_in_range(step.next_tokens_R, shape.vocab_size - 1):  # those of rejected rows may be anything
        _check_range("next_tokens_R", step.next_tokens_R[valid_rows(step)], shape.vocab_size - 1)
    for slot, token_ids in step.prompts.items():
        if len(token_ids) not in (0, num_expected := int(step.start_B[step.slots_B == slot][0]) + 1):
            raise ValueError(f"prompts[{slot}] has {len(token_ids)} tokens, not 0 or {num_expected}, start + 1")


def _is_in_range(values: Int32Array, high: int) -> bool:
    """Whether all are in 0 .. high; a negative int32, read without its sign, is above every `high`."""
    return not values.size or int(values.view(np.uint32).max()) <= high


def _check_range(name: str, values: Int32Array, high: int) -> None:
    if not _is_in_range(values, high):
        raise ValueError(f"{name} holds {values.min()} .. {values.max()}, outside 0 .. {high}")


# Messages

HeadIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUM_HEADS)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A target introduces itself. heads: index -> digest; the indices are the target's own. host: of `host_identity`.
    known_reducers: digests of heads whose reducer the target has already."""

    name: str
    shape: TargetShape
    aux_layer_ids: tuple[int, ...]
    heads: dict[HeadIndex, str]
    host: str
    known_reducers: tuple[str, ...] = ()


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Whether the target has the mailbox that the welcome named; if not, its steps come over TCP."""

    has_mailbox: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    """A `TargetStep` over TCP; arrays as the bytes of int32. Only valid rows travel, so their offsets are known.

    Frames: the hidden rows [R, H], in pieces of `MAX_FRAME_BYTES`.
    """

    number: int
    slots_B: bytes
    heads_B: bytes
    depth_B: bytes
    start_B: bytes
    num_valid_B: bytes
    next_tokens_R: bytes
    prompts: dict[int, bytes]
    finished_slots: tuple[int, ...]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """mailbox: name of the shared memory, or "" and `no_mailbox_reason`. reducers: digests, a frame each."""

    mailbox: str
    no_mailbox_reason: str
    reducers: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why this drafter does not draft for whoever said hello."""

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


TargetMessage = Hello | Attached | Step
DrafterMessage = Welcome | Refused | Answer | Alive | Swapped | Bye
FROM_TARGET: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(TargetMessage)
FROM_DRAFTER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(DrafterMessage)
_encode = msgspec.msgpack.Encoder().encode


def frames_of(message: TargetMessage | DrafterMessage, *raw: Any) -> list[Any]:
    """What `send_multipart` takes."""
    return [PROTOCOL, _encode(message), *raw]


def read_message(frames: Sequence[zmq.Frame], decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, Sequence[zmq.Frame]]:
    """A peer's message, by `FROM_TARGET` or `FROM_DRAFTER`, and its raw frames. Raises WireError for anything else."""
    said = frames[0].bytes if frames else b""
    if said != PROTOCOL or len(frames) < 2:
        raise WireError(
            f"it speaks {said[:40]!r}, this side {PROTOCOL!r}: run the same release at the target and at the drafter"
        )
    try:
        return decoder.decode(frames[1].buffer), frames[2:]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"a message that does not fit: {error}") from error


def step_frames(step: TargetStep[Int32Array]) -> list[Any]:
    """A step that has passed `check_step`. The hidden rows are a view of the step's memory where all are valid."""
    rows = valid_rows(step)
    is_whole = len(rows) == len(step.hidden_RH) and np.array_equal(rows, np.arange(len(rows)))
    hidden_RH = step.hidden_RH if is_whole else step.hidden_RH[torch.from_numpy(rows)]
    message = Step(
        step.number,
        **{name: getattr(step, name).tobytes() for name in _PER_REQUEST},
        next_tokens_R=step.next_tokens_R[rows].tobytes(),
        prompts={slot: token_ids.tobytes() for slot, token_ids in step.prompts.items()},
        finished_slots=tuple(step.finished_slots),
    )
    payload = hidden_RH.contiguous().view(torch.uint8).numpy().reshape(-1).data
    pieces = [payload[first : first + MAX_FRAME_BYTES] for first in range(0, len(payload), MAX_FRAME_BYTES)]
    return frames_of(message, *pieces)


def read_step(message: Step, raw: Sequence[zmq.Frame], session: int, shape: TargetShape) -> TargetStep[Int32Array]:
    """Inverse of `step_frames`, checked; the hidden rows are a view. Raises WireError or ValueError."""
    columns = [_ints(getattr(message, name)) for name in _PER_REQUEST]
    slots_B, heads_B, depth_B, start_B, num_valid_B = columns
    next_tokens_R = _ints(message.next_tokens_R)
    num_rows, row_bytes = len(next_tokens_R), shape.hidden_size * shape.torch_dtype.itemsize
    if len({len(column) for column in columns}) > 1 or num_rows != num_valid_B.sum():
        raise WireError(f"a step of {[len(column) for column in columns]} requests and {num_rows} rows")
    if num_rows > shape.max_num_rows:
        raise WireError(f"{num_rows} rows are more than the agreed {shape.max_num_rows}")
    if (num_bytes := sum(len(frame.buffer) for frame in raw)) != num_rows * row_bytes:
        raise WireError(f"{num_rows} rows have {num_rows * row_bytes} bytes, not {num_bytes}")
    payload = raw[0].buffer if len(raw) == 1 else bytearray().join(frame.buffer for frame in raw)
    hidden = torch.frombuffer(payload, dtype=torch.uint8) if num_rows else torch.empty(0, dtype=torch.uint8)
    if hidden.data_ptr() % 16:
        hidden = hidden.clone()
    step = TargetStep(
        slots_B=slots_B,
        heads_B=heads_B,
        depth_B=depth_B,
        row_offset_B=(np.cumsum(num_valid_B) - num_valid_B).astype(np.int32),
        start_B=start_B,
        num_valid_B=num_valid_B,
        next_tokens_R=next_tokens_R,
        hidden_RH=hidden.view(shape.torch_dtype).view(num_rows, shape.hidden_size),
        prompts={slot: _ints(token_ids) for slot, token_ids in message.prompts.items()},
        finished_slots=message.finished_slots,
        session=session,
        number=message.number,
    )
    check_step(step, shape)
    return step


_PER_REQUEST = ("slots_B", "heads_B", "depth_B", "start_B", "num_valid_B")


def _ints(data: bytes) -> Int32Array:
    return np.frombuffer(data, np.int32).copy()  # writable


def read_drafts(
    message: Answer, raw: Sequence[zmq.Frame], number: int, num_requests: int, max_depth: int
) -> Int32Array:
    """[B, K] of the answer to a step, as they travel. Raises WireError for one to another step or of another size."""
    sizes = [len(frame.buffer) for frame in raw]
    if message.number != number or sizes != [4 * num_requests * max_depth]:
        raise WireError(f"an answer to step {message.number} with {sizes} bytes, to step {number} wanted")
    return np.frombuffer(raw[0].buffer, np.int32).reshape(num_requests, max_depth)


# Heads as they are offered, and who fits whom


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`; on a GPU in two kernels."""
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps) if x.is_cuda else rms_norm(x, weight, eps)


class Reducer:
    """`fc` and its norms: what a target needs of a head, to turn its tapped hidden states into the rows that travel.

    The mask's reduced hidden state stays at the drafter. C taps of S numbers each, X = C * S.
    """

    def __init__(
        self, fc_HX: Tensor, *, input_norm_X: Tensor | None = None, fc_norm_CS: Tensor | None = None, eps: float = 1e-5
    ) -> None:
        """fc_HX: weight of `fc`; input_norm_X: of the norm of all taps together; fc_norm_CS: of each tap's own.

        Raises ValueError for shapes that do not fit together.
        """
        if fc_HX.dim() != 2:
            raise ValueError(f"fc_HX has shape {list(fc_HX.shape)}, not [H, C * S]")
        width = fc_HX.shape[1]
        if input_norm_X is not None and tuple(input_norm_X.shape) != (width,):
            raise ValueError(f"input_norm_X has shape {list(input_norm_X.shape)}, not [{width}] as fc_HX asks")
        if fc_norm_CS is not None and (fc_norm_CS.dim() != 2 or fc_norm_CS.numel() != width):
            raise ValueError(f"fc_norm_CS has shape {list(fc_norm_CS.shape)}, not [C, S] with C * S = {width}")
        self.fc_HX, self.input_norm_X, self.fc_norm_CS, self.eps = fc_HX, input_norm_X, fc_norm_CS, eps

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.fc_HX.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of the rows that leave."""
        return self.fc_HX.dtype

    @torch.no_grad()
    def reduce(self, aux_RX: Tensor) -> Tensor:
        """aux_RX [R, C * S], the target's tapped hidden states in the order of its layers -> [R, H] in `dtype`."""
        x = aux_RX.to(self.dtype)
        if self.input_norm_X is not None:
            x = _norm(x, self.input_norm_X, self.eps)
        if self.fc_norm_CS is not None:
            x = _norm(x.unflatten(-1, tuple(self.fc_norm_CS.shape)), self.fc_norm_CS, self.eps).flatten(-2)
        return F.linear(x, self.fc_HX)

    def to(self, device: torch.device) -> Reducer:
        norms = {"input_norm_X": self.input_norm_X, "fc_norm_CS": self.fc_norm_CS}
        moved = {name: None if norm is None else norm.to(device) for name, norm in norms.items()}
        return Reducer(self.fc_HX.to(device), eps=self.eps, **moved)

    def to_bytes(self) -> bytes:
        """All of it as one safetensors image, for the answer to a target's hello."""
        tensors = {"fc_HX": self.fc_HX, "input_norm_X": self.input_norm_X, "fc_norm_CS": self.fc_norm_CS}
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
        return save(stored | {"eps": torch.tensor([self.eps], dtype=torch.float64)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Reducer:
        """What `to_bytes` wrote, on the CPU. Raises ValueError for anything else."""
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(f"{len(data)} bytes are no reducer: {error}") from error
        eps_1, names = tensors.pop("eps", torch.empty(0)), {"fc_HX", "input_norm_X", "fc_norm_CS"}
        if eps_1.shape != (1,) or not 0 < float(eps_1[0]) < 1:
            raise ValueError(f"a reducer's eps is {eps_1.tolist()}, not one number between 0 and 1")
        if "fc_HX" not in tensors or not tensors.keys() <= names or len({t.dtype for t in tensors.values()}) > 1:
            found = {name: str(tensor.dtype) for name, tensor in tensors.items()}
            raise ValueError(f"a reducer holds {found}, not fc_HX and its norms in one type")
        return cls(**tensors, eps=float(eps_1[0]))


@dataclasses.dataclass(frozen=True)
class ServedHead:
    """A head as a drafter offers it.

    digest: of `peagle.heads.head_digest`. reducer: its `Reducer` as bytes. max_depth: the most drafts it is run for.
    """

    digest: str
    reducer: bytes
    hidden_size: int
    dtype: str
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_depth: int


_SHARED_FIELDS = ("hidden_size", "dtype", "vocab_size", "aux_layer_ids")


def refusal(hello: Hello, heads: Mapping[int, ServedHead]) -> str | None:
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
        if shape.max_depth > head.max_depth:
            return (
                f"head {digest}: the target asks for up to {shape.max_depth} drafts, this drafter gives "
                f"{head.max_depth}: start it with a larger max_depth"
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
    """Wakes a thread that polls its descriptor. The descriptor lives as long as anybody knows the waker."""

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


def set_up(socket: zmq.Socket[bytes], max_frame_bytes: int) -> None:
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
