"""The walk and its intervals."""

import numpy as np

from peagle.evaluate import AnswerCounts, figures, walk


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
