"""A Llama model in one GGUF file -> the files of a normal Hugging Face checkpoint.

What enters: an open GGUF file of architecture ``llama`` with a byte-level BPE tokenizer.
What leaves: ``{file name: bytes}`` for config, generation config, weights in bfloat16, tokenizer and chat template.
The result depends on the GGUF file alone, byte for byte, so its hash can be pinned.

Tensor names end in their shape where one is needed: R rows of a projection, H hidden size, A heads, D head size.
"""

import hashlib
import json
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like: matched before BPE, hidden from decoded text

_LAYER_NAMES = {
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

# How llama.cpp splits text before BPE, by the name in `tokenizer.ggml.pre`. "smollm": every digit stands alone, and is
# cut off before the byte-level rule sees the text (so that a run of spaces before a number is not attached to it).
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    ),
}


def checkpoint_files(reader: gguf.GGUFReader) -> tuple[dict[str, bytes], str]:
    """All files of the checkpoint by name, and the sha256 of its weights (see `weights_digest`).

    Raises ValueError when the GGUF is not a plain Llama with a known tokenizer.
    """
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture: only 'llama' can be converted, this GGUF has {architecture!r}")
    config = _model_config(reader)
    template = _value(reader, "tokenizer.chat_template")
    weights = _weights(reader, config)
    files = {
        "config.json": _json(config),
        "generation_config.json": _json(_generation_config(config)),
        "tokenizer.json": _tokenizer(reader).to_str().encode(),
        "tokenizer_config.json": _json(_tokenizer_config(reader, config)),
        "chat_template.jinja": template.encode(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
    }
    return files, weights_digest(weights)


def weights_digest(weights: dict[str, torch.Tensor]) -> str:
    """Hex sha256 over name, shape and contents of every tensor in the order of names.

    Unlike a hash of the safetensors file it does not depend on how a safetensors release writes its header.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"{key}: missing from the GGUF's metadata")
    return field.contents()


def _model_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """``config.json`` of a Llama, from the GGUF's metadata."""
    num_heads = int(_value(reader, "llama.attention.head_count"))
    hidden_size = int(_value(reader, "llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden_size // num_heads,
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        # GGUF keeps float32; 7 digits give back the decimal number that was meant (1e-05, not 9.999999747e-06).
        "rms_norm_eps": float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        "rope_parameters": {"rope_theta": float(_value(reader, "llama.rope.freq_base")), "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_value(reader, "tokenizer.ggml.padding_token_id")),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"_from_model_config": True}


def _weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor by its Hugging Face name, dequantized, in bfloat16, sorted by name."""
    weights = {}
    for tensor in reader.tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weight, name = torch.from_numpy(values), _weight_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weight = _to_half_split_rotary(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = _to_half_split_rotary(weight, config["num_key_value_heads"])
        weights[name] = weight.to(torch.bfloat16).contiguous()
    return dict(sorted(weights.items()))


def _weight_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor: ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        raise ValueError(f"{name}: not a tensor of a plain Llama")
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _to_half_split_rotary(weight_RH: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[R, H] in GGUF's row order (rotary pairs 0,1 | 2,3 | ...) -> Hugging Face's (pairs 0,D/2 | 1,D/2+1 | ...).

    R = num_heads * D rows. With D = 4, rows a0 a1 a2 a3 of one head become a0 a2 a1 a3.
    """
    num_rows, hidden_size = weight_RH.shape
    pairs_APXH = weight_RH.reshape(num_heads, num_rows // num_heads // 2, 2, hidden_size)  # P pairs of X = 2 rows
    return pairs_APXH.swapaxes(1, 2).reshape(num_rows, hidden_size)


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Byte-level BPE tokenizer; control tokens are special."""
    kind, split = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre: no rule for {kind!r}/{split!r}; known: {sorted(_PRE_TOKENIZERS)}")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer_config.json``; the generic class takes tokenizer.json as it stands, on every Transformers release."""
    tokens = _value(reader, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(_value(reader, "tokenizer.ggml.add_bos_token")),
        "add_prefix_space": bool(_value(reader, "tokenizer.ggml.add_space_prefix")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[int(_value(reader, "tokenizer.ggml.unknown_token_id"))],
    }
