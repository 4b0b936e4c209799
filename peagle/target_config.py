"""What the trainer needs to know of a target's `config.json`, whichever architecture it is of.

Enters: a target's directory. Leaves: the keys of its text model. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_target_config(target_dir: str | Path) -> dict[str, Any]:
    """`config.json` of the target's text model: that of a multimodal target is its `text_config`.

    Raises FileNotFoundError without one, ValueError that names the file and every key that is missing or not a number
    (some architectures give a list, one number a layer: a drafter has one shape for all its layers).
    """
    path = Path(target_dir) / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    text = raw if "hidden_size" in raw else raw.get("text_config") or {}
    wrong = [f"{name} = {text.get(name)}" for name in _NUMBERS if not _is_count(text.get(name))]
    if wrong:
        where = "" if text is raw else " under text_config"
        raise ValueError(
            f"{path}: {', '.join(wrong)}{where}: a target needs whole numbers of at least 1 here; targets are "
            "decoder-only language models"
        )
    return text


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
