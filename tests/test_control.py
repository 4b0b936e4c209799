"""What the control makes of the targets' reports: K where nobody fixed one, a document, and a state to restore."""

import json
import logging
import math
from dataclasses import replace

import pytest

from cluster.acceptance import Counts, Report
from cluster.control import MAX_REPORT_AGE_S, DepthControl, Observation, fixed_document
from cluster.depth import Objective
from cluster.request import DepthPolicy, Drafting, from_wire, resolve
from cluster.step_time import Corrections, Factor, StepPoint, StepShape, StepTimes
from cluster.view import table
from deployments.telemetry import ReplicaReport, observe

K_MAX = 7
POLICY = DepthPolicy(K_MAX, K_MAX, 3, {"pinned": 2})


def linear_times(per_token_s: float) -> StepTimes:
    """A step costs 10 ms and so much for each token, whatever its shape."""
    points = []
    for num_requests in (1, 2, 8, 64):
        for k in range(K_MAX + 1):
            shape = StepShape(num_requests, num_requests * (1 + k), k)
            seconds = 0.010 + per_token_s * shape.num_tokens
            points.append(StepPoint(shape, seconds, seconds, 100))
    return StepTimes(points, max_draft_tokens=K_MAX, conditions={"gpu": "a test"})


def counts(acceptance: float, num_steps: int) -> Counts:
    """Steps at K_max whose drafts are each accepted with this probability, in expectation."""
    accepted = [round(num_steps * acceptance**depth) for depth in range(1, K_MAX + 1)]
    return Counts((num_steps,) * K_MAX, (num_steps, *accepted[:-1]), tuple(accepted))


def observation(source: str = "a", head: str = "h", num_steps: int = 5000, **running: float) -> Observation:
    totals = {"code": counts(0.95, num_steps), "chat": counts(0.2, num_steps)}
    return Observation(Report(source, head, totals), running or {"code": 4.0, "chat": 4.0}, 500.0)


def control(per_token_s: float = 0.001) -> DepthControl:
    return DepthControl(POLICY, linear_times(per_token_s), seed=0)


def k_of(found: DepthControl, workload: str, now_s: float) -> int:
    """K in force, whatever probes do."""
    drafting = resolve(POLICY, {"workload": workload})
    settled = [found.settle(drafting, now_s) for _ in range(20)]
    (k,) = {one.k for one in settled if one.source != "probe"}
    return k


def test_k_follows_what_each_workload_accepts_and_what_a_token_costs() -> None:
    dear = control()
    dear.observe([observation()], 0.0)
    assert k_of(dear, "code", 1.0) > 3
    assert k_of(dear, "chat", 1.0) < 3
    free = control(per_token_s=0.0)
    free.observe([observation()], 0.0)
    assert k_of(free, "chat", 1.0) == K_MAX


def test_a_choice_says_why_and_travels_to_the_target() -> None:
    found = control()
    found.observe([observation()], 0.0)
    settled = found.settle(Drafting("code", 3, "default"), 1.0)
    assert settled.source == "learned"
    assert "tokens/s" in settled.reason
    assert len(settled.survival) == K_MAX
    wire = json.loads(json.dumps(settled.to_wire()))
    arrived = from_wire(POLICY, wire)
    assert (arrived.k, arrived.source, arrived.survival) == (settled.k, "learned", settled.survival)
    assert arrived.expected_tpot_s == pytest.approx(settled.expected_tpot_s, abs=1e-6)


def test_what_a_request_or_the_operator_fixed_stays() -> None:
    found = control()
    found.observe([observation()], 0.0)
    for drafting in (resolve(POLICY, {"k": 1}), resolve(POLICY, {"workload": "pinned"})):
        assert found.settle(drafting, 1.0) is drafting


def test_the_limit_of_a_caller_holds_for_a_learned_k_too() -> None:
    found = control(per_token_s=0.0)
    found.observe([observation()], 0.0)
    settled = found.settle(Drafting("code", 2, "default"), 1.0, 2)
    assert (settled.k, settled.max_k, settled.expected_tpot_s) == (2, 2, None)


def test_where_steps_decide_a_learned_k_is_no_limit() -> None:
    """An engine with a table weighs the drafts of each step; without one, or for other objectives, K stands."""
    found = control(per_token_s=0.0002)
    found.observe([observation()], 0.0)
    settled = found.settle(Drafting("chat", 3, "default"), 1.0)
    assert 0 < settled.k < settled.max_k == K_MAX
    assert len(settled.survival) == K_MAX, "the engine can only weigh what has a survival"
    assert from_wire(POLICY, settled.to_wire()).max_k == K_MAX
    limited = found.settle(Drafting("code", 3, "default"), 1.0, K_MAX - 1)
    assert limited.k <= limited.max_k == K_MAX - 1
    for other in (
        DepthControl(POLICY, graph_times(measured=False), seed=0),
        DepthControl(POLICY, linear_times(0.001), objectives={"chat": Objective(max_tpot_s=1.0)}, seed=0),
    ):
        other.observe([observation()], 0.0)
        settled = other.settle(Drafting("code", 3, "default"), 1.0)
        assert (settled.source, settled.max_k) == ("learned", settled.k)


def test_where_no_draft_pays_the_drafter_rests() -> None:
    found = control(per_token_s=1.0)
    found.observe([observation()], 0.0)
    settled = found.settle(Drafting("chat", 3, "default"), 1.0)
    assert (settled.k, settled.max_k) == (0, 0)


def test_probes_go_to_the_end_and_carry_no_survival_to_trim_them_by() -> None:
    found = control()
    found.observe([observation()], 0.0)
    probes = [
        one for n in range(3000) if (one := found.settle(Drafting("chat", 3, "default"), n / 1000)).source == "probe"
    ]
    assert 1 <= len(probes) < 150
    assert {(one.k, one.survival) for one in probes} == {(K_MAX, ())}


def test_workloads_that_are_gone_leave_nothing_behind() -> None:
    found = control()
    found.observe([observation()], 0.0)
    for index in range(100):
        found.settle(Drafting(f"once-{index}", 3, "default"), 1.0)
    found.settle(Drafting("code", 3, "default"), 1.0)
    found.observe([observation()], 2.0)
    assert found._choices.keys() <= {"code", "chat"}
    (code,) = [one for one in found.document(2.0)["workloads"] if one["workload"] == "code"]
    assert code["source"] == "learned"


def test_silent_targets_mean_the_default_k() -> None:
    found = control()
    drafting = Drafting("code", 3, "default")
    assert found.settle(drafting, 0.0).k == 3
    assert "no target has reported yet" in found.settle(drafting, 0.0).reason
    found.observe([observation()], 10.0)
    assert found.settle(drafting, 11.0).source != "default"
    found.observe([], 11.0)  # no replica answers: nothing new
    late = found.settle(drafting, 10.0 + MAX_REPORT_AGE_S + 1)
    assert (late.k, late.source) == (3, "default")
    assert "31 s" in late.reason
    assert found.settle(drafting, 5.0).source == "default"  # the clock went back


def test_another_head_starts_from_nothing() -> None:
    found = control()
    found.observe([observation()], 0.0)
    before = found.book.survival("chat").mean[0]
    found.observe([observation(head="better", num_steps=0)], 1.0)
    assert before < 0.25 < found.book.survival("chat").mean[0]
    assert found.document(2.0)["head"] == "better"


def test_what_was_learned_survives_a_restart() -> None:
    first, second = control(), control()
    first.observe([observation()], 0.0)
    second.restore(json.loads(json.dumps(first.snapshot())))
    assert second.book.survival("code") == first.book.survival("code")
    second.observe([observation()], 0.0)  # the same target, still counting: nothing counts twice
    assert second.book.survival("code").num_steps == pytest.approx(first.book.survival("code").num_steps)
    with pytest.raises(ValueError, match="snapshot|format|max_draft_tokens|field"):
        second.restore({"nonsense": 1})


def test_the_document_is_json_and_the_view_shows_it() -> None:
    found = control()
    found.observe([observation()], 0.0)
    k = k_of(found, "code", 1.0)
    document = {"model": "m", **json.loads(json.dumps(found.document(2.0)))}
    by_name = {one["workload"]: one for one in document["workloads"]}
    assert set(by_name) == {"code", "chat", "pinned"}
    assert (by_name["code"]["k"], by_name["code"]["source"]) == (k, "learned")
    assert (by_name["pinned"]["k"], by_name["pinned"]["source"]) == (2, "workload")
    low, mean, high = (by_name["code"]["survival"][end][0] for end in ("low", "mean", "high"))
    assert low < mean < high
    text = table(document)
    (line,) = [line for line in text.splitlines() if line.startswith("code ")]
    assert "learned" in line
    assert f"{100 * mean:.0f} (" in line
    assert "step times measured on a test" in text


def test_the_view_of_a_fixed_policy() -> None:
    text = table(fixed_document(POLICY, "m"))
    assert "policy fixed" in text
    assert [line.split()[3] for line in text.splitlines() if line.startswith(("default", "pinned"))] == ["3", "2"]


def graph_times(measured: bool = True) -> StepTimes:
    """One request: full graphs of K = 3 and K = 7 that take 10 and 10.5 ms."""
    points = []
    for k in range(K_MAX + 1):
        for uniform in (k, None):
            seconds = {3: 0.010, 7: 0.0105}.get(-1 if uniform is None else k, 0.020)
            points.append(StepPoint(StepShape(1, 1 + k, uniform), seconds, seconds, 100))
    conditions = {"gpu": "a test"}
    return StepTimes(
        points, max_draft_tokens=K_MAX, full_graph_depths=(0, 3, 7), conditions=conditions, measured=measured
    )


def slower_at_7(factor: float = 1.5) -> Corrections:
    return Corrections({(0, 3): Factor(0.0, 5000), (0, 7): Factor(math.log(factor), 5000)})


def alone(source: str = "a", corrections: Corrections | None = None) -> Observation:
    """A replica with hardly more than one request, whose drafts are accepted 8 times in 10."""
    report = Report(source, "h", {"code": counts(0.8, 5000)})
    return Observation(report, {"code": 1.0}, 500.0, corrections)


def test_k_is_chosen_by_what_steps_turn_out_to_take() -> None:
    found = DepthControl(POLICY, graph_times(), seed=0)
    found.observe([alone()], 0.0)
    assert k_of(found, "code", 0.1) == 7
    expected_s = found.settle(Drafting("code", 3, "default"), 0.2).expected_tpot_s
    for now_s in range(1, 20):
        found.observe([alone(corrections=slower_at_7())], float(now_s))
        k = k_of(found, "code", now_s + 0.1)
    assert k == 3
    faster = Corrections({(0, k): Factor(math.log(0.5), 1e6) for k in (0, 3, 7)})
    other = DepthControl(POLICY, graph_times(), seed=0)
    other.observe([alone(corrections=faster)], 0.0)
    assert k_of(other, "code", 0.1) == 7
    assert other.settle(Drafting("code", 3, "default"), 0.2).expected_tpot_s == pytest.approx(expected_s / 2, rel=1e-3)


def test_corrections_of_replicas_that_are_gone_or_silent_end() -> None:
    found = DepthControl(POLICY, graph_times(), seed=0)
    found.observe([alone("a", slower_at_7()), alone("b")], 0.0)
    assert k_of(found, "code", 0.1) == 3
    for now_s in range(1, int(MAX_REPORT_AGE_S) + 20):
        found.observe([alone("b")], float(now_s))  # a is gone; b has measured no step
        k = k_of(found, "code", now_s + 0.1)
        assert k == (3 if now_s <= MAX_REPORT_AGE_S else k)
    assert k == 7
    assert found.document(60.0)["corrections"]["num_engines"] == 0


def test_the_cautious_model_is_not_corrected() -> None:
    found = DepthControl(POLICY, graph_times(measured=False), seed=0)
    found.observe([alone(corrections=slower_at_7())], 0.0)
    assert k_of(found, "code", 0.1) == 7
    document = {"model": "m", **found.document(1.0)}
    assert document["corrections"] is None
    assert "corrected" not in table(document)


def test_the_view_shows_the_corrections_in_use() -> None:
    found = DepthControl(POLICY, graph_times(), seed=0)
    found.observe([alone("a", slower_at_7(1.2)), alone("b", slower_at_7(1.2))], 0.0)
    text = table({"model": "m", **json.loads(json.dumps(found.document(1.0)))})
    assert "step times corrected by 2 engines: x1.0" in text
    assert "full graph of K=7: x1.1" in text


def replica(corrections: object) -> ReplicaReport:
    return ReplicaReport("r1", "m", 1, {}, "h", {"code": 1}, 500.0, corrections=corrections)  # type: ignore[arg-type]


def test_a_report_brings_corrections_and_bad_ones_cost_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    found = DepthControl(POLICY, graph_times(), seed=0)
    observe(found, [replica(slower_at_7().encode())])
    assert found._costs is not None
    assert found._costs.corrections.kinds[0, 7].log_factor == pytest.approx(math.log(1.5), abs=1e-4)
    for bad in ("", "[[9e9,1]]", "nonsense", 7):
        other = DepthControl(POLICY, graph_times(), seed=0)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            observe(other, [replace(replica(bad), context_tokens=300.0)])
        assert other.document(0.0)["context_tokens"] == 300.0, "the rest of the report counts"
        assert ("the step times of target replica r1 stay uncorrected: corrections: " in caplog.text) == bool(bad)
        assert other.document(0.0)["corrections"]["num_engines"] == 0
