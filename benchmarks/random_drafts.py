"""A worker of stock vLLM whose drafts are random tokens, for `benchmarks.headline --shape`.

An EAGLE-3 head of random weights repeats a few tokens. They meet few experts of a mixture-of-experts target, so that
its steps would be shorter than with a real head.
"""

from typing import Any, cast

from vllm.v1.worker.gpu_worker import Worker

from benchmarks.engines import Segments


class RandomDrafts(Worker):
    def compile_or_warm_up_model(self) -> Any:
        found = super().compile_or_warm_up_model()
        Segments.make_drafts_random(cast(Segments, self))
        return found
