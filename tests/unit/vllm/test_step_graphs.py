"""Which CUDA graph a step of the V2 runner and a pass of the drafter get. The host chooses, so no GPU is needed."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from peagle.vllm import compat
from peagle.vllm.engine import capture_sizes
from peagle.vllm.speculator import MIN_PACKED_REQUESTS, DraftGraphs
from peagle.vllm.v2_worker import StepGraphs
from tests.support.graph_config import graph_config

K_MAX, MAX_REQUESTS = 7, 48
SIZES = capture_sizes(MAX_REQUESTS * (1 + K_MAX))
MODE = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What graphs read of vLLM's configuration."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    return graph_config(MAX_REQUESTS, 8192, SIZES, num_speculative_tokens=K_MAX)


def step_graphs(config: Any, mode: CUDAGraphMode = MODE, **changes: Any) -> StepGraphs:
    settings = {"decode_query_len": 1 + K_MAX, "varlen_decode": True, **changes}
    graphs = StepGraphs(config, "cuda", mode, **settings)
    graphs._graphs_captured = True
    return graphs


def draft_graphs(config: Any, *, is_ragged: bool = True, packs_prompts: bool = True) -> DraftGraphs:
    graphs = DraftGraphs(
        config, "cuda", MODE, decode_query_len=2 * K_MAX, is_ragged=is_ragged, packs_prompts=packs_prompts
    )
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
        is_decode = max(rows) <= 1 + K_MAX
        desc = graphs.dispatch(len(rows), sum(rows), None, 0, max_query_len=max(rows) if is_decode else None)
        if sum(rows) > SIZES[-1]:
            assert desc.cg_mode == CUDAGraphMode.NONE
            num_beyond += 1
            continue
        assert desc in captured
        assert desc.num_tokens == min(size for size in SIZES if size >= sum(rows))
        assert desc.num_reqs >= len(rows)
        # A replay is planned for what was captured: steps that only decode for as many rows as a request has there,
        # others for all rows.
        assert desc.max_query_len == (1 + K_MAX if is_decode else None)
    assert num_beyond < 300


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("kv_transfer_config", "", object()),
        ("additional_config", "", {compat.PROMPT_GRAPHS_KEY: False}),
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("model_config", "is_multimodal_model", True),
        ("model_config", "is_encoder_decoder", True),
        ("model_config", "use_mla", True),
        ("model_config", "rswa_window", 128),
    ],
)
def test_prompts_stay_piecewise_where_a_graph_would_miss_something(
    config: Any, part: str, name: str, value: Any
) -> None:
    assert compat.replays_prompts(config)
    setattr(getattr(config, part) if name else config, name or part, value)
    assert not compat.replays_prompts(config)


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_a_wrong_setting_is_refused(config: Any, wrong: object) -> None:
    config.additional_config = {compat.PROMPT_GRAPHS_KEY: wrong}
    with pytest.raises(ValueError, match=compat.PROMPT_GRAPHS_KEY):
        compat.replays_prompts(config)


def test_a_mode_without_full_graphs_is_left_alone(config: Any) -> None:
    graphs = step_graphs(config, CUDAGraphMode.PIECEWISE)
    assert graphs.dispatch(2, 60, None, 0).cg_mode == CUDAGraphMode.PIECEWISE


def test_a_short_prompt_has_a_graph_too(config: Any) -> None:
    """vLLM says no longest query of a step with prompts, however short they are."""
    graphs = step_graphs(config)
    for num_rows in range(1, 2 + K_MAX):
        desc = graphs.dispatch(1, num_rows, None, 0)
        assert desc.cg_mode == CUDAGraphMode.FULL
        assert desc.max_query_len is None
        assert desc.num_tokens == min(size for size in SIZES if size >= num_rows)


@pytest.mark.parametrize("max_num_seqs", [1, MAX_REQUESTS])
def test_a_target_without_a_drafter_has_them_too(config: Any, max_num_seqs: int) -> None:
    config.scheduler_config.max_num_seqs = max_num_seqs
    graphs = step_graphs(config, decode_query_len=1, lora_capture_cases=[0, 2])
    for num_loras in (0, 2):
        for rows in splits(100, 40):
            rows = rows[:max_num_seqs]
            longest = 1 if max(rows) == 1 else None
            desc = graphs.dispatch(len(rows), sum(rows), None, num_loras, max_query_len=longest)
            assert (desc.cg_mode == CUDAGraphMode.FULL) == (sum(rows) <= SIZES[-1])
            if desc.cg_mode == CUDAGraphMode.FULL:
                assert desc.num_active_loras == num_loras
                assert desc.num_reqs >= len(rows)
                assert desc.max_query_len == longest


@pytest.mark.parametrize("longest", [1 + K_MAX, 40, 400])
@pytest.mark.parametrize(("is_ragged", "packs_prompts"), [(True, True), (True, False), (False, False)])
def test_every_pass_has_a_graph_with_room_for_it(
    config: Any, longest: int, is_ragged: bool, packs_prompts: bool
) -> None:
    graphs = draft_graphs(config, is_ragged=is_ragged, packs_prompts=packs_prompts)
    captured, kinds = graphs._capture_descs[CUDAGraphMode.FULL], set()
    draw = random.Random(longest)
    for rows in splits(300, longest):
        depth, is_decode = draw.randint(1, K_MAX), max(rows) <= 1 + K_MAX
        num_rejected = draw.randint(0, sum(rows) - len(rows)) if is_decode else 0
        desc = graphs.full_graph(len(rows), sum(rows), depth, max(rows), num_rejected)
        num_rows = max(sum(rows), len(rows) * depth, sum(rows) + len(rows) * (depth - 1) - num_rejected)
        if desc is None:
            assert not is_decode
            assert not packs_prompts or num_rows > captured[0].num_tokens
            continue
        assert desc in captured
        assert desc.num_reqs >= len(rows)
        kinds.add(desc.uniform_token_count)
        if desc.uniform_token_count is None:
            assert is_ragged
            assert desc.num_tokens >= num_rows
            assert desc.max_query_len >= max(rows)
        else:
            assert desc.num_tokens >= 2 * max(depth, max(rows) - 1) * len(rows)
            assert not is_ragged or len(rows) <= MIN_PACKED_REQUESTS
    assert (None in kinds) == (packs_prompts if longest > 1 + K_MAX else is_ragged)


def test_rejected_drafts_need_no_rows(config: Any) -> None:
    graphs = draft_graphs(config)
    assert graphs.full_graph(40, 40 * 8, 7, 8, 0).num_tokens == 576  # the least of `SIZES` from 40 * 14 on
    assert graphs.full_graph(40, 40 * 8, 7, 8, 150).num_tokens == 416  # and from 410
    assert graphs.full_graph(40, 40 * 8, 7, 8, 280).num_tokens == 320  # rows of the target are never left out
    assert graphs.full_graph(40, 40, 3, 1).num_tokens == 128  # from 120
    assert graphs.full_graph(20, 20 * 8, 3, 8).uniform_token_count == 2 * K_MAX
