"""What a worker of an engine runs on, as the service shows it."""

import os
from typing import Any

import psutil
import torch


def describe_device(device: torch.device | None) -> dict[str, Any]:
    """Its name, the bytes of its memory, and those in use now: of a GPU by whomever, of a CPU by this process."""
    if device is not None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"name": torch.cuda.get_device_name(device), "used_bytes": total - free, "total_bytes": total}
    used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    return {"name": f"CPU, {len(os.sched_getaffinity(0))} cores", "used_bytes": used, "total_bytes": total}
