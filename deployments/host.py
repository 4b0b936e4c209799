"""The program that runs Ray for `peagle serve`, and ends what processes of its session leave behind.

It imports no more than Ray, because the whole service waits for it.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray

TERMINATE_S = 5.0


def host_ray(num_cpus: int) -> None:
    """Run Ray until standard input ends: also when `peagle serve` was killed. This process leads a session, and nothing
    of that session is left when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # what Ray says of its defaults is no news to who started the service
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    context: Any = ray.init(address="local", num_cpus=num_cpus, include_dashboard=True, **quiet)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    has_token = os.environ.get("RAY_AUTH_MODE") == "token"
    found = {"address": context.address_info["gcs_address"], "has_token": has_token}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    with contextlib.suppress(Exception):
        ray.shutdown()
    end_session()


def session_processes() -> list[int]:
    """The processes of the session that this one leads, without this one, and without Python's trackers of shared
    memory: they unlink what the others leave, and end by themselves after them."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            has_ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            is_tracker = b"resource_tracker" in (folder / "cmdline").read_bytes()
            if os.getsid(pid) == os.getpid() != pid and not has_ended and not is_tracker:
                pids.append(pid)
    return pids


def end_session() -> None:
    """End these processes, first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + TERMINATE_S
        for pid in session_processes():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        while session_processes() and time.monotonic() < end_s:
            time.sleep(0.1)
