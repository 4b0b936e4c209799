"""pass@1 of answers to HumanEval's problems: does the code in an answer pass the problem's own tests?

    python -m benchmarks.humaneval REPORT.json      adds pass_at_1 to the rows of a report of benchmarks.headline

Runs what a model wrote, in a process with limits on time and memory in an empty folder, and that is no sandbox: use it
on a machine that holds nothing dear.
"""

import argparse
import functools
import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.prompts import COMPLETE, human_eval_problems

TIMEOUT_S, MEMORY_BYTES, NUM_AT_A_TIME = 10, 2 << 30, 4
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)


def program(problem: dict[str, Any], answer: str) -> str:
    """The answer's block that defines the function, else all of the answer as the function's body, and the tests."""
    defines = f"def {problem['entry_point']}("
    blocks = [block for block in _BLOCK.findall(answer) if defines in block]
    code = blocks[0] if blocks else problem["prompt"] + answer
    # Imports that stand before the function in the problem are often left out of an answer.
    before = problem["prompt"].partition("def ")[0]
    return f"{before}\n{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def passes(problem: dict[str, Any], answer: str) -> bool:
    """Whether its program ends well in time; the same answer is tried once."""
    return _ends_well(program(problem, answer))


@functools.cache
def _ends_well(text: str) -> bool:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT_S, TIMEOUT_S))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", text],
                cwd=folder, env={}, capture_output=True, timeout=TIMEOUT_S, check=False, preexec_fn=limit,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: a null byte in the answer
            return False
    return done.returncode == 0


def answers_file(report: Path) -> Path:
    """Where `benchmarks.headline` keeps the answers of a report."""
    return report.with_suffix(".answers.json.gz")


def pass_at_1(prompts: Sequence[str], answers: Sequence[str]) -> float | None:
    """Share of the answers to HumanEval problems that pass; None where no prompt is one."""
    by_prompt = {f"{COMPLETE}{problem['prompt']}": problem for problem in human_eval_problems()}
    pairs = [(by_prompt[text], answer) for text, answer in zip(prompts, answers, strict=True) if text in by_prompt]
    if not pairs:
        return None
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        found = list(pool.map(lambda pair: passes(*pair), pairs))
    return sum(found) / len(found)


def add_pass_at_1(path: Path) -> None:
    """Into the rows of a report whose cell has HumanEval problems among its prompts."""
    report = json.loads(path.read_text(encoding="utf-8"))
    with gzip.open(answers_file(path), "rt", encoding="utf-8") as file:
        cells = {cell_key(cell): cell for cell in json.load(file)}
    for row in report["rows"]:
        # Answers are kept once all arms are through with a cell; of one that was cut off there are none.
        cell = cells.get(cell_key(row))
        if cell is not None and cell["prompt_texts"]:  # `random` has none
            rate = pass_at_1(cell["prompt_texts"], cell["answers"][row["arm"]])
            row |= {} if rate is None else {"pass_at_1": round(rate, 4)}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def cell_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("prompts", "temperature", "num_requests", "repeat"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    add_pass_at_1(parser.parse_args().report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
