"""What drafts and graphs go with: the table of docs/drafting.md against the code's decisions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from peagle.vllm import compat
from peagle.vllm.engine_settings import REMOTE_KEY
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
