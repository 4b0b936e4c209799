"""Step times of the first measurements on an H200, for tests of what is built on step times.

Target: Qwen3-Coder-30B-A3B's shape with a P-EAGLE head of K_max = 7, vLLM 0.26, 128 + 256 tokens a request. A step's
time is concurrency * AL / (tokens/s), prompts included, so it is a little long.
"""

from cluster.step_time import StepPoint, StepShape, StepTimes

CONTEXT_TOKENS = 256.0
# concurrency: tokens/s and AL
FULL = {1: (579, 3.89), 8: (1767, 4.04), 32: (5199, 4.05), 128: (12961, 4.05)}  # K = 7
TRIMMED = {1: (326, 2.86), 8: (1389, 2.94), 32: (4460, 2.90), 128: (11825, 2.90)}  # K_max = 7, every request at K = 3
PLAIN = {1: (239, 1.0), 8: (880, 1.0), 32: (2014, 1.0), 128: (6513, 1.0)}  # no drafter


def _points(measured: dict[int, tuple[int, float]], k: int, uniform_depth: int | None) -> list[StepPoint]:
    return [
        StepPoint(StepShape(num, num * (1 + k), uniform_depth, CONTEXT_TOKENS), *[num * length / rate] * 2, 100)
        for num, (rate, length) in measured.items()
    ]


def measured_times() -> StepTimes:
    """Of the engine with its drafter."""
    return StepTimes(
        [*_points(FULL, 7, 7), *_points(TRIMMED, 3, 3)],
        max_draft_tokens=7,
        full_graph_depths=(7,),
        conditions={"gpu": "NVIDIA H200", "model": "Qwen3-Coder-30B-A3B, dummy weights", "vllm": "0.26.0"},
    )


def measured_plain_times() -> StepTimes:
    """Of the same engine without a drafter."""
    return StepTimes(_points(PLAIN, 0, 0), max_draft_tokens=0, full_graph_depths=(0,))
