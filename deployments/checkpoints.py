"""Checkpoints on this node, ready to load: converted, joined or downloaded where they are not there yet."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download

from cluster.settings import OBJECT_STORES
from peagle.embedded import EMBEDDED_TARGETS, prepare_target
from peagle.heads import prepare_head

WEIGHT_INDEX = "model.safetensors.index.json"


def target_source(source: str) -> str:
    """What vLLM loads for `model.source`: the directory of an embedded model, made ready here, else the source."""
    return str(prepare_target(source)) if source in EMBEDDED_TARGETS else source


def prepared_head(head: str, target: str) -> Path:
    """The directory of a head made ready for the target, `target_source` of which is given. Raises ValueError for a
    damaged file, or a head for another target."""
    return prepare_head(local_directory(head) or head, target_directory(target))


def local_directory(head: str) -> Path | None:
    """The local directory of a head, downloaded when its name is none of a directory; None for a shipped name."""
    if Path(head).is_dir():
        return Path(head)
    if "/" not in head:
        return None
    return download(head, but=["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx"])


def target_directory(target: str) -> Path:
    """Where a target's config.json is, and the weight files that hold its embeddings and output matrix. Only these are
    downloaded."""
    if Path(target).is_dir() or "/" not in target:
        return Path(target)
    folder = download(target, only=["config.json", WEIGHT_INDEX])
    files = {"model.safetensors"}
    if (index := folder / WEIGHT_INDEX).is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {file for name, file in names.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    return download(target, only=sorted(files))


def download(source: str, *, only: list[str] | None = None, but: list[str] | None = None) -> Path:
    """The local directory of a Hugging Face repository, or of a folder in an object store, with files by patterns."""
    if not source.startswith(OBJECT_STORES):
        return Path(snapshot_download(source, allow_patterns=only, ignore_patterns=but))
    from vllm.transformers_utils.runai_utils import ObjectStorageModel

    store = ObjectStorageModel(source)
    # Its patterns are for the whole key of an object.
    store.pull_files(source, only and [key for name in only for key in (name, f"*/{name}")], but)
    return Path(store.dir)
