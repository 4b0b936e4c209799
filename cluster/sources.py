"""Where a model or a head comes from: a name that ships, a directory, or a Hugging Face id `org/name`."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.messages import listed, nearest

_HUGGING_FACE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HEAD_ARCHITECTURE = "LlamaForCausalLMEagle3"


class SourceError(ValueError):
    """A source names nothing that exists, or not what it should."""


def resolve_source(source: str, shipped: Collection[str], key: str, what: str) -> str:
    """`source` as it is when it is shipped or a Hugging Face id, else the absolute path of its directory.

    Raises:
        SourceError: neither shipped, nor a directory with a config.json, nor shaped like `org/name`.
    """
    path = Path(source).expanduser()
    if source in shipped:
        return source
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SourceError(f"{key}: the directory {source} holds no config.json, so it is no checkpoint")
        return str(path.resolve())
    if _HUGGING_FACE_ID.fullmatch(source):
        return source
    known = f"{what}s: {listed(sorted(shipped))}" if shipped else f"there is no {what}"
    raise SourceError(
        f"{key}: {source!r} is not one of ours, no existing directory and no Hugging Face id (org/name)"
        f"{nearest(source, shipped)} ({known})"
    )


def read_head_config(head: str, heads_dir: Path, key: str = "drafter.head") -> tuple[str, dict[str, Any]]:
    """A head's resolved name (see `resolve_source`) and its config.json; empty for a Hugging Face id, whose
    files are not here yet. `key`: the setting that names the head.

    Raises:
        SourceError: no such head, an unreadable config.json, or a config.json that is no P-EAGLE or EAGLE-3 head's.
    """
    shipped = sorted(path.parent.name for path in heads_dir.glob("*/config.json"))
    resolved = resolve_source(head, shipped, key, "shipped head")
    folder = heads_dir / resolved if resolved in shipped else Path(resolved)
    if not folder.is_dir():
        return resolved, {}
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SourceError(f"{key}: {folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SourceError(f"{key}: {folder / 'config.json'} holds no JSON object")
    if config.get("architectures") != [HEAD_ARCHITECTURE]:
        raise SourceError(
            f"{key}: {folder} is no EAGLE-3 head: its architectures are {config.get('architectures')!r:.80}, "
            f"not [{HEAD_ARCHITECTURE!r}]"
        )
    if (num_depths := config.get("num_depths")) is not None and type(num_depths) is not int:
        raise SourceError(f"{key}: num_depths of {folder / 'config.json'} is {num_depths!r:.80}, no whole number")
    return resolved, config


def drafts_in_parallel(config: dict[str, Any]) -> bool:
    """Whether a head's config.json names a mask token: P-EAGLE, which drafts in one pass. EAGLE-3 has none."""
    return config.get("pard_token", config.get("ptd_token_id")) is not None
