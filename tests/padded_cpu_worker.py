"""A CPU worker whose batches are padded to graph sizes as on a GPU, so that an engine test can see what padding does.

Everything of `peagle.vllm.graphs` and `graph_worker` that decides runs here. Only capture and replay are missing: a
step "on a full graph" runs the same padded tensors through the model directly.
"""

from vllm.config import CUDAGraphMode

from peagle.vllm.graph_worker import GraphReports, GraphTiers
from peagle.vllm.graphs import GraphSettings, TieredDispatcher
from peagle.vllm.workers import CPUWorker, SeedSafeModelRunner

CAPTURE_SIZES = [8, 16, 24, 32, 48, 64, 96, 128, 192]


class PaddedDispatcher(TieredDispatcher):
    """Keys as in an engine with graphs, whatever mode vLLM settled on for this device (on a CPU: none)."""

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        super().initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, uniform_decode_query_len)


class PaddedRunner(GraphTiers, SeedSafeModelRunner):
    """vLLM's CPU runner, padded."""

    graph_backends = frozenset({"CPU_ATTN"})


class PaddedCPUWorker(GraphReports, CPUWorker):
    """Takes the settings of `GRAPH_WORKER`."""

    def init_device(self) -> None:
        super().init_device()
        config, runner = self.vllm_config, self.model_runner
        config.compilation_config.cudagraph_capture_sizes = list(CAPTURE_SIZES)
        config.compilation_config.max_cudagraph_capture_size = CAPTURE_SIZES[-1]
        settings = GraphSettings.from_config(config.additional_config, config.num_speculative_tokens)
        PaddedRunner.install(runner, GraphSettings((), 0))  # tiers themselves refuse a CPU's enforce_eager
        runner.graph_settings = settings
        runner.cudagraph_dispatcher = PaddedDispatcher(config, settings)
