"""The worker with full CUDA graphs for several K: vLLM's own model runner goes along, and settings are checked."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker import gpu_model_runner, gpu_worker

from peagle.vllm.compat import UnsupportedVLLMError, check_seams
from peagle.vllm.engine import GRAPH_WORKER, GRAPHS_KEY, engine_kwargs
from peagle.vllm.graph_worker import RUNNER_SEAMS, GraphModelRunner, GraphMonitor, GraphTiers, GraphWorker
from peagle.vllm.graphs import GraphSettings, StepShape
from tests.test_graphs import K_MAX, gpu_config, graph, ready, settings
from tests.test_vllm_extension import write_head


def runner(*depths: int, cls: Any = GraphModelRunner, config: Any = None) -> Any:
    """vLLM's model runner with the fields that choosing a graph reads, and no device."""
    config = config or gpu_config()
    made = object.__new__(gpu_model_runner.GPUModelRunner)
    made.vllm_config, made.compilation_config = config, config.compilation_config
    made.model_config, made.parallel_config = config.model_config, config.parallel_config
    made.uniform_decode_query_len = 1 + K_MAX
    made.input_batch = SimpleNamespace(lora_id_to_lora_request={})
    made.cudagraph_dispatcher = CudagraphDispatcher(config)
    cls.install(made, settings(*depths))
    ready(made.cudagraph_dispatcher)
    return made


def step(made: Any, tokens: Sequence[int], **changes: Any) -> tuple[CUDAGraphMode, BatchDescriptor]:
    """What `execute_model` asks of the runner for a batch."""
    chosen = made._determine_batch_execution_and_padding(
        num_tokens=sum(tokens),
        num_reqs=len(tokens),
        num_scheduled_tokens_np=np.array(tokens),
        max_num_scheduled_tokens=max(tokens),
        **{"use_cascade_attn": False, **changes},
    )
    return chosen[0], chosen[1]


def test_steps_run_on_tiers_and_are_counted() -> None:
    made = runner(3)
    made.graph_monitor.record()
    assert step(made, [4] * 8) == (CUDAGraphMode.FULL, graph(4, 8))
    assert made.graph_query_len == 4
    assert step(made, [3, 2]) == (CUDAGraphMode.FULL, graph(4, 2))
    assert step(made, [4] * 8, use_cascade_attn=True)[0] is CUDAGraphMode.PIECEWISE
    assert made.graph_query_len is None
    assert step(made, [700])[0] is CUDAGraphMode.NONE
    assert step(made, [900])[0] is CUDAGraphMode.NONE
    assert made.graph_report()["steps"] == {"FULL/4/8": 1, "FULL/4/32": 1, "NONE/0/0": 2, "PIECEWISE/0/32": 1}
    recorded = made.graph_monitor.record()
    assert [one[1:] for one in recorded[:2]] == [("FULL", 8, 32, 32), ("FULL", 2, 5, 8)]
    assert [one[0] for one in recorded] == sorted(one[0] for one in recorded)
    assert made.graph_monitor.record() == []


def test_without_depths_the_worker_only_counts() -> None:
    made = runner()
    assert type(made.cudagraph_dispatcher) is CudagraphDispatcher
    assert step(made, [4])[0] is CUDAGraphMode.PIECEWISE
    assert step(made, [8]) == (CUDAGraphMode.FULL, graph(8, 1))
    assert made.graph_report()["steps"] == {"FULL/8/8": 1, "PIECEWISE/0/8": 1}


def test_dummy_runs_are_not_counted_and_mixed_ones_not_moved() -> None:
    made = runner(3)
    assert step(made, [4], force_uniform_decode=True) == (CUDAGraphMode.FULL, graph(4, 1))
    assert step(made, [1] * 4, force_uniform_decode=False)[0] is CUDAGraphMode.PIECEWISE
    assert made.graph_report()["steps"] == {}


class RecordingRunner(GraphTiers, gpu_model_runner.GPUModelRunner):
    """Notes what vLLM's `_warmup_and_capture` would run, and on which graph vLLM's `_dummy_run` would land."""

    def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        query_len = self.uniform_decode_query_len if kwargs["uniform_decode"] else num_tokens
        count = -(-num_tokens // query_len)
        batch = [num_tokens // count] * count
        forced = {"force_uniform_decode": kwargs["uniform_decode"]}
        self.captured = [*getattr(self, "captured", []), step(self, batch, **forced)]


def test_capture_reaches_every_graph() -> None:
    """vLLM's own loop over its descriptors, with the dummy batch that each tier gets."""
    made = runner(0, 1, 3, 5, cls=RecordingRunner)
    made.compilation_config.cudagraph_num_of_warmups = 0
    ((_, mixed), (_, full)) = made.cudagraph_dispatcher.get_capture_descs()
    for mode, descriptors in ((CUDAGraphMode.PIECEWISE, mixed), (CUDAGraphMode.FULL, full)):
        made.captured = []
        for descriptor in descriptors:
            made._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode)
        assert made.captured == [(mode, descriptor) for descriptor in descriptors]
    assert made.uniform_decode_query_len == 1 + K_MAX


class NotingRunner(GraphTiers):
    """Stands above a base that notes the query length that attention is planned with."""


class _Base:
    def _build_attention_metadata(self, **kwargs: Any) -> int:
        return int(kwargs["max_query_len"])


class PlanningRunner(NotingRunner, _Base):
    pass


@pytest.mark.parametrize(
    ("query_len", "num_tokens_padded", "planned"), [(8, 16, 8), (8, None, 3), (None, 16, 3), (3, 6, 3)]
)
def test_attention_is_planned_for_the_graphs_query_length(
    query_len: int | None, num_tokens_padded: int | None, planned: int
) -> None:
    made: Any = object.__new__(PlanningRunner)
    made.graph_settings, made.graph_query_len = settings(3), query_len
    assert made._build_attention_metadata(max_query_len=3, num_tokens_padded=num_tokens_padded) == planned


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("parallel_config.data_parallel_size", 2, "data_parallel_size above 1"),
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size"),
        ("parallel_config.enable_dbo", True, "enable_dbo"),
        ("lora_config", SimpleNamespace(specialize_active_lora=False), "enable_lora"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("model_config.enforce_eager", True, "enforce_eager"),
        ("compilation_config.pass_config.enable_sp", True, "sequence parallelism"),
    ],
)
def test_settings_that_tiers_were_not_made_for_are_refused(field: str, value: Any, message: str) -> None:
    config = gpu_config()
    *path, name = field.split(".")
    owner = config
    for part in path:
        owner = getattr(owner, part)
    object.__setattr__(owner, name, value)
    with pytest.raises(ValueError, match=message):
        runner(3, config=config)


def test_an_attention_backend_that_is_not_known_is_refused() -> None:
    made = runner(3)
    backend = type("Backend", (), {"get_name": staticmethod(lambda: "FLASHINFER")})
    with pytest.raises(ValueError, match="attention runs on FLASHINFER: only FLASH_ATTN"):
        made._check_and_update_cudagraph_mode([{backend}], [])


def test_the_installed_vllm_has_the_seams() -> None:
    check_seams(gpu_model_runner.GPUModelRunner, RUNNER_SEAMS)
    assert issubclass(GraphWorker, gpu_worker.Worker)
    with pytest.raises(UnsupportedVLLMError, match="CudagraphDispatcher has no _determine_batch"):
        check_seams(CudagraphDispatcher, RUNNER_SEAMS)


def test_engine_kwargs_with_graphs(tmp_path: Path) -> None:
    kwargs = engine_kwargs(
        None,
        write_head(tmp_path),
        async_scheduling=True,
        on_cpu=False,
        full_graph_depths=(3, 0, 3),
        extra={"additional_config": {"other": 1}},
    )
    assert kwargs["worker_cls"] == GRAPH_WORKER
    assert kwargs["additional_config"] == {"other": 1, GRAPHS_KEY: {"depths": [0, 3, 7], "max_padding_tokens": 8}}
    assert GraphSettings.from_config(kwargs["additional_config"], K_MAX) == settings(0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_graph_depths": []}, "at least one K"),
        ({"full_graph_depths": "3"}, "at least one K"),
        ({"full_graph_depths": [8]}, "8 is not an integer in 0..7"),
        ({"full_graph_depths": [2.0]}, "2.0 is not an integer"),
        ({"full_graph_depths": [3], "max_graph_padding_tokens": -1}, "of at least 0"),
        ({"max_graph_padding_tokens": 8}, "without full_graph_depths"),
        ({"full_graph_depths": [3], "on_cpu": True, "async_scheduling": False}, "a CPU has no CUDA graphs"),
        ({"full_graph_depths": [3], "extra": {"additional_config": {GRAPHS_KEY: {}}}}, "is not free"),
    ],
)
def test_bad_graph_settings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"async_scheduling": True, "on_cpu": False, **changes}
    with pytest.raises(ValueError, match=message):
        engine_kwargs("/target", write_head(tmp_path), **arguments)


def test_graphs_need_a_head() -> None:
    with pytest.raises(ValueError, match="there is no head"):
        engine_kwargs("/target", None, async_scheduling=True, on_cpu=False, full_graph_depths=[3])


def test_monitor_keeps_one_entry_for_all_steps_without_a_graph() -> None:
    monitor = GraphMonitor()
    for num_tokens in range(1000, 1100):
        monitor.add("NONE", 0, StepShape(1, num_tokens, num_tokens), num_tokens)
    assert monitor.counts() == {"NONE/0/0": 100}
