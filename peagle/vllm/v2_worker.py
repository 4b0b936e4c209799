"""vLLM's GPU worker on its V2 model runner, for targets with a P-EAGLE head, an EAGLE-3 head or none.

Given to vLLM as an import string, `worker_cls=V2_WORKER` of `peagle.vllm.engine_settings`. `runner_class` names its
model runner:

| head | runner | brings |
| --- | --- | --- |
| P-EAGLE | `PEagleRunner` | speculator; graphs of prompts, verification, and decoding with any mix of K |
| none | `RaggedModelRunner` | prompt graphs |
| another drafter, or no prompt graphs | vLLM's own | - |

Prompt graphs run steps with prompts as full CUDA graphs, where `compat.replays_prompts`. If attention can renew its
metadata from numbers on the GPU, full graphs do so, and the host builds none.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import AttentionGroup

from peagle.vllm import compat
from peagle.vllm.device import describe_device
from peagle.vllm.speculator import PEagleSpeculator, can_renew
from peagle.vllm.verification import CoupledSampler, Verification

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

compat.allow_v2()


class StepGraphs(ModelCudaGraphManager):
    """Full graphs for steps with any split of rows to requests, in the engine's sizes in rows.

    Decoding steps have the graphs that vLLM makes for its adaptive verification: here too a step may have any number of
    drafts. Steps with prompts have graphs of the same sizes, planned for one request with all their rows. They replace
    vLLM's piecewise graphs, whose attention the host launches layer by layer.
    """

    renewed: Sequence[AttentionGroup] = ()
    """Every full graph renews the metadata of these before the target's layers."""

    def _init_candidates(self) -> None:
        super()._init_candidates()
        decode, mixed = self.cudagraph_mode.decode_mode(), self.cudagraph_mode.mixed_mode()
        if (decode, mixed) != (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE) or self.use_breakable_cg:
            return
        # vLLM looks for a graph of a step with prompts without a longest query, and captures one that has none for a
        # request of as many rows as the graph.
        full = {
            desc: dataclasses.replace(
                desc, cg_mode=CUDAGraphMode.FULL, num_reqs=min(desc.num_tokens, self.max_num_reqs)
            )
            for desc in self._capture_descs.pop(CUDAGraphMode.PIECEWISE, [])
        }
        captured = [*self._capture_descs.get(CUDAGraphMode.FULL, []), *full.values()]
        self._capture_descs[CUDAGraphMode.FULL] = sorted(captured, key=lambda desc: desc.num_tokens, reverse=True)
        for key, descs in self._candidates.items():
            self._candidates[key] = [full.get(desc, desc) for desc in descs]

    def renew(self, groups: Sequence[AttentionGroup]) -> bool:
        """Before the capture: let full graphs renew the metadata of `groups`, which are all that the target's layers
        read.

        Returns:
            Whether they will; not where a step needs more metadata than they can renew.
        """
        # Graphs with breaks would renew for other steps than theirs, and in vLLM's mode FULL each step has a plan for
        # its own longest request.
        if self.plans_for_all_rows and set(self._capture_descs) == {CUDAGraphMode.FULL} and can_renew(groups):
            self.renewed = groups
        return bool(self.renewed)

    @property
    def plans_for_all_rows(self) -> bool:
        """Whether graphs for steps with prompts replace piecewise ones. A replay is then planned as the graph was
        captured: for one request with all its rows."""
        return self.cudagraph_mode.mixed_mode() != CUDAGraphMode.FULL and not self.use_breakable_cg

    def capture(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().capture(_Renewing(model, self.renewed) if self.renewed else model, *args, **kwargs)


class _Renewing(nn.Module):
    """A target that renews the metadata of `groups` before its layers run."""

    def __init__(self, target: nn.Module, groups: Sequence[AttentionGroup]) -> None:
        super().__init__()
        self.target, self._groups = target, groups

    def forward(self, **inputs: Any) -> Any:
        metadata: Any = get_forward_context().attn_metadata
        for group in self._groups:
            group.update_draft_decode_metadata(metadata)
        return self.target(**inputs)


class RenewedState(DefaultModelState):
    """vLLM's, which builds no attention metadata for a replay of graphs that renew it themselves."""

    graphs_renew_metadata = False
    """Whether the runner's full graphs do (`StepGraphs.renew`)."""

    def prepare_attn(self, input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, **more: Any) -> dict[str, Any]:
        # Only a speculator could read a replay's metadata, and ours do not. Dummy steps are vLLM's.
        if self.graphs_renew_metadata and cudagraph_mode == CUDAGraphMode.FULL and not more.get("for_capture"):
            return {}
        return super().prepare_attn(input_batch, cudagraph_mode, *args, **more)


class RaggedModelRunner(GPUModelRunner):
    """vLLM's V2 runner, whose full graphs serve steps of any split of rows to requests, where the attention of the
    target's layers has such graphs: decoding ones, and all with `StepGraphs`."""

    speculator: Any
    model_state: Any
    cudagraph_manager: ModelCudaGraphManager

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's. A model of its usual kind gets a `RenewedState`, for which `init_model_state` has no hook."""
        super().load_model(*args, **kwargs)
        if type(self.model_state) is DefaultModelState:
            self.model_state = RenewedState(self.vllm_config, self.model, self.encoder_cache, self.device)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        drafter_layers: set[str] = getattr(self.speculator, "draft_attn_layer_names", set())
        layers = {name for group in self.kv_cache_config.kv_cache_groups for name in group.layer_names}
        found = get_attn_cg_support(self.attn_groups, self.vllm_config, checked_layer_names=layers - drafter_layers)
        found = found.narrow(*self.model_state.get_additional_cg_support())
        # Other kinds of model plan a replay by the rows that requests have in it.
        has_all = isinstance(self.model_state, RenewedState) and compat.replays_prompts(self.vllm_config)
        # With other attention there are graphs for K_max drafts of every request; other steps run piecewise.
        if found.min_cg_support == AttentionCGSupport.ALWAYS:
            self.cudagraph_manager = (StepGraphs if has_all else ModelCudaGraphManager)(
                self.vllm_config,
                self.device,
                self.cudagraph_manager.cudagraph_mode,
                decode_query_len=self.decode_query_len,
                lora_capture_cases=self.lora_capture_cases,
                varlen_decode=True,
                ubatch_runner=self.ubatch_runner,
            )
        graphs, every = self.cudagraph_manager, chain.from_iterable(self.attn_groups)
        renews = isinstance(graphs, StepGraphs) and graphs.renew(
            [group for group in every if not drafter_layers.issuperset(group.layer_names)]
        )
        if isinstance(self.model_state, RenewedState):
            # Each time: vLLM sets up a small cache before, to measure graphs with.
            self.model_state.graphs_renew_metadata = renews

    def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """vLLM's. The largest compiled range has room for the drafter's passes, so vLLM may ask for too many tokens."""
        return super()._dummy_run(min(num_tokens, self.max_num_tokens), *args, **kwargs)

    def prepare_inputs(self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, *more: Any) -> Any:
        """vLLM's. A replay is planned for the longest request that its graph was captured for."""
        batch = super().prepare_inputs(scheduler_output, batch_req_state, batch_desc, *more)
        if batch_desc.cg_mode == CUDAGraphMode.FULL:
            graphs, planned = self.cudagraph_manager, batch_desc.max_query_len
            if planned is None and isinstance(graphs, StepGraphs) and graphs.plans_for_all_rows:
                planned = batch_desc.num_tokens
            batch.max_query_len = planned or batch.max_query_len
        return batch


class PEagleRunner(RaggedModelRunner):
    """`RaggedModelRunner` with a P-EAGLE speculator, and with graphs for the verification of its drafts."""

    verification: Verification | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's. The target's graphs then write auxiliary hidden states into the drafter's buffer."""
        super().initialize_kv_cache(*args, **kwargs)
        graphs, views = self.cudagraph_manager, self.speculator.aux_views()
        most_rows = max((desc.num_tokens for descs in graphs._capture_descs.values() for desc in descs), default=0)
        if views and most_rows <= len(views[0]):
            graphs.aux_hidden_states = views

    def capture_model(self, *, profile_only: bool = False) -> int:
        """vLLM's: bytes that all graphs take. With `profile_only` a few graphs are captured before there is a cache, to
        estimate these bytes."""
        num_bytes: int = super().capture_model(profile_only=profile_only)
        num_sampled = self.cudagraph_manager._max_full_descs_to_capture
        if (verification := Verification.create(self)) is not None:
            num_bytes += verification.capture(num_sampled)
        self.verification = None if profile_only else verification
        return num_bytes

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """vLLM's: the sampled tokens, and the numbers of tokens and of rejected drafts of each request. From a graph,
        if one holds this step."""
        if self.verification is not None and grammar_output is None:
            found = self.verification(hidden_states, input_batch)
            if found is not None:
                return found, found.num_sampled, found.num_rejected
        return super().sample(hidden_states, input_batch, grammar_output)

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        super().add_requests(scheduler_output)
        self.speculator.begin_step(scheduler_output)

    def finish_requests(self, scheduler_output: "SchedulerOutput") -> None:
        super().finish_requests(scheduler_output)
        self.speculator.drop_requests(scheduler_output.finished_req_ids)


def runner_class(config: VllmConfig, is_last_stage: bool) -> type[RaggedModelRunner] | None:
    """Class of the model runner on one pipeline stage; None: vLLM's own. Like vLLM's speculators, ours is on the last
    stage only. The others have its kinds of graphs, because all stages pad a step alike."""
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "eagle3" and speculative.parallel_drafting:
        return PEagleRunner if is_last_stage else RaggedModelRunner
    return RaggedModelRunner if speculative is None and compat.replays_prompts(config) else None


class V2Worker(Worker):
    """Drop-in for vLLM's GPU worker."""

    model_runner: Any
    describe_device = describe_device

    def make_speculator(self) -> Any:
        """The speculator of a `PEagleRunner`."""
        assert self.device is not None
        return PEagleSpeculator(self.vllm_config, self.device)

    def _make_model_runner(self) -> Any:
        """vLLM's hook for the model runner. No model is loaded yet."""
        if not self.use_v2_model_runner:
            raise ValueError("vLLM chose its V1 model runner, whose reasons are in its log; this worker runs V2")
        assert self.device is not None
        compat.name_aux_layers(self.vllm_config)
        kind = runner_class(self.vllm_config, get_pp_group().is_last_rank)
        runner: Any = super()._make_model_runner() if kind is None else kind(self.vllm_config, self.device)
        if isinstance(runner, PEagleRunner):
            runner.speculator = self.make_speculator()
        return runner

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's. Sampled requests are then verified by `CoupledSampler`, where it can."""
        super().load_model(*args, **kwargs)
        CoupledSampler.install(self.model_runner)
