"""Architecture ``llama`` of a GGUF file in Hugging Face's terms: configuration, tensor names, order of rows.

Tensor names end in their shape where one is needed: R rows of a projection, H hidden size, A heads, D head size.
"""

from typing import Any

import gguf
import torch

from peagle.gguf_fields import decimal, token_ids, value

WEIGHT_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """``config.json`` of a Llama, from the GGUF's metadata."""
    num_heads = int(value(reader, "llama.attention.head_count"))
    hidden_size = int(value(reader, "llama.embedding_length"))
    rope_theta = float(value(reader, "llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(value(reader, "llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(value(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden_size // num_heads,
        "vocab_size": len(value(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": int(value(reader, "llama.context_length")),
        "rms_norm_eps": decimal(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        **token_ids(reader),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def as_hugging_face(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The values of a GGUF tensor as the Hugging Face tensor `name` holds them: only query and key differ."""
    if name.endswith("q_proj.weight"):
        return _to_half_split_rotary(weight, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        return _to_half_split_rotary(weight, config["num_key_value_heads"])
    return weight


def _to_half_split_rotary(weight_RH: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[R, H] in GGUF's row order (rotary pairs 0,1 | 2,3 | ...) -> Hugging Face's (pairs 0,D/2 | 1,D/2+1 | ...).

    R = num_heads * D rows. With D = 4, rows a0 a1 a2 a3 of one head become a0 a2 a1 a3.
    """
    num_rows, hidden_size = weight_RH.shape
    pairs_APXH = weight_RH.reshape(num_heads, num_rows // num_heads // 2, 2, hidden_size)  # P pairs of X = 2 rows
    return pairs_APXH.swapaxes(1, 2).reshape(num_rows, hidden_size)
