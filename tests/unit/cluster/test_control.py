"""What the control makes of the targets' reports: K where nobody fixed one, a document, and a state to restore."""

import json
import logging
import pickle
from dataclasses import replace

import pytest

from cluster.control import MAX_REPORT_AGE_S, DepthControl
from cluster.counts import Counts, TargetReport, WorkloadCounts
from cluster.depth import Objective
from cluster.request import DepthPolicy, Drafting, resolve
from cluster.step_time import Curve, StepCosts
from deployments.view import as_text

K_MAX = 7
POLICY = DepthPolicy(K_MAX, K_MAX, 3, {"pinned": 2})


def linear_costs(per_token_s: float) -> StepCosts:
    """A step costs 10 ms and so much for each row."""
    forward = Curve((1.0, 1000.0), (0.010 + per_token_s, 0.010 + 1000 * per_token_s))
    return StepCosts(forward, Curve((1.0, 2.0), (0.0, 0.0)), num_steps=1000)


def counts(acceptance: float, num_steps: int, num_running: int = 4) -> WorkloadCounts:
    """Steps at K_max whose drafts are each accepted with this probability, in expectation."""
    accepted = [round(num_steps * acceptance**depth) for depth in range(1, K_MAX + 1)]
    return WorkloadCounts(num_running, counts=Counts([num_steps] * K_MAX, [num_steps, *accepted[:-1]], accepted))


def report(
    replica: str = "a", head: str = "h", num_steps: int = 5000, per_token_s: float = 0.001, **more
) -> TargetReport:
    workloads = {"code": counts(0.95, num_steps), "chat": counts(0.2, num_steps)}
    costs = linear_costs(per_token_s)
    return replace(TargetReport(replica, "m", head, {}, workloads, 500.0, costs), **more)


def control(**options) -> DepthControl:
    return DepthControl(POLICY, seed=0, **options)


def k_of(found: DepthControl, workload: str, now_s: float) -> int:
    """K in force."""
    return found.settle(resolve(POLICY, {"workload": workload}), now_s).k


def test_k_follows_what_each_workload_accepts_and_what_a_row_costs() -> None:
    dear, free = control(), control()
    dear.observe([report()], 0.0)
    assert k_of(dear, "code", 1.0) > 3 > k_of(dear, "chat", 1.0)
    free.observe([report(per_token_s=0.0)], 0.0)
    assert k_of(free, "chat", 1.0) == K_MAX


def learned(found: DepthControl, workload: str) -> Drafting:
    choice = found.settle(Drafting(workload, 3, "default"), 1.0)
    assert choice.source == "learned"
    return choice


def test_a_choice_says_why_and_the_engine_may_verify_deeper() -> None:
    found = control()
    found.observe([report(workloads={"code": counts(0.6, 5000)})], 0.0)
    settled = learned(found, "code")
    assert "tokens/s" in settled.reason
    assert len(settled.survival) == K_MAX
    assert settled.expected_tpot_s is not None
    assert 0 < settled.k < settled.max_k == K_MAX
    found.observe([report(workloads={"chat": counts(0.01, 5000)})], 10.0)
    for engines, max_k in ((found, K_MAX), (control(on_gpu=True), 0)):
        engines.observe([report(workloads={"chat": counts(0.01, 5000)})], 10.0)
        settled = engines.settle(Drafting("chat", 3, "default"), 10.0)
        assert (settled.k, settled.max_k) == (0, max_k), "on a GPU a step that may draft runs the drafter"


def test_with_an_objective_steps_usually_go_no_deeper_than_k() -> None:
    found = control(objectives={"chat": Objective(max_tpot_ms=50)})
    found.observe([report(workloads={"chat": counts(0.6, 5000)})], 0.0)
    settled = learned(found, "chat")
    assert 0 < len(settled.survival) == settled.k < settled.max_k == K_MAX
    found = control(objectives={"chat": Objective(max_tpot_ms=50)})
    found.observe([report(workloads={"chat": counts(0.01, 5000)})], 0.0)
    drawn = [found.settle(Drafting("chat", 3, "default"), 1.0) for _ in range(2000)]
    assert {(each.source, each.k, each.max_k) for each in drawn} == {("learned", 0, 0), ("probe", K_MAX, K_MAX)}


def test_what_the_request_or_the_operator_fixed_stays() -> None:
    found = control()
    found.observe([report()], 0.0)
    for drafting in (resolve(POLICY, {"k": 6}), resolve(POLICY, {"workload": "pinned"})):
        assert found.settle(drafting, 1.0) == drafting


def test_the_limit_of_a_caller_is_kept() -> None:
    found = control()
    found.observe([report()], 0.0)
    for limit in (0, 1, 4):
        for _ in range(50):
            settled = found.settle(Drafting("code", 3, "default"), 1.0, limit)
            assert settled.k <= settled.max_k <= limit
    assert "the caller's limit" in settled.reason or settled.k < 4


def test_without_fresh_reports_the_default_stands() -> None:
    found = control()
    drafting = Drafting("code", 3, "default")
    assert "no target has reported yet" in found.settle(drafting, 0.0).reason
    found.observe([report()], 0.0)
    late = found.settle(drafting, MAX_REPORT_AGE_S + 1)
    assert (late.k, late.source) == (3, "default")
    assert "no target has reported for 31 s" in late.reason
    found.observe([], 100.0)
    assert found.settle(drafting, 100.0).source == "default"


def test_the_fixed_policy_chooses_nothing_and_shows_what_is_accepted() -> None:
    """Fault 8: `/drafting` and the view showed 0 requests, 0 steps and no AL under a fixed K."""
    found = control(is_adaptive=False)
    found.observe([report()], 0.0)
    drafting = Drafting("code", 3, "default")
    assert found.settle(drafting, 1.0) == drafting
    document = {"model": "m", **found.document(1.0)}
    rows = {row["workload"]: row for row in document["workloads"]}
    assert document["policy"] == "fixed"
    assert rows["code"]["num_requests"] > 0
    assert rows["code"]["num_steps"] == pytest.approx(1250, rel=0.5)
    assert rows["code"]["acceptance_length"] == pytest.approx(1 + 0.95 + 0.95**2 + 0.95**3, abs=0.2)
    assert (rows["code"]["k"], rows["pinned"]["k"]) == (3, 2)
    (line,) = [line for line in as_text(document).splitlines() if line.startswith("code ")]
    assert " - " not in line
    assert "policy fixed" in as_text({"model": "m", **control(is_adaptive=False).document(0.0)})


def test_a_bad_report_is_logged_and_the_others_count(caplog: pytest.LogCaptureFixture) -> None:
    """Fault 14: what a report says must never fail the caller."""
    impossible = WorkloadCounts(counts=Counts([1], [1], [5]))
    bad = [
        report("bad", workloads={"code": impossible}),
        report("bad", workloads=None),
        report("bad", workloads={"code": None}),
        report("bad", context_tokens=float("nan")),
        None,
    ]
    found = control()
    with caplog.at_level(logging.WARNING):
        found.observe([*bad, report("good")], 0.0)
    assert len([record for record in caplog.records if "is left out" in record.message]) == len(bad)
    assert found.settle(Drafting("code", 3, "default"), 1.0).source != "default"
    assert found.document(1.0)["workloads"]


def test_costs_of_replicas_that_are_gone_end() -> None:
    found = control()
    found.observe([report("a", per_token_s=0.0), report("b", step_costs=None)], 0.0)
    assert k_of(found, "chat", 0.1) == K_MAX
    assert "learned over 1000 steps of 1 engine" in found.document(0.0)["step_times"]
    for now_s in range(1, int(MAX_REPORT_AGE_S) + 20):
        found.observe([report("b", step_costs=None)], float(now_s))
    assert "guessed" in found.document(60.0)["step_times"]
    assert k_of(found, "chat", 60.0) < K_MAX


def test_load_follows_the_readings_and_is_a_mean_over_replicas() -> None:
    found = control()
    for now_s in range(10):
        found.observe([report("a"), report("b", workloads={"code": counts(0.95, 5000, 12)})], float(now_s))
    rows = {row["workload"]: row["num_requests"] for row in found.document(10.0)["workloads"]}
    assert rows["code"] == pytest.approx(8.0, abs=0.1)
    assert rows["chat"] == pytest.approx(2.0, abs=0.1)


def test_a_head_that_takes_over_is_learned_anew_and_the_old_one_kept() -> None:
    found = control()
    num_steps = []
    for now_s, (head, num) in enumerate((("h", 100), ("h", 5000), ("new", 5100), ("new", 5200), ("h", 5300))):
        found.observe([report(head=head, num_steps=num)], float(now_s))
        document = found.document(float(now_s))
        assert document["head"] == head
        num_steps.append({row["workload"]: row["num_steps"] for row in document["workloads"]}["code"])
    assert num_steps[4] == num_steps[1] > 500
    assert num_steps[2] == 0 < num_steps[3] < 50


def test_what_was_learned_is_found_again_after_a_restart() -> None:
    found, restarted = control(), control()
    found.observe([report()], 0.0)
    restarted.restore(json.loads(json.dumps(found.snapshot())))
    restarted.observe([report()], 0.0)
    old, new = (each.document(0.0)["workloads"] for each in (found, restarted))
    assert [row["survival"] for row in old] == [row["survival"] for row in new]
    for damaged in (None, {}, {"format": 1}, {**found.snapshot(), "ledger": 7}, {**found.snapshot(), "acceptance": {}}):
        with pytest.raises(ValueError, match="snapshot|ledger"):
            restarted.restore(damaged)
    assert restarted.document(0.0)["workloads"] == new


def test_the_document_says_what_is_believed_and_the_view_shows_it() -> None:
    found = control()
    found.observe([report()], 0.0)
    k = k_of(found, "code", 1.0)
    document = {"model": "m", **json.loads(json.dumps(found.document(2.0)))}
    by_name = {row["workload"]: row for row in document["workloads"]}
    assert set(by_name) == {"code", "chat", "pinned"}
    assert (by_name["code"]["k"], by_name["code"]["source"]) == (k, "learned")
    assert (by_name["pinned"]["k"], by_name["pinned"]["source"]) == (2, "workload")
    low, mean, high = (by_name["code"]["survival"][end][0] for end in ("low", "mean", "high"))
    assert low < mean < high
    text = as_text(document)
    (line,) = [line for line in text.splitlines() if line.startswith("code ")]
    assert "learned" in line
    assert f"{100 * mean:.0f}(" in line
    assert "step times learned over 1000 steps of 1 engine" in text


# ---- the router's choices, followed by targets


def test_a_target_chooses_as_the_router_does_whatever_it_has_seen_itself() -> None:
    router, target = control(), control()
    router.observe([report()], 0.0)
    target.observe([report(workloads={"chat": counts(0.95, 5000), "code": counts(0.1, 5000)})], 0.0)
    assert k_of(target, "chat", 0.1) > k_of(target, "code", 0.1)
    guidance = pickle.loads(pickle.dumps(router.guidance(3, 0.5)))
    assert (guidance.num_targets, guidance.workloads) == (3, ("chat", "code"))
    target.follow(guidance, 0.6)
    for workload in ("chat", "code"):
        assert k_of(target, workload, 1.0) == k_of(router, workload, 1.0)
    followed = [target.settle(Drafting("code", 3, "default"), 1.0) for _ in range(500)]
    settled = next(each for each in followed if each.source == "learned")
    assert (settled.survival, settled.max_k) == (learned(router, "code").survival, K_MAX)
    unseen = target.settle(Drafting("never-seen", 3, "default"), 1.0)
    assert unseen.workload == "never-seen"
    assert unseen.source == "learned", "judged like all traffic together"


def test_requests_probe_as_often_as_the_router_says_where_no_step_verifies_deeper() -> None:
    """On a GPU the requests of a workload with K = 0 have no drafts that a step could verify."""
    router, target = control(on_gpu=True), control(on_gpu=True)
    router.observe([report(workloads={"chat": counts(0.01, 5000), "code": counts(0.6, 5000)})], 0.0)
    target.follow(router.guidance(1, 0.0), 0.0)
    choices = router.guidance(1, 0.0).choices
    share = choices["chat"].probe_share
    assert (choices["chat"].drafting.k, 0 < choices["code"].drafting.k < K_MAX) == (0, True)
    drawn = [target.settle(Drafting("chat", 3, "default"), 1.0) for _ in range(20_000)]
    probes = [each for each in drawn if each.source == "probe"]
    assert {(each.k, each.survival) for each in probes} == {(K_MAX, ())}
    assert 0.5 * share < len(probes) / len(drawn) < 2 * share
    assert {target.settle(Drafting("code", 3, "default"), 1.0).source for _ in range(5000)} == {"learned"}


def test_a_target_that_hears_nothing_goes_on_with_what_it_heard_and_then_with_its_own() -> None:
    router, target = control(), control()
    router.observe([report()], 0.0)
    target.follow(router.guidance(1, 0.0), 0.0)
    before = k_of(target, "code", 1.0)
    assert before != k_of(target, "chat", 1.0)
    silent_s = MAX_REPORT_AGE_S + 1
    target.follow(control().guidance(1, 5.0), 5.0)  # of a router that begins anew and has no reports yet
    assert not control().guidance(1, 5.0).choices
    assert k_of(target, "code", MAX_REPORT_AGE_S) == before
    assert target.settle(Drafting("code", 3, "default"), silent_s).source == "default"
    target.observe([report(workloads={"code": counts(0.05, 5000)})], silent_s)
    assert k_of(target, "code", silent_s) < before


def test_a_workload_without_requests_has_its_own_k_in_the_guidance() -> None:
    router, target = control(), control()
    router.observe([report()], 0.0)
    idle = {"code": counts(0.95, 5000, num_running=0), "chat": counts(0.2, 5000, num_running=4)}
    for second in range(1, 12):
        router.observe([report(workloads=idle)], float(second))
    target.follow(router.guidance(1, 12.0), 12.0)
    assert k_of(target, "code", 12.0) > k_of(target, "chat", 12.0)


def test_guidance_of_a_deeper_limit_is_cut_to_the_own_one() -> None:
    """While a lower `depth.max` reaches router and targets one after the other."""
    router = control()
    router.observe([report()], 0.0)
    target = DepthControl(DepthPolicy(K_MAX, 2, 2), seed=0)
    target.follow(router.guidance(1, 0.0), 0.0)
    for _ in range(50):
        settled = target.settle(Drafting("code", 2, "default"), 0.0)
        assert settled.k <= settled.max_k <= 2


def test_a_control_with_other_settings_goes_on_where_the_one_before_was() -> None:
    router, target = control(), control()
    router.observe([report()], 0.0)
    target.observe([report("b")], 0.0)
    target.follow(router.guidance(1, 0.0), 0.0)
    alone = control()
    alone.observe([report()], 0.0)
    for before in (target, alone):
        after = DepthControl(DepthPolicy(K_MAX, 3, 2), seed=0)
        after.take_over(before)
        settled = after.settle(Drafting("code", 2, "default"), 1.0)
        assert (settled.source, settled.k) == ("learned", 3)
        assert len(settled.survival) >= 3, "the scheduler can trim it"
        assert after.costs == before.costs


def test_what_waits_in_an_engine_is_no_load_of_its_steps() -> None:
    """An edge hands over twice as many sequences as run."""
    limited, twice = control(max_num_seqs=64), control()
    full = {"code": counts(0.95, 5000, num_running=96), "chat": counts(0.2, 5000, num_running=32)}
    half = {"code": counts(0.95, 5000, num_running=48), "chat": counts(0.2, 5000, num_running=16)}
    limited.observe([report(workloads=full)], 0.0)
    twice.observe([report(workloads=half)], 0.0)
    assert limited._load == pytest.approx(twice._load)


def test_who_follows_keeps_no_choices_of_workloads_that_are_gone() -> None:
    router, target = control(), control()
    router.observe([report()], 0.0)
    target.follow(router.guidance(1, 0.0), 0.0)
    for number in range(50):
        k_of(target, f"tag-{number}", 0.0)
    assert target._choices == {}


def test_a_fixed_policy_gives_names_and_no_choices() -> None:
    router, target = control(is_adaptive=False), control(is_adaptive=False)
    router.observe([report()], 0.0)
    guidance = router.guidance(1, 0.0)
    assert (guidance.workloads, guidance.choices) == (("chat", "code"), {})
    target.follow(guidance, 0.0)
    assert target.settle(Drafting("code", 3, "default"), 0.0) == Drafting("code", 3, "default")
