"""Read and write a drafter's head in vLLM's own format (`LlamaForCausalLMEagle3` with `mask_hidden`).

Enters: a head directory, or a configuration and tensors. Leaves: the other of the two, checked in full, so that a plain
head which loads here also loads in stock vLLM with nothing missing. `peagle.head_files` holds the checks that need no
tensor and no torch.

Values that a shape cannot tell are checked here: `d2t` [V_draft] holds *offsets* (target token = i + d2t[i]), `t2d` [V]
marks the target tokens that the draft vocabulary has.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from peagle.config import DrafterConfig, HeadError
from peagle.draft_vocabulary import marks, offsets, target_ids
from peagle.head_files import check_head, check_head_fits, check_tensors, read_head_config
from peagle.model import Drafter
from peagle.tensor_files import TensorSpec, canonical_name, weight_files

__all__ = [
    "HeadError",
    "build_drafter",
    "check_head",
    "check_head_fits",
    "load_head",
    "read_head_config",
    "save_drafter",
    "save_head",
]

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


def load_head(head_dir: str | Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Load a head, in the plain or the shipped form, onto the CPU and in its stored types.

    Returns:
        The configuration, and the tensors by the names listed in `head_files.expected_tensors` (`mask_hidden` as
        [1, 1, C * S], whichever of its stored shapes the head uses).

    Raises:
        HeadError: names a missing or damaged file with its bytes; every missing, spare, wrong-shaped or wrong-typed
            tensor; or tables `d2t`/`t2d` that contradict each other or the vocabulary.
    """
    config = check_head(head_dir)
    tensors = load_tensors(head_dir)
    check_tables(config, tensors, head_dir)
    return config, tensors


def load_tensors(head_dir: str | Path) -> dict[str, Tensor]:
    """Every tensor of a directory by its canonical name, unchecked; raises HeadError for a file that is damaged."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(head_dir):
        try:
            stored = load_file(path)
        except SafetensorError as error:
            raise HeadError(f"{path} cannot be read: {error}") from error
        tensors.update({canonical_name(name): tensor for name, tensor in stored.items()})
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    return tensors


def save_head(head_dir: str | Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> Path:
    """Write a head directory: `config.json` and `model.safetensors`, each complete or not at all.

    tensors: by checkpoint name, in the types to be stored; on any device.

    Returns:
        The directory.

    Raises:
        HeadError: under the same conditions as `load_head`, before anything is written.
        OSError: the disk is full or not writable (names the file and its bytes); what was there before is still whole.
    """
    head_dir = Path(head_dir)
    specs = {name: TensorSpec(_dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    check_tensors(config, specs, head_dir)
    check_tables(config, tensors, head_dir)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=head_dir, prefix=".writing-") as scratch:
        weights, settings = Path(scratch) / "model.safetensors", Path(scratch) / "config.json"
        _write(weights, save(stored, metadata={"format": "pt"}))
        _write(settings, (json.dumps(config.to_dict(), indent=2) + "\n").encode())
        weights.replace(head_dir / weights.name)
        settings.replace(head_dir / settings.name)
    return head_dir


def save_drafter(
    head_dir: str | Path, drafter: Drafter, values: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a drafter in the shipped form: what it owns, and the tables of a reduced draft vocabulary.

    values: its parameters, by the names of `Drafter.trainable`, when they are not the live ones (a moving average).
    dtype: stored type of them. Returns the directory; raises as `save_head`.
    """
    config = drafter.config
    owned: dict[str, Tensor] = dict(drafter.trainable()) if values is None else values
    tensors = {name: value.to(dtype) for name, value in owned.items()}
    if config.draft_vocab_size < config.vocab_size:
        tensors |= {"d2t": offsets(drafter.target_ids), "t2d": marks(drafter.target_ids, config.vocab_size)}
    return save_head(head_dir, config, tensors)


def build_drafter(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    *,
    embed_VH: Tensor | None = None,
    lm_head_VH: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """A `Drafter` in evaluation mode with a head's weights, from either form.

    embed_VH: the target's embedding table [V, H], needed when the head has no `embed_tokens.weight`. lm_head_VH: the
    target's output matrix [V, H], needed when the head has no `lm_head.weight`; a reduced draft vocabulary takes its
    rows. Tables of the head's own win. All tables are frozen.

    Raises:
        HeadError: a table is neither in the head nor given, or the given one has another shape.
    """
    own_lm_head = "lm_head.weight" in tensors
    embed_VH = tensors.get("embed_tokens.weight", embed_VH)
    lm_head_VH = tensors.get("lm_head.weight", lm_head_VH)
    num_rows = config.draft_vocab_size if own_lm_head else config.vocab_size
    wanted = {
        "embed_VH": (embed_VH, "embed_tokens.weight", (config.vocab_size, config.hidden_size)),
        "lm_head_VH": (lm_head_VH, "lm_head.weight", (num_rows, config.hidden_size)),
    }
    for argument, (table, name, shape) in wanted.items():
        if table is None:
            raise HeadError(f"the head has no {name}: pass the target's as {argument} {list(shape)}")
        if tuple(table.shape) != shape:
            raise HeadError(f"{argument} has shape {list(table.shape)}, the head needs {list(shape)}")
    assert embed_VH is not None
    assert lm_head_VH is not None
    drafter = Drafter(config)
    own = {name: tensor for name, tensor in tensors.items() if name in drafter.trainable()}
    if config.ptd_token_id is not None and "mask_embedding" not in own:
        own["mask_embedding"] = embed_VH[config.ptd_token_id]
    if "mask_hidden" in own:
        own["mask_hidden"] = own["mask_hidden"].reshape(1, 1, -1)
    drafter.load_state_dict(own)
    if "d2t" in tensors:
        drafter.target_ids = target_ids(tensors["d2t"])
        lm_head_VH = lm_head_VH if own_lm_head else lm_head_VH[drafter.target_ids.to(lm_head_VH.device)]
    drafter = drafter.to(device=device, dtype=dtype).eval()
    drafter.share_target(embed_VH.to(device=device, dtype=dtype), lm_head_VH.to(device=device, dtype=dtype))
    return drafter


def check_tables(config: DrafterConfig, tensors: dict[str, Tensor], source: str | Path) -> None:
    """Raise HeadError when `d2t` or `t2d` contradict each other, or point outside the target's vocabulary."""
    problems = []
    ids = torch.arange(config.draft_vocab_size)
    if "d2t" in tensors:
        ids = target_ids(tensors["d2t"].cpu())
        num_different = len(set(ids.tolist()))
        outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero()[:, 0]
        if len(outside):
            first = int(outside[0])
            problems.append(
                f"d2t[{first}] = {int(tensors['d2t'][first])} leads to target token {int(ids[first])}, outside "
                f"0..{config.vocab_size - 1} ({len(outside)} such entries; d2t holds offsets: target = i + d2t[i])"
            )
        elif num_different < len(ids):
            problems.append(f"d2t leads {len(ids)} draft tokens to only {num_different} different target tokens")
    if "t2d" in tensors and not problems:
        marked = tensors["t2d"].cpu().bool()
        if int(marked.sum()) != config.draft_vocab_size:
            problems.append(
                f"t2d marks {int(marked.sum())} target tokens, draft_vocab_size is {config.draft_vocab_size}"
            )
        elif not bool(marked[ids].all()):
            problems.append(f"t2d does not mark {int((~marked[ids]).sum())} of the target tokens that d2t leads to")
    if problems:
        raise HeadError(f"head {source}: " + "; ".join(problems))


def _write(path: Path, content: bytes) -> None:
    """Write a file; unlike `Path.write_bytes`, a full disk is reported with the file's name and size."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while writing {len(content)} bytes", str(path)) from error


def _dtype_name(tensor: Tensor) -> str:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
