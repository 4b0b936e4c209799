"""Data generation around the engine: which GPU a worker gets."""

import os
from collections import Counter

import pytest

from peagle.vllm.generate import visible_gpus, worker_environment


@pytest.mark.parametrize(("named", "gpus"), [("2,5", ["2", "5"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]), ("", [])])
def test_named_gpus_are_the_visible_ones(monkeypatch, named: str, gpus: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == gpus


def test_workers_are_dealt_out_evenly() -> None:
    gpus = ["0", "1", "2", "3"]
    dealt = [worker_environment(worker, gpus)["CUDA_VISIBLE_DEVICES"] for worker in range(16)]
    assert dealt[:5] == ["0", "1", "2", "3", "0"]
    assert Counter(dealt) == dict.fromkeys(gpus, 4)
    assert worker_environment(0, gpus)["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("gpus", [[], ["3"]])
def test_one_gpu_or_none_is_left_as_it_is(monkeypatch, gpus: list[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(1, gpus)
