"""The benchmark's arithmetic, on answers small enough to check by hand."""

from benchmarks import learning
from benchmarks.prompts import choose_prompts
from benchmarks.service import Answer, figures, is_looping, summary, table


def answer(prompt=0, *, tokens=range(11), ttft_s=1.0, total_s=2.0, steps=0, accepted=0, category="x"):
    return Answer(prompt, category, tuple(tokens), ttft_s, total_s, steps, accepted)


def test_a_loop_has_under_half_of_its_8_grams_distinct():
    assert is_looping([1, 2, 3] * 10)
    assert not is_looping(range(30))
    # Of 23 8-grams 11 are distinct, then 12.
    assert is_looping([*range(11), *[10] * 19])
    assert not is_looping([*range(12), *[11] * 18])
    assert not is_looping([1] * 8)


def test_figures_are_totals_over_totals():
    part = figures([answer(steps=5, accepted=5), answer(total_s=8.0, steps=5, accepted=0)])
    assert part["otps"] == 2.2
    assert part["mean_tpot_ms"] == 400.0
    assert part["acceptance_length"] == 1.5
    assert figures([answer()])["acceptance_length"] is None
    assert figures([])["otps"] is None


def test_summary_splits_every_variant_by_the_baselines_loops():
    loop = [1, 2] * 10
    report = summary(
        {
            "stock": [answer(0, tokens=loop), answer(1, category="y")],
            "K=3": [answer(0, tokens=loop, total_s=1.5), answer(1, tokens=[*range(10), 99], category="y")],
        },
        "stock",
    )
    assert report["K=3"]["looping"]["num_answers"] == report["K=3"]["non_looping"]["num_answers"] == 1
    assert report["K=3"]["looping"]["ratio"] == 1.333
    assert report["K=3"]["non_looping"]["ratio"] == 1.0
    assert report["K=3"]["num_equal_to_baseline"] == 1
    assert list(report["stock"]["by_category"]) == ["x", "y"]
    assert "K=3" in table(report)


def test_prompts_are_half_humaneval_and_half_questions_of_every_category(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(f'{{"category": "{name}", "turns": ["{name} {i}"]}}\n' for name in ("a", "b", "c") for i in range(20))
    )
    prompts = choose_prompts(20, questions)
    categories = [category for category, _ in prompts]
    assert len(prompts) == len(set(prompts)) == 20
    assert [categories.count(name) for name in ("humaneval", "a", "b", "c")] == [10, 4, 3, 3]
    assert len(choose_prompts(40, None)) == 40


def test_heads_of_one_phase_are_compared_by_their_own_requests() -> None:
    replies = [
        learning.Reply(0.0, 2.0, "a", head="old", num_tokens=20, num_steps=10, num_accepted=10),
        learning.Reply(0.0, 1.0, "b", head="new", num_tokens=20, num_steps=5, num_accepted=15),
        learning.Reply(1.0, 2.0, "c", head="new", num_tokens=40, num_steps=10, num_accepted=30),
    ]
    found = learning.figures(replies)
    assert found["by_head"] == {
        "new": {"num_requests": 2, "acceptance_length": 4.0, "request_tokens_per_s": 30.0},
        "old": {"num_requests": 1, "acceptance_length": 2.0, "request_tokens_per_s": 10.0},
    }
    assert "by_head" not in learning.figures(replies[1:])
