"""Knowledge of single drafts: its calibration, and what decoding by it gives."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.allocation import plan_step
from cluster.simulate_confidence import BOTH, CONFIDENCE, ORACLE, SHUFFLED, WORKLOAD, Bench, calibration
from cluster.simulation.confidence import ByWorkload, Calibrated, Pool, Scored, auc, load, quality, workloads
from cluster.simulation.confidence_play import Costs, Drafting, GraphPriced, GraphsOnly, at_rate, draws, fixed, play
from cluster.simulation.traces import Kind
from cluster.step_costs import CostCurves
from cluster.step_time import StepShape
from tests.step_tables import Table, flat

K_MAX, SLOPE, CONSTANT = 4, 0.8, -0.5


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def pool_of(num_answers: int, seed: int = 0, num_workloads: int = 2) -> Pool:
    """Drafts are accepted with chance sigmoid(SLOPE * log-odds + CONSTANT), whatever the workload."""
    rng = np.random.default_rng(seed)
    answers = []
    for index in range(num_answers):
        log_odds_AK = rng.normal(0.5, 2.5, (int(rng.integers(100, 200)), K_MAX))
        right_AK = rng.random(log_odds_AK.shape) < sigmoid(SLOPE * log_odds_AK + CONSTANT)
        left_A = np.arange(len(right_AK), 0, -1)  # no draft beyond the answer is right
        accepted_A = np.minimum(right_AK.cumprod(axis=1).sum(axis=1), left_A)
        answers.append(Scored(index % num_workloads, accepted_A, log_odds_AK))
    return Pool(tuple(f"w{i}" for i in range(num_workloads)), tuple(answers), K_MAX)


def test_calibration_finds_the_rule_that_made_the_drafts() -> None:
    train, test = pool_of(120).walked(), pool_of(120, seed=1).walked()
    weights_KF = Calibrated.fit(train).weights_KF
    assert weights_KF[:, 0] == pytest.approx(SLOPE, abs=0.12)
    assert weights_KF[:, 1] == pytest.approx(CONSTANT, abs=0.2)
    known, plain = quality(Calibrated.fit(train, 2), test), quality(ByWorkload.fit(train, 2), test)
    for event in ("conditional", "survival"):
        assert known[event]["auc"] > plain[event]["auc"] + 0.1
        assert known[event]["brier"] < 0.9 * plain[event]["brier"]
        assert known[event]["log_loss"] < 0.9 * plain[event]["log_loss"]


def test_drafts_behind_a_wrong_one_do_not_count() -> None:
    steps = pool_of(40).walked()
    behind_NK = steps.accepted_N[:, None] < np.arange(K_MAX)
    assert behind_NK.any()
    disturbed = replace(steps, log_odds_NK=np.where(behind_NK, 9.0, steps.log_odds_NK))
    assert np.array_equal(Calibrated.fit(steps).weights_KF, Calibrated.fit(disturbed).weights_KF)
    first, second = (quality(Calibrated.fit(steps), one)["conditional"] for one in (steps, disturbed))
    assert first == second


def test_workload_acceptance_is_counted_where_drafts_were_reached() -> None:
    log_odds_NK = np.zeros((6, 2))
    steps = replace(
        pool_of(2).walked(),
        workload_N=np.array([0, 0, 0, 0, 1, 1]),
        accepted_N=np.array([2, 1, 0, 1, 0, 0]),
        log_odds_NK=log_odds_NK,
    )
    acceptance_WK = ByWorkload.fit(steps, 2).acceptance_WK
    pooled = np.array([4 / 8, 2 / 5])  # (3 + 1) / (6 + 2), (1 + 1) / (3 + 2)
    assert acceptance_WK[0] == pytest.approx([(3 + 2 * pooled[0]) / 6, (1 + 2 * pooled[1]) / 5])
    assert acceptance_WK[1] == pytest.approx([(0 + 2 * pooled[0]) / 4, pooled[1]])


def test_auc_is_the_chance_of_the_right_order() -> None:
    rng = np.random.default_rng(2)
    chance, outcomes = rng.integers(0, 5, 60) / 4, rng.random(60) < 0.4
    pairs = [(x > y) + (x == y) / 2 for x in chance[outcomes] for y in chance[~outcomes]]
    assert auc(chance, outcomes) == pytest.approx(np.mean(pairs))
    with pytest.raises(ValueError, match="accepted and rejected"):
        auc(chance, np.ones(60, bool))


def test_fixed_k_decodes_every_token_of_an_answer_once() -> None:
    """One place in the engine, one answer again and again: tokens over steps are those of the walk."""
    answer = pool_of(1).answers[0]
    pool = Pool(("one",), (answer,), K_MAX)
    costs = Costs.of(flat(K_MAX), 100.0)
    for k in (0, 2, K_MAX):
        per_round = len(answer.walk(k))
        found = play(pool, np.zeros((1, 8), np.int64), np.zeros(1), 6 * per_round, fixed(k, costs))
        assert found.num_tokens == 6 * len(answer.accepted_A)
        assert found.seconds == pytest.approx(6 * per_round * 0.010)
        assert found.num_drafts == 6 * per_round * k
        assert set(found.visited) == {(0, at) for at in answer.walk(k)}


def test_what_is_known_of_drafts_pays_and_what_is_shuffled_does_not() -> None:
    train, test = pool_of(40).halves(np.random.default_rng(0))
    costs = Costs.of(Table(K_MAX, base_s=0.020, per_token_s=0.001), 100.0)
    runs = Bench(train, test, costs, 6, seed=0).runs()
    rates = {name: one.tokens_per_s for name, one in runs.items()}
    assert rates[ORACLE] > 1.05 * rates[BOTH] > 1.05 * 1.05 * rates[WORKLOAD]
    assert rates[CONFIDENCE] == pytest.approx(rates[BOTH], rel=0.03), "workloads do not differ"
    assert rates[SHUFFLED] < rates[WORKLOAD]
    for name in (WORKLOAD, BOTH):
        assert runs[name].expected_tokens == pytest.approx(runs[name].num_tokens, rel=0.1)
    assert runs[ORACLE].expected_tokens == pytest.approx(runs[ORACLE].num_tokens, rel=0.01)
    quality_of = calibration([(train, test)])
    losses = {name: found["survival"]["log_loss"]["value"] for name, found in quality_of.items()}
    assert losses[BOTH] < 0.9 * losses[WORKLOAD]
    assert losses[SHUFFLED] == pytest.approx(losses[WORKLOAD], rel=0.05)


def test_where_verification_is_free_everyone_verifies_everything() -> None:
    train, test = pool_of(12).halves(np.random.default_rng(0))
    runs = Bench(train, test, Costs.of(flat(K_MAX), 100.0), 64, seed=0).runs()
    deepest = runs[f"K = {K_MAX}"]
    for name in (WORKLOAD, BOTH, SHUFFLED):
        assert runs[name].tokens_per_s == pytest.approx(deepest.tokens_per_s), name


def test_the_long_run_rule_meets_the_rule_of_a_step_at_the_rate_of_that_step() -> None:
    """Dinkelbach: at the best ratio itself nothing is worth more than zero, and the best step is the same."""
    rng = np.random.default_rng(3)
    table = Table(K_MAX, per_token_s=0.001, full_graph_depths=frozenset({0, 2, K_MAX}), off_graph=1.1)
    curves = CostCurves(table)
    graphs = 0
    for _ in range(30):
        told = [tuple(row) for row in rng.random((5, K_MAX)).cumprod(axis=1).tolist()]
        plan = plan_step(told, [K_MAX] * 5, curves)
        found = at_rate(told, curves.curve(5, 0.0), curves.full_graph_depths, plan.tokens_per_s)
        assert found.tokens_per_s == pytest.approx(plan.tokens_per_s)
        assert (found.graph_depth, found.depths) == (plan.graph_depth, plan.depths)
        graphs += plan.graph_depth is not None
        slow, fast = (
            at_rate(told, curves.curve(5, 0.0), curves.full_graph_depths, factor * plan.tokens_per_s)
            for factor in (0.3, 3.0)
        )
        assert sum(slow.depths) >= sum(found.depths) >= sum(fast.depths)
    assert 0 < graphs < 30


def test_step_times_of_an_engine_that_always_drafts_and_of_one_on_graphs_only() -> None:
    table = Table(K_MAX, full_graph_depths=frozenset({0, 2, K_MAX}), off_graph=1.5)
    empty, one = StepShape(3, 3, 0), StepShape(3, 6, 1)
    assert Drafting.of(table).seconds(empty) == table.seconds(one) > table.seconds(empty)
    ragged, uniform = StepShape(3, 11, None), StepShape(3, 9, 2)
    on_graphs = GraphPriced.of(table)
    assert on_graphs.seconds(uniform) == table.seconds(uniform)
    assert table.seconds(uniform) < on_graphs.seconds(ragged) == pytest.approx(0.010 + 0.001 * 11)
    assert on_graphs.seconds(ragged) < table.seconds(ragged)
    only = CostCurves(GraphsOnly.of(table))
    rng = np.random.default_rng(4)
    for _ in range(10):
        told = [tuple(row) for row in rng.random((5, K_MAX)).cumprod(axis=1).tolist()]
        assert plan_step(told, [K_MAX] * 5, only).depths[0] in (0, 2, K_MAX)
        assert len(set(plan_step(told, [K_MAX] * 5, only).depths)) == 1


def test_workloads_and_answers_are_drawn_alike() -> None:
    pool = pool_of(9, num_workloads=3)
    drawn = draws(pool, 4, np.random.default_rng(0))
    for row in drawn:
        counts = np.bincount([pool.answers[i].workload for i in row])
        assert counts.max() - counts.min() <= 1
        assert np.ptp(np.bincount(row, minlength=9)) <= 4
    assert (drawn[0] != drawn[1]).any()


def write(path: Path, **changes: object) -> Path:
    """Two answers of two workloads."""
    arrays: dict[str, object] = {
        "accepted": np.array([2, 0, 1, 1], np.uint8),
        "num_anchors": np.array([3, 1], np.int32),
        "num_depths": np.array(2),
        "category": np.array(["qa", "coding"]),
        "temperature": np.array([0.0, 0.0]),
        "distinct_share": np.array([1.0, 0.2]),
        "log_probs": np.log([[0.5, 0.9], [0.1, 0.2], [1.0, 0.3], [0.4, 0.5]]).astype(np.float16),
    } | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def test_a_file_becomes_a_pool(tmp_path: Path) -> None:
    kinds = {name: kind for name, kind in workloads().items() if name in ("code", "questions")}
    pool = load([write(tmp_path / "traces.npz")], kinds)
    assert [pool.names[one.workload] for one in pool.answers] == ["questions", "code"]
    assert pool.answers[0].accepted_A.tolist() == [2, 0, 1]
    assert pool.answers[0].log_odds_AK[:2, 0] == pytest.approx([0.0, np.log(1 / 9)], abs=0.01)
    assert 9 < pool.answers[0].log_odds_AK[2, 0] < 10, "certainty has finite log-odds"
    questions = {"questions": Kind(("qa",))}
    assert len(load([tmp_path / "traces.npz"], questions, 0.5).answers) == 1
    with pytest.raises(ValueError, match="'code' has no answer"):
        load([tmp_path / "traces.npz"], kinds, min_distinct_share=0.5)
    with pytest.raises(ValueError, match="'code' has 1 answers"):
        pool.halves(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": None}, "no array 'log_probs'"),
        ({"log_probs": np.zeros((3, 2))}, "log_probs has shape \\(3, 2\\), not \\(4, 2\\)"),
        ({"log_probs": np.ones((4, 2))}, "at most 0"),
        ({"log_probs": np.full((4, 2), np.nan)}, "at most 0"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write(tmp_path / "traces.npz", **changes)
    with pytest.raises(ValueError, match=message) as refused:
        load([path], workloads())
    assert str(path) in str(refused.value)
