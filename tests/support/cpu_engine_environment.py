"""Environment of the CPU engines that tests start. Imports no engine: `conftest` reads it for every test."""

import sys
from pathlib import Path

HEAVY_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def preload_environment() -> dict[str, str]:
    """Environment for a CPU engine: Intel's OpenMP where it is installed (speculation is slow without it)."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {**HEAVY_ENVIRONMENT, **({"LD_PRELOAD": str(library)} if library.exists() else {})}
