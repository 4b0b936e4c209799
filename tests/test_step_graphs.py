"""Which CUDA graph a step of the V2 runner and a pass of the drafter get. The host chooses, so no GPU is needed."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from peagle.vllm.engine import capture_sizes
from peagle.vllm.speculator import DraftGraphs
from peagle.vllm.v2_worker import StepGraphs

K_MAX, MAX_REQUESTS = 7, 48
SIZES = capture_sizes(MAX_REQUESTS * (1 + K_MAX))
MODE = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What graphs read of vLLM's configuration."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=8192),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(is_mm_prefix_lm=False, is_encoder_decoder=False),
        speculative_config=None,
        num_speculative_tokens=K_MAX,
        kv_transfer_config=None,
    )


def step_graphs(config: Any, mode: CUDAGraphMode = MODE) -> StepGraphs:
    graphs = StepGraphs(config, "cuda", mode, decode_query_len=1 + K_MAX, varlen_decode=True)
    graphs._graphs_captured = True
    return graphs


def splits(count: int, longest: int) -> list[list[int]]:
    """Rows of each request of some batches."""
    draw = random.Random(longest)
    return [[draw.randint(1, longest) for _ in range(draw.randint(1, MAX_REQUESTS))] for _ in range(count)]


@pytest.mark.parametrize("longest", [1 + K_MAX, 40, 400])
def test_every_step_has_a_full_graph_with_room_for_it(config: Any, longest: int) -> None:
    graphs, num_beyond = step_graphs(config), 0
    captured = graphs._capture_descs[CUDAGraphMode.FULL]
    assert CUDAGraphMode.PIECEWISE not in graphs._capture_descs
    assert [desc.num_tokens for desc in captured] == sorted((desc.num_tokens for desc in captured), reverse=True)
    for rows in splits(300, longest):
        desc = graphs.dispatch(len(rows), sum(rows), None, 0, max_query_len=max(rows))
        if sum(rows) > SIZES[-1]:
            assert desc.cg_mode == CUDAGraphMode.NONE
            num_beyond += 1
            continue
        assert desc in captured
        assert desc.num_tokens == min(size for size in SIZES if size >= sum(rows))
        assert desc.num_reqs >= len(rows)
        # A replay is planned for what was captured: never for fewer rows than a request has, and steps that only
        # decode not for more.
        assert max(rows) <= desc.max_query_len
        if max(rows) <= 1 + K_MAX:
            assert desc.max_query_len == 1 + K_MAX
    assert num_beyond < 300


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("kv_transfer_config", "", object()),
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("model_config", "is_mm_prefix_lm", True),
        ("model_config", "is_encoder_decoder", True),
    ],
)
def test_what_runs_between_layers_keeps_prompts_piecewise(config: Any, part: str, name: str, value: Any) -> None:
    setattr(getattr(config, part) if name else config, name or part, value)
    graphs = step_graphs(config)
    assert graphs.dispatch(2, 60, None, 0, max_query_len=52).cg_mode == CUDAGraphMode.PIECEWISE
    assert graphs.dispatch(2, 16, None, 0, max_query_len=8).cg_mode == CUDAGraphMode.FULL


def test_a_mode_without_full_graphs_is_left_alone(config: Any) -> None:
    graphs = step_graphs(config, CUDAGraphMode.PIECEWISE)
    assert graphs.dispatch(2, 60, None, 0, max_query_len=52).cg_mode == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("longest", [1 + K_MAX, 40, 400])
@pytest.mark.parametrize("has_dense", [True, False])
def test_every_pass_to_k_max_has_a_graph_with_room_for_it(config: Any, longest: int, has_dense: bool) -> None:
    graphs = DraftGraphs(config, "cuda", MODE, decode_query_len=2 * K_MAX, has_dense=has_dense)
    captured, kinds = graphs._capture_descs[CUDAGraphMode.FULL], set()
    for rows in splits(300, longest):
        desc = graphs.full_graph(len(rows), sum(rows), K_MAX, max(rows))
        num_rows = sum(rows) + len(rows) * (K_MAX - 1)
        if desc is None:
            assert max(rows) > 1 + K_MAX
            assert not has_dense or num_rows > captured[0].num_tokens
            continue
        assert desc in captured
        assert desc.num_reqs >= len(rows)
        kinds.add(desc.uniform_token_count)
        if desc.uniform_token_count is None:
            assert desc.num_tokens >= num_rows
            assert desc.max_query_len >= max(rows) + K_MAX - 1
        else:
            assert desc.num_tokens >= 2 * K_MAX * len(rows)
            assert max(rows) <= 1 + K_MAX
    assert (None in kinds) == (has_dense and longest > 1 + K_MAX)


def test_shallow_passes_of_many_requests_stay_shallow(config: Any) -> None:
    graphs = DraftGraphs(config, "cuda", MODE, decode_query_len=2 * K_MAX, has_dense=True)
    assert graphs.full_graph(40, 300, 3, 100) is None
    assert graphs.full_graph(20, 300, 3, 100).uniform_token_count is None
    assert graphs.full_graph(40, 40, 3, 1).uniform_token_count == 6
