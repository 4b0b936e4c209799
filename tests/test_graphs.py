"""Full CUDA graphs for several K: which graph a batch runs on, and that vLLM's own dispatcher goes along.

No graph is captured here. The model runner is in test_graph_worker.py; a whole engine whose batches are padded as on a
GPU runs in test_graphs_engine.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from peagle.vllm.engine import GRAPHS_KEY, MAX_GRAPH_TOKENS
from peagle.vllm.engine import capture_sizes_engine as capture_sizes
from peagle.vllm.graphs import GraphSettings, GraphTable, StepShape, TieredDispatcher, request_counts

K_MAX = 7
CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))  # vLLM's default list
MAX_REQUESTS = 64
MAX_TOKENS = 512


def graph(query_len: int, count: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=query_len * count, num_reqs=count, uniform=True)


def settings(*depths: int, max_padding_tokens: int = 8) -> GraphSettings:
    graphs = {"depths": list(depths), "max_padding_tokens": max_padding_tokens}
    return GraphSettings.from_config({GRAPHS_KEY: graphs}, K_MAX)


def table(*depths: int, **values: int) -> GraphTable:
    return GraphTable(settings(*depths, **values), MAX_REQUESTS, MAX_TOKENS)


def shape_of(tokens: Sequence[int]) -> StepShape:
    return StepShape(len(tokens), max(tokens), sum(tokens))


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_uniform_batch_gets_a_graph_no_larger_than_in_an_engine_built_for_its_depth(
    depth: int, num_requests: int
) -> None:
    query_len = 1 + depth
    own_sizes = sorted({-(-size // query_len) * query_len for size in CAPTURE_SIZES})
    own = next(size for size in own_sizes if size >= num_requests * query_len)
    chosen = table(0, 1, 3, 5).choose(StepShape(num_requests, query_len, num_requests * query_len))
    assert chosen is not None
    assert chosen.num_tokens <= own
    assert chosen.num_tokens == chosen.num_reqs * query_len


@pytest.mark.parametrize("query_len", [1, 2, 4, 6, 8])
def test_small_batches_have_graphs_of_exactly_their_size(query_len: int) -> None:
    counts = request_counts(query_len, MAX_REQUESTS, MAX_TOKENS)
    assert counts[:8] == tuple(range(1, 9))
    assert counts[-1] == min(MAX_REQUESTS, MAX_TOKENS // query_len)
    assert list(counts) == sorted(set(counts))


def test_graph_keys_of_two_tiers_never_meet() -> None:
    keys = list(table(0, 1, 3, 5).descriptors())
    assert len(keys) == len(set(keys))
    assert {key.num_tokens // key.num_reqs for key in keys if key.num_reqs} == {1, 2, 4, 6, 8}
    assert max(key.num_tokens for key in keys) <= MAX_TOKENS


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([4], graph(4, 1)),
        ([8], graph(8, 1)),
        ([1] * 3, graph(1, 3)),
        ([4] * 9, graph(4, 10)),  # a missing request, as vLLM pads
        ([3], graph(4, 1)),  # k = 2 has no tier
        ([4, 2], graph(4, 2)),  # unequal k
        ([8, 1], graph(8, 2)),  # 7 tokens of padding
        ([8, 1, 1], None),  # 14
        ([1, 1, 2], None),  # without a tier of 2 tokens: 12 - 4
        ([9], None),
        ([500], None),
        ([8] * 65, None),  # more requests than the engine takes
    ],
)
def test_choice(tokens: list[int], expected: BatchDescriptor | None) -> None:
    assert table(0, 3, max_padding_tokens=7).choose(shape_of(tokens)) == expected


def test_without_padding_only_exact_batches_use_a_tier() -> None:
    exact_only = table(3, max_padding_tokens=0)
    assert exact_only.choose(shape_of([4, 4])) == graph(4, 2)
    assert exact_only.choose(shape_of([4, 3])) is None
    assert exact_only.choose(shape_of([3, 3])) is None


def test_a_chosen_graph_always_holds_the_batch() -> None:
    random = np.random.default_rng(0)
    tiers = table(0, 1, 3, max_padding_tokens=16)
    num_chosen = 0
    for _ in range(2000):
        tokens = random.integers(1, 10, size=random.integers(1, 12)).tolist()
        chosen = tiers.choose(shape_of(tokens))
        if chosen is not None:
            num_chosen += 1
            assert chosen.num_reqs is not None
            assert chosen.num_reqs >= len(tokens)
            assert chosen.num_tokens >= sum(tokens)
            assert chosen.num_tokens // chosen.num_reqs >= max(tokens)
    assert num_chosen > 200


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ({"depths": [8]}, "8 is not an integer in 0..7"),
        ({"depths": [True]}, "True is not an integer"),
        ({"depths": [3], "max_padding_tokens": -1}, "max_graph_padding_tokens must be an integer of at least 0"),
        ({"depth": [3]}, "unknown keys.*depth"),
        (None, "must be set with this worker"),
    ],
)
def test_bad_settings_of_the_worker(graphs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphSettings.from_config({GRAPHS_KEY: graphs}, K_MAX)


def test_k_max_is_always_a_tier() -> None:
    assert settings(3, 0).depths == (0, 3, K_MAX)
    assert settings().depths == ()


def gpu_config(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Any:
    """vLLM's own configuration, with what a GPU engine with K_max drafts would have in it."""
    config: Any = VllmConfig()
    config.speculative_config = SimpleNamespace(num_speculative_tokens=K_MAX)
    config.model_config = SimpleNamespace(is_encoder_decoder=False, enforce_eager=False)
    config.scheduler_config.max_num_seqs = MAX_REQUESTS
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.cudagraph_mode = mode
    compilation.cudagraph_capture_sizes = list(CAPTURE_SIZES)
    compilation.max_cudagraph_capture_size = CAPTURE_SIZES[-1]
    return config


def ready(dispatcher: Any) -> Any:
    """What the model runner does between making a dispatcher and using it."""
    compilation = dispatcher.compilation_config
    compilation.adjust_cudagraph_sizes_for_spec_decode(1 + K_MAX, 1)
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, 1 + K_MAX)
    return dispatcher


def test_the_tiers_see_the_sizes_that_vllm_rounds_away() -> None:
    dispatcher = ready(TieredDispatcher(gpu_config(), settings(0, 3)))
    assert min(dispatcher.compilation_config.cudagraph_capture_sizes) == 1 + K_MAX
    with dispatcher.expecting(StepShape(1, 4, 4)):
        assert dispatcher.dispatch(num_tokens=4) == (CUDAGraphMode.FULL, graph(4, 1))
    with dispatcher.expecting(StepShape(16, 1, 16)):
        assert dispatcher.dispatch(num_tokens=16) == (CUDAGraphMode.FULL, graph(1, 16))


def test_stock_vllm_leaves_the_full_graph_where_the_tiers_do_not() -> None:
    """The penalty that this is about, and that K_max goes where it went."""
    stock = ready(CudagraphDispatcher(gpu_config()))
    tiered = ready(TieredDispatcher(gpu_config(), settings(3)))
    assert stock.dispatch(num_tokens=4)[0] is CUDAGraphMode.PIECEWISE
    for num_requests in (1, 8, 32):
        num_tokens = num_requests * (1 + K_MAX)
        full = stock.dispatch(num_tokens=num_tokens, uniform_decode=True)
        assert full == (CUDAGraphMode.FULL, graph(1 + K_MAX, num_requests))
        with tiered.expecting(StepShape(num_requests, 1 + K_MAX, num_tokens)):
            assert tiered.dispatch(num_tokens=num_tokens, uniform_decode=True) == full


def test_full_graphs_are_left_where_vllm_forbids_them() -> None:
    tiered = ready(TieredDispatcher(gpu_config(), settings(3)))
    with tiered.expecting(StepShape(1, 4, 4)):
        assert tiered.dispatch(num_tokens=4, valid_modes={CUDAGraphMode.NONE})[0] is CUDAGraphMode.NONE
        mode, descriptor = tiered.dispatch(num_tokens=4, invalid_modes={CUDAGraphMode.FULL})  # cascade attention
    assert (mode, descriptor.num_tokens) == (CUDAGraphMode.PIECEWISE, 8)


def test_without_an_announced_shape_the_dispatcher_is_vllms() -> None:
    stock = ready(CudagraphDispatcher(gpu_config()))
    tiered = ready(TieredDispatcher(gpu_config(), settings(0, 1, 3, 5)))
    for num_tokens in range(1, 600):
        assert tiered.dispatch(num_tokens=num_tokens) == stock.dispatch(num_tokens=num_tokens)


def test_capture_order_is_the_same_on_every_rank() -> None:
    first, second = (ready(TieredDispatcher(gpu_config(), settings(*depths))) for depths in [(0, 1, 3), (3, 1, 0)])
    (_, _), (mode, graphs) = first.get_capture_descs()
    assert mode is CUDAGraphMode.FULL
    assert [(g.num_tokens, g.num_reqs) for g in graphs] == sorted(
        ((g.num_tokens, g.num_reqs) for g in graphs), reverse=True
    )
    assert first.get_capture_descs() == second.get_capture_descs()


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_a_mode_without_decode_graphs_is_refused(mode: CUDAGraphMode) -> None:
    dispatcher = TieredDispatcher(gpu_config(mode), settings(3))
    with pytest.raises(ValueError, match=f"cudagraph_mode {mode.name}: set"):
        dispatcher.initialize_cudagraph_keys(mode, 1 + K_MAX)


def test_captured_sizes_are_vllms_up_to_its_limit_and_reach_twice_the_decodes() -> None:
    assert capture_sizes(16) == list(CAPTURE_SIZES)
    most = capture_sizes(1 << 20)
    assert most[: len(CAPTURE_SIZES)] == list(CAPTURE_SIZES)
    assert most == sorted(set(most))
    assert most[-1] == MAX_GRAPH_TOKENS
    assert max(after / before for before, after in pairwise(most[len(CAPTURE_SIZES) - 1 :])) <= 1.125
