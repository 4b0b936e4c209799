"""A drafter by itself, without Ray (`peagle drafter`)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.engine import DraftEngine
from peagle.drafter.server import DrafterServer
from peagle.drafter.serving import DrafterLimits, load_served_head
from peagle.drafter.steps import DTYPES


def serve_alone(
    heads: list[Path],
    target_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    **limits: Any,
) -> int:
    """Serves until SIGINT or SIGTERM; writes its address and its heads' digests to standard output as a line of JSON.

    device, dtype: by default a GPU in bfloat16 where there is one, else the CPU in float32. limits: fields of
    `DrafterLimits`. With `PEAGLE_DRAFTER_KEY` in the environment only targets that name this key are let in. Returns
    the exit status: 0 when it was asked to stop, 1 when it failed. Raises ValueError or OSError for bad input.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(sorted(DTYPES))}")
    allowed = DrafterLimits(**limits)
    loaded = [load_served_head(head_dir, target_dir, allowed, device, DTYPES[dtype]) for head_dir in heads]
    engine = DraftEngine(
        {i: runtime for i, (runtime, _) in enumerate(loaded)}, max_num_requests=allowed.max_num_requests
    )
    served = {i: served for i, (_, served) in enumerate(loaded)}
    key = os.environ.get("PEAGLE_DRAFTER_KEY", "")
    server = DrafterServer(engine, served, host, port, device=device, key=key)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server.start()
    digests = {str(index): head.digest for index, head in server.heads.items()}
    sys.stdout.write(json.dumps({"address": server.address, "heads": digests}) + "\n")
    sys.stdout.flush()
    while not stopped.wait(1.0) and server.is_healthy():
        pass
    server.stop()
    return 0 if stopped.is_set() else 1
