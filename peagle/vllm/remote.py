"""vLLM's model runner with its drafter in another process.

The engine keeps vLLM's `eagle3` + `parallel_drafting` configuration, so tapped layers, schedulers, graphs and rejection
sampling are vLLM's own; what changes is where drafts come from. `RemoteProposer` takes the place of vLLM's proposer: it
loads no weights and owns no cache. `RemoteDrafts` sends the rows of each step (`peagle.vllm.remote_steps`) and
- in synchronous scheduling waits for the drafts when the engine asks for them, so that bookkeeping runs meanwhile;
- in asynchronous scheduling on a GPU leaves everything to the device's stream: the host waits for nothing;
- in asynchronous scheduling on a CPU, which has no streams, waits at once.

Of the ranks of a tensor-parallel group the first sends. Others get its drafts from the scheduler, or, in asynchronous
scheduling, by a broadcast.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from peagle.config import UNNAMED_LAYERS, default_aux_layer_ids
from peagle.kernels.accepted_rows import accepted_rows
from peagle.runtime.pool import LinkPool
from peagle.runtime.steps import NO_DRAFT, Int32Array, TargetShape
from peagle.vllm.channel import head_of
from peagle.vllm.compat import PROPOSE_SEAMS, check_seams
from peagle.vllm.drafting import ChunkedProposer, depth_in_batch, prepare_next_tokens
from peagle.vllm.engine import REMOTE_KEY, RemoteSettings
from peagle.vllm.remote_health import Health
from peagle.vllm.remote_steps import EngineStep, Sent, StepSender

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object

logger = logging.getLogger(__name__)


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
        """No drafter; compiles what a step runs on a GPU beside the target."""
        logger.info("drafts come from another process: no drafter is loaded here")
        ones = torch.ones(2, dtype=torch.int32, device=self.device)
        for num_drafts_up_to_B in (None, ones):
            accepted_rows(ones.new_tensor([0, 1, 2]), num_drafts_up_to_B, ones, ones, ones)

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
    """Mixin over vLLM's model runner; `install_remote` turns a finished runner into one."""

    remote: StepSender | None  # None on ranks that do not send
    _sent: list[Sent] | None

    @classmethod
    def install_remote(cls, runner: Any) -> None:
        """Make `runner`, whose `__init__` has run and whose model is not loaded, one of this class.

        Raises:
            UnsupportedVLLMError: this vLLM's runner has not the methods that this class builds on.
            ValueError: the engine's settings do not go with a remote drafter; the message names the setting.
        """
        check_seams(GPUModelRunner, PROPOSE_SEAMS["runner"])
        config = runner.vllm_config
        settings = read_settings(config.additional_config)
        _check_config(config)
        runner.__class__ = cls
        runner.remote, runner._sent = None, None
        if not hasattr(runner, "drafter"):  # Only the last pipeline stage has one.
            return
        RemoteProposer.install(runner)
        if get_tp_group().rank_in_group == 0:
            runner.remote = make_sender(config, runner.device, settings)

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
        """Sends the step's rows. Leaves: placeholders, or in asynchronous scheduling the drafts, [B, K] int32."""
        self._draft_probs = None
        self._draft_prob_req_ids = None
        num_requests = self.input_batch.num_reqs
        next_tokens_B, num_sampled_B = prepare_next_tokens(self, sampled_token_ids)
        sent: list[Sent] = []
        if self.remote is not None:
            num_rows = scheduler_output.total_num_scheduled_tokens
            step = self._engine_step(num_rows, aux_hidden_states, spec_decode_metadata, next_tokens_B, num_sampled_B)
            sent = self.remote.send(step)
        if not self.use_async_scheduling:
            self._sent = sent
            return [[] for _ in range(num_requests)]
        return self._drafts_on_device(sent, num_requests)

    def _drafts_on_device(self, sent: list[Sent], num_requests: int) -> torch.Tensor:
        if self.remote is None:
            drafts_BK = torch.zeros(num_requests, self.num_spec_tokens, dtype=torch.int32, device=self.device)
        elif self.device.type == "cpu":
            drafts_BK = torch.from_numpy(np.maximum(self.remote.wait_host(sent, num_requests), 0))
        else:
            drafts_BK = self.remote.enqueue_wait(sent, num_requests)
        if get_tp_group().world_size > 1:
            drafts_BK = get_tp_group().broadcast(drafts_BK, src=0)
        return drafts_BK

    def take_draft_token_ids(self) -> Any:
        """vLLM's own, after waiting for drafts that are under way; no wait in asynchronous scheduling."""
        sent, self._sent = self._sent, None
        if sent and self.remote is not None:
            num_requests = self.input_batch.num_reqs
            drafts_BK = self.remote.wait_host(sent, num_requests)
            num_drafts_B = (drafts_BK != NO_DRAFT).sum(axis=1)
            self._draft_token_ids = [row[:n].tolist() for row, n in zip(drafts_BK, num_drafts_B, strict=True)]
        return super().take_draft_token_ids()

    def _engine_step(
        self, num_rows: int, aux: Any, spec_decode_metadata: Any, next_tokens_B: torch.Tensor, num_sampled_B: Any
    ) -> EngineStep:
        """The step as `StepSender` takes it. On a GPU all tensors are computed in the order of the stream."""
        batch = self.input_batch
        num_requests = batch.num_reqs
        num_valid_B, next_tokens_R = accepted_rows(
            self.query_start_loc.gpu[: num_requests + 1],
            None if spec_decode_metadata is None else spec_decode_metadata.cu_num_draft_tokens,
            num_sampled_B,
            next_tokens_B,
            self.input_ids.gpu[:num_rows],
        )
        requests = [self.requests[request_id] for request_id in batch.req_ids]
        params = [request.sampling_params for request in requests]
        heads = [head_of(one.extra_args if one is not None else None) for one in params]
        k_B = np.array([depth_in_batch(request, self.num_spec_tokens) for request in requests], dtype=np.int32)
        is_prompt_B = batch.num_computed_tokens_cpu[:num_requests] < batch.num_prompt_tokens[:num_requests]
        offset_B1 = self.query_start_loc.np[: num_requests + 1].astype(np.int32)
        return EngineStep(
            request_ids=batch.req_ids,
            requests=self.requests,
            heads_B=np.array(heads, dtype=np.int32),
            depth_B=np.where(self.discard_request_mask.np[:num_requests], 0, k_B).astype(np.int32),
            # A request with K = 0 never drafts; its prompt may serve another one from the drafter's cache.
            wanted_B=(k_B > 0) | is_prompt_B,
            row_offset_B=offset_B1[:-1],
            num_rows_B=np.diff(offset_B1),
            start_B=self.num_computed_tokens[:num_requests],
            num_valid_B=num_valid_B,
            next_tokens_R=next_tokens_R,
            aux=aux,
            prompt_of=self._prompt_of,
        )

    def _prompt_of(self, index: int) -> Int32Array:
        """Token ids of the positions 0 .. start of a request that starts or comes back in this step."""
        num_tokens = int(self.input_batch.num_computed_tokens_cpu[index]) + 1
        token_ids: Int32Array = self.input_batch.token_ids_cpu[index, :num_tokens].astype(np.int32)
        return token_ids[:0] if (token_ids < 0).any() else token_ids

    def remote_report(self) -> dict[str, Any]:
        """Plain values; empty on ranks that do not send."""
        return {} if self.remote is None else self.remote.report()


def read_settings(additional_config: Any) -> RemoteSettings:
    """Settings of `additional_config[REMOTE_KEY]`. Raises ValueError where there are none or they are no settings."""
    found = additional_config.get(REMOTE_KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"additional_config[{REMOTE_KEY!r}] must be set with this worker: use engine_kwargs(remote=)")
    known = {field.name for field in dataclasses.fields(RemoteSettings)}
    return RemoteSettings(**{key: value for key, value in found.items() if key in known})


def _check_config(config: Any) -> None:
    """Refuse what a remote drafter was not made for."""
    speculative = config.speculative_config
    if speculative is None or speculative.method != "eagle3" or not speculative.parallel_drafting:
        raise ValueError("a remote drafter needs speculative_config of a P-EAGLE head: use engine_kwargs(remote=)")
    refused = {
        "enable_prompt_embeds": config.model_config.enable_prompt_embeds,
        "a multimodal model": config.model_config.is_multimodal_model,
        "disable_padded_drafter_batch": speculative.disable_padded_drafter_batch,
    }
    if found := [setting for setting, is_on in refused.items() if is_on]:
        raise ValueError(f"a remote drafter does not go with {', '.join(found)}: leave one of them out")


def make_sender(config: Any, device: torch.device, settings: RemoteSettings) -> StepSender:
    """The sending side of one engine, with no drafters yet."""
    model, scheduler = config.model_config, config.scheduler_config
    about = config.additional_config[REMOTE_KEY]
    shape = TargetShape(
        hidden_size=about["hidden_size"],
        dtype=str(model.dtype).removeprefix("torch."),
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
        min_deadline_s=settings.min_deadline_s,
        max_deadline_s=settings.max_deadline_s,
    )
    health = Health.create(config.instance_id) if scheduler.async_scheduling else None
    on_stream = scheduler.async_scheduling and device.type == "cuda"
    return StepSender(pool, shape, device, on_stream=on_stream, health=health)
