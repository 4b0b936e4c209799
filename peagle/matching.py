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

from peagle.data import Conversations, PackedBatches
from peagle.prompts import special_ids
from peagle.target_config import read_target_config

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 1 << 20


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


def target_hash(target_dir: str | Path) -> str:
    """16 hex digits of the target's configuration and weights: of each file its size and three samples of 1 MiB.

    Training changes weights everywhere, so a fine-tuned target has another hash.
    """
    directory = Path(target_dir)
    hashed = hashlib.sha256(json.dumps(read_target_config(directory), sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        hashed.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                hashed.update(file.read(_SAMPLE_BYTES))
    return hashed.hexdigest()[:16]


def check_tokenizer(tokenizer: Any, target_dir: str | Path) -> None:
    """Raises ValueError when the tokenizer makes ids that the target's embedding table does not have.

    Special tokens beyond the table pass: some targets name tokens of inputs that their text model lacks.
    """
    vocab_size = read_target_config(target_dir)["vocab_size"]
    special = special_ids(tokenizer)
    beyond = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= vocab_size}
    plain = sorted(token_id for token_id in beyond if token_id not in special)
    if plain:
        raise ValueError(
            f"tokenizer and target do not match: the tokenizer in {target_dir} has {len(plain)} tokens beyond the "
            f"target's vocab_size = {vocab_size} (config.json), the first {beyond[plain[0]]!r} = {plain[0]}: "
            "put the target's own tokenizer files there"
        )


def check_data_fits(folder: str | Path, target_dir: str | Path, batches: PackedBatches | None = None) -> None:
    """Raises ValueError when conversations were tokenized by another tokenizer than the target's, hold ids beyond its
    vocabulary, or are longer than its positions.

    batches: of the folder's conversations, where they are loaded already; only what these use must be short enough.
    """
    data = batches.data if batches else Conversations.load(folder)
    config = read_target_config(target_dir)
    vocab_size, num_positions = config["vocab_size"], config.get("max_position_embeddings")
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
    longest = batches.longest if batches else int(data.lengths.max(initial=0))
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
