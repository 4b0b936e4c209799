"""Architecture ``gemma3`` (text) of a GGUF file in Hugging Face's terms: configuration, tensor names, norm weights.

GGUF leaves three constants to the reader, which llama.cpp has in its source: the order of local and global layers, the
rotary base of the local ones, and the scale of queries.
"""

from typing import Any

import gguf
import torch

from peagle.gguf_fields import decimal, optional, token_ids, value

WEIGHT_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLOBAL_EVERY = 6  # five layers see a window, the sixth sees all
_LOCAL_ROPE_THETA = 10_000.0
_NUM_LAYERS_27B = 62  # its queries are scaled by hidden size / heads, all others' by the head size


def model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """``config.json`` of a Gemma 3 text model, from the GGUF's metadata.

    Raises ValueError for a scaled RoPE, which the metadata describes and this does not.
    """
    if (scaling := optional(reader, "gemma3.rope.scaling.type")) not in (None, "none"):
        raise ValueError(f"gemma3.rope.scaling.type: only an unscaled RoPE can be converted, this GGUF has {scaling!r}")
    num_layers = int(value(reader, "gemma3.block_count"))
    hidden_size = int(value(reader, "gemma3.embedding_length"))
    num_heads = int(value(reader, "gemma3.attention.head_count"))
    head_dim = int(value(reader, "gemma3.attention.key_length"))
    global_theta = float(value(reader, "gemma3.rope.freq_base"))
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": hidden_size,
        "intermediate_size": int(value(reader, "gemma3.feed_forward_length")),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(value(reader, "gemma3.attention.head_count_kv")),
        "head_dim": head_dim,
        "vocab_size": len(value(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": int(value(reader, "gemma3.context_length")),
        "rms_norm_eps": decimal(reader, "gemma3.attention.layer_norm_rms_epsilon"),
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == _NUM_LAYERS_27B else head_dim,
        "sliding_window": int(value(reader, "gemma3.attention.sliding_window")),
        "layer_types": [
            "full_attention" if (layer + 1) % _GLOBAL_EVERY == 0 else "sliding_attention" for layer in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_theta": global_theta, "rope_type": "default"},
            "sliding_attention": {"rope_theta": _LOCAL_ROPE_THETA, "rope_type": "default"},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        **token_ids(reader),
        "dtype": "bfloat16",
        "use_cache": True,
    }


def as_hugging_face(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The values of a GGUF tensor as the Hugging Face tensor `name` holds them.

    GGUF's norm weights are factors; Hugging Face's are added to one.
    """
    return weight - 1 if name.endswith("norm.weight") else weight
