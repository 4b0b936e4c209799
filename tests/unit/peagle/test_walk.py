"""The walk and its intervals."""

import numpy as np

from peagle.evaluate import AnswerCounts, figures, walk


def random_answers(rng: np.random.Generator, num_answers: int, chance: np.ndarray) -> list[np.ndarray]:
    """Anchors whose drafts are right with the given chance of each answer, independently, at most 4 of them."""
    lengths = rng.integers(20, 60, num_answers)
    return [(rng.random((n, 4)) < p).cumprod(axis=1).sum(axis=1) for n, p in zip(lengths, chance, strict=True)]


def test_walk_visits_the_anchors_that_decoding_visits() -> None:
    accepted_A = np.array([2, 3, 0, 1, 3, 0])
    # Anchor 0 accepts 2 and goes on at 3, which accepts 1 and goes on at 5, which accepts none.
    assert walk(accepted_A, 3).tolist() == [2, 1, 0]
    assert walk(accepted_A, 1).tolist() == [1, 0, 1, 0]
    assert walk(accepted_A[:0], 3).tolist() == []
    counts = AnswerCounts.from_accepted([accepted_A, np.array([0, 1])], 3)
    assert counts.num_steps.tolist() == [[4, 3, 3], [2, 2, 2]]
    assert counts.num_survived.tolist() == [[2, 1, 0], [1, 0, 0]]
    found = figures(counts)
    assert (found["num_answers"], found["num_tokens"]) == (2, 8)
    assert found["acceptance_length"] == {"1": 1.3333, "2": 1.6, "3": 1.6}
    assert found["survival"] == [0.6, 0.2, 0.0]
    assert "acceptance_length_95" not in figures(counts.select(np.array([1])))


def test_intervals_hold_the_true_value_as_often_as_they_say() -> None:
    """Answers differ in how predictable they are, as real ones do: an interval over tokens would be far too narrow."""
    rng = np.random.default_rng(0)

    def data_set(num_answers: int) -> AnswerCounts:
        return AnswerCounts.from_accepted(random_answers(rng, num_answers, rng.uniform(0.2, 0.9, num_answers)), 4)

    truth = figures(data_set(10_000))
    hits = {"length": 0, "survival": 0}
    for _ in range(120):
        found = figures(data_set(40))
        low, high = found["acceptance_length_95"]["4"]
        hits["length"] += low <= truth["acceptance_length"]["4"] <= high
        low, high = found["survival_95"][2]
        hits["survival"] += low <= truth["survival"][2] <= high
    # 95% of 120 is 114, less what a percentile interval of 40 answers loses; four standard deviations are 10.
    assert all(102 <= count <= 120 for count in hits.values()), hits
