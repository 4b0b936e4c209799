"""Environment variables with which vLLM's CPU engine is at its speed. Pure: imports no vLLM, changes nothing.

The engine's process must be started with them: they are read while libraries load.
"""

import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path

MAX_SMALL_MACHINE_CORES = 4


def cpu_environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to `inherited` for an engine on this machine's CPU; what it has already, it keeps.

    Intel's OpenMP runtime comes before any other (vLLM warns that speculation is slow without it); the KV cache gets a
    size of its own (GiB); and where there are few cores all of them compute: vLLM alone keeps one free for processes
    that mostly wait. Engine processes are spawned, so that the first of these takes effect.
    """
    found = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= MAX_SMALL_MACHINE_CORES:
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    added = {name: value for name, value in found.items() if name not in inherited}
    preload = openmp_preload(inherited.get("LD_PRELOAD", ""))
    if preload != inherited.get("LD_PRELOAD", ""):
        added["LD_PRELOAD"] = preload
    return added


def openmp_preload(preload: str) -> str:
    """The value of LD_PRELOAD with Intel's OpenMP runtime first, where it is installed, and no other beside it.

    vLLM ends its start when GNU's is there too, and itself adds that one to the environment of a process that makes an
    engine's configuration without Intel's.
    """
    library = intel_openmp()
    if library is None:
        return preload
    others = [one for one in re.split("[: ]+", preload) if one and "libgomp" not in one]
    return ":".join(others if any("libiomp5" in one for one in others) else [str(library), *others])


def intel_openmp() -> Path | None:
    """Its library, where the package `intel-openmp` is installed."""
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    library = next((file for file in files if file.name == "libiomp5.so"), None)
    path = None if library is None else Path(str(library.locate())).resolve()
    return path if path is not None and path.is_file() else None
