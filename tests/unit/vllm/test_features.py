"""What drafts and graphs go with: the table of docs/drafting.md against the code's decisions, and a step's graph."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from peagle.vllm import compat
from peagle.vllm.engine_settings import REMOTE_KEY, capture_sizes
from peagle.vllm.speculator import MIN_PACKED_REQUESTS, DraftGraphs
from peagle.vllm.v2_worker import PEagleRunner, RaggedModelRunner, StepGraphs, runner_class
from tests.support.graph_config import graph_config, outside_an_engine
from tests.support.scheduler_run import SchedulerRun, scheduler_config

K_MAX = 7
ENGINES: dict[str, dict[str, Any]] = {
    "none of these": {},
    "LoRA": {"lora_config": SimpleNamespace()},
    "tensor parallelism": {"tensor_parallel_size": 2, "world_size_across_dp": 2},
    "pipeline parallelism": {"pipeline_parallel_size": 2, "world_size_across_dp": 2},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "none of these": {},
    "a request with a grammar": {"has_grammar": True},
    "a request with log probabilities": {"logprobs": 2},
}


def read_table() -> dict[str, dict[str, str]]:
    """Feature -> column -> cell."""
    lines = (Path(__file__).parents[3] / "docs" / "drafting.md").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| feature |"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


TABLE = read_table()


def engine(**changes: Any) -> Any:
    """What decisions read of vLLM's configuration, of an engine with a P-EAGLE head."""
    config = graph_config(48, 8192, [1, 2, 4, 8, 512], num_speculative_tokens=K_MAX)
    config.speculative_config = SimpleNamespace(
        method="eagle3",
        parallel_drafting=True,
        rejection_sample_method="standard",
        uses_dynamic_speculative_decoding=lambda: False,
    )
    for name, value in changes.items():
        owners = (config, config.parallel_config, config.model_config, config.speculative_config)
        owner = next((one for one in owners if hasattr(one, name)), config)
        setattr(owner, name, value)
    return config


def test_the_table_has_a_row_for_each_feature() -> None:
    assert TABLE.keys() == ENGINES.keys() | REQUESTS.keys()


@pytest.mark.parametrize("feature", ENGINES)
def test_an_engine_does_what_its_row_says(feature: str) -> None:
    config = engine(**ENGINES[feature])
    loras = [0, 1] if config.lora_config else None
    kinds = dict(decode_query_len=1 + K_MAX, varlen_decode=True, lora_capture_cases=loras)
    with outside_an_engine(cudagraph_utils):
        graphs: Any = StepGraphs(config, "cuda", CUDAGraphMode.FULL_AND_PIECEWISE, **kinds)
    graphs._graphs_captured = True
    dispatched = graphs.dispatch(3, 6, None, int(bool(config.lora_config)), max_query_len=1 + K_MAX)
    found = {
        "drafts": runner_class(config, is_last_stage=True) is PEagleRunner,
        "graphs of decoding": dispatched.cg_mode == CUDAGraphMode.FULL,
        "graphs of prompts": compat.replays_prompts(config),
        "graph of verification": compat.captures_verification(config),
    }
    assert {column: "yes" if is_on else "no" for column, is_on in found.items()} == TABLE[feature]


@pytest.mark.parametrize("feature", REQUESTS)
def test_a_request_gets_what_its_row_says(feature: str, target_dir: Path, head_dir: Path, environment: None) -> None:
    run = SchedulerRun(scheduler_config(target_dir, head_dir, K_MAX), is_async=True)
    run.add("plain")
    run.add("other", **REQUESTS[feature])
    run.step()
    steps = [run.step() for _ in range(3)]
    assert (TABLE[feature]["drafts"] == "yes") == all(step.drafts["other"] > 0 for step in steps)


@pytest.mark.parametrize(
    ("change", "replays"),
    [
        ({"additional_config": {REMOTE_KEY: {}}}, True),
        ({"additional_config": {compat.PROMPT_GRAPHS_KEY: False}}, False),
        ({"rejection_sample_method": "synthetic"}, True),
        ({"speculative_config": None}, True),
        ({"kv_transfer_config": object()}, False),
        ({"data_parallel_size": 2, "world_size_across_dp": 2}, False),
        ({"decode_context_parallel_size": 2}, False),
        ({"prefill_context_parallel_size": 2}, False),
        ({"is_multimodal_model": True}, False),
        ({"is_encoder_decoder": True}, False),
        ({"use_mla": True}, False),
        ({"rswa_window": 128}, False),
    ],
)
def test_other_settings(change: dict[str, Any], replays: bool) -> None:
    assert compat.replays_prompts(engine(**change)) == replays


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_a_wrong_setting_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=compat.PROMPT_GRAPHS_KEY):
        compat.replays_prompts(engine(additional_config={compat.PROMPT_GRAPHS_KEY: wrong}))


def test_runners_by_head_and_pipeline_stage() -> None:
    assert runner_class(engine(), is_last_stage=False) is RaggedModelRunner
    assert runner_class(engine(parallel_drafting=False), is_last_stage=True) is None
    assert runner_class(engine(method="dflash"), is_last_stage=True) is None
    assert runner_class(engine(speculative_config=None), is_last_stage=True) is RaggedModelRunner
    assert runner_class(engine(speculative_config=None, use_mla=True), is_last_stage=True) is None


# ---- which graph a step of the V2 runner and a pass of the drafter get; the host chooses, so no GPU is needed


K_MAX, MAX_REQUESTS = 7, 48
SIZES = capture_sizes(MAX_REQUESTS * (1 + K_MAX))
MODE = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture
def config() -> Iterator[Any]:
    """What graphs read of vLLM's configuration."""
    with outside_an_engine(cudagraph_utils):
        yield graph_config(MAX_REQUESTS, 8192, SIZES, num_speculative_tokens=K_MAX)


def captured(graphs: Any) -> Any:
    """The graphs, as after their capture."""
    graphs._graphs_captured = True
    return graphs


def step_graphs(config: Any, mode: CUDAGraphMode = MODE, **changes: Any) -> StepGraphs:
    settings = {"decode_query_len": 1 + K_MAX, "varlen_decode": True, **changes}
    return captured(StepGraphs(config, "cuda", mode, **settings))


def draft_graphs(config: Any, *, is_ragged: bool = True, packs_prompts: bool = True) -> DraftGraphs:
    kinds = {"is_ragged": is_ragged, "packs_prompts": packs_prompts}
    return captured(DraftGraphs(config, "cuda", MODE, decode_query_len=2 * K_MAX, **kinds))


def splits(count: int, longest: int) -> list[list[int]]:
    """Rows of each request of some batches."""
    draw = random.Random(longest)
    return [[draw.randint(1, longest) for _ in range(draw.randint(1, MAX_REQUESTS))] for _ in range(count)]


@pytest.mark.parametrize(("k_max", "num_loras"), [(K_MAX, 0), (0, 0), (0, 2)])
@pytest.mark.parametrize("max_num_seqs", [1, MAX_REQUESTS])
def test_every_step_has_a_full_graph_with_room_for_it(config: Any, k_max: int, num_loras: int, max_num_seqs: int):
    """With a drafter, without, and with adapters. A replay is planned for what was captured: steps that only decode for
    as many rows as a request has there, others, however short, for all rows."""
    config.scheduler_config.max_num_seqs = max_num_seqs
    graphs, num_beyond = step_graphs(config, decode_query_len=1 + k_max, lora_capture_cases=[0, 2]), 0
    for longest in (1 + k_max, 40, 400):
        for rows in splits(100, longest):
            rows = rows[:max_num_seqs]
            is_decode = max(rows) <= 1 + k_max
            # vLLM says no longest query of a step with prompts.
            for said in {1 + k_max if is_decode else None, None}:
                desc = graphs.dispatch(len(rows), sum(rows), None, num_loras, max_query_len=said)
                if sum(rows) > SIZES[-1]:
                    assert desc.cg_mode == CUDAGraphMode.NONE
                    num_beyond += 1
                    continue
                assert desc.cg_mode == CUDAGraphMode.FULL
                assert desc.num_tokens == min(size for size in SIZES if size >= sum(rows))
                assert desc.num_reqs >= len(rows)
                assert desc.max_query_len == said
                assert desc.num_active_loras == num_loras
    assert 0 < num_beyond < 150 or max_num_seqs == 1


def test_a_mode_without_full_graphs_is_left_alone(config: Any) -> None:
    graphs = step_graphs(config, CUDAGraphMode.PIECEWISE)
    assert graphs.dispatch(2, 60, None, 0).cg_mode == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("longest", [1 + K_MAX, 40, 400])
@pytest.mark.parametrize(("is_ragged", "packs_prompts"), [(True, True), (True, False), (False, False)])
def test_every_pass_has_a_graph_with_room_for_it(config: Any, longest: int, is_ragged: bool, packs_prompts: bool):
    graphs = draft_graphs(config, is_ragged=is_ragged, packs_prompts=packs_prompts)
    draw, kinds = random.Random(longest), set()
    for rows in splits(300, longest):
        depth, is_decode = draw.randint(1, K_MAX), max(rows) <= 1 + K_MAX
        num_rejected = draw.randint(0, sum(rows) - len(rows)) if is_decode else 0
        desc = graphs.full_graph(len(rows), sum(rows), depth, max(rows), num_rejected)
        num_rows = max(sum(rows), len(rows) * depth, sum(rows) + len(rows) * (depth - 1) - num_rejected)
        if desc is None:
            assert not is_decode
            assert not packs_prompts or num_rows > capture_sizes(2 * K_MAX * MAX_REQUESTS)[-1]
            continue
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
