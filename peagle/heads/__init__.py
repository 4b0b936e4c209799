"""The heads that ship with this package, and their join with a target's embedding table.

A shipped head is small: it leaves out the tables that it shares with the target. vLLM wants the mask token's learned
embedding as row ``ptd_token_id`` of the head's own ``embed_tokens.weight`` [V, H], so `prepare_head` writes, into the
cache directory, a plain head: the target's table with that one row replaced, and every other tensor as shipped. It has
no ``lm_head.weight`` unless the shipped one has: vLLM then shares the target's, which is the same matrix.

What enters: a head (shipped name or directory) and a target checkpoint. What leaves: the path of a head that stock vLLM
loads. Importing this module loads neither torch nor vLLM.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.config import HeadError
from peagle.head_files import check_head, read_tensor_specs, weight_files
from peagle.store import Report, cache_root, prepare_directory, sha256_of, write_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_JOIN = 1  # raise it when the files of a prepared head change: the cache then builds a fresh directory


def shipped_heads() -> dict[str, Path]:
    """Directories of the heads that ship, by name."""
    return {path.parent.name: path.parent for path in sorted(Path(__file__).parent.glob("*/config.json"))}


def prepare_head(
    head: str | Path,
    target_dir: Path,
    cache_dir: Path | None = None,
    *,
    verify: bool = False,
    report: Report = logger.info,
) -> Path:
    """Directory of a plain head that fits the target in `target_dir`.

    `head` is a shipped head's name or a directory. A directory that already holds a plain head is checked and returned
    as it is; one with ``mask_embedding`` is joined with the target's embedding table at the first call and reused
    afterwards. `verify` hashes every file that is reused.

    Raises HeadError for an unknown, damaged or unfitting head, ValueError for a target without a readable embedding
    table, CacheError when the cache directory is full or not writable.
    """
    head_dir = _head_directory(head)
    check_head(head_dir, _target_config(target_dir))
    if "mask_embedding" not in read_tensor_specs(head_dir):
        return head_dir
    table_VH = _embedding_table(target_dir)
    key = _join_key(head_dir, table_VH)
    num_bytes = sum(path.stat().st_size for path in head_dir.iterdir()) + table_VH.nbytes + 4096

    def build(directory: Path) -> None:
        report(f"joining the head {head_dir.name} with the target's embedding table")
        _join(head_dir, table_VH, directory)
        check_head(directory, _target_config(target_dir))

    root = cache_root(cache_dir) / "heads"
    return prepare_directory(root, f"{head_dir.name}-{key}", num_bytes, build, verify=verify, report=report)


def _head_directory(head: str | Path) -> Path:
    shipped = shipped_heads()
    if str(head) in shipped:
        return shipped[str(head)]
    directory = Path(head).expanduser()
    if not directory.is_dir():
        raise HeadError(
            f"head {str(head)!r} is neither a directory nor shipped; shipped: {', '.join(shipped) or 'none'}"
        )
    return directory.resolve()


def _target_config(target_dir: Path) -> dict[str, Any]:
    path = Path(target_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"target {target_dir}: {path} does not exist") from error
    except ValueError as error:
        raise ValueError(f"target {target_dir}: {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"target {target_dir}: {path} must hold a JSON object")
    return config


def _embedding_table(target_dir: Path) -> "torch.Tensor":
    """The target's input embedding table [V, H], in its stored type."""
    from safetensors import SafetensorError, safe_open

    found: list[tuple[Path, str, torch.Tensor]] = []
    for path in sorted(Path(target_dir).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.endswith("embed_tokens.weight")]  # noqa: SIM118 (no mapping)
                found += [(path, name, file.get_tensor(name)) for name in names]
        except SafetensorError as error:
            raise ValueError(f"target {target_dir}: {path} cannot be read: {error}") from error
    if len(found) != 1:
        where = ", ".join(f"{name} in {path.name}" for path, name, _ in found) or "none"
        raise ValueError(f"target {target_dir}: one embed_tokens.weight is needed in its safetensors, found {where}")
    return found[0][2]


def _join_key(head_dir: Path, table_VH: "torch.Tensor") -> str:
    """Ten hex digits that change with the head, the target's table and the way of joining."""
    import torch

    digest = hashlib.sha256(f"{_JOIN} {table_VH.dtype} {tuple(table_VH.shape)}".encode())
    for path in (head_dir / "config.json", *weight_files(head_dir)):
        digest.update(sha256_of(path).encode())
    digest.update(table_VH.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:10]


def _join(head_dir: Path, table_VH: "torch.Tensor", directory: Path) -> None:
    """Write the plain head made from the shipped one in `head_dir` into `directory`."""
    from safetensors.torch import save

    from peagle.checkpoint import load_head

    config, tensors = load_head(head_dir)
    embed_VH = table_VH.clone()
    # The row takes the table's type: vLLM casts the whole table anyway, and one type keeps the file plain.
    embed_VH[config.ptd_token_id] = tensors.pop("mask_embedding").to(table_VH.dtype)
    tensors["embed_tokens.weight"] = embed_VH
    write_bytes(directory / "config.json", (head_dir / "config.json").read_bytes())
    write_bytes(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
