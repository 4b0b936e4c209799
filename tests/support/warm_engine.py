"""The engines of the tests are forked from one process that has imported what they need, as those of a replica are
(`peagle.vllm.fork_server`). Imports no engine itself: `conftest` reads this module for every test."""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peagle.vllm import fork_server

ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Of an engine on cores that it shares: threads that wait for each other there take twice the processor time."""
PRELOADED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama_eagle3",
    "peagle.vllm.scheduler",
    "peagle.vllm.workers",
    "peagle.vllm.remote_cpu",
]


def engine_environment() -> dict[str, str]:
    """Environment for a CPU engine: Intel's OpenMP where it is installed (speculation is slow without it)."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {
        **ONE_THREAD,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"LD_PRELOAD": str(library)} if library.exists() else {}),
    }


@contextmanager
def engines_start_warm() -> Iterator[None]:
    """Engines that start meanwhile come from the server, with `engine_environment`. The first one starts it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment().items():
            patch.setenv(name, value)
        from vllm.utils import system_utils

        multiprocessing.set_forkserver_preload(PRELOADED)
        patch.setattr(system_utils, "multiprocessing", system_utils.multiprocessing)  # put back afterwards
        fork_server.use()
        yield
