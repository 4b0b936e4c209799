"""What a target hands to a drafter after one of its steps, and the sizes that both sides agree on when they connect.

Dimensions: B requests of the step, R rows of the payload, H hidden size, K the most drafts that a request may ask for.
Request b has `num_valid_B[b]` rows at the positions from `start_B[b]`; they lie in the payload from row
`row_offset_B[b]` on. Rows of the payload that belong to no request (rejected drafts, padding) are left alone. Row i
holds the token *after* its position and the target's reduced hidden state at its position.
"""

from __future__ import annotations

import abc
import dataclasses
import types
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

# ====================================================================================================
# What a target hands to a drafter after one of its steps, and the sizes that both sides agree on when they connect.
#
# Dimensions: B requests of the step, R rows of the payload, H hidden size, K the most drafts that a request may ask for.
# Request b has `num_valid_B[b]` rows at the positions from `start_B[b]`; they lie in the payload from row
# `row_offset_B[b]` on. Rows of the payload that belong to no request (rejected drafts, padding) are left alone. Row i
# holds the token *after* its position and the target's reduced hidden state at its position.

Int32Array = npt.NDArray[np.int32]
NO_DRAFT = -1  # fills the draft ids of a request from its number of drafts on
DTYPES: Mapping[str, torch.dtype] = types.MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
)
_PER_REQUEST = ("slots_B", "heads_B", "start_B", "num_valid_B", "row_offset_B", "depth_B")


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of one target engine, fixed for the life of a connection.

    hidden_size: width of a reduced hidden row (the drafter's H).
    dtype: of those rows, a key of `DTYPES`.
    max_depth: K, the most drafts a request may ask for.
    max_num_requests: B of the largest step; slots are numbered 0 .. max_num_requests - 1.
    max_num_rows: R of the largest step.
    vocab_size: of the target; draft ids are below it.
    """

    hidden_size: int
    dtype: str
    max_depth: int
    max_num_requests: int
    max_num_rows: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r} is none of {', '.join(sorted(DTYPES))}")
        for name in ("hidden_size", "max_depth", "max_num_requests", "max_num_rows", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ValueError(f"{name} = {value!r} must be a whole number from 1 to 2**31 - 1")
        if self.max_num_rows < self.max_num_requests:
            raise ValueError(
                f"max_num_rows = {self.max_num_rows} is below max_num_requests = {self.max_num_requests}: every "
                "request of a step has a row"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.torch_dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """Of one step's hidden rows at most; a mailbox has two such areas."""
        return self.max_num_rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class TargetStep:
    """One step of one target, as the drafter's engine reads it.

    The arrays and `hidden_RH` may be views of shared memory: they are valid until the step is answered.

    session: one connection of one target; slots of different sessions are different requests.
    step: counts up within a session, gaps allowed (steps that were given up).
    slots_B: the target's row for the request, 0 .. max_num_requests - 1; no slot twice in a step.
    heads_B: index of the head that drafts for the request.
    start_B, num_valid_B, row_offset_B: see the module. num_valid_B may be 0: nothing new, nothing to draft from.
    depth_B: drafts wanted, 0 .. max_depth.
    next_tokens_R: int32, by payload row.
    hidden_RH: on the host, pinned where it comes from a mailbox of a GPU.
    finished_slots: requests that ended before this step; their cache may be dropped. They are released first: a slot
        may be finished and, for a new request, used in the same step.
    prompts: slot -> int32 token ids of positions 0 .. start of a request that this drafter has not seen, so that it
        can look for cached rows of the same tokens. An entry says "a new request has this slot". It is empty where
        the tokens are not known: of a request that another drafter served before.
    host_part: the same object in steps of a session whose slots, heads, row offsets and depths are all equal, so that
        what was found out about them holds again; None where nobody compared.
    """

    session: int
    step: int
    slots_B: Int32Array
    heads_B: Int32Array
    start_B: Int32Array
    num_valid_B: Int32Array
    row_offset_B: Int32Array
    depth_B: Int32Array
    next_tokens_R: Int32Array
    hidden_RH: torch.Tensor
    finished_slots: Sequence[int] = ()
    prompts: Mapping[int, Int32Array] = dataclasses.field(default_factory=dict)
    host_part: bytes | None = None

    @property
    def num_requests(self) -> int:
        return len(self.slots_B)

    def valid_rows(self) -> npt.NDArray[np.int64]:
        """Payload rows that belong to a request, request by request."""
        before_B = np.cumsum(self.num_valid_B) - self.num_valid_B
        shift = np.repeat(self.row_offset_B - before_B, self.num_valid_B)
        return np.arange(len(shift)) + shift

    def check(self, shape: TargetShape, *, knows_host_part: bool = False) -> None:
        """Raise ValueError, naming the field, unless all of it fits `shape`: what comes from a peer is checked here.

        knows_host_part: slots, heads, row offsets and depths are those of a step that was checked, of as many rows.
        """
        if knows_host_part and not (self.finished_slots or self.prompts) and self._device_part_fits(shape):
            return
        num_requests, num_rows = len(self.slots_B), len(self.next_tokens_R)
        for name in _PER_REQUEST:
            if (array := getattr(self, name)).shape != (num_requests,) or array.dtype != np.int32:
                raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not int32 [{num_requests}]")
        if num_requests > shape.max_num_requests or num_rows > shape.max_num_rows:
            raise ValueError(
                f"{num_requests} requests with {num_rows} rows are more than the agreed {shape.max_num_requests} "
                f"and {shape.max_num_rows}"
            )
        if tuple(self.hidden_RH.shape) != (num_rows, shape.hidden_size) or self.hidden_RH.dtype != shape.torch_dtype:
            raise ValueError(
                f"hidden_RH is {self.hidden_RH.dtype} {list(self.hidden_RH.shape)}, not {shape.dtype} "
                f"[{num_rows}, {shape.hidden_size}]"
            )
        if not knows_host_part:
            _in_range("slots_B", self.slots_B, shape.max_num_requests - 1)
            if num_requests and np.bincount(self.slots_B).max() > 1:
                raise ValueError(f"slots_B {self.slots_B.tolist()} names a slot twice")
            _in_range("depth_B", self.depth_B, shape.max_depth)
        _in_range("start_B", self.start_B, 2**31 - 1 - shape.max_num_rows - shape.max_depth)
        _in_range("num_valid_B", self.num_valid_B, num_rows)
        _in_range("row_offset_B", self.row_offset_B, num_rows)
        if np.any(self.row_offset_B + self.num_valid_B > num_rows):
            raise ValueError(f"row_offset_B + num_valid_B reaches beyond the {num_rows} rows of the step")
        if not _are_in_range(self.next_tokens_R, shape.vocab_size - 1):  # those of rejected rows may be
            _in_range("next_tokens_R", self.next_tokens_R[self.valid_rows()], shape.vocab_size - 1)
        if self.finished_slots:
            _in_range("finished_slots", np.asarray(self.finished_slots), shape.max_num_requests - 1)
        for slot, token_ids in self.prompts.items():
            self._check_prompt(slot, token_ids, shape)

    def _device_part_fits(self, shape: TargetShape) -> bool:
        """`check` of the device part in few operations; a rejected row's token may make it False."""
        room_B = (len(self.next_tokens_R) - self.row_offset_B).astype(np.uint32)
        return (
            bool((self.num_valid_B.view(np.uint32) <= room_B).all())
            and _are_in_range(self.start_B, 2**31 - 1 - shape.max_num_rows - shape.max_depth)
            and _are_in_range(self.next_tokens_R, shape.vocab_size - 1)
        )

    def _check_prompt(self, slot: int, token_ids: Int32Array, shape: TargetShape) -> None:
        at = np.flatnonzero(self.slots_B == slot)
        if len(at) != 1:
            raise ValueError(f"prompts has slot {slot}, which has no rows in this step")
        num_expected = int(self.start_B[at[0]]) + 1
        if token_ids.dtype != np.int32 or token_ids.shape not in {(0,), (num_expected,)}:
            raise ValueError(
                f"prompts[{slot}] is {token_ids.dtype} {list(token_ids.shape)}, not int32 [0] or [{num_expected}], "
                "start + 1"
            )
        _in_range(f"prompts[{slot}]", token_ids, shape.vocab_size - 1)


def _are_in_range(values: npt.NDArray[np.integer], high: int) -> bool:
    """Whether all are in 0 .. high; a negative int32, read without its sign, is above every `high`."""
    if values.dtype == np.int32:
        return not values.size or int(values.view(np.uint32).max()) <= high
    return not values.size or (int(values.min()) >= 0 and int(values.max()) <= high)


def _in_range(name: str, values: npt.NDArray[np.integer], high: int) -> None:
    if not _are_in_range(values, high):
        raise ValueError(f"{name} holds {values.min()} .. {values.max()}, outside 0 .. {high}")


# ====================================================================================================
# Draft ids of a pass that may still run.


class PendingDrafts(abc.ABC):
    @abc.abstractmethod
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    @abc.abstractmethod
    def wait(self) -> Int32Array:
        """[B, K], -1 where no draft is wanted; an array of the caller's own."""


def widened(drafts_BK: Int32Array, max_depth: int) -> Int32Array:
    """[B, depth] -> [B, max_depth], with -1 in the new columns; always a new array."""
    wide_BK = np.full((len(drafts_BK), max_depth), NO_DRAFT, np.int32)
    wide_BK[:, : drafts_BK.shape[1]] = drafts_BK
    return wide_BK


class KnownDrafts(PendingDrafts):
    """Drafts of a pass that is over."""

    def __init__(self, drafts_BK: Int32Array, max_depth: int) -> None:
        self._drafts_BK = widened(drafts_BK, max_depth)

    def ready(self) -> bool:
        return True

    def wait(self) -> Int32Array:
        return self._drafts_BK


# ====================================================================================================
# What links and servers count. Pure.


@dataclasses.dataclass
class LinkStats:
    """Counts since the link was made.

    num_steps: sent. num_answered: in time. num_timeouts: deadlines missed. num_skipped: steps that were not sent,
    because the link was not up. num_connections: agreed ones, the first included. num_bytes: sent and received over
    TCP. num_cut_prompts: new requests whose tokens did not fit.

    Of the answers that came in time, last_service_s, sum_service_s: from when the drafter saw the step (over TCP: from
    when it was sent) to its answer; sum_wait_s: what the target waited, its GPU's stream or its host. What a wait is
    longer than the service is transfer; it is shorter where the target had other things to do meanwhile.
    """

    num_steps: int = 0
    num_answered: int = 0
    num_timeouts: int = 0
    num_skipped: int = 0
    num_connections: int = 0
    num_bytes: int = 0
    num_cut_prompts: int = 0
    last_service_s: float = 0.0
    sum_service_s: float = 0.0
    sum_wait_s: float = 0.0

    def answered(self, service_s: float, wait_s: float) -> None:
        """Count an answer that came in time."""
        self.num_answered += 1
        self.last_service_s = service_s
        self.sum_service_s += service_s
        self.sum_wait_s += wait_s


@dataclasses.dataclass
class ServerStats:
    """num_batches: calls of the engine that were answered; num_steps: targets' steps in them; num_refused: newcomers
    that were no targets, did not fit, or whose mailbox CUDA did not take; num_dropped: targets dropped for what they
    sent; num_failures: calls of the engine that raised. busy_s: seconds with steps in hand."""

    num_batches: int = 0
    num_steps: int = 0
    num_connections: int = 0
    num_refused: int = 0
    num_dropped: int = 0
    num_failures: int = 0
    busy_s: float = 0.0
