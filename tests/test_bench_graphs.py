"""The measuring script of the CUDA graphs: what it makes of recorded steps, and when it says that one is wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import ENGINES, K_MAX, SURVIVAL, TIERS, depths_of, settings_of, steady
from benchmarks.graphs import compare_texts, ratios, timing_failures
from benchmarks.models import write_head
from peagle.checkpoint import check_head
from peagle.vllm.engine import GRAPH_WORKER, GRAPHS_KEY
from peagle.vllm.graph_worker import RecordedStep
from peagle.vllm.graphs import GraphSettings
from tests.head_factory import TARGET


def recorded(shapes: Sequence[tuple[int, int]], seconds: float = 0.01) -> list[RecordedStep]:
    return [
        (place * seconds, "FULL" if tokens % 4 == 0 else "PIECEWISE", requests, tokens, tokens)
        for place, (requests, tokens) in enumerate(shapes)
    ]


def test_steady_leaves_out_prompts_and_the_end() -> None:
    prompts, batch, end = [(2, 256)] * 3, [(2, 8)] * 50, [(1, 4)] * 20
    found = steady(recorded([*prompts, *batch, *end]), [3, 3])
    assert found == {"seconds": pytest.approx(0.01), "num_steps": 50, "share": 1.0, "graphs": {"FULL/8": 50}}


def test_steady_counts_the_time_of_other_steps_and_says_their_share() -> None:
    batch = [(2, 8)] * 20
    found = steady(recorded([*batch, (2, 7), (2, 5), *batch]), [3, 3])
    assert found["num_steps"] == 42
    assert found["share"] == pytest.approx(40 / 42, abs=1e-4)
    assert found["graphs"] == {"FULL/8": 40, "PIECEWISE/7": 1, "PIECEWISE/5": 1}


def test_too_few_steady_steps_are_no_measurement() -> None:
    with pytest.raises(ValueError, match=r"19 of 60 steps have 2 requests and 8 tokens"):
        steady(recorded([*[(2, 8)] * 19, *[(1, 4)] * 41]), [3, 3])


def test_depths_of() -> None:
    assert depths_of("3", 2) == [3, 3]
    assert depths_of("7+1", 5) == [7, 1, 7, 1, 7]


def row(
    label: str, seconds: float, graphs: dict[str, int], num_requests: int = 8, share: float = 1.0
) -> dict[str, Any]:
    batch = {"label": label, "num_requests": num_requests}
    return batch | {"seconds": seconds, "share": share, "num_steps": 100, "graphs": graphs}


def test_ratios_compare_with_the_engine_built_for_k() -> None:
    runs = {
        "k7-tiers": {"rows": [row("3", 0.0103, {"FULL/32": 100}), row("7", 0.02, {"FULL/64": 100})]},
        "k7": {"rows": [row("3", 0.0206, {"PIECEWISE/32": 100})]},
        "k3": {"rows": [row("3", 0.0101, {"FULL/32": 100})]},
    }
    three, seven = ratios(runs)
    assert (three["ratio_to_no_tiers"], three["ratio_to_built_for_k"]) == (0.5, pytest.approx(1.0198, abs=1e-4))
    assert three["goal_met"] is True
    assert "goal_met" not in seven
    runs["k3"]["rows"][0]["seconds"] = 0.0099
    assert ratios(runs)[0]["goal_met"] is False


def test_a_step_on_another_graph_is_a_failure() -> None:
    good = {"k7-tiers": {"rows": [row("3", 0.01, {"FULL/32": 100}), row("7+1", 0.01, {"PIECEWISE/40": 100})]}}
    assert timing_failures(good) == []
    for bad in (row("3", 0.01, {"PIECEWISE/32": 100}), row("3", 0.01, {"FULL/32": 100}, share=0.5)):
        (failure,) = timing_failures({"k7-tiers": {"rows": [bad]}})
        assert failure.startswith("k7-tiers, K = 3, 8 requests: ")
    assert timing_failures({"k7": {"rows": [row("3", 0.01, {"PIECEWISE/32": 100})]}}) == []
    assert len(timing_failures({"k3": {"rows": [row("3", 0.01, {"PIECEWISE/32": 100})]}})) == 1


def texts(tokens: list[int], num_request_steps: int) -> dict[str, Any]:
    graphs = {"graphs": {"FULL/4": num_request_steps}, "num_request_steps": num_request_steps}
    return {"rows": [{"label": "3", "batching": "alone", "tokens": [tokens], "prompts": [[1, 2]], **graphs}]}


def test_other_tokens_pass_only_as_ties() -> None:
    asked = []

    def gap(tokens: Sequence[int], one: int, other: int) -> float:
        asked.append((list(tokens), one, other))
        return -0.1 if one == 9 else 3.0

    same = {"text": texts([5, 6, 7, 8], 3), "text-tiers": texts([5, 6, 7, 8], 3)}
    rows, failures = compare_texts(same, gap)
    assert (rows[0]["num_identical"], failures, asked) == (1, [], [])
    tie = {"text": texts([5, 6, 7, 8], 3), "text-tiers": texts([5, 6, 9, 1], 3)}
    rows, failures = compare_texts(tie, gap)
    assert (rows[0]["num_identical"], rows[0]["gaps_nats"], failures) == (0, [0.1], [])
    assert asked == [([1, 2, 5, 6], 9, 7)]
    wrong = {"text": texts([5, 6, 7, 8], 3), "text-tiers": texts([5, 4, 9, 1], 3)}
    assert "3.0 nats less likely" in compare_texts(wrong, gap)[1][0]


def test_drafts_that_are_accepted_less_with_tiers_are_a_failure() -> None:
    slower = {"text": texts([5, 6, 7, 8], 3), "text-tiers": texts([5, 6, 7, 8], 4)}
    (failure,) = compare_texts(slower, lambda tokens, one, other: 0.0)[1]
    assert "1.000 tokens a step, 1.500 without" in failure


@pytest.mark.parametrize("name", ["k7-tiers", "k7", "k3", "k5"])
def test_engine_settings(name: str, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", K_MAX, TARGET, num_layers=1, mlp_size=48, draft_vocab_size=10)
    check_head(head, TARGET)
    engine = ENGINES[name]
    kwargs = settings_of(engine, tmp_path, head)
    assert kwargs["worker_cls"] == GRAPH_WORKER
    found = GraphSettings.from_config(kwargs["additional_config"], engine.max_draft_tokens)
    assert found.depths == (TIERS if engine.tiers else ())
    speculative = kwargs["speculative_config"]
    assert speculative["num_speculative_tokens"] == engine.max_draft_tokens
    assert speculative["synthetic_acceptance_rates"] == list(SURVIVAL[: engine.max_draft_tokens])
    assert GRAPHS_KEY in kwargs["additional_config"]
