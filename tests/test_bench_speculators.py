"""Bookkeeping of the benchmark beside `speculators`, and our own side of it; the package is not installed here."""

import dataclasses

import pytest

from benchmarks.sides import Case
from benchmarks.speculators import CASES, parse_case, ratios, run_group, skipped


def result(text: str, status: str = "measured", step_ms: float = 1.0, gib: float = 1.0) -> dict:
    case = dataclasses.asdict(parse_case(text, 1, "cuda"))
    return {"case": case, "status": status, "step_ms": step_ms, "peak_memory_gib": gib}


def test_cases_are_read() -> None:
    assert parse_case("8b:20480:peagle:4", 3, "cuda") == Case("peagle", "8b", 20480, 4, num_steps=3)
    assert all(parse_case(text, 5, "cuda").num_depths == 8 for text in CASES)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("8b:20480", "expected SHAPE"),
        ("8b:long:peagle", "expected SHAPE"),
        ("9b:2048:peagle", "'9b' is none of"),
        ("8b:2048:eagle", "'eagle' is none of"),
        ("8b:2048:speculators:4", "only peagle splits"),
    ],
)
def test_wrong_cases_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_case(text, 1, "cuda")


def test_ratios_pair_equal_shapes_and_lengths_only() -> None:
    found = ratios(
        [
            result("8b:2048:speculators", step_ms=300, gib=40),
            result("8b:2048:peagle", step_ms=200, gib=10),
            result("8b:8192:peagle", step_ms=900),
            result("8b:8192:speculators", status="out of memory"),
        ]
    )
    against = {"shape": "8b", "num_tokens": 2048, "num_segments": 1, "against": "speculators"}
    assert found == [against | {"speed": 1.5, "memory": 0.25}]


def test_the_uncompiled_mask_only_stands_in_for_the_shipped_one() -> None:
    shipped, eager = (parse_case(f"8b:8192:{side}", 1, "cuda") for side in ("speculators", "speculators-eager-mask"))
    assert skipped(shipped, []) is skipped(eager, []) is None
    slow, ran = result("8b:2048:speculators", status="timeout"), result("8b:2048:speculators")
    assert "exceeded" in (skipped(shipped, [slow]) or "")
    assert skipped(eager, [slow]) is None
    assert "as shipped" in (skipped(eager, [ran]) or "")


def test_a_case_runs_in_its_own_process_and_a_failing_one_does_not_end_the_rest() -> None:
    case = dataclasses.replace(parse_case("tiny:48:peagle", 1, "cpu"), num_layers=1)
    impossible = dataclasses.replace(case, num_depths=0)
    wrong, measured = run_group([impossible, case], warm_up_s=120, measure_s=60)
    assert wrong["status"] == "failed"
    assert "num_depths" in wrong["error"]
    assert measured["status"] == "measured"
    assert measured["num_rows"] == 48 + 38 + 30 + 24 + 19 + 15 + 12 + 9
    assert measured["tokens_per_s"] > 0


def test_a_case_that_exceeds_its_time_is_ended() -> None:
    (found,) = run_group([parse_case("tiny:48:peagle", 1, "cpu")], warm_up_s=0.01, measure_s=1)
    assert found["status"] == "timeout"
