"""A block drafter drafts behind our scheduler and worker what it drafts in stock vLLM with the same weights.

Both engines fill their weights from the same seeds, and have one request at a time: what a drafter proposes then
depends on nothing but the text.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.vllm.engine_settings import engine_kwargs
from tests.support.engine_harness import Job, RunningEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM runs block drafters on GPUs")

K_MAX, NUM_TOKENS = 7, 24
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
DRAFTER = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 8,
    "block_size": K_MAX + 1,
    "dflash_config": {"mask_token_id": 4000, "target_layer_ids": [1, 4, 6]},
}


class DraftRecorder:
    """vLLM's `worker_extension_cls`: weights that tell texts apart, and what the speculator proposes."""

    model_runner: Any

    def start_recording(self) -> None:
        for model in (self.model_runner.model, self.model_runner.speculator.model):
            for seed, weight in enumerate(model.parameters()):
                if weight.ndim == 1:
                    weight.data.fill_(1)
                else:
                    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
                    weight.data.copy_(drawn / weight.shape[-1] ** 0.5)
        self.proposed: list[list[list[int]]] = []
        propose = self.model_runner.speculator.propose

        def recorded(*args: Any, **kwargs: Any) -> Any:
            drafts = propose(*args, **kwargs)
            self.proposed.append(drafts.tolist())
            return drafts

        self.model_runner.speculator.propose = recorded

    def recorded(self) -> list[list[list[int]]]:
        return self.proposed


def run(kwargs: dict[str, Any]) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Tokens of each answer, and all drafts in order."""
    extension = f"{__name__}.{DraftRecorder.__name__}"
    with RunningEngine({**kwargs, "worker_extension_cls": extension}) as engine:
        engine.call_workers("start_recording")
        jobs = [Job([17 * place + step for step in range(40)], NUM_TOKENS) for place in range(1, 5)]
        tokens = [engine.run([job])[0].tokens for job in jobs]
        return tokens, engine.call_workers("recorded")[0]


def test_drafts_are_those_of_stock_vllm(tmp_path: Path) -> None:
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    common: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.1,
    }
    target, drafter = str(tmp_path / "target"), str(tmp_path / "drafter")
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": K_MAX}
    stock = run({"model": target, "dtype": "bfloat16", **common, "speculative_config": speculative})
    ours = run(
        engine_kwargs(
            target, drafter, method="dflash", max_draft_tokens=K_MAX, dtype="bfloat16", on_cpu=False, extra=common
        )
    )
    assert ours == stock
    assert len({token for step in stock[1] for drafts in step for token in drafts}) > K_MAX
