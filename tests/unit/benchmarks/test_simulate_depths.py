"""Learned K, by the product's own code, against every fixed K: on engines of formulas and on measured ones."""

import pytest

from benchmarks.simulate_depths import (
    ENGINES,
    MIXES,
    Answer,
    Fixed,
    Learned,
    Load,
    TableEngine,
    compare,
    learned_share,
    load_answers,
    select,
    simulate,
)
from tests.unit.cluster.test_step_latency import cpu, dear_drafter, gpu

ANSWERS = load_answers()
MEASURED = {name: TableEngine.load(path) for name, path in ENGINES.items()}
ENGINE = {"gpu": gpu, "slow cpu": cpu, "dear cpu": dear_drafter, **MEASURED}


def share(engine: str, mix: str, load: Load) -> float:
    """Of learned K, in the best fixed K's rate."""
    answers = {name: select(ANSWERS, *kind) for name, kind in MIXES[mix].items()}
    return learned_share(compare(ENGINE[engine], answers, load, lambda: Learned("cpu" not in engine)))


@pytest.mark.parametrize(
    ("engine", "concurrency", "mix"),
    [
        ("gpu", 32, "code"),
        ("h200", 32, "code-chat"),
        pytest.param("slow cpu", 8, "code-chat", marks=pytest.mark.long),
        pytest.param("cpu", 4, "code", marks=pytest.mark.long),
    ],
)
def test_from_the_guess_alone_learned_k_is_near_the_best_fixed_k_after_its_first_steps(engine, concurrency, mix):
    load = Load(concurrency, num_requests=60 + 6 * concurrency, warm_share=0.0, warm_steps=50)
    assert share(engine, mix, load) > 0.95


@pytest.mark.parametrize(("engine", "concurrency", "mix"), [("gpu", 64, "chat"), ("slow cpu", 16, "code-chat")])
def test_in_the_long_run_learned_k_is_the_best_fixed_k_or_better(engine, concurrency, mix):
    found = share(engine, mix, Load(concurrency, num_requests=10 * concurrency))
    assert found > (1.03 if mix == "code-chat" else 0.98)


@pytest.mark.parametrize(("concurrency", "least"), [(2, 1.1), (4, 1.04), (8, 0.98)])
def test_steps_without_drafts_are_run_where_they_are_faster(concurrency, least):
    """The best fixed K is 4 at 2 requests and 0 at 4 and 8, where drafting is half of a step."""
    assert share("dear cpu", "code-chat", Load(concurrency, num_requests=80)) > least


def test_a_run_counts_the_tokens_of_the_answers():
    answer = Answer("a", 0.0, bytes([2, 0, 1, 1, 0]))
    load = Load(1, 10, prompt_tokens=16, jitter=0.0, warm_share=0.0)

    def engine(num_requests: int, num_tokens: int, prompt_tokens: int = 0, is_drafted: bool | None = None) -> float:
        return 1.0 + prompt_tokens

    # The prompt's step gives one token; at K = 1 the anchors are 0, 2, 4.
    assert simulate(engine, {"a": [answer]}, Fixed(1), load) == pytest.approx((1 + 5) / (17 + 3))
