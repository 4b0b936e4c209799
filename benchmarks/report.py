"""From measured answers to the figures of a benchmark. Pure: numbers and strings in, a dictionary for JSON out.

Looping and non-looping answers are reported apart: greedy answers of a small model often end in a loop, and loops are
easy to draft, so a figure over all answers alone would flatter.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NGRAM = 8


@dataclass(frozen=True)
class Answer:
    """One prompt answered by one variant. Times in seconds: `ttft_s` to the first token, `total_s` to the last."""

    prompt: int
    category: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    num_steps: int
    num_accepted_tokens: int


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether under half of the answer's 8-grams are distinct. Answers shorter than 9 tokens are not."""
    grams = [tuple(token_ids[start : start + NGRAM]) for start in range(len(token_ids) - NGRAM + 1)]
    return len(grams) > 1 and len(set(grams)) < len(grams) / 2


def figures(answers: Iterable[Answer]) -> dict[str, Any]:
    """OTPS (output tokens / seconds, prompt processing included), TTFT, TPOT and AL over some answers.

    AL = 1 + accepted / steps, over all steps together; None where nothing was drafted.
    """
    answers = list(answers)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    total_s = sum(answer.total_s for answer in answers)
    decode_s = sum(answer.total_s - answer.ttft_s for answer in answers)
    num_steps = sum(answer.num_steps for answer in answers)
    num_accepted = sum(answer.num_accepted_tokens for answer in answers)
    num_decoded = num_tokens - len(answers)
    return {
        "num_answers": len(answers),
        "num_output_tokens": num_tokens,
        "otps": round(num_tokens / total_s, 2) if total_s else None,
        "mean_ttft_ms": round(1000 * sum(answer.ttft_s for answer in answers) / len(answers), 1) if answers else None,
        "mean_tpot_ms": round(1000 * decode_s / num_decoded, 2) if num_decoded > 0 else None,
        "acceptance_length": round(1 + num_accepted / num_steps, 3) if num_steps else None,
    }


def summary(by_variant: dict[str, list[Answer]], baseline: str) -> dict[str, Any]:
    """Figures of each variant: over all answers, over looping and non-looping ones, and per category; with the ratio of
    OTPS to the baseline's, and how many answers equal the baseline's token for token.

    Whether an answer loops is judged on the baseline's, so that every variant is split alike.
    """
    reference = {answer.prompt: answer for answer in by_variant[baseline]}
    looping = {prompt for prompt, answer in reference.items() if is_looping(answer.token_ids)}
    parts: dict[str, Callable[[Answer], bool]] = {
        "all": lambda answer: True,
        "looping": lambda answer: answer.prompt in looping,
        "non_looping": lambda answer: answer.prompt not in looping,
    }
    report: dict[str, Any] = {}
    for variant, answers in by_variant.items():
        entry: dict[str, Any] = {name: figures(filter(keep, answers)) for name, keep in parts.items()}
        for name, keep in parts.items():
            entry[name]["ratio"] = _ratio(entry[name]["otps"], figures(filter(keep, reference.values()))["otps"])
        categories = sorted({answer.category for answer in answers})
        entry["by_category"] = {
            category: figures(answer for answer in answers if answer.category == category) for category in categories
        }
        entry["num_equal_to_baseline"] = sum(
            answer.token_ids == reference[answer.prompt].token_ids for answer in answers
        )
        report[variant] = entry
    return report


def _ratio(otps: float | None, baseline: float | None) -> float | None:
    return round(otps / baseline, 3) if otps and baseline else None


def table(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    lines = [f"{'variant':<12}{'answers':<14}{'OTPS':>8}{'ratio':>8}{'AL':>8}{'TPOT ms':>9}{'TTFT ms':>9}{'number':>8}"]
    for variant, entry in report.items():
        for part in ("all", "non_looping", "looping"):
            cells = entry[part]
            lines.append(
                f"{variant:<12}{part:<14}{_cell(cells['otps']):>8}{_cell(cells['ratio']):>8}"
                f"{_cell(cells['acceptance_length']):>8}{_cell(cells['mean_tpot_ms']):>9}"
                f"{_cell(cells['mean_ttft_ms']):>9}{cells['num_answers']:>8}"
            )
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else str(value)
