"""A target's side of a remote drafter: each step's rows go to the drafters of its requests, and their drafts come back.

The engine keeps vLLM's `eagle3` + `parallel_drafting` configuration, so auxiliary hidden states, schedulers and
sampling are those of an engine with a colocated drafter. `peagle.vllm.remote_speculator` uses `StepSender` on a GPU,
where the stream waits for drafts, `peagle.vllm.remote_cpu` on a CPU, where the host waits. The first rank of a
tensor-parallel group sends.

Dimensions: B requests of the batch, M of them on one link, R rows, X = C * S auxiliary hidden states, H, K drafts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d

from peagle.config import resolve_aux_layer_ids
from peagle.drafter.client import Link
from peagle.drafter.pool import LinkPool
from peagle.drafter.projection import InputProjection
from peagle.drafter.protocol import DtypeName, Int32Array, StepDescriptor, TargetShape, valid_rows
from peagle.vllm.engine_settings import REMOTE_KEY


class SlotChange(NamedTuple):
    slots_B: Int32Array  # of the step's requests
    new: list[int]  # their positions 0 .. B - 1 that had no slot before
    finished: list[int]  # slots whose request is gone; one of them may be in use again by a new one


class RequestSlots:
    """The numbers under which drafters know a target's requests: 0 .. max_num_requests - 1, reused.

    A request keeps its slot while it waits, such as after preemption. When slots run out, the request that has waited
    longest loses its own and is a new one when it comes back.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[str, tuple[int, object]] = {}  # slot and request; who has waited longest comes first

    def update(self, request_ids: Sequence[str], requests: Mapping[str, object]) -> SlotChange:
        """Slots of a step of `request_ids`; `requests` are all that the engine has, running or waiting.

        A request that is another object than before under the same id is another request.
        """
        gone = [key for key, (_, request) in self._held.items() if requests.get(key) is not request]
        finished = [self._release(key) for key in gone]
        new = [i for i, request_id in enumerate(request_ids) if request_id not in self._held]
        for request_id in request_ids:
            if request_id in self._held:
                self._held[request_id] = self._held.pop(request_id)
        for i in new:
            if not self._free:
                finished.append(self._release(next(iter(self._held))))
            self._held[request_ids[i]] = self._free.pop(), requests[request_ids[i]]
        slots = [self._held[request_id][0] for request_id in request_ids]
        return SlotChange(np.array(slots, np.int32), new, finished)

    def _release(self, request_id: str) -> int:
        slot, _ = self._held.pop(request_id)
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
    aux: auxiliary hidden states of each layer, [>= R, S].
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


class SentStep(NamedTuple):
    """The part of a step that one drafter is to answer: its requests' positions in the batch, also as an index for
    tensors (None for all in order), their slots, and the drafts that they want."""

    link: Link
    members_M: npt.NDArray[np.int64]
    index_M: Tensor | None
    slots_M: Int32Array
    num_drafts_M: Int32Array


class StepSender:
    """Sends every step of one engine to the drafters of `pool`."""

    def __init__(self, pool: LinkPool, shape: TargetShape, device: torch.device) -> None:
        """device: of the engine. Where it is a GPU, its stream waits for answers, not the host."""
        self.pool, self.shape, self.device = pool, shape, device
        self._slots = RequestSlots(shape.max_num_requests)

    def send(self, step: EngineStep) -> list[SentStep]:
        """Send a step; returns what drafts are to be waited for. Never raises for a drafter that is gone."""
        change = self._slots.update(step.request_ids, step.requests)
        self.pool.finish_requests(change.finished)
        wanted, sent = step.wanted_B.nonzero()[0], []
        for link, places in self.pool.assign(change.slots_B[wanted], step.heads_B[wanted]):
            members_M = wanted[places]
            index_M = None if len(members_M) == len(step.request_ids) else async_tensor_h2d(members_M, self.device)
            one = SentStep(link, members_M, index_M, change.slots_B[members_M], step.num_drafts_B[members_M])
            prompts = {int(change.slots_B[i]): step.read_prompt(i) for i in change.new if i in members_M}
            if self._send(one, step, prompts) and one.num_drafts_M.any():
                sent.append(one)
        return sent

    def _send(self, one: SentStep, step: EngineStep, prompts: dict[int, Int32Array]) -> bool:
        heads_M, num_rows_M = step.heads_B[one.members_M], step.num_sent_B[one.members_M]
        num_rows, index_R = int(num_rows_M.sum()), None
        if num_rows != len(step.next_tokens_R):  # rows of others, and rejected ones that the host knows, stay behind
            index_R = async_tensor_h2d(valid_rows(step.row_offset_B[one.members_M], num_rows_M), self.device)
        descriptor = StepDescriptor(
            slots_B=one.slots_M,
            heads_B=heads_M,
            num_drafts_B=one.num_drafts_M,
            row_offset_B=(np.cumsum(num_rows_M) - num_rows_M).astype(np.int32),
            num_rows=num_rows,
            prompts=prompts,
        )
        aux_RX = torch.cat([_take(layer, index_R)[:num_rows] for layer in step.aux], dim=-1)
        return one.link.send(
            descriptor,
            _take(step.start_B, one.index_M),
            _take(step.num_valid_B, one.index_M),
            _take(step.next_tokens_R, index_R),
            project_rows(one.link.projections, np.repeat(heads_M, num_rows_M), aux_RX),
        )

    def wait(self, sent: Sequence[SentStep], num_requests: int) -> Tensor:
        """Drafts [B, K], int64 on the device; 0 where there are none. Waits no longer than the links' deadlines: on a
        GPU its stream, else the host."""
        drafts_BK = torch.zeros(num_requests, self.shape.max_draft_tokens, dtype=torch.int64, device=self.device)
        for one in sent:
            if one.index_M is None:
                one.link.wait(drafts_BK)
                break
            found_MK = drafts_BK.new_empty(len(one.members_M), self.shape.max_draft_tokens)
            one.link.wait(found_MK)
            drafts_BK[one.index_M] = found_MK
        return drafts_BK

    def num_drafts(self, sent: Sequence[SentStep], num_requests: int) -> list[int]:
        """How many drafts each of the batch's requests gets, as far as is known: those that it wants where its step was
        sent, its link is up and the last answer held some for it."""
        num_drafts_B = np.zeros(num_requests, dtype=np.int32)
        for one in sent:
            num_drafts_B[one.members_M] = one.link.has_drafts(one.slots_M) * one.num_drafts_M
        return num_drafts_B.tolist()


def project_rows(projections: Mapping[int, InputProjection], heads_R: Int32Array, aux_RX: Tensor) -> Tensor:
    """Hidden rows [R, H], each projected for its head."""
    heads = np.unique(heads_R).tolist() or list(projections)[:1]
    if len(heads) == 1:
        return projections[heads[0]].project(aux_RX)
    first = projections[heads[0]]
    hidden_RH = aux_RX.new_empty(len(aux_RX), first.hidden_size, dtype=first.fc_HX.dtype)
    for head in heads:
        rows = async_tensor_h2d(np.flatnonzero(heads_R == head), aux_RX.device)
        hidden_RH[rows] = projections[head].project(aux_RX[rows])
    return hidden_RH


def _take(tensor: Tensor, index: Tensor | None) -> Tensor:
    return tensor if index is None else tensor[index]


def check_config(config: Any) -> None:
    """Refuse what a remote drafter was not made for."""
    model = config.model_config
    takes_media = model.is_multimodal_model and not model.multimodal_config.language_model_only
    refused = {
        "enable_prompt_embeds": model.enable_prompt_embeds,
        "images and other media (language_model_only: true serves a multimodal model for text)": takes_media,
        "disable_padded_drafter_batch": config.speculative_config.disable_padded_drafter_batch,
    }
    if given := [setting for setting, is_on in refused.items() if is_on]:
        raise ValueError(f"a remote drafter does not go with {', '.join(given)}: leave one of them out")


def make_sender(config: Any, device: torch.device) -> StepSender | None:
    """The sending side of one engine, with no drafters yet; None on ranks that do not send. Raises ValueError naming a
    setting that does not go with a remote drafter."""
    check_config(config)
    if get_tp_group().rank_in_group > 0:
        return None
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
    pool = LinkPool(
        shape,
        aux_layer_ids=resolve_aux_layer_ids(tuple(about["aux_layer_ids"]), model.hf_text_config.num_hidden_layers),
        device=device,
        name=f"target {config.instance_id}",
        max_deadline_s=about["max_deadline_s"],
    )
    return StepSender(pool, shape, device)


class RemoteControl:
    """What `collective_rpc` can ask of a worker with a remote drafter. Its runner's `remote` sends; it is None on ranks
    that do not."""

    @property
    def sender(self) -> StepSender | None:
        return getattr(getattr(self, "model_runner", None), "remote", None)

    def set_drafters(self, drafters: Sequence[dict[str, Any]]) -> None:
        """`collective_rpc("set_drafters", args=(drafters,))`: from now on drafts come from these, and no others.

        drafters: the fields of a `DrafterEntry` each. Connecting goes on in the background; requests of a drafter that
        is no longer listed are finished there. Raises msgspec.ValidationError naming a wrong field.
        """
        if self.sender is not None:
            self.sender.pool.set_drafters(drafters)

    def remote_report(self) -> dict[str, Any]:
        """`collective_rpc("remote_report")`: the links of this worker; empty on ranks that do not send."""
        return {} if self.sender is None else self.sender.pool.report()

    def shutdown(self) -> None:
        """Leave the drafters, then vLLM's own."""
        if (sender := self.sender) is not None:
            sender.pool.close()
        super().shutdown()  # type: ignore[misc]
