"""The engines of the tests are forked from one process that has imported what they need. Imports no engine itself:
`conftest` reads this module for every test.

vLLM spawns an engine's process, and that one spawns its worker: each imports torch and vLLM anew, which on two cores
takes most of an engine's start. Here both are forked from a server process (the forkserver of `multiprocessing`) that
has imported them and done nothing else.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Of an engine on cores that it shares: threads that wait for each other there take twice the processor time."""
HEAVY_ENVIRONMENT = {
    **ONE_THREAD,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PRELOADED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama_eagle3",
    "peagle.vllm.scheduler",
    "peagle.vllm.workers",
    "peagle.vllm.remote_cpu",
]


class WarmProcess(ForkServerProcess):
    """Has the environment of the process that starts it, and not the server's. It forks its worker: vLLM's settings for
    CPUs name `spawn`, which its environment could not overrule."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        from vllm.v1.executor import multiproc_executor

        multiproc_executor.get_mp_context = lambda: get_context("fork")
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess


CONTEXT = WarmContext()


def engine_environment() -> dict[str, str]:
    """Environment for a CPU engine: Intel's OpenMP where it is installed (speculation is slow without it)."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {**HEAVY_ENVIRONMENT, **({"LD_PRELOAD": str(library)} if library.exists() else {})}


@contextmanager
def engines_start_warm() -> Iterator[None]:
    """Engines that start meanwhile come from the server, with `engine_environment`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment().items():
            patch.setenv(name, value)
        from vllm.v1.engine import utils

        CONTEXT.set_forkserver_preload(PRELOADED)
        patch.setattr(utils, "get_mp_context", lambda: CONTEXT)
        yield
