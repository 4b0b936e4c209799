"""The arithmetic of hiding the drafter against figures worked out by hand; its times against the measured steps."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

from peagle.bench import hiding
from peagle.bench.hiding import Acceptance, Times

TIMES = Times("t", 1, verify_s=0.004, draft_s=0.002, half_verify_s=None, half_draft_s=None, source="")
PAIR = dataclasses.replace(TIMES, num_requests=2, half_verify_s=0.0025, half_draft_s=0.001)
FOUND = Acceptance(after=3.0, waiting=2.5, hit_share=0.5, without=2.0)
REPOSITORY = Path(__file__).parents[1]
REMOTE = REPOSITORY / "results/2026-11-22-remote-8b-one-host-h200x2.json"


def test_tokens_per_second_by_hand() -> None:
    assert hiding.as_it_is(TIMES, FOUND) == pytest.approx(3 / 0.006)
    assert hiding.ahead_waiting(TIMES, FOUND) == pytest.approx(2.5 / 0.005)  # half of the steps wait
    assert hiding.ahead_without(TIMES, FOUND) == pytest.approx(2 / 0.004)
    assert hiding.half_batches(TIMES, FOUND) is None
    # Of two requests both hit in a quarter of the steps: half as often as one does, so half of the loss remains.
    assert hiding.ahead_waiting(PAIR, FOUND) == pytest.approx(2 * 2.75 / 0.0055)
    assert hiding.half_batches(PAIR, FOUND) == pytest.approx(2 * 3 / 0.005)
    slow = dataclasses.replace(PAIR, half_draft_s=0.006)
    assert hiding.half_batches(slow, FOUND) == pytest.approx(2 * 3 / 0.012)
    bounds = hiding.row_of(TIMES, FOUND)["over_as_it_is"]
    assert (bounds["hidden_for_nothing"], bounds["ahead_waiting_lossless"]) == (1.5, 1.2)
    with pytest.raises(ValueError, match="above 0"):
        dataclasses.replace(TIMES, draft_s=0.0)


@pytest.mark.parametrize("hit_share", [0.1, 0.9])
def test_at_break_even_both_are_the_same_whatever_the_hit_rate(hit_share: float) -> None:
    """3 tokens in a step with drafts made after, 2.4 with drafts made ahead: t_d of a quarter of t_v."""
    times = dataclasses.replace(TIMES, draft_s=0.25 * TIMES.verify_s)
    found = dataclasses.replace(FOUND, hit_share=hit_share, waiting=3 - 0.6 * hit_share, without=2.4)
    assert hiding.break_even_waiting(found) == pytest.approx(0.25)
    assert hiding.break_even_without(found) == pytest.approx(0.25)
    assert hiding.break_even_waiting(dataclasses.replace(found, waiting=3 * (1 - hit_share))) == math.inf
    for instead in (hiding.ahead_waiting, hiding.ahead_without):
        assert instead(times, found) == pytest.approx(hiding.as_it_is(times, found))
        longer = dataclasses.replace(times, draft_s=1.1 * times.draft_s)
        assert instead(longer, found) > hiding.as_it_is(longer, found)


def test_times_follow_from_the_measured_steps() -> None:
    remote = json.loads(REMOTE.read_text())
    one, eight, thirty_two, sixty_four = hiding.dense_times(remote)
    # One request was run twice.
    assert one.verify_s == pytest.approx((0.0050800 + 0.0050606) / 2)
    assert one.half_verify_s is None
    assert one.draft_s == pytest.approx((0.0009890 + 0.0010244) / 2)
    assert eight.verify_s + eight.draft_s == pytest.approx(0.006759)
    assert eight.half_draft_s == pytest.approx(one.draft_s + 3 / 7 * (0.0011215 - one.draft_s))
    assert eight.draft_s < thirty_two.half_draft_s < thirty_two.draft_s  # type: ignore[operator]
    assert sixty_four.half_verify_s == thirty_two.verify_s
    for row in remote["rows"]:
        row.pop("step_parts_ms", None)
    with pytest.raises(ValueError, match=r"no step_parts_ms for \[1, 8, 32, 64\]"):
        hiding.dense_times(remote)
    points = [(1, 0, 4), (2, 0, 5), (1, 1, 6), (1, 7, 8)]
    fixed = {"points": [{"num_requests": b, "uniform_depth": k, "median_s": s} for b, k, s in points]}
    with pytest.raises(ValueError, match="calibrate"):
        hiding.moe_times(fixed)
    table = json.loads((REPOSITORY / "configs/step_times/qwen3-30b-a3b-shape-h200.json").read_text())
    moe = {times.num_requests: times for times in hiding.moe_times(table)}
    assert moe[1].draft_s == pytest.approx(0.0052482 - 0.0045804)
    assert moe[64].verify_s + moe[64].draft_s == pytest.approx(0.0225684)
    assert moe[64].half_verify_s == moe[32].verify_s


def test_the_file_names_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays = [
        {"budget": 4, "on_miss": how, "tokens_per_step": tokens, "share_of_steps": {"ahead": 0.5}}
        for how, tokens in (("wait", 2.5), ("without", 2.0))
    ]
    measured = {"all": {"normal": {"tokens_per_step": 3.0}, "played": plays}}
    ahead, out = tmp_path / "ahead.json", tmp_path / "hiding.json"
    ahead.write_text(json.dumps({"made": {"hardware": {"num_cpus": 2}}, "by_k": {"7": measured}}))
    command = f"hiding {ahead} --remote {REMOTE} --budget 4 --step-times "
    command += f"{REPOSITORY}/configs/step_times/qwen3-30b-a3b-shape-h200.json --out {out}"
    monkeypatch.setattr(sys, "argv", command.split())
    hiding.main()
    written = json.loads(out.read_text())
    assert [one["measured_on"].get("gpu") for one in written["inputs"]] == [None, "NVIDIA H200", "NVIDIA H200"]
    assert len(written["rows"]) == 8
    assert written["break_even"][0] | {"break_even_waiting": 0.5, "break_even_without": 0.5} == written["break_even"][0]
    with pytest.raises(ValueError, match="budget 16"):
        hiding.acceptance_of(json.loads(ahead.read_text()), 7, 16, "all")
