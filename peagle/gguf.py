"""Reading one value, or one number that was meant as a decimal, out of a GGUF file's metadata."""

import hashlib
import json
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from peagle import gguf as gguf_gemma3
from peagle import gguf as gguf_llama

# ====================================================================================================
# Reading one value, or one number that was meant as a decimal, out of a GGUF file's metadata.


def value(reader: gguf.GGUFReader, key: str) -> Any:
    """Raises ValueError naming the key when the metadata lacks it."""
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"{key}: missing from the GGUF's metadata")
    return field.contents()


def optional(reader: gguf.GGUFReader, key: str) -> Any:
    """The value, or None when the metadata lacks it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def decimal(reader: gguf.GGUFReader, key: str) -> float:
    """GGUF keeps float32; 7 digits give back the decimal number that was meant (1e-05, not 9.999999747e-06)."""
    return float(f"{value(reader, key):.7g}")


def token_ids(reader: gguf.GGUFReader) -> dict[str, int]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as `config.json` names them."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {ours: int(value(reader, f"tokenizer.ggml.{theirs}")) for ours, theirs in names.items()}


# ====================================================================================================
# The tokenizer of a GGUF file as a `tokenizers.Tokenizer`: byte-level BPE, or SentencePiece's BPE with byte fallback.
#
# The one is checked against llama.cpp's tokenizer (`tests/test_prepare.py`), the other against SentencePiece's own
# (`tests/test_gguf.py`).

# GGUF's token types.
_NORMAL = 1  # made by merges
_CONTROL = 3  # <|im_start|> and the like: matched before BPE, hidden from decoded text
_USER_DEFINED = 4  # matched before BPE, part of the text

_SPACE = "▁"  # how SentencePiece writes a space

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


def tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Raises ValueError for a kind of tokenizer that has no rule here."""
    kind, split = value(reader, "tokenizer.ggml.model"), value(reader, "tokenizer.ggml.pre")
    if kind == "gpt2" and split in _PRE_TOKENIZERS:
        made = _byte_level(reader, split)
    elif kind == "llama" and not value(reader, "tokenizer.ggml.add_space_prefix"):
        made = _sentence_piece(reader)
    else:
        raise ValueError(
            f"tokenizer.ggml.pre: no rule for {kind!r}/{split!r}; known: 'gpt2' with {sorted(_PRE_TOKENIZERS)}, "
            "'llama' (SentencePiece's BPE) without add_space_prefix"
        )
    if value(reader, "tokenizer.ggml.add_bos_token"):
        bos_id = int(value(reader, "tokenizer.ggml.bos_token_id"))
        bos = made.id_to_token(bos_id)
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return made


def tokenizer_config(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer_config.json``; the generic class takes tokenizer.json as it stands, on every Transformers release."""
    tokens = value(reader, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(value(reader, "tokenizer.ggml.add_bos_token")),
        "add_prefix_space": bool(value(reader, "tokenizer.ggml.add_space_prefix")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[int(value(reader, "tokenizer.ggml.unknown_token_id"))],
    }


def chat_template(reader: gguf.GGUFReader) -> str | None:
    """The model's own chat template; None for a base model, which has none."""
    return optional(reader, "tokenizer.chat_template")


def _tokens_and_types(reader: gguf.GGUFReader) -> tuple[list[str], list[int]]:
    return value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")


def _add_control_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])


def _byte_level(reader: gguf.GGUFReader, split: str) -> Tokenizer:
    """Byte-level BPE; control tokens are special."""
    tokens, types = _tokens_and_types(reader)
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_control_tokens(tokenizer, tokens, types)
    return tokenizer


def _sentence_piece(reader: gguf.GGUFReader) -> Tokenizer:
    """SentencePiece's BPE: merges follow from the pieces' scores, unknown characters fall back to bytes."""
    tokens, types = _tokens_and_types(reader)
    # GGUF writes the spaces of user-defined tokens (runs of spaces) plainly.
    tokens = [
        token.replace(" ", _SPACE) if type_ == _USER_DEFINED else token
        for token, type_ in zip(tokens, types, strict=True)
    ]
    scores = value(reader, "tokenizer.ggml.scores")
    pieces = {t: -score for t, score, type_ in zip(tokens, scores, types, strict=True) if type_ == _NORMAL}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(pieces),
            unk_token=tokens[int(value(reader, "tokenizer.ggml.unknown_token_id"))],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    _add_control_tokens(tokenizer, tokens, types)
    defined = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=True) for token in defined])
    return tokenizer


def _merges(rank_by_piece: dict[str, float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best piece first: SentencePiece merges whatever makes the best piece."""
    found = [
        (rank, piece[:cut], piece[cut:])
        for piece, rank in rank_by_piece.items()
        for cut in range(1, len(piece))
        if piece[:cut] in rank_by_piece and piece[cut:] in rank_by_piece
    ]
    return [(left, right) for _, left, right in sorted(found)]


# ====================================================================================================
# Architecture ``llama`` of a GGUF file in Hugging Face's terms: configuration, tensor names, order of rows.
#
# Tensor names end in their shape where one is needed: R rows of a projection, H hidden size, A heads, D head size.

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


# ====================================================================================================
# Architecture ``gemma3`` (text) of a GGUF file in Hugging Face's terms: configuration, tensor names, norm weights.
#
# GGUF leaves three constants to the reader, which llama.cpp has in its source: the order of local and global layers, the
# rotary base of the local ones, and the scale of queries.

WEIGHT_NAMES_GGUF_GEMMA3 = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES_GGUF_GEMMA3 = {
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


def model_config_gguf_gemma3(reader: gguf.GGUFReader) -> dict[str, Any]:
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


def as_hugging_face_gguf_gemma3(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The values of a GGUF tensor as the Hugging Face tensor `name` holds them.

    GGUF's norm weights are factors; Hugging Face's are added to one.
    """
    return weight - 1 if name.endswith("norm.weight") else weight


# ====================================================================================================
# A model in one GGUF file -> the files of a normal Hugging Face checkpoint.
#
# What enters: an open GGUF file of a known architecture. What leaves: ``{file name: bytes}`` for config, generation
# config, weights in bfloat16, tokenizer and, where the model has one, chat template.
# The result depends on the GGUF file alone, byte for byte, so its hash can be pinned.

#: Each module has WEIGHT_NAMES, LAYER_NAMES, model_config(reader) and as_hugging_face(name, weight, config).
_ARCHITECTURES = {"llama": gguf_llama, "gemma3": gguf_gemma3}


def checkpoint_files(reader: gguf.GGUFReader) -> tuple[dict[str, bytes], str]:
    """All files of the checkpoint by name, and the sha256 of its weights (see `weights_digest`).

    Raises ValueError when architecture, a tensor or the tokenizer is not a known one.
    """
    name = value(reader, "general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(f"general.architecture: {name!r} cannot be converted; known: {sorted(_ARCHITECTURES)}")
    architecture = _ARCHITECTURES[name]
    config = architecture.model_config(reader)
    weights = _weights(reader, architecture, config)
    files = {
        "config.json": _json(config),
        "generation_config.json": _json(_generation_config(reader, config)),
        "tokenizer.json": tokenizer(reader).to_str().encode(),
        "tokenizer_config.json": _json(tokenizer_config(reader, config)),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
    }
    if template := chat_template(reader):
        files["chat_template.jinja"] = template.encode()
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


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _generation_config(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, Any]:
    """Generation ends at the end of the text or, where chats have a token of their own for it, of a turn."""
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    end_of_turn = optional(reader, "tokenizer.ggml.eot_token_id")
    if end_of_turn not in (None, ids["eos_token_id"]):
        ids["eos_token_id"] = [ids["eos_token_id"], int(end_of_turn)]
    return ids | {"_from_model_config": True}


def _weights(reader: gguf.GGUFReader, architecture: ModuleType, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor by its Hugging Face name, dequantized, in bfloat16, sorted by name."""
    weights = {}
    for tensor in reader.tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _weight_name(tensor.name, architecture)
        weight = architecture.as_hugging_face(name, torch.from_numpy(values), config)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    return dict(sorted(weights.items()))


def _weight_name(name: str, architecture: ModuleType) -> str:
    """Hugging Face's name of a GGUF tensor: ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    *path, kind = name.split(".")
    if len(path) == 1 and path[0] in architecture.WEIGHT_NAMES:
        return f"{architecture.WEIGHT_NAMES[path[0]]}.{kind}"
    if len(path) == 3 and path[0] == "blk" and path[2] in architecture.LAYER_NAMES:
        return f"model.layers.{path[1]}.{architecture.LAYER_NAMES[path[2]]}.{kind}"
    raise ValueError(f"{name}: not a tensor of this architecture")
