"""A target's side of a remote drafter: each step's rows go to the drafters of its requests, and their drafts come back.

The engine keeps vLLM's `eagle3` + `parallel_drafting` configuration, so auxiliary hidden states, schedulers and
sampling are those of an engine with a colocated drafter; what changes is where drafts come from. `StepSender` is the
same for both of vLLM's runners. `peagle.vllm.remote_speculator` uses it on a GPU: there the stream waits for drafts.
`peagle.vllm.remote_cpu` uses it on a CPU: there the host waits. The first rank of a tensor-parallel group sends.

Dimensions: B requests of the batch, M of them on one link, R rows, X = C * S auxiliary hidden states, H, K drafts.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peagle.config import UNNAMED_LAYERS, default_aux_layer_ids
from peagle.drafter.pool import LinkPool
from peagle.drafter.projection import InputProjection
from peagle.drafter.protocol import NO_DRAFT, DtypeName, Int32Array, StepDescriptor, TargetShape
from peagle.drafter.step import valid_rows
from peagle.vllm.engine import REMOTE_KEY


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
class EngineStep:
    """A step of the engine after sampling. Tensors may be known to the device only.

    requests: all that the engine has, by id. wanted_B: whether the drafter needs the request's rows. read_prompt: token
    ids of the positions 0 .. start of a request of the batch that starts or comes back, empty if not known.
    start_B, num_valid_B: int32, position of each request's first row, and how many of its rows stay, its first ones.
    next_tokens_R: int32, the token after each row. The rows of request b begin at row_offset_B[b]; the first
    num_sent_B[b] of them travel: all that may stay, as far as the host knows.
    aux: auxiliary hidden states of each layer, [>= R, S]. sources_R: int32, which of the rows of `aux` each row is, -1
    for none; None: all as they stand.
    """

    request_ids: Sequence[str]
    requests: Mapping[str, object]
    heads_B: Int32Array
    num_drafts_B: Int32Array
    wanted_B: npt.NDArray[np.bool_]
    row_offset_B: Int32Array
    num_sent_B: Int32Array
    read_prompt: Callable[[int], Int32Array]
    start_B: Tensor
    num_valid_B: Tensor
    next_tokens_R: Tensor
    aux: Sequence[Tensor]
    sources_R: Tensor | None = None


class SentStep(NamedTuple):
    """The part of a step that one drafter is to answer: its requests' positions in the batch, also as an index for
    tensors (None for all in order), and their slots."""

    link: Any
    members_M: npt.NDArray[np.int64]
    places: Tensor | None
    slots_M: Int32Array


class StepSender:
    """Sends every step of one engine to the drafters of `pool` (`peagle.drafter.pool.LinkPool`)."""

    def __init__(self, pool: Any, shape: TargetShape, device: torch.device) -> None:
        """device: of the engine. Where it is a GPU, its stream waits for answers, not the host."""
        self.pool, self.shape, self.device = pool, shape, device
        self._slots = RequestSlots(shape.max_num_requests)
        self._counts: Counter[str] = Counter()

    def send(self, step: EngineStep) -> list[SentStep]:
        """Send a step; returns what drafts are to be waited for. Never raises for a drafter that is gone."""
        change = self._slots.update(step.request_ids, step.requests)
        self.pool.finish_requests(change.finished)
        new = {int(change.slots_B[i]): step.request_ids[i] for i in change.new}
        wanted = step.wanted_B.nonzero()[0]
        self._counts["steps"] += 1
        self._counts["requests"] += len(wanted)
        groups = self.pool.assign(change.slots_B[wanted], step.heads_B[wanted], new) if len(wanted) else ()
        sent = []
        for link, places in groups:
            members_M = wanted[places]
            prompts = {int(change.slots_B[i]): step.read_prompt(i) for i in change.new if i in members_M}
            place = None if len(members_M) == len(step.request_ids) else _upload(members_M, self.device)
            one = SentStep(link, members_M, place, change.slots_B[members_M])
            if self._send(one, step, prompts) and step.num_drafts_B[members_M].any():
                sent.append(one)
        return sent

    def _send(self, one: SentStep, step: EngineStep, prompts: Mapping[int, Int32Array]) -> bool:
        offset_M, num_rows_M = step.row_offset_B[one.members_M], step.num_sent_B[one.members_M]
        num_rows, index = int(num_rows_M.sum()), None
        if num_rows != len(step.next_tokens_R):  # rows of others, and rejected ones that the host knows, stay behind
            index = _upload(valid_rows(offset_M, num_rows_M), self.device)
            offset_M = (np.cumsum(num_rows_M) - num_rows_M).astype(np.int32)
        heads_M = step.heads_B[one.members_M]
        descriptor = StepDescriptor(
            slots_B=one.slots_M,
            heads_B=heads_M,
            num_drafts_B=step.num_drafts_B[one.members_M],
            row_offset_B=offset_M,
            num_rows=num_rows,
            prompts=dict(prompts),
        )
        is_sent: bool = one.link.send(
            descriptor,
            *(column if one.places is None else column[one.places] for column in (step.start_B, step.num_valid_B)),
            step.next_tokens_R if index is None else step.next_tokens_R[index],
            project_rows(one.link.projections, heads_M, num_rows_M, index, step),
        )
        if is_sent:
            self._counts["requests_sent"] += len(one.members_M)
            self._counts["rows_sent"] += num_rows
        return is_sent

    def wait_host(self, sent: Sequence[SentStep], num_requests: int) -> Int32Array:
        """Drafts [B, K] of the host, -1 where there are none; waits no longer than the links' deadlines."""
        drafts_BK = np.full((num_requests, self.shape.max_draft_tokens), NO_DRAFT, dtype=np.int32)
        for one in sent:
            if (drafts_MK := one.link.wait()) is not None:
                drafts_BK[one.members_M] = drafts_MK
        return drafts_BK

    def enqueue_wait(self, sent: Sequence[SentStep], num_requests: int) -> tuple[Tensor, Tensor]:
        """Drafts [B, K], int64 on the device, and their chances, float32, filled in the order of its stream; 0 where
        there are none."""
        whole: tuple[Tensor, Tensor] | None = None
        for one in sent:
            found = self._no_drafts(len(one.members_M))
            one.link.enqueue_wait(*found)
            if one.places is None:
                return found
            whole = whole or self._no_drafts(num_requests)
            for whole_BK, found_MK in zip(whole, found, strict=True):
                whole_BK[one.places] = found_MK
        return whole or self._no_drafts(num_requests)

    def _no_drafts(self, num_requests: int) -> tuple[Tensor, Tensor]:
        """As `enqueue_wait`."""
        drafts_BK = torch.zeros(num_requests, self.shape.max_draft_tokens, dtype=torch.int64, device=self.device)
        return drafts_BK, torch.zeros_like(drafts_BK, dtype=torch.float32)

    def num_drafts(self, sent: Sequence[SentStep], num_requests: int) -> list[int]:
        """How many drafts each of the batch's requests will get, as far as is known: all where its step was sent, its
        link is up and the last answer held some for it."""
        num_drafts_B = np.zeros(num_requests, dtype=np.int32)
        for one in sent:
            num_drafts_B[one.members_M] = one.link.has_drafts(one.slots_M)
        counts: list[int] = (num_drafts_B * self.shape.max_draft_tokens).tolist()
        return counts

    def report(self) -> dict[str, Any]:
        """Plain values: steps and rows since the start, and what the pool says of its links."""
        return {"counts": dict(self._counts), "pool": self.pool.report()}

    def close(self) -> None:
        self.pool.close()


def project_rows(
    projections: Mapping[int, InputProjection],
    heads_M: Int32Array,
    num_rows_M: Int32Array,
    index: Tensor | None,
    step: EngineStep,
) -> Tensor:
    """Hidden rows [R, H] of some requests, each projected for its head. index: which of the step's rows, None for all.
    Places without a row get any."""
    if step.sources_R is not None:
        index = (step.sources_R if index is None else step.sources_R[index]).clamp(min=0).long()
    num_rows, heads = int(num_rows_M.sum()), np.unique(heads_M).tolist()
    aux_RX = torch.cat([layer[:num_rows] if index is None else layer[index] for layer in step.aux], dim=-1)
    if len(heads) == 1:
        return projections[heads[0]].project(aux_RX)
    heads_R, first = np.repeat(heads_M, num_rows_M), projections[heads[0]]
    hidden_RH = aux_RX.new_empty(num_rows, first.hidden_size, dtype=first.dtype)
    for head in heads:
        rows = _upload(np.flatnonzero(heads_R == head), aux_RX.device)
        hidden_RH[rows] = projections[head].project(aux_RX[rows])
    return hidden_RH


def _upload(index: Any, device: torch.device) -> Tensor:
    """An int64 index on the device, without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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
        max_draft_tokens=config.speculative_config.num_speculative_tokens,
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
    """What `collective_rpc` can ask of a worker with a remote drafter. Its runner's `remote` sends; it is None on ranks
    that do not."""

    @property
    def sender(self) -> StepSender | None:
        found: StepSender | None = getattr(getattr(self, "model_runner", None), "remote", None)
        return found

    def set_drafters(self, drafters: Sequence[dict[str, Any]]) -> None:
        """`collective_rpc("set_drafters", args=(drafters,))`: from now on drafts come from these, and no others.

        drafters: the fields of `peagle.drafter.pool.DrafterEntry` each. Connecting goes on in the background; requests
        of a drafter that is no longer listed are finished there. Raises msgspec.ValidationError naming a wrong field.
        """
        if self.sender is not None:
            self.sender.pool.set_drafters(drafters)

    def remote_report(self) -> dict[str, Any]:
        """`collective_rpc("remote_report")`: steps, rows and links of this worker; empty on ranks that do not send."""
        return {} if self.sender is None else self.sender.report()

    def shutdown(self) -> None:
        """Leave the drafters, then vLLM's own."""
        if (sender := self.sender) is not None:
            sender.close()
        super().shutdown()  # type: ignore[misc]
