"""Checkpoints to measure engines with: shapes that are real, weights that are not.

The target is one config.json, to be loaded with `load_format="dummy"`. The head is a checkpoint of random weights,
because vLLM decides from the files which tables a head has of its own: a head without an output matrix would be given
the target's, five times as large.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peagle.checkpoint import expected_tensors
from peagle.config import DrafterConfig

QWEN3_CODER_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Shape of Qwen3-Coder-30B-A3B-Instruct: 30.5 billion parameters, 3.3 billion active per token, 61 GB in bf16."""

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
"""Shape of Llama-3.1-8B-Instruct: 8.0 billion parameters, 16 GB in bf16."""

HEAD_MLP_SIZE = 6144
DRAFT_VOCAB_SIZE = 32_000


def write_target(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """A directory that vLLM takes for a target, with `load_format="dummy"` and `skip_tokenizer_init`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or QWEN3_CODER_30B, indent=2))
    return directory


def write_embedding(directory: Path, config: dict[str, Any]) -> None:
    """The target's embedding table alone, random: what a drafter reads of a target's checkpoint."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    table = torch.randn(config["vocab_size"], config["hidden_size"], generator=generator).mul_(0.02).to(torch.bfloat16)
    save_file({"model.embed_tokens.weight": table}, directory / "model.safetensors", metadata={"format": "pt"})


def write_head(
    directory: Path,
    num_depths: int,
    target: dict[str, Any] | None = None,
    *,
    num_layers: int = 4,
    mlp_size: int = HEAD_MLP_SIZE,
    draft_vocab_size: int = DRAFT_VOCAB_SIZE,
    parallel: bool = True,
) -> Path:
    """A plain P-EAGLE head, or EAGLE-3 head if not `parallel`, of random bf16 weights for `target`.

    The same for the same arguments.
    """
    import torch
    from safetensors.torch import save_file

    target = target or QWEN3_CODER_30B
    config = DrafterConfig.for_target(
        target,
        num_layers=num_layers,
        intermediate_size=mlp_size,
        draft_vocab_size=draft_vocab_size,
        ptd_token_id=target["vocab_size"] - 1 if parallel else None,
        num_depths=num_depths,
    )
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, expected in expected_tensors(config).items():
        if name in ("embed_tokens.weight", "mask_embedding", "t2d"):
            continue  # the target's table serves both
        if name == "d2t":
            tensors[name] = torch.zeros(expected.shape, dtype=torch.int64)  # draft token i is target token i
        elif "norm" in name:
            tensors[name] = torch.ones(expected.shape, dtype=torch.bfloat16)
        elif expected.required or name == "lm_head.weight":
            weights = torch.randn(expected.shape, generator=generator, dtype=torch.float32) * 0.02
            tensors[name] = weights.to(torch.bfloat16)
    if parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"torch_dtype": "bfloat16"}, indent=2))
    return directory
