"""vLLM's network of a head, whole and split behind its last attention, in float32 on the CPU."""

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.llama_eagle3 import LlamaModel

from peagle.vllm.engine_settings import engine_kwargs
from peagle.vllm.last_layer import LastLayer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its network is the CPU's")


@pytest.fixture
def network(target_dir: Path, head_dir: Path, environment: None, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """The network with the shipped head's weights, and the configuration of its engine."""
    # From here on torch's calls of an accelerator do nothing; GPUs collect this module too, and must not import it.
    importlib.import_module("vllm.v1.worker.cpu_worker")
    kwargs = engine_kwargs(target_dir, head_dir, on_cpu=True, dtype="float32", extra={"enforce_eager": True})
    config = EngineArgs(**kwargs).create_engine_config()
    parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, "gloo")
    # vLLM's loader empties the cache of a device that is not there; a CPU's engine patches the same name.
    with set_current_vllm_config(config), mock.patch.object(torch.accelerator, "empty_cache"):
        parallel_state.initialize_model_parallel(1)
        found = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        torch.nn.init.normal_(found.model.embed_tokens.weight)  # the target's, which is not loaded
        yield found, config
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def run(network: Any, config: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pass over random rows."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, config.model_config.get_hidden_size(), generator=draw)
    with set_forward_context(None, config, num_tokens=rows), torch.inference_mode():
        normed, stream = network(torch.arange(rows), torch.arange(rows), hidden, None)
    return normed, stream


def test_the_rest_of_the_layer_gives_what_the_whole_network_gave(network: tuple[Any, Any]) -> None:
    whole, config = network
    split = copy.deepcopy(whole)
    for layer in (*whole.model.layers, *split.model.layers):  # without a cache there is nothing to attend to
        layer.self_attn.attn.forward = lambda q, k, v: q.sin()
    last_layer = LastLayer(split)
    expected, _ = run(whole, config, 9)
    attended_NA, stream_NH = run(split, config, 9)
    assert attended_NA.shape == (9, last_layer.input_size)
    some = torch.tensor([8, 2, 2, 5])
    torch.testing.assert_close(last_layer(attended_NA[some], stream_NH[some]), expected[some])
    assert not expected[some].allclose(expected[:4])


def test_a_network_of_another_kind_is_refused(network: tuple[Any, Any]) -> None:
    found, _ = network
    assert isinstance(found.model, LlamaModel)
    assert isinstance(found.model.layers[-1].mlp, LlamaMLP)
    found.model.layers[-1].mlp = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Eagle3LlamaForCausalLM.*last layer"):
        LastLayer(found)
