"""The heads that ship with this package, their join with a target's tables, and heads of other trainers.

A head in the shipped form, or in one of other trainers (`peagle.checkpoint`), becomes a plain head, as vLLM loads it. A
plain head has the target's embedding table, with the head's own row of the mask token. With a reduced draft vocabulary
it has the target's output rows of that vocabulary. `prepare_head` writes it into the cache directory, `convert` where a
user says.

Importing this module loads neither torch nor vLLM.
"""

import hashlib
import logging
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.checkpoint import (
    TARGET_TENSORS,
    check_head,
    is_plain,
    load_head,
    read_tensor_specs,
    save_head,
    tables_left_out,
    weight_files,
    with_tables,
    without_tables,
)
from peagle.config import DrafterConfig, HeadError, read_json
from peagle.embedded import weights_digest
from peagle.store import Report, cache_root, is_intact, prepare_directory, sha256_of, write_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_JOIN = 2  # raise it when the files of a prepared head change: the cache then builds a fresh directory


def shipped_heads() -> dict[str, Path]:
    """Directories of the heads that ship, by name."""
    return {path.parent.name: path.parent for path in sorted(Path(__file__).parent.glob("*/config.json"))}


def head_digest(head_dir: Path) -> str:
    """Ten hex digits of a head's config.json and weights: the same on every machine, another for every other head."""
    digest = hashlib.sha256()
    for path in (head_dir / "config.json", *weight_files(head_dir)):
        digest.update(sha256_of(path).encode())
    return digest.hexdigest()[:10]


def target_digest(target: str | Path) -> str:
    """Ten hex digits of a target's weights: a directory, a Hugging Face id that was downloaded (its commit), or an
    address in an object store (itself).

    Each file is read at `NUM_SAMPLED` places only: whatever trains a target changes its tensors everywhere.
    """
    folder = Path(target)
    if "://" in str(target):
        return hashlib.sha256(str(target).encode()).hexdigest()[:10]
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(target), local_files_only=True)).name[:10]
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in range(NUM_SAMPLED):
                file.seek(size * place // NUM_SAMPLED)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()[:10]


NUM_SAMPLED, SAMPLED_BYTES = 256, 4096

MAX_NUM_CANDIDATES = 16
"""Kept in the cache directory."""


def candidate_directory(name: str, cache_dir: Path | None = None) -> Path | None:
    """The directory of a candidate that `keep_candidate` wrote on this node, None where it is not (any more)."""
    directory = cache_root(cache_dir) / "candidates" / name
    return directory if is_intact(directory) else None


def candidate_files(head_dir: Path) -> dict[str, bytes]:
    """What `keep_candidate` takes. Raises HeadError for a directory without weights, OSError."""
    return {path.name: path.read_bytes() for path in (head_dir / "config.json", *weight_files(head_dir))}


def keep_candidate(
    name: str, files: Mapping[str, bytes], in_use: Collection[str] = (), cache_dir: Path | None = None
) -> Path:
    """Write a head's files into the cache directory, where `candidate_directory` finds them; the oldest that are not
    `in_use` go.

    Raises HeadError for a damaged head, ValueError for names of files that no head has, CacheError.
    """
    names = ("config.json", *(Path(file).name for file in files if file.endswith(".safetensors")))
    if wrong := [file for file in files if file not in names]:
        raise ValueError(f"a head has config.json and safetensors files, not {wrong[0]!r:.80}")

    def build(directory: Path) -> None:
        for file, content in files.items():
            write_bytes(directory / file, content)
        check_head(directory)

    root = cache_root(cache_dir) / "candidates"
    directory = prepare_directory(root, name, build)
    kept = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in kept[:-MAX_NUM_CANDIDATES]:
        if path.name not in (*in_use, name):
            shutil.rmtree(path, ignore_errors=True)
    return directory


def prepare_head(
    head: str | Path, target_dir: Path, cache_dir: Path | None = None, report: Report = logger.info
) -> Path:
    """Directory of a plain head that fits the target in `target_dir`.

    `head` is a shipped head's name or a directory. A directory that already holds a plain head is checked and returned
    as it is; one in another form is joined with the target's tables where it lacks them, and written as a plain head,
    at the first call and reused afterwards.

    Raises HeadError for an unknown, damaged or unfitting head, ValueError for a target without the tables that the head
    needs, CacheError when the cache directory is full or not writable.
    """
    head_dir = head_directory(head)
    target = read_json(Path(target_dir) / "config.json", "target")
    config = check_head(head_dir, target)
    if is_plain(head_dir, config):
        return head_dir
    tables = _needed_tables(head_dir, config, target_dir)
    key = hashlib.sha256(f"{_JOIN} {head_digest(head_dir)} {weights_digest(tables)}".encode()).hexdigest()[:10]

    def build(directory: Path) -> None:
        report(f"writing the head {head_dir.name} in vLLM's form, tables of the target in it: {len(tables)}")
        convert(head_dir, directory, target_dir)

    root = cache_root(cache_dir) / "heads"
    return prepare_directory(root, f"{head_dir.name}-{key}", build, report)


def head_directory(head: str | Path) -> Path:
    """The directory of a shipped head by its name, or `head` where it is one. Raises HeadError for neither."""
    shipped = shipped_heads()
    if str(head) in shipped:
        return shipped[str(head)]
    directory = Path(head).expanduser()
    if not directory.is_dir():
        raise HeadError(
            f"head {str(head)!r} is neither a directory nor shipped; shipped: {', '.join(shipped) or 'none'}"
        )
    return directory.resolve()


def _needed_tables(head_dir: Path, config: DrafterConfig, target_dir: Path | None) -> "dict[str, torch.Tensor]":
    """The target's tables [V, H] that a head lacks, by their names in it. Raises HeadError where no target is named."""
    left_out = tables_left_out(config, read_tensor_specs(head_dir))
    if left_out and target_dir is None:
        raise HeadError(f"head {head_dir} has no {' and no '.join(left_out)}: name its target with --target")
    return {name: target_table(Path(str(target_dir)), name) for name in left_out}


def _check_tables_are_targets(
    head_dir: Path, config: DrafterConfig, tensors: "dict[str, torch.Tensor]", target_dir: Path | None
) -> None:
    """Raises HeadError for a table of a head's own that is not the target's, the mask token's row apart."""
    names = ("embed_tokens.weight", "lm_head.weight")
    if not (own := [name for name in names if name in tensors]):
        return
    if target_dir is None:
        raise HeadError(f"head {head_dir} has {own[0]}, perhaps not the target's: name its target with --target")
    tables: dict[str, torch.Tensor] = {name: target_table(target_dir, name).to(tensors[own[0]].dtype) for name in names}
    tables |= with_tables(config, without_tables(config, tensors), tables)
    for name in own:
        if not tensors[name].equal(tables[name]):
            raise HeadError(f"head {head_dir} has a {name} of its own, not the target's, so it cannot be left out")


def target_table(target_dir: Path, name: str) -> "torch.Tensor":
    """A table of the target [V, H], in its stored type; a tied output matrix is the embedding table."""
    from safetensors import SafetensorError, safe_open

    found: list[tuple[Path, str, torch.Tensor]] = []
    for path in sorted(Path(target_dir).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                matching = [key for key in file.keys() if key.endswith(name)]  # noqa: SIM118 (no mapping)
                found += [(path, key, file.get_tensor(key)) for key in matching]
        except SafetensorError as error:
            raise ValueError(f"target {target_dir}: {path} cannot be read: {error}") from error
    is_tied = read_json(Path(target_dir) / "config.json", "target").get("tie_word_embeddings", True)
    if not found and name == "lm_head.weight" and is_tied:
        return target_table(target_dir, "embed_tokens.weight")
    if len(found) != 1:
        where = ", ".join(f"{key} in {path.name}" for path, key, _ in found) or "none"
        raise ValueError(f"target {target_dir}: one {name} is needed in its safetensors, found {where}")
    return found[0][2]


def convert(
    source_dir: str | Path, out_dir: str | Path, target_dir: str | Path | None = None, *, has_tables: bool = True
) -> tuple[DrafterConfig, int, list[str]]:
    """Write a head in any form as a plain head into `out_dir`, or, not `has_tables`, as a shipped one; types of tensors
    stay. target_dir: of a head that lacks its tables, or is to leave them out.

    Returns its configuration, the number of tensors written, and the names of the target's tensors that were left out.
    Raises HeadError as `load_head` and `save_head`, for tables that are not there, for tables to be left out that are
    not the target's, and where `out_dir` has another head's provenance.json, before anything is written; OSError when
    the disk is full.
    """
    source_dir, target_dir = Path(source_dir), None if target_dir is None else Path(target_dir)
    config = check_head(source_dir, None if target_dir is None else read_json(target_dir / "config.json", "target"))
    tensors = load_head(source_dir)[1]
    if has_tables:
        tensors = with_tables(config, tensors, _needed_tables(source_dir, config, target_dir))
    else:
        _check_tables_are_targets(source_dir, config, tensors, target_dir)
        tensors = without_tables(config, tensors)
    provenance, there = source_dir / "provenance.json", Path(out_dir) / "provenance.json"
    known = provenance.read_bytes() if provenance.is_file() else None
    if there.is_file() and there.read_bytes() != known:
        raise HeadError(f"{there} is of another training: delete it, or name another folder")
    save_head(out_dir, config, tensors)
    if known is not None and not there.is_file():  # `peagle publish` needs it
        there.write_bytes(known)
    names = read_tensor_specs(source_dir).keys()
    left = [*TARGET_TENSORS, *(name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors)]
    return config, len(tensors), [name for name in left if name in names]
