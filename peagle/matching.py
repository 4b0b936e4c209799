"""Do data, tokenizer and target belong together?

Enters: a target's directory, a tokenizer, a data folder. Leaves: a ValueError that names both sides, or nothing. A
drafter trained on ids of another tokenizer learns noise without any other sign of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from peagle.data import Conversations
from peagle.prompts import special_ids

logger = logging.getLogger(__name__)


def tokenizer_hash(target_dir: str | Path) -> str | None:
    """16 hex digits that say how text becomes ids; None for a target without `tokenizer.json`.

    Of the contents, not of the bytes: releases of `tokenizers` write merges and key order differently.
    """
    path = Path(target_dir) / "tokenizer.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in ("version", "truncation", "padding"):
        content.pop(key, None)
    merges = content.get("model", {}).get("merges")
    if merges:
        content["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _limits(target_dir: str | Path) -> tuple[int, int | None]:
    """The target's vocabulary size and number of positions (None: not stated)."""
    config: dict[str, Any] = json.loads((Path(target_dir) / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    return config["vocab_size"], config.get("max_position_embeddings")


def check_tokenizer(tokenizer: Any, target_dir: str | Path) -> None:
    """Raises ValueError when the tokenizer makes ids that the target's embedding table does not have.

    Special tokens beyond the table pass: some targets name tokens of inputs that their text model lacks.
    """
    vocab_size, _ = _limits(target_dir)
    special = special_ids(tokenizer)
    beyond = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= vocab_size}
    plain = sorted(token_id for token_id in beyond if token_id not in special)
    if plain:
        raise ValueError(
            f"tokenizer and target do not match: the tokenizer in {target_dir} has {len(plain)} tokens beyond the "
            f"target's vocab_size = {vocab_size} (config.json), the first {beyond[plain[0]]!r} = {plain[0]}: "
            "put the target's own tokenizer files there"
        )


def check_data_fits(
    folder: str | Path, target_dir: str | Path, *, data: Conversations | None = None, max_tokens: int | None = None
) -> None:
    """Raises ValueError when conversations were tokenized by another tokenizer than the target's, hold ids beyond its
    vocabulary, or are longer than its positions.

    data: the folder's conversations, where they are loaded already; max_tokens: those longer than this are not used.
    """
    data = Conversations.load(folder) if data is None else data
    vocab_size, num_positions = _limits(target_dir)
    ours, theirs = tokenizer_hash(target_dir), _recorded_hash(folder)
    if theirs is None:
        logger.info("%s names no tokenizer: only the range of its token ids is checked", folder)
    elif ours is not None and ours != theirs:
        raise ValueError(
            f"data and target do not match: {folder} was made with tokenizer {theirs} (manifest.json), the target "
            f"{target_dir} has tokenizer {ours}: make the data again with `python -m peagle.vllm.generate`"
        )
    highest, lowest = int(data.tokens.max(initial=0)), int(data.tokens.min(initial=0))
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise ValueError(
            f"data and target do not match: {folder} holds token id {wrong}, the target {target_dir} has ids "
            f"0..{vocab_size - 1}: make the data again with this target's tokenizer"
        )
    lengths = data.lengths if max_tokens is None else data.lengths[data.lengths <= max_tokens]
    longest = int(lengths.max(initial=0))
    if num_positions is not None and longest > num_positions:
        raise ValueError(
            f"data: conversations of {folder} have up to {longest} tokens, the target {target_dir} has "
            f"{num_positions} positions (max_position_embeddings): lower batch.max_tokens to {num_positions}"
        )


def _recorded_hash(folder: str | Path) -> str | None:
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    return json.loads(path.read_text(encoding="utf-8")).get("tokenizer")
