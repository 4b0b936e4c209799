"""A model in one GGUF file -> the files of a normal Hugging Face checkpoint.

What enters: an open GGUF file of a known architecture. What leaves: ``{file name: bytes}`` for config, generation
config, weights in bfloat16, tokenizer and, where the model has one, chat template.
The result depends on the GGUF file alone, byte for byte, so its hash can be pinned.
"""

import hashlib
import json
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save

from peagle import gguf_gemma3, gguf_llama
from peagle.gguf_fields import optional, value
from peagle.gguf_tokenizer import chat_template, tokenizer, tokenizer_config

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
