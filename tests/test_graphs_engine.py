"""A real engine whose batches are padded onto tiers: output unchanged, and the steps are where they should be.

Padding is the part of the graphs that can change tokens: rows that belong to nobody stand behind every smaller batch.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.platforms import current_platform

from peagle.vllm.engine import GRAPHS_KEY
from tests.engine_cases import K_MAX, NUM_SHORT, PROMPT_LENGTHS, TEXT, check_counts, engine_settings
from tests.engine_harness import Job, Result, RunningEngine, drafted_kwargs, reference_results

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="the padded worker is a CPU worker"),
]

TIERS = (0, 3, K_MAX)
MAX_PADDING_TOKENS = 24
MIXES = [(3,), (0,), (2,), (K_MAX,), (0, 3, 5, 1)]


class ReportingEngine(RunningEngine):
    """An engine that says on which graphs its steps ran."""

    def steps(self) -> dict[str, int]:
        (report,) = self._run(self._client.collective_rpc("graph_report"))
        steps: dict[str, int] = report["steps"]
        return steps


@pytest.fixture(scope="module")
def prompts(target_dir: Path) -> list[list[int]]:
    """Short ones: prompts of one token and prompt chunks meet decodes on the tiers."""
    tokens = AutoTokenizer.from_pretrained(target_dir)(TEXT * 2)["input_ids"]
    return [tokens[5 * place : 5 * place + length] for place, length in enumerate(PROMPT_LENGTHS[:12])]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]], target_dir: Path, environment: None) -> list[Result]:
    """Output of the target without drafts and without padding."""
    return reference_results(target_dir, engine_settings(90), [Job(prompt, NUM_SHORT) for prompt in prompts])


@pytest.fixture(scope="module", params=["sync", "async"])
def engine(
    request: pytest.FixtureRequest, reference: list[Result], target_dir: Path, head_dir: Path, environment: None
) -> Iterator[ReportingEngine]:
    kwargs = drafted_kwargs(target_dir, head_dir, K_MAX, engine_settings(90))
    graphs = {"depths": list(TIERS), "max_padding_tokens": MAX_PADDING_TOKENS}
    kwargs |= {"worker_cls": "tests.padded_cpu_worker.PaddedCPUWorker", "additional_config": {GRAPHS_KEY: graphs}}
    running = ReportingEngine(kwargs, is_async=request.param == "async")
    yield running
    running.shutdown()


@pytest.mark.parametrize("ks", MIXES, ids=str)
def test_padding_changes_no_token(
    engine: ReportingEngine, prompts: list[list[int]], reference: list[Result], ks: tuple[int, ...]
) -> None:
    before = engine.steps()
    depths = [ks[place % len(ks)] for place in range(len(prompts))]
    results = engine.run([Job(prompt, NUM_SHORT, k=k) for prompt, k in zip(prompts, depths, strict=True)])
    for result, expected, k in zip(results, reference, depths, strict=True):
        assert result.tokens[0] == expected.tokens[0]
        check_counts(result, k)
    ran = {graph: count - before.get(graph, 0) for graph, count in engine.steps().items()}
    on_tiers = {graph.split("/")[1] for graph, count in ran.items() if graph.startswith("FULL/") and count > 0}
    if len(ks) == 1:
        assert on_tiers >= {str(1 + next(tier for tier in TIERS if tier >= ks[0]))}
    else:
        assert on_tiers  # ends of the batch are small enough for a tier
