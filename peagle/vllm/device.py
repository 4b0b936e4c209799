"""What a worker of an engine runs on, as the service shows it: a method of our workers."""

from typing import Any

import psutil
import torch


def describe_device(worker: Any) -> dict[str, Any]:
    """Its name, the bytes of its memory, and those in use now: of a GPU by whomever, of a CPU by this process."""
    if worker.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(worker.device)
        return {"name": torch.cuda.get_device_name(worker.device), "used_bytes": total - free, "total_bytes": total}
    used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    return {"name": f"CPU, {torch.get_num_threads()} threads", "used_bytes": used, "total_bytes": total}
