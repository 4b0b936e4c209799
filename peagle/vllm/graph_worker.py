"""vLLM's GPU worker with full CUDA graphs for several depths, and a count of the graphs that steps ran on.

Given to vLLM as an import string, `worker_cls=GRAPH_WORKER` of `peagle.vllm.engine`, with its settings in vLLM's
`additional_config[GRAPHS_KEY]`. It changes how a batch is assigned to a graph and which graphs are captured; what a
graph computes, its buffers and its padding are vLLM's. With no depths in the settings it only counts.
"""

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.v1.worker import gpu_model_runner, gpu_worker

from peagle.vllm.compat import check_seams
from peagle.vllm.graphs import GraphSettings, StepShape, TieredDispatcher
from peagle.vllm.remote import DraftReports, PassSkipper

if TYPE_CHECKING:
    _Runner = gpu_model_runner.GPUModelRunner
else:
    _Runner = object

logger = logging.getLogger(__name__)

BACKENDS = frozenset({"FLASH_ATTN"})
"""Attention backends whose graphs also serve batches with fewer tokens than they were captured for."""

RUNNER_SEAMS = {
    "_determine_batch_execution_and_padding": (
        "num_tokens",
        "num_reqs",
        "max_num_scheduled_tokens",
        "use_cascade_attn",
        "force_uniform_decode",
    ),
    "_build_attention_metadata": ("num_tokens_padded", "num_reqs_padded", "max_query_len"),
    "_check_and_update_cudagraph_mode": ("attention_backends", "kv_cache_groups"),
    "_warmup_and_capture": ("desc", "cudagraph_runtime_mode"),
    "_dummy_run": ("num_tokens", "uniform_decode", "is_graph_capturing"),
    "capture_model": (),
}
"""Methods of vLLM's model runner that are overridden or relied on, with the parameters that matter."""

MAX_RECORDED_STEPS = 200_000

RecordedStep = tuple[float, str, int, int, int]
"""(start in seconds of `time.perf_counter`, graph mode, requests, tokens, tokens with padding)."""


class GraphMonitor:
    """What the steps of one engine ran on."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self._recorded: list[RecordedStep] | None = None

    def add(self, mode: str, query_len: int, shape: StepShape, num_padded: int) -> None:
        """Count a step. `query_len`: tokens a request of its full graph, 0 on any other."""
        # Without a graph every batch has its own size: those share one entry.
        self._counts[mode, query_len, num_padded if mode != "NONE" else 0] += 1
        if self._recorded is not None and len(self._recorded) < MAX_RECORDED_STEPS:
            self._recorded.append((time.perf_counter(), mode, shape.num_requests, shape.num_tokens, num_padded))

    def counts(self) -> dict[str, int]:
        """Steps since the start, by `MODE/tokens a request/tokens of the graph`."""
        return {f"{mode}/{query_len}/{padded}": n for (mode, query_len, padded), n in sorted(self._counts.items())}

    def record(self) -> list[RecordedStep]:
        """Steps since the last call, oldest first; the first call starts recording."""
        recorded, self._recorded = self._recorded or [], []
        return recorded


class GraphTiers(_Runner):
    """Mixin over vLLM's model runner; `install` turns a finished runner into one."""

    graph_backends = BACKENDS
    graph_settings: GraphSettings
    graph_monitor: GraphMonitor
    graph_query_len: int | None
    graph_capture: dict[str, float]
    cudagraph_dispatcher: Any  # vLLM's, or a `TieredDispatcher` where there are tiers

    @classmethod
    def install(cls, runner: Any, settings: GraphSettings) -> None:
        """Make `runner`, whose `__init__` has run and whose model is not loaded, one of this class.

        Raises:
            UnsupportedVLLMError: this vLLM's runner has not the methods that this class builds on.
            ValueError: the engine's settings do not go with tiers; the message names the setting.
        """
        check_seams(type(runner), RUNNER_SEAMS)
        if settings.depths:
            _check_settings(runner.vllm_config)
        runner.__class__ = cls
        runner.graph_settings = settings
        runner.graph_monitor = GraphMonitor()
        runner.graph_query_len = None
        runner.graph_capture = {"seconds": 0.0, "bytes": 0.0}
        if settings.depths:
            runner.cudagraph_dispatcher = TieredDispatcher(runner.vllm_config, settings)

    def _check_and_update_cudagraph_mode(self, attention_backends: Any, *args: Any, **kwargs: Any) -> None:
        names = {backend.get_name() for backends in attention_backends for backend in backends}
        if self.graph_settings.depths and names - self.graph_backends:
            raise ValueError(
                f"full_graph_depths is set, but attention runs on {', '.join(sorted(names))}: only "
                f"{', '.join(sorted(self.graph_backends))} is known to serve such batches; set attention_backend"
            )
        super()._check_and_update_cudagraph_mode(attention_backends, *args, **kwargs)

    # vLLM calls both of the following with keywords only. Without `*` a positional call would land in the wrong place.
    def _determine_batch_execution_and_padding(  # type: ignore[override]
        self, *, num_tokens: int, num_reqs: int, max_num_scheduled_tokens: int, **kwargs: Any
    ) -> Any:
        """vLLM's choice for this batch, with the tiers among what it can choose.

        A dummy run says whether it is about a uniform batch (`force_uniform_decode`); a real step says nothing.
        """
        forced = kwargs.get("force_uniform_decode")
        shape = StepShape(num_reqs, int(max_num_scheduled_tokens), num_tokens)
        arguments = {"num_tokens": num_tokens, "num_reqs": num_reqs, **kwargs}
        arguments["max_num_scheduled_tokens"] = max_num_scheduled_tokens
        if self.graph_settings.depths:
            with self.cudagraph_dispatcher.expecting(None if forced is False else shape):
                chosen = super()._determine_batch_execution_and_padding(**arguments)
        else:
            chosen = super()._determine_batch_execution_and_padding(**arguments)
        mode, graph = chosen[0], chosen[1]
        is_tier = mode == CUDAGraphMode.FULL and graph.uniform
        self.graph_query_len = graph.num_tokens // (graph.num_reqs or 1) if is_tier else None
        if forced is None:
            self.graph_monitor.add(mode.name, self.graph_query_len or 0, shape, graph.num_tokens)
        return chosen

    def _build_attention_metadata(self, *, max_query_len: int, **kwargs: Any) -> Any:  # type: ignore[override]
        """Metadata for the query length that the graph was captured with.

        FlashAttention chooses kernels and plans their work from it. A replay runs the captured kernels, so a plan made
        for the shorter queries of a padded batch would not be theirs.
        """
        is_padded = kwargs.get("num_tokens_padded") is not None
        if is_padded and self.graph_settings.depths and self.graph_query_len is not None:
            max_query_len = max(max_query_len, self.graph_query_len)
        return super()._build_attention_metadata(max_query_len=max_query_len, **kwargs)

    def _warmup_and_capture(self, desc: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's capture; its dummy batch takes the tokens a request from `uniform_decode_query_len`."""
        if not desc.uniform:
            return super()._warmup_and_capture(desc, *args, **kwargs)
        deepest = self.uniform_decode_query_len
        self.uniform_decode_query_len = desc.num_tokens // desc.num_reqs
        try:
            return super()._warmup_and_capture(desc, *args, **kwargs)
        finally:
            self.uniform_decode_query_len = deepest

    def capture_model(self) -> int:
        """vLLM's capture of all graphs, timed.

        Raises:
            RuntimeError: a graph that batches would be sent to was not captured.
        """
        start_s = time.perf_counter()
        num_bytes: int = super().capture_model()
        self.graph_capture = {"seconds": time.perf_counter() - start_s, "bytes": float(num_bytes)}
        if self.graph_settings.depths:
            self._check_captured()
            logger.info(
                "full CUDA graphs for K in %s: %d graphs, %.1f s and %.2f GiB for all graphs of the engine",
                list(self.graph_settings.depths),
                len(self.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]),
                self.graph_capture["seconds"],
                num_bytes / 2**30,
            )
        return num_bytes

    def _check_captured(self) -> None:
        wanted = self.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
        if not isinstance(self.model, CUDAGraphWrapper):
            raise RuntimeError(
                f"full_graph_depths: the model is a {type(self.model).__name__}, which replays no graphs"
            )
        entries = self.model.concrete_cudagraph_entries
        missing = [key for key in wanted if key not in entries or entries[key].cudagraph is None]
        if missing:
            raise RuntimeError(f"full_graph_depths: {len(missing)} graphs were not captured, such as {missing[0]}")

    def graph_report(self) -> dict[str, Any]:
        """Plain values: graphs captured, what capture cost, steps by graph."""
        keys = self.cudagraph_dispatcher.cudagraph_keys
        return {
            "depths": list(self.graph_settings.depths),
            "max_padding_tokens": self.graph_settings.max_padding_tokens,
            "cudagraph_mode": self.compilation_config.cudagraph_mode.name,
            "num_graphs": {mode.name: len(graphs) for mode, graphs in keys.items()},
            "capture": dict(self.graph_capture),
            "steps": self.graph_monitor.counts(),
        }


def _check_settings(config: Any) -> None:
    """Refuse what tiers were not made for, rather than run it on graphs that may be wrong."""
    parallel, compilation = config.parallel_config, config.compilation_config
    refused = {
        "data_parallel_size above 1 (run more replicas instead)": parallel.data_parallel_size > 1,
        "enable_dbo": parallel.use_ubatching,
        "decode_context_parallel_size above 1": parallel.decode_context_parallel_size > 1,
        "enable_lora": config.lora_config is not None,
        "sequence parallelism (compilation_config.pass_config.enable_sp)": compilation.pass_config.enable_sp,
        "an encoder-decoder model": config.model_config.is_encoder_decoder,
        "enforce_eager": config.model_config.enforce_eager,
    }
    if found := [setting for setting, is_on in refused.items() if is_on]:
        raise ValueError(f"full_graph_depths does not go with {', '.join(found)}: leave one of them out")


class GraphModelRunner(PassSkipper, GraphTiers, gpu_model_runner.GPUModelRunner):
    """vLLM's model runner for GPUs with tiers; the pass of its drafter is skipped where nobody wants drafts."""


class GraphReports:
    """What `collective_rpc` can ask of a worker whose model runner has `GraphTiers`."""

    model_runner: Any

    def graph_report(self) -> dict[str, Any]:
        """`collective_rpc("graph_report")`: graphs and steps of this worker."""
        report: dict[str, Any] = self.model_runner.graph_report()
        return report

    def graph_steps(self) -> list[list[Any]]:
        """`collective_rpc("graph_steps")`: each step since the last call, as `RecordedStep`; the first call starts."""
        return [list(step) for step in self.model_runner.graph_monitor.record()]


class GraphWorker(DraftReports, GraphReports, gpu_worker.Worker):
    """Drop-in for vLLM's GPU worker."""

    def init_device(self) -> None:
        """vLLM's set-up of the device and its model runner, then the tiers."""
        super().init_device()
        if type(self.model_runner) is not gpu_model_runner.GPUModelRunner:
            raise ValueError(f"full_graph_depths needs vLLM's V1 model runner, not {type(self.model_runner).__name__}")
        settings = GraphSettings.from_config(
            self.vllm_config.additional_config, self.vllm_config.num_speculative_tokens
        )
        GraphModelRunner.install(self.model_runner, settings)
        if self.vllm_config.speculative_config is not None:
            GraphModelRunner.prepare_drafting(self.model_runner)  # type: ignore[arg-type]
