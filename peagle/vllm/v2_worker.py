"""vLLM's GPU worker on its V2 model runner, for targets with a P-EAGLE head, an EAGLE-3 head or none.

Given to vLLM as an import string, `worker_cls=V2_WORKER` of `peagle.vllm.engine`. With a P-EAGLE head it brings the
speculator (`peagle.vllm.speculator`), and full CUDA graphs for decoding steps of any mix of 0..K_max drafts a request.
Where `compat.replays_prompts`, with it and without any head, steps with prompts in them run on full CUDA graphs too.
Else without a head, and with an EAGLE-3 head, the runner is vLLM's own. Each engine measures its decoding steps when
it starts (`peagle.vllm.step_measure`).
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_worker import Worker

from peagle.vllm import compat
from peagle.vllm.speculator import PEagleSpeculator, most_rows
from peagle.vllm.step_measure import measure_steps, write_steps

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

compat.allow_v2()


class StepGraphs(ModelCudaGraphManager):
    """Full graphs for steps of any split of rows to requests, in the engine's sizes in rows.

    Steps that only decode have vLLM's graphs of that kind, which it makes for its adaptive verification; here the
    scheduler trims drafts. Steps with prompts have graphs of the same sizes, planned for a request of as many rows, in
    place of vLLM's piecewise ones, whose attention the host launches layer by layer.
    """

    def _init_candidates(self) -> None:
        super()._init_candidates()
        decode, mixed = self.cudagraph_mode.decode_mode(), self.cudagraph_mode.mixed_mode()
        if (decode, mixed) != (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE) or self.use_breakable_cg:
            return
        piecewise = self._capture_descs.pop(CUDAGraphMode.PIECEWISE, [])
        full = {
            desc: dataclasses.replace(
                desc,
                cg_mode=CUDAGraphMode.FULL,
                num_reqs=min(desc.num_tokens, self.max_num_reqs),
                max_query_len=desc.num_tokens,
            )
            for desc in piecewise
        }
        # Of so few rows no request has more than a decoding one.
        mixed_descs = [desc for desc in full.values() if desc.num_tokens > self.decode_query_len]
        captured = [*self._capture_descs.get(CUDAGraphMode.FULL, []), *mixed_descs]
        self._capture_descs[CUDAGraphMode.FULL] = sorted(captured, key=lambda desc: desc.num_tokens, reverse=True)
        for key, descs in self._candidates.items():
            self._candidates[key] = [desc for desc in (full.get(desc, desc) for desc in descs) if desc in captured]


class RaggedModelRunner(GPUModelRunner):
    """vLLM's V2 runner, whose full graphs serve steps of any split of rows to requests, where the attention of the
    target's layers has such graphs: decoding ones, and all with `StepGraphs`."""

    speculator: Any
    cudagraph_manager: ModelCudaGraphManager

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        drafter_layers: set[str] = getattr(self.speculator, "draft_attn_layer_names", set())
        layers = {name for group in self.kv_cache_config.kv_cache_groups for name in group.layer_names}
        found = get_attn_cg_support(self.attn_groups, self.vllm_config, checked_layer_names=layers - drafter_layers)
        found = found.narrow(*self.model_state.get_additional_cg_support())
        # Other kinds of model plan a replay by the rows that requests have in it.
        has_all = compat.replays_prompts(self.vllm_config) and type(self.model_state) is DefaultModelState
        # Other attention has graphs for K_max drafts of every request; what else there is runs piecewise.
        if found.min_cg_support == AttentionCGSupport.ALWAYS:
            self.cudagraph_manager = (StepGraphs if has_all else ModelCudaGraphManager)(
                self.vllm_config,
                self.device,
                self.cudagraph_manager.cudagraph_mode,
                decode_query_len=self.decode_query_len,
                lora_capture_cases=self.lora_capture_cases,
                varlen_decode=True,
            )

    def prepare_inputs(self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, *more: Any) -> Any:
        """vLLM's, which takes more in later versions. A replay is planned for as many rows a request as its graph was
        captured for."""
        batch = super().prepare_inputs(scheduler_output, batch_req_state, batch_desc, *more)
        if batch_desc.cg_mode == CUDAGraphMode.FULL and batch_desc.max_query_len is not None:
            batch.max_query_len = batch_desc.max_query_len
        return batch


class PEagleRunner(RaggedModelRunner):
    """The same with a P-EAGLE speculator."""

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        super().add_requests(scheduler_output)
        self.speculator.add(scheduler_output)

    def finish_requests(self, scheduler_output: "SchedulerOutput") -> None:
        super().finish_requests(scheduler_output)
        self.speculator.forget(scheduler_output.finished_req_ids)


class V2Worker(Worker):
    """Drop-in for vLLM's GPU worker."""

    model_runner: Any

    def init_device(self) -> None:
        """vLLM's set-up of the device and its model runner, then P-EAGLE's speculator. No model is loaded yet."""
        if not self.use_v2_model_runner:
            raise ValueError("vLLM chose its V1 model runner, whose reasons are in its log; this worker runs V2")
        compat.name_taps(self.vllm_config)
        super().init_device()
        speculative = self.vllm_config.speculative_config
        if speculative is None and compat.replays_prompts(self.vllm_config):
            compat.check("v2 runner")
            self.model_runner.__class__ = RaggedModelRunner
        elif speculative is not None and speculative.parallel_drafting:
            compat.check("v2 runner")
            self.install_speculator()

    def install_speculator(self) -> None:
        """Make the finished runner one with a colocated P-EAGLE drafter."""
        config, runner = self.vllm_config, self.model_runner
        assert self.device is not None
        runner.__class__ = PEagleRunner
        runner.speculator = PEagleSpeculator(config, self.device)
        # The drafter's passes have more rows than the target's steps, and both are compiled for the same sizes.
        if endpoints := config.compilation_config.compile_ranges_endpoints:
            endpoints[-1] = max(endpoints[-1], most_rows(config))

    def compile_or_warm_up_model(self) -> "CompilationTimes":
        times = super().compile_or_warm_up_model()
        points = measure_steps(self)
        if self.rank == 0:
            write_steps(self.vllm_config, points)
        return times
