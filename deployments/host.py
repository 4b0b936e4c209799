"""The program that runs Ray for `peagle serve`, and clears away what killed processes of its session leave behind.

It imports no more than Ray, because the whole service waits for it.
"""

import contextlib
import json
import logging
import os
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray

TERMINATE_S = 5.0
SOCKETS_INTERVAL_S = 10.0


def host_ray(num_cpus: int) -> None:
    """Run Ray until standard input ends: also when `peagle serve` was killed. This process leads a session, and nothing
    of that session is left when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # what Ray says of its defaults is no news to who started the service
    started_s = time.time()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    context: Any = ray.init(address="local", num_cpus=num_cpus, include_dashboard=True, **quiet)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    has_token = os.environ.get("RAY_AUTH_MODE") == "token"
    found = {"address": context.address_info["gcs_address"], "has_token": has_token}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    sockets: set[Path] = set()
    while not select.select([sys.stdin], [], [], SOCKETS_INTERVAL_S)[0]:
        sockets |= session_sockets()
    with contextlib.suppress(Exception):
        ray.shutdown()
    end_session()
    for path in (*sockets, *abandoned_segments(started_s)):
        with contextlib.suppress(OSError):
            path.unlink()


def is_running(pid: int) -> bool:
    """Whether there is such a process. One that has ended and that its parent has not asked for yet is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def session_processes() -> list[int]:
    """The processes of the session that this one leads, without this one."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            if os.getsid(pid) == os.getpid() != pid and is_running(pid):
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


def session_sockets() -> set[Path]:
    """Sockets in the file system that processes of this session hold open: a killed engine leaves its own there."""
    rows = [line.split(None, 7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = {f"socket:[{row[6]}]": Path(row[7]) for row in rows if len(row) == 8 and row[7].startswith("/")}
    links = set()
    for pid in session_processes():
        with contextlib.suppress(OSError):
            links |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return {path for link, path in paths.items() if link in links}


def abandoned_segments(since_s: float) -> list[Path]:
    """Shared memory and semaphores of engines, begun since then, that no process of this machine maps any more; and
    what OpenMP has registered there for processes that are gone."""
    mapped = set()  # inodes: a semaphore is mapped under the name that it was made with, not the one that it has
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= set(re.findall(r"(\d+) +/dev/shm/", maps.read_text(errors="replace")))
    found = []
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            about = path.stat()
            is_ours = about.st_uid == os.getuid() and about.st_ctime >= since_s
            owner = re.fullmatch(r"__KMP_REGISTERED_LIB_(\d+)_\d+", path.name)
            is_segment = path.name.startswith(("psm_", "sem.mp-")) and str(about.st_ino) not in mapped
            if is_ours and (is_segment or (owner and not is_running(int(owner[1])))):
                found.append(path)
    return found
