"""A tensor-parallel target with a remote drafter: one rank sends, all ranks verify the same drafts."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from peagle.checkpoint import save_head
from peagle.config import DrafterConfig
from peagle.heads import prepare_head
from tests.engine.test_draft_engine import strong_head
from tests.support.engine_cases import engine_settings
from tests.support.engine_harness import Job, Result, RunningEngine, float32_kwargs
from tests.support.remote_harness import RemoteEngine, drafter_process
from tests.support.small_run import write_small_run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks want a core each"),
    pytest.mark.skipif(not current_platform.is_cpu(), reason="the drafter process of the tests is a CPU process"),
]

NUM_TOKENS, K_MAX, VOCAB_SIZE = 24, 3, 64
SETTINGS: dict[str, Any] = engine_settings(40) | {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
}


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("run"), head_dim=32) / "target"


@pytest.fixture(scope="module")
def head(small_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    raw = json.loads((small_target / "config.json").read_text())
    config = DrafterConfig.for_target(raw, num_layers=1, ptd_token_id=VOCAB_SIZE - 1, num_depths=K_MAX)
    return prepare_head(save_head(folder / "strong", config, strong_head(config)), small_target, folder / "cache")


@pytest.fixture(scope="module")
def two_ranks(environment: None) -> Iterator[None]:
    """One memory node: vLLM then wants to be told which cores a rank gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 17, 40, 120)]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]], small_target: Path, two_ranks: None) -> list[Result]:
    jobs = [Job(prompt, NUM_TOKENS, sampling={"detokenize": False}) for prompt in prompts]
    with RunningEngine(float32_kwargs(small_target, None, SETTINGS)) as engine:
        return engine.run(jobs)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_one_rank_sends_and_all_verify(
    prompts: list[list[int]], reference: list[Result], small_target: Path, head: Path, is_async: bool
) -> None:
    with (
        drafter_process(head, small_target) as drafter,
        RemoteEngine(small_target, head, k_max=K_MAX, is_async=is_async, extra=SETTINGS) as engine,
    ):
        engine.connect(drafter)
        jobs = [Job(prompt, NUM_TOKENS, sampling={"detokenize": False}) for prompt in prompts]
        for _ in range(2):
            for result, expected in zip(results := engine.run(jobs), reference, strict=True):
                assert result.tokens == expected.tokens
        assert all(one.drafting is not None and one.drafting.counts.num_steps > 10 for one in results)
        sender, other = engine.call_workers("remote_report")
        assert other == {}
        assert [link["counters"]["timeouts"] for link in sender["links"]] == [0]
        assert sender["links"][0]["counters"]["answered"] > NUM_TOKENS
