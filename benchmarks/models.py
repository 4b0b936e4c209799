"""Checkpoints to measure engines with: shapes that are real, weights that are not.

The target is one config.json, to be loaded with `load_format="dummy"`. The head is a checkpoint of random weights,
because vLLM decides from the files which tables a head has of its own: a head without an output matrix would be given
the target's, five times as large.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from peagle.checkpoint import expected_tensors
from peagle.config import MIN_DEFAULT_LAYERS, DrafterConfig

QWEN3_CODER_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "eos_token_id": 151645, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 5472, "max_position_embeddings": 262144, "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}  # fmt: skip
"""Shape of Qwen3-Coder-30B-A3B-Instruct: 30.5 billion parameters, 3.3 billion active per token, 61 GB in bf16."""

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128009,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
"""Shape of Llama-3.1-8B-Instruct: 8.0 billion parameters, 16 GB in bf16."""

QWEN2_CODER_1B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 1536,
    "intermediate_size": 8960, "max_position_embeddings": 32768, "model_type": "qwen2", "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49152,
}  # fmt: skip
"""Shape of Qwen2.5-Coder-1.5B-Instruct, with the vocabulary of the embedded target's tokenizer, so that answers are
text: a target whose server, and not the GPU, is the limit with many requests."""

QWEN3_CODER_30B_FP8: dict[str, Any] = {
    **QWEN3_CODER_30B,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
"""The same as Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8, the target of the published head: 31 GB."""

GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002, "head_dim": 64,
    "hidden_size": 2880, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "num_local_experts": 128, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 201088,
}  # fmt: skip
"""Shape of gpt-oss-120b: 117 billion parameters, 5.1 billion active per token, 65 GB with its experts in MXFP4."""

GPT_OSS_20B: dict[str, Any] = {
    **GPT_OSS_120B,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
}
"""Shape of gpt-oss-20b: 21 billion parameters, 3.6 billion active per token, 14 GB with its experts in MXFP4."""

GEMMA_4_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_k_eq_v": True, "bos_token_id": 2,
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_size": 5376,
    "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "max_position_embeddings": 262144,
    "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
    "num_key_value_heads": 16, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip
"""Shape of the language model of Gemma-4-31B-it: 30.7 billion parameters, 61 GB in bf16."""

HEAD_MLP_SIZE = 6144
DRAFT_VOCAB_SIZE = 32_000
PUBLISHED_HEADS: dict[str, dict[str, Any]] = {
    "GPT_OSS_120B": {"num_depths": 8, "mlp_size": 11520, "draft_vocab_size": 201088},
    "GPT_OSS_20B": {"num_depths": 10, "mlp_size": 14400, "draft_vocab_size": 201088},
    "QWEN3_CODER_30B_FP8": {"num_depths": 18},
    "GEMMA_4_31B": {"num_depths": 7, "mlp_size": 21504},
}
"""`write_head` for what is known of the published heads: depths and vocabularies; MLPs of gpt-oss's as their numbers of
parameters (1.7 and 1.8 billion) ask for. Of Gemma's nothing is known."""


def spawn_engines() -> None:
    """Engines of this process are spawned. Heads are written here by torch's threads, and an engine that is forked
    after that waits for threads that it has not."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


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

    The same for the same arguments. It shares the target's embeddings, and with the whole vocabulary its output matrix.
    """
    import torch
    from safetensors.torch import save_file

    target = target or QWEN3_CODER_30B
    few = {} if target["num_hidden_layers"] >= MIN_DEFAULT_LAYERS else {"aux_layer_ids": (0, 1, 2)}
    config = DrafterConfig.for_target(
        target,
        num_layers=num_layers,
        intermediate_size=mlp_size,
        draft_vocab_size=draft_vocab_size,
        ptd_token_id=target["vocab_size"] - 1 if parallel else None,
        num_depths=num_depths,
        **few,
    )
    tables = {"lm_head.weight"} if draft_vocab_size < target["vocab_size"] else set()
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, expected in expected_tensors(config).items():
        if not expected.required and name not in tables:
            continue
        if name == "d2t":
            tensors[name] = torch.zeros(expected.shape, dtype=torch.int64)  # draft token i is target token i
        elif "norm" in name:
            tensors[name] = torch.ones(expected.shape, dtype=torch.bfloat16)
        else:
            weights = torch.randn(expected.shape, generator=generator, dtype=torch.float32) * 0.02
            tensors[name] = weights.to(torch.bfloat16)
    if parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"torch_dtype": "bfloat16"}, indent=2))
    return directory
