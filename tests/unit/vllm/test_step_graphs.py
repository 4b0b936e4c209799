"""Which CUDA graph a step of the V2 runner and a pass of the drafter get. The host chooses, so no GPU is needed."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from peagle.vllm import compat, remote_speculator, speculator, v2_worker
from peagle.vllm.chosen import Chances
from peagle.vllm.engine import capture_sizes
from peagle.vllm.speculator import MIN_PACKED_REQUESTS, ChoiceGraphs, DraftGraphs
from peagle.vllm.step_notes import StepResult, read_result
from peagle.vllm.v2_worker import PEagleRunner, RaggedModelRunner, RenewedState, StepGraphs
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


def test_a_replay_of_the_target_is_planned_as_its_capture(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures a graph without a longest query for a request of all its rows."""
    monkeypatch.setattr(GPUModelRunner, "prepare_inputs", lambda *args: SimpleNamespace(max_query_len=None))
    runner = object.__new__(RaggedModelRunner)
    runner.cudagraph_manager = step_graphs(config)
    for desc in runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]:
        planned = runner.prepare_inputs(None, None, desc, 0).max_query_len
        assert planned == (desc.max_query_len or desc.num_tokens)
    eager = cudagraph_utils.BatchExecutionDescriptor(CUDAGraphMode.NONE, 5000, 3)
    assert runner.prepare_inputs(None, None, eager, 0).max_query_len is None
    # In vLLM's mode FULL a step is planned for its own longest request.
    runner.cudagraph_manager = step_graphs(config, CUDAGraphMode.FULL)
    (*_, desc) = runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    assert runner.prepare_inputs(None, None, desc, 0).max_query_len is None


def test_a_replay_of_the_drafter_is_planned_as_its_capture(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention's metadata is built from, for every graph: at its capture, and for a batch that it is chosen
    for."""
    planned: list[dict[str, Any]] = []
    monkeypatch.setattr(speculator, "build_attn_metadata", lambda **kwargs: planned.append(kwargs))
    monkeypatch.setattr(speculator, "build_slot_mappings_by_layer", lambda *args: None)
    monkeypatch.setattr(speculator, "write_rows", lambda *args, **kwargs: None)
    one = object.__new__(speculator.PEagleSpeculator)
    one.vllm_config, one.device, one.num_speculative_steps = config, "cpu", K_MAX
    one.max_num_reqs, one.max_rows, one.max_model_len = MAX_REQUESTS, speculator.most_rows(config), 4096
    one.mask_token_id, one.groups, one.attn_groups, one.kv_cache_config = 0, [0], [], None
    one.builders = [SimpleNamespace(max_num_splits=0)]
    one.arange_np = np.arange(MAX_REQUESTS + 1, dtype=np.int32)
    one.rows = speculator.DraftRows.empty(MAX_REQUESTS, one.max_rows, K_MAX, 1, "cpu")
    tables = [torch.zeros(MAX_REQUESTS, 4, dtype=torch.int32)]
    one.block_tables = SimpleNamespace(
        input_block_tables=tables, block_sizes=[16], get_dummy_block_tables=lambda count: tables
    )
    one.graphs = graphs = draft_graphs(config)
    one.choices = SimpleNamespace(dispatch=lambda *args: SimpleNamespace(cg_mode=CUDAGraphMode.FULL))
    one.choices.run_fullgraph = lambda desc: None
    one.draft_tokens = torch.zeros(MAX_REQUESTS, K_MAX, dtype=torch.int64)
    one.draft_ids_S = torch.zeros(MAX_REQUESTS * K_MAX, dtype=torch.int64)
    one.chance_S, one.chance_BK = torch.zeros(MAX_REQUESTS * K_MAX), torch.zeros(MAX_REQUESTS, K_MAX)
    chosen: list[Any] = []
    monkeypatch.setattr(graphs, "run_fullgraph", chosen.append)
    captures: dict[Any, tuple[Any, ...]] = {}
    replayed: set[Any] = set()

    def plan() -> tuple[Any, ...]:
        kwargs = planned.pop()
        starts = kwargs["query_start_loc_cpu"]
        assert len(starts) == kwargs["num_reqs"] + 1 == len(kwargs["seq_lens_cpu_upper_bound"]) + 1
        assert (starts.diff() >= 0).all()
        assert int(starts.diff().max()) <= kwargs["max_query_len"]
        assert int(starts[-1]) <= kwargs["num_tokens"]
        num_splits = one.builders[0].max_num_splits
        return kwargs["num_reqs"], kwargs["num_tokens"], kwargs["max_query_len"], num_splits

    for desc in graphs._capture_descs[CUDAGraphMode.FULL]:
        one._prepare_capture(desc, False)
        captures[desc] = plan()
    for longest in (1 + K_MAX, 40, 200):
        for lengths in splits(200, longest):
            depth = 1 + len(lengths) % K_MAX
            num_drafts = sum(lengths) - len(lengths) if longest == 1 + K_MAX else 0
            one._num_rejected = num_drafts // 2
            if graphs.full_graph(len(lengths), sum(lengths), depth, max(lengths), num_drafts // 2) is None:
                continue
            target, most_keys_B = SimpleNamespace(place_B=lengths), torch.full((len(lengths),), 300)
            given = target, np.array(lengths), most_keys_B, max(lengths), depth
            one.renews_metadata = False
            one._run_pass(*given, is_part=False, is_profile=False)
            desc = chosen.pop()
            assert plan() == captures[desc]
            replayed.add(desc)
            one.renews_metadata = True  # by the graph itself
            one._run_pass(*given, is_part=False, is_profile=False)
            assert chosen.pop() == desc
            assert not planned
    assert sum(desc.uniform_token_count is None for desc in replayed) > 5
    assert sum(desc.uniform_token_count is not None for desc in replayed) > 5


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


def test_passes_before_the_capture_have_none(config: Any) -> None:
    """vLLM warms up its kernels with real steps before it captures graphs."""
    graphs = draft_graphs(config)
    assert graphs.full_graph(2, 16, K_MAX, 8) is not None
    graphs._graphs_captured = False
    assert graphs.full_graph(2, 16, K_MAX, 8) is None


def test_prompts_beside_a_full_batch_have_graphs_too(config: Any) -> None:
    """Half as many rows as decoding takes, as the target's graphs have them."""
    num_decoding, graphs = 2 * K_MAX * MAX_REQUESTS, draft_graphs(config)
    assert graphs._packed[-1].num_tokens == num_decoding * 3 // 2
    assert graphs.full_graph(MAX_REQUESTS, num_decoding, K_MAX, 300).num_tokens == 960  # 672 + 48 * 6
    assert draft_graphs(config, packs_prompts=False)._packed[-1].num_tokens == num_decoding


def test_rejected_drafts_need_no_rows(config: Any) -> None:
    graphs = draft_graphs(config)
    assert graphs.full_graph(40, 40 * 8, 7, 8, 0).num_tokens == 576  # the least of `SIZES` from 40 * 14 on
    assert graphs.full_graph(40, 40 * 8, 7, 8, 150).num_tokens == 416  # and from 410
    assert graphs.full_graph(40, 40 * 8, 7, 8, 280).num_tokens == 320  # rows of the target are never left out
    assert graphs.full_graph(40, 40, 3, 1).num_tokens == 128  # from 120
    assert graphs.full_graph(20, 20 * 8, 3, 8).uniform_token_count == 2 * K_MAX


def test_every_number_of_drafts_has_a_graph(config: Any) -> None:
    choices = ChoiceGraphs(config, "cuda", MODE, decode_query_len=2 * K_MAX)
    choices._graphs_captured = True
    captured = choices._capture_descs[CUDAGraphMode.FULL]
    assert [desc.num_tokens for desc in captured] == sorted({desc.num_tokens for desc in captured}, reverse=True)
    for num_drafts in range(1, MAX_REQUESTS * K_MAX + 1):
        desc = choices.dispatch(0, num_drafts, None, 0)
        assert desc in captured
        assert num_drafts <= desc.num_tokens <= MAX_REQUESTS * K_MAX
    assert choices.dispatch(0, MAX_REQUESTS * K_MAX + 1, None, 0).cg_mode == CUDAGraphMode.NONE


def test_a_step_is_verified_by_a_graph_where_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int | None] = []

    class Stand:
        """In the place of `Verification`, which needs a GPU. It leaves the batch "other" to vLLM."""

        def capture(self, num_sampled: int | None) -> int:
            captured.append(num_sampled)
            return 7

        def __call__(self, hidden: Any, batch: str) -> Any:
            return None if batch == "other" else SimpleNamespace(num_sampled=[2], num_rejected=[1])

    found: list[Any] = [Stand()]
    monkeypatch.setattr(v2_worker.Verification, "of", lambda runner: found[0])
    monkeypatch.setattr(GPUModelRunner, "capture_model", lambda runner, profile_only: 100)
    monkeypatch.setattr(GPUModelRunner, "sample", lambda runner, *step: ("vLLM", *step))
    runner: Any = object.__new__(PEagleRunner)
    runner.cudagraph_manager = SimpleNamespace(_max_full_descs_to_capture=2)
    assert runner.sample("hidden", "batch", None) == ("vLLM", "hidden", "batch", None)
    # vLLM captures a few graphs to learn what they take, and lets them go with the cache that they belong to.
    assert runner.capture_model(profile_only=True) == 107
    assert runner.sample("hidden", "batch", None)[0] == "vLLM"
    runner.cudagraph_manager._max_full_descs_to_capture = None
    assert runner.capture_model() == 107
    assert captured == [2, None]
    assert runner.sample("hidden", "batch", None)[1:] == ([2], [1])
    assert runner.sample("hidden", "batch", "grammar") == ("vLLM", "hidden", "batch", "grammar")
    assert runner.sample("hidden", "other", None)[0] == "vLLM"
    found[0] = None
    assert runner.capture_model() == 100
    assert runner.sample("hidden", "batch", None)[0] == "vLLM"


def test_drafts_of_a_remote_drafter_are_chosen_too(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's output then says which were, how many there were, and what those of the step before are worth."""
    runner: Any = object.__new__(remote_speculator.RemoteModelRunner)
    one = runner.speculator = object.__new__(remote_speculator.RemoteSpeculator)
    one.sender, one.num_drafts, one.chances = object(), {"a": 3}, Chances(4, K_MAX, torch.device("cpu"))
    config.speculative_config = SimpleNamespace(rejection_sample_method="standard", enable_adaptive_verification=False)
    config.parallel_config.world_size_across_dp, config.lora_config = 1, None
    monkeypatch.setattr(v2_worker, "get_query_lens_mismatch_unsupported_backend", lambda *_, **__: None)
    runner.vllm_config, runner.attn_groups, runner.model_state = config, [], object.__new__(RenewedState)
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
    runner.cudagraph_manager = SimpleNamespace(varlen_decode=True)
    runner.max_num_reqs, runner.num_speculative_steps, runner.vocab_size = 4, K_MAX, 1000
    runner.input_buffers = SimpleNamespace(query_start_loc=torch.zeros(5, dtype=torch.int32))
    runner.chosen = runner._choice()
    assert runner.chosen.chances is one.chances
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda self, grammar: SimpleNamespace(req_ids="ab"))
    one.chances.counts, runner.chosen.admitted_B = (torch.tensor([5, 1]), 2), torch.tensor([2, 4])
    output = runner.sample_tokens(None)
    assert read_result(output).num_ready == [3, -1]
    assert read_result(output).list_admitted() == [2, 4]
    assert read_result(output).list_worth() == ([5, 1], 2)
    second = runner.sample_tokens(None)
    assert read_result(second) == StepResult(num_ready=[-1, -1])
    config.additional_config = {compat.CHOICE_KEY: False}
    assert runner._choice() is None
