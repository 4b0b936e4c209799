"""Step times that stand in for a table which nobody has measured: what K is chosen by until `calibrate` has run.

Enters: K_max, whether the engine is on a GPU, and the depths with full CUDA graphs. Leaves: a `StepTimes` whose
`measured` is False; its seconds are in proportion, their size means nothing. A measured table is always better.
"""

from collections.abc import Iterable

from cluster.step_time import StepPoint, StepShape, StepTimes

__all__ = ["default_step_times"]

_NUM_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_UNIT_S = 0.01


def default_step_times(
    max_draft_tokens: int, *, on_gpu: bool = False, full_graph_depths: Iterable[int] | None = None
) -> StepTimes:
    """Step times of an engine that nobody has measured.

    full_graph_depths: of a GPU, K at which batches run on full CUDA graphs; None as in vLLM by itself, K_max alone.

    With c for the fixed part of a step:

    - a CPU is compute-bound at once: c / 32 for each token, c / 16 for each request, c / 10 for the drafter's pass. It
      says the steps of SmolLM2-135M on two cores within 16 %. For usual survivals and K_max = 7: K = 7 at one
      request, 6 at 2 and 4, 4 at 8 and 16, 3 from 32 on.
    - a GPU has room for a few hundred tokens: c up to 64, c / 150 for each token more, c / 200 for each request,
      c / 5 for the drafter's pass, 0.15 c off the full graphs (on an H200, K = 3 of 7: 0.8 c at one request and nothing
      from eight on, where the step hides its launches). K = 7 up to 16 requests, 4 at 32, 3 at 64, 2 from 128 on. It
      says the steps of an H200 with the shape of Llama-3.1-8B within 10 %; with that of Qwen3-30B-A3B there is room for
      more, so K is rather too small.

    tests/test_unmeasured.py holds both against what was measured.

    Raises:
        ValueError: a K_max below 0, or a full-graph depth outside 0..K_max.
    """
    if max_draft_tokens < 0:
        raise ValueError(f"max_draft_tokens must be 0 or more, not {max_draft_tokens}")
    full_depths: set[int] = set()
    if on_gpu:
        full_depths = {max_draft_tokens} if full_graph_depths is None else set(full_graph_depths)
    points = []
    for num_requests in _NUM_REQUESTS:
        for depth in range(max_draft_tokens + 1):
            for uniform in (depth, None):
                units = _on_gpu(num_requests, depth, uniform in full_depths) if on_gpu else _on_cpu(num_requests, depth)
                shape = StepShape(num_requests, num_requests * (1 + depth), uniform)
                points.append(StepPoint(shape, _UNIT_S * units, _UNIT_S * units, 1))
    return StepTimes(points, max_draft_tokens=max_draft_tokens, full_graph_depths=full_depths, measured=False)


def _on_cpu(num_requests: int, depth: int) -> float:
    drafter = 0.1 if depth else 0.0
    return 1.0 + num_requests * (1 + depth) / 32 + num_requests / 16 + drafter


def _on_gpu(num_requests: int, depth: int, is_full: bool) -> float:
    verified = max(0, num_requests * (1 + depth) - 64) / 150
    drafter, launches = 0.2 if depth else 0.0, 0.0 if is_full else 0.15
    return 1.0 + verified + num_requests / 200 + drafter + launches
