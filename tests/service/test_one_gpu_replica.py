"""A target with one GPU runs its engine beside its replica, on the GPU of its bundle; Ray is only told of GPUs here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.service, pytest.mark.long]


def test_scheduler_and_worker_are_a_process_each_which_sees_the_gpu_of_the_bundle(target_dir: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": "local", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"  # some clusters have it; the replica knows its own
    environment["RAY_worker_niceness"] = "0"  # by Ray's default of 15 the other tests starve it
    command = [sys.executable, "-m", "tests.support.one_gpu_replica", str(target_dir), "0.4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["worker_gpus"] == [found["gpu"]] != [""]
    assert found["num_processes"] == 3
    assert (found["executor"], found["num_tokens"]) == ("mp", 3)
    assert found["left_for_others"] == pytest.approx(1.6), "of two GPUs, the bundle's 0.4 taken"
