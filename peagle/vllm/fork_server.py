"""A process that has imported vLLM, from which the processes of an engine are forked.

In a Ray actor vLLM spawns a process for each model class that is new to it, then the engine's process, and that one its
worker's. Each would import vLLM anew, one after the other. `start` lets a server of Python's `multiprocessing` import
it while the actor itself does. It imports what `vllm serve` has imported where it forks, so CUDA is not initialised.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import context, forkserver, reduction
from types import SimpleNamespace
from typing import Any

MODULES = [
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
]

PR_SET_PDEATHSIG = 1  # of Linux' prctl.h


def start() -> None:
    """Let the server begin to import. Does nothing where it runs."""
    path = os.environ.get("PYTHONPATH")
    # The server's own search path, which Python 3.11 does not pass on.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        multiprocessing.set_forkserver_preload(MODULES)
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def use() -> None:
    """Have vLLM fork from the server where it would spawn, in this process and in those that it starts so."""
    from vllm.utils import system_utils

    system_utils.multiprocessing = SimpleNamespace(get_context=lambda _: Context())  # type: ignore[assignment]


def inspect_models() -> None:
    """Have vLLM read model classes in processes forked from the server. It reads each class once, keeps on disk what it
    wants to know of it, and uses another process so that this one does not initialise CUDA."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _call_in_process  # type: ignore[assignment]


def _call_in_process(function: Callable[[], Any]) -> Any:
    import cloudpickle

    with ProcessPoolExecutor(1, mp_context=Context()) as pool:
        return pool.submit(_call, cloudpickle.dumps(function)).result()


def _call(pickled: bytes) -> Any:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as vLLM does in its own process: models may come from there
    return pickle.loads(pickled)()


class Process(context.ForkServerProcess):
    """One that has its parent's environment, as a spawned one has, and not the server's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_environment, (dict(os.environ), bytes(reduction.ForkingPickler.dumps(self.__dict__)))


class Context(context.ForkServerContext):
    Process = Process


def _with_environment(environ: dict[str, str], state: bytes) -> Process:
    # What is the same stays as it is: where the environment has moved, a process cannot change its title.
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ.items() - os.environ.items())
    use()
    # Ray ends the children of a replica that has died, so the server; the server's end ends this process.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent's server serves this process too; Python looks for one that is its child, and would start another.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    if threads := environ.get("OMP_NUM_THREADS"):  # which Torch has read already
        import torch

        torch.set_num_threads(int(threads.partition(",")[0]))
    process = Process.__new__(Process)
    process.__dict__.update(pickle.loads(state))
    return process
