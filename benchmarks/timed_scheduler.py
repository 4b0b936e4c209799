"""The schedulers of `peagle.vllm.scheduler`, with the time of every decoding step on one of its outputs.

Enters: nothing more than into those. Leaves: besides, a `TimedStep` header on the first output of each timed step, and
once, on the first output of all, what kind of engine this is. For `peagle.vllm.calibrate`; an engine that serves does
not need the headers and can keep a `StepClock` of its own.
"""

import json
import time
from typing import TYPE_CHECKING, Any

from peagle.vllm.acceptance import with_header
from peagle.vllm.engine import engine_conditions
from peagle.vllm.scheduler import PerRequestDepthAsyncScheduler, PerRequestDepthScheduler
from peagle.vllm.trimming import STEP_TIME_HEADER, StepClock

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

    _Base = PerRequestDepthScheduler
else:
    _Base = object

CONDITIONS_HEADER = "x-peagle-engine"


class _Timed(_Base):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_clock = StepClock()
        self._untold: str | None = json.dumps(engine_conditions(self.vllm_config))

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        timed = self._step_clock.arrived(time.perf_counter(), scheduler_output)
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output)
        if not self.has_requests():
            self._step_clock.pause()
        first = next((output for of in outputs_by_client.values() for output in of.outputs), None)
        if first is not None:
            if timed is not None:
                first.trace_headers = with_header(first.trace_headers, STEP_TIME_HEADER, timed.encode())
            if self._untold is not None:
                first.trace_headers = with_header(first.trace_headers, CONDITIONS_HEADER, self._untold)
                self._untold = None
        return outputs_by_client


class TimedScheduler(_Timed, PerRequestDepthScheduler):
    """Synchronous scheduling."""


class TimedAsyncScheduler(_Timed, PerRequestDepthAsyncScheduler):
    """Asynchronous scheduling."""
