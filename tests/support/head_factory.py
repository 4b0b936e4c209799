"""Small head directories for tests, and ways to damage them behind the checks' back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.checkpoint import expected_tensors
from peagle.config import DrafterConfig
from peagle.model import Drafter

TARGET: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CONFIG = DrafterConfig.for_target(TARGET, num_layers=2, ptd_token_id=99, num_depths=5)
REDUCED = dataclasses.replace(CONFIG, draft_vocab_size=10)


def head_tensors(
    config: DrafterConfig, *, shipped: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors of a plain head with its own tables, or of a shipped head without them."""
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(want.shape).to(dtype)
        for name, want in expected_tensors(config).items()
        if want.required and name != "d2t"
    }
    if shipped:
        tensors["mask_embedding"] = torch.randn(config.hidden_size).to(dtype)
    else:
        tensors["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size).to(dtype)
        tensors["lm_head.weight"] = torch.randn(config.draft_vocab_size, config.hidden_size).to(dtype)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    if config.draft_vocab_size < config.vocab_size:
        kept = torch.arange(config.draft_vocab_size) * 9 + 4
        tensors["d2t"] = kept - torch.arange(config.draft_vocab_size)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def write_target(folder: Path, *, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of TARGET: its config, its tables, and a tensor that no head needs."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | {"tie_word_embeddings": tied}))
    names, random = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])], torch.Generator()
    random.manual_seed(seed)
    tables = {name: torch.randn(100, 32, generator=random).to(dtype) for name in names}
    save_file(tables | {"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    return folder


def rewrite(head_dir: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors behind the checks' back; `__` in a name stands for a dot."""
    tensors = load_file(head_dir / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, head_dir / "model.safetensors")


def reconfigure(head_dir: Path, **changes: Any) -> None:
    raw = json.loads((head_dir / "config.json").read_text())
    raw.update(changes)
    (head_dir / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def random_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """A drafter in float64 with weights large enough that its drafts depend on every row that it attends to."""
    torch.manual_seed(seed)
    drafter = Drafter(config).double()
    drafter.share_target(
        torch.randn(config.vocab_size, config.hidden_size).double(),
        torch.randn(config.draft_vocab_size, config.hidden_size).double(),
    )
    with torch.no_grad():
        for name, parameter in drafter.trainable().items():
            parameter.copy_(torch.randn(parameter.shape) * (1.0 if parameter.dim() == 1 or "mask" in name else 0.3))
    return drafter
