"""Traces of a real head: what the file says, and AL against the figures measured with it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.traces import (
    Answer,
    Kind,
    Mix,
    Traces,
    acceptance_length,
    even,
    mixes,
    num_steps,
    survival,
    synthetic,
)
from benchmarks.simulation.validation import carried_lengths, carried_table, compare_lengths, table

RESULTS = Path(__file__).resolve().parents[1] / "results"
REAL = RESULTS / "2026-11-21-traces-smollm2-135m.npz"
EVALUATION = RESULTS / "2026-11-21-evaluation-smollm2-135m-h200.json"


def write(path: Path, **changes: object) -> Path:
    """A file of two answers, with arrays replaced, or left out where None."""
    arrays: dict[str, object] = {
        "accepted": np.array([2, 0, 1, 3], np.uint8),
        "num_anchors": np.array([3, 1], np.int32),
        "num_depths": np.array(4),
        "category": np.array(["qa", "math"]),
        "temperature": np.array([0.0, 1.0]),
        "distinct_share": np.array([1.0, 0.2]),
    } | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def test_a_file_becomes_answers(tmp_path: Path) -> None:
    traces = Traces.load(write(tmp_path / "traces.npz"))
    assert traces.max_draft_tokens == 4
    assert traces.answers == (Answer("qa", 0.0, 1.0, b"\x02\x00\x01"), Answer("math", 1.0, 0.2, b"\x03"))
    assert traces.without_repetition(0.5).answers == traces.answers[:1]
    assert [one.accepted for one in traces.up_to(1).answers] == [b"\x01\x00\x01", b"\x01"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": None}, "has no array 'temperature'"),
        ({"category": np.array(["qa"])}, "category has 1 entries for 2 answers"),
        ({"num_anchors": np.array([3, 2], np.int32)}, "num_anchors add up to 5, but accepted has 4"),
        ({"num_depths": np.array(2)}, "accepted holds 3, above num_depths 2"),
        ({"num_depths": np.array(0)}, "num_depths is 0"),
        ({"accepted": np.zeros(0, np.uint8), "num_anchors": np.zeros(2, np.int32)}, "holds no answer"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write(tmp_path / "traces.npz", **changes)
    with pytest.raises(ValueError, match=message) as refused:
        Traces.load(path)
    assert str(path) in str(refused.value)


def test_what_is_no_npz_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not arrays")
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "single.npy", np.zeros(3))
    for name in ("text.npz", "empty.npz", "single.npy", "absent.npz"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read"):
            Traces.load(tmp_path / name)


def test_steps_visit_the_anchors_that_decoding_visits() -> None:
    accepted = bytes([2, 3, 0, 1, 3, 0])
    # Anchor 0 accepts 2 and goes on at 3, which accepts 1 and goes on at 5, which accepts none.
    assert num_steps(accepted, 3) == 3
    assert num_steps(accepted, 1) == 4
    assert num_steps(accepted, 0) == 6
    answer = Answer("qa", 0.0, 1.0, accepted)
    assert acceptance_length([answer], 3) == 2.0
    assert survival([answer], 3) == (2 / 3, 1 / 3, 0.0)
    with pytest.raises(ValueError, match="no answers"):
        acceptance_length([], 3)


def test_lengths_are_those_that_were_measured() -> None:
    """The evaluation that wrote the traces computed AL on its own, with torch's drafter at hand."""
    compared = compare_lengths(Traces.load(REAL), EVALUATION)
    assert {one.group for one in compared} >= {"all", "humaneval", "translation"}
    assert {one.k for one in compared} == set(range(1, 9))
    assert {one.temperature for one in compared} == {0.0, 1.0}
    for one in compared:
        assert one.same_answers, one
        assert abs(one.difference) < 2e-4, one  # the results have four decimals
    assert "404 in the traces" not in table(compared)


def engine_results(path: Path, answers: list[tuple[str, int, float]], k: int = 3) -> Path:
    groups = {name: {"num_answers": num, "tokens_per_step": length} for name, num, length in answers}
    path.write_text(json.dumps({"engine": {str(k): groups}, "temperature": 0.0}))
    return path


def test_engine_results_are_compared_by_group_and_weighted_as_they_were(tmp_path: Path) -> None:
    traces = Traces.load(REAL)
    qa, math = (acceptance_length(traces.select(Kind((name,))), 3) for name in ("qa", "math"))
    path = engine_results(tmp_path / "run.json", [("qa", 40, qa), ("math", 5, math * 1.1), ("all", 45, 2.5)])
    found = {one.group: one for one in compare_lengths(traces, path)}
    assert found["qa"].difference == pytest.approx(0)
    assert found["math"].difference == pytest.approx(1 / 1.1 - 1)
    both = traces.select(Kind(("qa", "math")))
    assert found["all"].predicted == pytest.approx(acceptance_length(both, 3)), "other categories had no part in it"
    assert found["all"].same_answers
    some = engine_results(tmp_path / "some.json", [("qa", 2, qa), ("all", 2, qa)])
    assert not compare_lengths(traces, some)[0].same_answers


def test_the_survival_of_a_real_run_is_carried_to_its_lesser_depths(tmp_path: Path) -> None:
    """At 2, half the steps accept nothing and half accept both. Were tokens either hard or easy, those 2 tokens a step
    would take 1/2 + 1/2 * 3/2 steps at 1; the plain sum is 1.5 tokens a step."""
    at_two = {"num_answers": 2, "tokens_per_step": 1.9, "acceptance_length": 2.0, "survival": [0.5, 0.5]}
    at_one = {"num_answers": 2, "tokens_per_step": 1.5, "acceptance_length": 1.6, "survival": [0.6]}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"engine": {"1": {"qa": at_one, "none": {}}, "2": {"qa": at_two}}}))
    (one,) = carried_lengths(path)
    assert (one.group, one.from_k, one.k, one.real, one.plain) == ("qa", 2, 1, 1.6, 1.5)
    assert one.predicted == pytest.approx(1 / 3 * 1.5 + 2 / 3 * 2 / (0.5 + 0.5 * 1.5))
    assert "qa" in carried_table([one])
    of_evaluation = [one for one in carried_lengths(EVALUATION) if one.group == "all"]
    assert {(one.temperature, one.k) for one in of_evaluation} == {(t, k) for t in (0.0, 1.0) for k in range(1, 8)}
    assert max(abs(one.difference) for one in of_evaluation) < 0.03


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "has neither 'engine'"),
        ('{"engine": {"3": {"poetry": {"num_answers": 1, "tokens_per_step": 2.0}}}}', "none of its 1 figures"),
        ('{"engine": {"3": 4}}', "not results of"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        compare_lengths(Traces.load(REAL), path)
    assert str(path) in str(refused.value)


def test_halves_share_no_answer_and_have_every_category() -> None:
    traces = Traces.load(REAL)
    first, second = traces.halves()
    groups = [Counter((one.category, one.temperature) for one in half.answers) for half in (first, second)]
    assert groups[0] + groups[1] == Counter((one.category, one.temperature) for one in traces.answers)
    assert set(groups[0]) == set(groups[1])
    assert all(0 <= groups[0][name] - groups[1][name] <= 1 for name in groups[0])
    assert not {id(one) for one in first.answers} & {id(one) for one in second.answers}


def test_every_mix_can_be_drawn_from_either_half() -> None:
    for half in Traces.load(REAL).halves():
        for mix in mixes().values():
            drawn = half.draw(mix, 200, np.random.default_rng(0))
            assert {label for label, _ in drawn} == set(mix.kinds)
            assert all(mix.kinds[label].holds(answer) for label, answer in drawn)


def test_a_cut_answer_is_that_of_a_run_that_stopped_there() -> None:
    traces = Traces([Answer("qa", 0.0, 1.0, bytes([2, 3, 0, 3, 1, 0])), Answer("qa", 0.0, 1.0, b"\x01")], 4)
    # Five tokens: the first has no anchor, and the draft at anchor 3 has but one token left to be right about.
    assert [one.accepted for one in traces.cut(5).answers] == [bytes([2, 3, 0, 1]), b"\x01"]
    assert traces.cut(7).answers == traces.answers
    real = Traces.load(REAL)
    short = real.cut(64)
    assert max(len(one.accepted) for one in short.answers) == 63
    assert all(one.accepted[p] <= len(one.accepted) - p for one in short.answers for p in range(len(one.accepted)))
    with pytest.raises(ValueError, match="max_tokens must be at least 2"):
        traces.cut(1)


def test_a_mix_drifts() -> None:
    drawn = Traces.load(REAL).draw(mixes()["code-to-chat"], 1000, np.random.default_rng(0))
    code = [label == "code" for label, _ in drawn]
    assert sum(code[:200]) > 120
    assert sum(code[-200:]) < 80


def test_a_workload_without_answers_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"workload 'poems' has no answer: none of category poetry at temperature 0\.5"
    ):
        Traces.load(REAL).draw(even({"poems": Kind(("poetry",), 0.5)}), 1, np.random.default_rng(0))


@pytest.mark.parametrize("shares", [{"a": 1.0}, {"a": 1.0, "b": -1.0}, {"a": 0.0, "b": 0.0}])
def test_shares_that_make_no_mix_are_refused(shares: dict[str, float]) -> None:
    kinds = {"a": Kind(("qa",)), "b": Kind(("math",))}
    with pytest.raises(ValueError, match="shares"):
        Mix(kinds, shares)
    with pytest.raises(ValueError, match="late_shares"):
        Mix(kinds, {"a": 1.0, "b": 1.0}, shares)


def test_synthetic_answers_are_accepted_as_said_at_any_depth() -> None:
    said = {"code": (0.88, 0.77, 0.66), "chat": (0.64, 0.39, 0.23)}
    traces = synthetic(said, seed=0)
    assert traces.max_draft_tokens == 3
    for name, of in said.items():
        answers = traces.select(Kind((name,)))
        assert survival(answers, 3) == pytest.approx(of, abs=0.012)
        # Acceptance does not depend on where a draft starts, so the plain sum is AL at every K.
        assert [acceptance_length(answers, k) for k in (1, 2)] == pytest.approx([1 + of[0], 1 + sum(of[:2])], rel=0.012)
        lengths = {len(one.accepted) for one in answers}
        assert (min(lengths) < 135, max(lengths) > 375, len(lengths) > 150) == (True, True, True)
    assert synthetic(said, seed=0).answers == traces.answers != synthetic(said, seed=1).answers


@pytest.mark.parametrize("of", [(0.5, 0.6), (1.2, 0.5), (0.5,), (0.5, float("nan")), (0.5, -0.1)])
def test_synthetic_survivals_that_cannot_be_are_refused(of: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="survival of 'odd' must be 2 falling probabilities"):
        synthetic({"code": (0.9, 0.8), "odd": of}, seed=0)
