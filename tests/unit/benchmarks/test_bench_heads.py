"""The benchmark of heads: arms, which answers count as the same, ratios. Its engines are stock vLLM's."""

import pytest

from benchmarks.heads import compared, parse_arm, summary, table


def test_an_arm_is_none_or_a_head_and_its_k() -> None:
    assert parse_arm("none") == ("none", 0)
    assert parse_arm("smollm2-135m-instruct:7") == ("smollm2-135m-instruct", 7)
    assert parse_arm("/heads/with:colon:3") == ("/heads/with:colon", 3)


@pytest.mark.parametrize("text", ["head", "head:", ":3", "head:0", "head:-1", "head:3.5", "head:K"])
def test_another_arm_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"--arms: {text!r}"):
        parse_arm(text)


def test_only_prompts_that_both_answered_are_compared() -> None:
    base = {0: [1, 2, 3], 1: [4, 5], 2: [6]}
    assert compared({0: [1, 2, 3], 1: [4, 6], 3: [9]}, base) == {"num_answers": 2, "num_identical": 1}
    assert compared({}, base) == {"num_answers": 0, "num_identical": 0}


def test_ratios_are_to_the_same_load() -> None:
    rows = [
        {"arm": arm, "num_requests": load, "otps": otps}
        for load, arm, otps in [(1, "none", 100.0), (1, "h:3", 210.0), (8, "h:3", 600.0), (8, "none", 400.0)]
    ]
    report = summary(rows, "none")
    assert [one["ratio"] for one in report] == [1.0, 2.1, 1.5, 1.0]
    lines = table(report).splitlines()
    assert lines[0] == "| requests | 1 | 8 |"
    assert lines[2:] == ["| none | 100 (1.00) | 400 (1.00) |", "| h:3 | 210 (2.10) | 600 (1.50) |"]
