"""pass@1 of answers to HumanEval's problems: does the code in an answer pass the problem's own tests?

Runs what a model wrote, in a process with limits on time and memory in an empty folder, and that is no sandbox: use it
on a machine that holds nothing dear.
"""

import functools
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def pass_rate(problems: Sequence[dict[str, Any]], answers: Sequence[str]) -> float:
    """Share of answers that pass, one answer a problem."""
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        found = list(pool.map(passes, problems, answers))
    return sum(found) / len(found)
