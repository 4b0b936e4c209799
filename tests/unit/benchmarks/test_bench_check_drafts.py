"""What `benchmarks.check_drafts` records of a pass, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from benchmarks.check_drafts import Recorder


def test_it_records_the_hidden_states_that_a_pass_was_given() -> None:
    """A pass of some of the requests moves their rows together, in the buffer where the target left them."""
    buffer_NX = torch.arange(24.0).view(4, 6)
    taps, given = list(buffer_NX.split(2, dim=-1)), buffer_NX.clone()

    def propose(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer_NX[:2] = buffer_NX[2:].clone()
        return torch.tensor([[0, 0], [5, 6]])

    runner = SimpleNamespace(speculator=SimpleNamespace(propose=propose, _num_ahead=2))
    runner.speculator._members = lambda batch: np.array([], np.int64)
    recorder = Recorder()
    recorder.model_runner = runner
    recorder.start_recording(None)
    batch = SimpleNamespace(
        req_ids=["0", "1"],
        num_reqs=2,
        num_tokens=4,
        query_start_loc=torch.tensor([0, 2, 4]),
        num_scheduled_tokens=np.array([2, 2]),
        input_ids=torch.arange(4),
        positions=torch.arange(4),
        idx_mapping=torch.tensor([1, 0]),
    )
    one_each = torch.ones(2, dtype=torch.int64)
    runner.speculator.propose(batch, None, None, None, taps, one_each, one_each, one_each[:, None], one_each[None])
    (step,) = recorder.recorded
    assert torch.equal(step["taps"], given)
    assert step["drafts"] == [[0, 0], [5, 6]]
