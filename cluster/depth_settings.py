"""The `depth` section: how K is chosen, and what can be wrong with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster.demand import Objective
from cluster.drafting import is_workload_tag
from cluster.section import Section
from cluster.step_time import StepTimes
from cluster.unmeasured import default_step_times


class ObjectiveSettings(Section):
    """What a workload wants (`cluster.depth`): the most tokens per second, or the least time per output token; with
    an optional limit of that time and a weight of its tokens against those of others."""

    kind: Literal["throughput", "latency"] = "throughput"
    max_tpot_ms: float | None = Field(default=None, gt=0)
    weight: float = Field(default=1.0, gt=0)

    def objective(self) -> Objective:
        return Objective(self.kind, None if self.max_tpot_ms is None else self.max_tpot_ms / 1000, self.weight)


class DepthSettings(Section):
    """K: `max` that a request gets (default K_max), `default` where nothing else decides (default `max`), and a
    table by workload, which pins K.

    `policy`: `fixed`, or `adaptive`: K of every workload that the table does not pin is learned from its acceptance,
    the load and the engine's step times. These come from the file `step_times` (`python -m peagle.vllm.calibrate`);
    without it a cautious model stands in. `objectives`: by workload. `state`: a file where what is learned is saved,
    and found again after a restart."""

    policy: Literal["fixed", "adaptive"] = "fixed"
    default: int | None = Field(default=None, ge=0)
    max: int | None = Field(default=None, ge=0)
    by_workload: dict[str, int] = Field(default_factory=dict)
    step_times: str | None = None
    state: str | None = None
    objectives: dict[str, ObjectiveSettings] = Field(default_factory=dict)

    def times(
        self, max_draft_tokens: int, *, on_gpu: bool = False, full_graph_depths: Sequence[int] | None = None
    ) -> StepTimes:
        """Step times of the targets' engines: the measured table, or the model that stands in for one, of an engine on
        a GPU (with full CUDA graphs at these depths) or a CPU.

        Raises:
            ValueError: the file cannot be read, or is of another K_max.
        """
        if self.step_times is None:
            return default_step_times(max_draft_tokens, on_gpu=on_gpu, full_graph_depths=full_graph_depths)
        times = StepTimes.load(self.step_times)
        if times.max_draft_tokens != max_draft_tokens:
            raise ValueError(
                f"step times {self.step_times}: measured with max_draft_tokens = {times.max_draft_tokens}, "
                f"the drafter has {max_draft_tokens}: measure this engine with python -m peagle.vllm.calibrate"
            )
        return times


def check_depth(depth: DepthSettings, deepest: int, *, is_scaled: bool = False) -> list[str]:
    """A line for each problem; `deepest` is K_max. `is_scaled`: autoscaling reads the step times too."""
    problems: list[str] = []
    limit, because = deepest, f"drafter.max_draft_tokens, {deepest}"
    if depth.max is not None and depth.max > deepest:
        problems.append(f"depth.max is {depth.max}, above {because}")
    elif depth.max is not None:
        limit, because = depth.max, f"depth.max, {depth.max}"
    if depth.default is not None and depth.default > limit:
        problems.append(f"depth.default is {depth.default}, above {because}")
    for section in ("by_workload", "objectives"):
        for tag in getattr(depth, section):
            if not is_workload_tag(tag):
                problems.append(f"depth.{section} has the tag {tag!r:.80}: a tag is 1 to 64 letters, digits or . _ : -")
    for tag, k in depth.by_workload.items():
        if not 0 <= k <= limit:
            problems.append(f"depth.by_workload.{tag} is {k}, outside 0..{limit} ({because})")
    if depth.policy == "fixed":
        for key in ("step_times", "state", "objectives"):
            if getattr(depth, key) and not (key == "step_times" and is_scaled):
                problems.append(f"depth.{key} is read by the adaptive policy only: write depth.policy: adaptive")
    elif both := sorted(depth.by_workload.keys() & depth.objectives.keys()):
        problems.append(f"depth.by_workload pins K of {both[0]}, so depth.objectives.{both[0]} decides nothing")
    if depth.step_times is not None and not Path(depth.step_times).is_file():
        problems.append(f"depth.step_times: {depth.step_times} is no file")
    elif depth.policy == "adaptive" or depth.step_times is not None:
        try:
            depth.times(deepest)
        except ValueError as error:
            problems.append(f"depth.step_times: {error}")
    return problems
