"""The target's and the heads' checkpoints on this node: converted, joined or downloaded when they are not there yet.

Imports neither vLLM nor `ray.serve.llm`: a drafter's replica starts without them.
"""

from pathlib import Path

from peagle.embedded import embedded_targets, prepare_target
from peagle.heads import prepare_head


def target_source(source: str) -> str:
    """What vLLM loads for `model.source`: the directory of an embedded model, made ready here, else the source."""
    return str(prepare_target(source)) if source in embedded_targets() else source


def head_directory(head: str, target: str) -> Path:
    """The directory of a head made ready for the target, `target_source` of which is given.

    Raises:
        ValueError: a damaged file, or a head for another target.
    """
    return prepare_head(local_directory(head) or head, local_directory(target) or Path(target))


def local_directory(source: str) -> Path | None:
    """The local directory of a Hugging Face id, downloaded when need be; None for a shipped name."""
    if Path(source).is_dir():
        return Path(source)
    if "/" not in source:
        return None
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source))
